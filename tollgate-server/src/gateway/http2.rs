//! HTTP/2, by hyper: requests of clients, requests to upstreams, and their bodies.

pub(super) mod body_channel;
pub(super) mod exchange;
mod forward;
pub(crate) mod frames;
pub(super) mod request_body;
pub(super) mod response_body;

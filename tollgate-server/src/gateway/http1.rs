//! HTTP/1: heads and bodies of messages, and the client for upstreams. The server is the lane.

pub(super) mod client;
#[doc(hidden)]
pub(crate) mod fuzzing;
pub(super) mod request;
pub(super) mod request_body;
pub(super) mod response;
pub(super) mod scratch;
pub(super) mod trailers;

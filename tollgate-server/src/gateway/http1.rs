//! HTTP/1: heads and bodies of messages, the server, and the client for upstreams.

pub(super) mod framing;
#[doc(hidden)]
pub(crate) mod fuzzing;
pub(super) mod request;
pub(super) mod request_body;
pub(super) mod response;
pub(super) mod scratch;
pub(super) mod sender;
pub(super) mod server;
pub(super) mod trailers;
mod upgrade;

//! HTTP/1: heads and bodies of messages, the server, and the client for upstreams.

pub(super) mod body;
pub(super) mod framing;
#[doc(hidden)]
pub(crate) mod fuzzing;
pub(super) mod request;
pub(super) mod response;
pub(super) mod sender;
pub(super) mod server;
mod upgrade;

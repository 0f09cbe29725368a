//! The decision service: the limiter asked from outside. A surface translates, it never decides.

mod connections;
pub(crate) mod http;
mod proxy_protocol;

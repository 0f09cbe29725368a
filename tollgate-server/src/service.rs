//! The decision service: the gate asked from outside. A surface translates, it never decides.

mod connections;
pub(crate) mod http;
mod proxy_protocol;

pub(crate) use self::connections::Options;

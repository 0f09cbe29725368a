//! The decision service: the gate asked from outside. A surface translates, it never decides.

mod connections;
pub(crate) mod http;
pub(crate) mod proxy_protocol;

pub(crate) use self::connections::{Options, serve};

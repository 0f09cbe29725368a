//! The decision service: the gate asked from outside. A surface translates, it never decides.

mod connections;
mod cross_site;
pub(crate) mod http;
pub(crate) mod proxy_protocol;

pub(crate) use self::connections::{Options, serve};
pub(crate) use self::cross_site::{Hosts, guard};

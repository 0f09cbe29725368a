//! The decision service: checks over HTTP. It translates requests for the gate and decides nothing itself.

mod connections;
mod cross_site;
pub(crate) mod http;
pub(crate) mod proxy_protocol;

pub(crate) use self::connections::{Options, serve};
pub(crate) use self::cross_site::{Hosts, guard};

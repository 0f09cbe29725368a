//! The decision service: checks over HTTP, gRPC and the Redis protocol. It translates requests for the gate and decides
//! nothing itself.

mod connections;
mod cross_site;
pub(crate) mod envoy;
pub(crate) mod error_body;
pub(crate) mod grpc;
pub(crate) mod http;
pub(crate) mod proto;
pub(crate) mod resp;
pub(crate) mod surfaces;
pub(crate) mod throttle;
pub(crate) mod tokens;
pub(crate) mod xds;

pub(crate) use self::connections::{Options, bind, serve};
pub(crate) use self::cross_site::{Hosts, guard};

//! Requests as a server hands them to a service: parsed, with the address of the connection beside them.

use std::net::{Ipv4Addr, SocketAddr};

use axum::body::Body;
use axum::extract::{ConnectInfo, Request};
use axum::http::HeaderValue;

/// Clients: far more than the processor's nearest cache has room for.
pub(super) const CLIENTS: usize = 10_000;

/// What a browser or a program sends at least, from one of the clients.
pub(super) fn request(number: usize) -> Request {
    let client = number.wrapping_mul(7919) % CLIENTS;
    let mut request = Request::new(Body::empty());
    *request.uri_mut() = "/api/items/42?sort=name".parse().expect("a path");
    let headers = request.headers_mut();
    headers.insert("host", HeaderValue::from_static("api.example.com"));
    headers.insert("user-agent", HeaderValue::from_static("bench/1.0"));
    headers.insert("accept", HeaderValue::from_static("application/json"));
    headers.insert("accept-encoding", HeaderValue::from_static("gzip, br"));
    headers.insert("x-user-id", HeaderValue::try_from(format!("user:{client:06}")).expect("printable"));
    let address = Ipv4Addr::from_bits(0x0a00_0000 + client as u32);
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from((address, 40_000))));
    request
}

//! What axum tells of a request.

use std::net::{IpAddr, SocketAddr};

use axum::extract::{ConnectInfo, MatchedPath};
use http::Extensions;

pub(super) use super::tunnel::Tunnel;

/// The address of the connection's other end.
pub(super) fn peer(extensions: &Extensions) -> Option<IpAddr> {
    let connected = || extensions.get::<ConnectInfo<SocketAddr>>().map(|connected| connected.0.ip());
    super::peer::peer(extensions).or_else(connected)
}

/// The path of the route that serves the request, as it was given to the router: `/users/{id}`.
pub(super) fn route(extensions: &Extensions) -> Option<&str> {
    extensions.get::<MatchedPath>().map(MatchedPath::as_str)
}

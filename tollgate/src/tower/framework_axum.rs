//! Request data from axum.

use std::net::{IpAddr, SocketAddr};

use axum::extract::{ConnectInfo, MatchedPath};
use http::Extensions;

pub(super) use super::tunnel::Tunnel;

/// Returns the address of the peer.
pub(super) fn peer(extensions: &Extensions) -> Option<IpAddr> {
    let connected = || extensions.get::<ConnectInfo<SocketAddr>>().map(|connected| connected.0.ip());
    super::peer::peer(extensions).or_else(connected)
}

/// Returns the path of the matched route, as registered with the router: `/users/{id}`.
pub(super) fn route(extensions: &Extensions) -> Option<&str> {
    extensions.get::<MatchedPath>().map(MatchedPath::as_str)
}

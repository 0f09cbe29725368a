//! Who is at the other end of the connection.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::Extensions;

/// The address of a connection's other end, for a server that has no type of its own for it: put it among the
/// extensions of each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

/// Finds the address among the extensions of a request.
pub(super) type FindPeer = Arc<dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync>;

#[cfg(not(feature = "axum"))]
pub(super) fn find(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<PeerAddress>().map(|peer| peer.0.ip())
}

/// axum's own type too.
#[cfg(feature = "axum")]
pub(super) fn find(extensions: &Extensions) -> Option<IpAddr> {
    let connected = || extensions.get::<axum::extract::ConnectInfo<SocketAddr>>().map(|connected| connected.0);
    extensions.get::<PeerAddress>().map(|peer| peer.0).or_else(connected).map(|peer| peer.ip())
}

//! Who is at the other end of the connection, and which route serves the request, where no server tells.

use std::net::{IpAddr, SocketAddr};

use http::Extensions;

/// The address of a connection's other end, for a server that has no type of its own for it: put it among the
/// extensions of each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

/// The address that was put among the extensions.
pub(super) fn peer(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<PeerAddress>().map(|peer| peer.0.ip())
}

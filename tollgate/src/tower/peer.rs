//! The peer address, for servers without an extension type of their own.

use std::net::{IpAddr, SocketAddr};

use http::Extensions;

/// The peer address of a connection. Insert it into the extensions of each request if your server has no extension type
/// for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

/// Returns the address from the extensions.
pub(super) fn peer(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<PeerAddress>().map(|peer| peer.0.ip())
}

//! The peer address, for servers without an extension type of their own.

use std::net::{IpAddr, SocketAddr};

use http::Extensions;

/// The peer address of a connection. Insert it into the extensions of each request if your server has no extension type
/// for it.
///
/// ```
/// use tollgate::tower::PeerAddress;
///
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(PeerAddress("192.0.2.7:50312".parse()?));
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

/// Returns the address from the extensions.
pub(super) fn peer(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<PeerAddress>().map(|peer| peer.0.ip())
}

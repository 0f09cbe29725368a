//! Connections that speak another protocol than HTTP from some point on, such as WebSocket.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;

use tollgate::Place;

use super::exchange::Held;
use super::workers::Counted;

/// What a connection has for as long as it is there: its upstream, its place among the requests of its key, and its
/// place among all connections.
pub(super) type Keeps = (Held, Option<Place>, Counted);

/// Carries bytes in both directions until both sides have ended.
pub(super) async fn relay(client: OnUpgrade, upstream: OnUpgrade, keeps: Keeps) {
    let (Ok(client), Ok(upstream)) = tokio::join!(client, upstream) else { return };
    // Both ends are closed with it, and neither is to blame.
    _ = copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(upstream)).await;
    drop(keeps);
}

//! Connections that speak another protocol than HTTP from some point on, such as WebSocket.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;

use super::exchange::Held;

/// Carries bytes in both directions until both sides have ended.
pub(super) async fn relay(client: OnUpgrade, upstream: OnUpgrade, held: Held) {
    let (Ok(client), Ok(upstream)) = tokio::join!(client, upstream) else { return };
    // Both ends are closed with it, and neither is to blame.
    _ = copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(upstream)).await;
    drop(held);
}

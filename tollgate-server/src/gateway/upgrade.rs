//! Connections that speak another protocol than HTTP from some point on, such as WebSocket.

use std::io::Result;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf, copy, copy_bidirectional, sink};
use tokio::time::{sleep, timeout};
use tollgate::InFlightPermit;

use super::exchange::Held;
use super::ticks::{Ticks, Wait};
use super::workers::Counted;

/// What a connection has for as long as it is there: its upstream, its place among the requests of its key, and its
/// place among all connections.
pub(super) type Keeps = (Held, Option<InFlightPermit>, Counted);

/// How long both sides may be silent.
pub(super) struct Silence {
    pub(super) ticks: Arc<Ticks>,
    pub(super) longest: Wait,
}

/// How often it is looked whether anybody has said something.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Carries bytes in both directions until both sides have ended, or have been silent for too long.
pub(super) async fn relay(client: OnUpgrade, upstream: OnUpgrade, keeps: Keeps, silence: Silence) {
    let (Ok(client), Ok(upstream)) = tokio::join!(client, upstream) else { return };
    let heard = Arc::new(AtomicU64::new(silence.ticks.now()));
    let listen = |io| Heard { io: TokioIo::new(io), heard: Arc::clone(&heard), ticks: Arc::clone(&silence.ticks) };
    let (mut client, mut upstream) = (listen(client), listen(upstream));
    let silent = async {
        while silence.longest.from(heard.load(Relaxed)) > silence.ticks.now() {
            sleep(LOOK_EVERY).await;
        }
    };
    // Both ends are closed with it, and neither is to blame.
    let copied = tokio::select! {
        copied = copy_bidirectional(&mut client, &mut upstream) => Some(copied),
        () = silent => None,
    };
    let (held, place, _) = &keeps;
    if let Some(Err(_)) = copied
        && place.is_some()
    {
        // The client broke off. The permit is held until the upstream has noticed.
        drop(client);
        let upstream_ends = async {
            upstream.shutdown().await?;
            copy(&mut upstream, &mut sink()).await
        };
        _ = timeout(held.timeout.duration(), upstream_ends).await;
    }
    drop(keeps);
}

/// Notes when something was last heard.
struct Heard {
    io: TokioIo<Upgraded>,
    heard: Arc<AtomicU64>,
    ticks: Arc<Ticks>,
}

impl AsyncRead for Heard {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if read.is_ready() {
            self.heard.store(self.ticks.now(), Relaxed);
        }
        read
    }
}

impl AsyncWrite for Heard {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

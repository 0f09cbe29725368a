//! Connections that were upgraded to another protocol, such as WebSocket.

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

use super::exchange::UpstreamAttempt;
use super::ticks::{Ticks, Wait};
use super::workers::Counted;

/// The resources that a connection holds: its upstream, its permit, and its place in the connection count.
pub(super) type Resources = (UpstreamAttempt, Option<InFlightPermit>, Counted);

/// The idle timeout of both directions.
pub(super) struct IdleTimeout {
    pub(super) ticks: Arc<Ticks>,
    pub(super) max: Wait,
}

/// How often the idle timeout is checked.
const CHECK_EVERY: Duration = Duration::from_millis(500);

/// Relays bytes in both directions until both sides have closed, or the idle timeout has passed.
pub(super) async fn relay(client: OnUpgrade, upstream: OnUpgrade, resources: Resources, idle_timeout: IdleTimeout) {
    let (Ok(client), Ok(upstream)) = tokio::join!(client, upstream) else { return };
    let last_activity = Arc::new(AtomicU64::new(idle_timeout.ticks.now()));
    let track = |io| ActivityTracker {
        io: TokioIo::new(io),
        last_activity: Arc::clone(&last_activity),
        ticks: Arc::clone(&idle_timeout.ticks),
    };
    let (mut client, mut upstream) = (track(client), track(upstream));
    let silent = async {
        while idle_timeout.max.from(last_activity.load(Relaxed)) > idle_timeout.ticks.now() {
            sleep(CHECK_EVERY).await;
        }
    };
    // On a timeout both connections are closed, and neither side is at fault.
    let copied = tokio::select! {
        copied = copy_bidirectional(&mut client, &mut upstream) => Some(copied),
        () = silent => None,
    };
    let (attempt, permit, _) = &resources;
    if let Some(Err(_)) = copied
        && permit.is_some()
    {
        // The client broke off. The permit is held until the upstream has noticed.
        drop(client);
        let upstream_ends = async {
            upstream.shutdown().await?;
            copy(&mut upstream, &mut sink()).await
        };
        _ = timeout(attempt.timeout.duration(), upstream_ends).await;
    }
    drop(resources);
}

/// A stream that records when bytes were last read.
struct ActivityTracker {
    io: TokioIo<Upgraded>,
    last_activity: Arc<AtomicU64>,
    ticks: Arc<Ticks>,
}

impl AsyncRead for ActivityTracker {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if read.is_ready() {
            self.last_activity.store(self.ticks.now(), Relaxed);
        }
        read
    }
}

impl AsyncWrite for ActivityTracker {
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

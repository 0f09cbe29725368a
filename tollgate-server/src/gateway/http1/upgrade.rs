//! Connections that were upgraded to another protocol, such as WebSocket.

use std::io::Result;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf, copy, copy_bidirectional, sink};
use tokio::time::{sleep, timeout};
use tollgate_net::deadline::{Ticks, Wait};
use tollgate_net::stream::Stream;
use tollgate_rules::InFlightPermit;

use crate::gateway::site::UpstreamAttempt;
use crate::gateway::upstream::conn::UpstreamIo;

/// How often the idle timeout is checked.
const CHECK_EVERY: Duration = Duration::from_millis(500);

/// A connection to an upstream that speaks another protocol with a client, and the resources that both hold.
pub(in crate::gateway) struct Tunnel {
    pub(in crate::gateway) upstream: UpstreamIo,
    /// The bytes of the upstream that have arrived.
    pub(super) from_upstream: Bytes,
    /// The bytes of the client that have arrived.
    pub(in crate::gateway) from_client: Bytes,
    pub(in crate::gateway) attempt: Option<UpstreamAttempt>,
    pub(in crate::gateway) permit: Option<InFlightPermit>,
    /// The idle timeout of both directions.
    pub(super) max_idle: Wait,
    pub(in crate::gateway) ticks: Arc<Ticks>,
}

impl Tunnel {
    /// Relays bytes in both directions until both sides have closed, or the idle timeout has passed.
    pub(super) async fn relay(self, client: Stream) {
        let Self { upstream, from_upstream, from_client, attempt, permit, max_idle, ticks } = self;
        let last_activity = Arc::new(AtomicU64::new(ticks.now()));
        let mut client = Side::new(client, from_client, (&last_activity, &ticks));
        let mut upstream = Side::new(upstream, from_upstream, (&last_activity, &ticks));
        let silent = async {
            while max_idle.from(last_activity.load(Relaxed)) > ticks.now() {
                sleep(CHECK_EVERY).await;
            }
        };
        // On a timeout both connections are closed, and neither side is at fault.
        let copied = tokio::select! {
            copied = copy_bidirectional(&mut client, &mut upstream) => Some(copied),
            () = silent => None,
        };
        if let (Some(Err(_)), Some(_), Some(attempt)) = (copied, &permit, &attempt) {
            // The client broke off. The permit is held until the upstream has noticed.
            drop(client);
            let upstream_ends = async {
                upstream.shutdown().await?;
                copy(&mut upstream, &mut sink()).await
            };
            _ = timeout(attempt.timeout.duration(), upstream_ends).await;
        }
    }
}

/// One side of a tunnel. Records when bytes were last read.
struct Side<T> {
    io: T,
    /// Bytes to return before others.
    first: Bytes,
    last_activity: Arc<AtomicU64>,
    ticks: Arc<Ticks>,
}

impl<T> Side<T> {
    fn new(io: T, first: Bytes, (last_activity, ticks): (&Arc<AtomicU64>, &Arc<Ticks>)) -> Self {
        Self { io, first, last_activity: Arc::clone(last_activity), ticks: Arc::clone(ticks) }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Side<T> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<Result<()>> {
        if !self.first.is_empty() {
            let taken = self.first.len().min(buffer.remaining());
            buffer.put_slice(&self.first.split_to(taken));
            return Poll::Ready(Ok(()));
        }
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        if read.is_ready() {
            self.last_activity.store(self.ticks.now(), Relaxed);
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Side<T> {
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

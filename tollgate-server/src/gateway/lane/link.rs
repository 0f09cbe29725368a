//! A connection to an upstream that only the lane uses.

use std::io;
use std::task::{Context, Poll};

use tokio::net::TcpStream;

use super::super::socket;
use super::super::ticks::{Tick, Wait};

/// A connection that takes one request after the other.
pub(in super::super) struct Link {
    tcp: TcpStream,
    /// Something was read since there was nothing to read; as good as that in the beginning, when nothing was asked.
    has_read: bool,
    /// When it is given up if nobody uses it until then.
    stale_at: Tick,
    /// What is left to be sent.
    unsent: Vec<u8>,
    /// What has come of a head.
    pub(super) came: Vec<u8>,
}

impl Link {
    pub(super) fn new(tcp: TcpStream) -> Self {
        Self { tcp, has_read: true, stale_at: Tick::MAX, unsent: Vec::new(), came: Vec::new() }
    }

    /// No request is under way.
    pub(in super::super) fn rests(&mut self, now: Tick, longest: Wait) {
        self.stale_at = longest.from(now);
        self.unsent = Vec::new();
    }

    /// Whether it can take a request. An upstream that has closed it, or said something that nobody asked for, has made
    /// it readable; the runtime has heard of that, and nothing has to be asked of the kernel.
    pub(in super::super) fn is_fresh(&self, now: Tick) -> bool {
        if self.stale_at <= now {
            return false;
        }
        matches!(self.tcp.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Whether a request has been answered on it. The upstream may be closing it just now.
    pub(super) fn is_used(&self) -> bool {
        self.stale_at != Tick::MAX
    }

    /// Sends a request, or as much of it as goes; the rest goes with [`poll_send`](Self::poll_send).
    pub(super) fn send(&mut self, bytes: &[u8], context: &mut Context<'_>) -> io::Result<()> {
        let sent = match socket::poll_write(&self.tcp, bytes, context) {
            Poll::Ready(sent) => sent?,
            Poll::Pending => 0,
        };
        self.unsent.clear();
        self.unsent.extend_from_slice(&bytes[sent..]);
        Ok(())
    }

    /// Ready when all is sent.
    pub(super) fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unsent.is_empty() {
            match socket::poll_write(&self.tcp, &self.unsent, context) {
                Poll::Ready(Ok(sent)) => _ = self.unsent.drain(..sent),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads into the buffer, and says how much; nothing is the end.
    pub(super) fn poll_read(&mut self, buffer: &mut [u8], context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        socket::poll_read(&self.tcp, &mut self.has_read, buffer, context)
    }
}

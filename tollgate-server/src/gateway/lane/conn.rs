//! A connection to an upstream that only the lane uses.

use std::io;
use std::task::{Context, Poll};

use tokio::net::TcpStream;

use super::super::reuse::{Repeatable, ReusePolicy, Usage};
use super::super::socket;
use super::super::ticks::Tick;
use super::super::upstream_slots::UpstreamSlot;

/// An HTTP/1 connection for one request at a time.
pub(in super::super) struct LaneConn {
    tcp: TcpStream,
    /// Whether the last read returned bytes. True at the start, when nothing can have arrived.
    has_read: bool,
    pub(in super::super) usage: Usage,
    /// The unsent rest of a request.
    unsent: Vec<u8>,
    /// The bytes of a partial response head.
    pub(super) head_bytes: Vec<u8>,
    /// Dropped after the socket is closed.
    _slot: UpstreamSlot,
}

impl LaneConn {
    pub(super) fn new((tcp, slot): (TcpStream, UpstreamSlot), usage: Usage) -> Self {
        Self { tcp, has_read: true, usage, unsent: Vec::new(), head_bytes: Vec::new(), _slot: slot }
    }

    /// Marks the connection as idle. Returns whether it can be used again.
    pub(in super::super) fn become_idle(&mut self, now: Tick, policy: &ReusePolicy) -> bool {
        self.usage.note_idle(now, policy);
        self.unsent = Vec::new();
        self.usage.allows_another(now, policy)
    }

    /// Returns whether it can take a request now.
    pub(in super::super) fn can_take_request(&self, now: Tick, policy: &ReusePolicy, repeatable: Repeatable) -> bool {
        // The runtime learns of a close when it next polls for events. A request that must not be lost does not rely on
        // that, nor does one on a connection that has been idle for long enough to be closed.
        let checks_kernel = repeatable == Repeatable::No || self.usage.has_been_idle(now);
        self.usage.allows_another(now, policy)
            && self.is_quiet()
            && (!checks_kernel || socket::is_open_and_quiet(&self.tcp))
    }

    /// Returns whether it should stay in the pool.
    pub(in super::super) fn is_worth_keeping(&self, now: Tick) -> bool {
        !self.usage.is_stale(now) && self.is_quiet()
    }

    /// Returns whether the upstream has neither closed it nor sent unexpected bytes, as far as the runtime knows.
    fn is_quiet(&self) -> bool {
        matches!(self.tcp.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Sends as much of a request as possible. [`poll_send`](Self::poll_send) sends the rest.
    pub(super) fn send(&mut self, bytes: &[u8], context: &mut Context<'_>) -> io::Result<()> {
        let sent = match socket::poll_write(&self.tcp, bytes, context) {
            Poll::Ready(sent) => sent?,
            Poll::Pending => 0,
        };
        self.unsent.clear();
        self.unsent.extend_from_slice(&bytes[sent..]);
        Ok(())
    }

    /// Returns ready once the request is sent.
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

    /// Reads into the buffer. Returns the number of bytes; 0 is the end of the stream.
    pub(super) fn poll_read(&mut self, buffer: &mut [u8], context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        socket::poll_read(&self.tcp, &mut self.has_read, buffer, context)
    }
}

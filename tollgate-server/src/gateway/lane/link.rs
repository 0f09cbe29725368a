//! A connection to an upstream that only the lane uses.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::super::ticks::{Tick, Wait};

/// A connection that takes one request after the other.
pub(in super::super) struct Link {
    tcp: TcpStream,
    /// When it is given up if nobody uses it until then.
    stale_at: Tick,
    /// What is left to be sent.
    unsent: Vec<u8>,
    /// What has come of a head.
    pub(super) came: Vec<u8>,
}

impl Link {
    pub(super) fn new(tcp: TcpStream) -> Self {
        Self { tcp, stale_at: Tick::MAX, unsent: Vec::new(), came: Vec::new() }
    }

    /// No request is under way.
    pub(in super::super) fn rests(&mut self, now: Tick, longest: Wait) {
        self.stale_at = longest.from(now);
    }

    /// Whether it can take a request. An upstream that has closed it, or said something that nobody asked for, has made
    /// it readable; the runtime has heard of that, and nothing has to be asked of the kernel.
    pub(in super::super) fn is_fresh(&self, now: Tick) -> bool {
        if self.stale_at <= now {
            return false;
        }
        let mut context = Context::from_waker(Waker::noop());
        match self.tcp.poll_read_ready(&mut context) {
            Poll::Pending => true,
            // The last answer filled the buffer to its end, and it is not known whether more is there.
            Poll::Ready(Ok(())) => {
                matches!(self.tcp.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            Poll::Ready(Err(_)) => false,
        }
    }

    /// Sends a request, or as much of it as goes; the rest goes with [`poll_send`](Self::poll_send).
    pub(super) fn send(&mut self, bytes: &[u8], context: &mut Context<'_>) -> io::Result<()> {
        let sent = match Pin::new(&mut self.tcp).poll_write(context, bytes) {
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
            match Pin::new(&mut self.tcp).poll_write(context, &self.unsent) {
                Poll::Ready(Ok(sent)) => _ = self.unsent.drain(..sent),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Reads into the buffer, and says how much; nothing is the end.
    pub(super) fn poll_read(&mut self, buffer: &mut [u8], context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut buffer = ReadBuf::new(buffer);
        Pin::new(&mut self.tcp).poll_read(context, &mut buffer).map_ok(|()| buffer.filled().len())
    }
}

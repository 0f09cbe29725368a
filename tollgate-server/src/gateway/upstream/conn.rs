//! A connection to an HTTP/1 upstream.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::reuse::{Repeatable, ReusePolicy, Usage};
use super::slots::UpstreamIo;
use crate::gateway::deadline::Tick;
use crate::gateway::maybe_tls::MaybeTls;
use crate::gateway::socket;

/// The most interim responses to a request. An upstream that sends more keeps a worker busy for nothing.
const MAX_INTERIM: u32 = 32;

/// An HTTP/1 connection for one request at a time.
pub(in crate::gateway) struct Http1Conn {
    io: UpstreamIo,
    /// Whether the last read returned bytes. True at the start, when nothing can have arrived.
    has_read: bool,
    pub(in crate::gateway) usage: Usage,
    /// The unsent rest of a request.
    unsent: Vec<u8>,
    /// Whether all sent bytes have left the buffer of TLS.
    is_flushed: bool,
    /// Whether the upstream accepts no more bytes.
    is_broken: bool,
    /// The bytes of a partial response head.
    pub(in crate::gateway) head_bytes: Vec<u8>,
    /// The interim responses to the current request.
    interim: u32,
}

impl Http1Conn {
    pub(in crate::gateway) fn new(io: UpstreamIo, usage: Usage) -> Self {
        Self {
            io,
            has_read: true,
            usage,
            unsent: Vec::new(),
            is_flushed: true,
            is_broken: false,
            head_bytes: Vec::new(),
            interim: 0,
        }
    }

    /// Returns the connection after an upgrade.
    pub(in crate::gateway) fn into_io(self) -> UpstreamIo {
        self.io
    }

    /// Marks the connection as idle. Returns whether it can be used again.
    pub(in crate::gateway) fn become_idle(&mut self, now: Tick, policy: &ReusePolicy) -> bool {
        self.usage.note_idle(now, policy);
        self.unsent = Vec::new();
        self.interim = 0;
        self.usage.allows_another(now, policy)
    }

    /// Counts an interim response. Returns whether another is accepted.
    pub(in crate::gateway) fn note_interim(&mut self) -> bool {
        self.interim += 1;
        self.interim <= MAX_INTERIM
    }

    /// Returns whether it can take a request now.
    pub(in crate::gateway) fn can_take_request(
        &mut self,
        now: Tick,
        policy: &ReusePolicy,
        repeatable: Repeatable,
    ) -> bool {
        // The runtime learns of a close when it next polls for events. A request that must not be lost does not rely on
        // that, nor does one on a connection that has been idle for long enough to be closed.
        let checks_kernel = repeatable == Repeatable::No || self.usage.has_been_idle(now);
        self.usage.allows_another(now, policy)
            && self.is_quiet()
            && (!checks_kernel || socket::is_open_and_quiet(self.io.stream().tcp()))
    }

    /// Returns whether it should stay in the pool.
    pub(in crate::gateway) fn is_worth_keeping(&mut self, now: Tick) -> bool {
        !self.usage.is_stale(now) && self.is_quiet()
    }

    /// Returns whether the upstream has neither closed it nor sent unexpected bytes, as far as the runtime knows.
    fn is_quiet(&mut self) -> bool {
        match self.io.stream_mut() {
            MaybeTls::Plain(tcp) => {
                matches!(tcp.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            // Messages of TLS itself, such as session tickets, are read here.
            MaybeTls::Tls(tls) => {
                let mut context = Context::from_waker(Waker::noop());
                Pin::new(tls).poll_read(&mut context, &mut ReadBuf::new(&mut [0])).is_pending()
            }
        }
    }

    /// Sends as much of a request as possible. [`poll_send`](Self::poll_send) sends the rest.
    pub(in crate::gateway) fn send(&mut self, bytes: &[u8], context: &mut Context<'_>) -> io::Result<()> {
        let sent = match poll_write(self.io.stream_mut(), bytes, context) {
            Poll::Ready(sent) => sent?,
            Poll::Pending => 0,
        };
        self.is_flushed = !self.io.stream().is_buffered();
        self.unsent.clear();
        self.unsent.extend_from_slice(&bytes[sent..]);
        Ok(())
    }

    /// Sends the next part of a body. Nothing may be left of earlier parts. [`poll_send`](Self::poll_send) reports an
    /// error, after the response of an upstream that did not read the whole body.
    pub(in crate::gateway) fn send_part(&mut self, bytes: &[u8], context: &mut Context<'_>) {
        self.is_broken |= self.send(bytes, context).is_err();
    }

    /// Returns the number of bytes that the upstream has not accepted.
    pub(in crate::gateway) fn unsent_bytes(&self) -> usize {
        self.unsent.len()
    }

    /// Returns whether the request was sent completely.
    pub(in crate::gateway) fn is_sent(&self) -> bool {
        self.unsent.is_empty() && self.is_flushed && !self.is_broken
    }

    /// Returns ready once the request is sent.
    pub(in crate::gateway) fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.is_broken {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        while !self.unsent.is_empty() {
            match poll_write(self.io.stream_mut(), &self.unsent, context) {
                Poll::Ready(Ok(sent)) => _ = self.unsent.drain(..sent),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        if !self.is_flushed {
            ready!(Pin::new(&mut self.io).poll_flush(context))?;
            self.is_flushed = true;
        }
        // An upload that stalled once may go on for long.
        self.unsent = Vec::new();
        Poll::Ready(Ok(()))
    }

    /// Reads into the buffer. Returns the number of bytes; 0 is the end of the stream.
    pub(in crate::gateway) fn poll_read(
        &mut self,
        buffer: &mut [u8],
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        match self.io.stream_mut() {
            MaybeTls::Plain(tcp) => socket::poll_read(tcp, &mut self.has_read, buffer, context),
            MaybeTls::Tls(tls) => {
                let mut buffer = ReadBuf::new(buffer);
                Pin::new(tls).poll_read(context, &mut buffer).map_ok(|()| buffer.filled().len())
            }
        }
    }
}

fn poll_write<T: AsyncWrite + Unpin>(
    stream: &mut MaybeTls<T>,
    bytes: &[u8],
    context: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    match stream {
        MaybeTls::Plain(tcp) => socket::poll_write(tcp, bytes, context),
        MaybeTls::Tls(tls) => Pin::new(tls).poll_write(context, bytes),
    }
}

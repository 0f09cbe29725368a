//! The bytes of a client's connection: guarded on their way in, timed on their way out.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::client::Client;
use super::exchange::{Exchange, Worker};
use super::guard::Guard;
use super::lane::Lane;

/// What a client still sends after its answer is read and thrown away, so that closing does not destroy the answer on
/// its way; up to this much.
const MAX_LINGER_BYTES: usize = 1 << 20;

/// hyper answers a head that is too long with 431 before this is reached.
const MAX_HEADS: usize = 2;

/// A head and a body that are no longer than this are put together before they are written: the kernel takes one
/// piece for less than two.
const SMALL_BYTES: usize = 2048;

/// A byte that no request has.
const NO_REQUEST: u8 = 0;

/// hyper looks again at a head of which some came before only when its end is there.
const END_OF_HEAD: &[u8] = b"\r\n\r\n";

/// With or without TLS.
pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    fn tcp(&mut self) -> &mut TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_mut().0,
        }
    }
}

/// A client's connection as hyper reads and writes it.
pub(super) struct ClientIo {
    stream: Stream,
    /// What is read before anything else: what was read to find out which protocol it is, or the end of what is refused.
    first: Bytes,
    client: Arc<Client>,
    guard: Option<Guard>,
    /// For a client that was refused.
    lane: Option<Box<Lane>>,
    worker: Arc<Worker>,
    /// What is left to be written of an answer that hyper does not know of.
    unsent: Bytes,
    refused: bool,
    at_end: bool,
    lingered: usize,
    is_shut: bool,
}

impl ClientIo {
    pub(super) fn new(stream: Stream, first: Bytes, exchange: &Exchange, guard: Option<Guard>) -> Self {
        Self {
            stream,
            first,
            client: Arc::clone(&exchange.client),
            guard,
            lane: None,
            worker: Arc::clone(&exchange.worker),
            unsent: Bytes::new(),
            refused: false,
            at_end: false,
            lingered: 0,
            is_shut: false,
        }
    }

    /// Whether the next message may be answered before hyper reads it.
    fn is_in_lane(&self) -> bool {
        let is_between = self.guard.as_ref().is_some_and(Guard::is_between);
        is_between && self.first.is_empty() && matches!(self.stream, Stream::Plain(_)) && self.client.is_refused()
    }

    /// Answers the request that was read, if it is plain and refused again.
    fn refuse(&mut self, bytes: &[u8], context: &mut Context<'_>) -> io::Result<bool> {
        let worker = &self.worker;
        let mut lane = self.lane.take().unwrap_or_else(|| Box::new(Lane::new(Arc::clone(worker))));
        let rest =
            lane.refusal(bytes, &self.client).map(|answer| match Pin::new(&mut *self).poll_write(context, answer) {
                Poll::Ready(written) => written.map(|written| answer[written..].to_vec()),
                Poll::Pending => Ok(answer.to_vec()),
            });
        self.lane = Some(lane);
        let is_refused = rest.is_some();
        self.unsent = Bytes::from(rest.transpose()?.unwrap_or_default());
        Ok(is_refused)
    }

    fn send_unsent(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unsent.is_empty() {
            let rest = self.unsent.clone();
            let written = ready!(Pin::new(&mut *self).poll_write(context, &rest))?;
            self.unsent.advance(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Looks at what was read, and takes away what is ambiguous.
    fn look(&mut self, buffer: &mut ReadBuf<'_>, before: usize) {
        let Some(guard) = &mut self.guard else { return };
        if self.client.is_upgraded() {
            guard.pass();
            self.guard = None;
            return;
        }
        if let Err((ambiguity, good)) = guard.look(&buffer.filled()[before..], MAX_HEADS * self.client.max_head) {
            self.client.note_ambiguity(ambiguity);
            self.refused = true;
            // There is room for it: at least one byte was read that is not good.
            buffer.set_filled(before + good);
            buffer.put_slice(&[NO_REQUEST]);
            self.first = Bytes::from_static(if guard.refused_head() { END_OF_HEAD } else { b"" });
        }
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.refused {
            let taken = this.first.len().min(buffer.remaining());
            buffer.put_slice(&this.first.split_to(taken));
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        loop {
            ready!(this.send_unsent(context))?;
            let is_in_lane = this.is_in_lane();
            if this.first.is_empty() {
                ready!(match &mut this.stream {
                    Stream::Plain(tcp) => Pin::new(tcp).poll_read(context, buffer),
                    Stream::Tls(tls) => Pin::new(tls).poll_read(context, buffer),
                })?;
            } else {
                let taken = this.first.len().min(buffer.remaining());
                buffer.put_slice(&this.first[..taken]);
                this.first.advance(taken);
            }
            if buffer.filled().len() == before {
                this.at_end = true;
                return Poll::Ready(Ok(()));
            }
            this.client.bytes_came();
            this.look(buffer, before);
            // The guard is between two messages again: this was one, without a body.
            if !(is_in_lane && this.is_in_lane() && this.refuse(&buffer.filled()[before..], context)?) {
                return Poll::Ready(Ok(()));
            }
            buffer.set_filled(before);
        }
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let written = match &mut this.stream {
            Stream::Plain(tcp) => Pin::new(tcp).poll_write(context, bytes),
            Stream::Tls(tls) => Pin::new(tls).poll_write(context, bytes),
        };
        this.client.wrote(written.is_ready());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let length: usize = slices.iter().map(|slice| slice.len()).sum();
        if length <= SMALL_BYTES && slices.len() > 1 {
            let (mut whole, mut end) = ([0; SMALL_BYTES], 0);
            for slice in slices {
                whole[end..end + slice.len()].copy_from_slice(slice);
                end += slice.len();
            }
            return Pin::new(this).poll_write(context, &whole[..end]);
        }
        let written = match &mut this.stream {
            Stream::Plain(tcp) => Pin::new(tcp).poll_write_vectored(context, slices),
            Stream::Tls(tls) => Pin::new(tls).poll_write_vectored(context, slices),
        };
        this.client.wrote(written.is_ready());
        written
    }

    fn is_write_vectored(&self) -> bool {
        match &self.stream {
            Stream::Plain(tcp) => tcp.is_write_vectored(),
            Stream::Tls(tls) => tls.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let flushed = match &mut this.stream {
            // There is nothing between us and the kernel.
            Stream::Plain(_) => return Poll::Ready(Ok(())),
            Stream::Tls(tls) => Pin::new(tls).poll_flush(context),
        };
        this.client.wrote(flushed.is_ready());
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        ready!(this.send_unsent(context))?;
        if !this.is_shut {
            ready!(match &mut this.stream {
                Stream::Plain(tcp) => Pin::new(tcp).poll_shutdown(context),
                Stream::Tls(tls) => Pin::new(tls).poll_shutdown(context),
            })?;
            this.is_shut = true;
            this.client.lingers();
        }
        if this.at_end {
            return Poll::Ready(Ok(()));
        }
        let mut scratch = [0; 4096];
        while this.lingered < MAX_LINGER_BYTES {
            let mut buffer = ReadBuf::new(&mut scratch);
            // Whatever ends it, the answer is out by then or lost anyway.
            if ready!(Pin::new(this.stream.tcp()).poll_read(context, &mut buffer)).is_err() {
                break;
            }
            match buffer.filled().len() {
                0 => break,
                read => this.lingered += read,
            }
        }
        Poll::Ready(Ok(()))
    }
}

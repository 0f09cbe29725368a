//! The byte stream of a client connection. For HTTP/2, frames are counted on reads, and deadlines are set on writes.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

use super::client::Client;
use super::http2::frames::{Frames, GoawayTrigger, Misuse};
use super::maybe_tls::MaybeTls;

/// The maximum number of bytes that are read and discarded after the last response. Without that, closing could destroy
/// the response before the client has read it.
const MAX_LINGER_BYTES: usize = 1 << 20;

/// The maximum length of a head and body that are copied together before they are written: one write of one buffer is
/// cheaper.
const SMALL_BYTES: usize = 2048;

/// A client's connection, with or without TLS.
pub(super) type Stream = MaybeTls<TlsStream<TcpStream>>;

impl Stream {
    fn tcp(&mut self) -> &mut TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_mut().0,
        }
    }

    /// Closes the connection in such a way that the last response arrives: further bytes of the client are read and
    /// discarded.
    pub(super) async fn end(&mut self) -> io::Result<()> {
        self.shutdown().await?;
        let mut scratch = [0; 1024];
        let mut lingered = 0;
        while lingered < MAX_LINGER_BYTES {
            match self.tcp().read(&mut scratch).await? {
                0 => break,
                read => lingered += read,
            }
        }
        Ok(())
    }
}

/// A connection of HTTP/2 as hyper reads and writes it.
pub(super) struct ClientIo {
    stream: Stream,
    /// Bytes that were read during protocol detection.
    first: Bytes,
    client: Arc<Client>,
    frames: Frames,
    /// The bytes that are returned once the connection has to end.
    goaway_trigger: Option<GoawayTrigger>,
    at_end: bool,
    lingered: usize,
    is_shut: bool,
}

impl ClientIo {
    pub(super) fn new(stream: Stream, first: Bytes, client: Arc<Client>) -> Self {
        let frames = Frames::new(client.now());
        Self { stream, first, client, frames, goaway_trigger: None, at_end: false, lingered: 0, is_shut: false }
    }

    /// Counts HTTP/2 frames that were read. If the connection has to end, replaces the bytes after them.
    fn track_frames(&mut self, buffer: &mut ReadBuf<'_>, before: usize) {
        if let Err(good) = self.frames.received(&buffer.filled()[before..], self.client.now()) {
            buffer.set_filled(before + good);
            self.end_for(Misuse::CheapFrames);
            self.goaway_trigger(buffer);
        }
    }

    fn end_for(&mut self, misuse: Misuse) {
        self.client.note_closed(misuse);
        self.goaway_trigger = Some(GoawayTrigger::default());
    }

    fn goaway_trigger(&mut self, buffer: &mut ReadBuf<'_>) {
        let Some(goaway_trigger) = &mut self.goaway_trigger else { return };
        while buffer.remaining() > 0
            && let Some(byte) = goaway_trigger.next_byte()
        {
            buffer.put_slice(&[byte]);
        }
    }

    /// Waits until it is this connection's turn, and starts closing it after too many resets.
    fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.frames.ends_turn() {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.goaway_trigger.is_none() && self.frames.is_between_frames() && self.client.resets_too_much() {
            self.end_for(Misuse::PrematureResets);
        }
        Poll::Ready(())
    }
}

impl AsyncRead for ClientIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        ready!(this.poll_turn(context));
        if this.goaway_trigger.is_some() {
            this.goaway_trigger(buffer);
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        if !this.first.is_empty() {
            let taken = this.first.len().min(buffer.remaining());
            buffer.put_slice(&this.first[..taken]);
            this.first.advance(taken);
            if this.first.is_empty() {
                // Otherwise the used buffer would be kept with the connection.
                this.first = Bytes::new();
            }
        } else {
            ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
        }
        if buffer.filled().len() == before {
            this.at_end = true;
            return Poll::Ready(Ok(()));
        }
        this.track_frames(buffer, before);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientIo {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let written = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.client.wrote(written.is_ready());
        if let Poll::Ready(Ok(written)) = &written {
            this.frames.sent(&bytes[..*written]);
        }
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
        let written = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.client.wrote(written.is_ready());
        if let Poll::Ready(Ok(written)) = &written {
            let mut left = *written;
            for slice in slices {
                let taken = left.min(slice.len());
                this.frames.sent(&slice[..taken]);
                left -= taken;
            }
        }
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.stream.is_buffered() {
            return Poll::Ready(Ok(()));
        }
        let flushed = Pin::new(&mut this.stream).poll_flush(context);
        this.client.wrote(flushed.is_ready());
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !this.is_shut {
            ready!(Pin::new(&mut this.stream).poll_shutdown(context))?;
            this.is_shut = true;
            this.client.start_linger();
        }
        if this.at_end {
            return Poll::Ready(Ok(()));
        }
        let mut scratch = [0; 4096];
        while this.lingered < MAX_LINGER_BYTES {
            let mut buffer = ReadBuf::new(&mut scratch);
            // On any error, the response has arrived or is lost.
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

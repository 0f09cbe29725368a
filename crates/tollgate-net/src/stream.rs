//! A connection with or without TLS. Sockets are read and written without the C library.
//!
//! In the C library these calls are cancellation points, which cost extra work before and after each call in
//! multi-threaded processes. For a refusal that is a considerable part of its cost.

use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::{client, server};

/// The maximum size of a read. A longer head is collected in a buffer of its own.
pub const INPUT_BYTES: usize = 64 << 10;

/// The maximum number of bytes that are read and discarded after the last response. Without that, closing could destroy
/// the response before the client has read it.
pub const MAX_LINGER_BYTES: usize = 1 << 20;

/// How long a client may continue to send after its last response.
pub const LINGER: Duration = Duration::from_secs(2);

/// The maximum number of bytes that TLS buffers for a peer that does not read: the default of rustls.
pub const MAX_TLS_BYTES: usize = 64 << 10;

/// A TCP connection, or a TLS connection of either side.
pub enum MaybeTls<T> {
    /// Without TLS.
    Plain(TcpStream),
    /// With TLS.
    Tls(Box<T>),
}

impl<T> MaybeTls<T> {
    /// Returns whether writes may be buffered in this process.
    #[inline]
    pub fn is_buffered(&self) -> bool {
        matches!(self, Self::Tls(_))
    }

    /// Returns the socket of a connection without TLS.
    #[inline]
    pub fn plain(&self) -> Option<&TcpStream> {
        match self {
            Self::Plain(tcp) => Some(tcp),
            Self::Tls(_) => None,
        }
    }
}

impl<T: AsyncRead + Unpin> MaybeTls<T> {
    /// Reads into the buffer. Returns the number of bytes; 0 is the end of the stream. `has_read` is whether the last
    /// read returned bytes.
    #[inline]
    pub fn poll_receive(
        &mut self,
        has_read: &mut bool,
        buffer: &mut [u8],
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        match self {
            Self::Plain(tcp) => poll_read(tcp, has_read, buffer, context),
            Self::Tls(tls) => {
                let mut buffer = ReadBuf::new(buffer);
                Pin::new(tls).poll_read(context, &mut buffer).map_ok(|()| buffer.filled().len())
            }
        }
    }
}

impl<T: AsyncWrite + Unpin> MaybeTls<T> {
    /// Writes as many bytes of both as possible.
    #[inline]
    pub fn poll_send(&mut self, head: &[u8], body: &[u8], context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        match (self, body) {
            (Self::Plain(tcp), []) => poll_write(tcp, head, context),
            (Self::Plain(tcp), body) => poll_write_both(tcp, (head, body), context),
            (Self::Tls(tls), []) => Pin::new(tls).poll_write(context, head),
            (Self::Tls(tls), body) => {
                Pin::new(tls).poll_write_vectored(context, &[IoSlice::new(head), IoSlice::new(body)])
            }
        }
    }
}

impl MaybeTls<client::TlsStream<TcpStream>> {
    /// Returns whether the kernel has seen neither a close nor any bytes from the other side.
    #[inline]
    pub fn is_open_and_quiet(&self) -> bool {
        let tcp = match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_ref().0,
        };
        let peeked = retry_on_intr(|| recv(tcp, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT));
        matches!(peeked, Err(Errno::AGAIN))
    }
}

/// A client's connection, with or without TLS.
pub type Stream = MaybeTls<server::TlsStream<TcpStream>>;

impl Stream {
    /// Returns whether bytes that were written are still buffered in this process.
    #[inline]
    pub fn holds_bytes(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(tls) => tls.get_ref().1.wants_write(),
        }
    }

    /// Returns the socket.
    #[inline]
    pub fn tcp(&mut self) -> &mut TcpStream {
        match self {
            Self::Plain(tcp) => tcp,
            Self::Tls(tls) => tls.get_mut().0,
        }
    }

    /// Makes the client see a reset in place of the end of the connection, which would end its response. TLS has an end of
    /// its own.
    pub fn reset_at_close(&mut self) {
        if let Self::Plain(tcp) = self {
            // If it fails, the connection is closed already.
            _ = set_socket_linger(&*tcp, Some(Duration::ZERO));
        }
    }

    /// Closes the connection in such a way that the last response arrives: further bytes of the client are read and
    /// discarded.
    pub async fn end(&mut self) -> io::Result<()> {
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

impl<T: AsyncRead + Unpin> AsyncRead for MaybeTls<T> {
    #[inline]
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_read(context, buffer),
            Self::Tls(tls) => Pin::new(tls).poll_read(context, buffer),
        }
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for MaybeTls<T> {
    #[inline]
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_write(context, bytes),
            Self::Tls(tls) => Pin::new(tls).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match (self.get_mut(), slices) {
            // The single-buffer system call is cheaper.
            (Self::Plain(tcp), [one]) => Pin::new(tcp).poll_write(context, one),
            (Self::Plain(tcp), several) => Pin::new(tcp).poll_write_vectored(context, several),
            (Self::Tls(tls), several) => Pin::new(tls).poll_write_vectored(context, several),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(tcp) => tcp.is_write_vectored(),
            Self::Tls(tls) => tls.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            // Nothing is buffered.
            Self::Plain(_) => Poll::Ready(Ok(())),
            Self::Tls(tls) => Pin::new(tls).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(tcp) => Pin::new(tcp).poll_shutdown(context),
            Self::Tls(tls) => Pin::new(tls).poll_shutdown(context),
        }
    }
}

/// Reads into the buffer. Returns the number of bytes; 0 is the end of the stream.
///
/// `has_read` is whether the last read returned bytes. Then there is probably nothing to read now, or other connections
/// should get their turn, so readiness is checked first. Otherwise the task was probably woken because there is
/// something to read.
#[inline]
fn poll_read(
    tcp: &TcpStream,
    has_read: &mut bool,
    buffer: &mut [u8],
    context: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    if std::mem::take(has_read) {
        ready!(tcp.poll_read_ready(context))?;
    }
    let room = buffer.len();
    let recv = || recv(tcp, &mut *buffer, RecvFlags::empty()).map(|(read, _)| read);
    let read = ready!(poll(tcp, Interest::READABLE, room, context, recv));
    *has_read = true;
    Poll::Ready(read)
}

/// Writes as many bytes as possible.
#[inline]
fn poll_write(tcp: &TcpStream, bytes: &[u8], context: &mut Context<'_>) -> Poll<io::Result<usize>> {
    // A closed connection is an error, not a signal: Rust programs ignore `SIGPIPE`.
    poll(tcp, Interest::WRITABLE, bytes.len(), context, || send(tcp, bytes, SendFlags::empty()))
}

/// Writes as many bytes of both as possible.
fn poll_write_both(
    tcp: &TcpStream,
    (head, body): (&[u8], &[u8]),
    context: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    let slices = [IoSlice::new(head), IoSlice::new(body)];
    poll(tcp, Interest::WRITABLE, head.len() + body.len(), context, || rustix::io::writev(tcp, &slices))
}

/// Calls `call`, which transfers up to `most` bytes. Readiness is not checked first, since the socket is usually ready.
fn poll(
    tcp: &TcpStream,
    interest: Interest,
    most: usize,
    context: &mut Context<'_>,
    mut call: impl FnMut() -> rustix::io::Result<usize>,
) -> Poll<io::Result<usize>> {
    loop {
        let mut moved = None;
        let tried = tcp.try_io(interest, || {
            let bytes = retry_on_intr(&mut call)?;
            moved = Some(bytes);
            // A partial transfer means that the next call would block, so readiness is cleared.
            if 0 < bytes && bytes < most { Err(ErrorKind::WouldBlock.into()) } else { Ok(()) }
        });
        match (moved, tried) {
            (Some(bytes), _) => return Poll::Ready(Ok(bytes)),
            (None, Err(error)) if error.kind() != ErrorKind::WouldBlock => return Poll::Ready(Err(error)),
            (None, _) => {}
        }
        if interest.is_readable() {
            ready!(tcp.poll_read_ready(context))?;
        } else {
            ready!(tcp.poll_write_ready(context))?;
        }
    }
}

/// The first byte of a TLS handshake. No HTTP request starts with it.
const TLS_HANDSHAKE: u8 = 0x16;

/// Returns whether these are the first bytes of a TLS handshake.
#[inline]
pub fn is_tls_hello(first: &[u8]) -> bool {
    first.first() == Some(&TLS_HANDSHAKE)
}

//! A TLS connection that always ends with `close_notify`.
//!
//! Without it, a client cannot tell the end of the connection from bytes that an attacker held back, and reports an
//! error. A connection that a deadline ends is dropped in the middle, so the attempt is made there.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::server::TlsStream;

/// The stream of a TLS connection.
pub(super) struct CloseNotify {
    tls: TlsStream<TcpStream>,
    is_shut: bool,
}

impl CloseNotify {
    pub(super) fn new(tls: TlsStream<TcpStream>) -> Self {
        Self { tls, is_shut: false }
    }
}

impl Drop for CloseNotify {
    fn drop(&mut self) {
        if !self.is_shut {
            // One attempt: if the socket is full, the client does not read anyway.
            _ = Pin::new(&mut self.tls).poll_shutdown(&mut Context::from_waker(Waker::noop()));
        }
    }
}

impl AsyncRead for CloseNotify {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_read(context, buffer)
    }
}

impl AsyncWrite for CloseNotify {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tls).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tls).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.tls.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.tls).poll_shutdown(context);
        self.is_shut |= shut.is_ready();
        shut
    }
}

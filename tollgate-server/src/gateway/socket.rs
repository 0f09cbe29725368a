//! Reads from and writes to sockets without the C library.
//!
//! In the C library these calls are cancellation points, which cost extra work before and after each call in
//! multi-threaded processes. For a refusal that is a considerable part of its cost.

use std::io::{self, ErrorKind, IoSlice};
use std::task::{Context, Poll, ready};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// The maximum size of a read. A longer head is collected in a buffer of its own.
pub(super) const INPUT_BYTES: usize = 64 << 10;

/// Reads into the buffer. Returns the number of bytes; 0 is the end of the stream.
///
/// `has_read` is whether the last read returned bytes. Then there is probably nothing to read now, or other connections
/// should get their turn, so readiness is checked first. Otherwise the task was probably woken because there is
/// something to read.
pub(super) fn poll_read(
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

/// Returns whether the kernel has seen neither a close nor any bytes from the other side.
pub(super) fn is_open_and_quiet(tcp: &TcpStream) -> bool {
    let peeked = retry_on_intr(|| recv(tcp, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT));
    matches!(peeked, Err(Errno::AGAIN))
}

/// Writes as many bytes as possible.
pub(super) fn poll_write(tcp: &TcpStream, bytes: &[u8], context: &mut Context<'_>) -> Poll<io::Result<usize>> {
    // A closed connection is an error, not a signal: Rust programs ignore `SIGPIPE`.
    poll(tcp, Interest::WRITABLE, bytes.len(), context, || send(tcp, bytes, SendFlags::empty()))
}

/// Writes as many bytes of both as possible.
pub(super) fn poll_write_both(
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

//! Reads and writes of a socket without the C library.
//!
//! There each of them is a point at which a thread could be cancelled, and in a process of several threads it has to say
//! so before and after the call. Nobody cancels threads here, but to a refusal that is a good part of its cost.

use std::io::{self, ErrorKind, IoSlice};
use std::task::{Context, Poll, ready};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{RecvFlags, SendFlags, recv, send};
use tokio::io::Interest;
use tokio::net::TcpStream;

/// Reads into the buffer, and says how much; nothing is the end.
///
/// `has_read` is whether something was read since there was nothing to read. Then there probably is nothing now, or there
/// always is, and others get their turn; who found nothing last time was probably woken because there is something.
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

/// Whether the other side has neither closed the connection nor sent anything, as the kernel knows it.
pub(super) fn is_open_and_quiet(tcp: &TcpStream) -> bool {
    let peeked = retry_on_intr(|| recv(tcp, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT));
    matches!(peeked, Err(Errno::AGAIN))
}

/// Writes as much as goes.
pub(super) fn poll_write(tcp: &TcpStream, bytes: &[u8], context: &mut Context<'_>) -> Poll<io::Result<usize>> {
    // A client that has gone is an error and no signal: those of pipes are ignored in every program of Rust's.
    poll(tcp, Interest::WRITABLE, bytes.len(), context, || send(tcp, bytes, SendFlags::empty()))
}

/// Writes as much as goes of both.
pub(super) fn poll_write_both(
    tcp: &TcpStream,
    (head, body): (&[u8], &[u8]),
    context: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    let slices = [IoSlice::new(head), IoSlice::new(body)];
    poll(tcp, Interest::WRITABLE, head.len() + body.len(), context, || rustix::io::writev(tcp, &slices))
}

/// Does what moves up to `most` bytes, once the socket is ready for it. Nearly always it is, so it is not asked first.
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
            // Less than could be is all that could be: the next try would be in vain until the kernel says otherwise.
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

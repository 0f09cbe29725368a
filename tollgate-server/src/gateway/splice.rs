//! Moves long bodies from socket to socket inside the kernel, without a copy into this process and back.
//!
//! That takes a pipe between the two sockets. A worker has one for all its connections, so nothing may stay in it: what
//! the receiver does not accept at once is taken out and buffered like any other bytes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::task::{Context, Poll, ready};

use rustix::io::retry_on_intr;
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};
use tokio::io::Interest;
use tokio::net::TcpStream;
use tollgate_net::stream::INPUT_BYTES;

/// The shortest rest of a body that is moved. A shorter one is cheaper to copy.
pub(super) const MIN_BYTES: u64 = 32 << 10;

/// The most bytes that are moved at once: as many as are buffered for a receiver that does not read.
const MAX_BYTES: usize = INPUT_BYTES;

/// The size of a pipe. It has a slot for each page, and a packet takes a slot even if it is shorter: 64 slots have room for
/// `MAX_BYTES` in packets of Ethernet's size.
const PIPE_BYTES: usize = 256 << 10;

/// The pipe of a worker.
#[derive(Default)]
pub(super) enum WorkerPipe {
    /// It is opened for the next long body.
    #[default]
    Closed,
    Open(Pipe),
    /// The system does not allow to move bytes.
    Refused,
}

/// A pipe, which is empty between two moves.
pub(super) struct Pipe {
    reader: OwnedFd,
    writer: OwnedFd,
}

impl WorkerPipe {
    /// Returns the pipe, if there is a free descriptor for it and the system allows to move bytes.
    pub(super) fn open(&mut self) -> Option<&Pipe> {
        if let Self::Closed = self
            && let Ok(pipe) = Pipe::new()
        {
            *self = Self::Open(pipe);
        }
        match self {
            Self::Open(pipe) => Some(pipe),
            Self::Closed | Self::Refused => None,
        }
    }
}

/// Returns whether the system does not allow to move bytes, such as in a container without this system call. A socket
/// has other errors.
pub(super) fn is_refused(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported | io::ErrorKind::InvalidInput)
}

impl Pipe {
    fn new() -> io::Result<Self> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // A user with many pipes may not enlarge another one. It works nevertheless, in smaller steps.
        _ = fcntl_setpipe_size(&writer, PIPE_BYTES);
        Ok(Self { reader, writer })
    }

    /// Moves up to `left` bytes of a socket into the pipe. Returns their number; 0 is the end of the stream.
    pub(super) fn poll_fill(&self, from: &TcpStream, left: u64, context: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let most = usize::try_from(left).map_or(MAX_BYTES, |left| left.min(MAX_BYTES));
        loop {
            ready!(from.poll_read_ready(context))?;
            match from.try_io(Interest::READABLE, || transfer(from, &self.writer, most)) {
                // The pipe is empty, so it is the socket that has nothing.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                moved => return Poll::Ready(moved),
            }
        }
    }

    /// Moves bytes from the pipe to a socket, as many as it accepts at once. Returns how many of `bytes` stay in the pipe.
    pub(super) fn empty_into(&self, to: &TcpStream, bytes: usize) -> io::Result<usize> {
        let mut left = bytes;
        while left > 0 {
            match to.try_io(Interest::WRITABLE, || transfer(&self.reader, to, left)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(moved) => left -= moved,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        Ok(left)
    }

    /// Takes bytes out of the pipe.
    pub(super) fn take(&self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::read(&self.reader, &mut *buffer))?)
    }
}

fn transfer(from: impl AsFd, to: impl AsFd, most: usize) -> io::Result<usize> {
    let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
    Ok(retry_on_intr(|| splice(&from, None, &to, None, most, flags))?)
}

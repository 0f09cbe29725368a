//! Messages over a control socket, and descriptors beside them.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The longest message: what limits have learned, for as many as may learn.
const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// The longest wait for the next part of a message.
const DEADLINE: Duration = Duration::from_secs(10);

/// A connection to a control socket. It blocks the thread.
pub(super) struct Channel(UnixStream);

impl Channel {
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.set_write_timeout(Some(DEADLINE))?;
        Ok(Self(stream))
    }

    /// Waits this long for the next messages; without a limit for `None`.
    pub(super) fn wait_for(&self, time: Option<Duration>) -> io::Result<()> {
        self.0.set_read_timeout(time)
    }

    pub(super) fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.send_bytes(&serde_json::to_vec(message)?)
    }

    pub(super) fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        Ok(serde_json::from_slice(&self.receive_bytes()?)?)
    }

    pub(super) fn send_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        self.0.write_all(&length.to_le_bytes())?;
        self.0.write_all(bytes)
    }

    pub(super) fn receive_bytes(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_MESSAGE_BYTES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is too long"));
        }
        let mut bytes = Vec::new();
        (&mut self.0).take(length as u64).read_to_end(&mut bytes)?;
        if bytes.len() < length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(bytes)
    }

    /// Sends a descriptor, beside one byte: the kernel sends none without data.
    pub(super) fn send_descriptor(&self, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor];
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        rustix::net::sendmsg(&self.0, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    pub(super) fn receive_descriptor(&self) -> io::Result<OwnedFd> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [0];
        let mut buffers = [IoSliceMut::new(&mut byte)];
        rustix::net::recvmsg(&self.0, &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        let mut descriptors = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let descriptor = descriptors.next().and_then(|mut descriptors| descriptors.next());
        descriptor.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Waits until the other side closes the connection.
    pub(super) fn await_end(&mut self) {
        if self.wait_for(None).is_ok() {
            _ = io::copy(&mut self.0, &mut io::sink());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn messages_and_descriptors_keep_their_order() {
        let (one, other) = UnixStream::pair().expect("sockets can be made");
        let (mut one, mut other) = (Channel::new(one).expect("it is open"), Channel::new(other).expect("it is open"));
        let sockets = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port is free"));
        one.send(&"first").expect("there is room");
        for socket in &sockets {
            one.send_descriptor(socket.as_fd()).expect("there is room");
        }
        one.send_bytes(b"last").expect("there is room");
        assert_eq!(other.receive::<String>().expect("it was sent"), "first");
        for socket in &sockets {
            let received = TcpListener::from(other.receive_descriptor().expect("it was sent"));
            let address = |socket: &TcpListener| socket.local_addr().expect("it is bound");
            assert_eq!(address(&received), address(socket));
        }
        assert_eq!(other.receive_bytes().expect("it was sent"), b"last");
        drop(one);
        assert!(other.receive_descriptor().is_err() && other.receive_bytes().is_err());
    }

    #[test]
    fn a_message_that_is_too_long_is_refused() {
        let (mut one, other) = UnixStream::pair().expect("sockets can be made");
        let mut other = Channel::new(other).expect("it is open");
        one.write_all(&u32::MAX.to_le_bytes()).expect("there is room");
        assert_eq!(other.receive_bytes().map_err(|error| error.kind()), Err(io::ErrorKind::InvalidData));
    }
}

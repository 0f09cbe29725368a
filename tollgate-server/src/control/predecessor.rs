//! The running server that a new process takes over from, as the new process sees it.

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use tollgate_net::passed_sockets::{PassedSocket, PassedSockets};
use tollgate_telemetry::notice;

use super::channel::Channel;
use super::client::Purpose;
use super::{ControlError, Offer, Ready, Reply, Request, client};

/// The longest wait for the old process to stop accepting connections and writing its files.
const RELEASE_DEADLINE: Duration = Duration::from_secs(30);

/// The server that this process takes over from.
pub(crate) struct Predecessor {
    channel: Channel,
    process: Option<u32>,
}

/// The state of the server before.
pub(crate) struct Inheritance {
    /// A stream of its counts, if they are in memory.
    pub(crate) counts: Option<UnixStream>,
    /// What its limits have learned, if the counts are in memory.
    pub(crate) learned: Vec<u8>,
    /// Its bans, if the counts are in memory.
    pub(crate) bans: Vec<u8>,
}

impl Predecessor {
    /// Returns the server on a control socket with its state, and adds its sockets to `passed`. Returns `None` if no
    /// server listens there. Waits for a server that stops.
    pub(crate) async fn find(path: &Path, passed: &PassedSockets) -> Result<Option<(Self, Inheritance)>, ControlError> {
        let (mut channel, process) = match client::connect(path, Purpose::TakeOver).await {
            Ok(connected) => connected,
            Err(ControlError::Connect { source, .. })
                if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let broken = |source| ControlError::Broken { path: path.to_owned(), source };
        let reply = channel.send(&Request::HandOver).and_then(|()| channel.receive());
        match reply.map_err(broken)? {
            Reply::Offer(offer) => {
                let (sockets, inheritance) = receive(&mut channel, offer).map_err(broken)?;
                passed.add(sockets);
                Ok(Some((Self { channel, process }, inheritance)))
            }
            Reply::Stopping => {
                notice::log("waiting for the server that stops");
                channel.await_end();
                Ok(None)
            }
            Reply::Failed(problem) => Err(ControlError::Refused { path: path.to_owned(), problem }),
            Reply::Done(_) => Err(broken(io::ErrorKind::InvalidData.into())),
        }
    }

    /// Reports that this process serves. Returns when the other one has stopped accepting connections and writing its
    /// files, with the reservations that it has released. This process serves in any case, so a failure is only logged.
    pub(crate) fn take_over(mut self, passed: &PassedSockets) -> Vec<u8> {
        passed.close_unused();
        let ready = Ready { used: passed.used() };
        let released = self
            .channel
            .wait_for(Some(RELEASE_DEADLINE))
            .and_then(|()| self.channel.send(&ready))
            .and_then(|()| self.channel.receive());
        let process = self.process.map_or_else(String::new, |id| format!(" {id}"));
        match released {
            Ok(Reply::Done(_)) => {
                notice::log(format_args!("took over from process{process}, which finishes its requests"));
                // An older version sends none.
                return self.channel.receive_bytes().unwrap_or_default();
            }
            Ok(_) => notice::warn(format_args!("process{process} has not confirmed that this one takes over")),
            Err(error) => notice::warn(format_args!(
                "process{process} has not confirmed that this one takes over: {error}: end it if it still runs"
            )),
        }
        Vec::new()
    }
}

fn receive(channel: &mut Channel, offer: Offer) -> io::Result<(Vec<PassedSocket>, Inheritance)> {
    let mut sockets = Vec::new();
    for offered in offer.sockets {
        let socket = TcpListener::from(channel.receive_descriptor()?);
        sockets.push(PassedSocket::new(socket, offered.owner, offered.listener)?);
    }
    let counts = match offer.has_counts {
        true => Some(UnixStream::from(channel.receive_descriptor()?)),
        false => None,
    };
    let (learned, bans) = (channel.receive_bytes()?, channel.receive_bytes()?);
    Ok((sockets, Inheritance { counts, learned, bans }))
}

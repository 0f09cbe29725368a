//! The hand-over to a new process, as the old process sees it.

use std::io::{self, BufWriter, Write};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, mpsc as events};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tollgate_net::passed_sockets::{PassedSocket, PassedSockets};
use tollgate_rules::Gate;
use tollgate_telemetry::notice;

use super::channel::Channel;
use super::{Offer, OfferedSocket, Ready, Reply};
use crate::bans::Bans;
use crate::gateway::Gateway;
use crate::learning::Learners;
use crate::listeners::Listeners;

/// The longest time that a new process may take to start, with millions of keys and a store that is slow to answer.
const START_DEADLINE: Duration = Duration::from_secs(120);

/// The parts of a server that are handed over.
pub(crate) struct Handover {
    pub(crate) gate: Gate,
    pub(crate) learners: Arc<Learners>,
    pub(crate) bans: Arc<Bans>,
    pub(crate) gateway: Option<Arc<Gateway>>,
    pub(crate) listeners: Arc<Listeners>,
    pub(crate) passed: Arc<PassedSockets>,
    /// Receives the process that has taken over.
    pub(crate) successor: mpsc::Sender<Successor>,
}

/// A process that serves in place of this one.
pub(crate) struct Successor {
    pub(crate) process: Option<u32>,
    /// The addresses whose sockets it uses.
    pub(crate) used: Vec<SocketAddr>,
    /// Sent once this process accepts no more connections, and writes none of the files that both use.
    pub(crate) released: oneshot::Sender<()>,
}

/// Allows one process at a time to take over, and reports it to a restart that waits for it.
#[derive(Default)]
pub(super) struct Turns {
    is_taken: Mutex<()>,
    /// Whether a process has taken over.
    pub(super) are_over: AtomicBool,
    /// Notified when a process has taken over.
    pub(super) restart: Mutex<Option<events::Sender<RestartEvent>>>,
}

/// The result of a new process that this one has started.
pub(super) enum RestartEvent {
    TookOver,
    Ended(io::Result<std::process::ExitStatus>),
}

impl Handover {
    /// Hands over to the process at the other end, unless it ends before it is ready.
    pub(super) fn to(&self, channel: &mut Channel, process: Option<u32>, turns: &Turns) -> io::Result<()> {
        let Ok(_turn) = turns.is_taken.try_lock() else {
            let problem = "another process is taking over: wait until it serves, or end it";
            return channel.send(&Reply::Failed(problem.to_owned()));
        };
        self.offer(channel)?;
        channel.wait_for(Some(START_DEADLINE))?;
        let Ok(Ready { used }) = channel.receive() else {
            let process = process.map_or_else(String::new, |id| format!(" {id}"));
            notice::warn(format_args!("process{process} ended before it could take over: this one continues"));
            return Ok(());
        };
        turns.are_over.store(true, Relaxed);
        let (released, is_released) = oneshot::channel();
        // Without a receiver, this process ends already, and has released everything.
        if self.successor.blocking_send(Successor { process, used, released }).is_ok() {
            _ = is_released.blocking_recv();
        }
        // From now on, the new process settles the open reservations. A failure leaves them with their cost.
        let reservations = self.gate.release_reservations();
        // The new process serves, even if it does not read the reservations.
        let sent = channel.send(&Reply::Done(String::new())).and_then(|()| channel.send_bytes(&reservations));
        if let Some(restart) = &*turns.restart.lock().unwrap_or_else(PoisonError::into_inner) {
            // A restart may have waited long enough already.
            _ = restart.send(RestartEvent::TookOver);
        }
        sent
    }

    fn offer(&self, channel: &mut Channel) -> io::Result<()> {
        let mut sockets = self.passed.of_service_manager()?;
        sockets.extend(self.listeners.sockets()?);
        if let Some(gateway) = &self.gateway {
            sockets.extend(gateway.sockets()?);
        }
        let offered = |one: &PassedSocket| OfferedSocket { owner: one.owner, listener: one.listener.clone() };
        let has_counts = self.gate.redis().is_none();
        channel.send(&Reply::Offer(Offer { sockets: sockets.iter().map(offered).collect(), has_counts }))?;
        for one in &sockets {
            channel.send_descriptor(one.socket.as_fd())?;
        }
        if has_counts {
            let (reader, writer) = UnixStream::pair()?;
            channel.send_descriptor(reader.as_fd())?;
            self.write_counts(writer)?;
        }
        let (learned, bans) =
            if has_counts { (self.learners.encoded(), self.bans.encoded()) } else { Default::default() };
        channel.send_bytes(&learned)?;
        channel.send_bytes(&bans)
    }

    /// Writes the counts on another thread, because the new process reads them while it starts.
    fn write_counts(&self, writer: UnixStream) -> io::Result<()> {
        writer.set_write_timeout(Some(START_DEADLINE))?;
        let gate = self.gate.clone();
        let write = move || {
            let mut writer = BufWriter::new(writer);
            // The new process reports counts that are not complete.
            _ = gate.offer_snapshot(&mut writer).and_then(|_| writer.flush());
        };
        std::thread::Builder::new().name("hand-over".into()).spawn(write).map(|_| ())
    }
}

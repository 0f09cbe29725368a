//! The control socket of a running server.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, mpsc as events};
use std::time::Duration;
use std::{env, fs, process, thread};

use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tollgate_net::listening::Ending;
use tollgate_telemetry::notice;

use super::channel::Channel;
use super::handover::{Handover, RestartEvent, Turns};
use super::{ControlError, Reply, Request, is_trusted};
use crate::atomic_file::with_suffix;
use crate::readiness::Readiness;
use crate::reload::reloads::Reloads;

/// The most connections at a time; each has a thread.
const MAX_CONNECTIONS: u32 = 8;

/// The pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The longest wait for a new process that `restart` has started.
const RESTART_DEADLINE: Duration = Duration::from_secs(120);

/// The longest wait at the end for replies that are being sent.
const REPLY_DEADLINE: Duration = Duration::from_secs(1);

/// A control socket that is bound under a temporary name, so that the socket of a running server stays in place until this
/// process has taken over.
pub(crate) struct ControlSocket {
    path: PathBuf,
    unpublished: PathBuf,
    listener: StdListener,
}

impl ControlSocket {
    pub(crate) fn bind(path: PathBuf) -> Result<Self, ControlError> {
        let unpublished = with_suffix(&path, &format!(".{}", process::id()));
        for place in [&path, &unpublished] {
            if is_other_file(place) {
                return Err(ControlError::Occupied { path: place.clone() });
            }
        }
        let bound = || {
            // A killed process with the same id may have left one.
            match fs::remove_file(&unpublished) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            let listener = StdListener::bind(&unpublished)?;
            fs::set_permissions(&unpublished, fs::Permissions::from_mode(0o600))?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        match bound() {
            Ok(listener) => Ok(Self { path, unpublished, listener }),
            Err(source) => Err(ControlError::Bind { path, source }),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Moves the socket to its path, in place of the one before, and serves it.
    pub(crate) fn serve(self, commands: Commands) -> Result<ControlServer, ControlError> {
        let Self { path, unpublished, listener } = &self;
        if is_other_file(path) {
            return Err(ControlError::Occupied { path: path.clone() });
        }
        let published = || {
            let listener = UnixListener::from_std(listener.try_clone()?)?;
            fs::rename(unpublished, path)?;
            Ok(listener)
        };
        let listener = published().map_err(|source| ControlError::Bind { path: path.clone(), source })?;
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS as usize));
        let accepting = tokio::spawn(accept(listener, Arc::new(commands), Arc::clone(&slots))).abort_handle();
        Ok(ControlServer { path: path.clone(), accepting, slots })
    }
}

/// Returns whether a path is that of a file which is not a socket, and must not be replaced.
fn is_other_file(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.file_type().is_socket())
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // It has another name once it is served.
        _ = fs::remove_file(&self.unpublished);
    }
}

/// A control socket that is served.
pub(crate) struct ControlServer {
    path: PathBuf,
    accepting: AbortHandle,
    slots: Arc<Semaphore>,
}

impl ControlServer {
    /// Ends it, once all replies are sent. Removes the socket, unless that of another process is in its place.
    pub(crate) async fn end(self, ending: &Ending) {
        self.accepting.abort();
        if *ending == Ending::Stop && !is_other_file(&self.path) {
            _ = fs::remove_file(&self.path);
        }
        _ = timeout(REPLY_DEADLINE, self.slots.acquire_many(MAX_CONNECTIONS)).await;
    }
}

/// The commands of a control socket.
pub(crate) struct Commands {
    reloads: Arc<Reloads>,
    readiness: Arc<Readiness>,
    handover: Handover,
    turns: Turns,
    is_restarting: AtomicBool,
}

async fn accept(listener: UnixListener, commands: Arc<Commands>, slots: Arc<Semaphore>) {
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Err(error) = begin(stream, &commands, slot) {
                    notice::warn(format_args!("a connection to the control socket failed: {error}"));
                }
            }
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

/// Serves a connection on a thread, if its user may use it.
fn begin(stream: UnixStream, commands: &Arc<Commands>, slot: OwnedSemaphorePermit) -> io::Result<()> {
    let peer = stream.peer_cred()?;
    if !is_trusted(&peer) {
        notice::warn(format_args!(
            "user {} may not use the control socket: run the command as the user of this server, or as root",
            peer.uid()
        ));
        return Ok(());
    }
    let process = peer.pid().and_then(|id| u32::try_from(id).ok());
    let mut channel = Channel::new(stream.into_std()?)?;
    let (commands, runtime) = (Arc::clone(commands), Handle::current());
    let serve = move || {
        // A client that leaves early needs no reply.
        _ = commands.serve(&mut channel, process, &runtime, slot);
    };
    thread::Builder::new().name("control".into()).spawn(serve).map(|_| ())
}

impl Commands {
    pub(crate) fn new(reloads: Arc<Reloads>, readiness: Arc<Readiness>, handover: Handover) -> Self {
        Self { reloads, readiness, handover, turns: Turns::default(), is_restarting: AtomicBool::new(false) }
    }

    fn serve(
        &self,
        channel: &mut Channel,
        process: Option<u32>,
        runtime: &Handle,
        slot: OwnedSemaphorePermit,
    ) -> io::Result<()> {
        let request: Request = channel.receive()?;
        if self.readiness.is_stopping() || self.turns.are_over.load(Relaxed) {
            channel.send(&Reply::Stopping)?;
            // The end of this process ends the connection, and must not wait for it.
            drop(slot);
            channel.await_end();
            return Ok(());
        }
        match request {
            Request::Reload => channel.send(&reply(runtime.block_on(self.reloads.read_file()))),
            Request::Restart => channel.send(&reply(self.restart())),
            Request::HandOver => self.handover.to(channel, process, &self.turns),
        }
    }

    /// Starts this program again with the same arguments, and waits until the new process has taken over.
    fn restart(&self) -> Result<String, String> {
        if self.is_restarting.swap(true, Relaxed) {
            return Err("another restart is under way: wait for it".to_owned());
        }
        let result = self.start_successor();
        self.is_restarting.store(false, Relaxed);
        *self.restart_events() = None;
        result.inspect_err(|problem| {
            notice::error(format_args!("the restart failed, and this process continues: {problem}"))
        })
    }

    fn start_successor(&self) -> Result<String, String> {
        let (sender, received) = events::channel();
        *self.restart_events() = Some(sender.clone());
        let mut arguments = env::args_os();
        let program = arguments.next().unwrap_or_default();
        let mut command = Command::new(&program);
        command.args(arguments).stdin(Stdio::null());
        let cannot_start = |error: io::Error| {
            format!("cannot start {}: {error}: check that the program is in its place", program.display())
        };
        let mut child = command.spawn().map_err(cannot_start)?;
        let id = child.id();
        let wait = move || _ = sender.send(RestartEvent::Ended(child.wait()));
        thread::Builder::new().name("restart".into()).spawn(wait).map_err(cannot_start)?;
        match received.recv_timeout(RESTART_DEADLINE) {
            Ok(RestartEvent::TookOver) => Ok(format!("process {id} has taken over from process {}", process::id())),
            Ok(RestartEvent::Ended(Ok(status))) => {
                Err(format!("process {id} ended before it was ready ({status}): its log has the reason"))
            }
            Ok(RestartEvent::Ended(Err(error))) => Err(format!("process {id} cannot be waited for: {error}")),
            Err(_) => {
                end(id);
                Err(format!(
                    "process {id} was not ready after {} s: its log may have the reason",
                    RESTART_DEADLINE.as_secs()
                ))
            }
        }
    }

    fn restart_events(&self) -> std::sync::MutexGuard<'_, Option<events::Sender<RestartEvent>>> {
        self.turns.restart.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends a process that this one has started, so that it does not take over later.
fn end(id: u32) {
    if let Some(id) = i32::try_from(id).ok().and_then(rustix::process::Pid::from_raw) {
        _ = rustix::process::kill_process(id, rustix::process::Signal::KILL);
    }
}

fn reply(result: Result<String, String>) -> Reply {
    match result {
        Ok(message) => Reply::Done(message),
        Err(problem) => Reply::Failed(problem),
    }
}

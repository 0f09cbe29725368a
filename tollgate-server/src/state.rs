//! The state file of `serve --state FILE`: keeps counts from one run of the server to the next.
//!
//! It is read once, before anything listens, and written by its own thread: at the start, to find a folder without
//! write access early; every few seconds, to bound the loss of a crash; and at the end, after the last request. A new
//! file replaces the old one atomically, so the file is always complete.
//!
//! Only the file of the end contains the open reservations, because this process could settle those in an earlier one. The
//! next process replaces it before it settles any. So each is settled once, and if a process dies, they keep their cost.
//!
//! Deliberately not here: the format of the file, which belongs to the library.

use std::io::{self, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use tollgate::{RestoreError, Restored, Timestamp};
use tollgate_config::OpenError;
use tollgate_config::Parsed;
use tollgate_rules::Gate;
use tollgate_rules::internal::open_regular;
use tollgate_telemetry::notice;
use tollgate_telemetry::words::counted;

use crate::atomic_file;

/// Each pause lasts at least this many times as long as the last write, so that writing many keys never takes more than
/// about a tenth of a processor.
const PAUSE_FACTOR: u32 = 10;

/// A state file.
pub(crate) struct StateFile {
    path: PathBuf,
}

/// An error that keeps the server from starting with a state file.
#[derive(Debug)]
pub(crate) enum StateError {
    Open(OpenError),
    Read { path: PathBuf, source: io::Error },
    Write { path: PathBuf, source: io::Error },
    Thread(io::Error),
}

impl std::fmt::Display for StateError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Open(error) => error.fmt(out),
            Self::Read { path, source } => write!(
                out,
                "cannot read the state file {}: {source}: make it readable for the user of this process, or name another with --state",
                path.display()
            ),
            Self::Write { path, source } => write!(
                out,
                "cannot write the state file {}: {source}: make its folder writable for the user of this process, or name another with --state",
                path.display()
            ),
            Self::Thread(source) => write!(out, "cannot start a thread: {source}: give the process more threads"),
        }
    }
}

impl StateError {
    /// Sets a file aside that cannot be used. Returns its new path.
    pub(crate) fn set_aside(path: &Path) -> Result<PathBuf, Self> {
        atomic_file::set_aside(path).map_err(|source| Self::Write { path: path.to_owned(), source })
    }
}

impl StateFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Opens a gate and restores its counts, if there is a usable state file.
    pub(crate) async fn open(&self, rules: &Parsed) -> Result<Gate, StateError> {
        let read_error = |source| StateError::Read { path: self.path.clone(), source };
        let file = match open_regular(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return tollgate_config::open_gate(rules).await.map_err(StateError::Open);
            }
            Err(error) => return Err(read_error(error)),
        };
        match tollgate_config::open_gate_restored(rules, file).map_err(StateError::Open)? {
            Ok((gate, restored)) => {
                self.log_restored(&restored);
                Ok(gate)
            }
            Err(RestoreError::Read(error)) => Err(read_error(error)),
            Err(unusable) => {
                let rejected = StateError::set_aside(&self.path)?;
                notice::warn(format_args!(
                    "the state file {} is not used: {unusable}; it is kept as {}, and every key starts with its full quota",
                    self.path.display(),
                    rejected.display()
                ));
                tollgate_config::open_gate(rules).await.map_err(StateError::Open)
            }
        }
    }

    #[expect(clippy::disallowed_methods, reason = "the age of the file is only logged")]
    fn log_restored(&self, restored: &Restored) {
        let path = self.path.display();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (now, then) = (Timestamp::EPOCH.saturating_add(now).as_micros(), restored.written_at.as_micros());
        let seconds = now.abs_diff(then) / 1_000_000;
        let keys = counted(restored.keys, "key", "keys");
        notice::log(format_args!("restored {keys} from the state file {path}"));
        if then > now && seconds > 0 {
            notice::warn(format_args!(
                "the state file {path} was written {seconds} s in the future, so the clock was set back: keys continue as if no time had passed"
            ));
        }
        if restored.left_out > 0 {
            let keys = counted(restored.left_out, "key", "keys");
            notice::warn(format_args!(
                "the state file {path} has {keys} too many for the memory, which start with the full quota: raise max_memory"
            ));
        }
    }

    /// Replaces the file with the current counts. Writes nothing if a reload has moved the store to Redis.
    fn write(&self, gate: &Gate, moment: Moment) -> io::Result<()> {
        if gate.redis().is_some() {
            return Ok(());
        }
        // A reload may just have moved the store.
        atomic_file::replace(&self.path, |file| {
            let keys = match moment {
                Moment::WhileServing => gate.snapshot(file)?,
                Moment::AtTheEnd => gate.last_snapshot(file)?,
            };
            Ok(keys.is_some())
        })
    }
}

/// When the file is written.
#[derive(Clone, Copy)]
enum Moment {
    WhileServing,
    /// After the last request.
    AtTheEnd,
}

/// Opens a gate with the counts of the process that this one takes over from.
pub(crate) async fn open_taken_over(rules: &Parsed, counts: UnixStream) -> Result<Gate, StateError> {
    match tollgate_config::open_gate_restored(rules, BufReader::new(counts)).map_err(StateError::Open)? {
        Ok((gate, restored)) => {
            let keys = counted(restored.keys, "key", "keys");
            notice::log(format_args!("took over {keys} from the process before"));
            Ok(gate)
        }
        Err(unusable) => {
            notice::warn(format_args!(
                "the counts of the process before are not used: {unusable}; every key starts with its full quota"
            ));
            tollgate_config::open_gate(rules).await.map_err(StateError::Open)
        }
    }
}

/// The thread that writes a state file.
pub(crate) struct StateWriter {
    commands: mpsc::Sender<Command>,
    thread: JoinHandle<()>,
}

/// A command to the thread. It writes the file for the last time and ends when no more commands can follow.
enum Command {
    /// Begin to write the file.
    Begin,
    /// End without writing the file: another process writes it from now on.
    Leave,
}

impl StateWriter {
    /// Writes the file once, and then after every pause.
    pub(crate) fn start(state: StateFile, gate: Gate, pause: Duration) -> Result<Self, StateError> {
        state
            .write(&gate, Moment::WhileServing)
            .map_err(|source| StateError::Write { path: state.path.clone(), source })?;
        Self::spawn(move |commands| run_writer(commands, &state, &gate, (pause, pause)))
    }

    /// Waits for [`begin`](Self::begin) before it writes the file, because another process still does.
    pub(crate) fn wait(state: StateFile, gate: Gate, pause: Duration) -> Result<Self, StateError> {
        Self::spawn(move |commands| {
            if let Ok(Command::Begin) = commands.recv() {
                run_writer(commands, &state, &gate, (Duration::ZERO, pause));
            }
        })
    }

    fn spawn(run: impl FnOnce(&mpsc::Receiver<Command>) + Send + 'static) -> Result<Self, StateError> {
        let (commands, received) = mpsc::channel();
        let run = move || run(&received);
        let thread = thread::Builder::new().name("state".into()).spawn(run).map_err(StateError::Thread)?;
        Ok(Self { commands, thread })
    }

    /// Begins to write the file.
    pub(crate) fn begin(&self) {
        // The thread ends only after this.
        _ = self.commands.send(Command::Begin);
    }

    /// Writes the file for the last time.
    pub(crate) async fn end(self) {
        let Self { commands, thread } = self;
        drop(commands);
        join(thread).await;
    }

    /// Leaves the file to another process.
    pub(crate) async fn leave(self) {
        let Self { commands, thread } = self;
        // A thread that has panicked writes nothing either.
        _ = commands.send(Command::Leave);
        join(thread).await;
    }
}

async fn join(thread: JoinHandle<()>) {
    // A thread that panicked has been reported by its panic.
    _ = tokio::task::spawn_blocking(move || thread.join()).await;
}

/// Writes the file after the first pause, and then after every other.
#[expect(clippy::disallowed_methods, reason = "measures how long writing takes")]
fn run_writer(
    commands: &mpsc::Receiver<Command>,
    state: &StateFile,
    gate: &Gate,
    (first, pause): (Duration, Duration),
) {
    let (mut next, mut has_failed) = (first, false);
    loop {
        let is_over = match commands.recv_timeout(next) {
            Ok(Command::Leave) => return,
            Ok(Command::Begin) | Err(RecvTimeoutError::Timeout) => false,
            Err(RecvTimeoutError::Disconnected) => true,
        };
        let began = Instant::now();
        let written = state.write(gate, if is_over { Moment::AtTheEnd } else { Moment::WhileServing });
        next = pause.max(began.elapsed() * PAUSE_FACTOR);
        match (&written, has_failed || is_over) {
            (Err(source), _) if is_over || !has_failed => {
                let path = state.path.clone();
                let lost = if is_over { "; counts since the last write are lost" } else { "" };
                notice::warn(format_args!("{}{lost}", StateError::Write { path, source: copy_error(source) }));
            }
            (Ok(()), true) if has_failed => {
                notice::log(format_args!("the state file {} is written again", state.path.display()));
            }
            _ => {}
        }
        has_failed = written.is_err();
        if is_over {
            return;
        }
    }
}

fn copy_error(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), error.to_string())
}

//! The state file of `serve --state FILE`: keeps counts from one run of the server to the next.
//!
//! It is read once, before anything listens, and written by its own thread: at the start, to find a folder without
//! write access early; every few seconds, to bound the loss of a crash; and at the end, after the last request. A new
//! file replaces the old one atomically, so the file is always complete.
//!
//! Deliberately not here: the format of the file, which belongs to the library.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use tollgate::rules::file::Parsed;
use tollgate::{Gate, OpenError, RestoreError, Restored, Timestamp};

use crate::notice;

/// Each pause lasts at least this many times as long as the last write, so that writing many keys never takes more than
/// about a tenth of a processor.
const PAUSE_FACTOR: u32 = 10;

/// A state file, and the temporary file that replaces it.
pub(crate) struct StateFile {
    path: PathBuf,
    unfinished: PathBuf,
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

impl StateFile {
    pub(crate) fn new(path: PathBuf) -> Self {
        let unfinished = with_suffix(&path, ".new");
        Self { path, unfinished }
    }

    /// Opens a gate and restores its counts, if there is a usable state file.
    pub(crate) async fn open(&self, rules: &Parsed) -> Result<Gate, StateError> {
        let read_error = |source| StateError::Read { path: self.path.clone(), source };
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Gate::open(rules).await.map_err(StateError::Open);
            }
            Err(error) => return Err(read_error(error)),
        };
        match Gate::open_restored(rules, file).map_err(StateError::Open)? {
            Ok((gate, restored)) => {
                self.log_restored(&restored);
                Ok(gate)
            }
            Err(RestoreError::Read(error)) => Err(read_error(error)),
            Err(unusable) => {
                let rejected = with_suffix(&self.path, ".rejected");
                fs::rename(&self.path, &rejected)
                    .map_err(|source| StateError::Write { path: rejected.clone(), source })?;
                notice::warn(format_args!(
                    "the state file {} is not used: {unusable}; it is kept as {}, and every key starts with its full quota",
                    self.path.display(),
                    rejected.display()
                ));
                Gate::open(rules).await.map_err(StateError::Open)
            }
        }
    }

    #[expect(clippy::disallowed_methods, reason = "the age of the file is only logged")]
    fn log_restored(&self, restored: &Restored) {
        let path = self.path.display();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let (now, then) = (Timestamp::EPOCH.saturating_add(now).as_micros(), restored.written_at.as_micros());
        let seconds = now.abs_diff(then) / 1_000_000;
        notice::log(format_args!("restored {} keys from the state file {path}", restored.keys));
        if then > now && seconds > 0 {
            notice::warn(format_args!(
                "the state file {path} was written {seconds} s in the future, so the clock was set back: keys continue as if no time had passed"
            ));
        }
        if restored.left_out > 0 {
            notice::warn(format_args!(
                "{} keys of the state file {path} start with their full quota, because they do not fit in memory: raise max_memory",
                restored.left_out
            ));
        }
    }

    /// Replaces the file with the current counts. Writes nothing if a reload has moved the store to Redis.
    fn write(&self, gate: &Gate) -> io::Result<()> {
        if gate.redis().is_some() {
            return Ok(());
        }
        let written = self.write_unfinished(gate).and_then(|is_written| {
            if is_written {
                fs::rename(&self.unfinished, &self.path)?;
            }
            Ok(is_written)
        });
        if !matches!(written, Ok(true)) {
            // It may not exist.
            _ = fs::remove_file(&self.unfinished);
        }
        if written? { sync_folder(&self.path) } else { Ok(()) }
    }

    /// Returns whether there was anything to write: a reload may just have moved the store to Redis.
    fn write_unfinished(&self, gate: &Gate) -> io::Result<bool> {
        // A killed process may have left one. It is removed rather than reused: by now it could be a link to another
        // file.
        match fs::remove_file(&self.unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(&self.unfinished)?;
        if gate.snapshot(&file)?.is_none() {
            return Ok(false);
        }
        file.sync_all()?;
        Ok(true)
    }
}

/// Appends `suffix` to the file name.
fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// Makes the rename durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

/// The thread that writes a state file.
pub(crate) struct StateWriter {
    running: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl StateWriter {
    /// Writes the file once, and then after every pause.
    pub(crate) fn start(state: StateFile, gate: Gate, pause: Duration) -> Result<Self, StateError> {
        state.write(&gate).map_err(|source| StateError::Write { path: state.path.clone(), source })?;
        let (running, stop) = mpsc::channel();
        let write = move || run_writer(&stop, &state, &gate, pause);
        let thread = thread::Builder::new().name("state".into()).spawn(write).map_err(StateError::Thread)?;
        Ok(Self { running, thread })
    }

    /// Writes the file for the last time.
    pub(crate) async fn end(self) {
        let Self { running, thread } = self;
        drop(running);
        // A thread that panicked has been reported by its panic.
        _ = tokio::task::spawn_blocking(move || thread.join()).await;
    }
}

#[expect(clippy::disallowed_methods, reason = "measures how long writing takes")]
fn run_writer(stop: &mpsc::Receiver<()>, state: &StateFile, gate: &Gate, pause: Duration) {
    let (mut next, mut has_failed) = (pause, false);
    loop {
        let is_over = stop.recv_timeout(next) != Err(RecvTimeoutError::Timeout);
        let began = Instant::now();
        let written = state.write(gate);
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

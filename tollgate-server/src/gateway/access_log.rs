//! The access log: one line per request, written when the request ends.
//!
//! Each worker appends lines to its own buffer, and a thread writes the buffers several times per second. So no request
//! waits for a disk, and workers do not contend. Lines that do not fit are lost and counted.
//!
//! A line names the limit that decided. It has the key that the limit counted by only if the rule file says so.

mod record;

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tollgate_config::internal::{AccessLogRule, LogFormat, SettingError};
use tollgate_telemetry::notice;

use self::record::Stamp;
pub(super) use self::record::{Completion, Record};

/// The maximum size of a worker's buffer. The thread empties it often enough for millions of requests per second,
/// unless it waits for a disk.
const MAX_WAITING_BYTES: usize = 1 << 20;

/// The maximum length of a logged target. Longer ones are attacks or mistakes.
const MAX_TARGET_BYTES: usize = 8 << 10;

/// The maximum length of a logged header.
const MAX_HEADER_BYTES: usize = 1 << 10;

/// How long shutdown waits for the last lines.
const END_DEADLINE: Duration = Duration::from_secs(1);

/// An open access log.
pub(super) struct AccessLog {
    rule: AccessLogRule,
    shared: Arc<Shared>,
}

/// The state that the workers and the writer thread share.
struct Shared {
    format: LogFormat,
    /// One buffer per worker.
    worker_lines: Box<[WorkerLines]>,
    signal: WriterSignal,
    lost: Arc<AtomicU64>,
}

/// The lines of one worker.
#[derive(Default)]
#[repr(align(128))]
struct WorkerLines(Mutex<LineBuffer>);

#[derive(Default)]
struct LineBuffer {
    text: Vec<u8>,
    stamp: Stamp,
}

impl AccessLog {
    /// Opens the log. Lost lines are counted in `lost`.
    pub(super) fn open(
        rule: &AccessLogRule,
        folder: &Path,
        workers: usize,
        lost: &Arc<AtomicU64>,
    ) -> Result<Self, SettingError> {
        let sink = Sink::open(rule.file.as_ref().map(|file| folder.join(file)))?;
        let worker_lines = (0..workers).map(|_| WorkerLines::default()).collect();
        let shared =
            Shared { format: rule.format, worker_lines, signal: WriterSignal::default(), lost: Arc::clone(lost) };
        let shared = Arc::new(shared);
        start_writer(Arc::clone(&shared), sink)
            .map_err(|error| SettingError::new(format!("gateway.access_log: {error}"), "raise the limit of threads"))?;
        Ok(Self { rule: rule.clone(), shared })
    }

    /// Returns whether the log was opened with this rule.
    pub(super) fn matches_rule(&self, rule: &AccessLogRule) -> bool {
        self.rule == *rule
    }

    /// Opens the file again, in case it was renamed.
    pub(super) fn reopen(&self) {
        self.shared.signal.reopen();
    }

    fn write(&self, worker: usize, record: &Record, completion: &Completion<'_>) {
        let Some(worker_lines) = self.shared.worker_lines.get(worker) else { return };
        let mut buffer = worker_lines.0.lock().unwrap_or_else(PoisonError::into_inner);
        if buffer.text.len() >= MAX_WAITING_BYTES {
            self.shared.lost.fetch_add(1, Relaxed);
            return;
        }
        let LineBuffer { text, stamp } = &mut *buffer;
        let was_empty = text.is_empty();
        match self.shared.format {
            LogFormat::Combined => record::write_combined(text, stamp, record, completion),
            _ => record::write_json(text, stamp, record, completion),
        }
        drop(buffer);
        if was_empty {
            self.shared.signal.notify_lines();
        }
    }

    /// Waits until all lines are written, but not longer than [`END_DEADLINE`].
    pub(super) fn finish(&self) {
        self.shared.signal.end();
        self.shared.signal.wait_for_end(END_DEADLINE);
    }
}

impl Drop for AccessLog {
    fn drop(&mut self) {
        self.shared.signal.end();
    }
}

/// Truncates a text. An incomplete character at the end is escaped like any other byte.
fn cut(text: &[u8], most: usize) -> &[u8] {
    &text[..text.len().min(most)]
}

/// Standard output, or a file that is reopened after it was renamed.
struct Sink {
    file: Option<LogFile>,
    /// The last logged write error.
    last_warning: LastWarning,
}

struct LogFile {
    path: PathBuf,
    file: File,
    /// The file was removed and cannot be created again, so lines would be lost.
    is_gone: bool,
    /// The last logged error of reopening.
    last_warning: LastWarning,
}

/// An error that is logged once, until it changes.
#[derive(Default)]
struct LastWarning(Option<String>);

impl Sink {
    fn open(path: Option<PathBuf>) -> Result<Self, SettingError> {
        let opened = path.map(|path| match open(&path) {
            Ok(file) => Ok(LogFile { path, file, is_gone: false, last_warning: LastWarning::default() }),
            Err(error) => {
                let problem = format!("gateway.access_log.file {}: {error}", path.display());
                Err(SettingError::new(problem, "name a writable file in an existing folder").of("file"))
            }
        });
        Ok(Self { file: opened.transpose()?, last_warning: LastWarning::default() })
    }

    /// Opens the file again if it was renamed or removed.
    fn reopen_if_moved(&mut self) {
        if let Some(opened) = &mut self.file {
            opened.reopen_if_moved();
        }
    }

    /// Writes lines. Returns the number of lost lines.
    fn write(&mut self, lines: &[u8]) -> u64 {
        let lost = || memchr::memchr_iter(b'\n', lines).count() as u64;
        let written = match &mut self.file {
            _ if lines.is_empty() => return 0,
            Some(opened) if opened.is_gone => return lost(),
            Some(opened) => opened.file.write_all(lines),
            None => io::stdout().write_all(lines).and_then(|()| io::stdout().flush()),
        };
        match written {
            Ok(()) => {
                self.last_warning = LastWarning::default();
                0
            }
            Err(error) => {
                let path = self.file.as_ref().map(|opened| &*opened.path);
                self.last_warning.warn(path, "written", &error);
                lost()
            }
        }
    }
}

impl LastWarning {
    fn warn(&mut self, path: Option<&Path>, what: &str, error: &io::Error) {
        let of = path.map_or(String::new(), |path| format!(" {}", path.display()));
        let last_warning = format!("the access log{of} cannot be {what}: {error}");
        if self.0.as_ref() != Some(&last_warning) {
            notice::warn(format_args!("{last_warning}: free some disk space, or fix its permissions"));
            self.0 = Some(last_warning);
        }
    }
}

impl LogFile {
    fn reopen_if_moved(&mut self) {
        if self.is_in_place() {
            (self.is_gone, self.last_warning) = (false, LastWarning::default());
            return;
        }
        match open(&self.path) {
            Ok(file) => (self.file, self.is_gone, self.last_warning) = (file, false, LastWarning::default()),
            Err(error) => {
                self.is_gone = self.file.metadata().is_ok_and(|file| has_no_name(&file));
                self.last_warning.warn(Some(&self.path), "opened again", &error);
            }
        }
    }

    fn is_in_place(&self) -> bool {
        match (self.path.metadata(), self.file.metadata()) {
            (Ok(there), Ok(here)) => identity(&there) == identity(&here),
            _ => false,
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

#[cfg(unix)]
fn identity(metadata: &Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

#[cfg(unix)]
fn has_no_name(metadata: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    metadata.nlink() == 0
}

#[cfg(not(unix))]
fn has_no_name(_: &Metadata) -> bool {
    false
}

/// An open file cannot be renamed here.
#[cfg(not(unix))]
fn identity(_: &Metadata) -> (u64, u64) {
    (0, 0)
}

/// How long lines are gathered before they are written together.
const GATHER: Duration = Duration::from_millis(50);

/// How often the file of a quiet log is checked: it may have been renamed.
const REOPEN_EVERY: Duration = Duration::from_secs(1);

/// The signals to the writer thread.
#[derive(Default)]
struct WriterSignal {
    signals: Mutex<Signals>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Signals {
    lines: bool,
    reopen: bool,
    end: bool,
    ended: bool,
}

impl WriterSignal {
    /// Signals new lines.
    fn notify_lines(&self) {
        self.call(|signals| signals.lines = true);
    }

    fn reopen(&self) {
        self.call(|signals| signals.reopen = true);
    }

    /// Signals that no more lines follow.
    fn end(&self) {
        self.call(|signals| signals.end = true);
    }

    fn wait_for_end(&self, within: Duration) {
        // After the timeout, nothing more can be done.
        _ = self.changed.wait_timeout_while(self.lock(), within, |signals| !signals.ended);
    }

    fn ended(&self) {
        self.call(|signals| signals.ended = true);
    }

    fn call(&self, set: impl FnOnce(&mut Signals)) {
        set(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits for a signal, and a moment longer for more lines.
    fn wait(&self) -> Signals {
        let quiet = |signals: &mut Signals| !signals.lines && !signals.reopen && !signals.end;
        let waited = self.changed.wait_timeout_while(self.lock(), REOPEN_EVERY, quiet);
        let (signals, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let waited = match signals.lines {
            true => self.changed.wait_timeout_while(signals, GATHER, |signals| !signals.reopen && !signals.end),
            false => return take_signals(signals),
        };
        take_signals(waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    fn lock(&self) -> MutexGuard<'_, Signals> {
        self.signals.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take_signals(mut signals: MutexGuard<'_, Signals>) -> Signals {
    let taken = *signals;
    (signals.lines, signals.reopen) = (false, false);
    taken
}

fn start_writer(shared: Arc<Shared>, sink: Sink) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("access-log".to_owned());
    thread.spawn(move || run(&shared, sink)).map(drop)
}

fn run(shared: &Shared, mut sink: Sink) {
    let mut text = Vec::new();
    loop {
        let signals = shared.signal.wait();
        sink.reopen_if_moved();
        for worker_lines in &shared.worker_lines {
            {
                let mut lines: MutexGuard<'_, LineBuffer> =
                    worker_lines.0.lock().unwrap_or_else(PoisonError::into_inner);
                std::mem::swap(&mut lines.text, &mut text);
            }
            let lost = sink.write(&text);
            shared.lost.fetch_add(lost, Relaxed);
            text.clear();
        }
        if signals.end {
            return shared.signal.ended();
        }
    }
}

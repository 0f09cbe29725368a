//! The access log: one line per request, written when the request ends.
//!
//! Each worker appends lines to its own buffer, and a thread writes the buffers several times per second. So no request
//! waits for a disk, and workers do not contend. Lines that do not fit are lost and counted.
//!
//! A line names the limit that decided. It has the key that the limit counted by only if the rule file says so.

mod combined;
mod json;
mod record;
mod sink;
mod stamp;
mod writer;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tollgate::rules::file::internal::{AccessLogRule, LogFormat, SettingError};

pub(super) use self::record::{Completion, Record};
use self::sink::Sink;
use self::stamp::Stamp;
use self::writer::WriterSignal;

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
        writer::start(Arc::clone(&shared), sink)
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
            LogFormat::Combined => combined::write(text, stamp, record, completion),
            _ => json::write(text, stamp, record, completion),
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

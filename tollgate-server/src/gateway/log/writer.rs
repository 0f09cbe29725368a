//! The thread that writes the log.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::sink::Sink;
use super::{LineBuffer, Shared};

/// How long lines are gathered before they are written together.
const GATHER: Duration = Duration::from_millis(50);

/// How often the file of a quiet log is checked: it may have been renamed.
const REOPEN_EVERY: Duration = Duration::from_secs(1);

/// The signals to the writer thread.
#[derive(Default)]
pub(super) struct WriterSignal {
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
    pub(super) fn notify_lines(&self) {
        self.call(|signals| signals.lines = true);
    }

    pub(super) fn reopen(&self) {
        self.call(|signals| signals.reopen = true);
    }

    /// Signals that no more lines follow.
    pub(super) fn end(&self) {
        self.call(|signals| signals.end = true);
    }

    pub(super) fn wait_for_end(&self, within: Duration) {
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

pub(super) fn start(shared: Arc<Shared>, sink: Sink) -> io::Result<()> {
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

//! The thread that writes.

use std::io;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::sink::Sink;
use super::{Lines, Shared};

/// Lines of so long are written together.
const GATHER: Duration = Duration::from_millis(50);

/// How often a quiet log is looked at: its file may have been renamed away.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// What the thread waits for.
#[derive(Default)]
pub(super) struct Bell {
    calls: Mutex<Calls>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct Calls {
    lines: bool,
    look: bool,
    end: bool,
    ended: bool,
}

impl Bell {
    /// There are lines.
    pub(super) fn ring(&self) {
        self.call(|calls| calls.lines = true);
    }

    pub(super) fn look(&self) {
        self.call(|calls| calls.look = true);
    }

    /// No more lines come.
    pub(super) fn end(&self) {
        self.call(|calls| calls.end = true);
    }

    pub(super) fn await_end(&self, within: Duration) {
        // Whether it ended or took too long, nothing more can be done.
        _ = self.changed.wait_timeout_while(self.lock(), within, |calls| !calls.ended);
    }

    fn ended(&self) {
        self.call(|calls| calls.ended = true);
    }

    fn call(&self, say: impl FnOnce(&mut Calls)) {
        say(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits for a call, and then a moment longer for more lines.
    fn wait(&self) -> Calls {
        let quiet = |calls: &mut Calls| !calls.lines && !calls.look && !calls.end;
        let waited = self.changed.wait_timeout_while(self.lock(), LOOK_EVERY, quiet);
        let (calls, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let waited = match calls.lines {
            true => self.changed.wait_timeout_while(calls, GATHER, |calls| !calls.look && !calls.end),
            false => return take(calls),
        };
        take(waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn take(mut calls: MutexGuard<'_, Calls>) -> Calls {
    let taken = *calls;
    (calls.lines, calls.look) = (false, false);
    taken
}

pub(super) fn start(shared: Arc<Shared>, sink: Sink) -> io::Result<()> {
    let thread = std::thread::Builder::new().name("access-log".to_owned());
    thread.spawn(move || run(&shared, sink)).map(drop)
}

fn run(shared: &Shared, mut sink: Sink) {
    let mut text = Vec::new();
    loop {
        let calls = shared.bell.wait();
        sink.look();
        for waiting in &shared.waiting {
            {
                let mut lines: MutexGuard<'_, Lines> = waiting.0.lock().unwrap_or_else(PoisonError::into_inner);
                std::mem::swap(&mut lines.text, &mut text);
            }
            let lost = sink.write(&text);
            shared.lost.fetch_add(lost, Relaxed);
            text.clear();
        }
        if calls.end {
            return shared.bell.ended();
        }
    }
}

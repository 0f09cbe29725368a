//! Waits for other processes: the only place here that sleeps.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait of a test. Nothing takes this long, even on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Short compared with a start (20 ms), long compared with an attempt (0.1 ms).
const POLL_PERIOD: Duration = Duration::from_millis(5);

/// Returns the first `Some` of `attempt`, or `None` if there was no such result within the limit.
#[expect(clippy::disallowed_methods, reason = "what another process does takes real time")]
pub fn poll<T>(limit: Duration, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let begin = Instant::now();
    loop {
        if let Some(answer) = attempt() {
            return Some(answer);
        }
        if begin.elapsed() >= limit {
            return None;
        }
        thread::sleep(POLL_PERIOD);
    }
}

/// Calls `found` until it returns a value, for at most [`PATIENCE`].
pub fn wait_until<T>(found: impl FnMut() -> Option<T>) -> Option<T> {
    poll(PATIENCE, found)
}

/// Waits for a condition, and panics with `what` if it does not hold within [`PATIENCE`].
#[track_caller]
pub fn until(what: &str, holds: impl FnMut() -> bool) {
    within(PATIENCE, what, holds);
}

/// Waits for a condition, and panics with `what` if it does not hold within the limit.
#[track_caller]
pub fn within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) {
    if poll(limit, || holds().then_some(())).is_none() {
        panic!("not within {limit:?}: {what}");
    }
}

/// Returns the result of a read that waits for [`PATIENCE`], and panics if it has timed out. A test that expects an error
/// expects the other side to end the connection.
#[track_caller]
pub(crate) fn in_time<T>(read: io::Result<T>) -> io::Result<T> {
    if let Err(error) = &read {
        let is_timeout = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut);
        assert!(!is_timeout, "nothing arrives within {PATIENCE:?}, and the connection is not closed: {error}");
    }
    read
}

/// Sets a flag when it is dropped, also if an assertion fails: a failed test would otherwise wait forever for threads that
/// run until the flag is set.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

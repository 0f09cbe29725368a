//! Waits for other processes: the only place here that reads a clock and sleeps.

use std::thread;
use std::time::{Duration, Instant};

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

/// Waits for a condition, and panics with `what` if it does not hold within the limit.
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut holds: impl FnMut() -> bool) {
    if poll(limit, || holds().then_some(())).is_none() {
        panic!("not within {limit:?}: {what}");
    }
}

//! Waiting for another process: the one place here that reads a clock and sleeps.

use std::thread;
use std::time::{Duration, Instant};

/// Short beside a start (20 ms), long beside an attempt (0.1 ms).
const POLL_PERIOD: Duration = Duration::from_millis(5);

/// The first answer of `attempt` that is `Some`, or `None` when there was none within the limit.
#[expect(clippy::disallowed_methods, reason = "what another process does takes real time")]
pub(super) fn poll<T>(limit: Duration, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
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

/// Panics with `what` when it does not come true within the limit.
#[track_caller]
pub(super) fn wait_until(what: &str, limit: Duration, mut is_so: impl FnMut() -> bool) {
    if poll(limit, || is_so().then_some(())).is_none() {
        panic!("not within {limit:?}: {what}");
    }
}

//! Windows that do not end while a test runs.
//!
//! Fixed windows, the segments of counters and the intervals of token buckets are aligned to the Unix epoch. A window of
//! an hour ends whenever a test runs across a full hour, and the test finds its quota refilled. A test on a real clock
//! uses [`LONG_WINDOW`], or [`within_one_minute`] if its limit has to be one per minute.

use std::time::{Duration, SystemTime};

use crate::wait::wait_until;

/// A window for limits on a real clock: 28 years of 365 days, `10220d` in a rule file.
///
/// It began on 18 December 2025 and ends on 11 December 2053. Its thirds, for a counter of three segments, end in 2035
/// and 2044.
pub const LONG_WINDOW: Duration = Duration::from_secs(28 * 365 * 24 * 60 * 60);

/// Returns the result of `attempt` from a call within one minute of the clock. A call that met the turn of a minute is
/// repeated with the next number. It has to use another key, because the previous one has spent units.
pub fn within_one_minute<T>(mut attempt: impl FnMut(usize) -> T) -> T {
    // The server reads its own clock, which may differ slightly from the one read here.
    let margin = Duration::from_secs(1);
    (0..3)
        .find_map(|number| {
            // Attempts are short, so all of them could be at the same turn of a minute.
            let start = wait_until(|| Some(since_epoch()).filter(|now| (2..58).contains(&(now.as_secs() % 60))));
            let start = start.expect("the turn of a minute passes");
            let result = attempt(number);
            ((start - margin).as_secs() / 60 == (since_epoch() + margin).as_secs() / 60).then_some(result)
        })
        .expect("three attempts do not all meet the turn of a minute")
}

#[expect(clippy::disallowed_methods, reason = "the servers under test decide by the wall clock")]
fn since_epoch() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970")
}

//! How many connections the process can bear.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// For files, listeners, the store, and idle connections to upstreams.
const RESERVED: u64 = 256;

/// A connection of a client has one to an upstream beside it.
const EACH: u64 = 2;

/// Where the system sets no bound, memory does.
const MOST: u64 = 1 << 20;

/// Asks the system for as many open files as it gives, and says how many connections they are enough for.
pub(super) fn connections() -> i64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: maximum, maximum };
    let allowed = if setrlimit(Resource::Nofile, wanted).is_ok() { maximum } else { current };
    let allowed = allowed.unwrap_or(MOST).min(MOST);
    i64::try_from(allowed.saturating_sub(RESERVED) / EACH).unwrap_or(i64::MAX).max(1)
}

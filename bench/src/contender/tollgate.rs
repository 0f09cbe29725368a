//! tollgate: `Limiter::check` with the key as a `&str`.

use std::hint::black_box;
use std::time::Duration;

use tollgate::{
    Algorithm, FixedWindow, HOUR, LeakyBucket, Limit, Limiter, Rate, SECOND, SlidingWindowCounter, SlidingWindowLog,
    TokenBucket,
};

use super::{Contender, Entrant, Setup};

/// Above what any measurement here needs, so that none of them measures eviction.
pub(super) const MAX_MEMORY_BYTES: usize = 8 << 30;

/// One unit a second.
const SLOW: Rate = Rate::new(1, SECOND);

/// All five algorithms and their variants, the token bucket first. The limits are of a size that people set,
/// since the state of some is as wide as their limit; no key comes near its limit in a run. A log is the
/// smallest, for it keeps an entry for every request.
pub(crate) const ALGORITHMS: [Entrant; 10] = [
    Entrant::new("token bucket", |_| build(TokenBucket::new(LIMIT, SLOW))),
    Entrant::new("token bucket, interval", |_| build(TokenBucket::new(LIMIT, SLOW).interval())),
    Entrant::new("leaky bucket", |_| build(LeakyBucket::new(LIMIT, SLOW))),
    Entrant::new("leaky bucket, queue", |_| build(LeakyBucket::new(LIMIT, SLOW).queue(LONG_QUEUE))),
    Entrant::new("fixed window", |_| build(FixedWindow::new(LIMIT, HOUR))),
    Entrant::new("fixed window, first request", |_| build(FixedWindow::new(LIMIT, HOUR).from_first_request())),
    Entrant::new("sliding log", |_| build(SlidingWindowLog::new(LOG_LIMIT, HOUR))).filled_by_one(),
    Entrant::new("sliding log, count denied", |_| build(SlidingWindowLog::new(LOG_LIMIT, HOUR).count_denied()))
        .filled_by_one(),
    Entrant::new("sliding counter", |_| build(SlidingWindowCounter::new(LIMIT, HOUR))),
    Entrant::new("sliding counter, 6 segments", |_| build(SlidingWindowCounter::new(LIMIT, HOUR).segments(6))),
];

/// The logs that are filled to the brim to see what an entry takes.
pub(crate) const LOGS: [Entrant; 2] = [
    Entrant::new(LOG_OF_10, |_| build(SlidingWindowLog::new(10, HOUR))).filled_by_one(),
    Entrant::new(LOG_OF_100, |_| build(SlidingWindowLog::new(100, HOUR))).filled_by_one(),
];

pub(crate) const LOG_OF_10: &str = "full log of 10";
pub(crate) const LOG_OF_100: &str = "full log of 100";

const LIMIT: u64 = 10_000;
const LOG_LIMIT: u64 = 100;

/// As long as a full bucket takes to leak, so that only the capacity limits.
const LONG_QUEUE: Duration = Duration::from_secs(LIMIT);

struct Tollgate(Limiter);

pub(super) fn token_bucket(setup: Setup) -> Box<dyn Contender> {
    let refill = Rate::new(1, setup.path.period());
    build(TokenBucket::new(u64::from(setup.path.burst()), refill))
}

fn build(algorithm: impl Into<Algorithm>) -> Box<dyn Contender> {
    let limiter = Limit::new("bench", algorithm)
        .and_then(|limit| Limiter::builder().limit(limit).max_memory(MAX_MEMORY_BYTES).build());
    match limiter {
        Ok(limiter) => Box::new(Tollgate(limiter)),
        Err(problem) => unreachable!("the limits above are valid: {problem}"),
    }
}

impl Contender for Tollgate {
    #[inline]
    fn decide(&self, key: &String) -> bool {
        black_box(self.0.check(key.as_str())).is_allowed()
    }

    fn spend(&self, key: &String, cost: u32) -> bool {
        self.0.check_n(key.as_str(), u64::from(cost)).is_allowed()
    }

    fn claimed_bytes(&self) -> Option<usize> {
        Some(self.0.memory_used())
    }
}

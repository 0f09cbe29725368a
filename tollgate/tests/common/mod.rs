//! Helpers of all suites: a limiter whose clock the test moves, and its decisions as plain integers.

#![allow(dead_code, reason = "each suite is a crate of its own and uses its own part of this")]

pub(crate) mod plan;
pub(crate) mod traffic;

use std::time::Duration;

use tollgate::{Decision, Limit, Limiter, ManualClock, Timestamp};

pub(crate) const SECOND_US: u64 = 1_000_000;

/// The start of tests that need no particular time: a full hour, so a multiple of every window in use.
pub(crate) const START_US: u64 = (1_700_000_040 - 1_700_000_040 % 3600) * SECOND_US;

/// A decision, with times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) remaining: u64,
    pub(crate) reset_after: u64,
    pub(crate) retry_after: Option<u64>,
    pub(crate) delay: u64,
}

impl From<Decision> for Answer {
    fn from(decision: Decision) -> Self {
        Self {
            allowed: decision.is_allowed(),
            remaining: decision.remaining(),
            reset_after: micros(decision.reset_after()),
            retry_after: decision.retry_after().map(micros),
            delay: micros(decision.delay()),
        }
    }
}

pub(crate) fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).expect("a promised time fits 64 bits of microseconds")
}

/// One limit and one key, with a clock that the test moves.
pub(crate) struct Rig {
    pub(crate) limiter: Limiter,
    pub(crate) clock: ManualClock,
}

impl Rig {
    pub(crate) fn new(limit: Limit, now: u64) -> Self {
        let clock = ManualClock::at(Timestamp::from_micros(now));
        let limiter = Limiter::builder().limit(limit).clock(clock.clone()).build();
        Self { limiter: limiter.expect("one valid limit makes a limiter"), clock }
    }

    /// Creates a limiter with a limit named `limit`, at [`START_US`].
    pub(crate) fn of(algorithm: impl Into<tollgate::Algorithm>) -> Self {
        Self::new(Limit::new("limit", algorithm).expect("the numbers are within the bounds"), START_US)
    }

    pub(crate) fn set(&self, now: u64) {
        self.clock.set(Timestamp::from_micros(now));
    }

    /// Takes `cost` at `now`, which may be before the last request.
    pub(crate) fn ask(&self, now: u64, cost: u64) -> Answer {
        self.set(now);
        self.limiter.check_n("key", cost).into()
    }

    /// Takes one unit `seconds` after the start. Returns whether it is allowed.
    pub(crate) fn passes_at(&self, seconds: u64) -> bool {
        self.ask(START_US + seconds * SECOND_US, 1).allowed
    }

    /// Sends `requests` of one unit `seconds` after the start. Returns how many are admitted.
    pub(crate) fn admitted_at(&self, seconds: u64, requests: usize) -> usize {
        (0..requests).filter(|_| self.passes_at(seconds)).count()
    }
}

/// A small random number generator with the same numbers in every run, for traces that are too long to be shrunk.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

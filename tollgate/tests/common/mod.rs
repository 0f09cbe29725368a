//! What every suite here stands on: a limiter whose time the test moves, and its answers in plain integers.

#![allow(dead_code, reason = "each suite is a crate of its own and uses its own part of this")]

pub(crate) mod plan;
pub(crate) mod traffic;

use std::time::Duration;

use tollgate::{Decision, Limit, Limiter, ManualClock, Timestamp};

pub(crate) const SECOND_US: u64 = 1_000_000;

/// Where tests that care for no particular moment begin: a whole hour, so a multiple of every window in use.
pub(crate) const START_US: u64 = (1_700_000_040 - 1_700_000_040 % 3600) * SECOND_US;

/// What a decision says, with times in microseconds.
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

/// One limit on one key, with the clock in the test's hand.
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

    /// A limiter under the name `limit`, at [`START_US`].
    pub(crate) fn of(algorithm: impl Into<tollgate::Algorithm>) -> Self {
        Self::new(Limit::new("limit", algorithm).expect("the numbers are within the bounds"), START_US)
    }

    pub(crate) fn set(&self, now: u64) {
        self.clock.set(Timestamp::from_micros(now));
    }

    /// Asks for `cost` at `now`, which may lie before the last question.
    pub(crate) fn ask(&self, now: u64, cost: u64) -> Answer {
        self.set(now);
        self.limiter.check_n("key", cost).into()
    }

    /// Asks for one unit `seconds` after the start.
    pub(crate) fn passes_at(&self, seconds: u64) -> bool {
        self.ask(START_US + seconds * SECOND_US, 1).allowed
    }

    /// Sends `requests` of one unit `seconds` after the start; how many passed.
    pub(crate) fn admitted_at(&self, seconds: u64, requests: usize) -> usize {
        (0..requests).filter(|_| self.passes_at(seconds)).count()
    }
}

/// A small generator of numbers that are the same in every run, for traces too long to be shrunk.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

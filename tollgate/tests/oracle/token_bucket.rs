//! An oracle for a bucket of tokens as an exact fraction: the denominator is the refill period in microseconds, so one
//! microsecond of smooth refill is `count` parts and one token is `period` parts.

use proptest::prelude::*;

use crate::common::plan::{Pace, Plan, Refill, mostly_accepted, token};
use crate::common::traffic::{Step, start, steps};
use crate::{Oracle, agree};

struct Bucket {
    capacity: u64,
    pace: Pace,
    refill: Refill,
    /// The parts that were taken and have not come back. More than the capacity are owed.
    taken: u128,
    at: u64,
}

impl Bucket {
    fn parts_of(&self, tokens: u64) -> u128 {
        u128::from(tokens) * u128::from(self.pace.period_us)
    }

    fn refilled(&self, from: u64, to: u64) -> u128 {
        match self.refill {
            Refill::Smooth => u128::from(to - from) * u128::from(self.pace.count),
            Refill::Interval => {
                let period_ends = to / self.pace.period_us - from / self.pace.period_us;
                u128::from(period_ends) * self.parts_of(self.pace.count)
            }
        }
    }

    fn taken_at(&self, now: u64) -> u128 {
        self.taken.saturating_sub(self.refilled(self.at, now))
    }
}

impl Oracle for Bucket {
    fn admits(&self, now: u64, cost: u64) -> bool {
        self.taken_at(now) + self.parts_of(cost) <= self.parts_of(self.capacity)
    }

    fn admitted(&mut self, now: u64, cost: u64) {
        self.taken = self.taken_at(now) + self.parts_of(cost);
        self.at = now;
    }

    /// Units that were refilled since the charge have paid it back.
    fn gives_back(&mut self, now: u64, at: u64, units: u64) {
        let given = self.parts_of(units).saturating_sub(self.refilled(at, now));
        self.taken = self.taken_at(now).saturating_sub(given);
        self.at = now;
    }

    fn resets(&mut self, now: u64) {
        (self.taken, self.at) = (0, now);
    }

    fn has_quota(&mut self, quota: u64) {
        self.capacity = quota;
    }
}

/// Returns the plan's oracle at rest.
pub(crate) fn oracle(plan: &Plan, start: u64) -> impl Oracle + use<> {
    let Plan::Token { capacity, pace, refill } = *plan else { unreachable!("a plan for tokens") };
    Bucket { capacity, pace, refill, taken: 0, at: start }
}

fn agrees(plan: Plan, start: u64, steps: &[Step]) -> Result<(), TestCaseError> {
    agree(plan, oracle(&plan, start), start, steps)
}

proptest! {
    #![proptest_config(mostly_accepted())]

    #[test]
    fn smooth_refill_is_exact(plan in token(Refill::Smooth), start in start(), steps in steps()) {
        agrees(plan, start, &steps)?;
    }

    #[test]
    fn interval_refill_is_exact(plan in token(Refill::Interval), start in start(), steps in steps()) {
        agrees(plan, start, &steps)?;
    }
}

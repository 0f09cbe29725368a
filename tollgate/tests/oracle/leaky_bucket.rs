//! An oracle for a leaky bucket, whose level is an exact fraction: the denominator is the leak period in microseconds.

use proptest::prelude::*;

use crate::common::plan::{Pace, Plan, leaky_meter, leaky_queue, mostly_accepted};
use crate::common::traffic::{Step, start, steps};
use crate::{Oracle, agree};

struct Bucket {
    capacity: u64,
    pace: Pace,
    max_wait_us: Option<u64>,
    parts: u128,
    at: u64,
}

impl Bucket {
    fn parts_of(&self, units: u64) -> u128 {
        u128::from(units) * u128::from(self.pace.period_us)
    }

    fn parts_at(&self, now: u64) -> u128 {
        self.parts.saturating_sub(u128::from(now - self.at) * u128::from(self.pace.count))
    }

    /// Returns the time until everything admitted before has leaked, in whole microseconds.
    fn wait(&self, now: u64) -> u64 {
        u64::try_from(self.parts_at(now).div_ceil(u128::from(self.pace.count))).expect("a full bucket empties in time")
    }
}

impl Oracle for Bucket {
    fn admits(&self, now: u64, cost: u64) -> bool {
        let fits = self.parts_at(now) + self.parts_of(cost) <= self.parts_of(self.capacity);
        fits && self.max_wait_us.is_none_or(|longest| self.wait(now) <= longest)
    }

    fn delay(&self, now: u64) -> u64 {
        if self.max_wait_us.is_some() { self.wait(now) } else { 0 }
    }

    fn admitted(&mut self, now: u64, cost: u64) {
        self.parts = self.parts_at(now) + self.parts_of(cost);
        self.at = now;
    }

    /// Units that have leaked since the charge have paid it back. Later requests in a queue have their delays already.
    fn gives_back(&mut self, now: u64, at: u64, units: u64) {
        if self.max_wait_us.is_none() {
            let leaked = u128::from(now - at) * u128::from(self.pace.count);
            self.parts = self.parts_at(now).saturating_sub(self.parts_of(units).saturating_sub(leaked));
            self.at = now;
        }
    }

    fn resets(&mut self, now: u64) {
        (self.parts, self.at) = (0, now);
    }

    fn has_quota(&mut self, quota: u64) {
        self.capacity = quota;
    }
}

/// Returns the plan's oracle at rest.
pub(crate) fn oracle(plan: &Plan, start: u64) -> impl Oracle + use<> {
    let Plan::Leaky { capacity, pace, max_wait_us } = *plan else { unreachable!("a plan for a leak") };
    Bucket { capacity, pace, max_wait_us, parts: 0, at: start }
}

fn agrees(plan: Plan, start: u64, steps: &[Step]) -> Result<(), TestCaseError> {
    agree(plan, oracle(&plan, start), start, steps)
}

proptest! {
    #![proptest_config(mostly_accepted())]

    #[test]
    fn the_meter_is_exact(plan in leaky_meter(), start in start(), steps in steps()) {
        agrees(plan, start, &steps)?;
    }

    #[test]
    fn the_queue_is_exact(plan in leaky_queue(), start in start(), steps in steps()) {
        agrees(plan, start, &steps)?;
    }
}

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
    parts: u128,
    at: u64,
}

impl Bucket {
    fn parts_of(&self, tokens: u64) -> u128 {
        u128::from(tokens) * u128::from(self.pace.period_us)
    }

    fn parts_at(&self, now: u64) -> u128 {
        let gained = match self.refill {
            Refill::Smooth => u128::from(now - self.at) * u128::from(self.pace.count),
            Refill::Interval => {
                let period_ends = now / self.pace.period_us - self.at / self.pace.period_us;
                u128::from(period_ends) * self.parts_of(self.pace.count)
            }
        };
        (self.parts + gained).min(self.parts_of(self.capacity))
    }
}

impl Oracle for Bucket {
    fn admits(&self, now: u64, cost: u64) -> bool {
        self.parts_at(now) >= self.parts_of(cost)
    }

    fn admitted(&mut self, now: u64, cost: u64) {
        self.parts = self.parts_at(now) - self.parts_of(cost);
        self.at = now;
    }
}

fn agrees(plan: Plan, start: u64, steps: &[Step]) -> Result<(), TestCaseError> {
    let Plan::Token { capacity, pace, refill } = plan else { unreachable!("a plan for tokens") };
    let parts = u128::from(capacity) * u128::from(pace.period_us);
    agree(plan, Bucket { capacity, pace, refill, parts, at: start }, start, steps)
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

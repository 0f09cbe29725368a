//! An oracle that keeps the time of every admitted request, and sums up those in a window.

use proptest::prelude::*;

use crate::common::plan::{Align, Plan, fixed, mostly_accepted};
use crate::common::traffic::{Step, start, steps};
use crate::{Oracle, agree, reduce};

struct Windows {
    limit: u64,
    window_us: u64,
    align: Align,
    charges: Vec<(u64, u64)>,
}

impl Windows {
    /// Returns the start of the window that contains `now`, or `None` if no window is open.
    fn opened(&self, now: u64) -> Option<u64> {
        if self.align == Align::Clock {
            return Some(now - now % self.window_us);
        }
        let mut opened = None;
        for &(at, _) in &self.charges {
            if opened.is_none_or(|opened| at - opened >= self.window_us) {
                opened = Some(at);
            }
        }
        opened.filter(|opened| now - opened < self.window_us)
    }
}

impl Oracle for Windows {
    fn admits(&self, now: u64, cost: u64) -> bool {
        let Some(opened) = self.opened(now) else { return true };
        let spent: u64 = self.charges.iter().filter(|(at, _)| *at >= opened).map(|(_, cost)| cost).sum();
        spent + cost <= self.limit
    }

    fn admitted(&mut self, now: u64, cost: u64) {
        self.charges.push((now, cost));
    }

    fn gives_back(&mut self, now: u64, at: u64, units: u64) {
        let Some(opened) = self.opened(now).filter(|opened| at >= *opened) else { return };
        reduce(&mut self.charges, at, units);
        // A window is open while it counts something.
        if self.charges.iter().filter(|(at, _)| *at >= opened).all(|(_, cost)| *cost == 0) {
            self.charges.retain(|(at, _)| *at < opened);
        }
    }

    fn resets(&mut self, _now: u64) {
        self.charges.clear();
    }

    fn has_quota(&mut self, quota: u64) {
        self.limit = quota;
    }
}

/// Returns the plan's oracle at rest.
pub(crate) fn oracle(plan: &Plan) -> impl Oracle + use<> {
    let Plan::Fixed { limit, window_us, align } = *plan else { unreachable!("a plan for fixed windows") };
    Windows { limit, window_us, align, charges: Vec::new() }
}

fn agrees(plan: Plan, start: u64, steps: &[Step]) -> Result<(), TestCaseError> {
    agree(plan, oracle(&plan), start, steps)
}

proptest! {
    #![proptest_config(mostly_accepted())]

    #[test]
    fn windows_of_the_clock_are_exact(plan in fixed(Align::Clock), start in start(), steps in steps()) {
        agrees(plan, start, &steps)?;
    }

    #[test]
    fn windows_from_the_first_request_are_exact(plan in fixed(Align::FirstRequest), start in start(), steps in steps()) {
        agrees(plan, start, &steps)?;
    }
}

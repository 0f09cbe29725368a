//! An oracle that keeps the time of every admitted request, and sums up those in a window.

use proptest::prelude::*;

use crate::common::plan::{Align, Plan, fixed, mostly_accepted};
use crate::common::traffic::{Step, start, steps};
use crate::{Oracle, agree};

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
}

fn agrees(plan: Plan, start: u64, steps: &[Step]) -> Result<(), TestCaseError> {
    let Plan::Fixed { limit, window_us, align } = plan else { unreachable!("a plan for fixed windows") };
    agree(plan, Windows { limit, window_us, align, charges: Vec::new() }, start, steps)
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

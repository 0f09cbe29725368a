//! An oracle that keeps the time of every admitted request. The estimate is computed from the list, in parts of `1 /
//! window`: a segment that is entirely inside the window counts in full, and any other by the share that is inside.
//!
//! Segment `n` is the time from `n × window / segments` to `(n + 1) × window / segments` since the epoch. Its ends need
//! not be whole microseconds, so times are multiplied by the number of segments and compared exactly.

use proptest::prelude::*;

use crate::common::plan::{Plan, counter, mostly_accepted};
use crate::common::traffic::{Step, start, steps};
use crate::{Oracle, agree, reduce};

struct Segments {
    limit: u64,
    window_us: u64,
    segments: u32,
    charges: Vec<(u64, u64)>,
}

impl Segments {
    /// Returns the share of the segment of `at` that is inside the window that ends at `now`, in parts of `1 / window`.
    /// The segment of `now` counts in full, although a part of it is in the future.
    fn share(&self, at: u64, now: u64) -> i128 {
        let (window, segments) = (i128::from(self.window_us), i128::from(self.segments));
        let segment_start = i128::from(at) * segments / window * window;
        let window_start = (i128::from(now) - window) * segments;
        (segment_start + window - window_start).clamp(0, window)
    }
}

impl Oracle for Segments {
    fn admits(&self, now: u64, cost: u64) -> bool {
        let estimate: i128 = self.charges.iter().map(|&(at, cost)| i128::from(cost) * self.share(at, now)).sum();
        let window = i128::from(self.window_us);
        estimate + i128::from(cost - 1) * window < i128::from(self.limit) * window
    }

    fn admitted(&mut self, now: u64, cost: u64) {
        self.charges.push((now, cost));
    }

    fn gives_back(&mut self, _now: u64, at: u64, units: u64) {
        reduce(&mut self.charges, at, units);
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
    let Plan::Counter { limit, window_us, segments } = *plan else { unreachable!("a plan for a counter") };
    Segments { limit, window_us, segments, charges: Vec::new() }
}

fn agrees(plan: Plan, start: u64, steps: &[Step]) -> Result<(), TestCaseError> {
    agree(plan, oracle(&plan), start, steps)
}

proptest! {
    #![proptest_config(mostly_accepted())]

    #[test]
    fn the_estimate_is_exact(plan in counter(), start in start(), steps in steps()) {
        agrees(plan, start, &steps)?;
    }
}

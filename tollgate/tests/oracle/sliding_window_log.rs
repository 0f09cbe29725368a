//! An oracle that keeps the time of every logged request. A request is outside the window once its age is the window or
//! more.

use proptest::prelude::*;

use crate::common::START_US;
use crate::common::plan::{Logs, Plan, log, mostly_accepted};
use crate::common::traffic::{Ask, Gap, Step, ask, start, steps};
use crate::{Oracle, agree, reduce};

struct Log {
    limit: u64,
    window_us: u64,
    logs: Logs,
    entries: Vec<(u64, u64)>,
}

impl Oracle for Log {
    fn admits(&self, now: u64, cost: u64) -> bool {
        let inside = self.entries.iter().filter(|(at, _)| now - at < self.window_us);
        inside.map(|(_, cost)| cost).sum::<u64>() + cost <= self.limit
    }

    fn admitted(&mut self, now: u64, cost: u64) {
        self.entries.push((now, cost));
    }

    fn denied(&mut self, now: u64, cost: u64) {
        if self.logs == Logs::DeniedToo {
            self.entries.push((now, cost));
        }
    }

    fn gives_back(&mut self, _now: u64, at: u64, units: u64) {
        reduce(&mut self.entries, at, units);
    }

    fn resets(&mut self, _now: u64) {
        self.entries.clear();
    }

    fn has_quota(&mut self, quota: u64) {
        self.limit = quota;
    }
}

/// Returns the plan's oracle at rest.
pub(crate) fn oracle(plan: &Plan) -> impl Oracle + use<> {
    let Plan::Log { limit, window_us, logs } = *plan else { unreachable!("a plan for a log") };
    Log { limit, window_us, logs, entries: Vec::new() }
}

fn agrees(plan: Plan, start: u64, steps: &[Step]) -> Result<(), TestCaseError> {
    agree(plan, oracle(&plan), start, steps)
}

proptest! {
    #![proptest_config(mostly_accepted())]

    #[test]
    fn a_log_of_the_admitted_is_exact(plan in log(Logs::Admitted), start in start(), steps in steps()) {
        agrees(plan, start, &steps)?;
    }

    #[test]
    fn a_log_of_the_denied_too_is_exact(plan in log(Logs::DeniedToo), start in start(), steps in steps()) {
        agrees(plan, start, &steps)?;
    }
}

/// Generates a limit of hundreds or thousands, and enough requests of a few units to fill and empty its log many times.
fn long_log(logs: Logs) -> impl Strategy<Value = (Plan, Vec<Step>)> {
    let gap = prop_oneof![
        4 => Just(Gap::Micros(0)),
        8 => (1..=2_500_u64).prop_map(Gap::UnitPermille),
        2 => (0..=100_u64).prop_map(Gap::SpanPermille),
        1 => (-1..=1_i64).prop_map(Gap::Retry),
    ];
    let ask = prop_oneof![8 => Just(Ask::Units(1)), 2 => (0..=5_u64).prop_map(Ask::Units), 1 => ask()];
    let plan = (100..=3_000_u64, prop_oneof![1_000..=10_000_000_u64, 1_000..=1_u64 << 49])
        .prop_map(move |(limit, window_us)| Plan::Log { limit, window_us, logs });
    let step = (gap, ask).prop_map(|(gap, ask)| Step { gap, ask });
    (plan, prop::collection::vec(step, 300..900))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_long_log_is_exact((plan, steps) in long_log(Logs::Admitted)) {
        agrees(plan, START_US, &steps)?;
    }

    #[test]
    fn a_long_log_of_the_denied_too_is_exact((plan, steps) in long_log(Logs::DeniedToo)) {
        agrees(plan, START_US, &steps)?;
    }
}

//! The most that each algorithm may admit, and checks that it never admits more.

use proptest::prelude::*;

use crate::common::plan::{self, Align, Pace, Plan, Refill, mostly_accepted};
use crate::common::traffic::{start, steps, untouched};
use crate::{Charge, accepted};

/// Checks the charges of one key, in the order of their times, against the most that the plan allows.
pub(crate) fn within_bound(plan: &Plan, charges: &[Charge]) -> Result<(), TestCaseError> {
    let segments = |at: u64, window_us: u64, count: u64| u128::from(at) * u128::from(count) / u128::from(window_us);
    match *plan {
        Plan::Token { capacity, pace, refill: Refill::Smooth } | Plan::Leaky { capacity, pace, .. } => {
            within_rate(charges, capacity, pace)
        }
        Plan::Token { capacity, pace, .. } => every_run(charges, |first, last| {
            u128::from(last.at / pace.period_us - first.at / pace.period_us) * u128::from(pace.count)
                + u128::from(capacity)
        }),
        Plan::Fixed { limit, window_us, align: Align::Clock } => {
            within_any(charges, limit, |first, last| first.at / window_us == last.at / window_us)
        }
        Plan::Fixed { limit, window_us, align: Align::FirstRequest } => {
            within_any(charges, 2 * limit, |first, last| last.at - first.at < window_us)
        }
        Plan::Log { limit, window_us, .. } => within_any(charges, limit, |first, last| last.at - first.at < window_us),
        Plan::Counter { limit, window_us, segments: count } => {
            let count = u64::from(count);
            within_any(charges, limit, |first, last| {
                segments(last.at, window_us, count) - segments(first.at, window_us, count) < u128::from(count)
            })?;
            within_any(charges, 2 * limit, |first, last| last.at - first.at < window_us)
        }
    }
}

/// Checks that no run of charges takes more than the capacity plus the refill in the meantime.
pub(crate) fn within_rate(charges: &[Charge], capacity: u64, pace: Pace) -> Result<(), TestCaseError> {
    every_run(charges, |first, last| {
        let gained = u128::from(last.at - first.at) * u128::from(pace.count) / u128::from(pace.period_us);
        gained + u128::from(capacity)
    })
}

/// Checks that no run of charges for which `together` holds takes more than `most`.
pub(crate) fn within_any(
    charges: &[Charge],
    most: u64,
    together: impl Fn(&Charge, &Charge) -> bool,
) -> Result<(), TestCaseError> {
    every_run(charges, |first, last| if together(first, last) { u128::from(most) } else { u128::MAX })
}

fn every_run(charges: &[Charge], most: impl Fn(&Charge, &Charge) -> u128) -> Result<(), TestCaseError> {
    for (begin, first) in charges.iter().enumerate() {
        let mut taken = 0;
        for last in &charges[begin..] {
            taken += u128::from(last.cost);
            let most = most(first, last);
            prop_assert!(taken <= most, "took {taken} of {most} from {} to {}", first.at, last.at);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(mostly_accepted())]

    #[test]
    fn nothing_ever_holds_more_than_its_bound(plan in plan::any(), start in start(), steps in steps()) {
        let rig = accepted(&plan, start)?;
        let (mut now, mut last, mut charges) = (start, untouched(&plan), Vec::new());
        for step in steps {
            now = step.gap.after(now, &last, &plan);
            let cost = step.ask.cost(&last, &plan);
            last = rig.ask(now, cost);
            prop_assert!(last.remaining <= plan.quota());
            if last.allowed {
                charges.push(Charge { at: now, cost });
            }
        }
        within_bound(&plan, &charges)?;
    }
}

//! The times and the remaining quota in a decision are exact, to the microsecond and to the unit, even after the clock
//! has stepped back.

use proptest::prelude::*;

use crate::clock_steps::{Move, moves, moves_forward, our_days};
use crate::common::Answer;
use crate::common::plan::{self, Plan, mostly_accepted};
use crate::common::traffic::{Ask, ask, untouched};
use crate::{Request, accepted, replay};

/// Sends random requests, and checks the last denial and the last decision.
fn promises_hold(plan: &Plan, start: u64, steps: &[(Move, Ask)]) -> Result<(), TestCaseError> {
    let rig = accepted(plan, start)?;
    let (mut at, mut last) = (start, untouched(plan));
    let (mut requests, mut answers) = (Vec::new(), Vec::new());
    for (step, ask) in steps {
        at = step.from(at, &last, plan);
        let cost = ask.cost(&last, plan);
        last = rig.ask(at, cost);
        requests.push(Request { at, cost });
        answers.push(last);
    }
    if let Some(denial) = answers.iter().rposition(|answer| answer.retry_after.is_some()) {
        promise_holds(plan, start, &requests[..=denial], &answers[denial])?;
    }
    promise_holds(plan, start, &requests, &last)
}

/// Checks the decision on the last of these requests, each field with a new limiter that has decided the same requests.
fn promise_holds(plan: &Plan, start: u64, requests: &[Request], answer: &Answer) -> Result<(), TestCaseError> {
    let last = requests.last().expect("a trace has requests");
    let passes = |wait, cost| replay(plan, start, requests).ask(last.at + wait, cost).allowed;
    prop_assert_eq!(answer.retry_after.is_some(), !answer.allowed && last.cost <= plan.quota());
    if let Some(wait) = answer.retry_after {
        prop_assert!(wait > 0, "a denied request has a retry_after of 0");
        prop_assert!(passes(wait, last.cost), "denied {wait} µs after {last:?}");
        prop_assert!(!passes(wait - 1, last.cost), "passed a microsecond before {wait} µs after {last:?}");
    }
    prop_assert!(passes(answer.reset_after, plan.quota()), "not all back: {answer:?}");
    if answer.reset_after > 0 {
        prop_assert!(!passes(answer.reset_after - 1, plan.quota()), "all back earlier: {answer:?}");
    }
    prop_assert!(passes(0, answer.remaining), "what remained did not pass: {answer:?}");
    prop_assert!(!passes(0, answer.remaining + 1), "more than what remained passed: {answer:?}");
    Ok(())
}

proptest! {
    #![proptest_config(mostly_accepted())]

    #[test]
    fn the_promised_wait_is_exact(
        plan in plan::any(),
        start in our_days(),
        steps in prop::collection::vec((moves_forward(), ask()), 1..40),
    ) {
        promises_hold(&plan, start, &steps)?;
    }

    #[test]
    fn the_promised_wait_is_exact_after_the_clock_stepped_back(
        plan in plan::any(),
        start in our_days(),
        steps in prop::collection::vec((moves(), ask()), 1..40),
    ) {
        promises_hold(&plan, start, &steps)?;
    }
}

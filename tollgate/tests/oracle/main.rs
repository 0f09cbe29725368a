//! Every algorithm against a brute-force oracle.
//!
//! An oracle is written from the definition in the specification, not from the code. It keeps a list of events or an
//! exact fraction, and answers one question: would this cost pass at this time? All fields of a decision are derived
//! from that question by searching. The clock only goes forward here; `properties` tests clocks that step back.

#[path = "../common/mod.rs"]
mod common;

mod debts;
mod fixed_window;
mod leaky_bucket;
mod sliding_window_counter;
mod sliding_window_log;
mod token_bucket;

use common::plan::Plan;
use common::traffic::{Step, untouched};
use common::{Answer, Rig};
use proptest::prelude::*;

/// One key of one limit, by its definition. Times are microseconds since the epoch and never decrease.
trait Oracle {
    /// Returns whether a request of `cost`, from 1 to the quota, is admitted at `now` if no other request comes first.
    fn admits(&self, now: u64, cost: u64) -> bool;

    /// Returns the delay of a request at `now`.
    fn delay(&self, _now: u64) -> u64 {
        0
    }

    fn admitted(&mut self, now: u64, cost: u64);

    fn denied(&mut self, _now: u64, _cost: u64) {}

    /// Counts units that were spent already, whatever the quota is.
    fn owes(&mut self, now: u64, units: u64) {
        self.admitted(now, units);
    }

    /// Gives back units that were charged at `at`, as far as they still count.
    fn gives_back(&mut self, now: u64, at: u64, units: u64);

    /// Gives the whole quota back.
    fn resets(&mut self, now: u64);

    /// Changes the quota, and nothing else.
    fn has_quota(&mut self, quota: u64);
}

/// Takes back units of the charges made at `at`.
fn reduce(charges: &mut [(u64, u64)], at: u64, mut units: u64) {
    for (_, cost) in charges.iter_mut().filter(|(then, _)| *then == at) {
        let given = units.min(*cost);
        (*cost, units) = (*cost - given, units - given);
    }
}

fn expected(oracle: &mut impl Oracle, quota: u64, now: u64, cost: u64) -> Answer {
    let allowed = cost == 0 || (cost <= quota && oracle.admits(now, cost));
    let delay = if allowed { oracle.delay(now) } else { 0 };
    if allowed && cost > 0 {
        oracle.admitted(now, cost);
    } else if cost > 0 && cost <= quota {
        oracle.denied(now, cost);
    }
    let first_refused = first(|cost| cost > quota || (cost > 0 && !oracle.admits(now, cost)));
    Answer {
        allowed,
        remaining: first_refused - 1,
        reset_after: first(|wait| oracle.admits(now + wait, quota)),
        retry_after: (!allowed && cost <= quota).then(|| first(|wait| oracle.admits(now + wait, cost))),
        delay,
    }
}

/// Returns the smallest number for which a condition holds that holds for all larger numbers too.
fn first(holds: impl Fn(u64) -> bool) -> u64 {
    if holds(0) {
        return 0;
    }
    let (mut no, mut yes) = (0, 1);
    while !holds(yes) {
        (no, yes) = (yes, yes * 2);
    }
    while yes - no > 1 {
        let middle = no + (yes - no) / 2;
        if holds(middle) { yes = middle } else { no = middle }
    }
    yes
}

/// Sends the same requests to the library and to the oracle, and checks that all decisions are equal in every field.
fn agree(plan: Plan, mut oracle: impl Oracle, start: u64, steps: &[Step]) -> Result<(), TestCaseError> {
    let limit = plan.limit();
    prop_assume!(limit.is_ok());
    let rig = Rig::new(limit.expect("just seen to be valid"), start);
    let (mut now, mut last) = (start, untouched(&plan));
    for (index, step) in steps.iter().enumerate() {
        now = step.gap.after(now, &last, &plan);
        let cost = step.ask.cost(&last, &plan);
        last = expected(&mut oracle, plan.quota(), now, cost);
        prop_assert_eq!(rig.ask(now, cost), last, "request {} at {} µs for {} (left is tollgate)", index, now, cost);
    }
    Ok(())
}

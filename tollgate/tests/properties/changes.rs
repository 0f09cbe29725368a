//! Limits that change during a trace: at any instant, no key gets more than the quota of the limit that admits its last
//! request.

use proptest::prelude::*;
use tollgate::{Limit, Limiter};

use crate::common::Answer;
use crate::common::plan::{self, Plan};
use crate::common::traffic::{Step, start, steps, untouched};
use crate::{Rig, accepted};

/// Returns limiters of these plans, each created from the previous one, on one clock. All of them are used, as by
/// requests in flight during a reload.
fn chain(plans: &[Plan], start: u64) -> Result<(Rig, Vec<Limiter>), TestCaseError> {
    let rig = accepted(&plans[0], start)?;
    let mut limiters = vec![rig.limiter.clone()];
    for plan in &plans[1..] {
        let limit: Limit = plan.limit().map_err(|error| TestCaseError::reject(error.to_string()))?;
        let next = limiters[limiters.len() - 1].with_limits(vec![limit]);
        limiters.push(next.expect("a valid limit"));
    }
    Ok((rig, limiters))
}

proptest! {
    #![proptest_config(ProptestConfig { max_global_rejects: 100_000, ..ProptestConfig::default() })]

    #[test]
    fn changes_give_nothing_back(
        plans in proptest::collection::vec(plan::any(), 2..4), start in start(), steps in steps(),
        by in proptest::collection::vec(0_usize..4, 60),
    ) {
        let (rig, limiters) = chain(&plans, start)?;
        let (mut now, mut last, mut instant) = (start, untouched(&plans[0]), 0_u64);
        for (Step { gap, ask }, by) in steps.into_iter().zip(by) {
            let by = by % plans.len();
            let (plan, limiter) = (&plans[by], &limiters[by]);
            let then = gap.after(now, &last, plan);
            instant = if then == now { instant } else { 0 };
            now = then;
            rig.set(now);
            let cost = ask.cost(&last, plan);
            last = Answer::from(limiter.check_n("key", cost));
            if last.allowed && cost > 0 {
                instant = instant.saturating_add(cost);
                prop_assert!(instant <= plan.quota(), "{instant} of {} at one instant", plan.quota());
            }
            // Every limit includes the charges of this instant.
            for (other, limiter) in plans.iter().zip(&limiters) {
                let left = limiter.peek("key").remaining();
                prop_assert!(left <= other.quota().saturating_sub(instant), "{left} left after {instant} of {other:?}");
            }
        }
    }
}

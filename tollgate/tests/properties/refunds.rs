//! Refunds and settlements create no quota: the charges that were not given back, each at the time it was made, stay
//! within the same bound as without refunds.

use proptest::prelude::*;
use proptest::sample::Index;
use tollgate::{MAX_SPAN, Reservation, Settlement};

use crate::bounds::within_bound;
use crate::common::plan::{self, Align, Logs, Plan, mostly_accepted};
use crate::common::traffic::{Ask, Gap, ask, gap, start, untouched};
use crate::common::{Answer, Rig};
use crate::{Charge, accepted};

#[derive(Clone, Debug)]
enum Act {
    Ask(Ask),
    /// Refunds one of the reservations.
    Refund(Index),
    Reserve(Ask),
    /// Settles one of the reservations at this share of its estimate.
    Settle(Index, u64),
}

fn acts() -> impl Strategy<Value = Vec<(Gap, Act)>> {
    let act = prop_oneof![
        3 => ask().prop_map(Act::Ask),
        3 => any::<Index>().prop_map(Act::Refund),
        4 => ask().prop_map(Act::Reserve),
        2 => (any::<Index>(), 0..=1_000_u64).prop_map(|(which, permille)| Act::Settle(which, permille)),
    ];
    prop::collection::vec((gap(), act), 1..60)
}

/// All charges, and the reservations that can still be refunded.
struct Ledger {
    rig: Rig,
    charges: Vec<Charge>,
    reserved: Vec<(usize, Reservation)>,
}

impl Ledger {
    fn of(rig: Rig) -> Self {
        Self { rig, charges: Vec::new(), reserved: Vec::new() }
    }

    fn charge(&mut self, at: u64, cost: u64) -> usize {
        self.charges.push(Charge { at, cost });
        self.charges.len() - 1
    }

    fn perform(&mut self, act: Act, now: u64, last: &Answer, plan: &Plan) -> Result<(), TestCaseError> {
        let limiter = self.rig.limiter.clone();
        match act {
            Act::Ask(ask) => {
                let decision = limiter.check_n("key", ask.cost(last, plan));
                if decision.is_allowed() {
                    self.charge(now, decision.cost());
                }
            }
            Act::Refund(which) if !self.reserved.is_empty() => {
                let (charge, reservation) = self.reserved.swap_remove(which.index(self.reserved.len()));
                prop_assert_eq!(limiter.refund(reservation), Settlement::Settled);
                self.charges[charge].cost = 0;
            }
            Act::Reserve(ask) => {
                let estimate = ask.cost(last, plan);
                match limiter.reserve("key", estimate, MAX_SPAN * 4) {
                    Ok(reservation) => {
                        let charge = self.charge(now, estimate);
                        self.reserved.push((charge, reservation));
                    }
                    Err(decision) => prop_assert!(!decision.decision().is_allowed()),
                }
            }
            Act::Settle(which, permille) if !self.reserved.is_empty() => {
                let (charge, reservation) = self.reserved.swap_remove(which.index(self.reserved.len()));
                let estimate = self.charges[charge].cost;
                let actual = u64::try_from(u128::from(estimate) * u128::from(permille) / 1_000).expect("a share");
                prop_assert_eq!(limiter.settle(reservation, actual), Settlement::Settled);
                self.charges[charge].cost = actual;
            }
            Act::Refund(_) | Act::Settle(..) => {}
        }
        Ok(())
    }
}

/// Returns the remaining quota of a window without the charges that were refunded, or `None` for algorithms that refund
/// less, or that count denied requests.
fn remaining_without(plan: &Plan, charges: &[Charge], now: u64) -> Option<u64> {
    let inside = |from: u64| charges.iter().filter(|charge| charge.at >= from).map(|charge| charge.cost).sum::<u64>();
    match *plan {
        Plan::Fixed { limit, window_us, align: Align::Clock } => Some(limit - inside(now - now % window_us)),
        Plan::Log { limit, window_us, logs: Logs::Admitted } => {
            Some(limit - inside((now + 1).saturating_sub(window_us)))
        }
        _ => None,
    }
}

proptest! {
    #![proptest_config(mostly_accepted())]

    #[test]
    fn giving_back_mints_nothing(plan in plan::any(), start in start(), acts in acts()) {
        let mut ledger = Ledger::of(accepted(&plan, start)?);
        let (mut now, mut last) = (start, untouched(&plan));
        for (gap, act) in acts {
            now = gap.after(now, &last, &plan);
            ledger.rig.set(now);
            ledger.perform(act, now, &last, &plan)?;
            last = ledger.rig.limiter.peek("key").into();
            prop_assert!(last.remaining <= plan.quota());
            if let Some(remaining) = remaining_without(&plan, &ledger.charges, now) {
                prop_assert_eq!(last.remaining, remaining);
            }
        }
        within_bound(&plan, &ledger.charges)?;
    }
}

//! Settlements at any cost, against the oracles: the actual cost is counted in full, and the key is denied until it is paid.

use proptest::prelude::*;
use proptest::sample::Index;
use tollgate::{MAX_SPAN, Reservation, Settlement};

use crate::common::plan::{self, Logs, Plan, Refill, mostly_accepted};
use crate::common::traffic::{Ask, Gap, ask, gap, start, untouched};
use crate::common::{Answer, Rig};
use crate::{Oracle, expected, fixed_window, leaky_bucket, sliding_window_counter, sliding_window_log, token_bucket};

/// More than any of these tests may owe: a key counts up to 2^39 units, and pays for 35 years at most.
const MOST_UNITS: u64 = 1 << 37;

#[derive(Clone, Debug)]
enum Act {
    Ask(Ask),
    Reserve(Ask),
    /// Settles one of the reservations at this share of its estimate.
    SettleBelow(Index, u64),
    /// Settles one of the reservations at its estimate and these units.
    SettleAbove(Index, Excess),
    Reset,
    /// Changes the quota to this many thousandths of the first.
    Reload(u64),
}

#[derive(Clone, Copy, Debug)]
enum Excess {
    Units(u64),
    Quotas(u64),
}

fn acts() -> impl Strategy<Value = Vec<(Gap, Act)>> {
    let excess = prop_oneof![
        (0..=5_u64).prop_map(Excess::Units),
        (1..=300_u64).prop_map(Excess::Quotas),
        (any::<u64>(), 27..=63_u32).prop_map(|(units, shift)| Excess::Units(units >> shift)),
    ];
    let act = prop_oneof![
        8 => ask().prop_map(Act::Ask),
        6 => ask().prop_map(Act::Reserve),
        4 => (any::<Index>(), 0..=1_000_u64).prop_map(|(which, permille)| Act::SettleBelow(which, permille)),
        4 => (any::<Index>(), excess).prop_map(|(which, excess)| Act::SettleAbove(which, excess)),
        1 => Just(Act::Reset),
        1 => prop_oneof![1..=1_000_u64, 1_000..=50_000_u64].prop_map(Act::Reload),
    ];
    prop::collection::vec((gap(), act), 1..80)
}

/// A reservation, the time of its charge and its units.
type Open = (Reservation, u64, u64);

struct Ledger<O> {
    plan: Plan,
    rig: Rig,
    oracle: O,
    open: Vec<Open>,
    /// Units that were owed so far.
    owed: u64,
    first_quota: u64,
    is_changed: bool,
}

impl<O: Oracle> Ledger<O> {
    fn perform(&mut self, act: Act, now: u64, last: &Answer) -> Result<(), TestCaseError> {
        let limiter = self.rig.limiter.clone();
        match act {
            Act::Ask(ask) => {
                let cost = ask.cost(last, &self.plan);
                let answer = self.rig.ask(now, cost);
                prop_assert_eq!(answer, expected(&mut self.oracle, self.plan.quota(), now, cost), "at {}", now);
            }
            Act::Reserve(ask) => {
                let cost = ask.cost(last, &self.plan);
                let reserved = limiter.reserve("key", cost, MAX_SPAN * 4);
                let answer = expected(&mut self.oracle, self.plan.quota(), now, cost);
                prop_assert_eq!(reserved.is_ok(), answer.allowed, "a reservation of {} at {}", cost, now);
                self.open.extend(reserved.ok().map(|reservation| (reservation, now, cost)));
            }
            Act::SettleBelow(which, permille) if !self.open.is_empty() => {
                let (reservation, at, estimate) = self.open.swap_remove(which.index(self.open.len()));
                let actual = u64::try_from(u128::from(estimate) * u128::from(permille) / 1_000).expect("a share");
                prop_assert_eq!(limiter.settle(reservation, actual), Settlement::Settled);
                if actual < estimate {
                    self.oracle.gives_back(now, at, estimate - actual);
                }
            }
            Act::SettleAbove(which, excess) if !self.open.is_empty() => {
                let excess = match excess {
                    Excess::Units(units) => units,
                    Excess::Quotas(quotas) => self.plan.quota().saturating_mul(quotas),
                };
                let excess = excess.min(MOST_UNITS - self.owed);
                let (reservation, _, estimate) = self.open.swap_remove(which.index(self.open.len()));
                let (left, settled) = (last.remaining, limiter.settle(reservation, estimate + excess));
                let counted = match settled {
                    Settlement::Settled => excess,
                    Settlement::Owed { units } => {
                        // The limits that took a reservation settle it.
                        if !self.is_changed {
                            prop_assert_eq!(units, excess - left, "of {} beyond the estimate", excess);
                        }
                        excess
                    }
                    Settlement::Short { missing } => {
                        let most = self.plan.with_quota(self.first_quota.saturating_mul(50));
                        prop_assert!(pays_for_longer_than_is_counted(&most, self.owed + excess));
                        excess - missing
                    }
                    other => return Err(TestCaseError::fail(format!("{other:?}"))),
                };
                if !self.is_changed {
                    prop_assert_eq!(settled == Settlement::Settled, excess <= left);
                }
                if counted > 0 {
                    self.oracle.owes(now, counted);
                    self.owed += counted;
                }
            }
            Act::Reset => {
                limiter.reset("key");
                self.oracle.resets(now);
                self.open.clear();
            }
            Act::Reload(permille) => {
                let quota = u128::from(self.first_quota) * u128::from(permille) / 1_000;
                let changed = self.plan.with_quota(u64::try_from(quota).expect("a share").max(1));
                if let Ok(limit) = changed.limit() {
                    self.rig.limiter = limiter.with_limits(vec![limit]).expect("one valid limit");
                    self.oracle.has_quota(changed.quota());
                    (self.plan, self.is_changed) = (changed, true);
                }
            }
            Act::SettleBelow(..) | Act::SettleAbove(..) => {}
        }
        Ok(())
    }
}

/// Returns whether a bucket may take more than 35 years, or half of that, to get these units back.
fn pays_for_longer_than_is_counted(plan: &Plan, units: u64) -> bool {
    let (Plan::Token { pace, .. } | Plan::Leaky { pace, .. }) = *plan else { return false };
    let micros = u128::from(units.saturating_add(plan.quota())) * u128::from(pace.period_us) / u128::from(pace.count);
    micros * 2 > MAX_SPAN.as_micros()
}

fn agree(plan: Plan, oracle: impl Oracle, start: u64, acts: Vec<(Gap, Act)>) -> Result<(), TestCaseError> {
    let limit = plan.limit();
    prop_assume!(limit.is_ok());
    let rig = Rig::new(limit.expect("just seen to be valid"), start);
    let mut ledger =
        Ledger { plan, rig, oracle, open: Vec::new(), owed: 0, first_quota: plan.quota(), is_changed: false };
    let (mut now, mut last) = (start, untouched(&plan));
    for (gap, act) in acts {
        now = gap.after(now, &last, &plan);
        ledger.rig.set(now);
        let before = ledger.rig.limiter.peek("key").into();
        ledger.perform(act, now, &before)?;
        last = ledger.rig.limiter.peek("key").into();
        let quota = ledger.plan.quota();
        prop_assert_eq!(last, expected(&mut ledger.oracle, quota, now, 0), "at {}", now);
        // A denied request, so that later gaps include its wait.
        let denied: Answer = ledger.rig.limiter.check_n("key", last.remaining + 1).into();
        prop_assert_eq!(denied, expected(&mut ledger.oracle, quota, now, last.remaining + 1), "at {}", now);
        last = denied;
    }
    Ok(())
}

/// The oldest of many entries are merged, which changes no decision.
#[test]
fn a_log_of_many_debts_waits_for_those_that_matter() {
    let plan = Plan::Log { limit: 10, window_us: 1_000_000, logs: Logs::Admitted };
    let (rig, mut oracle) = (Rig::new(plan.limit().expect("a valid limit"), 0), sliding_window_log::oracle(&plan));
    let open: Vec<_> = (0..1_000).map(|_| rig.limiter.reserve("key", 0, MAX_SPAN).expect("a look")).collect();
    for (now, reservation) in (1..).map(|step| step * 2_000).zip(open) {
        rig.set(now);
        rig.limiter.settle(reservation, 3);
        oracle.owes(now, 3);
        assert_same(&rig, &mut oracle, now);
    }
}

fn assert_same(rig: &Rig, oracle: &mut impl Oracle, now: u64) {
    for cost in 1..=10 {
        assert_eq!(rig.ask(now, cost), expected(oracle, 10, now, cost), "{cost} at {now}");
    }
}

/// A log that counts denied requests drops those beyond the limit, so it does not count them under a larger one, nor after a
/// refund.
fn without_reloads_and_refunds(acts: Vec<(Gap, Act)>) -> Vec<(Gap, Act)> {
    acts.into_iter().filter(|(_, act)| !matches!(act, Act::Reload(_) | Act::SettleBelow(..))).collect()
}

proptest! {
    #![proptest_config(mostly_accepted())]

    #[test]
    fn buckets_pay_at_their_rate(plan in plan::token(Refill::Smooth), start in start(), acts in acts()) {
        agree(plan, token_bucket::oracle(&plan, start), start, acts)?;
    }

    #[test]
    fn buckets_pay_by_the_portion(plan in plan::token(Refill::Interval), start in start(), acts in acts()) {
        agree(plan, token_bucket::oracle(&plan, start), start, acts)?;
    }

    #[test]
    fn leaky_buckets_pay_at_their_rate(plan in plan::leaky_meter(), start in start(), acts in acts()) {
        agree(plan, leaky_bucket::oracle(&plan, start), start, acts)?;
    }

    #[test]
    fn queues_pay_at_their_rate(plan in plan::leaky_queue(), start in start(), acts in acts()) {
        agree(plan, leaky_bucket::oracle(&plan, start), start, acts)?;
    }

    #[test]
    fn debts_end_with_windows_of_the_clock(plan in plan::fixed(plan::Align::Clock), start in start(), acts in acts()) {
        agree(plan, fixed_window::oracle(&plan), start, acts)?;
    }

    #[test]
    fn debts_end_with_windows_of_keys(plan in plan::fixed(plan::Align::FirstRequest), start in start(), acts in acts()) {
        agree(plan, fixed_window::oracle(&plan), start, acts)?;
    }

    #[test]
    fn debts_in_a_log_last_a_window(plan in plan::log(Logs::Admitted), start in start(), acts in acts()) {
        agree(plan, sliding_window_log::oracle(&plan), start, acts)?;
    }

    #[test]
    fn debts_in_a_log_of_the_denied_too(plan in plan::log(Logs::DeniedToo), start in start(), acts in acts()) {
        agree(plan, sliding_window_log::oracle(&plan), start, without_reloads_and_refunds(acts))?;
    }

    #[test]
    fn debts_leave_a_counter_by_shares(plan in plan::counter(), start in start(), acts in acts()) {
        agree(plan, sliding_window_counter::oracle(&plan), start, acts)?;
    }
}

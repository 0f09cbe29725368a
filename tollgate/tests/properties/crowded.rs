//! More live keys than slots, while time passes. A key that shares its slot with other keys, or gets its own slot
//! later, may be limited too strictly, but never gets more than its bound.

use proptest::prelude::*;
use tollgate::{Limiter, ManualClock, Timestamp};

use crate::Charge;
use crate::bounds::within_bound;
use crate::common::Dice;
use crate::common::plan::{Align, Logs, Pace, Plan, Refill};
use crate::common::traffic::start;

/// Returns room for a few hundred keys at most: for the first block of a table, and not for the next. Long states need
/// more.
fn max_memory(plan: &Plan) -> usize {
    match plan {
        Plan::Log { .. } => 36 * 1024,
        Plan::Counter { .. } | Plan::Fixed { .. } => 18 * 1024,
        _ => 9 * 1024,
    }
}

const KEYS: u64 = 2_000;

/// Every algorithm, with numbers small enough that keys come to rest and live again within a trace.
fn small_plan() -> impl Strategy<Value = Plan> {
    let pace = |count| Pace { count, period_us: 1_000_000 };
    let window_us = 1_000_000;
    (1..=8_u64, 1..=8_u64, 0..9_u8, 1..=7_u32).prop_map(move |(quota, count, kind, segments)| match kind {
        0 => Plan::Token { capacity: quota, pace: pace(count), refill: Refill::Smooth },
        1 => Plan::Token { capacity: quota, pace: pace(count), refill: Refill::Interval },
        2 => Plan::Leaky { capacity: quota, pace: pace(count), max_wait_us: None },
        3 => Plan::Leaky { capacity: quota, pace: pace(count), max_wait_us: Some(500_000) },
        4 => Plan::Fixed { limit: quota, window_us, align: Align::Clock },
        5 => Plan::Fixed { limit: quota, window_us, align: Align::FirstRequest },
        6 => Plan::Log { limit: quota, window_us, logs: Logs::Admitted },
        7 => Plan::Log { limit: quota, window_us, logs: Logs::DeniedToo },
        _ => Plan::Counter { limit: quota, window_us, segments },
    })
}

/// Mostly advances by almost nothing, and now and then by a large part of the window, so that some keys are at rest and
/// others are not.
fn next_moment(now: u64, plan: &Plan, dice: &mut Dice) -> u64 {
    match dice.below(1_000) {
        0 => plan.next_line(now) - dice.below(2),
        1..=5 => now + plan.span_us() * dice.below(300) / 1_000,
        _ => now + dice.below(20),
    }
}

proptest! {
    // Traces are long, so there are fewer of them.
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..ProptestConfig::default() })]

    #[test]
    fn a_key_without_room_is_never_richer_than_alone(plan in small_plan(), start in start(), seed in any::<u64>()) {
        let clock = ManualClock::at(Timestamp::from_micros(start));
        let limiter = Limiter::builder().limit(plan.limit().expect("small numbers are valid")).clock(clock.clone());
        let crowded = limiter.clone().max_memory(max_memory(&plan)).build().expect("enough memory to begin with");
        // With room for all keys, each is decided as if alone: see `turnover`.
        let roomy = limiter.build().expect("enough memory");
        let (mut now, mut dice, mut charges) = (start, Dice(seed), vec![Vec::new(); KEYS as usize]);
        for _ in 0..4_000 {
            now = next_moment(now, &plan, &mut dice);
            clock.set(Timestamp::from_micros(now));
            // Half of the requests are for a few keys, which are therefore often at their bound.
            let (cost, hot) = (1 + dice.below(3), dice.below(2) == 0);
            let key = dice.below(if hot { KEYS / 20 } else { KEYS });
            if crowded.check_n(&key.to_le_bytes(), cost).is_allowed() {
                let alone = roomy.check_n(&key.to_le_bytes(), cost);
                // A shared window may start later than the key's own, and then also ends later.
                let first_request = matches!(plan, Plan::Fixed { align: Align::FirstRequest, .. });
                prop_assert!(alone.is_allowed() || first_request, "key {key} for {cost} at {now}");
                charges[key as usize].push(Charge { at: now, cost });
            }
        }
        prop_assert!(crowded.memory_used() <= max_memory(&plan));
        for charges in charges {
            within_bound(&plan, &charges)?;
        }
    }
}

//! A clock that steps back, by a microsecond or by years, any number of times.
//!
//! Only forward time counts as passed; a step back does not. In a period of forward time, an algorithm admits at most
//! what it admits in the same period of a clock that never steps back. No wait is longer than with such a clock, or
//! longer than two windows.

use proptest::prelude::*;

use crate::bounds::{within_any, within_rate};
use crate::common::Answer;
use crate::common::plan::{self, Align, Plan, Refill, mostly_accepted};
use crate::common::traffic::{Ask, Gap, ask, gap, untouched};
use crate::{Charge, accepted};

#[derive(Clone, Copy, Debug)]
pub(crate) enum Move {
    Forward(Gap),
    BackMicros(u64),
    BackSpanPermille(u64),
    /// This many microseconds before the last end of a period, window or segment.
    BackBeforeLine(u64),
}

impl Move {
    pub(crate) fn from(self, now: u64, last: &Answer, plan: &Plan) -> u64 {
        match self {
            Self::Forward(gap) => gap.after(now, last, plan),
            Self::BackMicros(back) => now.saturating_sub(back),
            Self::BackSpanPermille(permille) => {
                let back = u128::from(plan.span_us()) * u128::from(permille) / 1_000;
                now.saturating_sub(u64::try_from(back).unwrap_or(u64::MAX))
            }
            Self::BackBeforeLine(micros) => plan.last_line(now).saturating_sub(micros),
        }
    }
}

pub(crate) fn moves_forward() -> impl Strategy<Value = Move> {
    gap().prop_map(Move::Forward)
}

/// Generates steps back of every size, more often than any real clock makes them.
pub(crate) fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        10 => moves_forward(),
        2 => (1..=5_u64).prop_map(Move::BackMicros),
        2 => (1..=3_500_u64).prop_map(Move::BackSpanPermille),
        2 => (1..=3_u64).prop_map(Move::BackBeforeLine),
        1 => (any::<u64>(), 14..=60_u32).prop_map(|(back, shift)| Move::BackMicros(back >> shift)),
    ]
}

/// Generates times that are late enough to step back by years.
pub(crate) fn our_days() -> impl Strategy<Value = u64> {
    1_600_000_000_000_000..=1_800_000_000_000_000_u64
}

/// Returns the longest wait that a decision may return, however the clock stepped.
fn longest_wait(plan: &Plan) -> u64 {
    match *plan {
        // The portion of the boundary that the clock stepped back over was refilled already: the next one is due a
        // period after that boundary.
        Plan::Token { pace, refill: Refill::Interval, .. } => plan.span_us() + pace.period_us,
        Plan::Token { .. } | Plan::Leaky { .. } => plan.span_us(),
        Plan::Fixed { .. } | Plan::Log { .. } => 2 * plan.span_us(),
        // Without a step, the longest wait is a window and a segment. A step back may add another segment.
        Plan::Counter { window_us, segments, .. } => window_us + 2 * window_us.div_ceil(u64::from(segments)),
    }
}

/// Checks charges whose times are forward time.
fn nothing_minted(plan: &Plan, charges: &[Charge]) -> Result<(), TestCaseError> {
    match *plan {
        Plan::Token { capacity, pace, refill: Refill::Smooth } | Plan::Leaky { capacity, pace, .. } => {
            within_rate(charges, capacity, pace)
        }
        // The first portion may come at once, the others a period apart.
        Plan::Token { capacity, pace, refill: Refill::Interval } => {
            within_rate(charges, capacity.saturating_add(pace.count), pace)
        }
        Plan::Log { limit, window_us, .. } => within_any(charges, limit, |first, last| last.at - first.at < window_us),
        Plan::Fixed { limit, window_us, align: Align::Clock | Align::FirstRequest }
        | Plan::Counter { limit, window_us, .. } => {
            within_any(charges, 2 * limit, |first, last| last.at - first.at < window_us)
        }
    }
}

proptest! {
    #![proptest_config(mostly_accepted())]

    #[test]
    fn a_clock_that_steps_back_mints_nothing_and_locks_nobody_out(
        plan in plan::any(),
        start in our_days(),
        steps in prop::collection::vec((moves(), ask()), 1..60),
        wanted in ask(),
    ) {
        let rig = accepted(&plan, start)?;
        let (mut now, mut forward, mut last, mut charges) = (start, 0, untouched(&plan), Vec::new());
        for (step, ask) in steps {
            let then = step.from(now, &last, &plan);
            forward += then.saturating_sub(now);
            now = then;
            let cost = ask.cost(&last, &plan);
            last = rig.ask(now, cost);
            if last.allowed {
                charges.push(Charge { at: forward, cost });
            }
            let wait = last.retry_after.unwrap_or(0);
            prop_assert!(wait <= longest_wait(&plan), "retry_after is {wait} µs at {now}");
        }
        nothing_minted(&plan, &charges)?;

        let cost = wanted.cost(&last, &plan).min(plan.quota());
        let mut answer = rig.ask(now, cost);
        for _ in 0..3 {
            if let Some(wait) = answer.retry_after {
                now += wait;
                answer = rig.ask(now, cost);
            }
        }
        prop_assert!(answer.allowed, "still denied after waiting for retry_after three times: {answer:?}");
    }

    #[test]
    fn a_swinging_clock_mints_nothing(
        plan in plan::any(),
        start in our_days(),
        back in prop_oneof![(1..=5_u64).prop_map(Move::BackMicros), (1..=3_500_u64).prop_map(Move::BackSpanPermille)],
        ask in prop_oneof![Just(Ask::Units(1)), Just(Ask::Quota), (300..=600_u64).prop_map(Ask::QuotaPermille)],
    ) {
        // The worst case: the clock moves from one end of a window to just past it, again and again.
        let rig = accepted(&plan, start)?;
        let (mut now, mut forward, mut last, mut charges) = (start, 0, untouched(&plan), Vec::new());
        for _ in 0..20 {
            let swing = [Move::Forward(Gap::Line(-1)), Move::Forward(Gap::Line(0)), back];
            for step in swing {
                let then = step.from(now, &last, &plan);
                forward += then.saturating_sub(now);
                now = then;
                let cost = ask.cost(&last, &plan);
                last = rig.ask(now, cost);
                if last.allowed {
                    charges.push(Charge { at: forward, cost });
                }
            }
        }
        nothing_minted(&plan, &charges)?;
    }
}

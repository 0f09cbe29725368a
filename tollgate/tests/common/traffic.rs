//! Random requests at critical times and costs: at the same microsecond, at boundaries of windows, at `retry_after` and
//! the microsecond before it, for the whole remaining quota and for one unit more.

use proptest::prelude::*;

use super::Answer;
use super::plan::Plan;

/// Latest end of random traces, so that every returned time is before the latest timestamp.
pub(crate) const LATEST_US: u64 = 1 << 51;

/// The time from the last request to the next one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Gap {
    Micros(u64),
    /// A share of the time in which the whole quota comes back.
    SpanPermille(u64),
    /// A share of the time in which one unit comes back.
    UnitPermille(u64),
    /// This far from the next end of a period, window or segment.
    Line(i64),
    /// This far from the last `retry_after`.
    Retry(i64),
    /// This far from the last `reset_after`.
    Reset(i64),
}

/// The cost of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ask {
    Units(u64),
    QuotaPermille(u64),
    /// This much more or less than the remaining quota.
    Remaining(i64),
    Quota,
    AboveQuota(u64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) gap: Gap,
    pub(crate) ask: Ask,
}

impl Gap {
    pub(crate) fn after(self, now: u64, last: &Answer, plan: &Plan) -> u64 {
        let share = |of: u64, permille: u64| u128::from(of) * u128::from(permille) / 1_000;
        let then = match self {
            Self::Micros(gap) => u128::from(now) + u128::from(gap),
            Self::SpanPermille(permille) => u128::from(now) + share(plan.span_us(), permille),
            Self::UnitPermille(permille) => {
                u128::from(now) + share(plan.span_us(), permille) / u128::from(plan.quota())
            }
            Self::Line(offset) => u128::from(plan.next_line(now).saturating_add_signed(offset)),
            Self::Retry(offset) => u128::from((now + last.retry_after.unwrap_or(0)).saturating_add_signed(offset)),
            Self::Reset(offset) => u128::from((now + last.reset_after).saturating_add_signed(offset)),
        };
        // A trace stops at the latest time, and never goes back.
        u64::try_from(then).unwrap_or(u64::MAX).min(LATEST_US).max(now)
    }
}

impl Ask {
    pub(crate) fn cost(self, last: &Answer, plan: &Plan) -> u64 {
        match self {
            Self::Units(units) => units,
            Self::QuotaPermille(permille) => {
                u64::try_from(u128::from(plan.quota()) * u128::from(permille) / 1_000).expect("a share of 64 bits")
            }
            Self::Remaining(offset) => last.remaining.saturating_add_signed(offset),
            Self::Quota => plan.quota(),
            Self::AboveQuota(by) => plan.quota().saturating_add(by),
        }
    }
}

/// Returns the state before the first request: the whole quota remains.
pub(crate) fn untouched(plan: &Plan) -> Answer {
    Answer { allowed: true, remaining: plan.quota(), reset_after: 0, retry_after: None, delay: 0 }
}

pub(crate) fn gap() -> impl Strategy<Value = Gap> {
    prop_oneof![
        3 => Just(Gap::Micros(0)),
        2 => (1..=5_u64).prop_map(Gap::Micros),
        3 => (0..=400_u64).prop_map(Gap::SpanPermille),
        2 => (1..=2_500_u64).prop_map(Gap::UnitPermille),
        3 => (-2..=2_i64).prop_map(Gap::Line),
        3 => (-1..=1_i64).prop_map(Gap::Retry),
        1 => (-1..=1_i64).prop_map(Gap::Reset),
        1 => (900..=3_500_u64).prop_map(Gap::SpanPermille),
        1 => (any::<u64>(), 14..=60_u32).prop_map(|(gap, shift)| Gap::Micros(gap >> shift)),
    ]
}

pub(crate) fn ask() -> impl Strategy<Value = Ask> {
    prop_oneof![
        1 => Just(Ask::Units(0)),
        4 => Just(Ask::Units(1)),
        1 => (2..=5_u64).prop_map(Ask::Units),
        4 => (0..=600_u64).prop_map(Ask::QuotaPermille),
        3 => (-1..=1_i64).prop_map(Ask::Remaining),
        1 => Just(Ask::Quota),
        1 => prop_oneof![Just(1), Just(u64::MAX), any::<u64>()].prop_map(Ask::AboveQuota),
    ]
}

pub(crate) fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec((gap(), ask()).prop_map(|(gap, ask)| Step { gap, ask }), 1..60)
}

/// Generates the start of a trace: at the epoch, near it, or up to the present.
pub(crate) fn start() -> impl Strategy<Value = u64> {
    prop_oneof![1 => Just(0), 2 => 0..=10_000_000_u64, 7 => 0..=1_800_000_000_000_000_u64]
}

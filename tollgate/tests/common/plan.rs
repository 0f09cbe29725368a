//! The numbers of a limit, independent of the library's types, and random numbers.

use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::select;
use tollgate::{
    FixedWindow, InvalidLimit, LeakyBucket, Limit, Rate, SlidingWindowCounter, SlidingWindowLog, TokenBucket,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refill {
    Smooth,
    Interval,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Clock,
    FirstRequest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Logs {
    Admitted,
    DeniedToo,
}

/// `count` units in every `period_us`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    pub(crate) count: u64,
    pub(crate) period_us: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Plan {
    Token { capacity: u64, pace: Pace, refill: Refill },
    Leaky { capacity: u64, pace: Pace, max_wait_us: Option<u64> },
    Fixed { limit: u64, window_us: u64, align: Align },
    Log { limit: u64, window_us: u64, logs: Logs },
    Counter { limit: u64, window_us: u64, segments: u32 },
}

impl Plan {
    pub(crate) fn limit(&self) -> Result<Limit, InvalidLimit> {
        let micros = Duration::from_micros;
        let rate = |pace: Pace| Rate::new(pace.count, micros(pace.period_us));
        match *self {
            Self::Token { capacity, pace, refill } => {
                let bucket = TokenBucket::new(capacity, rate(pace));
                Limit::new("plan", if refill == Refill::Interval { bucket.interval() } else { bucket })
            }
            Self::Leaky { capacity, pace, max_wait_us } => {
                let bucket = LeakyBucket::new(capacity, rate(pace));
                Limit::new("plan", max_wait_us.map_or(bucket, |wait| bucket.queue(micros(wait))))
            }
            Self::Fixed { limit, window_us, align } => {
                let fixed = FixedWindow::new(limit, micros(window_us));
                Limit::new("plan", if align == Align::FirstRequest { fixed.from_first_request() } else { fixed })
            }
            Self::Log { limit, window_us, logs } => {
                let log = SlidingWindowLog::new(limit, micros(window_us));
                Limit::new("plan", if logs == Logs::DeniedToo { log.count_denied() } else { log })
            }
            Self::Counter { limit, window_us, segments } => {
                Limit::new("plan", SlidingWindowCounter::new(limit, micros(window_us)).segments(segments))
            }
        }
    }

    /// Returns the same plan with another quota.
    pub(crate) fn with_quota(self, quota: u64) -> Self {
        match self {
            Self::Token { pace, refill, .. } => Self::Token { capacity: quota, pace, refill },
            Self::Leaky { pace, max_wait_us, .. } => Self::Leaky { capacity: quota, pace, max_wait_us },
            Self::Fixed { window_us, align, .. } => Self::Fixed { limit: quota, window_us, align },
            Self::Log { window_us, logs, .. } => Self::Log { limit: quota, window_us, logs },
            Self::Counter { window_us, segments, .. } => Self::Counter { limit: quota, window_us, segments },
        }
    }

    pub(crate) fn quota(&self) -> u64 {
        match *self {
            Self::Token { capacity, .. } | Self::Leaky { capacity, .. } => capacity,
            Self::Fixed { limit, .. } | Self::Log { limit, .. } | Self::Counter { limit, .. } => limit,
        }
    }

    /// Returns the time in which the whole quota comes back: the window, or the time of a full refill.
    pub(crate) fn span_us(&self) -> u64 {
        match *self {
            Self::Token { capacity, pace, refill: Refill::Smooth } | Self::Leaky { capacity, pace, .. } => {
                let span = (u128::from(capacity) * u128::from(pace.period_us)).div_ceil(u128::from(pace.count));
                u64::try_from(span).unwrap_or(u64::MAX)
            }
            Self::Token { capacity, pace, refill: Refill::Interval } => {
                capacity.div_ceil(pace.count).saturating_mul(pace.period_us)
            }
            Self::Fixed { window_us, .. } | Self::Log { window_us, .. } | Self::Counter { window_us, .. } => window_us,
        }
    }

    /// Returns the next boundary after `now`: the end of a period, window or segment.
    pub(crate) fn next_line(&self, now: u64) -> u64 {
        self.line(now, 1)
    }

    /// Returns the last boundary, which may be `now` itself.
    pub(crate) fn last_line(&self, now: u64) -> u64 {
        self.line(now, 0)
    }

    fn line(&self, now: u64, ahead: u128) -> u64 {
        let (length, parts) = match *self {
            Self::Token { pace, refill: Refill::Interval, .. } => (pace.period_us, 1),
            Self::Token { pace, .. } | Self::Leaky { pace, .. } => (pace.period_us, pace.count),
            Self::Fixed { window_us, .. } | Self::Log { window_us, .. } => (window_us, 1),
            Self::Counter { window_us, segments, .. } => (window_us, u64::from(segments)),
        };
        let (length, parts) = (u128::from(length), u128::from(parts));
        let line = u128::from(now) * parts / length + ahead;
        u64::try_from((line * length).div_ceil(parts)).expect("lines lie in the time that tests use")
    }
}

/// Generates sizes up to 2^`bits`, each power of two with the same probability.
fn size(bits: u32) -> impl Strategy<Value = u64> {
    (0..=bits).prop_flat_map(|bit| (1_u64 << bit.saturating_sub(1))..=(1_u64 << bit))
}

fn quota() -> impl Strategy<Value = u64> {
    prop_oneof![6 => 1..=12_u64, 3 => size(32), 1 => select(vec![u64::from(u32::MAX), 1 << 32])]
}

/// Generates spans from a millisecond to 35 years, rarely a round number.
fn span() -> impl Strategy<Value = u64> {
    let round = [1_000, 7_000, 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000, 31_536_000_000_000];
    prop_oneof![2 => select(round.to_vec()), 3 => size(49).prop_map(|span| span.max(1_000)), 1 => 1_000..=100_000_u64]
}

fn pace() -> impl Strategy<Value = Pace> {
    let odd = [
        (7, 1_000_000),
        (1, 3_000_000),
        (3, 1_000_000),
        (999_983, 1_000_000),
        (4_294_967_291, 3_600_000_000),
        (100, 60_000_000),
        (100_000, 1_000_000),
        (1, 1_000),
        (1, 86_400_000_000),
        (11, 31_536_000_000_000),
    ];
    prop_oneof![
        2 => select(odd.to_vec()).prop_map(|(count, period_us)| Pace { count, period_us }),
        1 => (size(32), span()).prop_map(|(count, period_us)| Pace { count, period_us }),
    ]
}

pub(crate) fn token(refill: Refill) -> impl Strategy<Value = Plan> {
    (quota(), pace()).prop_map(move |(capacity, pace)| Plan::Token { capacity, pace, refill })
}

pub(crate) fn leaky_meter() -> impl Strategy<Value = Plan> {
    (quota(), pace()).prop_map(|(capacity, pace)| Plan::Leaky { capacity, pace, max_wait_us: None })
}

/// Generates queues whose longest wait is between zero and more than the time in which a full bucket drains.
pub(crate) fn leaky_queue() -> impl Strategy<Value = Plan> {
    (quota(), pace(), 0..=1_200_u64, 0..=2_u64).prop_map(|(capacity, pace, permille, odd)| {
        let full = Plan::Leaky { capacity, pace, max_wait_us: None }.span_us();
        let wait = u128::from(full) * u128::from(permille) / 1_000 + u128::from(odd);
        let max_wait_us = Some(u64::try_from(wait).unwrap_or(u64::MAX).min(1 << 50));
        Plan::Leaky { capacity, pace, max_wait_us }
    })
}

pub(crate) fn fixed(align: Align) -> impl Strategy<Value = Plan> {
    (quota(), span()).prop_map(move |(limit, window_us)| Plan::Fixed { limit, window_us, align })
}

pub(crate) fn log(logs: Logs) -> impl Strategy<Value = Plan> {
    (quota(), span()).prop_map(move |(limit, window_us)| Plan::Log { limit, window_us, logs })
}

pub(crate) fn counter() -> impl Strategy<Value = Plan> {
    (quota(), span(), 1..=7_u32).prop_map(|(limit, window_us, segments)| Plan::Counter { limit, window_us, segments })
}

/// Generates any algorithm in any mode.
pub(crate) fn any() -> impl Strategy<Value = Plan> {
    prop_oneof![
        token(Refill::Smooth),
        token(Refill::Interval),
        leaky_meter(),
        leaky_queue(),
        fixed(Align::Clock),
        fixed(Align::FirstRequest),
        log(Logs::Admitted),
        log(Logs::DeniedToo),
        counter(),
    ]
}

/// Allows at most a third of the random plans to be rejected by the library: a property that skips most of its cases
/// proves little.
pub(crate) fn mostly_accepted() -> ProptestConfig {
    let config = ProptestConfig::default();
    ProptestConfig { max_global_rejects: config.cases / 2, ..config }
}

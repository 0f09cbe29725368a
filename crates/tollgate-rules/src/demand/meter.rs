//! Meters: the algorithms without their limits.

use std::time::Duration;

use tollgate::internal::{MAX_QUOTA, whole_micros};
use tollgate::{Algorithm, Rate, Timestamp};

/// Most segments of a window that is measured from above.
const MAX_SEGMENTS: u32 = 8;

/// Most segments that a meter counts: those of a window, and two that are partly inside.
const MAX_COUNTED: usize = MAX_SEGMENTS as usize + 2;

/// What a need is the smallest value of: the capacity of a bucket at a rate, or the limit of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measure(Kind);

/// Times are microseconds. None of them is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A bucket that drains continuously.
    Bucket {
        count: u64,
        period: u64,
    },
    /// A bucket that drains `count` units at the end of each period of the clock.
    IntervalBucket {
        count: u64,
        period: u64,
    },
    ClockWindow {
        window: u64,
    },
    FirstRequestWindow {
        window: u64,
    },
    /// The units of this window, and of the window before it by the share that is still inside.
    TwoWindows {
        window: u64,
    },
    /// The units of the last `counted` segments, which is never less than those of the window.
    Segments {
        segment: u64,
        counted: u8,
    },
}

/// The state of one client by one measure.
#[derive(Clone, Copy, Debug)]
pub(super) enum Meter {
    /// Units times the period, and the time of the last request.
    Level { level: u128, at: u64 },
    /// The start of the window, its units, and those of the window before.
    Windows { start: u64, current: u64, previous: u64 },
    /// The number of the newest segment, and the units of the last segments, indexed by their number.
    Segments { newest: u64, units: [u32; MAX_COUNTED] },
}

impl Measure {
    /// Measures the capacity of a bucket that refills or leaks at a rate.
    #[must_use]
    pub fn bucket(rate: Rate) -> Self {
        Self(Kind::Bucket { count: rate.count().clamp(1, MAX_QUOTA), period: span(rate.period()) })
    }

    /// Measures the limit of a sliding window counter.
    #[must_use]
    pub fn sliding_window(window: Duration) -> Self {
        Self(Kind::TwoWindows { window: span(window) })
    }

    /// Measures the limit of a fixed window that is aligned to the clock.
    #[must_use]
    pub fn fixed_window(window: Duration) -> Self {
        Self(Kind::ClockWindow { window: span(window) })
    }

    /// Measures the quota of an algorithm, whatever its present one is. Returns `None` for a ban.
    #[must_use]
    pub fn of(algorithm: &Algorithm) -> Option<Self> {
        let window = |kind: fn(u64) -> Kind, window| Some(Self(kind(span(window))));
        match algorithm {
            Algorithm::TokenBucket(bucket) if bucket.is_interval() => {
                let rate = bucket.rate();
                let count = rate.count().clamp(1, MAX_QUOTA);
                Some(Self(Kind::IntervalBucket { count, period: span(rate.period()) }))
            }
            Algorithm::TokenBucket(bucket) => Some(Self::bucket(bucket.rate())),
            Algorithm::LeakyBucket(bucket) => Some(Self::bucket(bucket.rate())),
            Algorithm::FixedWindow(fixed) if fixed.is_aligned() => {
                window(|window| Kind::ClockWindow { window }, algorithm.window())
            }
            Algorithm::FixedWindow(_) => window(|window| Kind::FirstRequestWindow { window }, algorithm.window()),
            Algorithm::SlidingWindowCounter(counter) if counter.segment_count() == 1 => {
                window(|window| Kind::TwoWindows { window }, algorithm.window())
            }
            // The oldest segment of a counter is partly inside, and the segments of the meter need not be aligned to it.
            Algorithm::SlidingWindowCounter(counter) => {
                Some(Self::segments(algorithm.window(), counter.segment_count(), 2))
            }
            Algorithm::SlidingWindowLog(_) => Some(Self::segments(algorithm.window(), MAX_SEGMENTS, 1)),
            // A ban has no demand.
            _ => None,
        }
    }

    fn segments(window: Duration, segments: u32, outside: u8) -> Self {
        let segments = segments.clamp(1, MAX_SEGMENTS) as u8;
        // Rounded up, so that the segments cover the window.
        let segment = span(window).div_ceil(u64::from(segments));
        Self(Kind::Segments { segment, counted: segments + outside })
    }

    /// Returns whether needs are exact. Otherwise they are rounded up: by the units of at most an eighth of a window for
    /// logs, and of at most two segments for counters of several segments.
    #[must_use]
    pub fn is_exact(self) -> bool {
        !matches!(self.0, Kind::Segments { .. })
    }

    /// Returns numbers that identify the measure, in every release.
    pub(super) fn numbers(self) -> [u64; 3] {
        match self.0 {
            Kind::Bucket { count, period } => [1, count, period],
            Kind::IntervalBucket { count, period } => [2, count, period],
            Kind::ClockWindow { window } => [3, window, 0],
            Kind::FirstRequestWindow { window } => [4, window, 0],
            Kind::TwoWindows { window } => [5, window, 0],
            Kind::Segments { segment, counted } => [6, segment, u64::from(counted)],
        }
    }

    /// Returns the meter of a client whose first request is at `now`.
    pub(super) fn meter(self, now: Timestamp) -> Meter {
        let now = now.as_micros();
        match self.0 {
            Kind::Bucket { .. } | Kind::IntervalBucket { .. } => Meter::Level { level: 0, at: now },
            Kind::ClockWindow { window } | Kind::TwoWindows { window } => {
                Meter::Windows { start: now - now % window, current: 0, previous: 0 }
            }
            Kind::FirstRequestWindow { .. } => Meter::Windows { start: now, current: 0, previous: 0 },
            Kind::Segments { segment, .. } => Meter::Segments { newest: now / segment, units: [0; MAX_COUNTED] },
        }
    }
}

impl Meter {
    /// Adds `cost` units and returns the need of the client at this time, at most the largest quota.
    pub(super) fn add(&mut self, measure: Measure, cost: u64, now: Timestamp) -> u64 {
        let (cost, now) = (cost.min(MAX_QUOTA), now.as_micros());
        let need = match (self, measure.0) {
            (Self::Level { level, at }, Kind::Bucket { count, period }) => {
                let drained = u128::from(now.saturating_sub(*at)) * u128::from(count);
                Self::fill(level, drained, cost, period);
                *at = now.max(*at);
                level.div_ceil(u128::from(period)) as u64
            }
            (Self::Level { level, at }, Kind::IntervalBucket { count, period }) => {
                let periods = (now / period).saturating_sub(*at / period);
                let drained = u128::from(periods) * u128::from(count) * u128::from(period);
                Self::fill(level, drained, cost, period);
                *at = now.max(*at);
                level.div_ceil(u128::from(period)) as u64
            }
            (Self::Windows { start, current, previous }, kind) => match kind {
                Kind::FirstRequestWindow { window } => {
                    if now.saturating_sub(*start) >= window {
                        (*start, *current) = (now, 0);
                    }
                    *current = (*current + cost).min(MAX_QUOTA);
                    *current
                }
                Kind::ClockWindow { window } | Kind::TwoWindows { window } => {
                    let opened = (now - now % window).max(*start);
                    if opened > *start {
                        *previous = if opened - *start == window { *current } else { 0 };
                        (*start, *current) = (opened, 0);
                    }
                    *current = (*current + cost).min(MAX_QUOTA);
                    if matches!(kind, Kind::ClockWindow { .. }) {
                        return *current;
                    }
                    let inside = window - now.saturating_sub(*start).min(window);
                    let before = u128::from(*previous) * u128::from(inside) / u128::from(window);
                    *current + before as u64
                }
                _ => MAX_QUOTA,
            },
            (Self::Segments { newest, units }, Kind::Segments { segment, counted }) => {
                let number = (now / segment).max(*newest);
                let count = u64::from(counted);
                for skipped in (*newest + 1..=number).rev().take(usize::from(counted)) {
                    units[(skipped % count) as usize] = 0;
                }
                *newest = number;
                let of_segment = &mut units[(number % count) as usize];
                *of_segment = of_segment.saturating_add(cost.min(u64::from(u32::MAX)) as u32);
                units.iter().map(|units| u64::from(*units)).sum()
            }
            // A meter is only used with the measure that it was made by.
            (_, _) => MAX_QUOTA,
        };
        need.min(MAX_QUOTA)
    }

    fn fill(level: &mut u128, drained: u128, cost: u64, period: u64) {
        let most = u128::from(MAX_QUOTA) * u128::from(period);
        *level = (level.saturating_sub(drained) + u128::from(cost) * u128::from(period)).min(most);
    }
}

fn span(span: Duration) -> u64 {
    whole_micros(span).clamp(1, whole_micros(tollgate::MAX_SPAN))
}

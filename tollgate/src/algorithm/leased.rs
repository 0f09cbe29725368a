//! Leases: quota that is taken in slices in advance, and the limits that the store must enforce for them.
//!
//! A slice is charged at a time T and spent until T + h. So all units spent in a period t were charged in a period of
//! at most t + h. The store allows no more in t + h than the limit allows in t:
//!
//! - A bucket (capacity C, rate r) keeps C − ⌈r·h⌉: charges in t + h are at most C − r·h + r·(t + h) = C + r·t.
//! - A log or a counter of a window W counts over W + h.
//! - Where a count restarts at the end of a window or a period, a slice expires with it.

use super::sliding_window_counter::Counter;
use super::sliding_window_log::{Counted, Log};
use super::{Compiled, meter};

/// Longest life of a slice: a few round trips per second for a busy key.
const LONGEST: u64 = 200_000;
/// Shortest useful life of a slice. Below it, the store makes every decision.
const SHORTEST: u64 = 10_000;
/// Share of a bucket that is reserved for the life of a slice. A small bucket reserves as much as slices of a useful
/// life need, up to the second share.
const SHARE_OF_BUCKET: u64 = 10;
const MAX_SHARE_OF_BUCKET: u64 = 4;
const USEFUL: u64 = 20_000;
/// Share of a sliding window that is added to it for the life of a slice. The window admits less by this share.
const SHARE_OF_SLIDING_WINDOW: u64 = 50;
/// Longest life of a slice as a share of a window or a period. It costs no quota.
const SHARE_OF_WINDOW: u64 = 20;

/// The terms of a lease. Times are in microseconds.
#[derive(Debug)]
pub(crate) struct Leased {
    /// The limit that the store enforces.
    pub(crate) stored: Compiled,
    /// Life of a slice.
    pub(crate) horizon: u64,
}

impl Compiled {
    /// Returns the terms of leases of this limit, or `None` if it cannot be leased.
    pub(crate) fn leased(&self) -> Option<Leased> {
        match self {
            Self::Meter(algorithm) => {
                leased_meter(algorithm.capacity, algorithm.units, algorithm.micros, algorithm.max_wait)
            }
            Self::WideMeter(algorithm) => {
                leased_meter(algorithm.capacity, algorithm.units, algorithm.micros, algorithm.max_wait)
            }
            Self::Interval(algorithm) => while_it_lasts(algorithm.period, self),
            Self::ClockWindow(algorithm) => while_it_lasts(algorithm.window, self),
            Self::OpenedWindow(algorithm) => while_it_lasts(algorithm.window, self),
            Self::Log(log) if log.counted == Counted::Admitted => {
                let horizon = part_of(log.window, SHARE_OF_SLIDING_WINDOW)?;
                let stored = Self::Log(Log::new(log.limit, log.window + horizon, Counted::Admitted));
                Some(Leased { stored, horizon })
            }
            Self::Counter(algorithm) => {
                let horizon = part_of(algorithm.window, SHARE_OF_SLIDING_WINDOW)?;
                let segments = u32::try_from(algorithm.segments).ok()?;
                let stored = Self::Counter(Counter::new(algorithm.limit, algorithm.window + horizon, segments));
                Some(Leased { stored, horizon })
            }
            // The store must see every denial of a log that counts denials, and a ban must hold on all processes at
            // once.
            Self::Log(_) | Self::Strikes(_) => None,
        }
    }

    /// Returns how long after `at` a slice may be spent that was charged to this state at `at`.
    pub(crate) fn slice_lives(&self, state: &[u64], at: u64, horizon: u64) -> u64 {
        let left = match self {
            Self::Interval(algorithm) => algorithm.period - at % algorithm.period,
            Self::ClockWindow(algorithm) => algorithm.window - at % algorithm.window,
            Self::OpenedWindow(algorithm) => {
                let (opened, units) = (state.first().copied().unwrap_or(0), state.get(1).copied().unwrap_or(0));
                let open = units > 0 && at < opened.saturating_add(algorithm.window);
                if open { opened.min(at) + algorithm.window - at } else { algorithm.window }
            }
            _ => horizon,
        };
        left.min(horizon)
    }
}

fn leased_meter(capacity: u64, units: u64, micros: u64, max_wait: Option<u64>) -> Option<Leased> {
    // Only the store can assign positions in a queue.
    if max_wait.is_some() {
        return None;
    }
    let refill = |horizon: u64| (u128::from(units) * u128::from(horizon)).div_ceil(u128::from(micros));
    let life_of = |part: u64| {
        let life = u128::from(capacity / part) * u128::from(micros) / u128::from(units);
        u64::try_from(life).unwrap_or(LONGEST).min(LONGEST)
    };
    let horizon = life_of(SHARE_OF_BUCKET).max(life_of(MAX_SHARE_OF_BUCKET).min(USEFUL));
    if horizon < SHORTEST {
        return None;
    }
    let kept_back = u64::try_from(refill(horizon)).ok()?;
    let stored = meter::compile(capacity.checked_sub(kept_back).filter(|left| *left > 0)?, units, micros, None);
    Some(Leased { stored, horizon })
}

fn part_of(window: u64, part: u64) -> Option<u64> {
    Some(LONGEST.min(window / part)).filter(|horizon| *horizon >= SHORTEST)
}

fn while_it_lasts(window: u64, same: &Compiled) -> Option<Leased> {
    part_of(window, SHARE_OF_WINDOW).map(|horizon| Leased { stored: same.clone(), horizon })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Limit, Rate, TokenBucket};

    #[test]
    fn a_bucket_keeps_back_what_refills_while_a_slice_lives() {
        // At most a tenth is reserved, more if slices would live less than 20 ms, and never more than a quarter.
        let cases =
            [(1000, 300, 200_000, 60), (1000, 1000, 100_000, 100), (100, 1000, 20_000, 20), (50, 1000, 12_000, 12)];
        for (capacity, rate, horizon, kept_back) in cases {
            let limit = Limit::new("l", TokenBucket::new(capacity, Rate::per_second(rate))).unwrap();
            let leased = limit.compiled().leased().unwrap();
            assert_eq!(leased.horizon, horizon, "{capacity} at {rate}/s");
            let Compiled::Meter(stored) = leased.stored else { panic!("a meter") };
            assert_eq!(stored.capacity, capacity - kept_back, "{capacity} at {rate}/s");
        }
    }

    #[test]
    fn a_bucket_that_is_too_small_is_exact() {
        for (capacity, rate) in [(3, 1), (10, 1000)] {
            let limit = Limit::new("l", TokenBucket::new(capacity, Rate::per_second(rate))).unwrap();
            assert!(limit.compiled().leased().is_none(), "{capacity} at {rate}/s");
        }
    }
}

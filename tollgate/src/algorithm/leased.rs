//! Limits whose quota is taken in slices, ahead of time: what the store must count so that spending a slice a
//! little later than it was charged never admits more than the limit says.
//!
//! A slice is charged at a moment T and spent until T + h. So what is spent in a stretch of time t was charged in
//! a stretch of at most t + h, and the store is made to allow no more in that than the limit allows in t:
//!
//! - A bucket (capacity C, rate r) keeps C − ⌈r·h⌉: charges in t + h are at most C − r·h + r·(t + h) = C + r·t.
//! - A log or a counter of a window W counts over W + h.
//! - Where a count starts anew at the end of a window or a period, a slice dies with it.

use super::sliding_window_counter::Counter;
use super::sliding_window_log::{Counted, Log};
use super::{Compiled, meter};

/// The longest that a slice lives: a few trips a second for a busy key.
const LONGEST: u64 = 200_000;
/// A shorter life is not worth a trip: then every decision is made by the store.
const SHORTEST: u64 = 10_000;
/// How much of a bucket is kept back for the life of a slice: this part of it, or for a small bucket as much as slices of
/// a useful life need, up to the second part.
const SHARE_OF_BUCKET: u64 = 10;
const MAX_SHARE_OF_BUCKET: u64 = 4;
const USEFUL: u64 = 20_000;
/// How much is added to a sliding window for the life of a slice, which is how much less the window admits.
const SHARE_OF_SLIDING_WINDOW: u64 = 50;
/// How much of a window or a period a slice may live. It costs nothing.
const SHARE_OF_WINDOW: u64 = 20;

/// How a limit is leased. Times are in microseconds.
#[derive(Debug)]
pub(crate) struct Leased {
    /// What the store counts by.
    pub(crate) stored: Compiled,
    /// How long a slice lives.
    pub(crate) horizon: u64,
}

impl Compiled {
    /// How to lease this, if it can be.
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
            // Who counts denials has to hear of each, and a ban holds for all at once.
            Self::Log(_) | Self::Strikes(_) => None,
        }
    }

    /// How long after `at` a slice may be spent that was charged to this state then.
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
    // A place in a queue is given by the store.
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
        // At most a tenth is kept back, more if slices would live less than 20 ms, and never more than a quarter.
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

//! The algorithms: pure arithmetic on integers. Never reads a clock, knows no store.
//!
//! An algorithm is a function of (configuration, state, now, cost) to (verdict, change of state). The state of
//! a key is a few 64-bit words, the fewest that keep the algorithm exact, and words of all zeros are a key at
//! rest: a store may forget an idle key at any moment and nobody can tell.
//!
//! Deliberately not here: names, keys, several limits at once, concurrency. A store reads the words, asks, and
//! writes them back, and how it keeps that atomic is its own affair. An algorithm must therefore answer on any
//! words at all, torn ones too, with any answer but a panic: the store throws such an answer away.

pub(crate) mod conversion;
mod divisor;
pub(crate) mod fixed_window;
pub(crate) mod leaky_bucket;
#[cfg(feature = "redis")]
pub(crate) mod leased;
mod meter;
mod packing;
#[cfg(feature = "redis")]
pub(crate) mod portable;
pub(crate) mod record;
#[cfg(feature = "http")]
pub(crate) mod refill;
#[cfg(feature = "redis")]
mod share;
pub(crate) mod sliding_window_counter;
pub(crate) mod sliding_window_log;
pub(crate) mod spill;
pub(crate) mod strikes;
pub(crate) mod succession;
pub(crate) mod token_bucket;

use std::time::Duration;

use crate::decision::{Admission, Verdict};
use crate::error::InvalidLimit;
use crate::units::WallOffset;

pub use fixed_window::FixedWindow;
pub use leaky_bucket::LeakyBucket;
pub use sliding_window_counter::SlidingWindowCounter;
pub use sliding_window_log::SlidingWindowLog;
pub use strikes::Ban;
pub use token_bucket::TokenBucket;

/// The most a limit may hold: 2^32.
pub(crate) const MAX_QUOTA: u64 = 1 << 32;

/// Which algorithm a limit follows, and its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// Bursts up to a capacity, then a steady rate.
    TokenBucket(TokenBucket),
    /// A steady outflow: what does not fit is refused, or waits its turn.
    LeakyBucket(LeakyBucket),
    /// A count per window of time.
    FixedWindow(FixedWindow),
    /// Exact at every instant: every admitted request is remembered for a window.
    SlidingWindowLog(SlidingWindowLog),
    /// A sliding window estimated from counts per segment. The default.
    SlidingWindowCounter(SlidingWindowCounter),
    /// No limit by itself: refuses for a while who has been struck too often.
    Ban(Ban),
}

impl Default for Algorithm {
    fn default() -> Self {
        Self::SlidingWindowCounter(SlidingWindowCounter::default())
    }
}

/// The state of one key, as words that a store lends.
pub(crate) trait StateWords {
    fn get(&self, index: usize) -> u64;
    fn set(&self, index: usize, word: u64);
    /// Where a log goes on that has outgrown its words.
    fn spill(&self) -> &spill::Spill;
}

/// A verdict, and what it changes. `None` leaves the state as it is.
pub(crate) struct Step<Edit> {
    pub(crate) verdict: Verdict,
    pub(crate) edit: Option<Edit>,
}

/// What was once admitted and is now to be given back.
#[derive(Clone, Copy)]
pub(crate) struct Charge {
    pub(crate) at: u64,
    pub(crate) cost: u64,
}

/// How the words of a key are read and written. Times are microseconds since the Unix epoch.
pub(crate) trait LimitAlgorithm {
    type Edit;

    /// How many words a key needs.
    fn words(&self) -> usize;

    /// How many high bits of a state of one word are always 0, so that a store can keep a tag there. A state with such
    /// bits never has all the others set. 0 for states of several words.
    fn free_bits(&self) -> u32 {
        0
    }

    /// Whether the words mean nothing unless the key is held still while they are read.
    fn must_lock(&self) -> bool {
        false
    }

    fn decide(&self, cells: &impl StateWords, now: u64, cost: u64) -> Step<Self::Edit>;

    /// What to change so that a charge is taken back, as far as it still weighs on the key. Giving back more
    /// would mint quota.
    fn refund(&self, cells: &impl StateWords, now: u64, charge: Charge) -> Option<Self::Edit>;

    fn apply(&self, cells: &impl StateWords, edit: Self::Edit);

    /// Whether the key is at rest, so that forgetting it changes no answer from now on.
    fn is_idle(&self, cells: &impl StateWords, now: u64) -> bool;

    /// Called on words that other keys have written to, to keep whoever comes now no richer than it would be
    /// alone. Most states see to that by themselves.
    fn shared(&self, cells: &impl StateWords, now: u64) {
        let _ = (cells, now);
    }

    /// Raises `floor` so that it covers `state` as well: a key that starts with it has no more left than with either.
    /// That must need no later date for any charge, or a floor that is raised again and again would never decay.
    /// Changes nothing and returns false if less than half the quota, or just half, would be left, or if the states of
    /// this algorithm cannot be combined in this way.
    fn cover(&self, floor: &impl StateWords, state: &impl StateWords, now: u64) -> bool {
        let _ = (floor, state, now);
        false
    }

    /// Makes the key a newcomer that has spent all that `from` has.
    fn inherit(&self, cells: &impl StateWords, from: &impl StateWords) {
        for index in 0..self.words() {
            cells.set(index, from.get(index));
        }
    }

    /// Puts the key to rest.
    fn clear(&self, cells: &impl StateWords) {
        for index in 0..self.words() {
            cells.set(index, 0);
        }
    }
}

/// The algorithms with their numbers checked and prepared.
#[derive(Clone, Debug)]
pub(crate) enum Compiled {
    /// Token bucket with smooth refill, and both leaky buckets: the same arithmetic seen from two sides.
    Meter(meter::Meter<u64>),
    /// The same for a bucket of very many units that come back very slowly.
    WideMeter(meter::Meter<u128>),
    Interval(token_bucket::Interval),
    ClockWindow(fixed_window::ClockWindow),
    OpenedWindow(fixed_window::OpenedWindow),
    Log(sliding_window_log::Log),
    Counter(sliding_window_counter::Counter),
    Strikes(strikes::Strikes),
}

/// Runs the same expression on whichever algorithm it is, each compiled on its own.
macro_rules! with_algorithm {
    ($compiled:expr, $algorithm:ident => $body:expr) => {
        match $compiled {
            $crate::algorithm::Compiled::Meter($algorithm) => $body,
            $crate::algorithm::Compiled::WideMeter($algorithm) => $body,
            $crate::algorithm::Compiled::Interval($algorithm) => $body,
            $crate::algorithm::Compiled::ClockWindow($algorithm) => $body,
            $crate::algorithm::Compiled::OpenedWindow($algorithm) => $body,
            $crate::algorithm::Compiled::Log($algorithm) => $body,
            $crate::algorithm::Compiled::Counter($algorithm) => $body,
            $crate::algorithm::Compiled::Strikes($algorithm) => $body,
        }
    };
}
pub(crate) use with_algorithm;

impl Compiled {
    /// Lets windows follow the wall clock that `offset` describes, where they are aligned to it.
    pub(crate) fn follow_wall_clock(&mut self, offset: WallOffset) {
        match self {
            Self::ClockWindow(algorithm) => algorithm.wall = offset,
            Self::Interval(algorithm) => algorithm.wall = offset,
            _ => {}
        }
    }
}

impl Algorithm {
    pub(crate) fn compile(&self) -> Result<Compiled, InvalidLimit> {
        match self {
            Self::TokenBucket(spec) => spec.compile(),
            Self::LeakyBucket(spec) => spec.compile(),
            Self::FixedWindow(spec) => spec.compile(),
            Self::SlidingWindowLog(spec) => spec.compile(),
            Self::SlidingWindowCounter(spec) => spec.compile(),
            Self::Ban(spec) => spec.compile(),
        }
    }

    pub(crate) fn quota(&self) -> u64 {
        match self {
            Self::TokenBucket(spec) => spec.capacity,
            Self::LeakyBucket(spec) => spec.capacity,
            Self::FixedWindow(spec) => spec.limit,
            Self::SlidingWindowLog(spec) => spec.limit,
            Self::SlidingWindowCounter(spec) => spec.limit,
            Self::Ban(spec) => spec.after,
        }
    }

    pub(crate) fn window(&self) -> Duration {
        match self {
            Self::TokenBucket(spec) => spec.window(),
            Self::LeakyBucket(spec) => spec.window(),
            Self::FixedWindow(spec) => spec.window,
            Self::SlidingWindowLog(spec) => spec.window,
            Self::SlidingWindowCounter(spec) => spec.window,
            Self::Ban(spec) => spec.for_,
        }
    }
}

/// What every algorithm asks of its numbers.
mod checked {
    use std::time::Duration;

    use super::MAX_QUOTA;
    use crate::error::InvalidLimit;
    use crate::rate::Rate;
    use crate::units::{MAX_SPAN, MIN_SPAN, whole_micros};

    pub(super) fn quota(field: &'static str, value: u64) -> Result<u64, InvalidLimit> {
        match value {
            0 => Err(InvalidLimit::new(
                field,
                format!("{field} 0 admits nothing"),
                "use 1 or more, or `blocked` to refuse every request",
            )),
            1..=MAX_QUOTA => Ok(value),
            _ => Err(InvalidLimit::new(
                field,
                format!("{field} {value} is above 4294967296 (2^32)"),
                "use 4294967296 or less, or count in larger units",
            )),
        }
    }

    pub(super) fn span(field: &'static str, value: Duration) -> Result<u64, InvalidLimit> {
        if value < MIN_SPAN {
            return Err(InvalidLimit::new(
                field,
                format!("{field} of {} µs is shorter than a millisecond", value.as_micros()),
                "use 1ms or more",
            ));
        }
        if value > MAX_SPAN {
            let days = value.as_secs() / 86_400;
            return Err(InvalidLimit::new(
                field,
                format!("{field} of {days} days is too long"),
                "use 35 years or less",
            ));
        }
        if !value.subsec_nanos().is_multiple_of(1000) {
            return Err(InvalidLimit::new(
                field,
                format!("{field} of {} ns is not a whole number of microseconds", value.as_nanos()),
                "round it to microseconds",
            ));
        }
        Ok(whole_micros(value))
    }

    /// The rate as (count, period in microseconds).
    pub(super) fn rate(field: &'static str, rate: Rate) -> Result<(u64, u64), InvalidLimit> {
        if rate.count() == 0 {
            return Err(InvalidLimit::new(
                field,
                format!("{field} {rate} never gives anything back"),
                "use 1 or more per period; to let through a fixed number once, use a fixed_window",
            ));
        }
        if rate.count() > MAX_QUOTA {
            return Err(InvalidLimit::new(
                field,
                format!("{field} {rate} is above 4294967296 (2^32) per period"),
                "use a smaller count over a shorter period",
            ));
        }
        Ok((rate.count(), span(field, rate.period())?))
    }

    /// How long a bucket of that capacity takes to fill or to run empty, rounded up to a microsecond.
    pub(super) fn full_refill_time(capacity: u64, rate: Rate) -> Duration {
        let micros = (u128::from(capacity) * rate.period().as_micros()).div_ceil(u128::from(rate.count().max(1)));
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    /// Refuses a bucket that takes longer than any window may to fill.
    pub(super) fn full_refill(field: &'static str, capacity: u64, count: u64, period: u64) -> Result<(), InvalidLimit> {
        let rate = Rate::new(count, Duration::from_micros(period));
        if full_refill_time(capacity, rate) > MAX_SPAN {
            return Err(InvalidLimit::new(
                field,
                format!("at this {field} a capacity of {capacity} takes over 35 years to come back"),
                "use a faster rate or a smaller capacity",
            ));
        }
        Ok(())
    }
}

/// `a * b / c`, rounded down, exact whatever the size. A `u128` division costs ten of a `u64`'s, so it is only
/// made when the product asks for it.
#[inline]
fn mul_div(a: u64, b: u64, c: u64) -> u64 {
    div(u128::from(a) * u128::from(b), c)
}

/// `a / b` rounded down, where the quotient is known to fit.
#[inline(always)]
fn div(a: u128, b: u64) -> u64 {
    u64::try_from(a).map_or_else(|_| div_wide(a, b), |a| a / b)
}

/// `a / b` rounded up, where the quotient is known to fit.
#[inline(always)]
fn div_ceil(a: u128, b: u64) -> u64 {
    u64::try_from(a).map_or_else(|_| div_wide(a + u128::from(b - 1), b), |a| a.div_ceil(b))
}

#[cold]
#[inline(never)]
fn div_wide(a: u128, b: u64) -> u64 {
    u64::try_from(a / u128::from(b)).unwrap_or(u64::MAX)
}

pub(crate) const fn allowed(remaining: u64, reset_after: u64) -> Verdict {
    Verdict { admission: Admission::Allowed { delay: 0 }, remaining, reset_after }
}

fn denied(retry_after: u64, remaining: u64, reset_after: u64) -> Verdict {
    Verdict { admission: Admission::Denied { retry_after }, remaining, reset_after }
}

fn never_fits(remaining: u64, reset_after: u64) -> Verdict {
    Verdict { admission: Admission::NeverFits, remaining, reset_after }
}

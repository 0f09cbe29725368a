//! The algorithms: pure integer arithmetic, without clocks or stores.
//!
//! An algorithm maps (configuration, state, now, cost) to (verdict, change of state). The state of a key is a few
//! 64-bit words, as few as keep the algorithm exact. A key that has its whole quota is *at rest* (idle). Words of all
//! zeros are a key at rest, so a store can drop an idle key at any time without a visible effect.
//!
//! Deliberately not here: names, keys, several limits at once, concurrency. A store reads the words, calls the
//! algorithm and writes the words back atomically. It may read torn words, whose verdict it then discards, so an
//! algorithm must not panic on any words.

mod arithmetic;
mod conversion;
pub(crate) mod fixed_window;
pub(crate) mod leaky_bucket;
#[cfg(feature = "redis")]
pub(crate) mod leased;
mod meter;
#[cfg(feature = "redis")]
pub(crate) mod portable;
pub(crate) mod record;
pub(crate) mod refill;
#[cfg(feature = "redis")]
mod share;
pub(crate) mod sliding_window_counter;
pub(crate) mod sliding_window_log;
pub(crate) mod spill;
pub(crate) mod strikes;
pub(crate) mod succession;
#[cfg(test)]
mod test_words;
pub(crate) mod token_bucket;

use std::time::Duration;

use crate::decision::{Admission, Verdict};
use crate::error::InvalidLimit;
use crate::units::WallOffset;

pub(crate) use arithmetic::{Fit, Spent};
pub use fixed_window::FixedWindow;
pub use leaky_bucket::LeakyBucket;
pub use sliding_window_counter::SlidingWindowCounter;
pub use sliding_window_log::SlidingWindowLog;
pub use strikes::Ban;
pub use token_bucket::TokenBucket;

/// The largest quota: 2^32.
pub const MAX_QUOTA: u64 = 1 << 32;
/// The most units that a key counts, on every store: 2^39. A debt ends there.
pub(crate) const MAX_COUNTED: u64 = 1 << 39;

/// The algorithm of a limit, with its numbers. `docs/algorithms.md` compares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Algorithm {
    /// Bursts up to a capacity, then a steady rate.
    TokenBucket(TokenBucket),
    /// A steady outflow: requests that do not fit are denied, or wait in a queue.
    LeakyBucket(LeakyBucket),
    /// A count per window of time.
    FixedWindow(FixedWindow),
    /// Exact at every instant: every allowed request is recorded for a window.
    SlidingWindowLog(SlidingWindowLog),
    /// A sliding window estimated from counts per segment. The default.
    SlidingWindowCounter(SlidingWindowCounter),
    /// Denies a key for a while after too many strikes. Not a limit by itself.
    Ban(Ban),
}

impl Default for Algorithm {
    fn default() -> Self {
        Self::SlidingWindowCounter(SlidingWindowCounter::default())
    }
}

/// The state of one key: words that belong to a store.
pub(crate) trait StateWords {
    fn get(&self, index: usize) -> u64;
    fn set(&self, index: usize, word: u64);
    /// Memory for logs that have outgrown their words.
    fn spill(&self) -> &spill::Spill;
}

/// A verdict and a change of the state. `None` changes nothing.
pub(crate) struct Step<Edit> {
    pub(crate) verdict: Verdict,
    pub(crate) edit: Option<Edit>,
}

/// An earlier charge that is to be given back.
#[derive(Clone, Copy, Debug)]
pub struct Charge {
    /// The time of the charge, in microseconds.
    pub at: u64,
    /// The units that were charged.
    pub cost: u64,
}

/// A charge of units that were spent already, whatever the quota is.
pub(crate) struct Owed<Edit> {
    pub(crate) edit: Edit,
    /// Units that are counted: all of them, unless the key then counts [`MAX_COUNTED`] units, or would owe them for longer
    /// than the longest window.
    pub(crate) counted: u64,
    /// Units that the key counts afterwards, if the algorithm has to know debts beyond the quota: see
    /// [`Compiled::watching_ceiling`]. Otherwise 0.
    pub(crate) ceiling: u64,
}

/// Reads and writes the words of a key. Times are microseconds since the Unix epoch.
pub(crate) trait LimitAlgorithm {
    type Edit;

    /// Returns the number of words per key.
    fn words(&self) -> usize;

    /// Returns the number of high bits of a one-word state that are always 0, so that a store can keep a tag there. The
    /// other bits are never all set. 0 for states of several words.
    fn free_bits(&self) -> u32 {
        0
    }

    /// Returns whether the words can only be read while the key is locked.
    fn must_lock(&self) -> bool {
        false
    }

    fn decide(&self, cells: &impl StateWords, now: u64, cost: u64) -> Step<Self::Edit>;

    /// Returns the change that gives back a charge, as far as it still counts. Giving back more would create quota.
    fn refund(&self, cells: &impl StateWords, now: u64, charge: Charge) -> Option<Self::Edit>;

    /// Returns the change that gives back units of unknown charges, the newest first, and how many units it gives back.
    /// Call it again for the rest, until it returns `None`.
    fn credit(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<(Self::Edit, u64)> {
        self.refund(cells, now, Charge { at: now, cost: units }).map(|edit| (edit, units))
    }

    /// Charges units that were spent already, whatever the quota is. `None` if the words have no room for them. Those of
    /// [`Compiled::wide`] have.
    fn owe(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<Owed<Self::Edit>>;

    fn apply(&self, cells: &impl StateWords, edit: Self::Edit);

    /// Returns whether the key is at rest, so that dropping it changes no later decision.
    fn is_idle(&self, cells: &impl StateWords, now: u64) -> bool;

    /// Returns whether keys without a slot share the words of a floor. Otherwise such keys are at rest, and changes of
    /// theirs are lost.
    fn has_floor(&self) -> bool {
        true
    }

    /// Adjusts words that several keys share before a key is charged to them, so that the key gets no more quota than
    /// it would have alone. Most algorithms need no adjustment.
    fn shared(&self, cells: &impl StateWords, now: u64) {
        let _ = (cells, now);
    }

    /// Raises `floor` so that it covers `state` too: a key that starts with the floor has no more left than with
    /// either. No charge may get a later time, or a floor that is raised repeatedly would never decay. Returns false
    /// and changes nothing if half of the quota or less would be left, or if states of this algorithm cannot be
    /// combined.
    fn cover(&self, floor: &impl StateWords, state: &impl StateWords, now: u64) -> bool {
        let _ = (floor, state, now);
        false
    }

    /// Copies the charges of `from` to a new key.
    fn inherit(&self, cells: &impl StateWords, from: &impl StateWords) {
        for index in 0..self.words() {
            cells.set(index, from.get(index));
        }
    }

    /// Gives the key its whole quota back.
    fn clear(&self, cells: &impl StateWords) {
        for index in 0..self.words() {
            cells.set(index, 0);
        }
    }
}

/// The algorithms with checked and precomputed numbers.
#[derive(Clone, Debug)]
pub(crate) enum Compiled {
    /// Token bucket with smooth refill, and both leaky buckets, which are the same arithmetic.
    Meter(meter::Meter<u64>),
    /// The same for rates whose fraction is of large numbers, such as 999,983 in a second.
    WideMeter(meter::Meter<u128>),
    Interval(token_bucket::Interval),
    ClockWindow(fixed_window::ClockWindow),
    OpenedWindow(fixed_window::OpenedWindow),
    Log(sliding_window_log::Log),
    Counter(sliding_window_counter::Counter),
    Strikes(strikes::Strikes),
}

/// Runs the same expression for each algorithm, compiled separately for each.
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
    /// Makes windows that are aligned to the wall clock follow `offset`.
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

    #[doc(hidden)]
    pub fn quota(&self) -> u64 {
        match self {
            Self::TokenBucket(spec) => spec.capacity,
            Self::LeakyBucket(spec) => spec.capacity,
            Self::FixedWindow(spec) => spec.limit,
            Self::SlidingWindowLog(spec) => spec.limit,
            Self::SlidingWindowCounter(spec) => spec.limit,
            Self::Ban(spec) => spec.after,
        }
    }

    /// Returns the strictest of each number of both, which admits no more than either. Algorithms of different kinds
    /// cannot be compared.
    #[doc(hidden)]
    pub fn strictest(self, other: Self) -> Self {
        match (self, other) {
            (Self::TokenBucket(one), Self::TokenBucket(other)) => one.strictest(other).into(),
            (Self::LeakyBucket(one), Self::LeakyBucket(other)) => one.strictest(other).into(),
            (Self::FixedWindow(one), Self::FixedWindow(other)) => one.strictest(other).into(),
            (Self::SlidingWindowLog(one), Self::SlidingWindowLog(other)) => one.strictest(other).into(),
            (Self::SlidingWindowCounter(one), Self::SlidingWindowCounter(other)) => one.strictest(other).into(),
            _ => self,
        }
    }

    #[doc(hidden)]
    pub fn window(&self) -> Duration {
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

/// Checks of the numbers of all algorithms.
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

    /// Returns a checked rate as (count, period in microseconds).
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

    /// Returns the time to fill or drain a bucket of this capacity, rounded up to a microsecond.
    pub(super) fn full_refill_time(capacity: u64, rate: Rate) -> Duration {
        let micros = (u128::from(capacity) * rate.period().as_micros()).div_ceil(u128::from(rate.count().max(1)));
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    /// Rejects a bucket that takes longer to fill than the longest window.
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

/// Returns `a * b / c`, rounded down. A `u128` division is ten times as slow as a `u64` division, so it is used only if
/// the product does not fit.
#[inline]
fn mul_div(a: u64, b: u64, c: u64) -> u64 {
    div(u128::from(a) * u128::from(b), c)
}

/// Returns `a / b`, rounded down. The quotient must fit.
#[inline(always)]
fn div(a: u128, b: u64) -> u64 {
    u64::try_from(a).map_or_else(|_| div_wide(a, b), |a| a / b)
}

/// Returns `a / b`, rounded up. The quotient must fit.
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

//! Which configurations of a limit can share the words of its keys.
//!
//! Two configurations share words if every word means the same number of units to both, at every moment: windows and
//! logs of the same length, buckets of the same rate, whatever the quotas are. Where the words also have room for the
//! new numbers, the new configuration adopts the layout of the old one. Elsewhere a key is converted: see
//! `conversion.rs`.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::arithmetic::{Pair, bits_for};
use super::sliding_window_counter::Counter;
use super::sliding_window_log::Counted;
use super::sliding_window_log::Log;
use super::{Compiled, LimitAlgorithm, MAX_COUNTED, meter};
use crate::units::{MAX_SPAN, Timestamp};

/// The meaning of a state's numbers, apart from the quota: see [`Compiled::meaning`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Meaning {
    kind: Option<StateKind>,
    first: u64,
    second: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
enum StateKind {
    Bucket = 1,
    Interval = 2,
    ClockWindow = 3,
    OpenedWindow = 4,
    Counter = 6,
    Strikes = 7,
    Queue = 8,
    // 5 was a log of an earlier format.
    Log = 9,
}

/// The meaning of a state, as the script writes it before the numbers: a code for the algorithm, and its rate or
/// window.
#[cfg(feature = "redis")]
pub(crate) type Signature = smallvec::SmallVec<[u8; 16]>;

#[cfg(feature = "redis")]
impl Meaning {
    pub(crate) fn signature(self) -> Signature {
        /// Set if a length of time takes seven bytes instead of six.
        const LONG: u8 = 16;
        /// Set if a rate has several units.
        const UNITS: u8 = 32;
        let Self { kind, first, second } = self;
        let code = kind.map_or(0, |kind| kind as u8);
        let mut signature = Signature::from_slice(&[code]);
        let mut push = |number: u64, bytes: usize| signature.extend_from_slice(&number.to_be_bytes()[8 - bytes..]);
        let flags = match kind {
            Some(StateKind::Interval | StateKind::Strikes) | None => {
                push(first, 7);
                push(second, 7);
                0
            }
            Some(kind) => {
                let is_bucket = matches!(kind, StateKind::Bucket | StateKind::Queue);
                let (units, micros) = if is_bucket { (first, second) } else { (1, first) };
                let (is_long, has_units) = (micros >= 1 << 48, units > 1);
                if has_units {
                    push(units, 5);
                }
                push(micros, if is_long { 7 } else { 6 });
                if kind == StateKind::Counter {
                    push(second, 2);
                }
                u8::from(is_long) * LONG + u8::from(has_units) * UNITS
            }
        };
        signature[0] |= flags;
        signature
    }
}

impl Compiled {
    /// Returns the same limit in the layout of an older one, if the words that the older one wrote mean the same to it
    /// and have room for `ceiling` units.
    ///
    /// Token buckets and leaky buckets of the same rate are the same here: both are meters.
    pub(crate) fn laid_out_as(&self, old: &Self, ceiling: u64) -> Option<Self> {
        if self.meaning() != old.meaning() {
            return None;
        }
        match (self, old) {
            (Self::Meter(_) | Self::WideMeter(_), _) => Some(self.clone()),
            (Self::Interval(new), Self::Interval(old)) => {
                old.packing.holds(ceiling.max(new.capacity)).then(|| self.with_packing(old.packing))
            }
            (Self::ClockWindow(new), Self::ClockWindow(old)) => {
                old.packing.holds(ceiling.max(new.limit)).then(|| self.with_packing(old.packing))
            }
            (Self::OpenedWindow(new), Self::OpenedWindow(old)) => {
                old.packing.holds(ceiling.max(new.limit)).then(|| self.with_packing(old.packing))
            }
            (Self::Counter(new), Self::Counter(old)) => {
                let Counter { index_bits, count_bits, .. } = *old;
                let fits = bits_for(ceiling.max(new.limit)) <= count_bits;
                fits.then(|| Self::Counter(Counter { index_bits, count_bits, ..new.clone() }))
            }
            (Self::Log(new), Self::Log(old)) => new.laid_out_as(old).map(Self::Log),
            (Self::Strikes(new), Self::Strikes(old)) => {
                old.packing.holds(new.most_marks()).then(|| self.with_packing(old.packing))
            }
            _ => None,
        }
    }

    /// Returns the same limit for keys that may have spent up to `ceiling` units, under other numbers. Their words have
    /// room for it, and a bucket can tell such a debt from a clock that has stepped back.
    pub(crate) fn with_ceiling(&self, ceiling: u64) -> Self {
        if let Some(numbers) = self.bucket() {
            return meter::compile_reduced(numbers, ceiling.max(numbers.capacity));
        }
        let latest = Timestamp::MAX.as_micros();
        match self {
            Self::Interval(algorithm) if !algorithm.packing.holds(ceiling) => {
                self.with_packing(Pair::new(latest / algorithm.period + 1, ceiling))
            }
            Self::ClockWindow(algorithm) if !algorithm.packing.holds(ceiling) => {
                self.with_packing(Pair::new(latest / algorithm.window + 1, ceiling))
            }
            Self::OpenedWindow(algorithm) if !algorithm.packing.holds(ceiling) => {
                self.with_packing(Pair::new(latest, ceiling))
            }
            Self::Log(algorithm) => {
                Self::Log(Log::with_ceiling(algorithm.limit, algorithm.window, algorithm.counted, ceiling))
            }
            Self::Counter(algorithm) => {
                let segments = u32::try_from(algorithm.segments).unwrap_or(u32::MAX);
                Self::Counter(Counter::with_ceiling(algorithm.limit, algorithm.window, segments, ceiling))
            }
            _ => self.clone(),
        }
    }

    /// Returns the same limit in a layout that has room for the largest debt.
    pub(crate) fn wide(&self) -> Self {
        match self {
            Self::Log(log) => Self::Log(log.wide()),
            other => other.with_ceiling(MAX_COUNTED),
        }
    }

    /// Returns the same limit with a quota of one unit more. It denies a request of one unit exactly while a key counts more
    /// than this limit's quota.
    pub(crate) fn with_one_more(&self) -> Self {
        let mut larger = self.clone();
        match &mut larger {
            Self::Interval(algorithm) => algorithm.capacity += 1,
            Self::ClockWindow(algorithm) => algorithm.limit += 1,
            Self::OpenedWindow(algorithm) => algorithm.limit += 1,
            Self::Counter(algorithm) => algorithm.limit += 1,
            Self::Log(log) => (log.limit, log.counted) = (log.limit + 1, Counted::Admitted),
            Self::Meter(_) | Self::WideMeter(_) | Self::Strikes(_) => {}
        }
        match self.bucket() {
            Some(numbers) => {
                let max_wait = numbers.max_wait.map(|_| MAX_SPAN.as_micros() as u64);
                meter::compile_reduced(
                    meter::Reduced { capacity: numbers.capacity + 1, max_wait, ..numbers },
                    MAX_COUNTED,
                )
            }
            None => larger,
        }
    }

    /// Returns the same limit with a reference to the largest quota of its name, which a reload may raise while this
    /// limit is still in use. A larger debt is then not mistaken for a clock that stepped back, and a log keeps all
    /// entries.
    pub(crate) fn watching_ceiling(mut self, ceiling: &Arc<AtomicU64>) -> Self {
        match &mut self {
            Self::Meter(algorithm) => algorithm.watch_ceiling(ceiling.clone()),
            Self::WideMeter(algorithm) => algorithm.watch_ceiling(ceiling.clone()),
            Self::Log(algorithm) => algorithm.watch_ceiling(ceiling.clone()),
            _ => {}
        }
        self
    }

    /// Returns the same limit in its own layout once a larger `ceiling` is known.
    pub(crate) fn raised_to(&self, ceiling: u64) -> Self {
        match self.bucket() {
            Some(numbers) => meter::compile_reduced(numbers, ceiling.max(numbers.capacity)),
            None => self.clone(),
        }
    }

    /// Returns the time from the last charge of a key until it is at rest, if it has spent at most `ceiling` units.
    pub(crate) fn settles_within(&self, ceiling: u64) -> u64 {
        match self {
            Self::Meter(_) | Self::WideMeter(_) => {
                let Some(numbers) = self.bucket() else { return 0 };
                let owed = u128::from(ceiling.max(numbers.capacity)) * u128::from(numbers.micros);
                let span = owed.div_ceil(u128::from(numbers.units)).min(MAX_SPAN.as_micros());
                u64::try_from(span).unwrap_or(u64::MAX)
            }
            Self::Interval(algorithm) => {
                let periods = ceiling.max(algorithm.capacity).div_ceil(algorithm.portion);
                periods.saturating_add(2).saturating_mul(algorithm.period)
            }
            // A clock that steps back holds a key in the next window or segment.
            Self::ClockWindow(algorithm) => algorithm.window.saturating_mul(2),
            Self::Counter(algorithm) => algorithm.window.saturating_mul(3),
            Self::OpenedWindow(algorithm) => algorithm.window,
            Self::Log(algorithm) => algorithm.window.saturating_mul(2),
            Self::Strikes(algorithm) => algorithm.within.max(algorithm.lasts),
        }
    }

    /// Returns whether the limit has a queue.
    pub(crate) fn is_queue(&self) -> bool {
        self.bucket().is_some_and(|numbers| numbers.max_wait.is_some())
    }

    /// Returns the meaning of a state's numbers: two limits with the same meaning read the same units from it. On Redis
    /// it is the signature of a state.
    pub(crate) fn meaning(&self) -> Meaning {
        let (kind, first, second) = match self {
            Self::Meter(_) | Self::WideMeter(_) => {
                let Some(numbers) = self.bucket() else { return Meaning::default() };
                // Queues do not give refunds, so they are separate.
                let kind = if numbers.max_wait.is_some() { StateKind::Queue } else { StateKind::Bucket };
                (kind, numbers.units, numbers.micros)
            }
            Self::Interval(algorithm) => (StateKind::Interval, algorithm.portion, algorithm.period),
            Self::ClockWindow(algorithm) => (StateKind::ClockWindow, algorithm.window, 0),
            Self::OpenedWindow(algorithm) => (StateKind::OpenedWindow, algorithm.window, 0),
            Self::Log(algorithm) => (StateKind::Log, algorithm.window, 0),
            Self::Counter(algorithm) => (StateKind::Counter, algorithm.window, algorithm.segments),
            Self::Strikes(algorithm) => (StateKind::Strikes, algorithm.within, algorithm.lasts),
        };
        Meaning { kind: Some(kind), first, second }
    }

    /// Returns whether denied requests make the wait longer.
    pub(crate) fn counts_denied(&self) -> bool {
        matches!(self, Self::Log(log) if log.counted == Counted::All)
    }

    /// Returns whether its state is a debt that is paid off smoothly.
    pub(crate) fn is_bucket(&self) -> bool {
        self.bucket().is_some()
    }

    /// Returns the numbers of a smooth bucket.
    pub(super) fn bucket(&self) -> Option<meter::Reduced> {
        match self {
            Self::Meter(meter) => Some(meter.numbers()),
            Self::WideMeter(meter) => Some(meter.numbers()),
            _ => None,
        }
    }

    /// Returns the same limit with this packing, if its state has two numbers.
    pub(super) fn with_packing(&self, packing: Pair) -> Self {
        let mut same = self.clone();
        match &mut same {
            Self::Meter(algorithm) => algorithm.packing = packing,
            Self::WideMeter(algorithm) => algorithm.packing = packing,
            Self::Interval(algorithm) => algorithm.packing = packing,
            Self::ClockWindow(algorithm) => algorithm.packing = packing,
            Self::OpenedWindow(algorithm) => algorithm.packing = packing,
            Self::Strikes(algorithm) => algorithm.packing = packing,
            Self::Log(_) | Self::Counter(_) => {}
        }
        same
    }

    pub(crate) fn words(&self) -> usize {
        super::with_algorithm!(self, algorithm => algorithm.words())
    }

    pub(crate) fn free_bits(&self) -> u32 {
        super::with_algorithm!(self, algorithm => algorithm.free_bits())
    }
}

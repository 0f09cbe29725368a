//! The algorithms for state on Redis: the input of the script that decides there, and the verdict from the state that
//! the script returns.

use std::cell::Cell;
use std::sync::LazyLock;

use smallvec::{SmallVec, smallvec};

use super::arithmetic::Pair;
use super::meter::{Debt, Meter};
use super::sliding_window_counter::Counter;
use super::sliding_window_log::Counted;
use super::spill::Spill;
use super::{Compiled, LimitAlgorithm, MAX_COUNTED, StateWords, meter};
use crate::budget::Budget;
use crate::decision::Verdict;
use crate::error::InvalidLimit;
use crate::units::Timestamp;

/// A cost as the script adds it: for a bucket, the time until it is refilled, in microseconds and `units`-ths of one;
/// otherwise the units themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortableCost(pub(crate) u64, pub(crate) u64);

/// The debt of a key before a request took from it, in the script's units for its algorithm. Refill up to this amount
/// pays off earlier requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Before(pub(crate) u64, pub(crate) u64);

/// The format in which the script returns a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Numbers, which [`Compiled::read`] reads.
    Numbers,
    /// The script returns the verdict as text.
    Verdict,
}

/// The script that decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Script {
    /// The small script, for requests that take from common algorithms.
    Lean,
    /// The complete script.
    Full,
}

/// The codes by which the script identifies algorithms.
mod kind {
    pub(super) const METER: u64 = 1;
    pub(super) const INTERVAL: u64 = 2;
    pub(super) const CLOCK_WINDOW: u64 = 3;
    pub(super) const OPENED_WINDOW: u64 = 4;
    pub(super) const LOG: u64 = 5;
    pub(super) const COUNTER: u64 = 6;
    pub(super) const STRIKES: u64 = 7;
}

/// Entries in a block of a log on Redis: `BLOCK` in the scripts.
const LOG_BLOCK: u64 = 128;

/// The most entries of a log on Redis in one block: `LONGEST_RING` in the scripts.
const LONGEST_RING: u64 = 256;

/// The largest limit of a log on Redis, where each request is an entry of 12 bytes. A larger log would take Redis
/// longer than a millisecond to copy or to forget, while all other clients wait.
const MAX_SHARED_LOG: u64 = 100_000;

/// Segments of a counter whose state has 64 bytes at most: a signature of 10, the newest segment (7), the units of all
/// (5), and 6 for each of the segments and the one that is leaving the window.
const MAX_LISTPACK_SEGMENTS: u64 = 6;

/// Stands for an absent number.
const NONE: i64 = -1;

impl Compiled {
    /// Returns the kind and the numbers of the algorithm, in the order in which the script reads them. The last is the
    /// most units that a key can have spent under any configuration of the limit.
    pub(crate) fn parameters(&self, ceiling: u64) -> SmallVec<[i64; 9]> {
        let (kind, numbers): (u64, SmallVec<[i64; 9]>) = match self {
            Self::Meter(meter) => (kind::METER, meter_numbers(meter)),
            Self::WideMeter(meter) => (kind::METER, meter_numbers(meter)),
            Self::Interval(algorithm) => (
                kind::INTERVAL,
                smallvec![algorithm.capacity as i64, algorithm.portion as i64, algorithm.period as i64],
            ),
            Self::ClockWindow(algorithm) => {
                (kind::CLOCK_WINDOW, smallvec![algorithm.limit as i64, algorithm.window as i64])
            }
            Self::OpenedWindow(algorithm) => {
                (kind::OPENED_WINDOW, smallvec![algorithm.limit as i64, algorithm.window as i64])
            }
            Self::Log(log) => {
                let all = i64::from(log.counted == Counted::All);
                (kind::LOG, smallvec![log.limit as i64, log.window as i64, all])
            }
            Self::Counter(algorithm) => {
                (kind::COUNTER, smallvec![algorithm.limit as i64, algorithm.window as i64, algorithm.segments as i64])
            }
            Self::Strikes(algorithm) => {
                (kind::STRIKES, smallvec![algorithm.after as i64, algorithm.within as i64, algorithm.lasts as i64])
            }
        };
        std::iter::once(kind as i64).chain(numbers).chain([ceiling as i64]).collect()
    }

    /// Returns whether the small script can take from this limit.
    pub(crate) fn is_taken_lean(&self) -> bool {
        match self {
            Self::Interval(_) | Self::Strikes(_) => false,
            Self::Log(log) => log.counted == Counted::Admitted,
            _ => true,
        }
    }

    /// Returns whether this is a log that may have several blocks.
    pub(crate) fn may_be_long_log(&self) -> bool {
        matches!(self, Self::Log(log) if log.limit > LONGEST_RING)
    }

    /// Returns whether every state is short enough for a hash that Redis stores as a listpack: 64 bytes.
    pub(crate) fn fits_listpack(&self) -> bool {
        match self {
            Self::Log(_) => false,
            Self::Counter(algorithm) => algorithm.segments <= MAX_LISTPACK_SEGMENTS,
            _ => true,
        }
    }

    /// Returns an estimate of the script's work on one state, as a multiple of the work on a bucket.
    pub(crate) fn script_work(&self, by: Script) -> usize {
        let (segments, blocks) = match self {
            Self::Counter(algorithm) => (algorithm.segments as usize, 0),
            Self::Log(log) => (0, (log.limit / LOG_BLOCK) as usize),
            _ => (0, 0),
        };
        let ring_blocks = blocks.min((LONGEST_RING / LOG_BLOCK) as usize);
        match by {
            // Segments are copied without reading each of them.
            Script::Lean => 1 + segments / 256,
            // Segments are read into a table and written back from it. A ring is read and written as a whole.
            Script::Full => 2 + segments / 16 + ring_blocks + blocks / 64,
        }
    }

    /// Checks that the limit suits a store with one thread for all clients.
    pub(crate) fn check_shared(&self) -> Result<(), InvalidLimit> {
        match self {
            Self::Log(log) if log.limit > MAX_SHARED_LOG => Err(InvalidLimit::new(
                "limit",
                format!("limit {} is too large for a sliding window log on Redis", log.limit),
                "use 100000 or less, or a sliding window counter",
            )),
            _ => Ok(()),
        }
    }

    /// Reads the numbers of a state that the script returned, after its signature: for a counter, the start of the
    /// newest segment and the counts by age; otherwise, the first number and the second.
    pub(crate) fn read(&self, state: &[u8]) -> Option<SmallVec<[u64; 3]>> {
        match self {
            Self::Meter(Meter { units, .. }) | Self::WideMeter(Meter { units, .. }) => {
                // The largest quota comes first.
                let (_, state) = split_number(state, 5)?;
                let (moment, state) = split_number(state, 7)?;
                let (parts, rest) = if *units > 1 { split_number(state, 5)? } else { (0, state) };
                rest.is_empty().then(|| smallvec![moment, parts])
            }
            Self::Counter(algorithm) => {
                let (segment, mut state) = split_number(state, 7)?;
                if algorithm.segments > 1 {
                    (_, state) = split_number(state, 5)?;
                }
                let width = if algorithm.segments < 255 { 1 } else { 2 };
                let mut numbers = smallvec![0; algorithm.segments as usize + 2];
                numbers[0] = algorithm.start_of(segment.min(algorithm.position(LATEST).segment));
                while !state.is_empty() {
                    let (place, units);
                    (place, state) = split_number(state, width)?;
                    (units, state) = split_number(state, 5)?;
                    let age = segment.wrapping_sub(place) & ((1 << (8 * width)) - 1);
                    *numbers.get_mut(usize::try_from(age).ok()? + 1)? = units;
                }
                Some(numbers)
            }
            _ => {
                let (first, state) = split_number(state, 7)?;
                let is_window = matches!(self, Self::ClockWindow(_) | Self::OpenedWindow(_));
                let (second, rest) = split_number(state, if is_window { 5 } else { 7 })?;
                rest.is_empty().then(|| smallvec![first, second])
            }
        }
    }

    pub(crate) fn shape(&self) -> Shape {
        match self {
            Self::Log(_) => Shape::Verdict,
            _ => Shape::Numbers,
        }
    }

    /// Returns a cost for the script. Costs above the whole quota are reduced to one unit above it: they still never
    /// fit.
    pub(crate) fn portable_cost(&self, cost: u64) -> PortableCost {
        match self {
            Self::Meter(meter) => meter_cost(meter, cost),
            Self::WideMeter(meter) => meter_cost(meter, cost),
            Self::Interval(algorithm) => PortableCost(cost.min(algorithm.capacity + 1), 0),
            Self::ClockWindow(algorithm) => PortableCost(cost.min(algorithm.limit + 1), 0),
            Self::OpenedWindow(algorithm) => PortableCost(cost.min(algorithm.limit + 1), 0),
            Self::Log(algorithm) => PortableCost(cost.min(algorithm.limit + 1), 0),
            Self::Counter(algorithm) => PortableCost(cost.min(algorithm.limit + 1), 0),
            // All strikes fit: the last one that counts starts the ban.
            Self::Strikes(algorithm) => PortableCost(cost.min(algorithm.after), 0),
        }
    }

    /// Returns the same limit with room for any state of a store, including charges under higher quotas.
    pub(crate) fn with_room(&self) -> Self {
        match self {
            Self::Counter(algorithm) => {
                Self::Counter(Counter { index_bits: u64::BITS, count_bits: u64::BITS, ..algorithm.clone() })
            }
            other => match other.bucket() {
                Some(numbers) => meter::compile_reduced(numbers, MAX_COUNTED),
                None => other.clone(),
            }
            .with_packing(Pair::of_two_words()),
        }
    }

    /// Returns the highest cost that a sliding window ever admits. `None` for other limits.
    pub(crate) fn largest_cost(&self) -> Option<u64> {
        match self {
            Self::Log(log) => Some(log.limit),
            Self::Counter(algorithm) => Some(algorithm.limit),
            _ => None,
        }
    }

    /// Returns the verdict on a state of two numbers, or of a segment and its counts, by a limit [with
    /// room](Self::with_room) for it.
    pub(crate) fn verdict(&self, state: &[u64], now: u64, cost: u64) -> Verdict {
        let words = self.restored(state, now);
        super::with_algorithm!(self, algorithm => algorithm.decide(&words, now, cost).verdict)
    }

    /// Returns the debt of a key in this state at `at`.
    pub(crate) fn before(&self, state: &[u64], at: u64) -> Before {
        let number = |index: usize| state.get(index).copied().unwrap_or(0);
        let (first, second) = (number(0), number(1));
        match self {
            Self::Meter(_) | Self::WideMeter(_) if first >= at => Before(first - at, second),
            Self::Interval(algorithm) => {
                let periods = (at / algorithm.period).saturating_sub(first / algorithm.period);
                Before(second.saturating_sub(algorithm.portion.saturating_mul(periods)), 0)
            }
            _ => Before::default(),
        }
    }

    /// Returns the debt before the rest of a charge, of which `spent` units came first.
    pub(crate) fn before_rest(&self, before: Before, spent: u64) -> Before {
        let PortableCost(cost, parts) = self.portable_cost(spent);
        match self {
            Self::Meter(Meter { units, .. }) | Self::WideMeter(Meter { units, .. }) => {
                let sum = before.1.saturating_add(parts);
                let carry = u64::from(sum >= *units);
                Before(before.0.saturating_add(cost + carry), sum - carry * *units)
            }
            Self::Interval(_) => Before(before.0.saturating_add(cost), 0),
            _ => before,
        }
    }

    /// Returns the verdict after the same request was allowed.
    pub(crate) fn verdict_after(&self, state: &[u64], now: u64, cost: u64) -> Verdict {
        let words = self.restored(state, now);
        super::with_algorithm!(self, algorithm => {
            if let Some(edit) = algorithm.decide(&words, now, cost).edit {
                algorithm.apply(&words, edit);
            }
            algorithm.decide(&words, now, cost).verdict
        })
    }

    /// Returns the words of a state that the script has converted to the numbers of this limit. Values that no limit
    /// can produce are clamped, because a store can hold anything.
    fn restored(&self, state: &[u64], now: u64) -> Restored {
        let number = |index: usize| state.get(index).copied().unwrap_or(0);
        let (first, second) = (number(0), number(1));
        // Further ahead makes no difference: the clock has stepped back.
        let ahead = |stored: u64, current: u64| stored.min(current + 2);
        let words = Restored::of(super::with_algorithm!(self, algorithm => algorithm.words()));
        match self {
            Self::Meter(algorithm) => {
                algorithm.packing.store(&words, moment(first, second, algorithm.units), parts(second, algorithm.units))
            }
            Self::WideMeter(algorithm) => {
                algorithm.packing.store(&words, moment(first, second, algorithm.units), parts(second, algorithm.units));
            }
            Self::Interval(algorithm) => {
                algorithm.packing.store(&words, ahead(first / algorithm.period, now / algorithm.period), second)
            }
            Self::ClockWindow(algorithm) => {
                algorithm.packing.store(&words, ahead(first / algorithm.window, now / algorithm.window), second);
            }
            Self::OpenedWindow(algorithm) => algorithm.packing.store(&words, first.min(LATEST), second),
            Self::Strikes(algorithm) => algorithm.packing.store(&words, first.min(LATEST), second),
            Self::Counter(algorithm) => {
                for age in 0..=algorithm.segments {
                    algorithm.set_count(&words, age, number(age as usize + 1).min(MAX_COUNTED));
                }
                let segment = |at: u64| super::mul_div(at, algorithm.segments, algorithm.window);
                algorithm.set_segment(&words, ahead(segment(first), segment(now)));
            }
            // The script computes the verdict of a log.
            Self::Log(_) => {}
        }
        words
    }
}

/// The latest time that a state can contain.
const LATEST: u64 = Timestamp::MAX.as_micros();

/// Splits off the number in the first bytes.
fn split_number(bytes: &[u8], width: usize) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_at_checked(width)?;
    Some((number.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)), rest))
}

fn moment(micros: u64, parts: u64, units: u64) -> u64 {
    (micros + u64::from(parts >= units)).min(LATEST)
}

fn parts(parts: u64, units: u64) -> u64 {
    if parts >= units { 0 } else { parts }
}

fn meter_numbers(meter: &Meter<impl Debt>) -> SmallVec<[i64; 9]> {
    let (micros, parts) = divided(meter.full.wide(), meter.units);
    let (most_micros, most_parts) = divided(meter.most.wide(), meter.units);
    let max_wait = meter.max_wait.map_or(NONE, |wait| wait as i64);
    [meter.units, micros, parts]
        .map(|number| number as i64)
        .into_iter()
        .chain([max_wait, meter.micros as i64, most_micros as i64, most_parts as i64])
        .collect()
}

fn meter_cost(meter: &Meter<impl Debt>, cost: u64) -> PortableCost {
    if cost > meter.capacity {
        let (micros, _) = divided(meter.full.wide(), meter.units);
        return PortableCost(micros + 1, 0);
    }
    let (micros, parts) = divided(u128::from(cost) * u128::from(meter.micros), meter.units);
    PortableCost(micros, parts)
}

fn divided(value: u128, by: u64) -> (u64, u64) {
    let quotient = super::div(value, by);
    (quotient, (value - u128::from(quotient) * u128::from(by)) as u64)
}

/// The words of a state from another store.
struct Restored(SmallVec<[Cell<u64>; 8]>);

/// Only logs spill, and the script computes their verdicts.
static NO_SPILL: LazyLock<Spill> = LazyLock::new(|| Spill::new(Budget::new(0)));

impl Restored {
    fn of(words: usize) -> Self {
        Self((0..words).map(|_| Cell::new(0)).collect())
    }
}

impl StateWords for Restored {
    fn get(&self, index: usize) -> u64 {
        self.0.get(index).map_or(0, Cell::get)
    }

    fn set(&self, index: usize, word: u64) {
        if let Some(cell) = self.0.get(index) {
            cell.set(word);
        }
    }

    fn spill(&self) -> &Spill {
        &NO_SPILL
    }
}

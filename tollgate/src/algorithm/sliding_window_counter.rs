//! Sliding window counter: a sliding window estimated from a count per segment.

use std::time::Duration;

use super::arithmetic::{Divisor, FREE_BITS, bits_for, read_bits, write_bits};
use super::{
    Algorithm, Charge, Compiled, LimitAlgorithm, MAX_COUNTED, MAX_QUOTA, Owed, StateWords, Step, allowed, checked,
    denied, div_ceil, mul_div, never_fits,
};
use crate::error::InvalidLimit;
use crate::units::{MINUTE, Timestamp};

/// At most `limit` units in a sliding window, by an estimate: the counts of the segments inside the window, plus the
/// share of the oldest segment that is still inside.
///
/// With one segment this is the two-window formula of most gateways. Any `segments` consecutive whole segments contain
/// at most the limit. A window that is not aligned to segments can contain up to twice the limit if all requests came
/// at its two ends; more segments make this deviation smaller. The default is 10 per minute with one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowCounter {
    pub(super) limit: u64,
    pub(crate) window: Duration,
    segments: u32,
}

/// Most segments: a day in minutes. Each segment costs some bits per key; with more of them, a log is smaller, and
/// exact.
const MAX_SEGMENTS: u32 = 1440;

impl Default for SlidingWindowCounter {
    fn default() -> Self {
        Self::new(10, MINUTE)
    }
}

impl SlidingWindowCounter {
    /// Returns the strictest of each number of both.
    pub(super) fn strictest(self, other: Self) -> Self {
        Self { limit: self.limit.min(other.limit), window: self.window.max(other.window), ..self }
    }

    /// Creates a window of one segment.
    #[must_use]
    pub const fn new(limit: u64, window: Duration) -> Self {
        Self { limit, window, segments: 1 }
    }

    /// Divides the window into segments, for a more precise estimate.
    #[must_use]
    pub const fn segments(self, segments: u32) -> Self {
        Self { segments, ..self }
    }

    /// Returns the number of segments.
    #[doc(hidden)]
    pub const fn segment_count(&self) -> u32 {
        self.segments
    }

    pub(super) fn compile(&self) -> Result<Compiled, InvalidLimit> {
        let limit = checked::quota("limit", self.limit)?;
        let window = checked::span("window", self.window)?;
        if self.segments == 0 {
            return Err(InvalidLimit::new(
                "segments",
                "segments 0 leaves nothing to count in".into(),
                "use 1 or more; 1 is the two-window formula",
            ));
        }
        if self.segments > MAX_SEGMENTS {
            return Err(InvalidLimit::new(
                "segments",
                format!("{} segments are more than 1440", self.segments),
                "use 1440 or fewer, or a sliding_window_log, which is exact",
            ));
        }
        if u64::from(self.segments) > window {
            return Err(InvalidLimit::new(
                "segments",
                format!("{} segments in {window} µs are shorter than a microsecond each", self.segments),
                "use fewer segments or a longer window",
            ));
        }
        Ok(Compiled::Counter(Counter::new(limit, window, self.segments)))
    }
}

impl From<SlidingWindowCounter> for Algorithm {
    fn from(spec: SlidingWindowCounter) -> Self {
        Self::SlidingWindowCounter(spec)
    }
}

/// Counts by segment, newest first, as of the segment that the state was last written in.
///
/// Segments are counted from the Unix epoch and need not be whole microseconds long: time is counted in
/// `segments`-ths of a microsecond, so that a segment is exactly `window` of them.
///
/// A clock that steps back is held at the start of the segment last written, at most the one after the
/// current: jitter never counts a segment twice, and a long step back locks no key out.
#[derive(Clone, Debug)]
pub(crate) struct Counter {
    pub(super) limit: u64,
    pub(super) window: u64,
    pub(super) segments: u64,
    pub(super) index_bits: u32,
    pub(super) count_bits: u32,
    pub(super) by_window: Divisor,
    pub(super) by_segments: Divisor,
}

/// Moves the counts to a new current segment, and changes the count of the segment that is `age` segments old.
pub(crate) struct Move {
    segment: u64,
    age: usize,
    units: u64,
}

/// The position of a time: its segment, and the time elapsed in it in `segments`-ths of a microsecond.
#[derive(Clone, Copy)]
pub(super) struct SegmentPosition {
    pub(super) segment: u64,
    pub(super) elapsed: u64,
}

impl Counter {
    pub(super) fn new(limit: u64, window: u64, segments: u32) -> Self {
        Self::with_ceiling(limit, window, segments, limit)
    }

    /// Creates a counter whose counts have room for `ceiling` units.
    pub(super) fn with_ceiling(limit: u64, window: u64, segments: u32, ceiling: u64) -> Self {
        let (counts, segments) = (segments + 1, u64::from(segments));
        // One more than the largest index, so that no state is a word of ones.
        let index_bits = bits_for(mul_div(Timestamp::MAX.as_micros(), segments, window) + 2);
        // The counts share what is left of the words they need anyway, so that they can grow when the limit is
        // changed.
        let needs = index_bits + counts * bits_for(ceiling.max(limit));
        let words = needs.div_ceil(u64::BITS);
        let spare = words * u64::BITS - needs;
        let free_bits = if words == 1 { spare.min(FREE_BITS) } else { 0 };
        let count_bits = ((words * u64::BITS - free_bits - index_bits) / counts).min(bits_for(ceiling.max(MAX_QUOTA)));
        let (by_window, by_segments) = (Divisor::new(window), Divisor::new(segments));
        Self { limit, window, segments, index_bits, count_bits, by_window, by_segments }
    }

    pub(super) fn position(&self, now: u64) -> SegmentPosition {
        let (segment, elapsed) = self.by_window.divide(now * self.segments);
        SegmentPosition { segment, elapsed }
    }

    /// Returns the first microsecond of a segment.
    pub(super) fn start_of(&self, segment: u64) -> u64 {
        self.by_segments.div_ceil(u128::from(segment) * u128::from(self.window))
    }

    pub(super) fn segments_between(&self, earlier: u64, later: u64) -> u64 {
        self.position(later).segment.saturating_sub(self.position(earlier).segment)
    }

    pub(super) fn stored_segment(&self, cells: &impl StateWords) -> u64 {
        read_bits(|index| cells.get(index), 0, self.index_bits)
    }

    /// Returns the stored count of the segment that was `age` segments old when the state was written.
    pub(super) fn stored(&self, cells: &impl StateWords, age: u64) -> u64 {
        if age > self.segments {
            return 0;
        }
        let at = self.index_bits as usize + self.count_bits as usize * age as usize;
        read_bits(|index| cells.get(index), at, self.count_bits)
    }

    pub(super) fn set_segment(&self, cells: &impl StateWords, segment: u64) {
        write_bits(|index| cells.get(index), |index, word| cells.set(index, word), 0, self.index_bits, segment);
    }

    pub(super) fn set_count(&self, cells: &impl StateWords, age: u64, units: u64) {
        let at = self.index_bits as usize + self.count_bits as usize * age as usize;
        write_bits(|index| cells.get(index), |index, word| cells.set(index, word), at, self.count_bits, units);
    }

    /// Returns the position to decide at, the number of segments since the state was written, and whether the clock has
    /// stepped back by more than a segment.
    pub(super) fn judged_from(&self, cells: &impl StateWords, now: u64) -> (SegmentPosition, u64, bool) {
        let position = self.position(now);
        let stored = self.stored_segment(cells);
        if stored <= position.segment {
            return (position, position.segment - stored, false);
        }
        let held = SegmentPosition { segment: stored.min(position.segment + 1), elapsed: 0 };
        (held, 0, stored > position.segment + 1)
    }

    /// Returns the count of the segments that are entirely inside the window, after `passed` segments.
    pub(super) fn inside(&self, cells: &impl StateWords, passed: u64) -> u64 {
        (0..self.segments.saturating_sub(passed)).map(|age| self.stored(cells, age)).sum()
    }

    /// Returns the count of the segment that is leaving the window, after `passed` segments.
    pub(super) fn leaving(&self, cells: &impl StateWords, passed: u64) -> u64 {
        self.segments.checked_sub(passed).map_or(0, |age| self.stored(cells, age))
    }

    /// Returns the first time at which `cost` is allowed, if no other requests arrive. Until then the estimate falls
    /// continuously, so it suffices to find the segment in which it falls far enough.
    fn passes_at(&self, cells: &impl StateWords, from: SegmentPosition, passed: u64, cost: u64) -> u64 {
        let mut inside = self.inside(cells, passed);
        let room = self.limit + 1 - cost;
        for later in 0..=self.segments + 1 {
            let passed = passed + later;
            let leaving = self.leaving(cells, passed);
            if inside < room {
                // The least elapsed with leaving × (window − elapsed) < (room − inside) × window.
                let share = u128::from(room - inside) * u128::from(self.window);
                let stays = if leaving == 0 { u64::MAX } else { div_ceil(share, leaving) };
                let elapsed = (self.window + 1).saturating_sub(stays);
                let ticks = u128::from(from.segment + later) * u128::from(self.window) + u128::from(elapsed);
                return self.by_segments.div_ceil(ticks);
            }
            let next_to_leave = self.segments.checked_sub(passed + 1);
            inside = inside.saturating_sub(next_to_leave.map_or(0, |age| self.stored(cells, age)));
        }
        0
    }

    /// Returns the time until the whole limit is free. Only the newest count matters: the window is empty, except for a
    /// part of one unit, at some time while that count is leaving.
    fn reset_after(&self, segment: u64, newest: Option<(u64, u64)>, now: u64) -> u64 {
        let Some((age, units)) = newest else { return 0 };
        let ticks = u128::from(segment + self.segments - age) * u128::from(self.window)
            + u128::from(self.window + 1 - self.window.div_ceil(units));
        self.by_segments.div_ceil(ticks).saturating_sub(now)
    }
}

impl LimitAlgorithm for Counter {
    type Edit = Move;

    fn words(&self) -> usize {
        let bits = self.index_bits as usize + self.count_bits as usize * (self.segments as usize + 1);
        bits.div_ceil(64)
    }

    fn free_bits(&self) -> u32 {
        let counts = self.segments as u32 + 1;
        u64::BITS.saturating_sub(self.index_bits + counts * self.count_bits)
    }

    fn decide(&self, cells: &impl StateWords, now: u64, cost: u64) -> Step<Move> {
        let (position, passed, stepped_back) = self.judged_from(cells, now);
        let leaving = self.leaving(cells, passed);
        let staying = self.by_window.div(u128::from(leaving) * u128::from(self.window - position.elapsed));
        let estimate = self.inside(cells, passed) + staying;
        let remaining = self.limit.saturating_sub(estimate);
        let edit = stepped_back.then_some(Move { segment: position.segment, age: 0, units: self.stored(cells, 0) });
        if cost > 0 && cost <= remaining {
            let current = if passed == 0 { self.stored(cells, 0) } else { 0 };
            let units = current + cost;
            let verdict = allowed(remaining - cost, self.reset_after(position.segment, Some((0, units)), now));
            return Step { verdict, edit: Some(Move { segment: position.segment, age: 0, units }) };
        }
        let newest =
            (passed..=self.segments).map(|age| (age, self.stored(cells, age - passed))).find(|(_, units)| *units > 0);
        let reset_after = self.reset_after(position.segment, newest, now);
        let verdict = if cost == 0 {
            allowed(remaining, reset_after)
        } else if cost > self.limit {
            never_fits(remaining, reset_after)
        } else {
            let retry_after = self.passes_at(cells, position, passed, cost).saturating_sub(now);
            denied(retry_after, remaining, reset_after)
        };
        Step { verdict, edit }
    }

    /// Gives back a charge from its segment, while that still counts.
    fn refund(&self, cells: &impl StateWords, now: u64, charge: Charge) -> Option<Move> {
        let (position, passed, _) = self.judged_from(cells, now);
        let age = position.segment.checked_sub(self.position(charge.at).segment)?;
        if age > self.segments || age < passed {
            return None;
        }
        let units = self.stored(cells, age - passed);
        let left = units.saturating_sub(charge.cost);
        (left != units).then_some(Move { segment: position.segment, age: age as usize, units: left })
    }

    /// Gives back units of the newest segment that has any.
    fn credit(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<(Move, u64)> {
        let (position, passed, _) = self.judged_from(cells, now);
        let mut counts = (passed..=self.segments).map(|age| (age, self.stored(cells, age - passed)));
        let (age, count) = counts.find(|(_, count)| *count > 0)?;
        let given = units.min(count);
        Some((Move { segment: position.segment, age: age as usize, units: count - given }, given))
    }

    /// Adds to the count of the current segment.
    fn owe(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<Owed<Move>> {
        let (position, passed, _) = self.judged_from(cells, now);
        let current = if passed == 0 { self.stored(cells, 0) } else { 0 };
        let counted = units.min(MAX_COUNTED.saturating_sub(current));
        let units = current + counted;
        let edit = Move { segment: position.segment, age: 0, units };
        (bits_for(units) <= self.count_bits).then_some(Owed { edit, counted, ceiling: 0 })
    }

    fn apply(&self, cells: &impl StateWords, edit: Move) {
        let passed = edit.segment.saturating_sub(self.stored_segment(cells));
        if passed == 0 {
            self.set_count(cells, edit.age as u64, edit.units);
            self.set_segment(cells, edit.segment);
            return;
        }
        for age in (0..=self.segments).rev() {
            let units = if age as usize == edit.age {
                edit.units
            } else {
                age.checked_sub(passed).map_or(0, |age| self.stored(cells, age))
            };
            self.set_count(cells, age, units);
        }
        self.set_segment(cells, edit.segment);
    }

    fn is_idle(&self, cells: &impl StateWords, now: u64) -> bool {
        let (_, passed, _) = self.judged_from(cells, now);
        passed > self.segments || (0..=self.segments - passed).all(|age| self.stored(cells, age) == 0)
    }

    /// Takes the larger count of every segment.
    fn cover(&self, floor: &impl StateWords, state: &impl StateWords, now: u64) -> bool {
        let position = self.position(now);
        let [one, other] = [self.stored_segment(floor), self.stored_segment(state)];
        let (Some(passed_of_one), Some(passed_of_other)) =
            (position.segment.checked_sub(one), position.segment.checked_sub(other))
        else {
            // The clock has stepped back.
            return false;
        };
        let count = |age: u64| {
            let one = age.checked_sub(passed_of_one).map_or(0, |age| self.stored(floor, age));
            one.max(age.checked_sub(passed_of_other).map_or(0, |age| self.stored(state, age)))
        };
        let leaving = u128::from(count(self.segments)) * u128::from(self.window - position.elapsed);
        let units = (0..self.segments).map(count).sum::<u64>() + div_ceil(leaving, self.window);
        if units * 2 >= self.limit {
            return false;
        }
        // The oldest first: a count is read before its place is written.
        (0..=self.segments).rev().for_each(|age| self.set_count(floor, age, count(age)));
        self.set_segment(floor, position.segment);
        true
    }
}

//! Fixed window: a count that restarts with every window.

use std::time::Duration;

use super::arithmetic::Pair;
use super::{
    Algorithm, Charge, Compiled, LimitAlgorithm, MAX_COUNTED, Owed, StateWords, Step, allowed, checked, denied,
    never_fits,
};
use crate::decision::Verdict;
use crate::error::InvalidLimit;
use crate::units::{MINUTE, Timestamp, WallOffset};

/// At most `limit` units per window of time.
///
/// Simple and cheap, with a known flaw: requests on both sides of a boundary count in different windows, so a period as
/// long as the window can contain twice the limit. The default is 10 per minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindow {
    pub(super) limit: u64,
    pub(crate) window: Duration,
    align: Align,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Align {
    Clock,
    FirstRequest,
}

impl Default for FixedWindow {
    fn default() -> Self {
        Self::new(10, MINUTE)
    }
}

impl FixedWindow {
    /// Returns the strictest of each number of both.
    pub(super) fn strictest(self, other: Self) -> Self {
        Self { limit: self.limit.min(other.limit), window: self.window.max(other.window), ..self }
    }

    /// Creates windows that are aligned to the clock and the same for every key: a window of an hour begins at every
    /// full hour (UTC).
    #[must_use]
    pub const fn new(limit: u64, window: Duration) -> Self {
        Self { limit, window, align: Align::Clock }
    }

    /// Starts each key's window with its first request instead of aligning it to the clock.
    #[must_use]
    pub const fn from_first_request(self) -> Self {
        Self { align: Align::FirstRequest, ..self }
    }

    /// Returns whether windows are aligned to the clock.
    #[doc(hidden)]
    pub const fn is_aligned(&self) -> bool {
        matches!(self.align, Align::Clock)
    }

    pub(super) fn compile(&self) -> Result<Compiled, InvalidLimit> {
        let limit = checked::quota("limit", self.limit)?;
        let window = checked::span("window", self.window)?;
        let latest = Timestamp::MAX.as_micros();
        Ok(match self.align {
            Align::Clock => {
                let (packing, wall) = (Pair::new(latest / window + 1, limit), WallOffset::default());
                Compiled::ClockWindow(ClockWindow { limit, window, packing, wall })
            }
            Align::FirstRequest => {
                Compiled::OpenedWindow(OpenedWindow { limit, window, packing: Pair::new(latest, limit) })
            }
        })
    }
}

impl From<FixedWindow> for Algorithm {
    fn from(spec: FixedWindow) -> Self {
        Self::FixedWindow(spec)
    }
}

/// The units counted in one window, which is identified by its index or its start.
#[derive(Clone, Copy)]
pub(crate) struct Count {
    pub(super) window: u64,
    pub(super) units: u64,
}

impl Count {
    /// Decides on a cost in a window that ends in `left`.
    fn judge(self, limit: u64, left: u64, cost: u64) -> (Verdict, Option<Self>) {
        let remaining = limit.saturating_sub(self.units);
        let reset_after = if self.units > 0 { left } else { 0 };
        if cost == 0 {
            (allowed(remaining, reset_after), None)
        } else if cost > limit {
            (never_fits(remaining, reset_after), None)
        } else if cost > remaining {
            (denied(left, remaining, reset_after), None)
        } else {
            (allowed(remaining - cost, left), Some(Self { units: self.units + cost, ..self }))
        }
    }

    /// Counts units beyond the limit. They end with the window. `None` if `packing` has no room for them.
    fn owe(self, packing: Pair, units: u64) -> Option<Owed<Self>> {
        let counted = units.min(MAX_COUNTED.saturating_sub(self.units));
        let edit = Self { units: self.units + counted, ..self };
        packing.holds(edit.units).then_some(Owed { edit, counted, ceiling: 0 })
    }

    fn give_back(self, cost: u64) -> Option<Self> {
        let units = self.units.saturating_sub(cost);
        (units != self.units).then_some(Self { units, ..self })
    }
}

/// Windows counted from the Unix epoch, so that every node agrees when one ends.
///
/// A clock that steps back holds a key in the later window, at most the one after the current: jitter at a
/// boundary never starts a window twice, and a long step back locks no key out. When the wall clock is stepped forward
/// past the end of a window, that window ends: each such step admits at most one more quota.
#[derive(Clone, Debug)]
pub(crate) struct ClockWindow {
    pub(super) limit: u64,
    pub(super) window: u64,
    pub(super) packing: Pair,
    /// Offset of the wall clock, which windows follow, from the times that the methods get.
    pub(super) wall: WallOffset,
}

impl ClockWindow {
    /// Returns a moment of the limiter's time in wall-clock time.
    pub(super) fn at_wall(&self, moment: u64) -> u64 {
        Timestamp::from_micros(moment).offset_by(self.wall.get()).as_micros()
    }

    /// Returns the count at a wall-clock time, and whether the clock has stepped back by more than a window.
    pub(super) fn count(&self, cells: &impl StateWords, now: u64) -> (Count, bool) {
        let (window, units) = self.packing.load(cells);
        let current = now / self.window;
        if window < current {
            return (Count { window: current, units: 0 }, false);
        }
        (Count { window: window.min(current + 1), units }, window > current + 1)
    }
}

impl LimitAlgorithm for ClockWindow {
    type Edit = Count;

    fn words(&self) -> usize {
        self.packing.words()
    }

    fn free_bits(&self) -> u32 {
        self.packing.free_bits()
    }

    fn decide(&self, cells: &impl StateWords, now: u64, cost: u64) -> Step<Count> {
        let now = self.at_wall(now);
        let (count, stepped_back) = self.count(cells, now);
        let left = (count.window + 1) * self.window - now;
        let (verdict, edit) = count.judge(self.limit, left, cost);
        Step { verdict, edit: edit.or(stepped_back.then_some(count)) }
    }

    /// Gives back a charge of the current window. Earlier charges no longer count.
    fn refund(&self, cells: &impl StateWords, now: u64, charge: Charge) -> Option<Count> {
        let (count, _) = self.count(cells, self.at_wall(now));
        if self.at_wall(charge.at) / self.window == count.window { count.give_back(charge.cost) } else { None }
    }

    fn owe(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<Owed<Count>> {
        self.count(cells, self.at_wall(now)).0.owe(self.packing, units)
    }

    /// Gives back units of the window that counts, even if the clock has stepped back before it.
    fn credit(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<(Count, u64)> {
        let (count, _) = self.count(cells, self.at_wall(now));
        count.give_back(units).map(|count| (count, units))
    }

    fn apply(&self, cells: &impl StateWords, edit: Count) {
        self.packing.store(cells, edit.window, edit.units);
    }

    fn is_idle(&self, cells: &impl StateWords, now: u64) -> bool {
        self.count(cells, self.at_wall(now)).0.units == 0
    }

    /// Takes the larger count. Both belong to the same window, unless the clock has stepped back.
    fn cover(&self, floor: &impl StateWords, state: &impl StateWords, now: u64) -> bool {
        let now = self.at_wall(now);
        let [one, other] = [self.count(floor, now).0, self.count(state, now).0];
        let count = Count { window: one.window.max(other.window), units: one.units.max(other.units) };
        let is_covered = count.window == now / self.window && count.units * 2 < self.limit;
        if is_covered {
            self.apply(floor, count);
        }
        is_covered
    }
}

/// A window that opens with the first allowed request.
///
/// A clock that steps back before the opening moves the opening back with it. The window still lasts its whole length
/// from there, so no quota is created and no key waits longer than a window.
#[derive(Clone, Debug)]
pub(crate) struct OpenedWindow {
    pub(super) limit: u64,
    pub(super) window: u64,
    pub(super) packing: Pair,
}

impl OpenedWindow {
    pub(super) fn count(&self, cells: &impl StateWords, now: u64) -> (Count, bool) {
        let (opened, units) = self.packing.load(cells);
        let open = units > 0 && now < opened.saturating_add(self.window);
        if !open {
            return (Count { window: now, units: 0 }, false);
        }
        (Count { window: opened.min(now), units }, opened > now)
    }
}

impl LimitAlgorithm for OpenedWindow {
    type Edit = Count;

    fn words(&self) -> usize {
        self.packing.words()
    }

    fn free_bits(&self) -> u32 {
        self.packing.free_bits()
    }

    fn decide(&self, cells: &impl StateWords, now: u64, cost: u64) -> Step<Count> {
        let (count, stepped_back) = self.count(cells, now);
        let left = count.window + self.window - now;
        let (verdict, edit) = count.judge(self.limit, left, cost);
        Step { verdict, edit: edit.or(stepped_back.then_some(count)) }
    }

    fn refund(&self, cells: &impl StateWords, now: u64, charge: Charge) -> Option<Count> {
        let (count, _) = self.count(cells, now);
        if charge.at >= count.window { count.give_back(charge.cost) } else { None }
    }

    fn owe(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<Owed<Count>> {
        self.count(cells, now).0.owe(self.packing, units)
    }

    fn apply(&self, cells: &impl StateWords, edit: Count) {
        self.packing.store(cells, edit.window, edit.units);
    }

    /// Restarts the window: another key may have opened it long ago, so it could end too soon for this key.
    fn shared(&self, cells: &impl StateWords, now: u64) {
        let (count, _) = self.count(cells, now);
        self.packing.store(cells, now, count.units);
    }

    fn is_idle(&self, cells: &impl StateWords, now: u64) -> bool {
        self.count(cells, now).0.units == 0
    }
}

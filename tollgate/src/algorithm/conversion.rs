//! Conversion of a key's state from one configuration of a limit to another.
//!
//! After a reload, or for a request of another plan, the same key is counted by other numbers or another algorithm.
//! Spent units stay spent:
//!
//! - Charges with a known time keep it, and count for as long as the new configuration counts them. These are the
//!   entries of a log, the segments of a counter and the opening of a window that the new configuration has open too.
//! - All other charges count as made at the time of the conversion, the latest possible time. Between different
//!   algorithms these are all charges that the old configuration counts at that time.
//! - Charges are not cut to the new quota. A key that has spent more waits until enough is refilled.
//! - A key at rest converts to a key at rest.
//! - A state of the same meaning in another layout keeps all of its numbers, so the effect of a clock that steps back
//!   does not depend on the layout.
//!
//! So a conversion never lowers what a key has spent, except by charges that the new configuration would have forgotten
//! by now had it been in force all along. The bound that follows is in `docs/algorithms.md`.
//!
//! Deliberately not here: where a store keeps the key, and how it locks the old state.

use super::arithmetic::{Fit, Pair, Spent};
use super::fixed_window::{ClockWindow, OpenedWindow};
use super::meter::Meter;
use super::record::Record;
use super::sliding_window_counter::Counter;
use super::token_bucket::Interval;
use super::{Charge, Compiled, StateWords};

impl Compiled {
    /// Converts the state of a key of `old` to this configuration. The words of `into` are at rest.
    pub(crate) fn convert(&self, into: &impl StateWords, old: &Self, from: &impl StateWords, now: u64) -> Fit {
        if self.meaning() == old.meaning() {
            return self.transcribe(into, old, from);
        }
        if let (Some(new), Some(bucket)) = (self.bucket(), old.bucket()) {
            // Whole units, and the rest of one as parts of the new rate, rounded up.
            let (debt, micros) = (old.debt_at(from, now), u128::from(bucket.micros));
            let (units, rest) = (debt / micros, debt % micros);
            let debt = units * u128::from(new.micros) + (rest * u128::from(new.micros)).div_ceil(micros);
            return self.set_debt(into, debt, now);
        }
        match (self, old) {
            (Self::OpenedWindow(new), Self::OpenedWindow(old)) => new.convert(into, old, from, now),
            (Self::Log(new), Self::Log(old)) => new.convert(into, old, from, now),
            (Self::Counter(new), Self::Counter(old)) => new.convert(into, old, from, now),
            (Self::Strikes(new), Self::Strikes(old)) => new.convert(into, old, from, now),
            _ => self.charge(into, old.spent(from, now), now),
        }
    }

    /// Copies a state of the same meaning to words of another layout.
    fn transcribe(&self, into: &impl StateWords, old: &Self, from: &impl StateWords) -> Fit {
        let copy = |new: Pair, old: Pair| {
            let (first, second) = old.load(from);
            new.store_at_most(into, first, second)
        };
        match (self, old) {
            (Self::Interval(new), Self::Interval(old)) => copy(new.packing, old.packing),
            (Self::ClockWindow(new), Self::ClockWindow(old)) => copy(new.packing, old.packing),
            (Self::OpenedWindow(new), Self::OpenedWindow(old)) => copy(new.packing, old.packing),
            (Self::Strikes(new), Self::Strikes(old)) => copy(new.packing, old.packing),
            (Self::Log(new), Self::Log(old)) => new.transcribe(into, old, from),
            (Self::Counter(new), Self::Counter(old)) => new.transcribe(into, old, from),
            (
                Self::Meter(Meter { packing: new, .. }) | Self::WideMeter(Meter { packing: new, .. }),
                Self::Meter(Meter { packing: old, .. }) | Self::WideMeter(Meter { packing: old, .. }),
            ) => copy(*new, *old),
            // Other pairs differ in meaning.
            _ => Fit::Whole,
        }
    }

    /// Returns what the state counts at `now`.
    pub(crate) fn spent(&self, cells: &impl StateWords, now: u64) -> Spent {
        match self {
            Self::Meter(_) | Self::WideMeter(_) => {
                let micros = self.bucket().map_or(1, |bucket| u128::from(bucket.micros));
                let units = self.debt_at(cells, now).div_ceil(micros);
                Spent { at: now, units: u64::try_from(units).unwrap_or(u64::MAX) }
            }
            Self::Interval(algorithm) => algorithm.spent_at(cells, now),
            Self::ClockWindow(algorithm) => algorithm.spent_at(cells, now),
            Self::OpenedWindow(algorithm) => algorithm.spent_at(cells, now),
            Self::Log(algorithm) => algorithm.spent_at(cells, now),
            Self::Counter(algorithm) => algorithm.spent_at(cells, now),
            // Strikes are not units of a limit.
            Self::Strikes(_) => Spent { at: now, units: 0 },
        }
    }

    /// Charges a key at rest with units spent under another configuration.
    pub(crate) fn charge(&self, cells: &impl StateWords, spent: Spent, now: u64) -> Fit {
        if spent.units == 0 {
            return Fit::Whole;
        }
        match self {
            Self::Meter(algorithm) => {
                algorithm.set_debt(cells, u128::from(spent.units) * u128::from(algorithm.micros), now)
            }
            Self::WideMeter(algorithm) => {
                algorithm.set_debt(cells, u128::from(spent.units) * u128::from(algorithm.micros), now)
            }
            Self::Interval(algorithm) => algorithm.charge(cells, spent),
            Self::ClockWindow(algorithm) => algorithm.charge(cells, spent),
            Self::OpenedWindow(algorithm) => algorithm.charge(cells, spent),
            Self::Log(algorithm) => algorithm.charge(cells, spent),
            Self::Counter(algorithm) => algorithm.charge(cells, spent),
            Self::Strikes(_) => Fit::Whole,
        }
    }

    /// Returns the largest part of a charge that can still count at `now`. A refund must not
    /// exceed it under any configuration that may have counted the charge meanwhile.
    pub(crate) fn still_counts(&self, charge: Charge, now: u64) -> u64 {
        let Charge { at, cost } = charge;
        let Some(passed) = now.checked_sub(at) else { return 0 };
        let all_if = |counts: bool| if counts { cost } else { 0 };
        match self {
            Self::Meter(_) | Self::WideMeter(_) => {
                let Some(bucket) = self.bucket() else { return 0 };
                let paid = u128::from(passed) * u128::from(bucket.units) / u128::from(bucket.micros);
                cost.saturating_sub(u64::try_from(paid).unwrap_or(u64::MAX))
            }
            Self::Interval(algorithm) => {
                let periods = (algorithm.aligned(now) / algorithm.period)
                    .saturating_sub(algorithm.aligned(at) / algorithm.period);
                cost.saturating_sub(periods.saturating_mul(algorithm.portion))
            }
            Self::ClockWindow(algorithm) => {
                all_if(algorithm.at_wall(now) / algorithm.window == algorithm.at_wall(at) / algorithm.window)
            }
            Self::OpenedWindow(algorithm) => all_if(passed < algorithm.window),
            Self::Log(algorithm) => all_if(passed < algorithm.window),
            Self::Counter(algorithm) => all_if(algorithm.segments_between(at, now) <= algorithm.segments),
            Self::Strikes(algorithm) => all_if(passed < algorithm.within),
        }
    }

    pub(super) fn debt_at(&self, cells: &impl StateWords, now: u64) -> u128 {
        match self {
            Self::Meter(algorithm) => algorithm.debt_at(cells, now),
            Self::WideMeter(algorithm) => algorithm.debt_at(cells, now),
            _ => 0,
        }
    }

    pub(super) fn set_debt(&self, cells: &impl StateWords, debt: u128, now: u64) -> Fit {
        match self {
            Self::Meter(algorithm) => algorithm.set_debt(cells, debt, now),
            Self::WideMeter(algorithm) => algorithm.set_debt(cells, debt, now),
            _ => Fit::Whole,
        }
    }
}

impl Interval {
    fn spent_at(&self, cells: &impl StateWords, now: u64) -> Spent {
        let aligned = self.aligned(now);
        let (spent, _) = self.spent(cells, aligned);
        let ahead = (spent.period * self.period).saturating_sub(aligned);
        Spent { at: now + ahead, units: spent.tokens }
    }

    /// Charges as much as is refilled in the longest window.
    fn charge(&self, cells: &impl StateWords, spent: Spent) -> Fit {
        let units = spent.units.min(self.most_tokens());
        self.packing
            .store_at_most(cells, self.aligned(spent.at) / self.period, units)
            .and(Fit::of(units == spent.units))
    }
}

impl ClockWindow {
    fn spent_at(&self, cells: &impl StateWords, now: u64) -> Spent {
        let wall = self.at_wall(now);
        let (count, _) = self.count(cells, wall);
        let ahead = (count.window * self.window).saturating_sub(wall);
        Spent { at: now + ahead, units: count.units }
    }

    fn charge(&self, cells: &impl StateWords, spent: Spent) -> Fit {
        self.packing.store_at_most(cells, self.at_wall(spent.at) / self.window, spent.units)
    }
}

impl OpenedWindow {
    fn spent_at(&self, cells: &impl StateWords, now: u64) -> Spent {
        Spent { at: now, units: self.count(cells, now).0.units }
    }

    fn charge(&self, cells: &impl StateWords, spent: Spent) -> Fit {
        self.packing.store_at_most(cells, spent.at, spent.units)
    }

    fn convert(&self, into: &impl StateWords, old: &Self, from: &impl StateWords, now: u64) -> Fit {
        let (count, _) = old.count(from, now);
        let is_open = now < count.window.saturating_add(self.window);
        let at = if is_open { count.window } else { now };
        if count.units == 0 { Fit::Whole } else { self.charge(into, Spent { at, units: count.units }) }
    }
}

impl Counter {
    fn spent_at(&self, cells: &impl StateWords, now: u64) -> Spent {
        let (position, passed, _) = self.judged_from(cells, now);
        let share = u128::from(self.leaving(cells, passed)) * u128::from(self.window - position.elapsed);
        let units = self.inside(cells, passed) + super::div_ceil(share, self.window);
        Spent { at: now.max(self.start_of(position.segment)), units }
    }

    fn charge(&self, cells: &impl StateWords, spent: Spent) -> Fit {
        self.set_segment(cells, self.position(spent.at).segment);
        self.add_to_count(cells, 0, spent.units)
    }

    fn convert(&self, into: &impl StateWords, old: &Self, from: &impl StateWords, now: u64) -> Fit {
        let (position, _, _) = old.judged_from(from, now);
        self.restore(into, &old.counts(from, now), now.max(old.start_of(position.segment)))
    }

    fn transcribe(&self, into: &impl StateWords, old: &Self, from: &impl StateWords) -> Fit {
        self.set_segment(into, old.stored_segment(from));
        (0..=self.segments).fold(Fit::Whole, |fit, age| fit.and(self.add_to_count(into, age, old.stored(from, age))))
    }

    /// Returns the units of each segment that still counts. They count as spent at its last moment, or now if that is
    /// earlier.
    pub(super) fn counts(&self, cells: &impl StateWords, now: u64) -> Record {
        let (position, passed, _) = self.judged_from(cells, now);
        let latest = now.max(self.start_of(position.segment));
        let count = |age: u64| {
            let segment = position.segment.checked_sub(age)?;
            Some((latest.min(self.start_of(segment + 1) - 1), self.stored(cells, age - passed)))
        };
        (passed..=self.segments).filter_map(count).filter(|(_, units)| *units > 0).collect()
    }

    /// Charges a key at rest with units of times up to `latest`.
    pub(super) fn restore(&self, cells: &impl StateWords, counts: &[(u64, u64)], latest: u64) -> Fit {
        let current = self.position(latest).segment;
        let (mut fit, mut any) = (Fit::Whole, false);
        for (at, units) in counts {
            let age = current - self.position(*at).segment;
            if age <= self.segments {
                any = true;
                fit = fit.and(self.add_to_count(cells, age, *units));
            }
        }
        if any {
            self.set_segment(cells, current);
        }
        fit
    }

    fn add_to_count(&self, cells: &impl StateWords, age: u64, units: u64) -> Fit {
        let sum = self.stored(cells, age).saturating_add(units);
        let most = 1_u64.unbounded_shl(self.count_bits).wrapping_sub(1);
        self.set_count(cells, age, sum.min(most));
        Fit::of(sum <= most)
    }
}

#[cfg(test)]
mod tests;

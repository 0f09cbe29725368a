//! Logs of other limits and windows: entries keep their moments.

use super::super::conversion::{Fit, Spent};
use super::super::{Cells, Rules};
use super::inline::{Head, MAX_UNITS};
use super::list::List;
use super::{Entry, Log};

impl Log {
    pub(in super::super) fn spent_at(&self, cells: &impl Cells, now: u64) -> Spent {
        let log = self.read(cells);
        let (units, newest) = (log.units(), log.head.newest);
        if units == 0 || newest > now.saturating_add(self.window) {
            return Spent { at: now, units };
        }
        let held = newest.max(now);
        Spent { at: held, units: units.saturating_sub(log.expired(held).1) }
    }

    pub(in super::super) fn charge(&self, cells: &impl Cells, spent: Spent) -> Fit {
        let most = self.most_units();
        let units = spent.units.min(most);
        self.set_inline_entry(cells, 0, Entry { at: spent.at, units });
        self.set_head(cells, Head { newest: spent.at, len: usize::from(units > 0), units });
        self.write_list(cells, List::without_chunks(units));
        Fit::of(spent.units <= most)
    }

    pub(in super::super) fn convert(&self, into: &impl Cells, old: &Self, from: &impl Cells, now: u64) -> Fit {
        let log = old.read(from);
        if log.units() == 0 || log.head.newest > now.saturating_add(old.window) {
            return self.charge(into, old.spent_at(from, now));
        }
        let held = log.head.newest.max(now);
        let (mut head, mut list) = (Head { newest: 0, len: 0, units: 0 }, List::default());
        let (mut spent, mut total) = (0, 0);
        log.visit(|entry| {
            if entry.units > 0 && entry.at + old.window.min(self.window) > held {
                spent += entry.units;
                total = self.add(into, &mut head, &mut list, total, entry, u64::MAX);
            }
            true
        });
        (head.units, list.units) = (total.min(MAX_UNITS), total);
        self.set_head(into, head);
        self.write_list(into, list);
        if total == spent && (self.has_list() || total <= MAX_UNITS) {
            return Fit::Whole;
        }
        self.clear(into);
        let _ = self.charge(into, Spent { at: held, units: spent });
        Fit::Cut
    }

    /// The most units that an entry has room for.
    pub(super) fn most_units(&self) -> u64 {
        (1 << self.layout.unit_bits) - 1
    }
}

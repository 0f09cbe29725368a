//! Conversion of logs to other limits and windows. Entries keep their times.

use smallvec::smallvec;

use super::super::arithmetic::{Fit, Spent};
use super::super::record::Record;
use super::super::{LimitAlgorithm, StateWords};
use super::inline::{Head, MAX_UNITS};
use super::list::List;
use super::{Entry, Log};

impl Log {
    pub(in super::super) fn spent_at(&self, cells: &impl StateWords, now: u64) -> Spent {
        let log = self.read(cells);
        let (units, newest) = (log.units(), log.head.newest);
        if units == 0 || newest > now.saturating_add(self.window) {
            return Spent { at: now, units };
        }
        let held = newest.max(now);
        Spent { at: held, units: units.saturating_sub(log.expired(held).1) }
    }

    pub(in super::super) fn charge(&self, cells: &impl StateWords, spent: Spent) -> Fit {
        let most = self.most_units();
        let units = spent.units.min(most);
        self.set_inline_entry(cells, 0, Entry { at: spent.at, units });
        self.set_head(cells, Head { newest: spent.at, len: usize::from(units > 0), units });
        self.write_list(cells, List::without_chunks(units));
        Fit::of(spent.units <= most)
    }

    pub(in super::super) fn convert(
        &self,
        into: &impl StateWords,
        old: &Self,
        from: &impl StateWords,
        now: u64,
    ) -> Fit {
        let log = old.read(from);
        if log.units() == 0 || log.head.newest > now.saturating_add(old.window) {
            return self.charge(into, old.spent_at(from, now));
        }
        let held = log.head.newest.max(now);
        let window = old.window.min(self.window);
        self.fill(into, held, |add| {
            log.visit(|entry| {
                if entry.units > 0 && entry.at + window > held {
                    add(entry);
                }
                true
            });
        })
    }

    /// Copies a log of the same window to words of another layout.
    pub(in super::super) fn transcribe(&self, into: &impl StateWords, old: &Self, from: &impl StateWords) -> Fit {
        let log = old.read(from);
        if log.units() == 0 {
            return Fit::Whole;
        }
        let mut count = 0;
        let fit = self.fill(into, log.head.newest, |add| {
            log.visit(|entry| {
                if entry.units > 0 {
                    count += 1;
                    add(entry);
                }
                true
            });
        });
        self.set_head(into, Head { newest: log.head.newest, ..self.head(into) });
        // Without a list, entries that do not fit were merged.
        fit.and(Fit::of(self.has_list() || count <= self.layout.inline))
    }

    /// Returns the entries that count at `now`, oldest first.
    pub(in super::super) fn entries(&self, cells: &impl StateWords, now: u64) -> Record {
        let log = self.read(cells);
        if log.units() == 0 || log.head.newest > now.saturating_add(self.window) {
            let Spent { at, units } = self.spent_at(cells, now);
            return smallvec![(at, units)];
        }
        let (held, mut entries) = (log.head.newest.max(now), Record::new());
        log.visit(|entry| {
            if entry.at + self.window > held {
                entries.push((entry.at, entry.units));
            }
            true
        });
        entries
    }

    /// Fills a log at rest with entries of times up to `held`, oldest first.
    pub(in super::super) fn restore(&self, cells: &impl StateWords, entries: &[(u64, u64)], held: u64) -> Fit {
        self.fill(cells, held, |add| {
            let counts = |(at, _): &&(u64, u64)| at + self.window > held;
            entries.iter().filter(counts).for_each(|(at, units)| add(Entry { at: *at, units: *units }));
        })
    }

    /// Fills a log at rest. If there is no room, all of it becomes one entry at `held`.
    fn fill(&self, into: &impl StateWords, held: u64, entries: impl FnOnce(&mut dyn FnMut(Entry))) -> Fit {
        let (mut head, mut list) = (Head { newest: 0, len: 0, units: 0 }, List::default());
        let (mut spent, mut total) = (0, 0);
        entries(&mut |entry| {
            spent += entry.units;
            total = self.add(into, &mut head, &mut list, total, entry, u64::MAX);
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

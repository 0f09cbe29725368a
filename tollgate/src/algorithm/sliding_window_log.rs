//! Sliding window log: exact at every instant, because every allowed request is recorded for a window.

mod conversion;
mod inline;
mod list;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use self::inline::Head;
use self::list::List;
use super::arithmetic::bits_for;
use super::{
    Algorithm, Charge, Compiled, LimitAlgorithm, MAX_COUNTED, Owed, StateWords, Step, allowed, checked, denied,
    never_fits,
};
use crate::error::InvalidLimit;
use crate::units::MINUTE;

/// At most `limit` units in any window of time, at every instant.
///
/// It records each allowed request for a window, at 4 to 6 bytes each. The default is 10 per minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowLog {
    pub(super) limit: u64,
    pub(crate) window: Duration,
    count: Counted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    Admitted,
    All,
}

impl Default for SlidingWindowLog {
    fn default() -> Self {
        Self::new(10, MINUTE)
    }
}

impl SlidingWindowLog {
    /// Returns the strictest of each number of both.
    pub(super) fn strictest(self, other: Self) -> Self {
        Self { limit: self.limit.min(other.limit), window: self.window.max(other.window), ..self }
    }

    /// Creates a log that counts allowed requests.
    #[must_use]
    pub const fn new(limit: u64, window: Duration) -> Self {
        Self { limit, window, count: Counted::Admitted }
    }

    /// Counts denied requests too, so a client that keeps retrying stays denied.
    #[must_use]
    pub const fn count_denied(self) -> Self {
        Self { count: Counted::All, ..self }
    }

    pub(super) fn compile(&self) -> Result<Compiled, InvalidLimit> {
        let limit = checked::quota("limit", self.limit)?;
        let window = checked::span("window", self.window)?;
        Ok(Compiled::Log(Log::new(limit, window, self.count)))
    }
}

impl From<SlidingWindowLog> for Algorithm {
    fn from(spec: SlidingWindowLog) -> Self {
        Self::SlidingWindowLog(spec)
    }
}

/// Requests of the same microsecond share an entry. An entry stores the lowest bits of its time, enough to identify it
/// within a window of the newest entry, and its units in as many bits as the limit needs. The newest entries are in the
/// words of the key, the older ones of a long log in a list of chunks.
///
/// When there is no memory for another chunk, the newest entries are merged into one with the latest time. Spent units
/// then count for longer, never for less time, so the limit still holds.
///
/// A clock that steps back is held at the newest entry, for at most a window. A longer step back merges the log into
/// one entry of that time, so that no quota is created and no key is locked out for longer than a window.
#[derive(Clone, Debug)]
pub(crate) struct Log {
    pub(super) limit: u64,
    pub(super) window: u64,
    pub(super) counted: Counted,
    /// The largest quota of any configuration of the limit. Units above it make no difference.
    pub(super) ceiling: u64,
    /// The current ceiling: a reload may have raised it.
    raised: Option<Arc<AtomicU64>>,
    layout: Layout,
}

/// The layout of a log. It is chosen for a limit, and kept when the limit changes to one that fits.
#[derive(Clone, Copy, Debug)]
struct Layout {
    time_bits: u32,
    unit_bits: u32,
    /// Number of entries in the words of a key.
    inline: usize,
    /// Whether further entries go to a list.
    list: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    at: u64,
    units: u64,
}

/// Entries that a long log keeps inline before it moves them to its list: enough that most decisions touch no
/// chunk, few enough that a key with a short history stays small.
const INLINE_IN_LONG: usize = 6;
/// A log that owes merges no entries until it has more than this, and more than two quotas.
const MANY: u64 = 128;
/// All entries: if the whole log has left the window, its entries are not visited.
const ALL: u64 = u64::MAX;

pub(crate) enum Edit {
    /// Removes the oldest entries, which had `units` in total, and then adds one.
    Move {
        forget: u64,
        gone: u64,
        add: Entry,
    },
    /// Turns the log into one entry, and adds to it if the request counts, up to `most` units.
    Collapse {
        now: u64,
        add: u64,
        most: u64,
    },
    GiveBack(Entry),
    /// Takes this many units back from the newest entries.
    Credit(u64),
    /// Removes the oldest entries, which had `gone` units in total, turns the next `merge` into one of `merged` units, and
    /// then adds one of units that were spent already.
    Owe {
        forget: u64,
        gone: u64,
        merge: u64,
        merged: u64,
        add: Entry,
    },
}

/// The entries of a log.
struct Reading<'a, C> {
    log: &'a Log,
    cells: &'a C,
    head: Head,
    list: List,
}

impl<C: StateWords> Reading<'_, C> {
    fn units(&self) -> u64 {
        if self.log.has_list() { self.list.units } else { self.head.units }
    }

    fn inline(&self, index: usize) -> Entry {
        self.log.inline_entry(self.cells, index, self.head.newest)
    }

    /// Returns the time of the oldest entry.
    fn oldest(&self) -> Option<u64> {
        if !self.list.is_empty() {
            return Some(self.list.oldest);
        }
        (self.head.len > 0).then(|| self.inline(0).at)
    }

    /// Returns the time of the newest entry that has units left.
    fn last_charge(&self) -> Option<u64> {
        if self.head.len > 0 {
            return Some(self.inline(self.head.len - 1).at);
        }
        let mut last = None;
        self.visit(|entry| {
            last = if entry.units > 0 { Some(entry.at) } else { last };
            true
        });
        last
    }

    /// Visits entries from the oldest to the newest, until `visitor` returns false.
    fn visit(&self, mut visitor: impl FnMut(Entry) -> bool) {
        let spill = self.cells.spill();
        if self.log.visit_list(spill, self.list, self.head.newest, |entry, _, _| visitor(entry)) {
            let _ = (0..self.head.len).all(|index| visitor(self.inline(index)));
        }
    }

    /// Returns whether there are more than this many entries.
    fn has_more_than(&self, entries: u64) -> bool {
        let mut seen = 0;
        self.visit(|_| {
            seen += 1;
            seen <= entries
        });
        seen > entries
    }

    /// Returns the number of entries that have left the window, and their units.
    fn expired(&self, now: u64) -> (u64, u64) {
        let left = |at: u64| at + self.log.window <= now;
        if left(self.head.newest) {
            return (ALL, self.units());
        }
        let (mut entries, mut units) = (0, 0);
        if self.oldest().is_some_and(left) {
            self.visit(|entry| {
                let old = left(entry.at);
                if old {
                    (entries, units) = (entries + 1, units + entry.units);
                }
                old
            });
        }
        (entries, units)
    }
}

impl Log {
    pub(super) fn new(limit: u64, window: u64, counted: Counted) -> Self {
        Self::with_ceiling(limit, window, counted, limit)
    }

    /// Creates a log with room for `ceiling` units.
    pub(super) fn with_ceiling(limit: u64, window: u64, counted: Counted, ceiling: u64) -> Self {
        let ceiling = ceiling.max(limit);
        let list = ceiling > inline::MAX as u64;
        let inline = if list { INLINE_IN_LONG } else { ceiling as usize };
        let layout = Layout { time_bits: bits_for(window), unit_bits: bits_for(ceiling), inline, list };
        Self { limit, window, counted, ceiling, raised: None, layout }
    }

    /// Returns the same log in a layout that has room for the largest debt.
    pub(super) fn wide(&self) -> Self {
        let Self { layout, .. } = Self::with_ceiling(self.limit, self.window, self.counted, MAX_COUNTED);
        Self { layout, ..self.clone() }
    }

    pub(super) fn watch_ceiling(&mut self, ceiling: Arc<AtomicU64>) {
        self.raised = Some(ceiling);
    }

    fn ceiling_now(&self) -> u64 {
        self.raised.as_ref().map_or(0, |raised| raised.load(Ordering::Acquire)).max(self.ceiling)
    }

    /// Returns the same limit in the layout of an older one of the same window, if that has room for it.
    pub(super) fn laid_out_as(&self, old: &Self) -> Option<Self> {
        let Layout { unit_bits, inline, list, .. } = old.layout;
        let fits = bits_for(self.ceiling) <= unit_bits && (list || self.ceiling <= inline as u64);
        fits.then(|| Self { layout: old.layout, ..self.clone() })
    }

    fn entry_bits(&self) -> u32 {
        self.layout.time_bits + self.layout.unit_bits
    }

    fn has_list(&self) -> bool {
        self.layout.list
    }

    fn read<'a, C: StateWords>(&'a self, cells: &'a C) -> Reading<'a, C> {
        Reading { log: self, cells, head: self.head(cells), list: self.read_list(cells) }
    }

    /// Returns the time with these lowest bits, at or before `newest` and within a window of it.
    fn moment(&self, newest: u64, low: u64) -> u64 {
        let mask = (1 << self.layout.time_bits) - 1;
        newest.saturating_sub(newest.wrapping_sub(low) & mask)
    }

    /// Decides after a long step back of the clock: all charges count as made now.
    fn decide_collapsed(&self, units: u64, now: u64, cost: u64) -> Step<Edit> {
        let remaining = self.limit - units;
        let counts = cost <= remaining || (self.counted == Counted::All && cost <= self.limit);
        let verdict = if cost > self.limit {
            never_fits(remaining, self.window)
        } else if cost <= remaining {
            allowed(remaining - cost, self.window)
        } else {
            denied(self.window, if counts { 0 } else { remaining }, self.window)
        };
        let (add, most) = (if counts { cost } else { 0 }, self.ceiling_now());
        Step { verdict, edit: Some(Edit::Collapse { now, add, most }) }
    }

    /// Returns the wait of a request that is denied in a log of `total` units, its own included if it counts.
    fn wait(&self, log: &Reading<'_, impl StateWords>, expired: u64, total: u64, cost: u64, now: u64) -> Wait {
        let ceiling = self.ceiling_now();
        let (mut seen, mut left) = (0, total);
        let mut wait = Wait { retry_after: None, trim: 0, trimmed: 0 };
        log.visit(|entry| {
            seen += 1;
            if seen <= expired {
                return true;
            }
            left -= entry.units.min(left);
            if left >= ceiling {
                (wait.trim, wait.trimmed) = (wait.trim + 1, wait.trimmed + entry.units);
            }
            if left + cost <= self.limit {
                wait.retry_after = Some((entry.at + self.window).saturating_sub(now));
            }
            wait.retry_after.is_none()
        });
        wait
    }

    /// Removes this many of the oldest entries.
    fn forget(&self, cells: &impl StateWords, head: &mut Head, list: &mut List, mut entries: u64) {
        if entries == ALL {
            list.release(cells.spill());
            (head.len, entries) = (0, 0);
        }
        while entries > 0 && !list.is_empty() {
            self.forget_oldest_in_list(cells.spill(), list, head.newest);
            entries -= 1;
        }
        if entries > 0 {
            self.remove_inline(cells, head, 0, entries as usize);
        }
    }

    /// Sets the units of the oldest entry.
    fn set_oldest(&self, cells: &impl StateWords, head: Head, list: List, units: u64) {
        if !list.is_empty() {
            self.set_oldest_in_list(cells.spill(), list, head.newest, units);
        } else if head.len > 0 {
            let oldest = self.inline_entry(cells, 0, head.newest);
            self.set_inline_entry(cells, 0, Entry { units, ..oldest });
        }
    }

    /// Adds an entry to a log of `total` units, and returns the new total. Merged entries have at most `most` units,
    /// unless one of them has more already.
    fn add(
        &self,
        cells: &impl StateWords,
        head: &mut Head,
        list: &mut List,
        total: u64,
        entry: Entry,
        most: u64,
    ) -> u64 {
        let sum = |before: u64| (before + entry.units).min(most.max(before)).min(self.most_units());
        if head.len > 0 && head.newest == entry.at {
            let newest = self.inline_entry(cells, head.len - 1, head.newest);
            if newest.at == entry.at {
                // At one time, units above every limit make no difference, and there are no bits for more.
                let units = sum(newest.units);
                self.set_inline_entry(cells, head.len - 1, Entry { units, ..entry });
                return total - newest.units + units;
            }
        }
        if head.len == self.layout.inline && self.has_list() {
            let inline = (0..head.len).map(|index| self.inline_entry(cells, index, head.newest));
            let moved = inline.take_while(|older| self.append(cells.spill(), list, *older)).count();
            self.remove_inline(cells, head, 0, moved);
        }
        let mut merged = 0;
        if head.len == self.layout.inline {
            // No memory for another chunk.
            merged = (0..head.len).map(|index| self.inline_entry(cells, index, head.newest).units).sum();
            head.len = 0;
        }
        let units = sum(merged);
        self.set_inline_entry(cells, head.len, Entry { units, ..entry });
        (head.len, head.newest) = (head.len + 1, entry.at);
        total.saturating_sub(merged) + units
    }
}

/// The wait of a denied request, if it is allowed once entries leave the window; and the number of oldest entries that
/// no longer matter, because the log exceeds every limit without them.
struct Wait {
    retry_after: Option<u64>,
    trim: u64,
    trimmed: u64,
}

impl LimitAlgorithm for Log {
    type Edit = Edit;

    fn words(&self) -> usize {
        self.inline_words() + if self.has_list() { list::WORDS } else { 0 }
    }

    /// A list is read only while its key is locked, because its chunks may be reused.
    fn must_lock(&self) -> bool {
        self.has_list()
    }

    fn decide(&self, cells: &impl StateWords, now: u64, cost: u64) -> Step<Edit> {
        let log = self.read(cells);
        let newest = if log.units() == 0 { 0 } else { log.head.newest };
        if newest > now.saturating_add(self.window) {
            return self.decide_collapsed(log.units().min(self.limit), now, cost);
        }
        let held = newest.max(now);
        let (expired, gone) = log.expired(held);
        let units = log.units().saturating_sub(gone);
        let remaining = self.limit.saturating_sub(units);
        let until_added_is_gone = held + self.window - now;
        if cost > 0 && cost <= remaining {
            let edit = Edit::Move { forget: expired, gone, add: Entry { at: held, units: cost } };
            return Step { verdict: allowed(remaining - cost, until_added_is_gone), edit: Some(edit) };
        }
        let last = if units == 0 { None } else { log.last_charge() };
        let reset_after = last.map_or(0, |at| (at + self.window).saturating_sub(now));
        if cost == 0 {
            return Step { verdict: allowed(remaining, reset_after), edit: None };
        }
        if cost > self.limit {
            return Step { verdict: never_fits(remaining, reset_after), edit: None };
        }
        match self.counted {
            Counted::Admitted => {
                let wait = self.wait(&log, expired, units, cost, now);
                let retry_after = wait.retry_after.unwrap_or(until_added_is_gone);
                Step { verdict: denied(retry_after, remaining, reset_after), edit: None }
            }
            Counted::All => {
                let wait = self.wait(&log, expired, units + cost, cost, now);
                let retry_after = wait.retry_after.unwrap_or(until_added_is_gone);
                let remaining = self.limit.saturating_sub(units + cost);
                let (forget, gone) = (expired.saturating_add(wait.trim), gone + wait.trimmed);
                let edit = Edit::Move { forget, gone, add: Entry { at: held, units: cost } };
                Step { verdict: denied(retry_after, remaining, until_added_is_gone), edit: Some(edit) }
            }
        }
    }

    fn refund(&self, _: &impl StateWords, _: u64, charge: Charge) -> Option<Edit> {
        Some(Edit::GiveBack(Entry { at: charge.at, units: charge.cost }))
    }

    /// Adds an entry, however many units it has. So that the log does not grow without bound, the oldest of many entries
    /// become one, of the time of the last of them, as far as two whole quotas are newer. All reservations that can be given
    /// back are one quota at most, so the newer entries alone exceed every limit.
    fn owe(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<Owed<Edit>> {
        let log = self.read(cells);
        let newest = if log.units() == 0 { 0 } else { log.head.newest };
        if newest > now.saturating_add(self.window) {
            let counted = units.min(MAX_COUNTED.saturating_sub(log.units()));
            let edit = Edit::Collapse { now, add: counted, most: MAX_COUNTED };
            let fits = self.has_list() && log.units() + counted <= self.most_units();
            return fits.then_some(Owed { edit, counted, ceiling: 0 });
        }
        let at = newest.max(now);
        let (forget, gone) = log.expired(at);
        let left = log.units().saturating_sub(gone);
        let counted = units.min(MAX_COUNTED.saturating_sub(left));
        // Without a list, the layout has room for the units of one quota.
        let fits = self.has_list() && left + counted <= self.most_units();
        if !fits {
            return None;
        }
        let (newer, mut merge, mut merged, mut seen) = (2 * self.ceiling_now(), 0, 0, 0);
        if left + counted > newer && forget != ALL && log.has_more_than(newer.max(MANY)) {
            log.visit(|entry| {
                seen += 1;
                let is_old = seen > forget && left + counted - merged >= newer + entry.units;
                if is_old {
                    (merge, merged) = (merge + 1, merged + entry.units);
                }
                seen <= forget || is_old
            });
        }
        let edit = Edit::Owe { forget, gone, merge, merged, add: Entry { at, units: counted } };
        Some(Owed { edit, counted, ceiling: 0 })
    }

    fn credit(&self, _: &impl StateWords, _: u64, units: u64) -> Option<(Edit, u64)> {
        Some((Edit::Credit(units), units))
    }

    fn apply(&self, cells: &impl StateWords, edit: Edit) {
        let Reading { mut head, mut list, .. } = self.read(cells);
        let mut units = if self.has_list() { list.units } else { head.units };
        match edit {
            Edit::Move { forget, gone, add } => {
                self.forget(cells, &mut head, &mut list, forget);
                let most = self.ceiling_now();
                units = self.add(cells, &mut head, &mut list, units.saturating_sub(gone), add, most);
            }
            Edit::Owe { forget, gone, merge, merged, add } => {
                self.forget(cells, &mut head, &mut list, forget);
                if merge > 1 {
                    self.forget(cells, &mut head, &mut list, merge - 1);
                    self.set_oldest(cells, head, list, merged);
                }
                units = self.add(cells, &mut head, &mut list, units.saturating_sub(gone), add, MAX_COUNTED);
            }
            Edit::Collapse { now, add, most } => {
                list.release(cells.spill());
                units = (units + add).min(most.max(units)).min(self.most_units());
                (head.len, head.newest) = (1, now);
                self.set_inline_entry(cells, 0, Entry { at: now, units });
            }
            Edit::GiveBack(charge) => {
                let at = (0..head.len).find(|index| self.inline_entry(cells, *index, head.newest).at == charge.at);
                units -= match at {
                    Some(index) => self.give_back_inline(cells, &mut head, index, charge.units),
                    None => self.give_back_in_list(cells.spill(), list, head.newest, charge),
                };
            }
            Edit::Credit(credit) => {
                let mut left = credit.min(units);
                units -= left;
                while left > 0 && head.len > 0 {
                    let newest = head.len - 1;
                    left -= self.give_back_inline(cells, &mut head, newest, left);
                }
                if left > 0 {
                    self.give_back_newest_in_list(cells.spill(), list, head.newest, left);
                }
            }
        }
        (head.units, list.units) = (units, units);
        self.set_head(cells, head);
        self.write_list(cells, list);
    }

    fn is_idle(&self, cells: &impl StateWords, now: u64) -> bool {
        let log = self.read(cells);
        log.units() == 0 || log.head.newest + self.window <= now
    }

    /// Starts the new key with one entry for all charges.
    fn inherit(&self, cells: &impl StateWords, from: &impl StateWords) {
        let log = self.read(from);
        let (newest, units) = (log.head.newest, log.units().min(self.ceiling_now()).min(self.most_units()));
        self.set_inline_entry(cells, 0, Entry { at: newest, units });
        self.set_head(cells, Head { newest, len: usize::from(units > 0), units });
        self.write_list(cells, List::without_chunks(units));
    }

    fn clear(&self, cells: &impl StateWords) {
        self.read_list(cells).release(cells.spill());
        (0..self.words()).for_each(|index| cells.set(index, 0));
    }
}

//! The newest entries of a log, in the words of its key. The first word has the newest time and the number of entries.
//! The entries follow, oldest first.

use super::super::StateWords;
use super::super::arithmetic::{read_bits, write_bits};
use super::{Entry, Log};

const LEN_BITS: u32 = 5;
/// Bits for the units of a log without a list: at most twice the limit, if denied requests count.
const UNIT_BITS: u32 = 6;
/// The most units that a log without a list has room for.
pub(super) const MAX_UNITS: u64 = (1 << UNIT_BITS) - 1;
/// The most entries that are kept inline.
pub(super) const MAX: usize = 16;

/// The content of the first word.
#[derive(Clone, Copy)]
pub(super) struct Head {
    /// The latest time in the log. Other times are stored relative to it.
    pub(super) newest: u64,
    pub(super) len: usize,
    /// The units of all entries, unless a list has them.
    pub(super) units: u64,
}

impl Log {
    pub(super) fn inline_words(&self) -> usize {
        1 + (self.entry_bits() as usize * self.layout.inline).div_ceil(64)
    }

    #[inline]
    pub(super) fn head(&self, cells: &impl StateWords) -> Head {
        let word = cells.get(0);
        Head {
            newest: word >> (LEN_BITS + UNIT_BITS),
            len: (word as usize & ((1 << LEN_BITS) - 1)).min(self.layout.inline),
            units: word >> LEN_BITS & ((1 << UNIT_BITS) - 1),
        }
    }

    #[inline]
    pub(super) fn set_head(&self, cells: &impl StateWords, head: Head) {
        let units = if self.has_list() { 0 } else { head.units };
        cells.set(0, head.newest << (LEN_BITS + UNIT_BITS) | units << LEN_BITS | head.len as u64);
    }

    #[inline]
    pub(super) fn inline_entry(&self, cells: &impl StateWords, index: usize, newest: u64) -> Entry {
        self.unpack(|word| cells.get(word), index, newest)
    }

    #[inline]
    pub(super) fn set_inline_entry(&self, cells: &impl StateWords, index: usize, entry: Entry) {
        self.pack(|word| cells.get(word), |word, value| cells.set(word, value), index, entry);
    }

    /// Takes back up to `units` from an entry, and returns how many it had.
    pub(super) fn give_back_inline(&self, cells: &impl StateWords, head: &mut Head, index: usize, units: u64) -> u64 {
        let entry = self.inline_entry(cells, index, head.newest);
        let given = units.min(entry.units);
        if given == entry.units {
            self.remove_inline(cells, head, index, 1);
        } else {
            self.set_inline_entry(cells, index, Entry { units: entry.units - given, ..entry });
        }
        given
    }

    /// Removes `count` entries that start at `from`.
    pub(super) fn remove_inline(&self, cells: &impl StateWords, head: &mut Head, from: usize, count: usize) {
        for index in from + count..head.len {
            let entry = self.inline_entry(cells, index, head.newest);
            self.set_inline_entry(cells, index - count, entry);
        }
        head.len -= count.min(head.len);
    }

    /// Returns the entry at an index, from words whose first one contains no entries.
    #[inline]
    pub(super) fn unpack(&self, word: impl Fn(usize) -> u64, index: usize, newest: u64) -> Entry {
        let at = 64 + index * self.entry_bits() as usize;
        let low = read_bits(&word, at, self.layout.time_bits);
        Entry {
            at: self.moment(newest, low),
            units: read_bits(&word, at + self.layout.time_bits as usize, self.layout.unit_bits),
        }
    }

    #[inline]
    pub(super) fn pack(
        &self,
        word: impl Fn(usize) -> u64,
        mut set: impl FnMut(usize, u64),
        index: usize,
        entry: Entry,
    ) {
        let at = 64 + index * self.entry_bits() as usize;
        write_bits(&word, &mut set, at, self.layout.time_bits, entry.at & ((1 << self.layout.time_bits) - 1));
        write_bits(&word, &mut set, at + self.layout.time_bits as usize, self.layout.unit_bits, entry.units);
    }
}

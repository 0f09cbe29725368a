//! The older entries of a long log: a list of chunks, and three words of the key that locate it.
//!
//! Many entries are moved here from the inline words at once, so most decisions touch no chunk. The time of the oldest
//! entry is kept with the key, so no chunk is read before an entry expires.

use super::super::StateWords;
use super::super::spill::{CHUNK_WORDS, Spill};
use super::{Entry, Log};

pub(super) const WORDS: usize = 3;

/// The first and last chunk with the start and end of the list in them, and the totals of the log.
#[derive(Clone, Copy, Default)]
pub(super) struct List {
    /// The units of all entries, including the inline ones.
    pub(super) units: u64,
    pub(super) oldest: u64,
    first: u32,
    last: u32,
    begin: usize,
    end: usize,
}

impl List {
    pub(super) fn without_chunks(units: u64) -> Self {
        Self { units, ..Self::default() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first == 0
    }

    pub(super) fn release(&mut self, spill: &Spill) {
        if self.first != 0 {
            spill.give_back(self.first, self.last);
        }
        *self = Self::without_chunks(self.units);
    }
}

impl Log {
    pub(super) fn read_list(&self, cells: &impl StateWords) -> List {
        if !self.has_list() {
            return List::default();
        }
        let at = self.inline_words();
        let (sum, chunks) = (cells.get(at), cells.get(at + 1));
        List {
            units: sum >> 16,
            oldest: cells.get(at + 2),
            first: (chunks >> 32) as u32,
            last: chunks as u32,
            begin: (sum >> 8 & 0xff) as usize,
            end: (sum & 0xff) as usize,
        }
    }

    pub(super) fn write_list(&self, cells: &impl StateWords, list: List) {
        if self.has_list() {
            let at = self.inline_words();
            cells.set(at, list.units << 16 | (list.begin as u64) << 8 | list.end as u64);
            cells.set(at + 1, u64::from(list.first) << 32 | u64::from(list.last));
            cells.set(at + 2, list.oldest);
        }
    }

    fn entries_per_chunk(&self) -> usize {
        (CHUNK_WORDS - 1) * 64 / self.entry_bits() as usize
    }

    fn chunk_entry(&self, spill: &Spill, chunk: u32, index: usize, newest: u64) -> Entry {
        self.unpack(|word| spill.get(chunk, word), index, newest)
    }

    /// Visits entries from the oldest to the newest, until `visitor` returns false. Returns whether it reached the end.
    pub(super) fn visit_list(
        &self,
        spill: &Spill,
        list: List,
        newest: u64,
        mut visitor: impl FnMut(Entry, u32, usize) -> bool,
    ) -> bool {
        let (mut chunk, mut begin) = (list.first, list.begin);
        while chunk != 0 {
            let end = if chunk == list.last { list.end } else { self.entries_per_chunk() };
            for index in begin..end {
                if !visitor(self.chunk_entry(spill, chunk, index, newest), chunk, index) {
                    return false;
                }
            }
            chunk = if chunk == list.last { 0 } else { spill.next(chunk) };
            begin = 0;
        }
        true
    }

    pub(super) fn forget_oldest_in_list(&self, spill: &Spill, list: &mut List, newest: u64) {
        list.begin += 1;
        if list.first == list.last && list.begin == list.end {
            list.release(spill);
            return;
        }
        if list.begin == self.entries_per_chunk() {
            let drained = list.first;
            list.first = spill.next(drained);
            list.begin = 0;
            spill.give_back(drained, drained);
        }
        list.oldest = self.chunk_entry(spill, list.first, list.begin, newest).at;
    }

    /// Sets the units of the oldest entry of the list.
    pub(super) fn set_oldest_in_list(&self, spill: &Spill, list: List, newest: u64, units: u64) {
        let oldest = self.chunk_entry(spill, list.first, list.begin, newest);
        let changed = Entry { units, ..oldest };
        let word = |word| spill.get(list.first, word);
        self.pack(word, |word, value| spill.set(list.first, word, value), list.begin, changed);
    }

    /// Adds an entry at the end. Returns false if there is no memory for it.
    pub(super) fn append(&self, spill: &Spill, list: &mut List, entry: Entry) -> bool {
        if list.is_empty() || list.end == self.entries_per_chunk() {
            let Some(chunk) = spill.take() else { return false };
            if list.is_empty() {
                (list.first, list.oldest) = (chunk, entry.at);
            } else {
                spill.set_next(list.last, chunk);
            }
            (list.last, list.end) = (chunk, 0);
        }
        let chunk = list.last;
        self.pack(|word| spill.get(chunk, word), |word, value| spill.set(chunk, word, value), list.end, entry);
        list.end += 1;
        true
    }

    /// Takes back units from the entry of that time, and returns how many it had.
    pub(super) fn give_back_in_list(&self, spill: &Spill, list: List, newest: u64, charge: Entry) -> u64 {
        let mut found = None;
        self.visit_list(spill, list, newest, |entry, chunk, index| {
            if entry.at == charge.at {
                found = Some((entry, chunk, index));
            }
            found.is_none()
        });
        found.map_or(0, |(entry, chunk, index)| {
            let given = charge.units.min(entry.units);
            let left = Entry { units: entry.units - given, ..entry };
            self.pack(|word| spill.get(chunk, word), |word, value| spill.set(chunk, word, value), index, left);
            given
        })
    }

    /// Takes back units from the newest entries of the list.
    pub(super) fn give_back_newest_in_list(&self, spill: &Spill, list: List, newest: u64, units: u64) {
        let mut total = 0;
        self.visit_list(spill, list, newest, |entry, _, _| {
            total += entry.units;
            true
        });
        let mut kept = total - units.min(total);
        self.visit_list(spill, list, newest, |entry, chunk, index| {
            let left = entry.units.min(kept);
            kept -= left;
            if left < entry.units {
                let left = Entry { units: left, ..entry };
                self.pack(|word| spill.get(chunk, word), |word, value| spill.set(chunk, word, value), index, left);
            }
            true
        });
    }
}

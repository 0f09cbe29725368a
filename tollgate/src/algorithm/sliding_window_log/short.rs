//! A log of a few entries, whole in the words of its key: the newest moment and the number of entries in the
//! first word, the entries after it.

use super::super::Cells;
use super::super::packing::{read_bits, write_bits};
use super::{Edit, Entries, Entry, Log, SHORT};

const LEN_BITS: u32 = 5;
const MAX: usize = SHORT as usize;

pub(super) struct ShortLog {
    entries: [Entry; MAX],
    len: usize,
    newest: u64,
}

impl Entries for ShortLog {
    fn newest(&self) -> Option<u64> {
        (self.len > 0).then_some(self.newest)
    }

    fn last_charge(&self) -> Option<u64> {
        self.live().last().map(|entry| entry.at)
    }

    fn units(&self) -> u64 {
        self.live().iter().map(|entry| entry.units).sum()
    }

    fn visit(&self, mut visitor: impl FnMut(Entry) -> bool) {
        for entry in self.live() {
            if !visitor(*entry) {
                return;
            }
        }
    }
}

impl ShortLog {
    fn live(&self) -> &[Entry] {
        &self.entries[..self.len]
    }

    fn forget(&mut self, count: usize) {
        let count = count.min(self.len);
        self.entries.copy_within(count..self.len, 0);
        self.len -= count;
    }

    fn add(&mut self, at: u64, units: u64) {
        self.newest = at;
        match self.live().last() {
            Some(last) if last.at == at => self.entries[self.len - 1].units += units,
            // Entries have a unit each at least, so a log never has more of them than its limit: this is for
            // words that were torn, whose answer is thrown away.
            _ if self.len == MAX => {}
            _ => {
                self.entries[self.len] = Entry { at, units };
                self.len += 1;
            }
        }
    }
}

impl Log {
    pub(super) fn short_words(&self) -> usize {
        1 + (self.entry_bits() as usize * self.limit as usize).div_ceil(64)
    }

    pub(super) fn read_short(&self, cells: &impl Cells) -> ShortLog {
        let head = cells.get(0);
        let newest = head >> LEN_BITS;
        let len = (head & ((1 << LEN_BITS) - 1)).min(self.limit) as usize;
        let mut entries = [Entry { at: 0, units: 0 }; MAX];
        for (index, entry) in entries.iter_mut().enumerate().take(len) {
            let at = 64 + index * self.entry_bits() as usize;
            let packed = |at, width| read_bits(|word| cells.get(word), at, width);
            entry.at = self.moment(newest, packed(at, self.time_bits));
            entry.units = packed(at + self.time_bits as usize, self.unit_bits);
        }
        ShortLog { entries, len, newest }
    }

    fn write_short(&self, cells: &impl Cells, log: &ShortLog) {
        cells.set(0, log.newest << LEN_BITS | log.len as u64);
        for (index, entry) in log.live().iter().enumerate() {
            let at = 64 + index * self.entry_bits() as usize;
            let write = |at, width, value| {
                write_bits(
                    |word| cells.get(word),
                    |word, value| cells.set(word, value),
                    at,
                    width,
                    value,
                );
            };
            write(at, self.time_bits, entry.at & ((1 << self.time_bits) - 1));
            write(at + self.time_bits as usize, self.unit_bits, entry.units);
        }
    }

    pub(super) fn apply_short(&self, cells: &impl Cells, edit: Edit) {
        let mut log = self.read_short(cells);
        match edit {
            Edit::Log { forget, collapse, add } => {
                log.forget(forget as usize);
                if let Some(now) = collapse {
                    let units = log.units().min(self.limit);
                    log.len = 0;
                    log.add(now, units);
                }
                if let Some((at, units)) = add {
                    log.add(at, units);
                }
                // Counting denied requests, an entry of one moment may grow past what its bits hold; past the
                // limit it makes no difference.
                if let Some(last) = log.len.checked_sub(1) {
                    log.entries[last].units = log.entries[last].units.min(self.limit);
                }
            }
            Edit::GiveBack { at, units } => {
                let Some(index) = log.live().iter().position(|entry| entry.at == at) else {
                    return;
                };
                log.entries[index].units = log.entries[index].units.saturating_sub(units);
                if log.entries[index].units == 0 {
                    log.entries.copy_within(index + 1..log.len, index);
                    log.len -= 1;
                }
            }
        }
        self.write_short(cells, &log);
    }
}

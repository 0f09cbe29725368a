//! A log of any length: the newest entry in the words of its key, the older ones in a list of chunks.
//!
//! When there is no memory for another chunk, the newest entry takes the next one in and moves up to its
//! moment: what was spent counts for longer, never for shorter, so the limit still holds.

use super::super::Cells;
use super::super::packing::{read_bits, write_bits};
use super::super::spill::{CHUNK_WORDS, Spill};
use super::{Edit, Entries, Entry, Log};

/// The words of a key: the newest moment, its units with the ends of the list, the units in the list, and the
/// first and last chunk of the list.
pub(super) const WORDS: usize = 4;

pub(super) struct LongLog<'a, C> {
    rules: &'a Log,
    cells: &'a C,
    newest: Entry,
    list: List,
}

/// The chunks of a list, and where in the first and last of them it begins and ends.
#[derive(Clone, Copy)]
struct List {
    units: u64,
    first: u32,
    last: u32,
    begin: usize,
    end: usize,
}

impl<C: Cells> Entries for LongLog<'_, C> {
    fn newest(&self) -> Option<u64> {
        (self.newest.at > 0 || self.newest.units > 0).then_some(self.newest.at)
    }

    fn last_charge(&self) -> Option<u64> {
        if self.newest.units > 0 {
            return Some(self.newest.at);
        }
        let mut last = None;
        self.visit(|entry| {
            if entry.units > 0 {
                last = Some(entry.at);
            }
            true
        });
        last
    }

    fn units(&self) -> u64 {
        self.list.units + self.newest.units
    }

    fn visit(&self, mut visitor: impl FnMut(Entry) -> bool) {
        let (mut chunk, mut index) = (self.list.first, self.list.begin);
        while chunk != 0 {
            let end = if chunk == self.list.last {
                self.list.end
            } else {
                self.rules.entries_per_chunk()
            };
            while index < end {
                if !visitor(self.rules.entry(self.cells.spill(), chunk, index, self.newest.at)) {
                    return;
                }
                index += 1;
            }
            chunk = if chunk == self.list.last {
                0
            } else {
                self.cells.spill().next(chunk)
            };
            index = 0;
        }
        if self.newest().is_some() {
            visitor(self.newest);
        }
    }
}

impl Log {
    fn entries_per_chunk(&self) -> usize {
        (CHUNK_WORDS - 1) * 64 / self.entry_bits() as usize
    }

    fn entry(&self, spill: &Spill, chunk: u32, index: usize, newest: u64) -> Entry {
        let at = 64 + index * self.entry_bits() as usize;
        let packed = |at, width| read_bits(|word| spill.get(chunk, word), at, width);
        let low = packed(at, self.time_bits);
        Entry {
            at: self.moment(newest, low),
            units: packed(at + self.time_bits as usize, self.unit_bits),
        }
    }

    fn set_entry(&self, spill: &Spill, chunk: u32, index: usize, entry: Entry) {
        let at = 64 + index * self.entry_bits() as usize;
        let write = |at, width, value| {
            write_bits(
                |word| spill.get(chunk, word),
                |word, value| spill.set(chunk, word, value),
                at,
                width,
                value,
            );
        };
        write(at, self.time_bits, entry.at & ((1 << self.time_bits) - 1));
        write(at + self.time_bits as usize, self.unit_bits, entry.units);
    }

    pub(super) fn read_long<'a, C: Cells>(&'a self, cells: &'a C) -> LongLog<'a, C> {
        let (ends, chunks) = (cells.get(1), cells.get(3));
        LongLog {
            rules: self,
            cells,
            newest: Entry {
                at: cells.get(0),
                units: ends >> 16,
            },
            list: List {
                units: cells.get(2),
                first: (chunks >> 32) as u32,
                last: chunks as u32,
                begin: (ends >> 8 & 0xff) as usize,
                end: (ends & 0xff) as usize,
            },
        }
    }

    fn write_long(&self, cells: &impl Cells, newest: Entry, list: List) {
        cells.set(0, newest.at);
        cells.set(1, newest.units << 16 | (list.begin as u64) << 8 | list.end as u64);
        cells.set(2, list.units);
        cells.set(3, u64::from(list.first) << 32 | u64::from(list.last));
    }

    pub(super) fn apply_long(&self, cells: &impl Cells, edit: Edit) {
        let log = self.read_long(cells);
        let (mut newest, mut list) = (log.newest, log.list);
        match edit {
            Edit::Log { forget, collapse, add } => {
                for _ in 0..forget {
                    if !self.forget_oldest(cells.spill(), &mut list, newest.at) {
                        newest.units = 0;
                    }
                }
                if let Some(now) = collapse {
                    newest = Entry {
                        at: now,
                        units: (newest.units + list.units).min(self.limit),
                    };
                    release(cells.spill(), &mut list);
                }
                if let Some((at, units)) = add {
                    self.add(cells.spill(), &mut newest, &mut list, Entry { at, units });
                }
            }
            Edit::GiveBack { at, units } => {
                if newest.at == at {
                    newest.units -= units.min(newest.units);
                } else {
                    self.give_back_older(cells.spill(), &mut list, newest.at, Entry { at, units });
                }
            }
        }
        self.write_long(cells, newest, list);
    }

    /// Drops the oldest entry of the list; says no when the list is empty.
    fn forget_oldest(&self, spill: &Spill, list: &mut List, newest: u64) -> bool {
        if list.first == 0 {
            return false;
        }
        let oldest = self.entry(spill, list.first, list.begin, newest);
        list.units -= oldest.units.min(list.units);
        list.begin += 1;
        if list.first == list.last && list.begin == list.end {
            release(spill, list);
        } else if list.begin == self.entries_per_chunk() {
            let drained = list.first;
            list.first = spill.next(drained);
            list.begin = 0;
            spill.give_back(drained, drained);
        }
        true
    }

    fn add(&self, spill: &Spill, newest: &mut Entry, list: &mut List, entry: Entry) {
        // The list keeps the low bits of times within a window of the newest: what lies further back has been
        // forgotten by the same edit, the newest entry itself included.
        let keeps_older = newest.units > 0 && newest.at != entry.at;
        if keeps_older && self.append(spill, list, *newest) {
            *newest = entry;
        } else {
            // The units of one moment may grow past the limit where denied requests count; past it they make
            // no difference, and the bits end there.
            let units = if newest.units > 0 {
                newest.units + entry.units
            } else {
                entry.units
            };
            *newest = Entry {
                at: entry.at,
                units: units.min(self.limit),
            };
        }
    }

    fn append(&self, spill: &Spill, list: &mut List, entry: Entry) -> bool {
        if list.first == 0 || list.end == self.entries_per_chunk() {
            let Some(chunk) = spill.take() else { return false };
            if list.first == 0 {
                list.first = chunk;
            } else {
                spill.set_next(list.last, chunk);
            }
            (list.last, list.end) = (chunk, 0);
        }
        self.set_entry(spill, list.last, list.end, entry);
        list.end += 1;
        list.units += entry.units;
        true
    }

    fn give_back_older(&self, spill: &Spill, list: &mut List, newest: u64, charge: Entry) {
        let (mut chunk, mut index) = (list.first, list.begin);
        while chunk != 0 {
            let end = if chunk == list.last {
                list.end
            } else {
                self.entries_per_chunk()
            };
            for index in index..end {
                let entry = self.entry(spill, chunk, index, newest);
                if entry.at == charge.at {
                    let given = charge.units.min(entry.units);
                    self.set_entry(
                        spill,
                        chunk,
                        index,
                        Entry {
                            units: entry.units - given,
                            ..entry
                        },
                    );
                    list.units -= given.min(list.units);
                    return;
                }
            }
            chunk = if chunk == list.last { 0 } else { spill.next(chunk) };
            index = 0;
        }
    }

    pub(super) fn inherit_long(&self, cells: &impl Cells, from: &impl Cells) {
        let log = self.read_long(from);
        let newest = Entry {
            at: log.newest.at,
            units: log.units().min(self.limit),
        };
        self.write_long(
            cells,
            newest,
            List {
                units: 0,
                first: 0,
                last: 0,
                begin: 0,
                end: 0,
            },
        );
    }

    pub(super) fn release_long(&self, cells: &impl Cells) {
        let mut list = self.read_long(cells).list;
        release(cells.spill(), &mut list);
    }
}

fn release(spill: &Spill, list: &mut List) {
    if list.first != 0 {
        spill.give_back(list.first, list.last);
    }
    *list = List {
        units: 0,
        first: 0,
        last: 0,
        begin: 0,
        end: 0,
    };
}

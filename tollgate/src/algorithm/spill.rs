//! A pool of 128-byte chunks, in which long logs are stored as linked lists.
//!
//! Chunks are in segments that double in size and never move, so a chunk is identified by a number. The pool allocates
//! from the store's budget; when that is used up, [`Spill::take`] returns `None` and the log merges entries.

use std::sync::OnceLock;

use crate::budget::{Budget, Words};
use crate::sync::{Mutex, Ordering};

/// Words in a chunk. The first is the number of the next chunk.
pub(crate) const CHUNK_WORDS: usize = 16;
/// Chunks in the first segment. Each further segment doubles the total.
const FIRST_SEGMENT: u32 = 64;
/// Enough segments for every chunk that a `u32` can number.
const SEGMENTS: usize = 27;

pub(crate) struct Spill {
    budget: Budget,
    segments: [OnceLock<Words>; SEGMENTS],
    free: Mutex<Free>,
}

/// The free list. Chunks are numbered from 1; 0 means no chunk.
#[derive(Default)]
struct Free {
    first: u32,
    /// The highest chunk number in use so far.
    used: u32,
}

impl Spill {
    pub(crate) fn new(budget: Budget) -> Self {
        Self { budget, segments: [const { OnceLock::new() }; SEGMENTS], free: Mutex::new(Free::default()) }
    }

    /// Allocates a chunk, or returns `None` if the memory is used up.
    pub(crate) fn take(&self) -> Option<u32> {
        let mut free = self.free.lock();
        if free.first != 0 {
            let chunk = free.first;
            free.first = self.next(chunk);
            self.set_next(chunk, 0);
            return Some(chunk);
        }
        let chunk = free.used.checked_add(1)?;
        let (segment, offset) = locate(chunk);
        if offset == 0 {
            let chunks = if segment == 0 { FIRST_SEGMENT } else { FIRST_SEGMENT << (segment - 1) };
            let words = self.budget.take(chunks as usize * CHUNK_WORDS)?;
            let _ = self.segments.get(segment)?.set(words);
        }
        free.used = chunk;
        Some(chunk)
    }

    /// Frees a list of chunks, from its first to its last.
    pub(crate) fn give_back(&self, first: u32, last: u32) {
        let mut free = self.free.lock();
        self.set_next(last, free.first);
        free.first = first;
    }

    /// Returns the bytes of all chunks, used or free.
    pub(crate) fn bytes(&self) -> usize {
        self.segments.iter().filter_map(OnceLock::get).map(Words::bytes).sum()
    }

    /// Estimates the bytes of the chunks in use. Walks all free chunks without the lock, because decisions need it, so
    /// the result is exact only while no chunk is taken or given back.
    pub(crate) fn bytes_in_use(&self) -> usize {
        let (first, used) = {
            let free = self.free.lock();
            (free.first, free.used)
        };
        let free = std::iter::successors(Some(first), |chunk| Some(self.next(*chunk))).take_while(|chunk| *chunk != 0);
        let free = free.take(used as usize).count();
        (used as usize - free) * CHUNK_WORDS * size_of::<u64>()
    }

    pub(crate) fn next(&self, chunk: u32) -> u32 {
        self.get(chunk, 0) as u32
    }

    pub(crate) fn set_next(&self, chunk: u32, next: u32) {
        self.set(chunk, 0, u64::from(next));
    }

    pub(crate) fn get(&self, chunk: u32, word: usize) -> u64 {
        let (segment, offset) = locate(chunk);
        self.segments[segment].get().map_or(0, |words| words.at(offset * CHUNK_WORDS + word).load(Ordering::Relaxed))
    }

    pub(crate) fn set(&self, chunk: u32, word: usize, value: u64) {
        let (segment, offset) = locate(chunk);
        if let Some(words) = self.segments[segment].get() {
            words.at(offset * CHUNK_WORDS + word).store(value, Ordering::Relaxed);
        }
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.segments.iter().filter_map(OnceLock::get).for_each(|words| self.budget.give_back(words));
    }
}

/// Returns the segment of a chunk and its index there.
fn locate(chunk: u32) -> (usize, usize) {
    let index = chunk.saturating_sub(1);
    if index < FIRST_SEGMENT {
        return (0, index as usize);
    }
    let segment = (index / FIRST_SEGMENT).ilog2();
    (segment as usize + 1, (index - (FIRST_SEGMENT << segment)) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_has_a_place_of_its_own() {
        assert_eq!(
            [1, 64, 65, 128, 129, 256, 257].map(locate),
            [(0, 0), (0, 63), (1, 0), (1, 63), (2, 0), (2, 127), (3, 0)]
        );
        let (segment, offset) = locate(u32::MAX);
        assert_eq!((segment, offset), (SEGMENTS - 1, (FIRST_SEGMENT << (SEGMENTS - 2)) as usize - 2));
    }

    #[test]
    fn chunks_come_back_and_the_budget_ends_them() {
        let spill = Spill::new(Budget::new(64 * CHUNK_WORDS * 8 + 1024));
        let chunks: Vec<u32> = std::iter::from_fn(|| spill.take()).collect();
        assert_eq!(chunks, (1..=64).collect::<Vec<_>>());
        spill.set_next(7, 9);
        let in_use = spill.bytes_in_use();
        assert_eq!(in_use, spill.bytes());
        spill.give_back(7, 9);
        assert_eq!(spill.bytes_in_use(), in_use - 2 * CHUNK_WORDS * 8);
        assert_eq!([spill.take(), spill.take(), spill.take()], [Some(7), Some(9), None]);
        assert_eq!(spill.next(7), 0);
        assert_eq!(spill.bytes_in_use(), in_use);
    }
}

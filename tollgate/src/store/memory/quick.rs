//! The short way: a key of one word, in its home bucket, that nobody is changing just now.
//!
//! That is nearly every decision of nearly every limit. The layout is known here when the code is compiled, so
//! that nothing is looked up and no index is checked; whatever is out of the ordinary goes the long way.

use super::Mode;
use super::bucket::{LOCKED, Layout, hold_header, level_of, release_header, unchanged_header};
use super::table::Table;
use crate::algorithm::spill::Spill;
use crate::algorithm::{Cells, Rules, Step};
use crate::decision::Verdict;
use crate::sync::{AtomicU64, Ordering};

/// The words of a bucket whose keys have one word each.
const STRIDE: usize = Layout::SHORT_STRIDE;

/// The home bucket of a key, and its header.
#[derive(Clone, Copy)]
pub(super) struct Home<'a> {
    pub(super) words: &'a [AtomicU64; STRIDE],
    pub(super) header: u64,
}

/// The one word of a key.
struct Word<'a> {
    word: &'a AtomicU64,
    spill: &'a Spill,
}

impl Cells for Word<'_> {
    #[inline(always)]
    fn get(&self, _: usize) -> u64 {
        self.word.load(Ordering::Relaxed)
    }

    #[inline(always)]
    fn set(&self, _: usize, word: u64) {
        self.word.store(word, Ordering::Relaxed);
    }

    fn spill(&self) -> &Spill {
        self.spill
    }
}

impl Table {
    /// The home of a fingerprint, if keys have one word and nobody holds it just now.
    #[inline(always)]
    pub(super) fn short_home(&self, fingerprint: u64) -> Option<Home<'_>> {
        if !self.layout.is_short() {
            return None;
        }
        let (index, words) = self.short_bucket(fingerprint)?;
        let header = words[0].load(Ordering::Acquire);
        let is_home = header & LOCKED == 0 && self.home_at(fingerprint, level_of(header)) == index;
        is_home.then_some(Home { words, header })
    }

    /// Decides if it is as easy as most are. `None` has changed nothing.
    #[inline(always)]
    pub(super) fn decide_quickly<R: Rules>(
        &self,
        rules: &R,
        fingerprint: u64,
        now: u64,
        cost: u64,
        mode: Mode,
    ) -> Option<Verdict> {
        if rules.must_lock() {
            return None;
        }
        let Home { words, header } = self.short_home(fingerprint)?;
        let word = word_of(words, fingerprint)?;
        let cells = Word { word, spill: &self.spill };
        let Step { verdict, edit } = rules.decide(&cells, now, cost);
        match edit.filter(|_| mode.writes(&verdict)) {
            None => unchanged_header(&words[0], header).then_some(verdict),
            Some(edit) => {
                if !hold_header(&words[0], header) {
                    return None;
                }
                rules.apply(&cells, edit);
                release_header(&words[0], header);
                Some(verdict)
            }
        }
    }
}

/// The word of a key, if it is in this bucket. Slots are a fingerprint and a word each.
#[inline(always)]
pub(super) fn word_of(words: &[AtomicU64; STRIDE], fingerprint: u64) -> Option<&AtomicU64> {
    let (pairs, _) = words[1..].as_chunks::<2>();
    let mut slots = pairs[..Layout::SHORT_SLOTS].iter();
    slots.find(|pair| pair[0].load(Ordering::Relaxed) == fingerprint).map(|pair| &pair[1])
}

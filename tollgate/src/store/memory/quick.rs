//! The fast path: a key of one word, in its home bucket, that nobody holds just now.
//!
//! That is nearly every decision of nearly every limit. The layout is known here when the code is compiled, so
//! that nothing is looked up and no index is checked; whatever is out of the ordinary goes the slow path.

use super::Mode;
use super::bucket::{LOCKED, Layout, level_of};
use super::table::Table;
use super::word::{Copied, Place};
use crate::algorithm::{Rules, Step};
use crate::decision::Verdict;
use crate::sync::{AtomicU64, Ordering};

/// The words of a bucket whose keys have one word each.
const STRIDE: usize = Layout::SHORT_STRIDE;

/// The home bucket of a key, and its header.
#[derive(Clone, Copy)]
pub(super) struct Home<'a> {
    words: &'a [AtomicU64; STRIDE],
    header: u64,
}

impl<'a> Home<'a> {
    /// The word of a key, if it is in this bucket. Slots are a fingerprint and a word each.
    #[inline(always)]
    pub(super) fn place_of(self, fingerprint: u64) -> Option<Place<'a>> {
        let Self { words, header } = self;
        let (pairs, _) = words[1..].as_chunks::<2>();
        let mut slots = pairs[..Layout::SHORT_SLOTS].iter();
        let pair = slots.find(|pair| pair[0].load(Ordering::Relaxed) == fingerprint)?;
        Some(Place { header_word: &words[0], header, word: &pair[1] })
    }
}

impl Table {
    /// The home of a fingerprint, if keys are decided by one word and nobody holds it just now.
    #[inline(always)]
    pub(super) fn short_home(&self, fingerprint: u64) -> Option<Home<'_>> {
        if self.layout.tags == 0 {
            return None;
        }
        let (index, words) = self.short_bucket(fingerprint)?;
        let header = words[0].load(Ordering::Acquire);
        let is_home = header & LOCKED == 0 && self.home_at(fingerprint, level_of(header)) == index;
        is_home.then_some(Home { words, header })
    }

    /// Decides if it is as easy as most are. `None`: it has to be decided on the slow path.
    #[inline(always)]
    pub(super) fn decide_quickly<R: Rules>(
        &self,
        rules: &R,
        fingerprint: u64,
        now: u64,
        cost: u64,
        mode: Mode,
    ) -> Option<Verdict> {
        let place = self.short_home(fingerprint)?.place_of(fingerprint)?;
        self.decide_word(rules, place, now, cost, mode)
    }

    /// Decides on a key of one word; `None` if someone else has changed it meanwhile.
    #[inline(always)]
    pub(super) fn decide_word<R: Rules>(
        &self,
        rules: &R,
        place: Place<'_>,
        now: u64,
        cost: u64,
        mode: Mode,
    ) -> Option<Verdict> {
        let tags = self.layout.tags;
        let old = place.word.load(Ordering::Relaxed);
        let cells = Copied::new(old & !tags, &self.spill);
        let Step { verdict, edit } = rules.decide(&cells, now, cost);
        let is_decided = match edit.filter(|_| mode.writes(&verdict)) {
            None => place.proves(old),
            Some(edit) => {
                rules.apply(&cells, edit);
                place.replace(old, old & tags | cells.state.get())
            }
        };
        is_decided.then_some(verdict)
    }
}

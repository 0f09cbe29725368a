//! The fast path: a key of one word, in its home bucket, which is not locked.
//!
//! Nearly every decision of nearly every limit takes this path. The layout is known at compile time, so there are no
//! lookups and no index checks. All other cases take the slow path.

use super::Mode;
use super::bucket::{LOCKED, Layout, level_of};
use super::contention::Contention;
use super::table::Table;
use super::word::{Copied, LostRace, WordRef};
use crate::algorithm::{LimitAlgorithm, Step};
use crate::decision::Verdict;
use crate::sync::{AtomicU64, Ordering};

/// Words of a bucket whose keys have one word each.
const STRIDE: usize = Layout::SHORT_STRIDE;

/// Attempts before the slow path.
pub(super) const ATTEMPTS: u32 = 64;

/// The reason why the fast path cannot decide.
pub(super) enum FastPathMiss {
    /// Another thread is changing the bucket. Retry soon.
    Changed,
    /// The key needs the slow path.
    Unusual,
}

/// The home bucket of a key, and its header.
#[derive(Clone, Copy)]
pub(super) struct HomeBucket<'a> {
    words: &'a [AtomicU64; STRIDE],
    header: u64,
}

impl<'a> HomeBucket<'a> {
    /// Returns the word of a key, if it is in this bucket. Slots are a fingerprint and a word each.
    #[inline(always)]
    pub(super) fn word_of(self, fingerprint: u64) -> Option<WordRef<'a>> {
        let Self { words, header } = self;
        let (pairs, _) = words[1..].as_chunks::<2>();
        let mut slots = pairs[..Layout::SHORT_SLOTS].iter();
        let pair = slots.find(|pair| pair[0].load(Ordering::Relaxed) == fingerprint)?;
        Some(WordRef { header_word: &words[0], header, word: &pair[1] })
    }
}

impl Table {
    /// Returns the home bucket of a fingerprint, if keys have one word and the bucket is not locked.
    #[inline(always)]
    pub(super) fn short_home(&self, fingerprint: u64) -> Result<HomeBucket<'_>, FastPathMiss> {
        if self.layout.tags == 0 {
            return Err(FastPathMiss::Unusual);
        }
        let (index, words) = self.short_bucket(fingerprint).ok_or(FastPathMiss::Unusual)?;
        let header = words[0].load(Ordering::Acquire);
        match header & LOCKED {
            0 if self.home_at(fingerprint, level_of(header)) == index => Ok(HomeBucket { words, header }),
            0 => Err(FastPathMiss::Unusual),
            _ => Err(FastPathMiss::Changed),
        }
    }

    /// Decides in the common case. `None` if the slow path must decide.
    #[inline(always)]
    pub(super) fn decide_fast<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        fingerprint: u64,
        now: u64,
        cost: u64,
        mode: Mode,
    ) -> Option<Verdict> {
        let word_ref = self.short_home(fingerprint).ok()?.word_of(fingerprint)?;
        let word = word_ref.word.load(Ordering::Relaxed);
        match self.decide_word(algorithm, word_ref, word, now, cost, mode) {
            Ok(verdict) => Some(verdict),
            Err(LostRace::To(other)) => self.decide_contended(algorithm, word_ref, other, now, cost, mode),
            Err(LostRace::Elsewhere) => None,
        }
    }

    /// Decides on a word for which threads compete. `None` if the slow path must decide.
    #[cold]
    #[inline(never)]
    fn decide_contended<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        word_ref: WordRef<'_>,
        mut word: u64,
        now: u64,
        cost: u64,
        mode: Mode,
    ) -> Option<Verdict> {
        let mut contention = Contention::new();
        for _ in 0..ATTEMPTS {
            // Retry at once: the failed swap has brought the cache line here.
            match self.decide_word(algorithm, word_ref, word, now, cost, mode) {
                Ok(verdict) => {
                    contention.end();
                    return Some(verdict);
                }
                Err(LostRace::To(_)) => contention.wait(),
                Err(LostRace::Elsewhere) => return None,
            }
            word = word_ref.read_to_replace();
        }
        None
    }

    /// Decides on a key of one word, if the word is still `old`.
    #[inline(always)]
    pub(super) fn decide_word<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        word_ref: WordRef<'_>,
        old: u64,
        now: u64,
        cost: u64,
        mode: Mode,
    ) -> Result<Verdict, LostRace> {
        let tags = self.layout.tags;
        let cells = Copied::new(old & !tags, &self.spill);
        let Step { verdict, edit } = algorithm.decide(&cells, now, cost);
        match edit.filter(|_| mode.writes(&verdict)) {
            None if word_ref.proves(old) => Ok(verdict),
            None => Err(LostRace::Elsewhere),
            Some(edit) => {
                algorithm.apply(&cells, edit);
                word_ref.replace(old, old & tags | cells.state.get()).map(|()| verdict)
            }
        }
    }
}

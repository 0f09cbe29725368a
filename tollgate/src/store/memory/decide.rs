//! Deciding on one word: how threads share the word of a key without locking its bucket.
//!
//! A decision reads the header, the fingerprint and the word, computes, and replaces exactly the word it read:
//!
//! 1. Read the header, unlocked, with the fingerprint of the key in one of the slots.
//! 2. Read the word of that slot and compute the next one.
//! 3. Read the header again. If it is the same, the word belonged to the key when it was read: fingerprints change
//!    only under the lock, and a holder that changed one leaves another version behind.
//! 4. Replace the word by compare-and-swap.
//! 5. Read the header once more and compare laps, as described below.
//!
//! A denial ends after step 3. Nothing is written to the header, so threads on one key exchange one cache line once for
//! each decision.
//!
//! # A slot that changes hands
//!
//! Between steps 3 and 4 the slot may go to another key, and that key's word may come to be equal to the one that was
//! read: two keys that have spent 1 in the same window have equal words. The swap would then charge the wrong key. So
//! the high bits of a word are a tag of the slot, which is increased whenever a key loses the slot, and a swap on the
//! word of an earlier owner fails.
//!
//! A tag of two bits is the same again after four owners. Each time a tag starts again from 0, the holder first counts
//! a lap in the header. Let a swap succeed, although the slot has changed hands since step 3. Then its tag has gone
//! through all values, so a lap was counted, and the word that the swap found was written later: by that holder, by a
//! later one, or by a decision that read a word of theirs. All these writes release and all these reads acquire, so
//! step 5 finds another lap. Conversely, the same lap in step 5 proves that the slot had not changed hands before the
//! swap. The clocks of the threads play no part in this.
//!
//! With another lap it is unknown whether the right key was charged, so the decision is made again and perhaps charged
//! twice, never too little. For that to happen, a thread has to be suspended for the few nanoseconds between steps 3
//! and 5 while one slot of the bucket completes its four owners, and the word it wanted must still be there.
//!
//! # Seals
//!
//! Operations that need several words at once, or must not go astray (a refund to the wrong key would mint quota),
//! replace the word by [`SEAL`] first. Only the thread that sealed a word changes it; other threads take the slow path
//! and retry. A seal that may have hit the wrong owner is undone. The slow path locks the header while it seals; the
//! fast path does not, but it never waits while it has a seal, so waits for a seal are short.
//!
//! # The fast path
//!
//! A key of one word, in its home bucket, which is not locked. Nearly every decision of nearly every limit takes this
//! path. The layout is known at compile time, so there are no lookups and no index checks. All other cases take the
//! slow path. Measured by `hot_allow_ns` of the benchmark `memory`.
//!
//! # Back-off after a lost race
//!
//! A thread that has just replaced a word has its cache line, and the next replacement costs it a fraction of what it
//! costs any other. So a thread that loses a race stays away for a while, and the winner gets through several decisions
//! before the line is taken from it. The right time depends on how many threads there are. Each thread adapts it:
//! longer after every wait that did not help, slightly shorter after every successful decision.

use std::cell::Cell;

use super::Mode;
use super::table::{Busy, Found, Held, LOCKED, Layout, PATIENCE, Slot, Table, is_same_lap, level_of, unchanged_header};
use crate::algorithm::spill::Spill;
use crate::algorithm::{LimitAlgorithm, StateWords, Step};
use crate::decision::Verdict;
use crate::sync::{AtomicU64, Ordering, spin_loop, yield_now};

/// The value of a sealed word, which another thread is about to replace. No state has this value.
pub(super) const SEAL: u64 = u64::MAX;

/// The word of a key, and the header of its bucket when it was found.
#[derive(Clone, Copy)]
pub(super) struct WordRef<'a> {
    header_word: &'a AtomicU64,
    pub(super) header: u64,
    pub(super) word: &'a AtomicU64,
}

/// The reason why a word was not replaced. The decision must be made again.
#[derive(Clone, Copy, Debug)]
pub(super) enum LostRace {
    /// Another thread has replaced it by this value.
    To(u64),
    /// It is sealed, or its bucket has changed, and the key may have moved.
    Moved,
}

impl WordRef<'_> {
    /// Returns whether a word that was read here belongs to the key and is not a seal.
    #[inline(always)]
    pub(super) fn proves(self, word: u64) -> bool {
        word != SEAL && unchanged_header(self.header_word, self.header)
    }

    /// Replaces the word if it is still `old`.
    #[inline(always)]
    pub(super) fn replace(self, old: u64, new: u64) -> Result<(), LostRace> {
        if !self.proves(old) {
            return Err(LostRace::Moved);
        }
        match self.word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) if self.is_same_lap() => Ok(()),
            Ok(_) => Err(LostRace::Moved),
            Err(other) => Err(LostRace::To(other)),
        }
    }

    /// Reads the word and acquires its cache line for writing. After a plain read, the compare-and-swap that follows
    /// would have to acquire the line again.
    #[inline(always)]
    fn read_to_replace(self) -> u64 {
        self.word.compare_exchange(SEAL, SEAL, Ordering::Relaxed, Ordering::Relaxed).unwrap_or_else(|word| word)
    }

    /// Seals the word if it is still `old`. The caller must write the next word without waiting.
    #[inline(always)]
    pub(super) fn seal(self, old: u64) -> bool {
        if !self.proves(old) || self.word.compare_exchange(old, SEAL, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return false;
        }
        let sealed = self.is_same_lap();
        if !sealed {
            self.unseal(old);
        }
        sealed
    }

    #[inline(always)]
    pub(super) fn unseal(self, word: u64) {
        self.word.store(word, Ordering::Release);
    }

    #[inline(always)]
    fn is_same_lap(self) -> bool {
        is_same_lap(self.header_word.load(Ordering::Relaxed), self.header)
    }
}

/// A copy of the state of a key that has one word, without the tag.
pub(super) struct Copied<'a> {
    pub(super) state: Cell<u64>,
    spill: &'a Spill,
}

impl<'a> Copied<'a> {
    #[inline(always)]
    pub(super) fn new(state: u64, spill: &'a Spill) -> Self {
        Self { state: Cell::new(state), spill }
    }
}

impl StateWords for Copied<'_> {
    #[inline(always)]
    fn get(&self, _: usize) -> u64 {
        self.state.get()
    }

    #[inline(always)]
    fn set(&self, _: usize, word: u64) {
        self.state.set(word);
    }

    fn spill(&self) -> &Spill {
        self.spill
    }
}

/// A sealed word in a locked bucket. On drop it gets the tag and the state in this value.
pub(super) struct Sealed<'a> {
    word: &'a AtomicU64,
    tag: u64,
    state: Copied<'a>,
}

impl<'a> Sealed<'a> {
    /// Seals a word in a locked bucket. Only a thread on the fast path can have sealed it already.
    pub(super) fn new(word: &'a AtomicU64, tags: u64, spill: &'a Spill) -> Result<Self, Busy> {
        for _ in 0..PATIENCE {
            let old = word.load(Ordering::Relaxed);
            if old != SEAL && word.compare_exchange(old, SEAL, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Ok(Self { word, tag: old & tags, state: Copied::new(old & !tags, spill) });
            }
            spin_loop();
        }
        Err(Busy::Held)
    }

    pub(super) fn is_of(&self, word: &AtomicU64) -> bool {
        std::ptr::eq(self.word, word)
    }

    pub(super) fn cells(&self) -> &Copied<'a> {
        &self.state
    }

    /// Reassigns the slot to another key, or empties it: no decision on the old key can change it any more.
    pub(super) fn reassign(&mut self, held: &mut Held<'_>, tags: u64) {
        let lowest = tags & tags.wrapping_neg();
        self.tag = self.tag.wrapping_add(lowest);
        if self.tag == 0 {
            held.start_lap();
        }
    }
}

impl Drop for Sealed<'_> {
    fn drop(&mut self) {
        self.word.store(self.tag | self.state.state.get(), Ordering::Release);
    }
}

/// The words of a key, in place under the lock of their bucket, or a copy.
pub(super) enum WordsView<'c, 'a> {
    Words(Slot<'a>),
    Copy(&'c Copied<'a>),
}

impl StateWords for WordsView<'_, '_> {
    #[inline]
    fn get(&self, index: usize) -> u64 {
        match self {
            Self::Words(slot) => slot.get(index),
            Self::Copy(copy) => copy.get(index),
        }
    }

    #[inline]
    fn set(&self, index: usize, word: u64) {
        match self {
            Self::Words(slot) => slot.set(index, word),
            Self::Copy(copy) => copy.set(index, word),
        }
    }

    fn spill(&self) -> &Spill {
        match self {
            Self::Words(slot) => slot.spill(),
            Self::Copy(copy) => copy.spill(),
        }
    }
}

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
    /// Returns the word of a key that was found, for keys of one word.
    pub(super) fn word_ref<'a>(&'a self, found: Found<'a>) -> WordRef<'a> {
        let Found { bucket, slot, header } = found;
        WordRef { header_word: bucket.header(), header, word: &bucket.words_of(slot, self.layout)[0] }
    }

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
            Err(LostRace::Moved) => None,
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
                Err(LostRace::Moved) => return None,
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
            None => Err(LostRace::Moved),
            Some(edit) => {
                algorithm.apply(&cells, edit);
                word_ref.replace(old, old & tags | cells.state.get()).map(|()| verdict)
            }
        }
    }
}

/// The shortest wait is two to this power spins: some hundred nanoseconds, in which another thread gets through a few
/// decisions.
#[cfg(not(loom))]
const SHORTEST: u32 = 3;
/// The longest: some ten microseconds.
#[cfg(not(loom))]
const LONGEST: u32 = 8;
/// A wait that did not help doubles the next one; this number of successful decisions halves it.
#[cfg(not(loom))]
const DOUBLING_STEPS: u32 = 4;
/// Number of unsuccessful waits before the thread yields: the thread it waits for may be preempted.
#[cfg(not(loom))]
const SPINS: u32 = 16;

#[cfg(not(loom))]
thread_local! {
    /// How long this thread waits, beyond the shortest wait, in steps of which [`DOUBLING_STEPS`] double it. 0: it has
    /// not lost for a while.
    static STEPS: Cell<u32> = const { Cell::new(0) };
}

/// The waits of one decision.
pub(super) struct Contention {
    #[cfg(not(loom))]
    steps: u32,
    #[cfg(not(loom))]
    waits: u32,
}

#[cfg(not(loom))]
impl Contention {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { steps: STEPS.get(), waits: 0 }
    }

    /// Returns whether this thread has lost a race recently.
    #[inline(always)]
    pub(super) fn is_likely(&self) -> bool {
        self.steps > 0
    }

    /// Waits after a lost race.
    #[cold]
    #[inline(never)]
    pub(super) fn wait(&mut self) {
        if self.waits > 0 || self.steps == 0 {
            self.steps = (self.steps + DOUBLING_STEPS).min((LONGEST - SHORTEST) * DOUBLING_STEPS);
        }
        self.waits += 1;
        if self.waits > SPINS {
            yield_now();
        } else {
            (0..1_u32 << (SHORTEST + self.steps / DOUBLING_STEPS)).for_each(|_| spin_loop());
        }
    }

    /// Records a successful decision.
    #[inline(always)]
    pub(super) fn end(self) {
        if self.steps > 0 {
            STEPS.set(self.steps - 1);
        }
    }
}

/// Models have no time, and no memory from one run to the next.
#[cfg(loom)]
impl Contention {
    pub(super) fn new() -> Self {
        Self {}
    }

    pub(super) fn is_likely(&self) -> bool {
        false
    }

    pub(super) fn wait(&mut self) {
        yield_now();
    }

    pub(super) fn end(self) {}
}

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

use std::cell::Cell;

use super::bucket::{Busy, Held, PATIENCE, Slot, is_same_lap, unchanged_header};
use crate::algorithm::StateWords;
use crate::algorithm::spill::Spill;
use crate::sync::{AtomicU64, Ordering, spin_loop};

/// The value of a sealed word, which another thread is about to replace. No state has this value.
pub(super) const SEAL: u64 = u64::MAX;

/// The word of a key, and the header of its bucket when it was found.
#[derive(Clone, Copy)]
pub(super) struct WordRef<'a> {
    pub(super) header_word: &'a AtomicU64,
    pub(super) header: u64,
    pub(super) word: &'a AtomicU64,
}

/// The reason why a word was not replaced. The decision must be made again.
#[derive(Clone, Copy, Debug)]
pub(super) enum LostRace {
    /// Another thread has replaced it by this value.
    To(u64),
    /// It is sealed, or its bucket has changed, and the key may be elsewhere.
    Elsewhere,
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
            return Err(LostRace::Elsewhere);
        }
        match self.word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) if self.is_same_lap() => Ok(()),
            Ok(_) => Err(LostRace::Elsewhere),
            Err(other) => Err(LostRace::To(other)),
        }
    }

    /// Reads the word and acquires its cache line for writing. After a plain read, the compare-and-swap that follows
    /// would have to acquire the line again.
    #[inline(always)]
    pub(super) fn read_to_replace(self) -> u64 {
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

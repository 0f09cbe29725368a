//! Locking several buckets in one thread, without deadlocks.

use smallvec::SmallVec;

use super::bucket::{Bucket, Busy, EMPTY, Held, LOCKED, header_within_bound, hold_unchanged};
use super::positions::Positions;
use super::table::Table;
use super::word::{SEAL, Sealed, WordsView};
use crate::sync::Ordering;

/// A slot or the shared words of a locked bucket.
#[derive(Clone, Copy)]
pub(super) struct SlotRef<'a> {
    pub(super) bucket: Bucket<'a>,
    pub(super) slot: usize,
    /// Index of its bucket among the locked ones.
    held: usize,
    /// Index of its seal, if the slot has one word that other threads can replace.
    sealed: Option<usize>,
}

impl SlotRef<'_> {
    pub(super) fn is(self, other: SlotRef<'_>) -> bool {
        self.bucket.is(other.bucket) && self.slot == other.slot
    }

    /// Returns an address that is unique among all slots.
    pub(super) fn address(self) -> (usize, usize) {
        (self.bucket.address(), self.slot)
    }
}

/// Locked buckets, and sealed words in them. On drop, the words are written, and then the buckets are unlocked, the
/// last one first.
#[derive(Default)]
pub(super) struct HeldBuckets<'a> {
    sealed: SmallVec<[Sealed<'a>; 8]>,
    held: SmallVec<[Held<'a>; 8]>,
    /// Index of each bucket, by its address.
    positions: Positions<usize>,
    /// For each bucket, a bit for each slot that was claimed for a key. Until the key is charged, its slot looks free.
    given: SmallVec<[u64; 8]>,
}

impl<'a> HeldBuckets<'a> {
    /// Locks a bucket, unless it is locked already.
    pub(super) fn hold(&mut self, bucket: Bucket<'a>) -> Result<&mut Held<'a>, Busy> {
        let index = self.hold_index(bucket)?;
        Ok(&mut self.held[index])
    }

    fn hold_index(&mut self, bucket: Bucket<'a>) -> Result<usize, Busy> {
        if let Some(index) = self.position(bucket) {
            return Ok(index);
        }
        self.add(hold_unchanged(bucket, header_within_bound(bucket)?).ok_or(Busy::Held)?);
        Ok(self.held.len() - 1)
    }

    fn add(&mut self, held: Held<'a>) {
        self.held.push(held);
        self.given.push(0);
        self.positions.added(&self.held, |held| held.bucket.address());
    }

    /// Locks the home bucket of a key.
    pub(super) fn hold_home(&mut self, table: &'a Table, fingerprint: u64) -> Result<Bucket<'a>, Busy> {
        let mut bucket = table.probable_home(fingerprint);
        loop {
            let already = self.position(bucket).map(|index| self.held[index].header());
            let header = already.map_or_else(|| header_within_bound(bucket), Ok)?;
            match table.split_target(bucket, header, fingerprint) {
                Some(next) => bucket = next,
                None if already.is_some() => return Ok(bucket),
                None => {
                    self.add(hold_unchanged(bucket, header).ok_or(Busy::Held)?);
                    return Ok(bucket);
                }
            }
        }
    }

    /// Locks a slot: locks its bucket, and seals a word that other threads can replace without the lock.
    pub(super) fn lock_slot(&mut self, table: &'a Table, bucket: Bucket<'a>, slot: usize) -> Result<SlotRef<'a>, Busy> {
        let held = self.hold_index(bucket)?;
        let tags = table.layout.tags;
        if tags == 0 || slot == table.layout.slots {
            return Ok(SlotRef { bucket, slot, held, sealed: None });
        }
        let word = &bucket.words_of(slot, table.layout)[0];
        let ours = || self.sealed.iter().rposition(|sealed| sealed.is_of(word));
        let index = match Some(word.load(Ordering::Relaxed)).filter(|word| *word == SEAL).and_then(|_| ours()) {
            Some(index) => index,
            None => {
                self.sealed.push(Sealed::new(word, tags, &table.spill)?);
                self.sealed.len() - 1
            }
        };
        Ok(SlotRef { bucket, slot, held, sealed: Some(index) })
    }

    /// Unlocks the slot, if it is the last that was sealed.
    pub(super) fn unlock_slot(&mut self, slot_ref: SlotRef<'a>) {
        if slot_ref.sealed.is_some_and(|index| index + 1 == self.sealed.len()) {
            self.sealed.pop();
        }
    }

    /// Returns the words of a slot.
    pub(super) fn cells(&self, table: &'a Table, slot_ref: SlotRef<'a>) -> WordsView<'_, 'a> {
        match slot_ref.sealed {
            Some(index) => WordsView::Copy(self.sealed[index].cells()),
            None => WordsView::Words(table.slot(slot_ref.bucket, slot_ref.slot)),
        }
    }

    /// Reassigns a slot to another key, or empties it.
    pub(super) fn reassign(&mut self, table: &'a Table, slot_ref: SlotRef<'a>, fingerprint: u64) {
        let held = &mut self.held[slot_ref.held];
        held.mark_written();
        // No decision can be in progress on an empty slot.
        if let Some(sealed) = slot_ref.sealed.filter(|_| slot_ref.bucket.fingerprint(slot_ref.slot) != EMPTY) {
            self.sealed[sealed].reassign(held, table.layout.tags);
        }
        slot_ref.bucket.set_fingerprint(slot_ref.slot, fingerprint);
    }

    /// Reserves a slot for its new key until all locks are released.
    pub(super) fn keep_for_key(&mut self, bucket: Bucket<'a>, slot: usize) {
        if let Some(index) = self.position(bucket) {
            self.given[index] |= 1 << slot;
        }
    }

    pub(super) fn is_given(&self, bucket: Bucket<'_>, slot: usize) -> bool {
        self.position(bucket).is_some_and(|index| self.given[index] & 1 << slot != 0)
    }

    /// Makes concurrent readers of this bucket retry.
    pub(super) fn write(&mut self, bucket: Bucket<'a>) {
        if let Some(index) = self.position(bucket) {
            self.held[index].mark_written();
        }
    }

    fn position(&self, bucket: Bucket<'_>) -> Option<usize> {
        // Most buckets are unlocked.
        let is_locked = bucket.header().load(Ordering::Relaxed) & LOCKED != 0;
        let is_it = |held: &Held<'_>| held.bucket.is(bucket);
        is_locked.then(|| self.positions.of(&self.held, is_it, || bucket.address())).flatten()
    }
}

impl Drop for HeldBuckets<'_> {
    fn drop(&mut self) {
        self.sealed.clear();
        while self.held.pop().is_some() {}
    }
}

//! Several buckets held at once, by one thread, without ever waiting in a circle.

use smallvec::SmallVec;

use super::bucket::{Bucket, Busy, EMPTY, Held, LOCKED, header_within_bound, hold_unchanged};
use super::positions::Positions;
use super::table::Table;
use super::word::{SEAL, Sealed, WordsView};
use crate::sync::Ordering;

/// A slot, or the shared words, of a bucket that is held.
#[derive(Clone, Copy)]
pub(super) struct SlotRef<'a> {
    pub(super) bucket: Bucket<'a>,
    pub(super) slot: usize,
    /// Where its bucket is among those held.
    held: usize,
    /// Where its seal is, if it has one word that others decide by.
    sealed: Option<usize>,
}

impl SlotRef<'_> {
    pub(super) fn is(self, other: SlotRef<'_>) -> bool {
        self.bucket.is(other.bucket) && self.slot == other.slot
    }

    /// Differs from that of every other slot.
    pub(super) fn address(self) -> (usize, usize) {
        (self.bucket.address(), self.slot)
    }
}

/// Buckets that are held, and words in them that are sealed. When this is dropped, the words are written, and then the
/// buckets are let go, the last one first.
#[derive(Default)]
pub(super) struct HeldBuckets<'a> {
    sealed: SmallVec<[Sealed<'a>; 8]>,
    held: SmallVec<[Held<'a>; 8]>,
    /// Where each of these buckets is among them, by its address.
    positions: Positions<usize>,
    /// For each of these buckets, a bit for each slot that was given to a key. Such a key may have spent nothing yet, and
    /// its slot then looks free.
    given: SmallVec<[u64; 8]>,
}

impl<'a> HeldBuckets<'a> {
    /// HeldBuckets a bucket, unless it is held already.
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

    /// HeldBuckets the home bucket of a key.
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

    /// Keeps others from changing a slot: its bucket is held, and a word that is decided without the lock is sealed.
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

    /// Lets others change the slot again, if it is the last that was sealed.
    pub(super) fn unlock_slot(&mut self, slot_ref: SlotRef<'a>) {
        if slot_ref.sealed.is_some_and(|index| index + 1 == self.sealed.len()) {
            self.sealed.pop();
        }
    }

    /// The words of a slot.
    pub(super) fn cells(&self, table: &'a Table, slot_ref: SlotRef<'a>) -> WordsView<'_, 'a> {
        match slot_ref.sealed {
            Some(index) => WordsView::Copy(self.sealed[index].cells()),
            None => WordsView::Words(table.slot(slot_ref.bucket, slot_ref.slot)),
        }
    }

    /// Gives a slot to another key, or to none.
    pub(super) fn reassign(&mut self, table: &'a Table, slot_ref: SlotRef<'a>, fingerprint: u64) {
        let held = &mut self.held[slot_ref.held];
        held.mark_written();
        // An empty slot has no decisions on their way to it.
        if let Some(sealed) = slot_ref.sealed.filter(|_| slot_ref.bucket.fingerprint(slot_ref.slot) != EMPTY) {
            self.sealed[sealed].reassign(held, table.layout.tags);
        }
        slot_ref.bucket.set_fingerprint(slot_ref.slot, fingerprint);
    }

    /// Keeps a slot for the key that it was given to, as long as anything is held.
    pub(super) fn keep_for_key(&mut self, bucket: Bucket<'a>, slot: usize) {
        if let Some(index) = self.position(bucket) {
            self.given[index] |= 1 << slot;
        }
    }

    pub(super) fn is_given(&self, bucket: Bucket<'_>, slot: usize) -> bool {
        self.position(bucket).is_some_and(|index| self.given[index] & 1 << slot != 0)
    }

    /// Readers of this bucket will have to look again.
    pub(super) fn write(&mut self, bucket: Bucket<'a>) {
        if let Some(index) = self.position(bucket) {
            self.held[index].mark_written();
        }
    }

    fn position(&self, bucket: Bucket<'_>) -> Option<usize> {
        // Most buckets that are asked for are held by nobody.
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

//! Claiming slots for new keys, and handling keys that find no slot.
//!
//! A new key takes an empty slot of its home bucket or the slot of an idle key, there or in the next buckets. When the
//! table is crowded, it grows. When it cannot grow any more, the table is *full*, and keys that get a slot are *late*: a
//! new key that finds no free slot evicts the late key near its home bucket that has the most quota left. The last words
//! of every bucket are its *floor*: an upper bound of the charges of any key of this home bucket without a slot. An
//! eviction raises the floor to the charges of the evicted key, and a new key starts with the floor before the eviction.
//! A floor is the state of a key, and decays like one.
//!
//! A late key is evicted only if the floor then leaves more than half of the quota: see [`LimitAlgorithm::cover`]. If no
//! late key has that much left, keys without a slot are charged to the floor itself, as if they were one key, until slots
//! become free. So however many keys an attacker invents,
//!
//! - a key that got its slot before the table was full keeps it until it is idle, and is counted exactly;
//! - so does a late key that has spent half of its quota;
//! - every other key has at least half of its quota left when it is evicted and comes back, as long as a key can be
//!   evicted for it;
//! - no key has more quota than it would have alone;
//! - the table does not grow.
//!
//! Strikes and bans have no floor: shared strikes would ban keys that have none. A key that is not in their table has no
//! strikes, and strikes for which there is no slot are lost. They are counted.
//!
//! [`HeldBuckets`] locks several buckets in one thread, without deadlocks.

use std::cell::Cell;

use smallvec::SmallVec;

use super::Positions;
use super::decide::{Copied, SEAL, Sealed, WordsView};
use super::table::{
    Bucket, Busy, EMPTY, Held, LOCKED, PASSED_BY, Slot, Table, header_within_bound, hold_unchanged, pause, unchanged,
};
use crate::algorithm::spill::Spill;
use crate::algorithm::{LimitAlgorithm, StateWords};
use crate::decision::{Admission, Verdict};
use crate::sync::Ordering;

/// Buckets that are searched for a free slot before a key is evicted, once the table cannot grow. They are all locked
/// in the meantime.
const NEAR: usize = 8;

impl Table {
    /// Changes the words of a locked slot.
    pub(super) fn apply<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        holds: &mut HeldBuckets<'a>,
        slot_ref: SlotRef<'a>,
        edit: R::Edit,
        now: u64,
    ) {
        // A word that decisions replace alone is protected by its value, the others by the header.
        if self.layout.tags == 0 || slot_ref.slot == self.layout.slots {
            holds.write(slot_ref.bucket);
        }
        let cells = holds.cells(self, slot_ref);
        algorithm.apply(&cells, edit);
        if slot_ref.slot == self.layout.slots {
            algorithm.shared(&cells, now);
        }
    }

    /// Returns the floor of a bucket. It is at rest unless the table is full.
    pub(super) fn shared<'a>(&'a self, home: Bucket<'a>) -> Slot<'a> {
        self.slot(home, self.layout.slots)
    }

    /// Returns the verdict on a key without a slot, without giving it one.
    pub(super) fn peek_without_slot<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        fingerprint: u64,
        now: u64,
        cost: u64,
    ) -> Verdict {
        let mut attempts = 0;
        loop {
            if algorithm.must_lock() {
                let mut holds = HeldBuckets::default();
                if let Ok(home) = holds.hold_home(self, fingerprint) {
                    return algorithm.decide(&self.shared(home), now, cost).verdict.of_shared_words();
                }
            } else {
                let (home, header) = self.home(fingerprint);
                let verdict = algorithm.decide(&self.shared(home), now, cost).verdict;
                if unchanged(home, header) {
                    return verdict.of_shared_words();
                }
            }
            attempts = pause(attempts);
        }
    }

    /// Returns the verdict on a key in this slot. A denial by the shared words is for lack of room, and is counted.
    pub(super) fn verdict_at(&self, slot_ref: SlotRef<'_>, verdict: Verdict) -> Verdict {
        if slot_ref.slot < self.layout.slots {
            return verdict;
        }
        let verdict = verdict.of_shared_words();
        if matches!(verdict.admission, Admission::NoRoom { .. }) {
            self.overflow.count_denial();
        }
        verdict
    }

    /// Counts a change that is lost because its key has neither a slot nor a floor. Returns the verdict on the key, which
    /// stays at rest.
    pub(super) fn lose_change<R: LimitAlgorithm>(&self, algorithm: &R, home: Bucket<'_>, now: u64) -> Verdict {
        self.overflow.count_lost();
        algorithm.decide(&self.shared(home), now, 0).verdict
    }

    /// Returns whether memory is used up: the table is crowded and cannot grow.
    pub(super) fn is_full(&self) -> bool {
        self.is_crowded(self.slots()) && !self.can_grow()
    }

    /// Locks the slot of a key, and claims one if it has none. The result may be the shared words, or `None` if the
    /// algorithm has no floor.
    pub(super) fn hold_slot<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        holds: &mut HeldBuckets<'a>,
        fingerprint: u64,
        now: u64,
    ) -> Result<Option<SlotRef<'a>>, Busy> {
        let home = holds.hold_home(self, fingerprint)?;
        if let Some(slot_ref) = self.find_in_run(holds, home, fingerprint)? {
            holds.keep_for_key(slot_ref.bucket, slot_ref.slot);
            return Ok(Some(slot_ref));
        }
        // Copy the floor first: an eviction raises it by the evicted key's charges, which the new key does not owe.
        let floor = Floor::copy(self.shared(home), algorithm.words());
        match self.free_slot(algorithm, holds, home, now)? {
            Some(slot_ref) => {
                self.clear_slot(algorithm, holds, slot_ref);
                holds.reassign(self, slot_ref, fingerprint);
                holds.set_late(slot_ref, self.is_full());
                let cells = holds.cells(self, slot_ref);
                algorithm.inherit(&cells, &floor);
                algorithm.shared(&cells, now);
                holds.keep_for_key(slot_ref.bucket, slot_ref.slot);
                Ok(Some(slot_ref))
            }
            // The caller makes room before it retries.
            None if self.can_grow() => Err(Busy::Crowded),
            None if algorithm.has_floor() => holds.lock_slot(self, home, self.layout.slots).map(Some),
            None => Ok(None),
        }
    }

    /// Locks the slot of a key, if it has one. Its home bucket is locked, so it cannot get one in the meantime.
    ///
    /// The other buckets are only read, and the one with the key is locked: threads that each locked a part of a full
    /// block would wait for each other.
    pub(super) fn find_in_run<'a>(
        &'a self,
        holds: &mut HeldBuckets<'a>,
        home: Bucket<'a>,
        fingerprint: u64,
    ) -> Result<Option<SlotRef<'a>>, Busy> {
        let mut bucket = home;
        for _ in 0..self.run() {
            if self.slot_of(bucket, fingerprint).is_some() {
                holds.hold(bucket)?;
                // It may have been evicted in the meantime. It cannot be added anywhere.
                if let Some(slot) = self.slot_of(bucket, fingerprint) {
                    return holds.lock_slot(self, bucket, slot).map(Some);
                }
            }
            if !holds.may_be_passed_by(bucket) {
                break;
            }
            bucket = self.next_in_run(bucket);
        }
        Ok(None)
    }

    /// Claims the slot nearest to home that is empty or whose key is at rest, and marks the buckets in between.
    pub(super) fn free_slot<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        holds: &mut HeldBuckets<'a>,
        home: Bucket<'a>,
        now: u64,
    ) -> Result<Option<SlotRef<'a>>, Busy> {
        if self.is_splitting(home) {
            return Err(Busy::Crowded);
        }
        let mut bucket = home;
        for distance in 0..self.run() {
            if distance == NEAR {
                if !self.can_grow()
                    && let Some(slot_ref) = self.evict_near(algorithm, holds, home, now)?
                {
                    return Ok(Some(slot_ref));
                }
                // Look before locking: threads that each locked a part of a full block would wait for each other.
                if !self.looks_free_from(algorithm, bucket, self.run() - distance, now) {
                    return Ok(None);
                }
            }
            holds.hold(bucket)?;
            // Prefer slots of keys at rest to empty ones: using up empty slots makes the table grow.
            loop {
                let free = self.free_slots(algorithm, bucket, now).filter(|slot| !holds.is_given(bucket, *slot));
                let Some(slot) = free.max_by_key(|slot| bucket.fingerprint(*slot) != EMPTY) else {
                    break;
                };
                if let Some(slot_ref) = self.claim_if_free(algorithm, holds, bucket, slot, now)? {
                    self.mark_passed_by(holds, home, bucket)?;
                    return Ok(Some(slot_ref));
                }
            }
            bucket = self.next_in_run(bucket);
        }
        if self.run() <= NEAR && !self.can_grow() {
            return self.evict_near(algorithm, holds, home, now);
        }
        Ok(None)
    }

    /// Returns whether a slot of these buckets looks free. It reads without locks, so the result is only a hint.
    fn looks_free_from<R: LimitAlgorithm>(&self, algorithm: &R, first: Bucket<'_>, count: usize, now: u64) -> bool {
        let mut bucket = first;
        (0..count).any(|_| {
            let is_free = self.free_slots(algorithm, bucket, now).next().is_some();
            bucket = self.next_in_run(bucket);
            is_free
        })
    }

    /// Evicts a late key from the nearest bucket that has one whose charges a floor can cover, and marks the buckets in
    /// between. The buckets are locked.
    fn evict_near<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        holds: &mut HeldBuckets<'a>,
        home: Bucket<'a>,
        now: u64,
    ) -> Result<Option<SlotRef<'a>>, Busy> {
        let mut bucket = home;
        for _ in 0..self.run().min(NEAR) {
            if let Some(slot_ref) = self.evict(algorithm, holds, bucket, now)? {
                self.mark_passed_by(holds, home, bucket)?;
                return Ok(Some(slot_ref));
            }
            bucket = self.next_in_run(bucket);
        }
        Ok(None)
    }

    /// Evicts the late key with the most quota left from a locked bucket, if the floor of that key's home bucket can
    /// cover its charges.
    fn evict<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        holds: &mut HeldBuckets<'a>,
        bucket: Bucket<'a>,
        now: u64,
    ) -> Result<Option<SlotRef<'a>>, Busy> {
        let is_candidate = |slot: &usize| holds.is_late(bucket, *slot) && !holds.is_given(bucket, *slot);
        let candidates = (0..self.layout.slots).filter(is_candidate);
        let Some(slot) = candidates.max_by_key(|slot| self.left_in(algorithm, bucket, *slot, now)) else {
            return Ok(None);
        };
        let slot_ref = holds.lock_slot(self, bucket, slot)?;
        let home = holds.hold_home(self, bucket.fingerprint(slot))?;
        let is_covered = algorithm.cover(&self.shared(home), &holds.cells(self, slot_ref), now);
        if is_covered {
            holds.write(home);
            self.overflow.evicted.fetch_add(1, Ordering::Relaxed);
        } else {
            holds.unlock_slot(slot_ref);
        }
        Ok(is_covered.then_some(slot_ref))
    }

    /// Returns the units left of a key in a locked bucket, or 0 if it is being changed.
    fn left_in<R: LimitAlgorithm>(&self, algorithm: &R, bucket: Bucket<'_>, slot: usize, now: u64) -> u64 {
        let cells = self.slot(bucket, slot);
        match self.layout.tags {
            0 => algorithm.decide(&cells, now, 0).verdict.remaining,
            tags => {
                let word = cells.word();
                let is_sealed = word == SEAL;
                if is_sealed {
                    0
                } else {
                    algorithm.decide(&Copied::new(word & !tags, &self.spill), now, 0).verdict.remaining
                }
            }
        }
    }

    /// Returns the free slots of a bucket. A decision that began earlier may still charge a key at rest.
    pub(super) fn free_slots<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &'a R,
        bucket: Bucket<'a>,
        now: u64,
    ) -> impl Iterator<Item = usize> + 'a {
        (0..self.layout.slots)
            .filter(move |slot| bucket.fingerprint(*slot) == EMPTY || self.looks_idle(algorithm, bucket, *slot, now))
    }

    /// Returns whether the key of a slot is at rest and not being changed.
    pub(super) fn looks_idle<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        bucket: Bucket<'_>,
        slot: usize,
        now: u64,
    ) -> bool {
        let cells = self.slot(bucket, slot);
        match self.layout.tags {
            0 => algorithm.is_idle(&cells, now),
            tags => {
                let word = cells.word();
                word != SEAL && algorithm.is_idle(&Copied::new(word & !tags, &self.spill), now)
            }
        }
    }

    /// Counts the keys that are not at rest, bucket by bucket. A key that moves in the meantime may be counted twice or
    /// not at all.
    pub(super) fn live_keys<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) -> usize {
        self.buckets().map(|bucket| self.live_in(algorithm, bucket, now)).sum()
    }

    pub(super) fn live_in<R: LimitAlgorithm>(&self, algorithm: &R, bucket: Bucket<'_>, now: u64) -> usize {
        (0..self.layout.slots).filter(|slot| self.is_live(algorithm, bucket, *slot, now)).count()
    }

    pub(super) fn is_live<R: LimitAlgorithm>(&self, algorithm: &R, bucket: Bucket<'_>, slot: usize, now: u64) -> bool {
        bucket.fingerprint(slot) != EMPTY && !self.looks_idle(algorithm, bucket, slot, now)
    }

    /// Claims a slot that was free a moment ago, if it still is.
    pub(super) fn claim_if_free<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        holds: &mut HeldBuckets<'a>,
        bucket: Bucket<'a>,
        slot: usize,
        now: u64,
    ) -> Result<Option<SlotRef<'a>>, Busy> {
        let slot_ref = holds.lock_slot(self, bucket, slot)?;
        let is_free = bucket.fingerprint(slot) == EMPTY || algorithm.is_idle(&holds.cells(self, slot_ref), now);
        if !is_free {
            holds.unlock_slot(slot_ref);
        }
        Ok(is_free.then_some(slot_ref))
    }

    /// Clears a free slot for its next key.
    pub(super) fn clear_slot<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        holds: &mut HeldBuckets<'a>,
        slot_ref: SlotRef<'a>,
    ) {
        if slot_ref.bucket.fingerprint(slot_ref.slot) == EMPTY {
            self.occupied.fetch_add(1, Ordering::Relaxed);
        } else {
            algorithm.clear(&holds.cells(self, slot_ref));
        }
        self.added.fetch_add(1, Ordering::Relaxed);
        holds.write(slot_ref.bucket);
    }

    /// Marks the buckets between the home of a key and the bucket of its slot.
    pub(super) fn mark_passed_by<'a>(
        &'a self,
        holds: &mut HeldBuckets<'a>,
        home: Bucket<'a>,
        end: Bucket<'a>,
    ) -> Result<(), Busy> {
        let mut passed = home;
        while !passed.is(end) {
            holds.hold(passed)?.mark_passed_by();
            holds.write(passed);
            passed = self.next_in_run(passed);
        }
        Ok(())
    }
}

/// A copy of the words of a floor. Chunks belong to the floor itself: keys whose state has chunks are not evicted, so
/// such a floor does not change while its bucket is locked.
struct Floor<'a> {
    words: SmallVec<[Cell<u64>; 8]>,
    slot: Slot<'a>,
}

impl<'a> Floor<'a> {
    fn copy(slot: Slot<'a>, words: usize) -> Self {
        Self { words: (0..words).map(|index| Cell::new(slot.get(index))).collect(), slot }
    }
}

impl StateWords for Floor<'_> {
    fn get(&self, index: usize) -> u64 {
        self.words[index].get()
    }

    fn set(&self, index: usize, word: u64) {
        self.words[index].set(word);
    }

    fn spill(&self) -> &Spill {
        self.slot.spill()
    }
}

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

    /// Reassigns a slot to another key, or empties it. The key is not late.
    pub(super) fn reassign(&mut self, table: &'a Table, slot_ref: SlotRef<'a>, fingerprint: u64) {
        let held = &mut self.held[slot_ref.held];
        held.mark_written();
        held.set_late(slot_ref.slot, false);
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

    /// Records whether the key of a slot came when the table was full.
    pub(super) fn set_late(&mut self, slot_ref: SlotRef<'a>, is_late: bool) {
        self.held[slot_ref.held].set_late(slot_ref.slot, is_late);
    }

    fn is_late(&self, bucket: Bucket<'_>, slot: usize) -> bool {
        self.position(bucket).is_some_and(|index| self.held[index].is_late(slot))
    }

    fn is_given(&self, bucket: Bucket<'_>, slot: usize) -> bool {
        self.position(bucket).is_some_and(|index| self.given[index] & 1 << slot != 0)
    }

    /// Makes concurrent readers of this bucket retry.
    pub(super) fn write(&mut self, bucket: Bucket<'a>) {
        if let Some(index) = self.position(bucket) {
            self.held[index].mark_written();
        }
    }

    /// Returns whether a key of this bucket may be in a later bucket. The flag of a bucket that another thread has locked
    /// may be unpublished, and counts as set.
    fn may_be_passed_by(&self, bucket: Bucket<'_>) -> bool {
        match self.position(bucket) {
            Some(index) => self.held[index].is_passed_by(),
            None => bucket.header().load(Ordering::Acquire) & (PASSED_BY | LOCKED) != 0,
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

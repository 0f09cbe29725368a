//! Growth of a table: by a few buckets with each new key, never all at once, and only after a sweep has
//! left it crowded with live keys. When a bucket is split, half of its keys move to a new bucket.
//!
//! # Blocks
//!
//! The keys of a block fit into its slots, so once it is split, those that move fit into the slots of the upper block.
//! They might not if new keys came in between: the last bucket could then not be split, and the table would never grow
//! again. So one block is split at a time, and it gets no new keys until all of its buckets are split. A new key that
//! belongs there does the rest itself.
//!
//! # The sweep
//!
//! A sweep frees the slots of idle keys and clears outdated flags, in a few buckets with each new key.
//!
//! Slots of idle keys are reused by new keys of the same bucket, but most are in buckets that no new key needs just
//! then. Without a sweep they would make the table grow, and every bucket that was ever full would send lookups on for
//! good.
//!
//! A pass visits every bucket once. It is due after a number of new keys that is a fixed share of the slots, so its
//! cost for each new key is constant. Only a pass that leaves the table crowded makes it grow: growth follows live
//! keys.
//!
//! # Flags
//!
//! `PASSED_BY` means that a key is in a later bucket because this bucket, or an earlier one of its run, was full. A key
//! is added with every bucket that it passes by locked. So while a bucket is locked, the set of keys that pass it by
//! can only shrink, and no such key is beyond a bucket whose own flag is clear. A thread publishes the flags of its
//! buckets one by one as it unlocks them, so the flag of a locked bucket counts as set.
//!
//! # Compaction
//!
//! Compaction frees the memory of a burst of keys once they are at rest. Decisions do not register as readers of a
//! table's segments, so a table can only be freed as a whole, when no store uses it. Compaction is a change of tables
//! like that of a reload: a new store has a smaller table in the place of each one that is mostly empty, both tables
//! are in the family of the limit, and decisions move keys from one to the other. Once no store uses the larger table,
//! the next compaction moves the keys that are left, and frees it. The fast path is unaware of this.
//!
//! Deliberately not here: when to compact. That is for the owner of the limiter.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::claim::{HeldBuckets, SlotRef};
use super::family::{Family, FamilyView, Member, Usage};
use super::table::{Bucket, Busy, EMPTY, LOCKED, Layout, PASSED_BY, PATIENCE, SEGMENTS, Table, header_at, level_of};
use super::{MemoryStore, tables};
use crate::algorithm::{LimitAlgorithm, StateWords, with_algorithm};
use crate::budget::Budget;
use crate::sync::{AtomicBool, Ordering, yield_now};
use crate::units::Timestamp;

/// Splits with each new key: enough to complete a doubling long before the next is due.
const SPLITS: usize = 4;

/// Marks the end of a thread's sweep or growth on drop, even after a panic.
struct Growing<'a>(&'a AtomicBool);

impl Drop for Growing<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Table {
    /// Returns whether the table is growing or has the memory to grow.
    pub(super) fn can_grow(&self) -> bool {
        let next = self.extent().0 as usize + 1;
        let there = self.segments.get(next).is_some_and(|segment| segment.get().is_some());
        there || (next < SEGMENTS && self.budget.has(self.words_in(next)))
    }

    /// Sweeps or grows by a few buckets, if due.
    pub(super) fn maintain<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) {
        let (level, split) = self.extent();
        if split > 0 || self.is_sweep_due(self.buckets_at(level) * self.layout.slots) {
            self.exclusively(|| self.sweep_or_grow(algorithm, now));
        }
    }

    #[cfg(all(test, loom))]
    pub(super) fn grow_now<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) {
        self.exclusively(|| self.grow(algorithm, now, SPLITS));
    }

    /// Runs `work`, unless another thread is sweeping or growing the table. Returns whether it did.
    fn exclusively(&self, work: impl FnOnce()) -> bool {
        let is_free = !self.growing.swap(true, Ordering::Acquire);
        if is_free {
            let _growing = Growing(&self.growing);
            work();
        }
        is_free
    }

    fn sweep_or_grow<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) {
        let (level, split) = self.extent();
        let buckets = self.buckets_at(level);
        let is_full = || self.is_crowded(buckets * self.layout.slots);
        if split > 0 || (self.sweep(algorithm, now, buckets) && is_full() && self.can_grow()) {
            self.grow(algorithm, now, SPLITS);
        }
    }

    /// Splits the next `count` buckets, or those that are left of their block.
    fn grow<R: LimitAlgorithm>(&self, algorithm: &R, now: u64, count: usize) {
        let (level, split) = self.extent();
        if self.add_segment(level as usize + 1).is_none() {
            return;
        }
        // A block that was begun early comes first, so that there is never more than one.
        let block = split >> self.layout.block_bits;
        if self.splitting().is_some_and(|begun| begun != block && !self.split_block(algorithm, now, begun, level)) {
            return;
        }
        self.set_splitting(Some(block));
        let until = (split + count).min((block + 1) << self.layout.block_bits);
        let split =
            split + (split..until).take_while(|index| self.split(algorithm, now, *index, level).is_ok()).count();
        if split == (block + 1) << self.layout.block_bits {
            self.set_splitting(None);
        }
        let (level, split) = if split == self.buckets_at(level) { (level + 1, 0) } else { (level, split) };
        self.extent.store(u64::from(level) << 32 | split as u64, Ordering::Release);
    }

    /// Makes room for a new key by splitting its block early, instead of waiting for all others to be split.
    #[cold]
    pub(super) fn make_room<R: LimitAlgorithm>(&self, algorithm: &R, fingerprint: u64, now: u64) {
        let has_split = self.exclusively(|| {
            self.grow(algorithm, now, self.layout.block());
            let (level, split) = self.extent();
            let block = self.home_at(fingerprint, level) >> self.layout.block_bits;
            let is_behind = block << self.layout.block_bits < split;
            let can_split = self.splitting().is_none() && self.segments[level as usize + 1].get().is_some();
            if can_split && !is_behind {
                self.split_block(algorithm, now, block, level);
            }
        });
        if !has_split {
            self.wait_for_growth();
        }
    }

    /// Waits a while for the thread that is sweeping the table or growing it: what that does needs locks.
    fn wait_for_growth(&self) {
        for _ in 0..PATIENCE {
            if !self.growing.load(Ordering::Relaxed) {
                return;
            }
            yield_now();
        }
    }

    /// Splits all buckets of a block. Returns false if another thread has one of them locked for too long.
    fn split_block<R: LimitAlgorithm>(&self, algorithm: &R, now: u64, block: usize, level: u32) -> bool {
        self.set_splitting(Some(block));
        let first = block << self.layout.block_bits;
        let is_split =
            (first..first + self.layout.block()).all(|index| self.split(algorithm, now, index, level).is_ok());
        if is_split {
            self.set_splitting(None);
        }
        is_split
    }

    /// Returns the block that is partly split, if there is one.
    fn splitting(&self) -> Option<usize> {
        self.splitting.load(Ordering::Acquire).checked_sub(1)
    }

    fn set_splitting(&self, block: Option<usize>) {
        self.splitting.store(block.map_or(0, |block| block + 1), Ordering::Release);
    }

    /// Returns whether the block of a bucket is partly split, from either side.
    pub(super) fn is_splitting(&self, bucket: Bucket<'_>) -> bool {
        self.splitting().is_some_and(|block| {
            let lower = bucket.index & (self.buckets_at(self.extent().0) - 1);
            lower >> self.layout.block_bits == block
        })
    }

    /// Returns the bucket to which half of a bucket's keys move when it splits.
    pub(super) fn upper(&self, index: usize, level: u32) -> Bucket<'_> {
        self.bucket(index + self.buckets_at(level))
    }
}

type SlotRefs<'a> = SmallVec<[SlotRef<'a>; 16]>;

impl Table {
    /// Splits bucket `index` of a table of that level, unless it is split already. Keys at rest are dropped.
    pub(super) fn split<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        now: u64,
        index: usize,
        level: u32,
    ) -> Result<(), Busy> {
        let mut holds = HeldBuckets::default();
        let (low, high) = (self.bucket(index), self.upper(index, level));
        // Levels only rise. A bucket that is split already may be in use, and is left alone.
        let is_split = |header| level_of(header) != level;
        // The low bucket is unlocked last: it redirects readers to the high one, which must be ready.
        if is_split(low.header().load(Ordering::Acquire)) || is_split(holds.hold(low)?.header()) {
            return Ok(());
        }
        holds.hold(high)?;
        let movers = self.movers(algorithm, &mut holds, low, now, level)?;
        let slot_refs = self.free_slots_above(algorithm, &mut holds, high, movers.len(), now)?;
        for (from, to) in movers.into_iter().zip(slot_refs) {
            self.clear_slot(algorithm, &mut holds, to);
            let (old, new) = (holds.cells(self, from), holds.cells(self, to));
            for index in 0..algorithm.words() {
                new.set(index, old.get(index));
                old.set(index, 0);
            }
            holds.reassign(self, to, from.bucket.fingerprint(from.slot));
            self.remove_from_old_table(&mut holds, from);
            self.mark_passed_by(&mut holds, high, to.bucket)?;
        }
        algorithm.inherit(&self.shared(high), &self.shared(low));
        // The low bucket last: it must not redirect readers to a bucket that would send them back.
        for bucket in [high, low] {
            holds.hold(bucket)?.set_level(level + 1);
            holds.write(bucket);
        }
        Ok(())
    }

    /// Returns the keys of a locked home bucket whose home will be the upper one, wherever in the run they are.
    fn movers<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        holds: &mut HeldBuckets<'a>,
        low: Bucket<'a>,
        now: u64,
        level: u32,
    ) -> Result<SlotRefs<'a>, Busy> {
        let mut movers = SlotRefs::new();
        let mut bucket = low;
        for _ in 0..self.run() {
            let passed_by = holds.hold(bucket)?.is_passed_by();
            for slot in 0..self.layout.slots {
                let fingerprint = bucket.fingerprint(slot);
                if fingerprint == EMPTY || self.home_at(fingerprint, level) != low.index {
                    continue;
                }
                let moves = self.home_at(fingerprint, level + 1) != low.index;
                if !moves && !self.looks_idle(algorithm, bucket, slot, now) {
                    continue;
                }
                let slot_ref = holds.lock_slot(self, bucket, slot)?;
                if algorithm.is_idle(&holds.cells(self, slot_ref), now) {
                    algorithm.clear(&holds.cells(self, slot_ref));
                    self.remove_from_old_table(holds, slot_ref);
                } else if moves {
                    movers.push(slot_ref);
                } else {
                    holds.unlock_slot(slot_ref);
                }
            }
            if !passed_by {
                break;
            }
            bucket = self.next_in_run(bucket);
        }
        Ok(movers)
    }

    /// Returns `count` free slots in the run of a locked bucket, nearest first. There are as many: see [blocks](self#blocks).
    fn free_slots_above<'a, R: LimitAlgorithm>(
        &'a self,
        algorithm: &R,
        holds: &mut HeldBuckets<'a>,
        high: Bucket<'a>,
        count: usize,
        now: u64,
    ) -> Result<SlotRefs<'a>, Busy> {
        let mut slot_refs = SlotRefs::new();
        let mut bucket = high;
        for _ in 0..self.run() {
            holds.hold(bucket)?;
            for slot in self.free_slots(algorithm, bucket, now) {
                if slot_refs.len() == count {
                    return Ok(slot_refs);
                }
                slot_refs.extend(self.claim_if_free(algorithm, holds, bucket, slot, now)?);
            }
            if slot_refs.len() == count {
                return Ok(slot_refs);
            }
            bucket = self.next_in_run(bucket);
        }
        Err(Busy::Held)
    }

    pub(super) fn remove_from_old_table<'a>(&'a self, holds: &mut HeldBuckets<'a>, slot_ref: SlotRef<'a>) {
        holds.reassign(self, slot_ref, EMPTY);
        self.occupied.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Buckets swept with each new key: a pass ends before the table is 1 % fuller.
const STEP: usize = 16;
/// Slots for each new key between two passes of a table that is crowded.
const CROWDED_INTERVAL: usize = 16;

impl Table {
    /// Returns whether more than four fifths of the slots are in use. Longer runs of full buckets would slow down
    /// lookups.
    pub(super) fn is_crowded(&self, slots: usize) -> bool {
        self.occupied.load(Ordering::Relaxed) * 5 > slots * 4
    }

    /// Returns whether a pass is in progress or due.
    fn is_sweep_due(&self, slots: usize) -> bool {
        let interval = if self.is_crowded(slots) { slots / CROWDED_INTERVAL } else { slots };
        self.swept.load(Ordering::Relaxed) > 0 || self.added.load(Ordering::Relaxed) > interval
    }

    /// Sweeps the next few of `buckets` buckets, and returns whether that ends a pass. For the thread that has set
    /// `growing`.
    pub(super) fn sweep<R: LimitAlgorithm>(&self, algorithm: &R, now: u64, buckets: usize) -> bool {
        let from = self.swept.load(Ordering::Relaxed);
        let until = (from + STEP).min(buckets);
        for index in from..until {
            let bucket = self.bucket(index);
            if self.has_idle(algorithm, bucket, now) {
                // A bucket that stays locked is left to the next pass.
                let _ = self.remove_idle(algorithm, bucket, now);
            }
            if (index + 1) % self.layout.block() == 0 {
                self.clear_flags(index);
            }
        }
        let is_over = until == buckets;
        self.swept.store(if is_over { 0 } else { until }, Ordering::Relaxed);
        if is_over {
            self.added.store(0, Ordering::Relaxed);
        }
        is_over
    }

    /// Returns whether a key of a bucket looks idle. It reads without the lock, so the result is only a hint.
    fn has_idle<R: LimitAlgorithm>(&self, algorithm: &R, bucket: Bucket<'_>, now: u64) -> bool {
        (0..self.layout.slots)
            .any(|slot| bucket.fingerprint(slot) != EMPTY && self.looks_idle(algorithm, bucket, slot, now))
    }

    /// Empties the slots of idle keys in a bucket.
    fn remove_idle<R: LimitAlgorithm>(&self, algorithm: &R, bucket: Bucket<'_>, now: u64) -> Result<(), Busy> {
        let mut holds = HeldBuckets::default();
        holds.hold(bucket)?;
        for slot in 0..self.layout.slots {
            if bucket.fingerprint(slot) != EMPTY && self.looks_idle(algorithm, bucket, slot, now) {
                let slot_ref = holds.lock_slot(self, bucket, slot)?;
                if algorithm.is_idle(&holds.cells(self, slot_ref), now) {
                    algorithm.clear(&holds.cells(self, slot_ref));
                    self.remove_from_old_table(&mut holds, slot_ref);
                } else {
                    holds.unlock_slot(slot_ref);
                }
            }
        }
        Ok(())
    }

    /// Clears the flags of a block that no key needs any more. Begins with the last bucket, so that the flags of later
    /// buckets are exact when a flag is recomputed.
    fn clear_flags(&self, last: usize) {
        let first = last + 1 - self.layout.block();
        for index in (first..=last).rev() {
            let bucket = self.bucket(index);
            if bucket.is_passed_by() {
                let mut holds = HeldBuckets::default();
                if let Ok(held) = holds.hold(bucket)
                    && !self.has_passing_key(bucket)
                {
                    held.clear_passed_by();
                }
            }
        }
    }

    /// Returns whether a key in a later bucket has passed by this locked bucket.
    fn has_passing_key(&self, bucket: Bucket<'_>) -> bool {
        let within = self.layout.block() - 1;
        let mut next = bucket;
        for distance in 1..self.run() {
            next = self.next_in_run(next);
            let passes = |slot| {
                let fingerprint = next.fingerprint(slot);
                // A key is in the block of its home, so the low bits of its fingerprint are the index of its home
                // there.
                let from_home = next.index.wrapping_sub(fingerprint as usize) & within;
                fingerprint != EMPTY && from_home >= distance
            };
            if (0..self.layout.slots).any(passes) {
                return true;
            }
            // The flag of a bucket that another thread has locked may be unpublished.
            if next.header().load(Ordering::Acquire) & (PASSED_BY | LOCKED) == 0 {
                break;
            }
        }
        false
    }
}

/// A table is replaced by one that takes at most this part of its memory. It grows when it is four fifths full, so a
/// number of keys that rises and falls by less than that changes nothing.
const PART: usize = 4;
/// Slots of a new table for each key: it is at most half full.
const SLOTS_PER_KEY: usize = 2;
/// A full budget does not keep a table from being replaced, as long as the new one takes at most this part of it: the
/// memory of the old one comes back soon.
const BEYOND: usize = 16;
/// Buckets to sample for an estimate of the number of keys.
const SAMPLE: usize = 1 << 10;

impl MemoryStore {
    /// Returns a store with the same limits and keys, and smaller tables instead of those that are mostly empty, or
    /// `None` if there are none. Frees replaced tables that no store uses any more.
    pub(crate) fn compacted(&self, now: Timestamp) -> Option<Self> {
        let now = now.as_micros();
        // A reload would choose from the same tables.
        let families = self.families.0.lock();
        for family in families.values() {
            family.drop_retired(now);
            free_replaced(family, now);
        }
        let (mut tables, mut usages) = (self.tables.clone(), self.usages.clone());
        let mut is_changed = false;
        let mut looked_at: HashSet<*const Table> = HashSet::new();
        for (index, family) in self.limit_families.iter().enumerate() {
            if !looked_at.insert(Arc::as_ptr(&self.tables[index])) {
                continue;
            }
            let Some((table, usage)) = replacement(family, &self.tables[index], now) else { continue };
            is_changed = true;
            // Variants may share the table.
            for (other, usage_of_other) in tables.iter_mut().zip(&mut usages) {
                if Arc::ptr_eq(other, &self.tables[index]) {
                    (*other, *usage_of_other) = (table.clone(), usage.clone());
                }
            }
        }
        drop(families);
        is_changed.then(|| Self {
            first: tables.first().cloned(),
            tables,
            limit_families: self.limit_families.clone(),
            usages,
            families: self.families.clone(),
            secret: self.secret.clone(),
            seed: self.seed,
            budget: self.budget.clone(),
        })
    }
}

/// Adds a smaller table of the same meaning to the family, if the table is mostly empty.
fn replacement(family: &Family, table: &Arc<Table>, now: u64) -> Option<(Arc<Table>, Arc<Usage>)> {
    let members = family.members();
    let member = members.tables.iter().find(|member| Arc::ptr_eq(&member.table, table))?;
    // One replacement at a time: otherwise a store that is never dropped could keep any number of tables.
    if member.replaces.is_some() || members.tables.iter().any(|other| other.replaces(table)) {
        return None;
    }
    let smaller = with_algorithm!(&member.algorithm, algorithm => table.smaller(algorithm, now))?;
    let (smaller, usage) = (Arc::new(smaller), Arc::new(Usage));
    let mut member = Member::new(&smaller, &member.algorithm, &usage);
    member.replaces = Some(Arc::downgrade(table));
    family.add(member);
    Some((smaller, usage))
}

/// Frees the table that another one of the family replaces, unless a store still uses it or there is no room for its
/// keys.
fn free_replaced(family: &Family, now: u64) {
    let members = family.members();
    for new in members.tables.iter().filter(|member| member.is_in_use()) {
        let old = members.tables.iter().find(|old| new.replaces(&old.table) && old.can_be_emptied(now));
        if let Some(old) = old {
            // If there is no room, it stays until its keys are at rest.
            let _ = tables::empty(family, old, new, now);
        }
    }
}

impl FamilyView<'_> {
    /// Returns the table that this one replaces, while that has keys.
    pub(super) fn replaced(self) -> Option<Arc<Table>> {
        let members = self.family.if_several()?;
        let member = members.tables.iter().find(|member| std::ptr::eq(&*member.table, self.table))?;
        member.replaces.as_ref().and_then(Weak::upgrade)
    }
}

impl Table {
    /// Returns an empty table with room for the live keys of this one, if it takes much less memory.
    fn smaller<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) -> Option<Self> {
        self.smaller_level(self.estimated_keys(algorithm, now))?;
        let level = self.smaller_level(self.live_keys(algorithm, now))?;
        // Keys without a slot are charged to floors, whose buckets differ in a table of another size.
        if !self.has_idle_floors(algorithm, now) {
            return None;
        }
        let mut table = Self::of_level(self.layout, level, &self.budget)?;
        table.overflow = self.overflow.clone();
        Some(table)
    }

    /// Returns the level of a table for `keys` keys, if it takes much less memory than this one.
    fn smaller_level(&self, keys: usize) -> Option<u32> {
        let level = self.level_for(keys);
        let segments = self.buckets_at(level) * self.layout.stride() * size_of::<u64>();
        // Until the next sweep, keys at rest have log entries too.
        let occupied = self.occupied.load(Ordering::Relaxed).max(1);
        let entries = self.spill.bytes_in_use() / occupied * keys;
        (segments.saturating_add(entries) <= self.bytes() / PART).then_some(level)
    }

    /// Returns the level at which a table has enough slots for `keys` keys.
    fn level_for(&self, keys: usize) -> u32 {
        let slots = self.layout.slots << self.layout.block_bits;
        let blocks = keys.saturating_mul(SLOTS_PER_KEY).div_ceil(slots);
        blocks.next_power_of_two().ilog2()
    }

    /// Estimates the number of keys that are not at rest from a sample of buckets.
    fn estimated_keys<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) -> usize {
        let (level, split) = self.extent();
        let buckets = self.buckets_at(level) + split;
        let step = (buckets / SAMPLE).max(1);
        let sample = (0..buckets).step_by(step).map(|index| self.live_in(algorithm, self.bucket(index), now));
        sample.sum::<usize>() * step
    }

    /// Creates an empty table of a level, if the budget has the memory or it is a small part of the budget.
    fn of_level(layout: Layout, level: u32, budget: &Budget) -> Option<Self> {
        let words = Self::first_words(layout) << level;
        if !budget.has(words) && words * size_of::<u64>() > budget.max() / BEYOND {
            return None;
        }
        let table = Self::new(layout, budget.clone())?;
        for segment in 1..=level as usize {
            let _ = table.segments[segment].set(budget.take_anyway(table.words_in(segment))?);
        }
        let header = header_at(level);
        table.buckets().for_each(|bucket| bucket.header().store(header, Ordering::Relaxed));
        table.extent.store(u64::from(level) << 32, Ordering::Release);
        Some(table)
    }
}

#[cfg(test)]
mod tests {
    use super::super::table::hold_unchanged;
    use super::super::{HashedHit, Mode};
    use super::*;
    use crate::decision::LimitId;
    use crate::{FixedWindow, Limit, MINUTE};

    /// A thread may read the size of a table, sleep, and go on after the table has doubled more than once.
    #[test]
    fn a_key_is_found_from_every_bucket_that_was_its_home() {
        let table = Table::new(Layout::new(1, 2), Budget::new(1 << 20)).expect("enough memory");
        let limit = Limit::new("limit", FixedWindow::new(10, MINUTE)).expect("a valid limit");
        let grow = |level: u32, buckets: usize| {
            table.add_segment(level as usize + 1).expect("enough memory");
            for index in 0..buckets {
                with_algorithm!(limit.compiled(), algorithm => table.split(algorithm, 0, index, level))
                    .expect("no lock");
            }
        };
        (0..2).for_each(|level| grow(level, table.buckets_at(level)));
        grow(2, 100);
        table.extent.store(2 << 32 | 100, Ordering::Release);
        for fingerprint in 1..2_048_u64 {
            let home = table.home(fingerprint).0;
            for level in 0..=2 {
                let mut bucket = table.bucket(table.home_at(fingerprint, level));
                for _ in 0..SEGMENTS {
                    let header = bucket.header().load(Ordering::Acquire);
                    bucket = table.split_target(bucket, header, fingerprint).unwrap_or(bucket);
                }
                assert_eq!(bucket.index, home.index, "key {fingerprint} from its home at level {level}");
            }
        }
    }

    fn takes(table: &Table, limit: &Limit, fingerprint: u64) -> bool {
        let hit = HashedHit { limit: LimitId::first(), fingerprint, cost: 1 };
        with_algorithm!(limit.compiled(), algorithm => table.decide(algorithm, None, hit, 0, Mode::Take)).is_allowed()
    }

    /// Tries once to add a key. If there is no room, makes some.
    fn adds(table: &Table, limit: &Limit, fingerprint: u64) -> bool {
        with_algorithm!(limit.compiled(), algorithm => {
            let mut holds = HeldBuckets::default();
            let slot_ref = table.hold_slot(algorithm, &mut holds, fingerprint, 0);
            let Ok(Some(slot_ref)) = slot_ref else {
                drop(holds);
                table.make_room(algorithm, fingerprint, 0);
                return false;
            };
            if let Some(edit) = algorithm.decide(&holds.cells(table, slot_ref), 0, 1).edit {
                table.apply(algorithm, &mut holds, slot_ref, edit, 0);
            }
            drop(holds);
            table.maintain(algorithm, 0);
            true
        })
    }

    fn held(table: &Table, index: usize) -> super::super::table::Held<'_> {
        let bucket = table.bucket(index);
        hold_unchanged(bucket, bucket.header().load(Ordering::Acquire)).expect("no thread has it locked")
    }

    #[test]
    fn a_step_that_ends_early_leaves_the_next_block_and_the_end_of_the_level_alone() {
        let budget = Budget::new(1 << 20);
        let table = Table::of_level(Layout::new(1, 2), 1, &budget).expect("enough memory");
        let limit = Limit::new("limit", FixedWindow::new(10, MINUTE)).expect("a valid limit");
        let locked = held(&table, 70);
        // Keys of the first of two blocks.
        assert!((1..).zip((0..64).cycle()).take(800).all(|(number, home)| takes(&table, &limit, number << 7 | home)));
        assert_eq!(table.extent(), (1, 70));
        drop(locked);
        assert!((1..=400).all(|number| takes(&table, &limit, number << 13 | 1 << 12)));
        let (level, split) = table.extent();
        assert!(level >= 2, "{level} {split}");
    }

    /// A thread that splits a bucket may be preempted for long, and threads with new keys are not.
    #[test]
    fn a_table_grows_on_after_a_long_pause_in_a_split() {
        for locked in (0..64).step_by(9) {
            let table = Table::new(Layout::new(1, 2), Budget::new(1 << 20)).expect("enough memory");
            let limit = Limit::new("limit", FixedWindow::new(10, MINUTE)).expect("a valid limit");
            // Half of the keys of the bucket move when it is split.
            assert!((1..=4).all(|key| takes(&table, &limit, key << 6 | locked)));
            let held = held(&table, locked as usize);
            // Keys that belong in the upper block, and not in the bucket that is locked: more than two blocks have slots.
            let others = (0..64).filter(|home| *home != locked).cycle();
            let keys = (1..).zip(others).map(|(number, home)| number << 7 | 1 << 6 | home).take(1_200);
            let waiting: Vec<u64> = keys.filter(|key| !adds(&table, &limit, *key)).collect();
            assert!(waiting.len() > 700, "a partly split block gets no keys");
            drop(held);
            assert!(waiting.iter().all(|key| takes(&table, &limit, *key)));
            assert_eq!(table.occupied.load(Ordering::Relaxed), 1_204);
        }
    }

    #[test]
    fn a_block_that_is_partly_split_gets_no_keys_while_a_lock_stops_the_growth() {
        let budget = Budget::new(1 << 20);
        let table = Table::of_level(Layout::new(1, 2), 1, &budget).expect("enough memory");
        let limit = Limit::new("limit", FixedWindow::new(10, MINUTE)).expect("a valid limit");
        assert!((1..=4).all(|key| takes(&table, &limit, key << 7 | 124)));
        with_algorithm!(limit.compiled(), algorithm => {
            table.grow(algorithm, 0, 64);
            assert_eq!(table.extent(), (1, 64));
            let last = held(&table, 124);
            assert!(!table.split_block(algorithm, 0, 1, 1));
            let first = held(&table, 64);
            // Each key of the other block makes the table try to grow.
            let others = (1..).zip((0..64).cycle()).map(|(number, home)| number << 7 | home);
            let keys = (1..).zip((65..124).cycle()).map(|(number, home)| number << 8 | 1 << 7 | home);
            let keys: Vec<(u64, u64)> = others.zip(keys).take(700).collect();
            for (other, key) in &keys {
                assert!(takes(&table, &limit, *other));
                assert!(!adds(&table, &limit, *key), "a partly split block gets no keys");
            }
            drop((first, last));
            assert!(keys.iter().all(|(_, key)| takes(&table, &limit, *key)));
        });
    }

    #[test]
    fn a_table_has_room_for_twice_its_keys() {
        let budget = Budget::new(1 << 20);
        let table = Table::new(Layout::new(1, 2), budget.clone()).expect("enough memory");
        let slots = 64 * Layout::SHORT_SLOTS;
        let levels = [0, 1, slots / 2, slots / 2 + 1, slots, 8 * slots].map(|keys| table.level_for(keys));
        assert_eq!(levels, [0, 0, 0, 1, 1, 4]);
        let table = Table::of_level(table.layout, 3, &budget).expect("enough memory");
        assert_eq!((table.extent(), table.buckets().count()), ((3, 0), 512));
        assert!(table.buckets().all(|bucket| table.home(bucket.index as u64).0.is(bucket)));
        assert!(Table::of_level(table.layout, 10, &budget).is_none(), "the budget has no room for it");
        assert_eq!(budget.used(), 9 * 64 * 128);
    }
}

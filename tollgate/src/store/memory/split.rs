//! Splitting a bucket: half of its keys move to a new bucket.

use smallvec::SmallVec;

use super::bucket::{Bucket, Busy, EMPTY};
use super::holds::{HeldBuckets, SlotRef};
use super::table::Table;
use crate::algorithm::{LimitAlgorithm, StateWords};
use crate::sync::Ordering;

type SlotRefs<'a> = SmallVec<[SlotRef<'a>; 16]>;

impl Table {
    /// Splits bucket `index` of a table of that level, unless it is split already, and returns the number of freed
    /// slots. Keys at rest are dropped.
    pub(super) fn split<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        now: u64,
        index: usize,
        level: u32,
    ) -> Result<usize, Busy> {
        let mut holds = HeldBuckets::default();
        let (low, high) = (self.bucket(index), self.upper(index, level));
        // The low bucket is unlocked last: it redirects readers to the high one, which must be ready.
        if holds.hold(low)?.level() != level {
            return Ok(0);
        }
        holds.hold(high)?;
        let movers = self.movers(algorithm, &mut holds, low, now, level)?;
        let slot_refs = self.free_slots_above(algorithm, &mut holds, high, movers.len(), now)?;
        let freed = movers.len();
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
        for bucket in [low, high] {
            holds.hold(bucket)?.set_level(level + 1);
            holds.write(bucket);
        }
        Ok(freed)
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

    /// Returns `count` free slots in the run of a locked bucket, nearest first, or `Busy` if there are fewer.
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

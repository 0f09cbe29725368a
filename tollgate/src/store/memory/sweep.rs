//! The sweep: frees the slots of idle keys and clears outdated flags, in a few buckets with each new key.
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

use super::bucket::{Bucket, Busy, EMPTY, LOCKED, PASSED_BY};
use super::holds::HeldBuckets;
use super::table::Table;
use crate::algorithm::LimitAlgorithm;
use crate::sync::Ordering;

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
    pub(super) fn is_sweep_due(&self, slots: usize) -> bool {
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

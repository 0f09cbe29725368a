//! Growth of a table: by a few buckets with each new key, never all at once, and only after a sweep (`sweep.rs`) has
//! left it crowded with live keys.

use super::bucket::Bucket;
use super::table::{SEGMENTS, Table};
use crate::algorithm::LimitAlgorithm;
use crate::sync::{AtomicBool, Ordering};

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
        self.exclusively(|| self.grow(algorithm, now));
    }

    /// Runs `work`, unless another thread is sweeping or growing the table.
    fn exclusively(&self, work: impl FnOnce()) {
        if !self.growing.swap(true, Ordering::Acquire) {
            let _growing = Growing(&self.growing);
            work();
        }
    }

    fn sweep_or_grow<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) {
        let (level, split) = self.extent();
        let buckets = self.buckets_at(level);
        let is_full = || self.is_crowded(buckets * self.layout.slots);
        if split > 0 || (self.sweep(algorithm, now, buckets) && is_full() && self.can_grow()) {
            self.grow(algorithm, now);
        }
    }

    /// Splits the next few buckets.
    fn grow<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) {
        /// Splits per new key: enough to complete a doubling long before the next is due.
        const STEP: usize = 4;

        let (level, mut split) = self.extent();
        if self.add_segment(level as usize + 1).is_some() {
            let buckets = self.buckets_at(level);
            let until = (split + STEP).min(buckets);
            while split < until && self.split(algorithm, now, split, level).is_ok() {
                split += 1;
            }
            let (level, split) = if split == buckets { (level + 1, 0) } else { (level, split) };
            self.extent.store(u64::from(level) << 32 | split as u64, Ordering::Release);
        }
    }

    /// Makes room for a new key by splitting the buckets of its run early, instead of waiting for all others to be
    /// split.
    #[cold]
    pub(super) fn make_room<R: LimitAlgorithm>(&self, algorithm: &R, fingerprint: u64, now: u64) {
        let (level, _) = self.extent();
        self.exclusively(|| self.grow(algorithm, now));
        if self.segments[level as usize + 1].get().is_none() {
            return;
        }
        let mut index = self.home_at(fingerprint, level);
        for _ in 0..self.run() {
            // Splitting a bucket frees slots, wherever in the run its keys are.
            if self.split(algorithm, now, index, level).is_ok_and(|freed| freed > 0) {
                return;
            }
            index = self.next_in_run(self.bucket(index)).index;
        }
    }

    /// Returns the bucket to which half of a bucket's keys move when it splits.
    pub(super) fn upper(&self, index: usize, level: u32) -> Bucket<'_> {
        self.bucket(index + self.buckets_at(level))
    }
}

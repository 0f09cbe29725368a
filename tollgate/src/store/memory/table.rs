//! A concurrent hash table: the words of each key, by a 64-bit fingerprint, in buckets of a few slots.
//!
//! A key is in its home bucket or, if that is full, in one of the next buckets of the same block of 64. A flag in the
//! header makes lookups continue. A thread that adds a key locks its home bucket, so no key is added twice.
//!
//! The table grows in place by linear hashing: bucket `i` of `n` splits into `i` and `i + n`, a few buckets with each
//! new key, never all at once. The memory for the upper half is one segment that never moves. A bucket's header records
//! how often it has split, so a reader with an outdated size is redirected.
//!
//! When the memory is full, new keys replace keys at rest or share words: see `claim.rs`.

use std::sync::{Arc, OnceLock};

use super::bucket::{Bucket, LOCKED, Layout, PASSED_BY, Slot, level_of, pause, unchanged};
use super::word::WordRef;
use crate::algorithm::spill::Spill;
use crate::budget::{Budget, Words};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Segments double, so this many hold more than any machine does.
pub(super) const SEGMENTS: usize = 40;

/// The fields that every decision reads come first, on other cache lines than the counts that every new key changes.
#[repr(C, align(64))]
pub(crate) struct Table {
    pub(super) layout: Layout,
    /// The level in the upper half, and the next bucket to split in the lower half. Only a hint for readers.
    pub(super) extent: AtomicU64,
    pub(super) segments: [OnceLock<Words>; SEGMENTS],
    /// Slots that are not empty.
    pub(super) occupied: AtomicUsize,
    /// Keys that got a slot since the last sweep.
    pub(super) added: AtomicUsize,
    pub(super) overflow: Arc<OverflowCounts>,
    /// Buckets that the current sweep has visited; 0 if no sweep is in progress.
    pub(super) swept: AtomicUsize,
    /// Whether a thread is sweeping the table or growing it.
    pub(super) growing: AtomicBool,
    pub(super) spill: Spill,
    pub(super) budget: Budget,
}

/// How often keys have lacked a slot. A table that replaces another goes on with its counts.
#[derive(Default)]
pub(super) struct OverflowCounts {
    /// Keys that lost their slot to another before they were idle.
    pub(super) evicted: AtomicU64,
    /// Denials of keys without a slot, because of other keys' charges.
    pub(super) denied: AtomicU64,
}

/// The location of a key, and the header of its bucket when it was found.
#[derive(Clone, Copy)]
pub(super) struct Found<'a> {
    pub(super) bucket: Bucket<'a>,
    pub(super) slot: usize,
    pub(super) header: u64,
}

impl Table {
    /// Creates a table with its first block of buckets, or returns `None` if the allocation fails. The caller checks
    /// the budget.
    pub(super) fn new(layout: Layout, budget: Budget) -> Option<Self> {
        let first = budget.take_anyway(Self::first_words(layout))?;
        let table = Self {
            layout,
            extent: AtomicU64::new(0),
            segments: [const { OnceLock::new() }; SEGMENTS],
            occupied: AtomicUsize::new(0),
            added: AtomicUsize::new(0),
            overflow: Arc::default(),
            swept: AtomicUsize::new(0),
            growing: AtomicBool::new(false),
            spill: Spill::new(budget.clone()),
            budget,
        };
        let _ = table.segments[0].set(first);
        Some(table)
    }

    /// Returns the number of words that a table begins with.
    pub(super) fn first_words(layout: Layout) -> usize {
        layout.block() * layout.stride()
    }

    /// Returns the number of buckets at a level.
    #[inline]
    pub(super) fn buckets_at(&self, level: u32) -> usize {
        1 << (self.layout.block_bits + level)
    }

    #[inline]
    pub(super) fn extent(&self) -> (u32, usize) {
        let extent = self.extent.load(Ordering::Acquire);
        ((extent >> 32) as u32, (extent & 0xffff_ffff) as usize)
    }

    #[inline(always)]
    fn locate(&self, bucket: usize) -> (usize, usize) {
        let level = (bucket >> self.layout.block_bits).checked_ilog2();
        level.map_or((0, bucket), |level| (level as usize + 1, bucket - self.buckets_at(level)))
    }

    /// Returns whether there is a bucket of that index by now.
    pub(super) fn has_bucket(&self, index: usize) -> bool {
        self.segments.get(self.locate(index).0).is_some_and(|segment| segment.get().is_some())
    }

    /// Returns the bucket of that index. Indexes are derived from levels in headers and the extent, which are written
    /// after the segment exists.
    #[inline(always)]
    pub(super) fn bucket(&self, index: usize) -> Bucket<'_> {
        let (segment, offset) = self.locate(index);
        let words = self.segments[segment]
            .get()
            .map_or(&[][..], |words| words.run(offset * self.layout.stride(), self.layout.stride()));
        Bucket::new(index, words, self.layout)
    }

    /// Returns the word of a key that was found, for keys of one word.
    pub(super) fn word_ref<'a>(&'a self, found: Found<'a>) -> WordRef<'a> {
        let Found { bucket, slot, header } = found;
        WordRef { header_word: bucket.header(), header, word: &bucket.words_of(slot, self.layout)[0] }
    }

    /// Returns the words of a slot, or the shared words for the index after the last slot.
    #[inline]
    pub(super) fn slot<'a>(&'a self, bucket: Bucket<'a>, slot: usize) -> Slot<'a> {
        Slot::new(bucket.words_of(slot, self.layout), &self.spill)
    }

    pub(super) fn next_in_run<'a>(&'a self, bucket: Bucket<'a>) -> Bucket<'a> {
        let within = self.layout.block() - 1;
        let next = bucket.index & !within | (bucket.index + 1) & within;
        self.bucket(next)
    }

    /// Returns the length of a run: a whole block. At four fifths full, a block of 64 buckets overflows once in a
    /// million; a run of 16 would overflow once in a thousand.
    pub(super) fn run(&self) -> usize {
        self.layout.block()
    }

    /// Returns the home of a fingerprint after its bucket has split to `level`.
    #[inline(always)]
    pub(super) fn home_at(&self, fingerprint: u64, level: u32) -> usize {
        fingerprint as usize & (self.buckets_at(level) - 1)
    }

    /// Returns the probable home of a fingerprint. It is wrong only for the bucket that is currently being split.
    #[inline(always)]
    pub(super) fn probable_home(&self, fingerprint: u64) -> Bucket<'_> {
        self.bucket(self.probable_index(fingerprint))
    }

    #[inline(always)]
    fn probable_index(&self, fingerprint: u64) -> usize {
        let (level, split) = self.extent();
        let index = self.home_at(fingerprint, level);
        if index < split { self.home_at(fingerprint, level + 1) } else { index }
    }

    /// Returns the probable home in a table of short buckets.
    #[inline(always)]
    pub(super) fn short_bucket(&self, fingerprint: u64) -> Option<(usize, &[AtomicU64; Layout::SHORT_STRIDE])> {
        let index = self.probable_index(fingerprint);
        let (segment, offset) = self.locate(index);
        let words = self.segments[segment].get()?.run(offset * Layout::SHORT_STRIDE, Layout::SHORT_STRIDE);
        Some((index, words.try_into().ok()?))
    }

    /// Returns the home bucket of a fingerprint, and its header.
    #[inline(always)]
    pub(super) fn home(&self, fingerprint: u64) -> (Bucket<'_>, u64) {
        let (bucket, header) = self.prefetch(fingerprint);
        self.home_from(bucket, header, fingerprint)
    }

    /// Returns the home bucket of a fingerprint, starting from a bucket whose header has been read.
    #[inline(always)]
    fn home_from<'a>(&'a self, mut bucket: Bucket<'a>, mut header: u64, fingerprint: u64) -> (Bucket<'a>, u64) {
        loop {
            if header & LOCKED != 0 {
                header = self.wait_until_unlocked(bucket);
            }
            match self.split_target(bucket, header, fingerprint) {
                None => return (bucket, header),
                Some(next) => (bucket, header) = (next, next.header().load(Ordering::Acquire)),
            }
        }
    }

    /// Returns the bucket that a key has moved to, if this bucket was split according to its header.
    #[inline(always)]
    pub(super) fn split_target(&self, bucket: Bucket<'_>, header: u64, fingerprint: u64) -> Option<Bucket<'_>> {
        let home = self.home_at(fingerprint, level_of(header));
        (home != bucket.index).then(|| self.bucket(home))
    }

    /// Waits until a bucket is unlocked, and returns its header.
    #[cold]
    #[inline(never)]
    fn wait_until_unlocked(&self, bucket: Bucket<'_>) -> u64 {
        let mut spins = 0;
        loop {
            let header = bucket.header().load(Ordering::Acquire);
            if header & LOCKED == 0 {
                return header;
            }
            spins = pause(spins);
        }
    }

    /// Prefetches the bucket where a key probably is.
    #[inline(always)]
    pub(super) fn prefetch(&self, fingerprint: u64) -> (Bucket<'_>, u64) {
        let bucket = self.probable_home(fingerprint);
        (bucket, bucket.header().load(Ordering::Acquire))
    }

    /// Finds a key.
    pub(super) fn find(&self, fingerprint: u64) -> Option<Found<'_>> {
        self.find_from(self.prefetch(fingerprint), fingerprint)
    }

    #[inline(always)]
    pub(super) fn find_from<'a>(&'a self, near: (Bucket<'a>, u64), fingerprint: u64) -> Option<Found<'a>> {
        let (bucket, header) = self.home_from(near.0, near.1, fingerprint);
        match self.slot_of(bucket, fingerprint) {
            Some(slot) => Some(Found { bucket, slot, header }),
            None => self.find_further(fingerprint),
        }
    }

    #[cold]
    #[inline(never)]
    fn find_further(&self, fingerprint: u64) -> Option<Found<'_>> {
        loop {
            let (home, home_header) = self.home(fingerprint);
            let (mut bucket, mut header) = (home, home_header);
            for _ in 0..self.run() {
                if let Some(slot) = self.slot_of(bucket, fingerprint) {
                    return Some(Found { bucket, slot, header });
                }
                if header & PASSED_BY == 0 {
                    break;
                }
                bucket = self.next_in_run(bucket);
                header = self.wait_until_unlocked(bucket);
            }
            // A key is only moved or added with its home locked, so if the home is unchanged, the key was not there.
            if unchanged(home, home_header) {
                return None;
            }
        }
    }

    #[inline(always)]
    pub(super) fn slot_of(&self, bucket: Bucket<'_>, fingerprint: u64) -> Option<usize> {
        bucket.slot_of(fingerprint, self.layout)
    }

    /// Returns the number of slots, empty ones included. While the table grows, it is an estimate.
    pub(super) fn slots(&self) -> usize {
        let (level, split) = self.extent();
        (self.buckets_at(level) + split) * self.layout.slots
    }

    pub(super) fn words_in(&self, segment: usize) -> usize {
        let buckets = if segment == 0 { self.buckets_at(0) } else { self.buckets_at(segment as u32 - 1) };
        buckets * self.layout.stride()
    }

    /// Returns the bytes of its segments and of the chunks of its logs.
    pub(super) fn bytes(&self) -> usize {
        self.segments.iter().filter_map(OnceLock::get).map(Words::bytes).sum::<usize>() + self.spill.bytes()
    }

    pub(super) fn add_segment(&self, segment: usize) -> Option<()> {
        if self.segments.get(segment)?.get().is_none() {
            let words = self.budget.take(self.words_in(segment))?;
            let _ = self.segments[segment].set(words);
        }
        Some(())
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.segments.iter().filter_map(OnceLock::get).for_each(|words| self.budget.give_back(words));
    }
}

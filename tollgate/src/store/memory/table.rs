//! A concurrent table of keys: the words of each, found by a 64-bit fingerprint, in buckets of a few slots.
//!
//! A key lives in its home bucket, or when that is full in one of the next of the same block of 64; a flag in the
//! header says when to look further. Whoever adds a key holds its home bucket, so no key is added twice.
//!
//! The table grows in place by linear hashing: bucket `i` of `n` splits into `i` and `i + n`, a few buckets
//! with each new key, never all at once. The memory for the upper half is one segment that never moves. A
//! bucket's header knows how often it has split, so a reader with an old idea of the size is led on.
//!
//! When the memory is spent, keys at rest make room, and if there are none, keys without a slot share one: see
//! `new key.rs`.

use std::sync::{Arc, OnceLock};

use super::bucket::{Bucket, LOCKED, Layout, PASSED_BY, Slot, level_of, pause, unchanged};
use super::word::WordRef;
use crate::algorithm::spill::Spill;
use crate::budget::{Budget, Words};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Segments double, so this many hold more than any machine does.
pub(super) const SEGMENTS: usize = 40;

/// In this order, so that what every decision reads comes together, away from the count that every new key changes.
#[repr(C, align(64))]
pub(crate) struct Table {
    pub(super) layout: Layout,
    /// The level in the upper half, the next bucket to split in the lower. Only a hint to readers.
    pub(super) extent: AtomicU64,
    pub(super) segments: [OnceLock<Words>; SEGMENTS],
    /// Slots that are not empty.
    pub(super) occupied: AtomicUsize,
    /// Keys that got a slot since the last sweep.
    pub(super) added: AtomicUsize,
    pub(super) overflow: Arc<OverflowCounts>,
    /// Buckets that the current sweep has visited; 0 if no sweep is under way.
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
    /// Denials of keys that have no slot, by what others have spent.
    pub(super) denied: AtomicU64,
}

/// Where a key was found, and the header of its bucket when it was.
#[derive(Clone, Copy)]
pub(super) struct Found<'a> {
    pub(super) bucket: Bucket<'a>,
    pub(super) slot: usize,
    pub(super) header: u64,
}

impl Table {
    /// A table with its first block of buckets, or `None` when the machine has not even that. Whether the budget has
    /// it is for the caller to see.
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

    /// The words that a table begins with.
    pub(super) fn first_words(layout: Layout) -> usize {
        layout.block() * layout.stride()
    }

    /// Buckets before the sweep that is under way, if one is.
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

    /// The bucket of that index. Indexes come from levels that headers and the extent speak of, and those are
    /// written after the segment is there.
    #[inline(always)]
    pub(super) fn bucket(&self, index: usize) -> Bucket<'_> {
        let (segment, offset) = self.locate(index);
        let words = self.segments[segment]
            .get()
            .map_or(&[][..], |words| words.run(offset * self.layout.stride(), self.layout.stride()));
        Bucket::new(index, words, self.layout)
    }

    /// The word of a key that was found, if it has one.
    pub(super) fn word_ref<'a>(&'a self, found: Found<'a>) -> WordRef<'a> {
        let Found { bucket, slot, header } = found;
        WordRef { header_word: bucket.header(), header, word: &bucket.words_of(slot, self.layout)[0] }
    }

    /// The words of a slot, or past the last slot the shared ones.
    #[inline]
    pub(super) fn slot<'a>(&'a self, bucket: Bucket<'a>, slot: usize) -> Slot<'a> {
        Slot::new(bucket.words_of(slot, self.layout), &self.spill)
    }

    pub(super) fn next_in_run<'a>(&'a self, bucket: Bucket<'a>) -> Bucket<'a> {
        let within = self.layout.block() - 1;
        let next = bucket.index & !within | (bucket.index + 1) & within;
        self.bucket(next)
    }

    /// How far a run may reach before it comes round to its beginning: all of a block. At four fifths full a
    /// block of 64 buckets overflows once in a million; a run of 16 would, once in a thousand.
    pub(super) fn run(&self) -> usize {
        self.layout.block()
    }

    /// The home of a fingerprint once its bucket has split to `level`.
    #[inline(always)]
    pub(super) fn home_at(&self, fingerprint: u64, level: u32) -> usize {
        fingerprint as usize & (self.buckets_at(level) - 1)
    }

    /// Where to begin looking for the home of a fingerprint: right but for the bucket that is splitting now.
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

    /// The same in a table of short buckets.
    #[inline(always)]
    pub(super) fn short_bucket(&self, fingerprint: u64) -> Option<(usize, &[AtomicU64; Layout::SHORT_STRIDE])> {
        let index = self.probable_index(fingerprint);
        let (segment, offset) = self.locate(index);
        let words = self.segments[segment].get()?.run(offset * Layout::SHORT_STRIDE, Layout::SHORT_STRIDE);
        Some((index, words.try_into().ok()?))
    }

    /// The home bucket of a fingerprint, and its header.
    #[inline(always)]
    pub(super) fn home(&self, fingerprint: u64) -> (Bucket<'_>, u64) {
        let (bucket, header) = self.prefetch(fingerprint);
        self.home_from(bucket, header, fingerprint)
    }

    /// The home bucket of a fingerprint, looked for from a bucket whose header has been read.
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

    /// The bucket where a key lives that has moved on from this one, by what its header says.
    #[inline(always)]
    pub(super) fn split_target(&self, bucket: Bucket<'_>, header: u64, fingerprint: u64) -> Option<Bucket<'_>> {
        let home = self.home_at(fingerprint, level_of(header));
        (home != bucket.index).then(|| self.bucket(home))
    }

    /// The header of a bucket once nobody holds it.
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

    /// Asks for the bucket where a key probably is, long before it is looked into.
    #[inline(always)]
    pub(super) fn prefetch(&self, fingerprint: u64) -> (Bucket<'_>, u64) {
        let bucket = self.probable_home(fingerprint);
        (bucket, bucket.header().load(Ordering::Acquire))
    }

    /// Where a key is, if it is there.
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
            // A key is only moved or added by someone who holds its home, so if the home is as it was, the key
            // was not there.
            if unchanged(home, home_header) {
                return None;
            }
        }
    }

    #[inline(always)]
    pub(super) fn slot_of(&self, bucket: Bucket<'_>, fingerprint: u64) -> Option<usize> {
        bucket.slot_of(fingerprint, self.layout)
    }

    pub(super) fn words_in(&self, segment: usize) -> usize {
        let buckets = if segment == 0 { self.buckets_at(0) } else { self.buckets_at(segment as u32 - 1) };
        buckets * self.layout.stride()
    }

    /// The bytes of its segments and of the entries of its logs.
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

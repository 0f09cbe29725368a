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
//!
//! # Buckets
//!
//! A bucket is a pair of cache lines, or a few: a header, then slots of a fingerprint and the words of its key,
//! and at the end the words that keys without a slot share. The header holds a lock and a version.
//!
//! A key whose state is one word is decided by replacing that word: see `decide.rs`. The header is only read. A key
//! whose state is longer is decided under the lock: a decision reads the bucket without writing to it, computes, and
//! then takes the lock by replacing exactly the header it read, so that one compare-and-swap both proves that nothing
//! changed in the meantime and claims the bucket. Fingerprints change under the lock only. A denial writes nothing at
//! all, so a flood of them shares the cache line.

use std::sync::{Arc, OnceLock};

use crate::algorithm::StateWords;
use crate::algorithm::spill::Spill;
use crate::budget::{Budget, Words};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence, spin_loop, yield_now};

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
    /// The number of the partly split block, counted from 1, or 0 without one. Only the growing thread writes it.
    pub(super) splitting: AtomicUsize,
    pub(super) spill: Spill,
    pub(super) budget: Budget,
}

/// How often keys have lacked a slot. All tables of a limit share these counts.
#[derive(Default)]
pub(super) struct OverflowCounts {
    /// Keys that lost their slot to another before they were idle.
    pub(super) evicted: AtomicU64,
    /// Denials of keys without a slot, because of other keys' charges.
    pub(super) denied: AtomicU64,
    /// Changes of keys without a slot that no floor counts.
    pub(super) lost: AtomicU64,
}

impl OverflowCounts {
    pub(super) fn count_denial(&self) {
        self.denied.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }
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
            splitting: AtomicUsize::new(0),
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

    /// Returns the next bucket on the way to a key, if this bucket was split according to its header and the key has
    /// left it.
    #[inline(always)]
    pub(super) fn split_target(&self, bucket: Bucket<'_>, header: u64, fingerprint: u64) -> Option<Bucket<'_>> {
        let home = self.home_at(fingerprint, level_of(header));
        (home != bucket.index).then(|| self.split_target_of(bucket.index, home))
    }

    /// Returns the bucket that a key moved to when it left bucket `left`, at the first split that separated the two.
    ///
    /// Not `home`, its home after the last split: a thread that has slept since it read the size of the table may see a
    /// bucket that was split several times, and the bucket that the key moved to may not be that far.
    #[cold]
    #[inline(never)]
    fn split_target_of(&self, left: usize, home: usize) -> Bucket<'_> {
        let first_difference = (home ^ left).trailing_zeros();
        self.bucket(home & (usize::MAX >> (usize::BITS - 1 - first_difference)))
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
    fn find_from<'a>(&'a self, near: (Bucket<'a>, u64), fingerprint: u64) -> Option<Found<'a>> {
        let (bucket, header) = self.home_from(near.0, near.1, fingerprint);
        match self.slot_of(bucket, fingerprint) {
            Some(slot) => Some(Found { bucket, slot, header }),
            None => self.find_further(fingerprint),
        }
    }

    #[cold]
    #[inline(never)]
    fn find_further(&self, fingerprint: u64) -> Option<Found<'_>> {
        let mut attempts = 0;
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
            attempts = pause(attempts);
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

/// Set while a thread has the bucket locked.
pub(super) const LOCKED: u64 = 1;
/// Set while a key is in a later bucket because this bucket was full.
pub(super) const PASSED_BY: u64 = 1 << 1;
const LEVEL_SHIFT: u32 = 2;
const LEVEL_MASK: u64 = 0x3f << LEVEL_SHIFT;
/// The first of the bits, one for each slot, that are set if the key in it came when memory was used up.
const LATE_SHIFT: u32 = 8;
/// The most slots of a bucket: a stride is less than twice as long as five slots need.
const MAX_SLOTS: usize = 10;
/// Counts how often the tag of a slot has wrapped to 0.
const LAP: u64 = 1 << (LATE_SHIFT + MAX_SLOTS as u32);
const LAP_MASK: u64 = (VERSION - 1) & !(LAP - 1);
/// Counts the lock holders that wrote to the bucket.
const VERSION: u64 = 1 << 34;

/// The fingerprint of an empty slot.
pub(super) const EMPTY: u64 = 0;

/// Spins on a locked bucket before yielding. A lock is held for nanoseconds, unless its thread is preempted.
const SPINS: u32 = 16;
/// Each spin is twice as long as the last, up to this power of two: about ten microseconds.
const LONGEST_SPIN: u32 = 8;
/// Attempts to lock a bucket while holding other locks. After that, the thread releases all locks and starts over, to
/// avoid a deadlock.
pub(super) const PATIENCE: u32 = if cfg!(loom) { 1 } else { 256 };

/// The layout of buckets. All sizes are in words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Words of a key, its fingerprint not counted.
    words: usize,
    pub(super) slots: usize,
    stride: usize,
    /// Distance between fingerprints. A single word follows its fingerprint, so that a hot key is likely to be on the
    /// cache line of the header. Longer states follow all fingerprints, at the end of the bucket, so that states of 2,
    /// 4 or 8 words are each on one cache line.
    step: usize,
    /// Number of initial buckets, and of buckets in a block, as a power of two. A run does not leave its block.
    pub(super) block_bits: u32,
    /// The bits of a word that contain the tag of the slot. 0 if keys are decided under the lock of their bucket.
    pub(super) tags: u64,
}

impl Layout {
    /// Stride for keys of one word: the header, seven slots and the shared word fill two cache lines.
    pub(super) const SHORT_STRIDE: usize = if cfg!(loom) { 6 } else { 16 };
    pub(super) const SHORT_SLOTS: usize = (Self::SHORT_STRIDE - 2) / 2;

    /// Creates the layout for keys of `words` words. For one word, its `free_bits` high bits are the slot's tag.
    pub(super) fn new(words: usize, free_bits: u32) -> Self {
        // Five slots or more keep overflow rare, and a power of two keeps buckets aligned to cache lines. The words
        // that keys without a slot share have no fingerprint.
        let needs = 1 + words + 5 * (1 + words);
        let stride = needs.next_power_of_two().max(16);
        // 64 buckets make a full block rare. Very long states have fewer, so that a limit takes at most half a
        // megabyte.
        let block = ((1 << 16) / stride).clamp(4, 64);
        let slots = (stride - 1 - words) / (1 + words);
        debug_assert!(slots <= MAX_SLOTS);
        let step = if words == 1 { 2 } else { 1 };
        Self { words, slots, stride, step, block_bits: block.ilog2(), tags: Self::tags(words, free_bits) }
    }

    fn tags(words: usize, free_bits: u32) -> u64 {
        if words == 1 { !(u64::MAX >> free_bits) } else { 0 }
    }

    /// Returns the number of buckets in a block.
    pub(super) fn block(self) -> usize {
        1 << self.block_bits
    }

    pub(super) fn stride(self) -> usize {
        self.stride
    }

    #[cfg(all(test, loom))]
    pub(super) fn tiny(words: usize, slots: usize, block_bits: u32, free_bits: u32) -> Self {
        let stride = 1 + words + slots * (1 + words);
        let step = if words == 1 { 2 } else { 1 };
        Self { words, slots, stride, step, block_bits, tags: Self::tags(words, free_bits) }
    }
}

/// One bucket of the table.
#[derive(Clone, Copy)]
pub(super) struct Bucket<'a> {
    pub(super) index: usize,
    words: &'a [AtomicU64],
    step: usize,
}

impl<'a> Bucket<'a> {
    #[inline(always)]
    pub(super) fn new(index: usize, words: &'a [AtomicU64], layout: Layout) -> Self {
        Self { index, words, step: layout.step }
    }

    /// Returns the words of a slot, or the shared words for the index after the last slot.
    #[inline(always)]
    pub(super) fn words_of(self, slot: usize, layout: Layout) -> &'a [AtomicU64] {
        let Layout { words, slots, stride, step, .. } = layout;
        let first = match slot {
            shared if shared == slots => stride - words,
            slot if step == 1 => stride - words * (slots + 1 - slot),
            slot => 2 + slot * step,
        };
        &self.words[first..first + words]
    }

    #[inline(always)]
    pub(super) fn slot_of(self, fingerprint: u64, layout: Layout) -> Option<usize> {
        let is_it = |word: &AtomicU64| word.load(Ordering::Relaxed) == fingerprint;
        if layout.step == 2 {
            self.words[1..=2 * layout.slots].chunks_exact(2).position(|pair| is_it(&pair[0]))
        } else {
            self.words[1..=layout.slots].iter().position(is_it)
        }
    }

    pub(super) fn is(self, other: Bucket<'_>) -> bool {
        std::ptr::eq(self.words, other.words)
    }

    /// Returns an address that is unique among all buckets of all tables.
    pub(super) fn address(self) -> usize {
        self.words.as_ptr().addr()
    }

    #[inline]
    pub(super) fn header(self) -> &'a AtomicU64 {
        &self.words[0]
    }

    /// Returns whether a key of this bucket is in a later bucket.
    pub(super) fn is_passed_by(self) -> bool {
        self.header().load(Ordering::Acquire) & PASSED_BY != 0
    }

    pub(super) fn fingerprint(self, slot: usize) -> u64 {
        self.words[1 + slot * self.step].load(Ordering::Relaxed)
    }

    pub(super) fn set_fingerprint(self, slot: usize, fingerprint: u64) {
        self.words[1 + slot * self.step].store(fingerprint, Ordering::Relaxed);
    }
}

/// The words of one slot.
pub(super) struct Slot<'a> {
    words: &'a [AtomicU64],
    spill: &'a Spill,
}

impl<'a> Slot<'a> {
    #[inline(always)]
    pub(super) fn new(words: &'a [AtomicU64], spill: &'a Spill) -> Self {
        Self { words, spill }
    }

    /// Returns the word of a one-word key, with the tag of its slot.
    pub(super) fn word(&self) -> u64 {
        self.words[0].load(Ordering::Relaxed)
    }
}

impl StateWords for Slot<'_> {
    #[inline]
    fn get(&self, index: usize) -> u64 {
        self.words[index].load(Ordering::Relaxed)
    }

    #[inline]
    fn set(&self, index: usize, word: u64) {
        self.words[index].store(word, Ordering::Relaxed);
    }

    fn spill(&self) -> &Spill {
        self.spill
    }
}

/// A locked bucket, and its header after the lock is released, which happens on drop.
pub(super) struct Held<'a> {
    pub(super) bucket: Bucket<'a>,
    header: u64,
    written: bool,
}

/// The reason to release all locks and start over.
#[derive(Debug)]
pub(super) enum Busy {
    /// Another thread has held a bucket for too long.
    Held,
    /// No slot is free in the block, but the table can grow, or the block is partly split.
    Crowded,
    /// The same in the table for debts.
    CrowdedDebts,
}

#[inline]
pub(super) fn level_of(header: u64) -> u32 {
    ((header & LEVEL_MASK) >> LEVEL_SHIFT) as u32
}

/// Returns the header of an empty bucket of a table that begins at `level`.
pub(super) fn header_at(level: u32) -> u64 {
    u64::from(level) << LEVEL_SHIFT
}

/// Returns whether a bucket has not changed since its header was read, so that all later reads are consistent.
#[inline]
pub(super) fn unchanged(bucket: Bucket<'_>, header: u64) -> bool {
    unchanged_header(bucket.header(), header)
}

#[inline(always)]
pub(super) fn unchanged_header(word: &AtomicU64, header: u64) -> bool {
    fence(Ordering::Acquire);
    word.load(Ordering::Relaxed) == header
}

/// Locks a bucket if it has not changed since its header was read.
#[inline]
pub(super) fn hold_unchanged(bucket: Bucket<'_>, header: u64) -> Option<Held<'_>> {
    // Not `then_some`: creating and dropping a `Held` would release another thread's lock.
    hold_header(bucket.header(), header).then(|| Held { bucket, header, written: false })
}

#[inline(always)]
fn hold_header(word: &AtomicU64, header: u64) -> bool {
    let swapped = word.compare_exchange(header, header | LOCKED, Ordering::Acquire, Ordering::Relaxed);
    // A thread that reads a word written from here on must see the changed header.
    fence(Ordering::Release);
    swapped.is_ok()
}

/// Returns whether no tag has wrapped to 0 between two headers of one bucket.
#[inline(always)]
pub(super) fn is_same_lap(one: u64, other: u64) -> bool {
    (one ^ other) & LAP_MASK == 0
}

/// Returns the header of an unlocked bucket. Gives up after a bounded wait, because the lock holder may wait for this
/// thread.
pub(super) fn header_within_bound(bucket: Bucket<'_>) -> Result<u64, Busy> {
    for _ in 0..PATIENCE {
        let header = bucket.header().load(Ordering::Acquire);
        if header & LOCKED == 0 {
            return Ok(header);
        }
        spin_loop();
    }
    Err(Busy::Held)
}

impl Held<'_> {
    pub(super) fn header(&self) -> u64 {
        self.header
    }

    /// Makes concurrent readers of this bucket retry.
    pub(super) fn mark_written(&mut self) {
        self.written = true;
    }

    /// Counts a lap. Call it before a tag that wraps to 0 is written.
    pub(super) fn start_lap(&mut self) {
        self.header = self.header & !LAP_MASK | self.header.wrapping_add(LAP) & LAP_MASK;
        self.written = true;
        self.bucket.header().store(self.header | LOCKED, Ordering::Release);
    }

    pub(super) fn mark_passed_by(&mut self) {
        self.header |= PASSED_BY;
    }

    pub(super) fn clear_passed_by(&mut self) {
        self.header &= !PASSED_BY;
    }

    pub(super) fn is_passed_by(&self) -> bool {
        self.header & PASSED_BY != 0
    }

    /// Records whether the key of a slot came when memory was used up.
    pub(super) fn set_late(&mut self, slot: usize, is_late: bool) {
        let late = 1 << (LATE_SHIFT as usize + slot);
        self.header = self.header & !late | if is_late { late } else { 0 };
    }

    pub(super) fn is_late(&self, slot: usize) -> bool {
        self.header & 1 << (LATE_SHIFT as usize + slot) != 0
    }

    pub(super) fn set_level(&mut self, level: u32) {
        self.header = self.header & !LEVEL_MASK | u64::from(level) << LEVEL_SHIFT;
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        // Readers of an unwritten bucket need not retry.
        let version = if self.written { VERSION } else { 0 };
        self.bucket.header().store(self.header.wrapping_add(version), Ordering::Release);
    }
}

/// Waits a little, twice as long each time. With many threads on one bucket, the winner of a race then makes several
/// decisions before it loses the cache line.
#[cold]
#[inline(never)]
pub(super) fn pause(attempts: u32) -> u32 {
    if attempts < SPINS && !cfg!(loom) {
        (0..1_u32 << attempts.min(LONGEST_SPIN)).for_each(|_| spin_loop());
    } else {
        yield_now();
    }
    attempts.saturating_add(1)
}

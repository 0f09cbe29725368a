//! A concurrent table of keys: the words of each, found by a 64-bit fingerprint, in buckets of a few slots.
//!
//! A bucket is a pair of cache lines, or a few: a header, then the fingerprints of its slots, then the words of
//! each, and then the words that keys without a slot share. The header
//! holds a version and a lock. A decision reads a bucket without writing to it, computes, and then takes the
//! lock by replacing exactly the header it read, so that one compare-and-swap both proves that nothing changed
//! meanwhile and claims the bucket; a handful of stores later it is free again. A denial writes nothing at
//! all, so a flood of them shares the cache line.
//!
//! A key lives in its home bucket, or when that is full in one of the next few of the same block; a flag in the
//! header says when to look further. Whoever adds a key holds its home bucket, so no key is added twice.
//!
//! The table grows in place by linear hashing: bucket `i` of `n` splits into `i` and `i + n`, a few buckets
//! with each newcomer, never all at once. The memory for the upper half is one segment that never moves. A
//! bucket's header knows how often it has split, so a reader with an old idea of the size is led on.
//!
//! When the memory is spent, keys at rest make room, and if there are none, keys without a slot share one: see
//! `newcomer.rs`.

use std::sync::OnceLock;

use crate::algorithm::spill::Spill;
use crate::algorithm::{Cells, Rules};
use crate::budget::{Budget, Words};
use crate::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence, spin_loop, yield_now};

/// Set while someone writes to the bucket.
const LOCKED: u64 = 1;
/// Set once a key that should live here has gone on to the next bucket.
pub(super) const PASSED_BY: u64 = 1 << 1;
const LEVEL_SHIFT: u32 = 2;
const LEVEL_MASK: u64 = 0x3f << LEVEL_SHIFT;
const VERSION: u64 = 1 << 8;

/// The fingerprint of an empty slot.
pub(super) const EMPTY: u64 = 0;

/// Segments double, so this many hold more than any machine does.
const SEGMENTS: usize = 40;
/// How often to spin on a bucket before letting another thread run. Those who hold one need nanoseconds, unless
/// they have lost their processor.
const SPINS: u32 = 16;
/// Each spin is twice as long as the last, up to this power of two: some ten microseconds.
const LONGEST_SPIN: u32 = 8;
/// How often to look again at a bucket that someone holds while holding others oneself. Then let go of all and
/// start over: two who wait for each other would wait forever.
const PATIENCE: u32 = if cfg!(loom) { 1 } else { 256 };

pub(crate) struct Table {
    pub(super) layout: Layout,
    segments: [OnceLock<Words>; SEGMENTS],
    /// The level in the upper half, the next bucket to split in the lower. Only a hint to readers.
    extent: AtomicU64,
    /// Slots that are not empty.
    pub(super) occupied: AtomicUsize,
    growing: AtomicBool,
    pub(super) spill: Spill,
    budget: Budget,
}

/// How buckets are laid out, all sizes in words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Words of a key, its fingerprint not counted.
    words: usize,
    pub(super) slots: usize,
    stride: usize,
    /// From one fingerprint to the next. A single word stands right behind its fingerprint, so that a hot key is
    /// likely to be on the same cache line as the header; longer states stand behind all fingerprints.
    step: usize,
    /// Buckets at the start, and buckets in a block, the reach of a run, as a power of two.
    block_bits: u32,
}

impl Layout {
    pub(super) fn new(words: usize) -> Self {
        // Five slots or more keep overflow rare; a stride that is a power of two keeps buckets on lines. One
        // key's words have no fingerprint: strangers share them.
        let needs = 1 + words + 5 * (1 + words);
        let stride = needs.next_power_of_two().max(16);
        // 64 buckets make a full block rare; very long states make do with fewer, for half a megabyte a limit.
        let block = ((1 << 16) / stride).clamp(4, 64);
        let slots = (stride - 1 - words) / (1 + words);
        Self { words, slots, stride, step: if words == 1 { 2 } else { 1 }, block_bits: block.ilog2() }
    }

    #[cfg(all(test, loom))]
    pub(super) fn block_bits(self) -> u32 {
        self.block_bits
    }

    #[cfg(all(test, loom))]
    pub(super) fn tiny(words: usize, slots: usize, block_bits: u32) -> Self {
        let stride = 1 + words + slots * (1 + words);
        Self { words, slots, stride, step: if words == 1 { 2 } else { 1 }, block_bits }
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
    pub(super) fn is(self, other: Bucket<'_>) -> bool {
        std::ptr::eq(self.words, other.words)
    }

    #[inline]
    fn header(self) -> &'a AtomicU64 {
        &self.words[0]
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

impl Cells for Slot<'_> {
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

/// Where a key was found, and the header of its bucket when it was.
#[derive(Clone, Copy)]
pub(super) struct Found<'a> {
    pub(super) bucket: Bucket<'a>,
    pub(super) slot: usize,
    pub(super) header: u64,
}

/// A bucket that is held, and what its header will be when it is let go.
#[derive(Clone, Copy)]
pub(super) struct Held<'a> {
    pub(super) bucket: Bucket<'a>,
    header: u64,
}

/// Why to let go of everything and start over.
#[derive(Debug)]
pub(super) enum Busy {
    /// Someone else has held a bucket for too long.
    Held,
    /// There is no seat in reach, but the table can grow.
    Crowded,
}

impl Table {
    /// A table with its first block of buckets, or `None` when the budget has not even that.
    pub(super) fn new(layout: Layout, budget: Budget) -> Option<Self> {
        let table = Self {
            layout,
            segments: [const { OnceLock::new() }; SEGMENTS],
            extent: AtomicU64::new(0),
            occupied: AtomicUsize::new(0),
            growing: AtomicBool::new(false),
            spill: Spill::new(budget.clone()),
            budget,
        };
        table.add_segment(0)?;
        Some(table)
    }

    /// Buckets before the sweep that is under way, if one is.
    #[inline]
    fn buckets_at(&self, level: u32) -> usize {
        1 << (self.layout.block_bits + level)
    }

    #[inline]
    fn extent(&self) -> (u32, usize) {
        let extent = self.extent.load(Ordering::Acquire);
        ((extent >> 32) as u32, (extent & 0xffff_ffff) as usize)
    }

    #[inline(always)]
    fn locate(&self, bucket: usize) -> (usize, usize) {
        let level = (bucket >> self.layout.block_bits).checked_ilog2();
        level.map_or((0, bucket), |level| (level as usize + 1, bucket - self.buckets_at(level)))
    }

    /// The bucket of that index. Indexes come from levels that headers and the extent speak of, and those are
    /// written after the segment is there.
    #[inline(always)]
    pub(super) fn bucket(&self, index: usize) -> Bucket<'_> {
        let (segment, offset) = self.locate(index);
        let words = self.segments[segment]
            .get()
            .map_or(&[][..], |words| words.run(offset * self.layout.stride, self.layout.stride));
        Bucket { index, words, step: self.layout.step }
    }

    /// The words of a slot, or past the last slot the shared ones.
    #[inline]
    pub(super) fn slot<'a>(&'a self, bucket: Bucket<'a>, slot: usize) -> Slot<'a> {
        let Layout { words, slots, stride, step, .. } = self.layout;
        let first = match slot {
            shared if shared == slots => stride - words,
            slot if step == 1 => 1 + slots + slot * words,
            slot => 2 + slot * step,
        };
        Slot { words: &bucket.words[first..first + words], spill: &self.spill }
    }

    pub(super) fn next_in_run<'a>(&'a self, bucket: Bucket<'a>) -> Bucket<'a> {
        let within = (1 << self.layout.block_bits) - 1;
        let next = bucket.index & !within | (bucket.index + 1) & within;
        self.bucket(next)
    }

    /// How far a run may reach before it comes round to its beginning: all of a block. At four fifths full a
    /// block of 64 buckets overflows once in a million; a run of 16 would, once in a thousand.
    pub(super) fn run(&self) -> usize {
        1 << self.layout.block_bits
    }

    /// The home of a fingerprint once its bucket has split to `level`.
    #[inline(always)]
    pub(super) fn home_at(&self, fingerprint: u64, level: u32) -> usize {
        fingerprint as usize & (self.buckets_at(level) - 1)
    }

    /// Where to begin looking for the home of a fingerprint: right but for the bucket that is splitting now.
    #[inline(always)]
    pub(super) fn probable_home(&self, fingerprint: u64) -> Bucket<'_> {
        let (level, split) = self.extent();
        let index = self.home_at(fingerprint, level);
        self.bucket(if index < split { self.home_at(fingerprint, level + 1) } else { index })
    }

    /// The home bucket of a fingerprint, and its header.
    #[inline(always)]
    pub(super) fn home(&self, fingerprint: u64) -> (Bucket<'_>, u64) {
        let (bucket, header) = self.approach(fingerprint);
        self.home_from(bucket, header, fingerprint)
    }

    /// The home bucket of a fingerprint, looked for from a bucket whose header has been read.
    #[inline(always)]
    fn home_from<'a>(&'a self, mut bucket: Bucket<'a>, mut header: u64, fingerprint: u64) -> (Bucket<'a>, u64) {
        loop {
            if header & LOCKED != 0 {
                header = self.settled(bucket);
            }
            match self.led_on(bucket, header, fingerprint) {
                None => return (bucket, header),
                Some(next) => (bucket, header) = (next, next.header().load(Ordering::Acquire)),
            }
        }
    }

    /// The bucket where a key lives that has moved on from this one, by what its header says.
    #[inline(always)]
    pub(super) fn led_on(&self, bucket: Bucket<'_>, header: u64, fingerprint: u64) -> Option<Bucket<'_>> {
        let home = self.home_at(fingerprint, level_of(header));
        (home != bucket.index).then(|| self.bucket(home))
    }

    /// The header of a bucket once nobody holds it.
    #[cold]
    fn settled(&self, bucket: Bucket<'_>) -> u64 {
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
    pub(super) fn approach(&self, fingerprint: u64) -> (Bucket<'_>, u64) {
        let bucket = self.probable_home(fingerprint);
        (bucket, bucket.header().load(Ordering::Acquire))
    }

    /// Where a key is, if it is there.
    pub(super) fn find(&self, fingerprint: u64) -> Option<Found<'_>> {
        self.find_from(self.approach(fingerprint), fingerprint)
    }

    #[inline(always)]
    pub(super) fn find_from<'a>(&'a self, near: (Bucket<'a>, u64), fingerprint: u64) -> Option<Found<'a>> {
        let (bucket, header) = self.home_from(near.0, near.1, fingerprint);
        match self.slot_of(bucket, fingerprint) {
            Some(slot) => Some(Found { bucket, slot, header }),
            None => self.find_further(fingerprint),
        }
    }

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
                header = self.settled(bucket);
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
        let Layout { slots, step, .. } = self.layout;
        let is_it = |word: &AtomicU64| word.load(Ordering::Relaxed) == fingerprint;
        if step == 2 {
            bucket.words[1..=2 * slots].chunks_exact(2).position(|pair| is_it(&pair[0]))
        } else {
            bucket.words[1..=slots].iter().position(is_it)
        }
    }

    /// Whether the table is doubling, or has the memory to.
    pub(super) fn can_grow(&self) -> bool {
        let next = self.extent().0 as usize + 1;
        let there = self.segments.get(next).is_some_and(|segment| segment.get().is_some());
        there || (next < SEGMENTS && self.budget.has(self.words_in(next)))
    }

    fn words_in(&self, segment: usize) -> usize {
        let buckets = if segment == 0 { self.buckets_at(0) } else { self.buckets_at(segment as u32 - 1) };
        buckets * self.layout.stride
    }

    fn add_segment(&self, segment: usize) -> Option<()> {
        if self.segments.get(segment)?.get().is_none() {
            let words = self.budget.take(self.words_in(segment))?;
            let _ = self.segments[segment].set(words);
        }
        Some(())
    }

    /// Grows by a few buckets, if the table is crowded or in the middle of growing.
    pub(super) fn grow_if_crowded<R: Rules>(&self, rules: &R, now: u64) {
        let (level, split) = self.extent();
        let slots = self.buckets_at(level) * self.layout.slots;
        let crowded = self.occupied.load(Ordering::Relaxed) * 5 > slots * 4;
        if split > 0 || (crowded && self.can_grow()) {
            self.grow(rules, now);
        }
    }

    #[cfg(all(test, loom))]
    pub(super) fn grow_now<R: Rules>(&self, rules: &R, now: u64) {
        self.grow(rules, now);
    }

    /// Splits the next few buckets, unless someone else is at it.
    fn grow<R: Rules>(&self, rules: &R, now: u64) {
        /// Splits with each newcomer: so many that a doubling is done long before the next is due.
        const STEP: usize = 4;

        if self.growing.swap(true, Ordering::Acquire) {
            return;
        }
        let (level, mut split) = self.extent();
        if self.add_segment(level as usize + 1).is_some() {
            let buckets = self.buckets_at(level);
            let until = (split + STEP).min(buckets);
            while split < until && self.split(rules, now, split, level).is_ok() {
                split += 1;
            }
            let (level, split) = if split == buckets { (level + 1, 0) } else { (level, split) };
            self.extent.store(u64::from(level) << 32 | split as u64, Ordering::Release);
        }
        self.growing.store(false, Ordering::Release);
    }

    /// Makes room where a newcomer found none, by splitting the buckets it looked into before it is their
    /// turn: nobody waits for all the others.
    #[cold]
    pub(super) fn make_room<R: Rules>(&self, rules: &R, fingerprint: u64, now: u64) {
        let (level, _) = self.extent();
        self.grow(rules, now);
        if self.segments[level as usize + 1].get().is_none() {
            return;
        }
        let mut index = self.home_at(fingerprint, level);
        for _ in 0..self.run() {
            // Splitting one frees some slots, wherever in the run its keys were.
            if self.split(rules, now, index, level).is_ok_and(|freed| freed > 0) {
                return;
            }
            index = self.next_in_run(self.bucket(index)).index;
        }
    }

    /// The bucket that half of a bucket's keys move to when it splits.
    pub(super) fn upper(&self, index: usize, level: u32) -> Bucket<'_> {
        self.bucket(index + self.buckets_at(level))
    }
}

#[inline]
fn level_of(header: u64) -> u32 {
    ((header & LEVEL_MASK) >> LEVEL_SHIFT) as u32
}

/// Whether a bucket is still as it was when its header was read, so that all that was read since holds.
#[inline]
pub(super) fn unchanged(bucket: Bucket<'_>, header: u64) -> bool {
    fence(Ordering::Acquire);
    bucket.header().load(Ordering::Relaxed) == header
}

/// Holds a bucket if it is still as it was when its header was read.
#[inline]
pub(super) fn hold_unchanged(bucket: Bucket<'_>, header: u64) -> Option<Held<'_>> {
    let swapped = bucket.header().compare_exchange(header, header | LOCKED, Ordering::Acquire, Ordering::Relaxed);
    // Whoever reads a word written from here on must find the header changed.
    fence(Ordering::Release);
    swapped.is_ok().then_some(Held { bucket, header })
}

/// The header of a bucket that may be held by someone who waits for us: gives up rather than wait forever.
pub(super) fn header_patiently(bucket: Bucket<'_>) -> Result<u64, Busy> {
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

    pub(super) fn level(&self) -> u32 {
        level_of(self.header)
    }

    pub(super) fn mark_passed_by(&mut self) {
        self.header |= PASSED_BY;
    }

    pub(super) fn is_passed_by(&self) -> bool {
        self.header & PASSED_BY != 0
    }

    pub(super) fn set_level(&mut self, level: u32) {
        self.header = self.header & !LEVEL_MASK | u64::from(level) << LEVEL_SHIFT;
    }

    /// Lets go of a bucket that was written to.
    #[inline]
    pub(super) fn release(self) {
        self.bucket.header().store(self.header.wrapping_add(VERSION), Ordering::Release);
    }

    /// Lets go of a bucket that was not: readers need not look again.
    pub(super) fn release_unchanged(self) {
        self.bucket.header().store(self.header, Ordering::Release);
    }
}

/// Waits a little, twice as long each time: of many threads on one bucket, those that lost a race stay out of
/// the way of the one that won it, which then gets through several decisions before the line is taken from it.
pub(super) fn pause(attempts: u32) -> u32 {
    if attempts < SPINS && !cfg!(loom) {
        (0..1_u32 << attempts.min(LONGEST_SPIN)).for_each(|_| spin_loop());
    } else {
        yield_now();
    }
    attempts.saturating_add(1)
}

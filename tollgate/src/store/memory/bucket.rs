//! One bucket: how it is laid out, and the lock in its header.
//!
//! A bucket is a pair of cache lines, or a few: a header, then slots of a fingerprint and the words of its key,
//! and at the end the words that keys without a slot share. The header holds a lock and a version.
//!
//! A key whose state is one word is decided by replacing that word: see `word.rs`. The header is only read. A key whose
//! state is longer is decided under the lock: a decision reads the bucket without writing to it, computes, and then
//! takes the lock by replacing exactly the header it read, so that one compare-and-swap both proves that nothing
//! changed meanwhile and claims the bucket. Fingerprints change under the lock only. A denial writes nothing at all, so
//! a flood of them shares the cache line.

use crate::algorithm::StateWords;
use crate::algorithm::spill::Spill;
use crate::sync::{AtomicU64, Ordering, fence, spin_loop, yield_now};

/// Set while someone writes to the bucket.
pub(super) const LOCKED: u64 = 1;
/// Set while a key lives further on because this bucket was full.
pub(super) const PASSED_BY: u64 = 1 << 1;
const LEVEL_SHIFT: u32 = 2;
const LEVEL_MASK: u64 = 0x3f << LEVEL_SHIFT;
/// Counts how often the tag of one of the slots has started again from 0.
const LAP: u64 = 1 << 8;
const LAP_MASK: u64 = (VERSION - 1) & !(LAP - 1);
/// Counts the holders that wrote to the bucket.
const VERSION: u64 = 1 << 28;

/// The fingerprint of an empty slot.
pub(super) const EMPTY: u64 = 0;

/// How often to spin on a bucket before letting another thread run. Those who hold one need nanoseconds, unless
/// they have lost their processor.
const SPINS: u32 = 16;
/// Each spin is twice as long as the last, up to this power of two: some ten microseconds.
const LONGEST_SPIN: u32 = 8;
/// How often to look again at a bucket that someone holds while holding others oneself. Then let go of all and
/// start over: two who wait for each other would wait forever.
pub(super) const PATIENCE: u32 = if cfg!(loom) { 1 } else { 256 };

/// How buckets are laid out, all sizes in words.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Words of a key, its fingerprint not counted.
    words: usize,
    pub(super) slots: usize,
    stride: usize,
    /// From one fingerprint to the next. A single word stands right behind its fingerprint, so that a hot key is
    /// likely to be on the same cache line as the header; longer states stand behind all fingerprints, at the end of the
    /// bucket, so that those of 2, 4 or 8 words are each on one cache line.
    step: usize,
    /// Buckets at the start, and buckets in a block, the reach of a run, as a power of two.
    pub(super) block_bits: u32,
    /// The bits of a word in which slots have their tags. 0 if keys are decided under the lock of their bucket.
    pub(super) tags: u64,
}

impl Layout {
    /// Of keys of one word: the header, seven slots and the shared word fill two cache lines.
    pub(super) const SHORT_STRIDE: usize = if cfg!(loom) { 6 } else { 16 };
    pub(super) const SHORT_SLOTS: usize = (Self::SHORT_STRIDE - 2) / 2;

    /// For keys of so many words. If it is one word, its `free_bits` high bits are the slot's tag.
    pub(super) fn new(words: usize, free_bits: u32) -> Self {
        // Five slots or more keep overflow rare; a stride that is a power of two keeps buckets on lines. One
        // key's words have no fingerprint: keys without a slot share them.
        let needs = 1 + words + 5 * (1 + words);
        let stride = needs.next_power_of_two().max(16);
        // 64 buckets make a full block rare; very long states make do with fewer, for half a megabyte a limit.
        let block = ((1 << 16) / stride).clamp(4, 64);
        let slots = (stride - 1 - words) / (1 + words);
        let step = if words == 1 { 2 } else { 1 };
        Self { words, slots, stride, step, block_bits: block.ilog2(), tags: Self::tags(words, free_bits) }
    }

    fn tags(words: usize, free_bits: u32) -> u64 {
        if words == 1 { !(u64::MAX >> free_bits) } else { 0 }
    }

    /// Buckets in a block.
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

    /// The words of a slot, or past the last slot the shared ones.
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

    /// Differs from that of every other bucket of every table.
    pub(super) fn address(self) -> usize {
        self.words.as_ptr().addr()
    }

    #[inline]
    pub(super) fn header(self) -> &'a AtomicU64 {
        &self.words[0]
    }

    /// Whether a key that should live here has gone on to the next bucket.
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

    /// The only word of a key that has one, with the tag of its slot.
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

/// A bucket that is held, and what its header will be when it is let go: when this is dropped.
pub(super) struct Held<'a> {
    pub(super) bucket: Bucket<'a>,
    header: u64,
    written: bool,
}

/// Why to let go of everything and start over.
#[derive(Debug)]
pub(super) enum Busy {
    /// Someone else has held a bucket for too long.
    Held,
    /// There is no slot in reach, but the table can grow.
    Crowded,
}

#[inline]
pub(super) fn level_of(header: u64) -> u32 {
    ((header & LEVEL_MASK) >> LEVEL_SHIFT) as u32
}

/// The header of an empty bucket of a table that begins at `level`.
pub(super) fn header_at(level: u32) -> u64 {
    u64::from(level) << LEVEL_SHIFT
}

/// Whether a bucket is still as it was when its header was read, so that all that was read since holds.
#[inline]
pub(super) fn unchanged(bucket: Bucket<'_>, header: u64) -> bool {
    unchanged_header(bucket.header(), header)
}

#[inline(always)]
pub(super) fn unchanged_header(word: &AtomicU64, header: u64) -> bool {
    fence(Ordering::Acquire);
    word.load(Ordering::Relaxed) == header
}

/// HeldBuckets a bucket if it is still as it was when its header was read.
#[inline]
pub(super) fn hold_unchanged(bucket: Bucket<'_>, header: u64) -> Option<Held<'_>> {
    // Not `then_some`: a `Held` that is made and dropped lets go of what another thread holds.
    hold_header(bucket.header(), header).then(|| Held { bucket, header, written: false })
}

#[inline(always)]
fn hold_header(word: &AtomicU64, header: u64) -> bool {
    let swapped = word.compare_exchange(header, header | LOCKED, Ordering::Acquire, Ordering::Relaxed);
    // Whoever reads a word written from here on must find the header changed.
    fence(Ordering::Release);
    swapped.is_ok()
}

/// Whether no slot's tag has started again from 0 between two headers of one bucket.
#[inline(always)]
pub(super) fn is_same_lap(one: u64, other: u64) -> bool {
    (one ^ other) & LAP_MASK == 0
}

/// The header of a bucket that may be held by someone who waits for us: gives up rather than wait forever.
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

    pub(super) fn level(&self) -> u32 {
        level_of(self.header)
    }

    /// Readers of this bucket will have to look again.
    pub(super) fn mark_written(&mut self) {
        self.written = true;
    }

    /// To be called before a tag that starts again from 0 is written.
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

    pub(super) fn set_level(&mut self, level: u32) {
        self.header = self.header & !LEVEL_MASK | u64::from(level) << LEVEL_SHIFT;
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        // Readers of a bucket that was not written to need not look again.
        let version = if self.written { VERSION } else { 0 };
        self.bucket.header().store(self.header.wrapping_add(version), Ordering::Release);
    }
}

/// Waits a little, twice as long each time: of many threads on one bucket, those that lost a race stay out of
/// the way of the one that won it, which then gets through several decisions before the line is taken from it.
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

//! The memory a store may take, and the zeroed words it takes it in.

use std::sync::Arc;

use crate::sync::{AtomicU64, AtomicUsize, Ordering};

/// Bytes that may still be taken. Clones share it.
#[derive(Clone)]
pub(crate) struct Budget(Arc<Inner>);

struct Inner {
    max: AtomicUsize,
    used: AtomicUsize,
}

/// Words for a table: zeroed, aligned to a pair of cache lines, never moved.
pub(crate) struct Words {
    words: Box<[AtomicU64]>,
    /// Where the first aligned word is.
    first: usize,
}

/// Buckets are laid out in units of this many bytes, the pair of lines that the hardware fetches together.
const ALIGN: usize = 128;
const WORD: usize = 8;
/// Words taken beside those asked for, to align them; too few to count.
const SLACK: usize = ALIGN / WORD;

impl Budget {
    pub(crate) fn new(max: usize) -> Self {
        Self(Arc::new(Inner { max: AtomicUsize::new(max), used: AtomicUsize::new(0) }))
    }

    pub(crate) fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }

    /// Whether so many words could be taken now.
    pub(crate) fn has(&self, count: usize) -> bool {
        count.saturating_mul(WORD) <= self.0.max.load(Ordering::Relaxed).saturating_sub(self.used())
    }

    /// All that may be taken, in bytes.
    pub(crate) fn max(&self) -> usize {
        self.0.max.load(Ordering::Relaxed)
    }

    /// So many words even if there are none left, to begin a table with: a limit that is added while the tables of
    /// others have taken everything must still count. They do not grow any more until it has been made up for.
    pub(crate) fn take_anyway(&self, count: usize) -> Option<Words> {
        let words = zeroed(count.checked_add(SLACK)?)?;
        self.0.used.fetch_add(words.bytes(), Ordering::Relaxed);
        Some(words)
    }

    /// Counts bytes that are held outside of tables, unless that is more than is left.
    #[cfg(feature = "redis")]
    pub(crate) fn reserve(&self, bytes: usize) -> bool {
        let max = self.max();
        let within = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= max);
        self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
    }

    /// Ends a [reservation](Self::reserve).
    #[cfg(feature = "redis")]
    pub(crate) fn release(&self, bytes: usize) {
        self.0.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn give_back(&self, words: &Words) {
        self.0.used.fetch_sub(words.bytes(), Ordering::Relaxed);
    }

    /// So many words, unless that is more than is left. If the machine has less than the budget allows, the
    /// budget ends there.
    pub(crate) fn take(&self, count: usize) -> Option<Words> {
        let bytes = count.checked_mul(WORD)?;
        let max = self.0.max.load(Ordering::Relaxed);
        let within = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= max);
        self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).ok()?;
        let words = zeroed(count.checked_add(SLACK)?);
        if words.is_none() {
            let used = self.0.used.fetch_sub(bytes, Ordering::Relaxed);
            self.0.max.store(used - bytes, Ordering::Relaxed);
        }
        words
    }
}

impl Words {
    /// What they were counted as when they were taken.
    pub(crate) fn bytes(&self) -> usize {
        (self.words.len() - if cfg!(loom) { 0 } else { SLACK }) * WORD
    }

    pub(crate) fn at(&self, index: usize) -> &AtomicU64 {
        &self.words[self.first + index]
    }

    #[inline]
    pub(crate) fn run(&self, index: usize, count: usize) -> &[AtomicU64] {
        &self.words[self.first + index..self.first + index + count]
    }
}

/// Memory fresh from the operating system is zero already: asking for it zeroed touches none of it, so that a
/// table of a gigabyte costs nothing until it is used.
#[cfg(not(loom))]
fn zeroed(count: usize) -> Option<Words> {
    let words: Box<[AtomicU64]> = bytemuck::try_zeroed_slice_box(count).ok()?;
    let past = words.as_ptr().addr() % ALIGN;
    let first = (ALIGN - past) % ALIGN / WORD;
    Some(Words { words, first })
}

#[cfg(loom)]
fn zeroed(count: usize) -> Option<Words> {
    Some(Words { words: (0..count - SLACK).map(|_| AtomicU64::new(0)).collect(), first: 0 })
}

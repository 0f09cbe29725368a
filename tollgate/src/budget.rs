//! The memory budget of a store, and the zeroed words that it allocates.

use std::sync::Arc;

use crate::sync::{AtomicU64, AtomicUsize, Ordering};

/// A bound on memory, in bytes. Clones share it.
#[derive(Clone)]
pub(crate) struct Budget {
    inner: Arc<Inner>,
    /// Bytes that are kept for other clones.
    kept: usize,
}

struct Inner {
    max: AtomicUsize,
    used: AtomicUsize,
}

/// Words for a table: zeroed, aligned to a pair of cache lines, never moved.
pub(crate) struct Words {
    words: Box<[AtomicU64]>,
    /// Index of the first aligned word.
    first: usize,
}

/// Buckets are laid out in units of this many bytes, the pair of lines that the hardware fetches together.
const ALIGN: usize = 128;
const WORD: usize = 8;
/// Extra words for alignment. They are too few to count.
const SLACK: usize = ALIGN / WORD;

impl Budget {
    pub(crate) fn new(max: usize) -> Self {
        Self { inner: Arc::new(Inner { max: AtomicUsize::new(max), used: AtomicUsize::new(0) }), kept: 0 }
    }

    /// Returns a clone that keeps one part in `divisor` of the budget for other clones.
    pub(crate) fn keeping_one_in(&self, divisor: usize) -> Self {
        Self { inner: self.inner.clone(), kept: self.max() / divisor }
    }

    /// Returns the bytes that this clone may use in all, together with all others.
    fn usable(&self) -> usize {
        self.max().saturating_sub(self.kept)
    }

    pub(crate) fn used(&self) -> usize {
        self.inner.used.load(Ordering::Relaxed)
    }

    /// Returns whether `count` words are left.
    pub(crate) fn has(&self, count: usize) -> bool {
        count.saturating_mul(WORD) <= self.usable().saturating_sub(self.used())
    }

    /// Returns the bound in bytes.
    pub(crate) fn max(&self) -> usize {
        self.inner.max.load(Ordering::Relaxed)
    }

    /// Allocates `count` words even if the budget is used up, for the first block of a table: a limit that is added
    /// while the memory is full must still count. Other tables do not grow until memory is within the bound again.
    pub(crate) fn take_anyway(&self, count: usize) -> Option<Words> {
        let words = zeroed(count.checked_add(SLACK)?)?;
        self.inner.used.fetch_add(words.bytes(), Ordering::Relaxed);
        Some(words)
    }

    /// Counts `bytes` outside of tables, unless they exceed the rest of the budget.
    #[cfg(feature = "redis")]
    pub(crate) fn reserve(&self, bytes: usize) -> bool {
        let max = self.usable();
        let within = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= max);
        self.inner.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_ok()
    }

    /// Ends a [reservation](Self::reserve).
    #[cfg(feature = "redis")]
    pub(crate) fn release(&self, bytes: usize) {
        self.inner.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn give_back(&self, words: &Words) {
        self.inner.used.fetch_sub(words.bytes(), Ordering::Relaxed);
    }

    /// Allocates `count` words, unless they exceed the rest of the budget. If the machine has less memory than the
    /// budget, the budget is lowered.
    pub(crate) fn take(&self, count: usize) -> Option<Words> {
        let bytes = count.checked_mul(WORD)?;
        let max = self.usable();
        let within = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= max);
        self.inner.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).ok()?;
        let words = zeroed(count.checked_add(SLACK)?);
        if words.is_none() {
            let used = self.inner.used.fetch_sub(bytes, Ordering::Relaxed);
            self.inner.max.store(used - bytes, Ordering::Relaxed);
        }
        words
    }
}

impl Words {
    /// Returns the bytes that these words count as.
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

/// Allocates zeroed words. The operating system provides zeroed pages on first access, so an unused table costs
/// nothing.
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

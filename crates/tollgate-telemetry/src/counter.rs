//! A counter with a single writer.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter that one thread writes and any thread can read.
///
/// Since only one thread adds at a time, an addition is a load and a store, at a fraction of the cost of an atomic
/// addition. If two threads added at once, counts would be lost, and nothing worse.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds to the counter. Only one thread may call it.
    #[inline]
    pub fn add(&self, more: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }

    /// Returns the count.
    #[inline]
    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

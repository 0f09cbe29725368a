//! A number that only grows.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts for one thread, and can be read by any.
///
/// Only one thread adds to it at a time. So an addition is a load and a store, which cost a fraction of an
/// instruction that locks the bus. Were two threads to add, counts would be lost, and nothing worse.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

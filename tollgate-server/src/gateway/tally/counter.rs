//! A number that only grows.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts for one thread, and can be read by any.
///
/// Only the thread of its worker adds to it. So an addition is a load and a store, which cost a fraction of an
/// instruction that locks the bus. Were two threads to add, counts would be lost, and nothing worse.
#[derive(Debug, Default)]
pub(in super::super) struct Counter(AtomicU64);

impl Counter {
    pub(in super::super) fn add(&self, more: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(more), Relaxed);
    }

    pub(in super::super) fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

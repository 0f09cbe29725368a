//! Whether it is worth asking Redis: after a few failures nobody waits for it any more, until it answers again.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use tokio::sync::Notify;

/// Failures in a row after which the breaker opens. One lost connection is one failure, however many decisions
/// it carried.
const FAILURES: u32 = 3;

#[derive(Default)]
pub(super) struct Breaker {
    failures: AtomicU32,
    open: AtomicBool,
    /// Rung when it opens, for the one who probes.
    opened: Notify,
    times_opened: AtomicU64,
    times_closed: AtomicU64,
}

impl Breaker {
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    pub(super) fn succeeded(&self) {
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    pub(super) fn failed(&self, why: &dyn std::fmt::Display) {
        if self.failures.fetch_add(1, Ordering::Relaxed) + 1 >= FAILURES {
            self.open(why);
        }
    }

    pub(super) fn open(&self, why: &dyn std::fmt::Display) {
        if !self.open.swap(true, Ordering::Relaxed) {
            self.times_opened.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%why, "the store fails: limits answer by their failure policy until it is back");
            self.opened.notify_one();
        }
    }

    pub(super) fn close(&self) {
        self.failures.store(0, Ordering::Relaxed);
        if self.open.swap(false, Ordering::Relaxed) {
            self.times_closed.fetch_add(1, Ordering::Relaxed);
            tracing::info!("the store is back");
        }
    }

    /// Waits until it opens.
    pub(super) async fn opened(&self) {
        while !self.is_open() {
            self.opened.notified().await;
        }
    }

    /// How often it opened and closed.
    pub(super) fn changes(&self) -> (u64, u64) {
        (self.times_opened.load(Ordering::Relaxed), self.times_closed.load(Ordering::Relaxed))
    }
}

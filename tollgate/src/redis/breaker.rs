//! Whether it is worth asking Redis: after a few failures nobody waits for it any more, until it answers again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::StoreError;

/// Failures in a row after which the breaker opens. One lost connection is one failure, however many trips and
/// decisions it carried: those that set out before it was noticed are not counted again.
const FAILURES: u32 = 3;

#[derive(Default)]
pub(super) struct Breaker {
    failures: Mutex<Failures>,
    /// Whether any are counted, without the lock.
    failing: AtomicBool,
    open: AtomicBool,
    /// Why it is open.
    why: Mutex<Option<StoreError>>,
    /// Rung when it opens, for the one who probes.
    opened: Notify,
    times_opened: AtomicU64,
    times_closed: AtomicU64,
}

#[derive(Default)]
struct Failures {
    in_a_row: u32,
    last: Option<Instant>,
}

impl Breaker {
    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    pub(super) fn succeeded(&self) {
        if self.failing.load(Ordering::Relaxed) {
            self.forget_failures();
        }
    }

    /// A trip that set out at `began` has failed.
    pub(super) fn failed(&self, began: Instant, why: &StoreError) {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.last.is_some_and(|last| began <= last) {
            return;
        }
        (failures.in_a_row, failures.last) = (failures.in_a_row + 1, Some(Instant::now()));
        self.failing.store(true, Ordering::Relaxed);
        let is_enough = failures.in_a_row >= FAILURES;
        // Whoever hears of it may ask, so nothing is held by then.
        drop(failures);
        if is_enough {
            self.open(why);
        }
    }

    fn forget_failures(&self) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).in_a_row = 0;
        self.failing.store(false, Ordering::Relaxed);
    }

    pub(super) fn open(&self, why: &StoreError) {
        // Held until the reason is there: whoever sees that it is open and asks why waits for it.
        let mut reason = self.why.lock().unwrap_or_else(PoisonError::into_inner);
        let was_open = self.open.swap(true, Ordering::Relaxed);
        if !was_open {
            *reason = Some(why.clone());
        }
        drop(reason);
        if !was_open {
            self.times_opened.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(%why, "the store fails: limits answer by their failure policy until it is back");
            self.opened.notify_one();
        }
    }

    pub(super) fn close(&self) {
        self.forget_failures();
        if self.open.swap(false, Ordering::Relaxed) {
            self.times_closed.fetch_add(1, Ordering::Relaxed);
            tracing::info!("the store is back");
        }
    }

    /// Why it is open, if it is.
    pub(super) fn why(&self) -> Option<StoreError> {
        let reason = self.why.lock().unwrap_or_else(PoisonError::into_inner).clone();
        reason.filter(|_| self.is_open())
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

//! Circuit breaker of one server: after a few failures, no request waits for the server until it answers again.
//!
//! A server that refuses requests, because its memory is full, its user lacks a permission or it lacks a command, still
//! replies in time. Requests are still sent to it, and those that need no write are decided. It does not count as
//! available until it serves all requests again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use super::{BreakerState, StoreError};

/// Consecutive failures after which the breaker opens. A lost connection is one failure, however many calls were in
/// flight: calls that were sent before the failure was noticed are not counted again.
const FAILURES: u32 = 3;
/// Time after the last refusal before a server counts as available again: for refusals because of full memory, which
/// probes detect, and for other refusals.
const QUIET: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));

#[derive(Default)]
pub(super) struct Breaker {
    failures: Mutex<Failures>,
    /// Whether there are failures, readable without the lock.
    failing: AtomicBool,
    open: AtomicBool,
    /// The reason why it is open.
    why: Mutex<Option<StoreError>>,
    /// Notified when it opens, for the task that probes.
    opened: Notify,
    /// Notified when it closes, for the task that registers this process.
    closed: Notify,
    /// Whether the server refuses requests, readable without the lock.
    refusing: AtomicBool,
    /// The last refusal and its time.
    refusal: Mutex<Option<(StoreError, Instant)>>,
    breaker_counts: Arc<BreakerCounts>,
}

/// Counts how often the breakers of a limiter opened and closed, including those of removed servers. A server that
/// begins or stops to refuse requests counts too.
#[derive(Default)]
pub(super) struct BreakerCounts {
    opened: AtomicU64,
    closed: AtomicU64,
}

impl BreakerCounts {
    pub(super) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Relaxed)
    }

    pub(super) fn closed(&self) -> u64 {
        self.closed.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
struct Failures {
    consecutive: u32,
    last: Option<Instant>,
}

impl Breaker {
    pub(super) fn new(breaker_counts: Arc<BreakerCounts>) -> Self {
        Self { breaker_counts, ..Self::default() }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    pub(super) fn succeeded(&self) {
        if self.failing.load(Ordering::Relaxed) {
            self.forget_failures();
        }
    }

    /// Counts the failure of a call that was sent at `began`. Returns whether that opened the breaker.
    pub(super) fn failed(&self, began: Instant, why: &StoreError) -> bool {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        if failures.last.is_some_and(|last| began <= last) {
            return false;
        }
        (failures.consecutive, failures.last) = (failures.consecutive + 1, Some(Instant::now()));
        self.failing.store(true, Ordering::Relaxed);
        let is_enough = failures.consecutive >= FAILURES;
        // Release the lock before others are notified: they may read the state.
        drop(failures);
        is_enough && self.open(why)
    }

    fn forget_failures(&self) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).consecutive = 0;
        self.failing.store(false, Ordering::Relaxed);
    }

    /// Opens the breaker. Returns whether it was closed.
    pub(super) fn open(&self, why: &StoreError) -> bool {
        // Held until the reason is set: a task that sees the breaker open and reads the reason waits for it.
        let mut reason = self.why.lock().unwrap_or_else(PoisonError::into_inner);
        let was_open = self.open.swap(true, Ordering::Relaxed);
        if !was_open {
            *reason = Some(why.clone());
        }
        drop(reason);
        if !was_open {
            self.breaker_counts.opened.fetch_add(1, Ordering::Relaxed);
            self.opened.notify_one();
        }
        !was_open
    }

    /// Closes the breaker. Returns whether it was open.
    pub(super) fn close(&self) -> bool {
        self.forget_failures();
        let was_open = self.open.swap(false, Ordering::Relaxed);
        if was_open {
            self.breaker_counts.closed.fetch_add(1, Ordering::Relaxed);
            self.closed.notify_one();
        }
        was_open
    }

    /// Records a refusal. Returns whether it is the first.
    pub(super) fn refused(&self, why: &StoreError) -> bool {
        let mut refusal = self.refusal.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = refusal.is_none();
        *refusal = Some((why.clone(), Instant::now()));
        self.refusing.store(true, Ordering::Relaxed);
        if is_new {
            self.breaker_counts.opened.fetch_add(1, Ordering::Relaxed);
        }
        is_new
    }

    pub(super) fn is_refusing(&self) -> bool {
        self.refusing.load(Ordering::Relaxed)
    }

    pub(super) fn state(&self) -> BreakerState {
        match (self.is_open(), self.is_refusing()) {
            (true, _) => BreakerState::Open,
            (false, true) => BreakerState::Refusing,
            (false, false) => BreakerState::Closed,
        }
    }

    /// Records a successful probe. Returns whether that ends the refusals: the last one must be a while ago, because a
    /// probe needs fewer permissions and less memory than decisions.
    pub(super) fn served(&self) -> bool {
        let mut refusal = self.refusal.lock().unwrap_or_else(PoisonError::into_inner);
        let is_over = refusal.as_ref().is_some_and(|(why, at)| {
            let quiet = if why.is_full() { QUIET.0 } else { QUIET.1 };
            at.elapsed() >= quiet
        });
        if is_over {
            *refusal = None;
            self.refusing.store(false, Ordering::Relaxed);
            self.breaker_counts.closed.fetch_add(1, Ordering::Relaxed);
        }
        is_over
    }

    /// Returns why it is open, or why the server refuses requests. `None` if the server is available.
    pub(super) fn why(&self) -> Option<StoreError> {
        let reason = self.why.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let refusal = || {
            let refusal = self.refusal.lock().unwrap_or_else(PoisonError::into_inner);
            refusal.as_ref().map(|(why, _)| why.clone())
        };
        reason.filter(|_| self.is_open()).or_else(refusal)
    }

    /// Waits until the breaker opens.
    pub(super) async fn opened(&self) {
        while !self.is_open() {
            self.opened.notified().await;
        }
    }

    /// Waits until the breaker closes, unless it has closed since the last call. For one task.
    pub(super) async fn closed(&self) {
        self.closed.notified().await;
    }
}

//! The timeouts of clients, and the deadlines of upstreams. The clock and the timers are in [`tollgate_net::deadline`].

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, ready};

use tollgate_config::internal::TimeoutsRule;
use tollgate_net::deadline::{Alarm, NEVER, Ticks, Wait};

use super::failure::Failure;

/// The timeouts for clients.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientTimeouts {
    pub(super) head: Wait,
    pub(super) body: Wait,
    pub(super) idle: Wait,
    pub(super) write: Wait,
    /// The maximum interval between two checks: the shortest timeout.
    pub(super) check_every: Wait,
}

impl ClientTimeouts {
    pub(super) fn of(rule: &TimeoutsRule) -> Self {
        let wait = |span: tollgate_config::internal::DurationText| Wait::at_least(span.duration());
        let (head, body, idle, write) = (wait(rule.head), wait(rule.body), wait(rule.idle), wait(rule.write));
        let check_every = head.min(body).min(idle).min(write);
        Self { head, body, idle, write, check_every }
    }
}

/// A deadline that moves while a request is served.
#[derive(Debug)]
pub(super) struct UpstreamDeadline {
    at: AtomicU64,
    /// The reason why the client's body ended early, if it did.
    body_failure: OnceLock<Failure>,
    ticks: Arc<Ticks>,
}

impl UpstreamDeadline {
    pub(super) fn new(ticks: Arc<Ticks>) -> Self {
        Self { at: AtomicU64::new(NEVER), body_failure: OnceLock::new(), ticks }
    }

    /// Sets the deadline.
    pub(super) fn set(&self, wait: Wait) {
        self.at.store(self.ticks.after(wait), Relaxed);
    }

    /// Records that the client's body ended early.
    pub(super) fn note_body_failure(&self, failure: Failure) {
        _ = self.body_failure.set(failure);
    }

    /// Returns why the client's body ended early. The upstream is not at fault.
    pub(super) fn body_failure(&self) -> Option<Failure> {
        self.body_failure.get().copied()
    }

    /// Clears the deadline, because the upstream waits for the client.
    pub(super) fn clear(&self) {
        self.at.store(NEVER, Relaxed);
    }

    /// Returns the number of ticks left.
    pub(super) fn ticks_left(&self) -> u64 {
        self.at.load(Relaxed).saturating_sub(self.ticks.now())
    }

    /// Runs a future until the deadline, wherever that moves. Returns `None` once it has passed.
    pub(super) async fn limit<F: Future + Unpin>(&self, mut future: F) -> Option<F::Output> {
        let mut alarm = Alarm::default();
        poll_fn(|context| {
            if let Poll::Ready(output) = Pin::new(&mut future).poll(context) {
                return Poll::Ready(Some(output));
            }
            while self.ticks_left() > 0 {
                // A deadline that was cleared may be set again at any time.
                let check_at = self.at.load(Relaxed).min(self.ticks.after(CHECK_EVERY));
                ready!(alarm.poll_passed(check_at, &self.ticks, context));
            }
            Poll::Ready(None)
        })
        .await
    }
}

/// The maximum delay until a new deadline is noticed.
const CHECK_EVERY: Wait = Wait::ticks(5);

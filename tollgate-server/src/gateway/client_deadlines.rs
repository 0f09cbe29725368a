//! The timeouts of clients, and the deadlines of an HTTP/2 connection.
//!
//! They are set and cleared where the events happen, at the cost of a store, and checked by the connection
//! periodically.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tollgate::rules::file::internal::TimeoutsRule;

use super::ticks::{Tick, Wait};

/// No deadline is set.
const NEVER: Tick = Tick::MAX;

/// The timeouts for clients.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientTimeouts {
    pub(super) head: Wait,
    pub(super) body: Wait,
    pub(super) idle: Wait,
    pub(super) write: Wait,
    /// The interval of checks. It is as long as the shortest timeout, so no deadline is missed.
    pub(super) check_every: Duration,
}

impl ClientTimeouts {
    pub(super) fn of(rule: &TimeoutsRule) -> Self {
        let wait = |span: tollgate::rules::file::internal::DurationText| Wait::at_least(span.duration());
        let (head, body, idle, write) = (wait(rule.head), wait(rule.body), wait(rule.idle), wait(rule.write));
        let check_every = head.min(body).min(idle).min(write).duration();
        Self { head, body, idle, write, check_every }
    }
}

/// The deadlines of one connection.
#[derive(Debug)]
pub(super) struct ClientDeadlines {
    /// For the next request.
    request: AtomicU64,
    /// For the client to read.
    write: AtomicU64,
    /// Requests in flight. Only the thread of the connection's worker changes it.
    active: AtomicU32,
}

impl ClientDeadlines {
    pub(super) fn new(first_request_by: Tick) -> Self {
        Self { request: AtomicU64::new(first_request_by), write: AtomicU64::new(NEVER), active: AtomicU32::new(0) }
    }

    /// Returns the number of requests in flight.
    pub(super) fn requests(&self) -> u32 {
        self.active.load(Relaxed)
    }

    /// Records that a head is complete.
    pub(super) fn request_began(&self) {
        self.active.store(self.active.load(Relaxed) + 1, Relaxed);
        self.request.store(NEVER, Relaxed);
    }

    /// Sets the deadline for a client that was asked to close the connection.
    pub(super) fn goaway_sent(&self, by: Tick) {
        if self.active.load(Relaxed) == 0 {
            self.request.store(by, Relaxed);
        }
    }

    /// Records the end of a response.
    pub(super) fn request_ended(&self, next_by: Tick) {
        let left = self.active.load(Relaxed).saturating_sub(1);
        self.active.store(left, Relaxed);
        if left == 0 {
            self.request.store(next_by, Relaxed);
        }
    }

    pub(super) fn write_blocked(&self, until: Tick) {
        if self.write.load(Relaxed) == NEVER {
            self.write.store(until, Relaxed);
        }
    }

    pub(super) fn written(&self) {
        self.write.store(NEVER, Relaxed);
    }

    /// Checks all deadlines.
    pub(super) fn check(&self, now: Tick) -> Expired {
        if self.write.load(Relaxed) <= now {
            return Expired::Close;
        }
        if self.request.load(Relaxed) <= now {
            return Expired::NoRequest;
        }
        let next = self.request.load(Relaxed).min(self.write.load(Relaxed));
        Expired::NotYet { ticks: next.saturating_sub(now) }
    }
}

/// The result of checking the deadlines.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Expired {
    /// The connection has to be closed.
    Close,
    /// No request arrived in time.
    NoRequest,
    /// The next deadline is this far away.
    NotYet { ticks: u64 },
}

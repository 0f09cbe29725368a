//! The deadline of an upstream, and the state of the request body that it reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
use std::task::Waker;

use futures_util::task::AtomicWaker;
use tokio::time::timeout;

use super::failure::Failure;
use super::ticks::{TICK, Tick, Ticks, Wait};

/// No deadline is set.
const NEVER: Tick = Tick::MAX;

/// The state of a request body.
const UNDER_WAY: u8 = 0;
const BROKEN: u8 = 1;
const TOO_LONG: u8 = 2;
const LATE: u8 = 3;
const OVERLOADED: u8 = 4;

/// A deadline that moves while a request is served.
#[derive(Debug)]
pub(super) struct UpstreamDeadline {
    at: AtomicU64,
    /// The state of the client's body.
    body: AtomicU8,
    /// The task that responds to the client, if it has to know when the body breaks.
    on_broken_body: AtomicWaker,
    ticks: Arc<Ticks>,
}

impl UpstreamDeadline {
    pub(super) fn new(ticks: Arc<Ticks>) -> Self {
        Self { at: AtomicU64::new(NEVER), body: AtomicU8::new(UNDER_WAY), on_broken_body: AtomicWaker::new(), ticks }
    }

    /// Sets the deadline.
    pub(super) fn set(&self, wait: Wait) {
        self.at.store(self.ticks.after(wait), Relaxed);
    }

    /// Starts a request.
    pub(super) fn start(&self, wait: Wait) {
        self.body.store(UNDER_WAY, Relaxed);
        self.set(wait);
    }

    /// Records that the client's body ended early.
    pub(super) fn note_body_failure(&self, how: Failure) {
        let how = match how {
            Failure::BodyTooLong => TOO_LONG,
            Failure::BodyLate => LATE,
            Failure::Overloaded => OVERLOADED,
            _ => BROKEN,
        };
        self.body.store(how, Relaxed);
        self.on_broken_body.wake();
    }

    /// Wakes a task when the client's body ends early.
    pub(super) fn wake_on_body_failure(&self, waker: &Waker) {
        self.on_broken_body.register(waker);
    }

    /// Returns why the client's body ended early. The upstream is not at fault.
    pub(super) fn body_failure(&self) -> Option<Failure> {
        match self.body.load(Relaxed) {
            BROKEN => Some(Failure::BodyBroken),
            TOO_LONG => Some(Failure::BodyTooLong),
            LATE => Some(Failure::BodyLate),
            OVERLOADED => Some(Failure::Overloaded),
            _ => None,
        }
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
        loop {
            // A deadline that was cleared may be set again at any time.
            let ticks = u32::try_from(self.ticks_left()).unwrap_or(u32::MAX).clamp(1, CHECK_EVERY_TICKS);
            match timeout(TICK * ticks, &mut future).await {
                Ok(output) => return Some(output),
                Err(_elapsed) if self.ticks_left() == 0 => return None,
                Err(_elapsed) => {}
            }
        }
    }
}

/// The maximum delay until a new deadline is noticed.
const CHECK_EVERY_TICKS: u32 = 5;

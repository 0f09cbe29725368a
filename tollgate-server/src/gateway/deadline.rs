//! Deadlines: a coarse clock, one timer for the consecutive deadlines of a task, the timeouts of clients, and the
//! deadlines of upstreams.
//!
//! Every request sets and clears several deadlines. Reading a clock and arming a timer for each would cost more than
//! the limits do. Adding to a counter that is incremented ten times per second costs nothing. Deadlines are set and
//! cleared where the events happen, at the cost of a store, and checked periodically.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::task::coop::unconstrained;
use tokio::time::{Instant, MissedTickBehavior, Sleep, interval, sleep, timeout};
use tollgate::rules::file::internal::TimeoutsRule;

use super::failure::Failure;

/// The resolution. No deadline is shorter than a few ticks.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// A time in ticks since the gateway started.
pub(super) type Tick = u64;

/// No deadline is set.
pub(super) const NEVER: Tick = Tick::MAX;

/// The clock of a gateway.
#[derive(Debug, Default)]
pub(super) struct Ticks(AtomicU64);

impl Ticks {
    pub(super) fn now(&self) -> Tick {
        self.0.load(Relaxed)
    }

    /// Returns the first tick at which this wait is over.
    pub(super) fn after(&self, wait: Wait) -> Tick {
        wait.from(self.now())
    }

    /// Increments the clock forever.
    pub(super) async fn run(&self) {
        let mut steps = interval(TICK);
        // Ticks missed on a busy machine are made up for.
        steps.set_missed_tick_behavior(MissedTickBehavior::Burst);
        loop {
            steps.tick().await;
            self.0.fetch_add(1, Relaxed);
        }
    }
}

/// A duration in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Wait(u64);

impl Wait {
    /// Rounds up: at least that long, and at most two ticks longer.
    pub(super) fn at_least(span: Duration) -> Self {
        let ticks = span.as_millis().div_ceil(TICK.as_millis());
        Self(u64::try_from(ticks).unwrap_or(u64::MAX >> 1).saturating_add(1))
    }

    /// Rounds down: at most that long, and at most a tick shorter.
    pub(super) fn at_most(span: Duration) -> Self {
        Self(u64::try_from(span.as_millis() / TICK.as_millis()).unwrap_or(u64::MAX >> 1))
    }

    #[cfg(test)]
    pub(super) const fn ticks(ticks: u64) -> Self {
        Self(ticks)
    }

    /// Returns when it is over, if it starts at `now`.
    pub(super) fn from(self, now: Tick) -> Tick {
        now.saturating_add(self.0)
    }

    pub(super) fn duration(self) -> Duration {
        TICK.saturating_mul(u32::try_from(self.0).unwrap_or(u32::MAX))
    }
}

/// A timer that fires at or before the deadline and is then set again, so that moving a deadline into the future costs
/// nothing.
pub(super) struct Alarm {
    sleep: Pin<Box<Sleep>>,
    fires_at: Tick,
}

impl Alarm {
    pub(super) fn new() -> Self {
        Self { sleep: Box::pin(sleep(TICK)), fires_at: Tick::MAX }
    }

    /// Returns ready once the deadline has passed. Until then the task is woken in time.
    pub(super) fn poll_passed(&mut self, deadline: Tick, ticks: &Ticks, context: &mut Context<'_>) -> Poll<()> {
        if deadline >= self.fires_at && !self.sleep.is_elapsed() {
            return Poll::Pending;
        }
        loop {
            let left = deadline.saturating_sub(ticks.now());
            if left == 0 {
                return Poll::Ready(());
            }
            self.fires_at = deadline;
            self.sleep.as_mut().reset(Instant::now() + TICK.saturating_mul(u32::try_from(left).unwrap_or(u32::MAX)));
            // Otherwise a task that has used up its cooperative budget would not register its waker.
            ready!(pin!(unconstrained(self.sleep.as_mut())).poll(context));
        }
    }
}

/// The timeouts for clients.
#[derive(Clone, Copy, Debug)]
pub(super) struct ClientTimeouts {
    pub(super) head: Wait,
    pub(super) body: Wait,
    pub(super) idle: Wait,
    pub(super) write: Wait,
    /// The interval of checks. It is as long as the shortest timeout, so no deadline is missed.
    pub(super) check_every: Wait,
}

impl ClientTimeouts {
    pub(super) fn of(rule: &TimeoutsRule) -> Self {
        let wait = |span: tollgate::rules::file::internal::DurationText| Wait::at_least(span.duration());
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

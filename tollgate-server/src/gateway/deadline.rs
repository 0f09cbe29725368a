//! Deadlines: a coarse clock, one timer for consecutive deadlines, the timeouts of clients, and the deadlines of
//! upstreams.
//!
//! Every request sets and clears several deadlines. Reading a clock and arming a timer for each would cost more than
//! the limits do. Adding to a counter that is incremented ten times per second costs nothing. Deadlines are set and
//! cleared where the events happen, at the cost of a store, and checked when a task is polled, or by its alarm.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::task::coop::unconstrained;
use tokio::time::{Instant, MissedTickBehavior, Sleep, interval, sleep};
use tollgate_config::internal::TimeoutsRule;

use super::failure::Failure;

/// The resolution. No deadline is shorter than a few ticks.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// A time in ticks since the gateway started.
pub(super) type Tick = u64;

/// No deadline is set.
pub(super) const NEVER: Tick = Tick::MAX;

/// The clock of a gateway.
#[derive(Debug)]
pub(super) struct Ticks {
    now: AtomicU64,
    started: Instant,
}

impl Default for Ticks {
    fn default() -> Self {
        Self { now: AtomicU64::new(0), started: Instant::now() }
    }
}

impl Ticks {
    /// Returns the time of the last tick, which is late on a busy machine.
    pub(super) fn now(&self) -> Tick {
        self.now.load(Relaxed)
    }

    /// Reads the system's clock.
    pub(super) fn exact(&self) -> Tick {
        let Wait(now) = Wait::at_most(self.started.elapsed());
        self.now.fetch_max(now, Relaxed).max(now)
    }

    /// Returns the first tick at which this wait is over.
    pub(super) fn after(&self, wait: Wait) -> Tick {
        wait.from(self.now())
    }

    /// Moves the clock forever.
    pub(super) async fn run(&self) {
        let mut steps = interval(TICK);
        steps.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            steps.tick().await;
            self.exact();
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

    pub(super) fn span(self) -> Duration {
        TICK.saturating_mul(u32::try_from(self.0).unwrap_or(u32::MAX))
    }

    #[cfg(test)]
    pub(super) const fn ticks(ticks: u64) -> Self {
        Self(ticks)
    }

    /// Returns the time until a deadline.
    pub(super) fn between(now: Tick, deadline: Tick) -> Self {
        Self(deadline.saturating_sub(now))
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
#[derive(Default)]
pub(super) struct Alarm {
    /// Set once a deadline is awaited, with the task that it wakes.
    timer: Option<(Pin<Box<Sleep>>, Waker)>,
    fires_at: Tick,
}

impl Alarm {
    /// Returns ready once the deadline has passed. Until then the task that has called this last is woken in time.
    pub(super) fn poll_passed(&mut self, deadline: Tick, ticks: &Ticks, context: &mut Context<'_>) -> Poll<()> {
        if let Some((sleep, waker)) = &self.timer
            && deadline >= self.fires_at
            && !sleep.is_elapsed()
            && waker.will_wake(context.waker())
        {
            return Poll::Pending;
        }
        loop {
            let left = Wait::between(ticks.now(), deadline);
            if left == Wait(0) {
                return Poll::Ready(());
            }
            self.fires_at = deadline;
            let sleep = match &mut self.timer {
                Some((sleep, waker)) => {
                    sleep.as_mut().reset(Instant::now() + left.duration());
                    waker.clone_from(context.waker());
                    sleep
                }
                None => &mut self.timer.insert((Box::pin(sleep(left.duration())), context.waker().clone())).0,
            };
            // Otherwise a task that has used up its cooperative budget would not register its waker.
            ready!(pin!(unconstrained(sleep.as_mut())).poll(context));
        }
    }
}

/// A timeout for the next event. It restarts with each event and runs only while one is awaited.
#[derive(Default)]
pub(super) struct EventTimeout {
    /// When the event that is awaited is late.
    due: Option<Tick>,
    alarm: Alarm,
}

impl EventTimeout {
    /// Called while an event is awaited. Returns ready if it is late.
    pub(super) fn poll_late(&mut self, wait: Wait, ticks: &Ticks, context: &mut Context<'_>) -> Poll<()> {
        let due = *self.due.get_or_insert_with(|| ticks.after(wait));
        self.alarm.poll_passed(due, ticks, context)
    }

    /// Called when the event has happened.
    pub(super) fn stop(&mut self) {
        self.due = None;
    }
}

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
const CHECK_EVERY: Wait = Wait(5);

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn clock_that_did_not_run_is_late_until_it_is_read() {
        let ticks = Ticks::default();
        sleep(TICK * 5).await;
        assert_eq!([ticks.now(), ticks.exact(), ticks.now()], [0, 5, 5]);
    }

    #[tokio::test(start_paused = true)]
    async fn alarm_wakes_the_task_that_has_polled_it_last() {
        let (ticks, mut alarm) = (Ticks::default(), Alarm::default());
        let (first, last) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
        for task in [&first, &last] {
            let waker = Arc::clone(task).into();
            assert!(alarm.poll_passed(3, &ticks, &mut Context::from_waker(&waker)).is_pending());
        }
        sleep(TICK * 4).await;
        assert!(last.0.load(Relaxed));
    }
}

//! Deadlines: a coarse clock, and one timer for consecutive deadlines.
//!
//! Every request sets and clears several deadlines. Reading a clock and arming a timer for each would cost more than
//! the limits do. Adding to a counter that is incremented ten times per second costs nothing. Deadlines are set and
//! cleared where the events happen, at the cost of a store, and checked when a task is polled, or by its alarm.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use tokio::task::coop::unconstrained;
use tokio::time::{Instant, MissedTickBehavior, Sleep, interval, sleep};

/// The resolution. No deadline is shorter than a few ticks.
pub const TICK: Duration = Duration::from_millis(100);

/// A time in ticks since the gateway started.
pub type Tick = u64;

/// No deadline is set.
pub const NEVER: Tick = Tick::MAX;

/// The clock of a gateway.
#[derive(Debug)]
pub struct Ticks {
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
    #[inline]
    pub fn now(&self) -> Tick {
        self.now.load(Relaxed)
    }

    /// Reads the system's clock.
    #[inline]
    pub fn exact(&self) -> Tick {
        let Wait(now) = Wait::at_most(self.started.elapsed());
        self.now.fetch_max(now, Relaxed).max(now)
    }

    /// Returns the first tick at which this wait is over.
    #[inline]
    pub fn after(&self, wait: Wait) -> Tick {
        wait.from(self.now())
    }

    /// Moves the clock forever.
    pub async fn run(&self) {
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
pub struct Wait(u64);

impl Wait {
    /// Rounds up: at least that long, and at most two ticks longer.
    #[inline]
    pub fn at_least(span: Duration) -> Self {
        let ticks = span.as_millis().div_ceil(TICK.as_millis());
        Self(u64::try_from(ticks).unwrap_or(u64::MAX >> 1).saturating_add(1))
    }

    /// Rounds down: at most that long, and at most a tick shorter.
    #[inline]
    pub fn at_most(span: Duration) -> Self {
        Self(u64::try_from(span.as_millis() / TICK.as_millis()).unwrap_or(u64::MAX >> 1))
    }

    /// Returns the duration.
    #[inline]
    pub fn span(self) -> Duration {
        TICK.saturating_mul(u32::try_from(self.0).unwrap_or(u32::MAX))
    }

    /// Returns this number of ticks.
    #[inline]
    pub const fn ticks(ticks: u64) -> Self {
        Self(ticks)
    }

    /// Returns the time until a deadline.
    #[inline]
    pub fn between(now: Tick, deadline: Tick) -> Self {
        Self(deadline.saturating_sub(now))
    }

    /// Returns when it is over, if it starts at `now`.
    #[inline]
    pub fn from(self, now: Tick) -> Tick {
        now.saturating_add(self.0)
    }

    /// Returns the duration.
    #[inline]
    pub fn duration(self) -> Duration {
        TICK.saturating_mul(u32::try_from(self.0).unwrap_or(u32::MAX))
    }
}

/// A timer that fires at or before the deadline and is then set again, so that moving a deadline into the future costs
/// nothing.
#[derive(Default)]
pub struct Alarm {
    /// Set once a deadline is awaited, with the task that it wakes.
    timer: Option<(Pin<Box<Sleep>>, Waker)>,
    fires_at: Tick,
}

impl Alarm {
    /// Returns ready once the deadline has passed. Until then the task that has called this last is woken in time.
    #[inline]
    pub fn poll_passed(&mut self, deadline: Tick, ticks: &Ticks, context: &mut Context<'_>) -> Poll<()> {
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
pub struct EventTimeout {
    /// When the event that is awaited is late.
    due: Option<Tick>,
    alarm: Alarm,
}

impl EventTimeout {
    /// Called while an event is awaited. Returns ready if it is late.
    #[inline]
    pub fn poll_late(&mut self, wait: Wait, ticks: &Ticks, context: &mut Context<'_>) -> Poll<()> {
        let due = *self.due.get_or_insert_with(|| ticks.after(wait));
        self.alarm.poll_passed(due, ticks, context)
    }

    /// Called when the event has happened.
    #[inline]
    pub fn stop(&mut self) {
        self.due = None;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
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

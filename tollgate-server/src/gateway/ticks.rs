//! A coarse clock for deadlines.
//!
//! Every request sets and clears several deadlines. Reading a clock and arming a timer for each would cost more than
//! the limits do. Adding to a counter that is incremented ten times per second costs nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

/// The resolution. No deadline is shorter than a few ticks.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// A time in ticks since the gateway started.
pub(super) type Tick = u64;

/// The clock of a gateway.
#[derive(Debug, Default)]
pub(super) struct Ticks(AtomicU64);

impl Ticks {
    pub(super) fn now(&self) -> Tick {
        self.0.load(Ordering::Relaxed)
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
            self.0.fetch_add(1, Ordering::Relaxed);
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

    /// Returns when it is over, if it starts at `now`.
    pub(super) fn from(self, now: Tick) -> Tick {
        now.saturating_add(self.0)
    }

    pub(super) fn duration(self) -> Duration {
        TICK.saturating_mul(u32::try_from(self.0).unwrap_or(u32::MAX))
    }
}

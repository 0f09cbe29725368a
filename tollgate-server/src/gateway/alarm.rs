//! One timer for the deadlines that a task has one after the other.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use tokio::task::coop::unconstrained;
use tokio::time::{Instant, Sleep, sleep};

use super::ticks::{TICK, Tick, Ticks};

/// Rings at the deadline or before it, and is set anew then: a deadline that moves away costs nothing.
pub(super) struct Alarm {
    sleep: Pin<Box<Sleep>>,
    fires_at: Tick,
}

impl Alarm {
    pub(super) fn new() -> Self {
        Self { sleep: Box::pin(sleep(TICK)), fires_at: Tick::MAX }
    }

    /// Ready when the deadline has passed; until then the task is woken in time.
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
            // A task that has done much is made to wait, but not without being heard of again.
            ready!(pin!(unconstrained(self.sleep.as_mut())).poll(context));
        }
    }
}

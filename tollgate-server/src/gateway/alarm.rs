//! One timer for the consecutive deadlines of a task.

use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use tokio::task::coop::unconstrained;
use tokio::time::{Instant, Sleep, sleep};

use super::ticks::{TICK, Tick, Ticks};

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

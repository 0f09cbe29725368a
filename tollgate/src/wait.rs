//! Waiting for quota on a tokio runtime.

use std::time::Duration;

use tokio::time::Instant;

use crate::decision::{Decision, Denied};
use crate::key::Key;
use crate::limiter::Limiter;

impl Limiter {
    /// Takes one unit of the key from every limit, waiting for it if need be, but not longer than `max_wait`.
    ///
    /// A leaky bucket that queues gives each caller its turn, first in first out. With the other algorithms
    /// whoever asks first when quota comes back gets it.
    ///
    /// # Errors
    ///
    /// The decision that stands in the way, at once, when it would come too late to wait for: a denial, or a
    /// turn in a queue further off than `max_wait`. Nothing is taken then, unless another caller took the turn
    /// that was seen, and left a later one.
    ///
    /// # Cancellation
    ///
    /// Dropped while it waits for quota, it has taken nothing. Dropped while it waits for its turn in a queue,
    /// its turn stays taken.
    pub async fn until_ready<'k>(
        &self,
        key: impl Into<Key<'k>> + Send,
        max_wait: Duration,
    ) -> Result<Decision, Denied> {
        let key = key.into();
        // A wait that is longer than clocks can tell is a wait without end.
        let deadline = Instant::now().checked_add(max_wait);
        let in_time = |wait: &Duration| deadline.is_none_or(|deadline| *wait <= deadline - Instant::now());
        loop {
            // A turn in a queue cannot be given back, so look before taking one.
            let ahead = self.look_n(key, 1);
            let decision = if ahead.is_allowed() && in_time(&ahead.delay()) { self.check(key) } else { ahead };
            let wait = if decision.is_allowed() { Some(decision.delay()) } else { decision.retry_after() };
            let Some(wait) = wait.filter(in_time) else {
                return Err(Denied(decision));
            };
            tokio::time::sleep(wait).await;
            if decision.is_allowed() {
                return Ok(decision);
            }
        }
    }
}

//! Waiting for quota on a tokio runtime.

use std::time::Duration;

use crate::decision::Decision;
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
    /// The denial, at once, when the quota would come too late; waiting for nothing helps nobody.
    ///
    /// # Cancellation
    ///
    /// Dropped while it waits for quota, it has taken nothing. Dropped while it waits for its turn in a queue,
    /// its place stays taken.
    pub async fn until_ready<'k>(
        &self,
        key: impl Into<Key<'k>> + Send,
        max_wait: Duration,
    ) -> Result<Decision, Decision> {
        let key = key.into();
        let deadline = self.now().saturating_add(max_wait);
        loop {
            let decision = self.check(key);
            let wait = if decision.is_allowed() { Some(decision.delay()) } else { decision.retry_after() };
            match wait {
                Some(wait) if decision.is_allowed() => {
                    tokio::time::sleep(wait).await;
                    return Ok(decision);
                }
                Some(wait) if decision.at().saturating_add(wait) <= deadline => tokio::time::sleep(wait).await,
                _ => return Err(decision),
            }
        }
    }
}

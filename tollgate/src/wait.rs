//! Waiting for quota on a tokio runtime.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use tokio::time::Instant;

use crate::decision::{Decision, Denied};
use crate::key::Key;
use crate::limiter::Limiter;
#[cfg(feature = "redis")]
use crate::redis::RedisLimiter;

/// The cost to wait for and the longest wait: see [`Limiter::until_ready`]. A [`Duration`] converts to a wait for one
/// unit.
///
/// ```
/// use std::time::Duration;
/// use tollgate::{Limit, Limiter, Rate, TokenBucket, Wait};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(Limit::new("tokens", TokenBucket::new(1000, Rate::per_hour(100)))?);
/// let wait = Wait::at_most(Duration::from_secs(30)).cost(250).jitter(Duration::from_millis(20));
/// limiter.until_ready("ann", wait).await?;
/// assert_eq!(limiter.peek("ann").remaining(), 750);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Wait {
    max: Duration,
    cost: u64,
    jitter: Duration,
}

impl Wait {
    /// Waits for one unit, at most for `max`.
    pub const fn at_most(max: Duration) -> Self {
        Self { max, cost: 1, jitter: Duration::ZERO }
    }

    /// Waits for `cost` units.
    pub const fn cost(self, cost: u64) -> Self {
        Self { cost, ..self }
    }

    /// Adds a random time of up to `max` to each wait for quota, so that callers do not all retry at the same time.
    ///
    /// It never extends a wait beyond its maximum. Waits in a queue get no jitter, because their delays already differ.
    pub const fn jitter(self, max: Duration) -> Self {
        Self { jitter: max, ..self }
    }
}

impl From<Duration> for Wait {
    fn from(max: Duration) -> Self {
        Self::at_most(max)
    }
}

impl Limiter {
    /// Takes units of the key from every limit, and waits for them if necessary. It takes one unit unless
    /// [`Wait::cost`] sets another cost.
    ///
    /// A leaky bucket with a queue serves callers in order. With the other algorithms, the first caller that retries
    /// after a refill gets the quota.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tollgate::{Limit, Limiter, Rate, TokenBucket};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limiter = Limiter::new(Limit::new("calls", TokenBucket::new(1, Rate::per_second(100)))?);
    /// for _ in 0..3 {
    ///     limiter.until_ready("ann", Duration::from_secs(10)).await?;
    ///     // … call …
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the denial at once if the wait would exceed the maximum. Nothing is taken then, except if another caller
    /// took the expected position in a queue and the remaining one is too late.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped while it waits for quota, nothing is taken. If it is dropped while it waits in a queue,
    /// its position stays taken.
    pub async fn until_ready<'k>(
        &self,
        key: impl Into<Key<'k>> + Send,
        wait: impl Into<Wait> + Send,
    ) -> Result<Decision, Denied> {
        wait_for(self, key.into(), wait.into()).await
    }
}

#[cfg(feature = "redis")]
impl RedisLimiter {
    /// Takes units of the key from every limit, and waits for them if necessary, as [`Limiter::until_ready`] does.
    ///
    /// While Redis fails, limits follow their failure policy, and a denial by the policy is waited for like any other.
    ///
    /// ```no_run
    /// # async fn example(limiter: tollgate::redis::RedisLimiter) -> Result<(), tollgate::Denied> {
    /// use std::time::Duration;
    /// use tollgate::Wait;
    ///
    /// limiter.until_ready(42, Wait::at_most(Duration::from_secs(10)).cost(5)).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the denial at once if the wait would exceed the maximum.
    ///
    /// # Cancellation
    ///
    /// If the future is dropped while it waits for quota, nothing is taken. If it is dropped during a call to Redis or
    /// while it waits in a queue, the units may stay taken.
    pub async fn until_ready<'k>(
        &self,
        key: impl Into<Key<'k>> + Send,
        wait: impl Into<Wait> + Send,
    ) -> Result<Decision, Denied> {
        wait_for(self, key.into(), wait.into()).await
    }
}

/// The operations of a limiter that waiting needs.
trait WaitTarget {
    /// Returns what [`take`](Self::take) would decide, if that must be known in advance: a position in a queue cannot
    /// be given back.
    fn peek_ahead(&self, key: Key<'_>, cost: u64) -> impl Future<Output = Option<Decision>> + Send;

    fn take(&self, key: Key<'_>, cost: u64) -> impl Future<Output = Decision> + Send;
}

impl WaitTarget for Limiter {
    async fn peek_ahead(&self, key: Key<'_>, cost: u64) -> Option<Decision> {
        Some(self.peek_n(key, cost))
    }

    async fn take(&self, key: Key<'_>, cost: u64) -> Decision {
        self.check_n(key, cost)
    }
}

#[cfg(feature = "redis")]
impl WaitTarget for RedisLimiter {
    async fn peek_ahead(&self, key: Key<'_>, cost: u64) -> Option<Decision> {
        // Without a queue, this round trip is unnecessary.
        let has_queue = self.limits().iter().any(crate::limit::Limit::queues);
        if has_queue { self.peek_n(key, cost).await.ok() } else { None }
    }

    async fn take(&self, key: Key<'_>, cost: u64) -> Decision {
        self.check_n(key, cost).await
    }
}

async fn wait_for(limiter: &impl WaitTarget, key: Key<'_>, wait: Wait) -> Result<Decision, Denied> {
    let waiting = Waiting::start(wait);
    loop {
        let decision = match limiter.peek_ahead(key, waiting.cost).await {
            Some(ahead) if !waiting.is_soon(&ahead) => ahead,
            _ => limiter.take(key, waiting.cost).await,
        };
        if waiting.sleep_after(&decision).await? {
            return Ok(decision);
        }
    }
}

/// A wait in progress.
struct Waiting {
    cost: u64,
    jitter: Duration,
    /// `None` if the deadline is beyond the range of the clock.
    deadline: Option<Instant>,
}

impl Waiting {
    fn start(wait: Wait) -> Self {
        Self { cost: wait.cost, jitter: wait.jitter, deadline: Instant::now().checked_add(wait.max) }
    }

    /// Returns the time left until the deadline.
    fn left(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Returns whether the request is allowed and its delay ends before the deadline.
    fn is_soon(&self, decision: &Decision) -> bool {
        decision.is_allowed() && decision.delay() <= self.left()
    }

    /// Sleeps for the delay of an allowed request and returns true, or until a retry is due and returns false.
    async fn sleep_after(&self, decision: &Decision) -> Result<bool, Denied> {
        let left = self.left();
        let wait = if decision.is_allowed() { Some(decision.delay()) } else { decision.retry_after() };
        let Some(wait) = wait.filter(|wait| *wait <= left) else {
            return Err(Denied(*decision));
        };
        let jitter = if decision.is_allowed() { Duration::ZERO } else { random_below(self.jitter) };
        tokio::time::sleep(wait.saturating_add(jitter).min(left)).await;
        Ok(decision.is_allowed())
    }
}

/// Returns a random time from zero to `max`.
fn random_below(max: Duration) -> Duration {
    if max.is_zero() {
        return max;
    }
    // Every `RandomState` has other keys, which come from the system's randomness.
    let share = RandomState::new().hash_one(0) >> 32;
    let nanos = max.as_nanos().saturating_mul(share.into()) >> 32;
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_spreads_over_all_of_its_range() {
        let max = Duration::from_millis(100);
        let drawn: Vec<Duration> = (0..1000).map(|_| random_below(max)).collect();
        assert!(drawn.iter().all(|time| *time <= max));
        for tenth in 0..10 {
            let range = max * tenth / 10..max * (tenth + 1) / 10;
            assert!(drawn.iter().any(|time| range.contains(time)), "none of {range:?}");
        }
        assert_eq!(random_below(Duration::ZERO), Duration::ZERO);
        assert!(random_below(Duration::MAX) < Duration::MAX);
    }
}

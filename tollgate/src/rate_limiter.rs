//! What every limiter can do, for code that works with any of them.

use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use crate::decision::{Decision, Denied};
use crate::key::Key;
use crate::limit::{Limit, LimitId};
use crate::limiter::{Hit, Limiter};
use crate::reservation::{Reservation, Settlement};

/// What [`Limiter`] and [`RedisLimiter`](crate::redis::RedisLimiter) have in common: code that is generic over this trait
/// works with limits in memory and with limits on Redis.
///
/// Both have these operations as methods too. Those need no import, take everything that becomes a [`Key`], and in memory
/// most of them need no `await`.
///
/// ```
/// use tollgate::{Denied, FixedWindow, Limit, Limiter, MINUTE, RateLimiter};
///
/// async fn send<L: RateLimiter>(limiter: &L, user: &str) -> Result<(), Denied> {
///     limiter.check(user.into()).await.into_result()?;
///     // … send it …
///     Ok(())
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limiter = Limiter::new(Limit::new("mails", FixedWindow::new(1, MINUTE))?);
/// assert!(send(&limiter, "ann").await.is_ok());
/// assert!(send(&limiter, "ann").await.is_err());
/// # Ok(())
/// # }
/// ```
pub trait RateLimiter: Clone + Send + Sync + 'static {
    /// What was taken and may be given back or corrected, once.
    type Reservation: Send + 'static;
    /// Why the store did not answer. Memory always does.
    type Error: Error + Send + Sync + 'static;

    /// Takes one unit of the key from every limit, or from none.
    fn check(&self, key: Key<'_>) -> impl Future<Output = Decision> + Send {
        self.check_n(key, 1)
    }

    /// Takes `cost` units of the key from every limit, or from none.
    fn check_n(&self, key: Key<'_>, cost: u64) -> impl Future<Output = Decision> + Send;

    /// Takes what every hit asks for, or nothing.
    fn decide(&self, hits: &[Hit<'_>]) -> impl Future<Output = Decision> + Send;

    /// Returns what is left for the key, taking nothing.
    fn peek(&self, key: Key<'_>) -> impl Future<Output = Result<Decision, Self::Error>> + Send;

    /// Forgets all that the key has spent.
    fn reset(&self, key: Key<'_>) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Takes `cost` units of the key now, to be given back or corrected later: see [`Limiter::reserve`].
    fn reserve(
        &self,
        key: Key<'_>,
        cost: u64,
        expires_after: Duration,
    ) -> impl Future<Output = Result<Self::Reservation, Denied>> + Send;

    /// Takes what every hit asks for, or nothing, to be given back or corrected later.
    fn reserve_hits(
        &self,
        hits: &[Hit<'_>],
        expires_after: Duration,
    ) -> impl Future<Output = Result<Self::Reservation, Denied>> + Send;

    /// Brings a reservation to its actual cost: see [`Limiter::settle`].
    fn settle(
        &self,
        reservation: Self::Reservation,
        actual: u64,
    ) -> impl Future<Output = Result<Settlement, Self::Error>> + Send;

    /// Gives back what a reservation took: see [`Limiter::refund`].
    fn refund(&self, reservation: Self::Reservation) -> impl Future<Output = Result<Settlement, Self::Error>> + Send {
        self.settle(reservation, 0)
    }

    /// Takes units of the key from every limit, and waits for them if need be: see [`Limiter::until_ready`].
    #[cfg(feature = "tokio")]
    fn until_ready(&self, key: Key<'_>, wait: crate::Wait) -> impl Future<Output = Result<Decision, Denied>> + Send;

    /// Returns the decision that took a reservation.
    fn decision_of(reservation: &Self::Reservation) -> &Decision;

    /// Returns the limit of that name.
    fn id(&self, name: &str) -> Option<LimitId>;

    /// Returns the limits that apply to every key, in the order they were given.
    fn limits(&self) -> &[Limit];
}

impl RateLimiter for Limiter {
    type Reservation = Reservation;
    type Error = Infallible;

    async fn check_n(&self, key: Key<'_>, cost: u64) -> Decision {
        Self::check_n(self, key, cost)
    }

    async fn decide(&self, hits: &[Hit<'_>]) -> Decision {
        self.decide_now(hits)
    }

    async fn peek(&self, key: Key<'_>) -> Result<Decision, Infallible> {
        Ok(Self::peek(self, key))
    }

    async fn reset(&self, key: Key<'_>) -> Result<(), Infallible> {
        Self::reset(self, key);
        Ok(())
    }

    async fn reserve(&self, key: Key<'_>, cost: u64, expires_after: Duration) -> Result<Reservation, Denied> {
        Self::reserve(self, key, cost, expires_after)
    }

    async fn reserve_hits(&self, hits: &[Hit<'_>], expires_after: Duration) -> Result<Reservation, Denied> {
        Self::reserve_hits(self, hits, expires_after)
    }

    async fn settle(&self, reservation: Reservation, actual: u64) -> Result<Settlement, Infallible> {
        Ok(Self::settle(self, reservation, actual))
    }

    #[cfg(feature = "tokio")]
    async fn until_ready(&self, key: Key<'_>, wait: crate::Wait) -> Result<Decision, Denied> {
        Self::until_ready(self, key, wait).await
    }

    fn decision_of(reservation: &Reservation) -> &Decision {
        reservation.decision()
    }

    fn id(&self, name: &str) -> Option<LimitId> {
        Self::id(self, name)
    }

    fn limits(&self) -> &[Limit] {
        Self::limits(self)
    }
}

#[cfg(feature = "redis")]
mod on_redis {
    use super::*;
    use crate::redis::{RedisLimiter, RedisReservation, StoreError};

    impl RateLimiter for RedisLimiter {
        type Reservation = RedisReservation;
        type Error = StoreError;

        async fn check_n(&self, key: Key<'_>, cost: u64) -> Decision {
            Self::check_n(self, key, cost).await
        }

        async fn decide(&self, hits: &[Hit<'_>]) -> Decision {
            Self::decide(self, hits).await
        }

        async fn peek(&self, key: Key<'_>) -> Result<Decision, StoreError> {
            Self::peek(self, key).await
        }

        async fn reset(&self, key: Key<'_>) -> Result<(), StoreError> {
            Self::reset(self, key).await
        }

        async fn reserve(&self, key: Key<'_>, cost: u64, expires_after: Duration) -> Result<RedisReservation, Denied> {
            Self::reserve(self, key, cost, expires_after).await
        }

        async fn reserve_hits(&self, hits: &[Hit<'_>], expires_after: Duration) -> Result<RedisReservation, Denied> {
            Self::reserve_hits(self, hits, expires_after).await
        }

        async fn settle(&self, reservation: RedisReservation, actual: u64) -> Result<Settlement, StoreError> {
            Self::settle(self, reservation, actual).await
        }

        async fn until_ready(&self, key: Key<'_>, wait: crate::Wait) -> Result<Decision, Denied> {
            Self::until_ready(self, key, wait).await
        }

        fn decision_of(reservation: &RedisReservation) -> &Decision {
            reservation.decision()
        }

        fn id(&self, name: &str) -> Option<LimitId> {
            Self::id(self, name)
        }

        fn limits(&self) -> &[Limit] {
            Self::limits(self)
        }
    }
}

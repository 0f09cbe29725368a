//! The operations that all limiters share, for code that works with any of them.

use std::convert::Infallible;
use std::error::Error;
use std::time::Duration;

use crate::decision::{Decision, Denied, LimitId};
use crate::key::Key;
use crate::limit::Limit;
use crate::limiter::reservation::{Reservation, Settlement};
use crate::limiter::{Hit, Limiter};

/// The operations that [`Limiter`] and `RedisLimiter` share.
///
/// Code that is generic over this trait works with limits in memory and with limits on Redis, for example on Redis in
/// production and in memory in tests. Both types also have these operations as inherent methods, which need no import
/// and accept any type that converts to a [`Key`]. The differences:
///
/// | operation | `Limiter` | `RedisLimiter` | this trait |
/// |---|---|---|---|
/// | check hits | `decide_now`, immediate | `decide`, async | [`decide`](Self::decide), async |
/// | read the quota | `peek`, infallible | `peek`, can fail | [`peek`](Self::peek), can fail with [`Error`](Self::Error) |
/// | reservation | [`Reservation`] | `RedisReservation` | [`Self::Reservation`], read with [`decision_of`](Self::decision_of) |
///
/// Checks never fail: while Redis is unreachable, limits follow their failure policy. The other operations return the
/// store's error, which is [`Infallible`] in memory.
///
/// ```
/// use tollgate::{Denied, FixedWindow, Hit, Limit, Limiter, MINUTE, RateLimiter};
///
/// async fn send<L: RateLimiter>(limiter: &L, user: &str) -> Result<u64, Denied> {
///     let mails = limiter.id("mails").expect("the limiter has this limit");
///     limiter.decide(&[Hit::new(mails, user)]).await.into_result()?;
///     let reservation = limiter.reserve(user.into(), 2, MINUTE).await?;
///     assert!(L::decision_of(&reservation).is_allowed());
///     // … only one more mail is sent …
///     let _ = limiter.settle(reservation, 1).await;
///     Ok(limiter.peek(user.into()).await.map_or(0, |decision| decision.remaining()))
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limit = Limit::new("mails", FixedWindow::new(4, MINUTE).from_first_request())?;
/// let limiter = Limiter::new(limit.clone());
/// assert_eq!(send(&limiter, "ann").await?, 2);
///
/// // The same function with limits on Redis:
/// # #[cfg(feature = "redis")]
/// async fn send_with_redis(limit: Limit) -> Result<(), Box<dyn std::error::Error>> {
///     let limiter = tollgate::redis::RedisLimiter::builder("redis://10.0.0.5:6379").limit(limit).connect().await?;
///     send(&limiter, "ann").await?;
///     Ok(())
/// }
/// # Ok(())
/// # }
/// ```
pub trait RateLimiter: Clone + Send + Sync + 'static {
    /// Units that were taken and can be corrected or given back once.
    type Reservation: Send + 'static;
    /// The error if the store does not respond. Memory always does.
    type Error: Error + Send + Sync + 'static;

    /// Takes one unit of the key from every limit, or from none.
    fn check(&self, key: Key<'_>) -> impl Future<Output = Decision> + Send {
        self.check_n(key, 1)
    }

    /// Takes `cost` units of the key from every limit, or from none.
    fn check_n(&self, key: Key<'_>, cost: u64) -> impl Future<Output = Decision> + Send;

    /// Takes the cost of every hit, or nothing.
    fn decide(&self, hits: &[Hit<'_>]) -> impl Future<Output = Decision> + Send;

    /// Returns the quota that is left for the key, taking nothing.
    fn peek(&self, key: Key<'_>) -> impl Future<Output = Result<Decision, Self::Error>> + Send;

    /// Gives the key its whole quota back, in every limit.
    fn reset(&self, key: Key<'_>) -> impl Future<Output = Result<(), Self::Error>> + Send;

    /// Takes `cost` units of the key now, to correct or refund later: see [`Limiter::reserve`].
    fn reserve(
        &self,
        key: Key<'_>,
        cost: u64,
        expires_after: Duration,
    ) -> impl Future<Output = Result<Self::Reservation, Denied>> + Send;

    /// Takes the cost of every hit, or nothing, to correct or refund later: see [`Limiter::reserve_hits`].
    fn reserve_hits(
        &self,
        hits: &[Hit<'_>],
        expires_after: Duration,
    ) -> impl Future<Output = Result<Self::Reservation, Denied>> + Send;

    /// Corrects a reservation to its actual cost: see [`Limiter::settle`].
    fn settle(
        &self,
        reservation: Self::Reservation,
        actual: u64,
    ) -> impl Future<Output = Result<Settlement, Self::Error>> + Send;

    /// Gives back the units of a reservation: see [`Limiter::refund`].
    fn refund(&self, reservation: Self::Reservation) -> impl Future<Output = Result<Settlement, Self::Error>> + Send {
        self.settle(reservation, 0)
    }

    /// Takes units of the key from every limit, and waits for them if necessary: see [`Limiter::until_ready`].
    #[cfg(feature = "tokio")]
    fn until_ready(&self, key: Key<'_>, wait: crate::Wait) -> impl Future<Output = Result<Decision, Denied>> + Send;

    /// Returns the decision that took a reservation.
    fn decision_of(reservation: &Self::Reservation) -> &Decision;

    /// Returns the id of the limit of that name.
    fn id(&self, name: &str) -> Option<LimitId>;

    /// Returns the id of a limit's variant, by the names of both: see [`LimitSet::variant`](crate::LimitSet::variant).
    fn variant(&self, limit: &str, variant: &str) -> Option<LimitId>;

    /// Returns the id of the ban of that name: see [`LimitSet::ban`](crate::LimitSet::ban).
    fn ban(&self, name: &str) -> Option<LimitId>;

    /// Returns the limit, variant or ban of an id, such as [`Decision::limit`], or `None` if the id comes from another
    /// limiter.
    fn limit(&self, id: LimitId) -> Option<&Limit>;

    /// Returns the limits that apply to every key, in the order in which they were added.
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

    fn variant(&self, limit: &str, variant: &str) -> Option<LimitId> {
        Self::variant(self, limit, variant)
    }

    fn ban(&self, name: &str) -> Option<LimitId> {
        Self::ban(self, name)
    }

    fn limit(&self, id: LimitId) -> Option<&Limit> {
        Self::limit(self, id)
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

        fn variant(&self, limit: &str, variant: &str) -> Option<LimitId> {
            Self::variant(self, limit, variant)
        }

        fn ban(&self, name: &str) -> Option<LimitId> {
            Self::ban(self, name)
        }

        fn limit(&self, id: LimitId) -> Option<&Limit> {
            Self::limit(self, id)
        }

        fn limits(&self) -> &[Limit] {
            Self::limits(self)
        }
    }
}

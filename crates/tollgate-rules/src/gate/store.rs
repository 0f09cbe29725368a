//! The store of a gate: this process's memory or, with the feature `redis`, Redis.

use std::fmt;
use std::time::Duration;

#[cfg(feature = "redis")]
use smallvec::SmallVec;
use tollgate::internal::{FewHits, Held};
use tollgate::{Decision, Hit, InvalidLimit, LimitId, Limiter, LimiterBuilder, Settlement};

use super::Gate;
use tollgate::Timestamp;
use tollgate::internal::HashedHit;
#[cfg(feature = "redis")]
use tollgate::internal::redis::{RedisHit, RedisHits};
#[cfg(feature = "redis")]
use tollgate::redis::{ConnectError, RedisLimiter, RedisLimiterBuilder};

use crate::RuleSet;

#[derive(Clone)]
pub(super) enum Store {
    Memory(Limiter),
    #[cfg(feature = "redis")]
    Redis(RedisLimiter),
}

/// Hits prepared for a store.
#[derive(Clone)]
pub(super) enum Hits {
    Memory(FewHits),
    #[cfg(feature = "redis")]
    // Boxed to keep the enum small for the memory store. On Redis, an allocation is negligible beside the round trip.
    Redis(Box<RedisHits>),
}

impl Hits {
    /// Returns the hit of one limit on the key that is counted, at another cost.
    pub(super) fn only(&self, limit: LimitId, cost: u64) -> Self {
        match self {
            Self::Memory(hits) => Self::Memory(tollgate::internal::hit_of_limit(hits, limit, cost)),
            #[cfg(feature = "redis")]
            Self::Redis(hits) => Self::Redis(Box::new(tollgate::internal::redis::only(hits, limit, cost))),
        }
    }

    /// Returns the hit at this position alone.
    pub(super) fn single(&self, position: usize) -> Self {
        match self {
            Self::Memory(hits) => Self::Memory(hits.get(position).copied().into_iter().collect()),
            #[cfg(feature = "redis")]
            Self::Redis(hits) => Self::Redis(Box::new(hits.get(position).cloned().into_iter().collect())),
        }
    }

    /// Sets the cost of the hit at this position.
    pub(super) fn set_cost(&mut self, position: usize, cost: u64) {
        match self {
            Self::Memory(hits) => hits.get_mut(position).into_iter().for_each(|hit| hit.cost = cost),
            #[cfg(feature = "redis")]
            Self::Redis(hits) => {
                hits.get_mut(position).into_iter().for_each(|hit| tollgate::internal::redis::set_cost(hit, cost))
            }
        }
    }

    /// Returns hits on the same keys that cost nothing, without those on some limits.
    pub(super) fn looks(&self, leave_out: impl Fn(LimitId) -> bool) -> Self {
        match self {
            Self::Memory(hits) => {
                let looks = hits.iter().filter(|hit| !leave_out(hit.limit));
                Self::Memory(looks.map(|hit| HashedHit { cost: 0, ..*hit }).collect())
            }
            #[cfg(feature = "redis")]
            Self::Redis(hits) => Self::Redis(Box::new(tollgate::internal::redis::looks(hits, leave_out))),
        }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Memory(hits) => hits.len(),
            #[cfg(feature = "redis")]
            Self::Redis(hits) => hits.len(),
        }
    }

    /// Returns the limits of the hits, with their costs.
    pub(super) fn costs(&self) -> impl Iterator<Item = (LimitId, u64)> {
        let here = self.hashed().iter().map(|one| (one.limit, one.cost));
        #[cfg(feature = "redis")]
        let here = here.chain(self.on_redis().iter().map(tollgate::internal::redis::cost));
        here
    }

    /// Returns the hits on a store in memory.
    pub(super) fn hashed(&self) -> &[HashedHit] {
        match self {
            Self::Memory(hits) => hits,
            #[cfg(feature = "redis")]
            Self::Redis(_) => &[],
        }
    }

    /// Returns the hits on Redis.
    #[cfg(feature = "redis")]
    pub(super) fn on_redis(&self) -> &[RedisHit] {
        match self {
            Self::Memory(_) => &[],
            Self::Redis(hits) => hits,
        }
    }

    /// Adds a hit on the memory store.
    pub(super) fn push(&mut self, one: HashedHit) {
        match self {
            Self::Memory(hits) => hits.push(one),
            #[cfg(feature = "redis")]
            Self::Redis(_) => {}
        }
    }

    /// Sorts the hits by their limits.
    pub(super) fn sort_by_key<K: Ord>(&mut self, key: impl Fn(LimitId) -> K) {
        match self {
            Self::Memory(hits) => hits.sort_by_key(|one| key(one.limit)),
            #[cfg(feature = "redis")]
            Self::Redis(hits) => hits.sort_by_key(|one| key(tollgate::internal::redis::cost(one).0)),
        }
    }

    /// Adds the cost to what the limits have left that would allow a denied request: nothing was taken from them.
    #[cfg(feature = "redis")]
    pub(super) fn show_as_not_taken(&mut self) {
        let Self::Redis(hits) = self else { return };
        let not_taken = |hit: &RedisHit| {
            let own = *tollgate::internal::redis::decided(hit)?;
            Some(if own.is_allowed() { own.with_more_remaining(tollgate::internal::redis::cost(hit).1) } else { own })
        };
        let each: SmallVec<[Option<Decision>; 4]> = hits.iter().map(not_taken).collect();
        tollgate::internal::redis::set_decided(hits, &each);
    }

    /// Replaces the hits with the same hits and their receipts.
    #[cfg(feature = "redis")]
    pub(super) fn set_charged(&mut self, charged: RedisHits) {
        if let Self::Redis(hits) = self {
            **hits = charged;
        }
    }

    pub(super) fn append(&mut self, other: Self) {
        match (self, other) {
            (Self::Memory(hits), Self::Memory(mut other)) => hits.append(&mut other),
            #[cfg(feature = "redis")]
            (Self::Redis(hits), Self::Redis(mut other)) => hits.append(&mut other),
            #[cfg(feature = "redis")]
            _ => unreachable!("both are made for one store"),
        }
    }
}

impl Gate {
    /// Creates a gate with counts on Redis. The limits of `rules` replace those of the builder.
    ///
    /// # Errors
    ///
    /// If the URL or a setting is invalid. Redis need not be reachable yet.
    ///
    /// # Panics
    ///
    /// If there is no tokio runtime.
    #[cfg(feature = "redis")]
    pub async fn on_redis(rules: RuleSet, settings: RedisLimiterBuilder) -> Result<Self, ConnectError> {
        let limiter = settings.limits(rules.limit_set()).connect().await?;
        Ok(Self::with_store(rules, Store::Redis(limiter)))
    }

    /// Returns the in-memory limiter, for example to count its keys or to read its [`overflow`](Limiter::overflow).
    /// Returns `None` on Redis.
    #[must_use]
    pub fn memory(&self) -> Option<Limiter> {
        match &self.0.state.load().store {
            Store::Memory(limiter) => Some(limiter.clone()),
            #[cfg(feature = "redis")]
            Store::Redis(_) => None,
        }
    }

    /// Returns the Redis limiter, for example to return leases or to read its [`stats`](RedisLimiter::stats). Returns
    /// `None` in memory.
    #[cfg(feature = "redis")]
    #[must_use]
    pub fn redis(&self) -> Option<RedisLimiter> {
        match &self.0.state.load().store {
            Store::Memory(_) => None,
            Store::Redis(limiter) => Some(limiter.clone()),
        }
    }
}

impl Store {
    pub(super) fn memory(rules: &RuleSet, settings: LimiterBuilder) -> Result<Self, InvalidLimit> {
        rules.limiter(settings).map(Self::Memory)
    }

    /// Creates a store from a limiter that has the limits of the rules.
    pub(super) fn of(limiter: Limiter) -> Self {
        Self::Memory(limiter)
    }

    pub(super) fn with_rules(&self, rules: &RuleSet) -> Result<Self, InvalidLimit> {
        match self {
            Self::Memory(limiter) => rules.limiter_after(limiter).map(Self::Memory),
            #[cfg(feature = "redis")]
            Self::Redis(limiter) => limiter.with_limits(rules.limit_set()).map(Self::Redis),
        }
    }

    /// Returns the limiter, if the store is in memory.
    #[inline(always)]
    pub(super) fn in_memory(&self) -> Option<&Limiter> {
        match self {
            Self::Memory(limiter) => Some(limiter),
            #[cfg(feature = "redis")]
            Self::Redis(_) => None,
        }
    }

    /// Returns the limiter, if the store is on Redis.
    #[cfg(all(feature = "file", feature = "redis"))]
    pub(super) fn on_redis(&self) -> Option<&RedisLimiter> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(limiter) => Some(limiter),
        }
    }

    /// Returns the wall-clock time according to the limiter.
    pub(super) fn now(&self) -> Timestamp {
        match self {
            Self::Memory(limiter) => limiter.wall_now(),
            #[cfg(feature = "redis")]
            Self::Redis(limiter) => limiter.now(),
        }
    }

    pub(super) fn no_hits(&self) -> Hits {
        match self {
            Self::Memory(_) => Hits::Memory(FewHits::new()),
            #[cfg(feature = "redis")]
            Self::Redis(_) => Hits::Redis(Box::default()),
        }
    }

    /// Adds a hit. Two hits must not have the same limit and key.
    #[inline]
    pub(super) fn add_hit(&self, hits: &mut Hits, hit: Hit<'_>) {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => hits.push(limiter.hash_hit(&hit)),
            #[cfg(feature = "redis")]
            (Self::Redis(limiter), Hits::Redis(hits)) => hits.push(limiter.redis_hit(&hit)),
            #[cfg(feature = "redis")]
            _ => unreachable!("hits are made for this store"),
        }
    }

    /// Returns a denial if this process already knows that one of the hits is denied. Otherwise it changes nothing.
    /// Makes no round trip.
    pub(super) fn refuse(&self, hits: &Hits) -> Option<Decision> {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => limiter.find_denial(hits),
            #[cfg(feature = "redis")]
            (Self::Redis(limiter), Hits::Redis(hits)) => limiter.certain_denial(hits),
            #[cfg(feature = "redis")]
            _ => None,
        }
    }

    /// Records charges of an allowed decision as open for that time: those of limits whose cost `may_change`.
    pub(super) fn open(
        &self,
        hits: &Hits,
        decision: &Decision,
        within: Duration,
        may_change: impl Fn(LimitId) -> bool,
    ) -> Option<Held> {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => {
                let cost = |hit: &HashedHit| if may_change(hit.limit) { hit.cost } else { 0 };
                let hits: FewHits = hits.iter().map(|hit| HashedHit { cost: cost(hit), ..*hit }).collect();
                Some(limiter.open(&hits, decision, decision.at.saturating_add(within)))
            }
            #[cfg(feature = "redis")]
            (Self::Redis(limiter), Hits::Redis(hits)) => Some(limiter.open(hits, within, may_change)),
            #[cfg(feature = "redis")]
            _ => None,
        }
    }

    /// Returns the current decision without taking anything, or `None` if the store cannot be reached.
    pub(super) async fn peek(&self, hits: &Hits) -> Option<Decision> {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => Some(limiter.peek_hashed(hits)),
            #[cfg(feature = "redis")]
            (Self::Redis(limiter), Hits::Redis(hits)) => limiter.peek_hits(hits).await.ok(),
            #[cfg(feature = "redis")]
            _ => None,
        }
    }

    /// Returns the decision of one limit of a request that was allowed or denied: the quota that is left, or its denial.
    /// `None` if it is on Redis and this process did not look at it.
    pub(super) fn own_decision(&self, hits: &Hits, position: usize, is_taken: bool) -> Option<Decision> {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => Some(limiter.own_decision(*hits.get(position)?, is_taken)),
            #[cfg(feature = "redis")]
            (Self::Redis(_), Hits::Redis(hits)) => tollgate::internal::redis::decided(hits.get(position)?).copied(),
            #[cfg(feature = "redis")]
            _ => None,
        }
    }

    /// Reads the decisions of single limits that [`own_decision`](Self::own_decision) lacks, because this process knew
    /// without a call that another limit denies the request.
    #[cfg(feature = "redis")]
    pub(super) async fn read_undecided(&self, hits: &mut Hits, denied: &Decision) {
        if let (Self::Redis(limiter), Hits::Redis(hits)) = (self, hits) {
            limiter.read_undecided(hits, denied).await;
        }
    }

    /// Gives back the cost of each hit, from the newest charges of its key.
    pub(super) async fn credit(&self, hits: &Hits) -> Result<(), StoreUnavailable> {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => limiter.credit_hashed(hits),
            #[cfg(feature = "redis")]
            (Self::Redis(limiter), Hits::Redis(hits)) => {
                limiter.credit_hits(hits).await.map_err(StoreUnavailable::new)?;
            }
            #[cfg(feature = "redis")]
            _ => unreachable!("hits are made for this store"),
        }
        Ok(())
    }

    /// Gives the key of each hit its whole quota back.
    pub(super) async fn reset(&self, hits: &Hits) -> Result<(), StoreUnavailable> {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => limiter.reset_hashed(hits),
            #[cfg(feature = "redis")]
            (Self::Redis(limiter), Hits::Redis(hits)) => {
                limiter.reset_hits(hits).await.map_err(StoreUnavailable::new)?;
            }
            #[cfg(feature = "redis")]
            _ => unreachable!("hits are made for this store"),
        }
        Ok(())
    }

    /// Returns the hit whose key owes units for longest, with that time. `None` if no key owes units, or if the store does
    /// not reply.
    pub(super) async fn owes(&self, hits: &Hits, is_ban: impl Fn(LimitId) -> bool) -> Option<(usize, Duration)> {
        let mut longest: Option<(usize, Duration)> = None;
        let limits = hits.costs().enumerate().filter(|(_, (limit, cost))| *cost == 0 && !is_ban(*limit));
        for (position, _) in limits {
            let wait = match (self, hits) {
                (Self::Memory(limiter), Hits::Memory(hits)) => {
                    hits.get(position).and_then(|hit| limiter.owes_for(*hit))
                }
                #[cfg(feature = "redis")]
                (Self::Redis(limiter), Hits::Redis(hits)) => {
                    limiter.owes_hits(hits.get(position..=position).unwrap_or_default()).await.ok().flatten()
                }
                #[cfg(feature = "redis")]
                _ => None,
            };
            if let Some(wait) = wait.filter(|wait| longest.is_none_or(|(_, longest)| *wait > longest)) {
                longest = Some((position, wait));
            }
        }
        longest
    }

    /// Charges units that were spent already to the key of the first hit, whatever is left.
    pub(super) async fn charge(&self, hit: &Hits) -> Settlement {
        match (self, hit) {
            (Self::Memory(limiter), Hits::Memory(hits)) => {
                hits.first().map_or(Settlement::Settled, |hit| limiter.charge_hashed(*hit))
            }
            #[cfg(feature = "redis")]
            (Self::Redis(limiter), Hits::Redis(hits)) => {
                let Some(hit) = hits.first() else { return Settlement::Settled };
                limiter.charge_hit(hit).await.unwrap_or(Settlement::Unreachable)
            }
            #[cfg(feature = "redis")]
            _ => Settlement::Unreachable,
        }
    }

    /// Settles the hit at index `hit` at its actual cost. If it does not count any more, it gives nothing back.
    pub(super) async fn settle(
        &self,
        hits: &Hits,
        hit: usize,
        decision: &Decision,
        actual: u64,
        still_counts: bool,
    ) -> Settlement {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => {
                let (hits, taken) = (hits.get(hit..=hit).unwrap_or_default(), (decision.at, decision.wall_offset));
                limiter.settle_hashed(hits, taken, actual, |_| still_counts)
            }
            #[cfg(feature = "redis")]
            (Self::Redis(limiter), Hits::Redis(hits)) => {
                let hits = hits.get(hit..=hit).unwrap_or_default();
                limiter.settle_hits(hits, actual, |_| still_counts).await.unwrap_or(Settlement::Unreachable)
            }
            #[cfg(feature = "redis")]
            _ => Settlement::Unreachable,
        }
    }
}

/// The store did not confirm a refund, a reset or a reservation in time. It may have been executed nevertheless.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreUnavailable {
    /// The reason, for people.
    pub reason: String,
}

impl StoreUnavailable {
    #[cfg(feature = "redis")]
    pub(super) fn new(error: impl fmt::Display) -> Self {
        Self { reason: error.to_string() }
    }
}

impl fmt::Display for StoreUnavailable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "the store is unavailable ({}): try again later", self.reason)
    }
}

impl std::error::Error for StoreUnavailable {}

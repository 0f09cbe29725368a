//! The store of a gate: this process's memory, or Redis.

use std::pin::Pin;
use std::time::Duration;

use futures_util::future::{join, join_all};

use super::pending::{PendingChecks, decide_now, strike, struck};
use super::together::{self, Checks, Collected, CombinedDecision};
use super::{Gate, Outcome, StoreUnavailable};
use crate::decision::Decision;
use crate::error::InvalidLimit;
use crate::limit::LimitId;
use crate::limiter::{FewHits, Hit, Limiter, LimiterBuilder};
use crate::redis::{ConnectError, RedisHit, RedisHits, RedisLimiter, RedisLimiterBuilder};
use crate::reservation::Settlement;
use crate::rules::RuleSet;
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

#[derive(Clone)]
pub(super) enum Store {
    Memory(Limiter),
    Redis(RedisLimiter),
}

/// Hits prepared for a store.
pub(super) enum Hits {
    Memory(FewHits),
    // Boxed to keep the enum small for the memory store. On Redis, an allocation is negligible beside the round trip.
    Redis(Box<RedisHits>),
}

impl Hits {
    /// Returns the hit of one limit alone, at another cost.
    pub(super) fn only(&self, limit: LimitId, cost: u64) -> Self {
        match self {
            Self::Memory(hits) => Self::Memory(crate::limiter::hits_of_limit(hits, limit, cost)),
            Self::Redis(hits) => Self::Redis(Box::new(crate::redis::only(hits, limit, cost))),
        }
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Memory(hits) => hits.len(),
            Self::Redis(hits) => hits.len(),
        }
    }

    /// Returns the limits of the hits, with their costs.
    pub(super) fn costs(&self) -> impl Iterator<Item = (LimitId, u64)> {
        let (here, elsewhere) = match self {
            Self::Memory(hits) => (&hits[..], &[][..]),
            Self::Redis(hits) => (&[][..], &hits[..]),
        };
        here.iter().map(|one| (one.limit, one.cost)).chain(elsewhere.iter().map(crate::redis::cost))
    }

    /// Returns the hits on a store in memory.
    pub(super) fn hashed(&self) -> &[HashedHit] {
        match self {
            Self::Memory(hits) => hits,
            Self::Redis(_) => &[],
        }
    }

    /// Returns the hits on Redis.
    pub(super) fn on_redis(&self) -> &[RedisHit] {
        match self {
            Self::Memory(_) => &[],
            Self::Redis(hits) => hits,
        }
    }

    /// Adds a hit on the memory store.
    #[cfg(feature = "tower")]
    pub(super) fn push(&mut self, one: HashedHit) {
        if let Self::Memory(hits) = self {
            hits.push(one);
        }
    }

    /// Sorts the hits by their limits.
    pub(super) fn sort_by_key<K: Ord>(&mut self, key: impl Fn(LimitId) -> K) {
        match self {
            Self::Memory(hits) => hits.sort_by_key(|one| key(one.limit)),
            Self::Redis(hits) => hits.sort_by_key(|one| key(crate::redis::cost(one).0)),
        }
    }

    /// Replaces the hits with the same hits and their receipts.
    fn set_charged(&mut self, charged: RedisHits) {
        if let Self::Redis(hits) = self {
            **hits = charged;
        }
    }

    pub(super) fn append(&mut self, other: Self) {
        match (self, other) {
            (Self::Memory(hits), Self::Memory(mut other)) => hits.append(&mut other),
            (Self::Redis(hits), Self::Redis(mut other)) => hits.append(&mut other),
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
            Store::Redis(_) => None,
        }
    }

    /// Returns the Redis limiter, for example to return leases or to read its [`stats`](RedisLimiter::stats). Returns
    /// `None` in memory.
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
            Self::Redis(limiter) => limiter.with_limits(rules.limit_set()).map(Self::Redis),
        }
    }

    /// Returns the limiter, if the store is in memory.
    #[inline(always)]
    pub(super) fn in_memory(&self) -> Option<&Limiter> {
        match self {
            Self::Memory(limiter) => Some(limiter),
            Self::Redis(_) => None,
        }
    }

    /// Returns the limiter, if the store is on Redis.
    #[cfg(feature = "file")]
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
            Self::Redis(limiter) => limiter.now(),
        }
    }

    pub(super) fn no_hits(&self) -> Hits {
        match self {
            Self::Memory(_) => Hits::Memory(FewHits::new()),
            Self::Redis(_) => Hits::Redis(Box::default()),
        }
    }

    /// Adds a hit. Two hits must not have the same limit and key.
    #[inline]
    pub(super) fn add_hit(&self, hits: &mut Hits, hit: Hit<'_>) {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => hits.push(limiter.hash_hit(&hit)),
            (Self::Redis(limiter), Hits::Redis(hits)) => hits.extend(limiter.redis_hits(&[hit])),
            _ => unreachable!("hits are made for this store"),
        }
    }

    /// Returns a denial if this process already knows that one of the hits is denied. Otherwise it changes nothing.
    /// Makes no round trip.
    pub(super) fn refuse(&self, hits: &Hits) -> Option<Decision> {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => limiter.find_denial(hits),
            (Self::Redis(limiter), Hits::Redis(hits)) => limiter.certain_denial(hits),
            _ => None,
        }
    }

    /// Returns the current decision without taking anything, or `None` if the store cannot be reached.
    pub(super) async fn peek(&self, hits: &Hits) -> Option<Decision> {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => Some(limiter.peek_hashed(hits)),
            (Self::Redis(limiter), Hits::Redis(hits)) => limiter.peek_hits(hits).await.ok(),
            _ => None,
        }
    }

    /// Gives back the cost of each hit, from the newest charges of its key.
    pub(super) async fn credit(&self, hits: &Hits) -> Result<(), StoreUnavailable> {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => limiter.credit_hashed(hits),
            (Self::Redis(limiter), Hits::Redis(hits)) => {
                limiter.credit_hits(hits).await.map_err(StoreUnavailable::new)?;
            }
            _ => unreachable!("hits are made for this store"),
        }
        Ok(())
    }

    /// Gives the key of each hit its whole quota back.
    pub(super) async fn reset(&self, hits: &Hits) -> Result<(), StoreUnavailable> {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => limiter.reset_hashed(hits),
            (Self::Redis(limiter), Hits::Redis(hits)) => {
                limiter.reset_hits(hits).await.map_err(StoreUnavailable::new)?;
            }
            _ => unreachable!("hits are made for this store"),
        }
        Ok(())
    }

    /// Settles the hit at index `hit` at its actual cost.
    pub(super) async fn settle(&self, hits: &Hits, hit: usize, decision: &Decision, actual: u64) -> Settlement {
        match (self, hits) {
            (Self::Memory(limiter), Hits::Memory(hits)) => {
                limiter.settle_hashed(hits.get(hit..=hit).unwrap_or_default(), decision, actual)
            }
            (Self::Redis(limiter), Hits::Redis(hits)) => {
                let hits = hits.get(hit..=hit).unwrap_or_default();
                limiter.settle_hits(hits, actual).await.unwrap_or(Settlement::Unreachable)
            }
            _ => Settlement::Unreachable,
        }
    }
}

/// A check that Redis has to decide.
pub(crate) struct RemoteCheck {
    pending: Option<Box<PendingChecks>>,
    limiter: RedisLimiter,
    /// The denial by the enforced rules, if it is known already.
    denied: Option<Decision>,
    charge: ChargeTo,
}

/// The places that a check may take units from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ChargeTo {
    /// A lease of this process if the limit is leased and its cost cannot change, or else the store.
    Any,
    /// The store only: another process may settle the cost.
    #[cfg(feature = "file")]
    Store,
}

/// Charges a check to the store only, so that any process can settle it.
#[cfg(feature = "file")]
pub(super) fn charged_to_store(remote: RemoteCheck) -> RemoteCheck {
    RemoteCheck { charge: ChargeTo::Store, ..remote }
}

/// Checks a request, unless a remote store has to decide.
#[inline(always)]
pub(super) fn check(outcome: &mut Outcome, pending: Option<Box<PendingChecks>>) -> Option<RemoteCheck> {
    check_unless_known(outcome, pending, None)
}

/// Continues after the decision of the enforced rules, for example by [`Store::refuse`]: checks the shadow rules and
/// adds the strike for a denial.
pub(super) fn check_after_decision(
    outcome: &mut Outcome,
    pending: Option<Box<PendingChecks>>,
    decision: Decision,
) -> Option<RemoteCheck> {
    check_unless_known(outcome, pending, Some(decision))
}

/// Checks what is still open. `denied` is the decision of the enforced rules, if it is known.
#[inline(always)]
fn check_unless_known(
    outcome: &mut Outcome,
    mut pending: Option<Box<PendingChecks>>,
    denied: Option<Decision>,
) -> Option<RemoteCheck> {
    let decision = match &outcome.state.store {
        Store::Memory(limiter) => {
            let decide = |hits: &Hits| match hits {
                Hits::Memory(hits) => limiter.decide_hashed(hits),
                Hits::Redis(_) => limiter.decide_hashed(&[]),
            };
            decide_now(outcome, pending.as_deref_mut(), denied, decide)
        }
        Store::Redis(limiter) => {
            let has_shadow = pending.as_ref().is_some_and(|pending| !pending.shadow_hits.is_empty());
            let has_hits = match &denied {
                Some(denied) => strike(outcome, denied).is_some(),
                None => outcome.hits.costs().next().is_some(),
            };
            if has_shadow || has_hits {
                return Some(RemoteCheck { pending, limiter: limiter.clone(), denied, charge: ChargeTo::Any });
            }
            denied.unwrap_or_else(|| Decision::without_limit(limiter.now()))
        }
    };
    outcome.decided(pending, decision);
    None
}

pub(super) fn check_remotely(outcome: Outcome, remote: RemoteCheck) -> Pin<Box<dyn Future<Output = Outcome> + Send>> {
    Box::pin(check_redis(outcome, remote))
}

/// Decides several checks, all or nothing.
pub(super) fn check_together(store: &Store, collected: Vec<Collected>) -> Checks {
    match store {
        Store::Memory(limiter) => Checks::Ready(together::check_in_memory(limiter, collected)),
        Store::Redis(limiter) => Checks::Pending(Box::pin(check_redis_together(limiter.clone(), collected))),
    }
}

async fn check_redis_together(limiter: RedisLimiter, collected: Vec<Collected>) -> Vec<Outcome> {
    let mut positions = Vec::new();
    let prepared = collected.iter().flat_map(|one| one.outcome.hits.on_redis());
    let mut hits = RedisLimiter::combine_hits(prepared, |position| positions.push(position));
    if let Some(one) = collected.first() {
        let rules = one.outcome.state.rules.clone();
        crate::redis::take_from_store(&mut hits, |limit| rules.may_change(rules.owner(limit)));
    }
    let (combined, charged) = match collected.iter().all(|one| one.outcome.is_allowed()) {
        true => limiter.clone().decide_each(hits).await,
        false => (CombinedDecision { is_taken: false, delay: Duration::ZERO, each: Vec::new() }, hits),
    };
    let mut next = 0;
    let complete = collected.into_iter().map(|Collected { mut outcome, pending }| {
        let own = next..next + outcome.hits.len();
        next = own.end;
        let own = &positions[own];
        if let Hits::Redis(hits) = &mut outcome.hits {
            crate::redis::set_receipts(hits, &charged, own);
        }
        let denied = outcome.is_allowed().then(|| combined.own_decision(own, limiter.now()));
        let remote = RemoteCheck { pending, limiter: limiter.clone(), denied, charge: ChargeTo::Any };
        async move {
            let is_refused = remote.denied.is_none();
            if is_refused { outcome } else { check_redis(outcome, remote).await }
        }
    });
    let outcomes = join_all(complete).await;
    outcomes.into_iter().map(|outcome| outcome.after_joint_decision(combined.is_taken)).collect()
}

async fn check_redis(mut outcome: Outcome, remote: RemoteCheck) -> Outcome {
    let RemoteCheck { mut pending, limiter, denied, charge } = remote;
    let state = outcome.state.clone();
    let decide = |hits: &Hits| {
        let mut hits = match hits {
            Hits::Redis(hits) => (**hits).clone(),
            Hits::Memory(_) => RedisHits::new(),
        };
        // A cost that may change later is charged to the store rather than to a lease: only the store knows what is
        // left.
        let may_change = |limit| charge != ChargeTo::Any || state.rules.may_change(state.rules.owner(limit));
        crate::redis::take_from_store(&mut hits, may_change);
        limiter.clone().decide_hits(hits)
    };
    // Send all checks at once, so that they share a round trip.
    let shadow_hits = pending.iter().flat_map(|pending| &pending.shadow_hits).map(|(rule, hits)| {
        let decided = decide(hits);
        async move { (*rule, decided.await) }
    });
    let enforced = async {
        match denied {
            Some(denied) => (denied, None),
            None => {
                let (decision, charged) = decide(&outcome.hits).await;
                (decision, Some(charged))
            }
        }
    };
    let ((mut decision, charged), shadow_decisions) = join(enforced, join_all(shadow_hits)).await;
    if let Some(charged) = charged {
        outcome.hits.set_charged(charged);
    }
    if let Some(strike) = strike(&outcome, &decision) {
        // Spawned, so that a client that disconnects before the response gets its strike too.
        if let Ok((strike, _)) = tokio::spawn(decide(&strike)).await {
            decision = struck(decision, strike);
        }
    }
    if let Some(pending) = &mut pending {
        let shadow_decisions = shadow_decisions.into_iter().zip(&mut pending.shadow_hits).map(
            |((rule, (decision, charged)), shadow_hits)| {
                shadow_hits.1.set_charged(charged);
                (rule, decision)
            },
        );
        pending.shadow_decisions = shadow_decisions.collect();
    }
    outcome.decided(pending, decision);
    #[cfg(feature = "file")]
    outcome.count_limited_on_redis();
    outcome
}

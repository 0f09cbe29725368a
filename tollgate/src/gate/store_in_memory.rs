//! The store of a gate: this process's memory.

use std::convert::Infallible;
use std::pin::Pin;

use super::pending::{PendingChecks, decide_now};
use super::together::{self, Checks, Collected};
use super::{Gate, Outcome, StoreUnavailable};
use crate::decision::Decision;
use crate::error::InvalidLimit;
use crate::limit::LimitId;
use crate::limiter::{FewHits, Hit, Limiter, LimiterBuilder};
use crate::reservation::Settlement;
use crate::rules::RuleSet;
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

#[derive(Clone)]
pub(super) struct Store(Limiter);

/// Hits prepared for the store.
pub(super) struct Hits(FewHits);

impl Hits {
    /// Returns the hit of one limit alone, at another cost.
    pub(super) fn only(&self, limit: LimitId, cost: u64) -> Self {
        Self(crate::limiter::hits_of_limit(&self.0, limit, cost))
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the limits of the hits, with their costs.
    pub(super) fn costs(&self) -> impl Iterator<Item = (LimitId, u64)> {
        self.0.iter().map(|one| (one.limit, one.cost))
    }

    /// Returns the hits.
    pub(super) fn hashed(&self) -> &[HashedHit] {
        &self.0
    }

    /// Adds a hit.
    #[cfg(feature = "tower")]
    pub(super) fn push(&mut self, one: HashedHit) {
        self.0.push(one);
    }

    /// Sorts the hits by their limits.
    pub(super) fn sort_by_key<K: Ord>(&mut self, key: impl Fn(LimitId) -> K) {
        self.0.sort_by_key(|one| key(one.limit));
    }

    pub(super) fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }
}

impl Gate {
    /// Returns the in-memory limiter, for example to count its keys or to read its [`overflow`](Limiter::overflow).
    #[must_use]
    pub fn memory(&self) -> Option<Limiter> {
        Some(self.0.state.load().store.0.clone())
    }
}

impl Store {
    pub(super) fn memory(rules: &RuleSet, settings: LimiterBuilder) -> Result<Self, InvalidLimit> {
        rules.limiter(settings).map(Self)
    }

    /// Creates a store from a limiter that has the limits of the rules.
    pub(super) fn of(limiter: Limiter) -> Self {
        Self(limiter)
    }

    pub(super) fn with_rules(&self, rules: &RuleSet) -> Result<Self, InvalidLimit> {
        rules.limiter_after(&self.0).map(Self)
    }

    /// Returns the limiter. It is always in memory without the feature `redis`.
    #[inline(always)]
    pub(super) fn in_memory(&self) -> Option<&Limiter> {
        Some(&self.0)
    }

    /// Returns the wall-clock time according to the limiter.
    pub(super) fn now(&self) -> Timestamp {
        self.0.wall_now()
    }

    pub(super) fn no_hits(&self) -> Hits {
        Hits(FewHits::new())
    }

    /// Adds a hit. Two hits must not have the same limit and key.
    #[inline]
    pub(super) fn add_hit(&self, hits: &mut Hits, hit: Hit<'_>) {
        hits.0.push(self.0.hash_hit(&hit));
    }

    /// Returns a denial if one of the hits is denied. Otherwise it changes nothing.
    pub(super) fn refuse(&self, hits: &Hits) -> Option<Decision> {
        self.0.find_denial(&hits.0)
    }

    /// Returns the current decision without taking anything.
    pub(super) async fn peek(&self, hits: &Hits) -> Option<Decision> {
        Some(self.0.peek_hashed(&hits.0))
    }

    /// Gives back the cost of each hit, from the newest charges of its key.
    pub(super) async fn credit(&self, hits: &Hits) -> Result<(), StoreUnavailable> {
        self.0.credit_hashed(&hits.0);
        Ok(())
    }

    /// Gives the key of each hit its whole quota back.
    pub(super) async fn reset(&self, hits: &Hits) -> Result<(), StoreUnavailable> {
        self.0.reset_hashed(&hits.0);
        Ok(())
    }

    /// Settles the hit at index `hit` at its actual cost.
    pub(super) async fn settle(&self, hits: &Hits, hit: usize, decision: &Decision, actual: u64) -> Settlement {
        self.0.settle_hashed(hits.0.get(hit..=hit).unwrap_or_default(), decision, actual)
    }
}

/// A check that a remote store has to decide. Without the feature `redis` no check is remote.
pub(crate) type RemoteCheck = Infallible;

/// Charges a check to the store only. Without the feature `redis` no check is remote.
#[cfg(feature = "file")]
pub(super) fn charged_to_store(nothing: RemoteCheck) -> RemoteCheck {
    match nothing {}
}

/// Checks a request.
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

#[inline(always)]
fn check_unless_known(
    outcome: &mut Outcome,
    mut pending: Option<Box<PendingChecks>>,
    denied: Option<Decision>,
) -> Option<RemoteCheck> {
    let decide = |hits: &Hits| outcome.state.store.0.decide_hashed(&hits.0);
    let decision = decide_now(outcome, pending.as_deref_mut(), denied, decide);
    outcome.decided(pending, decision);
    None
}

/// Decides several checks, all or nothing.
pub(super) fn check_together(store: &Store, collected: Vec<Collected>) -> Checks {
    Checks::Ready(together::check_in_memory(&store.0, collected))
}

pub(super) fn check_remotely(_: Outcome, nothing: RemoteCheck) -> Pin<Box<dyn Future<Output = Outcome> + Send>> {
    match nothing {}
}

//! Where a gate keeps its keys: in this process's memory.

use std::convert::Infallible;
use std::pin::Pin;

use super::pending::{PendingChecks, decide_now};
use super::{Gate, Outcome};
use crate::decision::Decision;
use crate::error::InvalidLimit;
use crate::limit::LimitId;
use crate::limiter::{FewHits, Hit, Limiter, LimiterBuilder};
use crate::reservation::Settlement;
use crate::rules::RuleSet;
#[cfg(feature = "tower")]
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

#[derive(Clone)]
pub(super) struct Store(Limiter);

/// What is hits of a store, ready to be hits.
pub(super) struct Hits(FewHits);

impl Hits {
    /// One of its limits alone, at another cost.
    pub(super) fn only(&self, limit: LimitId, cost: u64) -> Self {
        Self(crate::limiter::hits_of_limit(&self.0, limit, cost))
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Its limits, each with the cost that is hits of it.
    pub(super) fn costs(&self) -> impl Iterator<Item = (LimitId, u64)> {
        self.0.iter().map(|one| (one.limit, one.cost))
    }

    /// That too.
    #[cfg(feature = "tower")]
    pub(super) fn push(&mut self, one: HashedHit) {
        self.0.push(one);
    }

    /// Puts its limits in order.
    pub(super) fn sort_by_key<K: Ord>(&mut self, key: impl Fn(LimitId) -> K) {
        self.0.sort_by_key(|one| key(one.limit));
    }

    pub(super) fn append(&mut self, mut other: Self) {
        self.0.append(&mut other.0);
    }
}

impl Gate {
    /// The limiter in this process's memory, for its [`overflow`](Limiter::overflow) and to count its keys.
    #[must_use]
    pub fn memory(&self) -> Option<Limiter> {
        Some(self.0.state.load().store.0.clone())
    }
}

impl Store {
    pub(super) fn memory(rules: &RuleSet, settings: LimiterBuilder) -> Result<Self, InvalidLimit> {
        rules.limiter(settings).map(Self)
    }

    /// The store of a limiter with the limits of the rules.
    pub(super) fn of(limiter: Limiter) -> Self {
        Self(limiter)
    }

    pub(super) fn with_rules(&self, rules: &RuleSet) -> Result<Self, InvalidLimit> {
        rules.limiter_after(&self.0).map(Self)
    }

    /// The limiter, if it is in this process, which it is.
    #[inline(always)]
    pub(super) fn in_memory(&self) -> Option<&Limiter> {
        Some(&self.0)
    }

    /// Returns the wall clock's time, as the limiter knows it.
    pub(super) fn now(&self) -> Timestamp {
        self.0.wall_now()
    }

    pub(super) fn no_hits(&self) -> Hits {
        Hits(FewHits::new())
    }

    /// Asks for that too. No two hits may be of one key of one limit.
    #[inline]
    pub(super) fn add_hit(&self, hits: &mut Hits, hit: Hit<'_>) {
        hits.0.push(self.0.hash_hit(&hit));
    }

    /// The denial, if one of these hits is denied; otherwise nothing has changed.
    pub(super) fn refuse(&self, hits: &Hits) -> Option<Decision> {
        self.0.find_denial(&hits.0)
    }

    /// What would be answered now, taking nothing; `None` if the store cannot tell.
    pub(super) async fn peek(&self, hits: &Hits) -> Option<Decision> {
        Some(self.0.peek_hashed(&hits.0))
    }

    /// Brings what a decision has taken for the hit of that position to its actual cost.
    pub(super) async fn settle(&self, hits: &Hits, hit: usize, decision: &Decision, actual: u64) -> Settlement {
        self.0.settle_hashed(hits.0.get(hit..=hit).unwrap_or_default(), decision, actual)
    }
}

/// What has to be hits elsewhere: nothing.
pub(crate) type RemoteCheck = Infallible;

/// Asks all that a request asks.
#[inline(always)]
pub(super) fn check(outcome: &mut Outcome, pending: Option<Box<PendingChecks>>) -> Option<RemoteCheck> {
    check_unless_known(outcome, pending, None)
}

/// Goes on with a denial that [`Store::refuse`] gave: the rules that only watch are hits, and the key is struck.
pub(super) fn check_after_denial(
    outcome: &mut Outcome,
    pending: Option<Box<PendingChecks>>,
    denied: Decision,
) -> Option<RemoteCheck> {
    check_unless_known(outcome, pending, Some(denied))
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

pub(super) fn check_remotely(_: Outcome, nothing: RemoteCheck) -> Pin<Box<dyn Future<Output = Outcome> + Send>> {
    match nothing {}
}

//! Decisions while the store fails, by the failure policy of each limit.
//!
//! Limits with the policy `Local` are counted by an in-memory limiter, which is created when it is first needed. Its
//! quotas are those of the limits, divided by the number of nodes. When that number or the limits change, a limiter
//! with the new quotas replaces it and keeps the counts, so that a change does not admit more requests.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwapOption;
use smallvec::SmallVec;

use super::{Inner, Receipt, RedisHit, RedisLimiter};
use crate::decision::{Admission, Decision, Source, Verdict};
use crate::limit::OnStoreFailure;
use crate::limit_set::LimitSet;
use crate::limiter::reservation::Settlement;
use crate::limiter::{Hit, Limiter};
use crate::units::Timestamp;

/// The `retry_after` of denials by the failure policy: a second, in microseconds.
const RETRY_A_FAILED_STORE: u64 = 1_000_000;

/// The local limits of one set of limits.
pub(super) struct Fallback {
    limits: LimitSet,
    share: ArcSwapOption<Share>,
}

/// Local limits, divided by the number of nodes that share each store.
struct Share {
    nodes: SmallVec<[u32; 4]>,
    limiter: Limiter,
}

/// The counts that the local limits of all limit sets share.
#[derive(Default)]
pub(super) struct LocalStore {
    /// The limiter that was created last. Limiters derived from one another share their counts.
    latest: Mutex<Option<Limiter>>,
}

impl Fallback {
    pub(super) fn new(limits: LimitSet) -> Self {
        Self { limits, share: ArcSwapOption::empty() }
    }
}

impl Inner {
    /// Returns the local limiter with this node's share. `None` if it cannot be created: then every request is denied.
    fn local(&self) -> Option<Limiter> {
        let nodes = self.shared.stores.iter().map(|store| store.fleet.nodes()).collect();
        self.local_for(&nodes).or_else(|| self.make_local(nodes))
    }

    fn local_for(&self, nodes: &SmallVec<[u32; 4]>) -> Option<Limiter> {
        let share = self.fallback.share.load();
        share.as_ref().filter(|share| share.nodes == *nodes).map(|share| share.limiter.clone())
    }

    #[cold]
    fn make_local(&self, nodes: SmallVec<[u32; 4]>) -> Option<Limiter> {
        let mut latest = self.shared.local.latest.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have been faster.
        if let Some(limiter) = self.local_for(&nodes) {
            return Some(limiter);
        }
        let stores = &self.shared.stores;
        let limits = self.fallback.limits.share(|limit| {
            let store = stores.chosen_by(limit).unwrap_or_default();
            nodes.get(store.position()).copied().unwrap_or(1)
        });
        let made = match &*latest {
            Some(latest) => latest.with_limits(limits),
            None => self.catalogue.with_other_keys(limits),
        };
        let limiter = made.inspect_err(|error| tracing::error!(%error, "cannot create local limits")).ok()?;
        *latest = Some(limiter.clone());
        self.fallback.share.store(Some(Arc::new(Share { nodes, limiter: limiter.clone() })));
        Some(limiter)
    }

    /// Returns whether anything was ever counted locally.
    fn has_local(&self) -> bool {
        self.shared.local.latest.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

impl RedisHit {
    /// Returns the hit for the local limiter, whose keys are the names on the store.
    fn local_hit(&self) -> Hit<'_> {
        Hit::new(self.limit, &*self.script_hit.name).cost(self.script_hit.cost)
    }
}

impl RedisLimiter {
    /// Decides hits whose servers fail, each by the policy of its limit. Takes all of them or none.
    pub(super) fn by_policy(&self, failed: &mut [&mut RedisHit]) -> Decision {
        let now = self.0.shared.clock.wall();
        self.0.shared.counts.by_policy.fetch_add(1, Ordering::Relaxed);
        if let Some(denying) = failed.iter().find(|hit| self.policy(hit) == OnStoreFailure::Deny) {
            return self.denied_by_policy(denying);
        }
        let is_local = |hit: &RedisHit| self.policy(hit) == OnStoreFailure::Local;
        if !failed.iter().any(|hit| is_local(hit)) {
            let Some(hit) = failed.first() else { return Decision::without_limit(now) };
            let quota = self.0.limits[hit.limit.index()].limit.quota();
            let verdict = Verdict { admission: Admission::Allowed { delay: 0 }, remaining: quota, reset_after: 0 };
            return self.decision(hit, verdict, now, Source::Policy);
        }
        let Some(local) = self.0.local() else { return self.denied_by_policy(failed[0]) };
        let decision = {
            let hits = failed.iter().filter(|hit| is_local(hit)).map(|hit| hit.local_hit());
            local.decide_now(&hits.collect::<SmallVec<[Hit<'_>; 2]>>())
        };
        if decision.is_allowed() {
            let Decision { at, wall_offset, .. } = decision;
            let counted = failed.iter_mut().filter(|hit| is_local(hit));
            counted.for_each(|hit| hit.receipt = Receipt::Local { at, wall_offset });
        } else {
            // Each limit that would deny the request by itself may have a ban that counts it.
            failed.iter_mut().for_each(|hit| hit.decided = self.local_decision(hit));
        }
        self.of_whole_limit(failed, decision)
    }

    /// Returns the decision of a hit by itself in the local limits, and takes nothing. `None` if another policy applies.
    pub(super) fn local_decision(&self, hit: &RedisHit) -> Option<Decision> {
        if self.policy(hit) != OnStoreFailure::Local {
            return None;
        }
        let own = self.0.local()?.peek_hit(hit.local_hit());
        Some(Decision { source: Source::Local, ..own })
    }

    fn denied_by_policy(&self, denying: &RedisHit) -> Decision {
        let verdict = Verdict { admission: RETRY_LATER, remaining: 0, reset_after: RETRY_A_FAILED_STORE };
        self.decision(denying, verdict, self.0.shared.clock.wall(), Source::Policy)
    }

    /// Returns a local decision with the quota of the whole limit. A cost that exceeds only this node's share fits
    /// again once the store is back.
    fn of_whole_limit(&self, failed: &[&mut RedisHit], decision: Decision) -> Decision {
        let decision = Decision { source: Source::Local, ..decision };
        let Some(hit) = failed.iter().find(|hit| Some(hit.limit) == decision.limit) else { return decision };
        let (quota, mut verdict) = (self.0.limits[hit.limit.index()].limit.quota(), decision.verdict);
        if verdict.admission == Admission::NeverFits && hit.script_hit.cost <= quota {
            verdict.admission = RETRY_LATER;
        }
        Decision { quota, verdict, ..decision }
    }

    pub(super) fn policy(&self, hit: &RedisHit) -> OnStoreFailure {
        let limit = &self.0.limits[hit.limit.index()].limit;
        limit.on_store_failure().unwrap_or(self.0.shared.on_store_failure)
    }

    /// Gives back units that were counted in this process's memory at that time. `wall_offset` is that of the decision.
    pub(super) fn give_back_locally(&self, hit: &RedisHit, at: Timestamp, wall_offset: i64) {
        if let Some(local) = self.0.local() {
            local.give_back_hit(hit.local_hit(), at, wall_offset);
        }
    }

    /// Counts units that were spent beyond a hit that was counted in this process's memory.
    pub(super) fn charge_locally(&self, hit: &RedisHit, units: u64) -> Settlement {
        let charge = |local: Limiter| local.charge_hit(hit.local_hit().cost(units));
        self.0.local().map_or(Settlement::Short { missing: units }, charge)
    }

    pub(super) fn reset_locally(&self, hit: &RedisHit) {
        if self.0.has_local()
            && let Some(local) = self.0.local()
        {
            local.reset_hit(hit.local_hit());
        }
    }
}

const RETRY_LATER: Admission = Admission::Denied { retry_after: RETRY_A_FAILED_STORE };

/// Returns the decision to report on a request: that of the limits that decided, or that of the rest, for which the
/// failure policy may have decided. A limit whose policy allows the request counts as absent.
pub(super) fn reported(decided: Decision, rest: Decision) -> Decision {
    match rest.source {
        Source::Policy if rest.is_allowed() => decided,
        _ => decided.most_restrictive(rest),
    }
}

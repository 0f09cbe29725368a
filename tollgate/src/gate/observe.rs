//! Shows the demand on limits that learn to their observers.

use super::pending::PendingChecks;
use super::store::Hits;
use super::{Gate, Outcome};
use crate::decision::Decision;
#[cfg(feature = "redis")]
use crate::decision::Source;
use crate::demand::Observation;
use crate::limit::LimitId;
use crate::rules::RuleSet;
use crate::units::Timestamp;

impl Gate {
    /// Returns the time that decisions are made at, which observers see.
    #[doc(hidden)]
    #[must_use]
    pub fn time(&self) -> Timestamp {
        let state = self.0.state.load();
        match state.store.in_memory() {
            Some(limiter) => limiter.now(),
            None => state.store.now(),
        }
    }
}

/// Shows a decided request to the observers of its limits. Call it only if a limit learns.
#[inline(never)]
pub(super) fn observe(outcome: &Outcome, pending: Option<&PendingChecks>, decision: &Decision) {
    let rules = &outcome.state.rules;
    observe_hits(rules, &outcome.hits, decision);
    let shadow = pending.into_iter().flat_map(|pending| pending.shadow_hits.iter().zip(&pending.shadow_decisions));
    for ((_, hits), (_, decision)) in shadow {
        observe_hits(rules, hits, decision);
    }
}

fn observe_hits(rules: &RuleSet, hits: &Hits, decision: &Decision) {
    // A ban is a denial by its limit.
    let denied_by = decision.limit().filter(|_| !decision.is_allowed()).map(|limit| rules.owner(limit));
    let is_denied = |limit: LimitId| denied_by == Some(rules.owner(limit));
    for hit in hits.hashed() {
        let Some(observer) = rules.observer(hit.limit) else { continue };
        observer.observe(Observation {
            client: hit.fingerprint,
            cost: hit.cost,
            at: decision.at,
            is_denied: is_denied(hit.limit),
            need_on_store: 0,
        });
    }
    #[cfg(feature = "redis")]
    for hit in hits.on_redis() {
        let (limit, cost) = crate::redis::cost(hit);
        let Some(observer) = rules.observer(limit) else { continue };
        // The store counts the requests to all nodes. A denied request would have needed its cost in addition.
        let own = crate::redis::decided(hit).or_else(|| (decision.limit() == Some(limit)).then_some(decision));
        let need_on_store = own.filter(|own| own.source() == Source::Store).map_or(0, |own| {
            let used = own.quota().saturating_sub(own.remaining());
            if own.is_allowed() { used } else { used.saturating_add(cost) }
        });
        let client = observer.hash(crate::redis::key_name(hit));
        observer.observe(Observation { client, cost, at: decision.at, is_denied: is_denied(limit), need_on_store });
    }
}

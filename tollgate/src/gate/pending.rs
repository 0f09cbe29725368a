//! The checks that a request needs from the store.

use std::sync::atomic::AtomicU32;

use super::in_flight::{InFlight, InFlightLimits, InFlightPermit, PermitRequests, TakenPermits};
use super::key_bans::BannedHit;
use super::store::{Hits, Store};
use super::{Outcome, State};
use crate::decision::{Decision, Source};
use crate::key::Key;
use crate::limit::LimitId;
use crate::limiter::Hit;
use crate::rules::{Mode, RuleHit};

/// Decisions of shadow rules, with the numbers of the rules.
pub(super) type ShadowDecisions = Vec<(u32, Decision)>;

/// Checks beside those of the enforced rules, which are all-or-nothing and kept in the outcome. Few requests have any.
#[derive(Default)]
pub(super) struct PendingChecks {
    /// The hits of shadow rules. Each rule is checked by itself.
    pub(super) shadow_hits: Vec<(u32, Hits)>,
    pub(super) shadow_decisions: ShadowDecisions,
    /// Permits that the request needs, of the few rules that limit requests in flight.
    pub(super) permits: PermitRequests,
    /// The enforced limits among these.
    pub(super) in_flight: InFlightLimits,
    pub(super) taken: Option<TakenPermits>,
}

/// Parts of an outcome that few requests need.
#[derive(Default)]
pub(super) struct Extras {
    /// The rule that refuses the request regardless of the remaining quota.
    pub(super) refused_by: Option<u32>,
    pub(super) shadow_decisions: ShadowDecisions,
    /// The hits of shadow rules, in the order of their decisions.
    pub(super) shadow_hits: Vec<(u32, Hits)>,
    /// The request's in-flight permit.
    pub(super) permit: Option<InFlightPermit>,
    /// The enforced in-flight limits that the request matched.
    pub(super) in_flight: InFlightLimits,
    /// The hash of the key that has too many requests in flight, if that denied the request.
    #[cfg_attr(not(feature = "file"), expect(dead_code, reason = "only counts of limited keys read it"))]
    pub(super) full_key: Option<u64>,
    /// One bit for each limit after the first 32, set when the limit is settled.
    pub(super) settled: Box<[AtomicU32]>,
}

/// The party that selected the limit, the key and the cost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SelectedBy {
    Rules,
    /// The caller, so any cost may be an estimate.
    Name,
}

/// Collects the checks of a request.
pub(super) struct CheckCollector<'s> {
    store: &'s Store,
    in_flight: &'s InFlight,
    enforced: &'s mut Hits,
    /// Checks of bans come last, so that the limit is reported where both have everything left.
    bans: Option<Hits>,
    pending: Option<Box<PendingChecks>>,
    /// The state, if operators have banned keys.
    with_bans: Option<&'s State>,
    banned: Option<BannedHit>,
}

impl<'s> CheckCollector<'s> {
    /// Creates a collector that adds the hits of enforced rules to `enforced`.
    #[inline]
    pub(super) fn new(state: &'s State, enforced: &'s mut Hits) -> Self {
        let State { store, in_flight, .. } = state;
        let with_bans = state.bans.as_ref().map(|_| state);
        Self { store, in_flight, enforced, bans: None, pending: None, with_bans, banned: None }
    }

    /// Continues with the checks collected before.
    pub(super) fn resume(state: &'s State, enforced: &'s mut Hits, pending: Option<Box<PendingChecks>>) -> Self {
        Self { pending, ..Self::new(state, enforced) }
    }

    #[inline(always)]
    pub(super) fn add(&mut self, rule_hit: &RuleHit, key: Key<'_>) {
        if let Some(state) = self.with_bans
            && let Some(banned) = state.find_ban(rule_hit, key)
        {
            self.banned = Some(banned.longer(self.banned.take()));
        }
        if rule_hit.is_in_flight || rule_hit.mode == Mode::Shadow {
            return self.add_extra(rule_hit, key);
        }
        self.store.add_hit(self.enforced, Hit::new(rule_hit.limit, key).cost(rule_hit.cost));
        if let Some(ban) = rule_hit.ban {
            self.add_ban(ban, key);
        }
    }

    #[inline(never)]
    fn add_ban(&mut self, ban: LimitId, key: Key<'_>) {
        let bans = self.bans.get_or_insert_with(|| self.store.no_hits());
        self.store.add_hit(bans, Hit::new(ban, key).cost(0));
    }

    #[inline(never)]
    fn add_extra(&mut self, rule_hit: &RuleHit, key: Key<'_>) {
        let pending = self.pending.get_or_insert_default();
        if rule_hit.is_in_flight {
            if rule_hit.mode == Mode::Enforced {
                pending.in_flight.push(rule_hit.limit);
            }
            return pending.permits.push(self.in_flight.request_permit(rule_hit, key));
        }
        let mut shadow_hits = self.store.no_hits();
        self.store.add_hit(&mut shadow_hits, Hit::new(rule_hit.limit, key).cost(rule_hit.cost));
        pending.shadow_hits.push((rule_hit.rule, shadow_hits));
    }

    /// Returns the checks beside those of the enforced rules, and the ban of a key that an operator has set.
    #[inline(always)]
    pub(super) fn finish(self) -> (Option<Box<PendingChecks>>, Option<BannedHit>) {
        if let Some(bans) = self.bans {
            self.enforced.append(bans);
        }
        (self.pending, self.banned)
    }
}

/// Checks a store that answers at once: the enforced rules unless they are known to deny, the shadow rules, and the
/// strike for a denial.
#[inline(always)]
pub(super) fn decide_now(
    outcome: &Outcome,
    pending: Option<&mut PendingChecks>,
    denied: Option<Decision>,
    decide: impl Fn(&Hits) -> Decision,
) -> Decision {
    let mut decision = match denied {
        Some(denied) => denied,
        None => decide(&outcome.hits),
    };
    if let Some(pending) = pending {
        pending.shadow_decisions = pending.shadow_hits.iter().map(|(rule, hits)| (*rule, decide(hits))).collect();
    }
    if !decision.is_allowed()
        && let Some(strike) = strike(outcome, &decision)
    {
        decision = struck(decision, decide(&strike));
    }
    decision
}

impl PendingChecks {
    /// Returns the extra parts of the outcome. A denied request returns its permit.
    #[inline(never)]
    pub(super) fn into_extras(self, decision: &Decision) -> Option<Box<Extras>> {
        let Self { shadow_hits, mut shadow_decisions, in_flight, taken, .. } = self;
        if shadow_decisions.is_empty() && taken.is_none() {
            return None;
        }
        let permit = taken.map(|taken| {
            shadow_decisions.extend(taken.shadow_decisions);
            taken.permit
        });
        let permit = permit.filter(|_| decision.is_allowed());
        Some(Box::new(Extras { shadow_decisions, shadow_hits, permit, in_flight, ..Extras::default() }))
    }
}

/// Returns the strike for a denial by a rule with a ban. A store failure is not a strike.
pub(super) fn strike(outcome: &Outcome, decision: &Decision) -> Option<Hits> {
    let denied_by = decision.limit().filter(|_| !decision.is_allowed() && decision.source() != Source::Policy)?;
    let rules = &outcome.state.rules;
    let ban = rules.ban(rules.owner(denied_by))?;
    (ban != denied_by).then(|| outcome.hits.only(ban, 1))
}

/// Returns the decision to report to a client that was denied and got a strike for it. It is the ban if this strike
/// caused it, or if the client was banned before; a denial from the denial cache does not know about bans.
pub(super) fn struck(denied: Decision, strike: Decision) -> Decision {
    match strike.source() {
        Source::Policy => denied,
        _ if !strike.is_allowed() => strike,
        _ if strike.remaining() == 0 => strike.denied_until_reset(),
        _ => denied,
    }
}

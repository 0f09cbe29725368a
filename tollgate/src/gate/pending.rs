//! A request's questions to the store.

use std::sync::atomic::AtomicU32;

use super::in_flight::{InFlight, InFlightLimits, InFlightPermit, PermitRequests, TakenPermits};
use super::store::{Hits, Store};
use super::{Outcome, State};
use crate::decision::{Decision, Source};
use crate::key::Key;
use crate::limit::LimitId;
use crate::limiter::Hit;
use crate::rules::{Finding, Mode};

/// What rules that only watch have said, with their numbers.
pub(super) type ShadowDecisions = Vec<(u32, Decision)>;

/// What a request asks extras the rules that are enforced together, all or nothing, which its outcome keeps. Few requests
/// have one.
#[derive(Default)]
pub(super) struct PendingChecks {
    /// Each rule that only watches asks by itself.
    pub(super) shadow_hits: Vec<(u32, Hits)>,
    pub(super) shadow_decisions: ShadowDecisions,
    /// Places among the requests in flight, of the few rules that have such a limit.
    pub(super) permits: PermitRequests,
    /// The limits of these that are enforced.
    pub(super) in_flight: InFlightLimits,
    pub(super) taken: Option<TakenPermits>,
}

/// What few requests need once they are ruled.
#[derive(Default)]
pub(super) struct Extras {
    /// The rule that refuses, whatever is left.
    pub(super) refused_by: Option<u32>,
    pub(super) shadow_decisions: ShadowDecisions,
    /// What rules that only watch took, where they may want to know the answer.
    pub(super) shadow_hits: Vec<(u32, Hits)>,
    /// Its permit among the requests in flight.
    pub(super) permit: Option<InFlightPermit>,
    /// The enforced limits of requests in flight that it matched.
    pub(super) in_flight: InFlightLimits,
    /// A bit for each limit after the first 32 that was settled.
    pub(super) settled: Box<[AtomicU32]>,
}

/// Who chose the limit, the key and the cost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SelectedBy {
    Rules,
    /// The one who asks, so that any cost may be an estimate.
    Name,
}

/// The questions of a request, while they are gathered.
pub(super) struct CheckCollector<'s> {
    store: &'s Store,
    in_flight: &'s InFlight,
    enforced: &'s mut Hits,
    /// Whether keys are banned is asked last, so that a limit speaks where both have all of it left.
    bans: Option<Hits>,
    pending: Option<Box<PendingChecks>>,
}

impl<'s> CheckCollector<'s> {
    /// What the rules ask that are enforced is put where the outcome keeps it.
    #[inline]
    pub(super) fn new(state: &'s State, enforced: &'s mut Hits) -> Self {
        let State { store, in_flight, .. } = state;
        Self { store, in_flight, enforced, bans: None, pending: None }
    }

    /// Goes on with what was gathered before.
    pub(super) fn resume(state: &'s State, enforced: &'s mut Hits, pending: Option<Box<PendingChecks>>) -> Self {
        Self { pending, ..Self::new(state, enforced) }
    }

    #[inline(always)]
    pub(super) fn add(&mut self, finding: &Finding, key: Key<'_>) {
        if finding.is_in_flight || finding.mode == Mode::Shadow {
            return self.add_extra(finding, key);
        }
        self.store.add_hit(self.enforced, Hit::new(finding.limit, key).cost(finding.cost));
        if let Some(ban) = finding.ban {
            self.add_ban(ban, key);
        }
    }

    #[inline(never)]
    fn add_ban(&mut self, ban: LimitId, key: Key<'_>) {
        let bans = self.bans.get_or_insert_with(|| self.store.no_hits());
        self.store.add_hit(bans, Hit::new(ban, key).cost(0));
    }

    #[inline(never)]
    fn add_extra(&mut self, finding: &Finding, key: Key<'_>) {
        let pending = self.pending.get_or_insert_default();
        if finding.is_in_flight {
            if finding.mode == Mode::Enforced {
                pending.in_flight.push(finding.limit);
            }
            return pending.permits.push(self.in_flight.request_permit(finding, key));
        }
        let mut shadow_hits = self.store.no_hits();
        self.store.add_hit(&mut shadow_hits, Hit::new(finding.limit, key).cost(finding.cost));
        pending.shadow_hits.push((finding.rule, shadow_hits));
    }

    #[inline(always)]
    pub(super) fn finish(self) -> Option<Box<PendingChecks>> {
        if let Some(bans) = self.bans {
            self.enforced.append(bans);
        }
        self.pending
    }
}

/// Asks a store that answers at once: the rules that are enforced, unless they are known to deny, those that only watch,
/// and the strike that a denial is.
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
    /// What the outcome needs extras the answers of the store. Who is denied gives back its permit.
    #[inline(never)]
    pub(super) fn into_extras(self, state: &State, decision: &Decision) -> Option<Box<Extras>> {
        let Self { shadow_hits, mut shadow_decisions, in_flight, taken, .. } = self;
        if shadow_decisions.is_empty() && taken.is_none() {
            return None;
        }
        let permit = taken.map(|taken| {
            shadow_decisions.extend(taken.shadow_decisions);
            taken.permit
        });
        let permit = permit.filter(|_| decision.is_allowed());
        let shadow_hits = if state.rules.await_responses() { shadow_hits } else { Vec::new() };
        Some(Box::new(Extras { shadow_decisions, shadow_hits, permit, in_flight, ..Extras::default() }))
    }
}

/// The strike that a denial by a rule with a ban is. A failing store is nobody's fault.
pub(super) fn strike(outcome: &Outcome, decision: &Decision) -> Option<Hits> {
    let denied_by = decision.limit().filter(|_| !decision.is_allowed() && decision.source() != Source::Policy)?;
    let rules = &outcome.state.rules;
    let ban = rules.ban(rules.owner(denied_by))?;
    (ban != denied_by).then(|| outcome.hits.only(ban, 1))
}

/// What is reported to who was denied and struck for it: of the ban, if it is banned by that, or was already, which the
/// denial may not have known (a node remembers denials, and asks nobody then).
pub(super) fn struck(denied: Decision, strike: Decision) -> Decision {
    match strike.source() {
        Source::Policy => denied,
        _ if !strike.is_allowed() => strike,
        _ if strike.remaining() == 0 => strike.denied_until_reset(),
        _ => denied,
    }
}

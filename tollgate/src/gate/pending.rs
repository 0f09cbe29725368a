//! A request's questions to the store.

use std::sync::atomic::AtomicU32;

use super::in_flight::{InFlight, InFlightLimits, InFlightPermit, TakenPermits, WantedPermits};
use super::store::{Store, Wanted};
use super::{Outcome, State};
use crate::decision::{Decision, Source};
use crate::key::Key;
use crate::limit::LimitId;
use crate::limiter::Hit;
use crate::rules::{Finding, Mode};

/// What rules that only watch have said, with their numbers.
pub(super) type Watched = Vec<(u32, Decision)>;

/// What a request asks beside the rules that are enforced together, all or nothing, which its outcome keeps. Few requests
/// have one.
#[derive(Default)]
pub(super) struct PendingChecks {
    /// Each rule that only watches asks by itself.
    pub(super) watching: Vec<(u32, Wanted)>,
    pub(super) watched: Watched,
    /// Places among the requests in flight, of the few rules that have such a limit.
    pub(super) places: WantedPermits,
    /// The limits of these that are enforced.
    pub(super) in_flight: InFlightLimits,
    pub(super) taken: Option<TakenPermits>,
}

/// What few requests need once they are ruled.
#[derive(Default)]
pub(super) struct Beside {
    /// The rule that refuses, whatever is left.
    pub(super) refused_by: Option<u32>,
    pub(super) watched: Watched,
    /// What rules that only watch took, where they may want to know the answer.
    pub(super) watching: Vec<(u32, Wanted)>,
    /// Its place among the requests in flight.
    pub(super) place: Option<InFlightPermit>,
    /// The enforced limits of requests in flight that it matched.
    pub(super) in_flight: InFlightLimits,
    /// A bit for each limit after the first 32 that was settled.
    pub(super) settled: Box<[AtomicU32]>,
}

/// Who chose the limit, the key and the cost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AskedBy {
    Rules,
    /// The one who asks, so that any cost may be an estimate.
    Name,
}

/// The questions of a request, while they are gathered.
pub(super) struct CheckCollector<'s> {
    store: &'s Store,
    in_flight: &'s InFlight,
    enforced: &'s mut Wanted,
    /// Whether keys are banned is asked last, so that a limit speaks where both have all of it left.
    bans: Option<Wanted>,
    beside: Option<Box<PendingChecks>>,
}

impl<'s> CheckCollector<'s> {
    /// What the rules ask that are enforced is put where the outcome keeps it.
    #[inline]
    pub(super) fn new(state: &'s State, enforced: &'s mut Wanted) -> Self {
        let State { store, in_flight, .. } = state;
        Self { store, in_flight, enforced, bans: None, beside: None }
    }

    /// Goes on with what was gathered before.
    pub(super) fn resume(state: &'s State, enforced: &'s mut Wanted, beside: Option<Box<PendingChecks>>) -> Self {
        Self { beside, ..Self::new(state, enforced) }
    }

    #[inline(always)]
    pub(super) fn add(&mut self, finding: &Finding, key: Key<'_>) {
        if finding.is_place || finding.mode == Mode::Shadow {
            return self.add_beside(finding, key);
        }
        self.store.want_too(self.enforced, Hit::new(finding.limit, key).cost(finding.cost));
        if let Some(ban) = finding.ban {
            self.add_ban(ban, key);
        }
    }

    #[inline(never)]
    fn add_ban(&mut self, ban: LimitId, key: Key<'_>) {
        let bans = self.bans.get_or_insert_with(|| self.store.want_nothing());
        self.store.want_too(bans, Hit::new(ban, key).cost(0));
    }

    #[inline(never)]
    fn add_beside(&mut self, finding: &Finding, key: Key<'_>) {
        let beside = self.beside.get_or_insert_default();
        if finding.is_place {
            if finding.mode == Mode::Enforced {
                beside.in_flight.push(finding.limit);
            }
            return beside.places.push(self.in_flight.want(finding, key));
        }
        let mut watching = self.store.want_nothing();
        self.store.want_too(&mut watching, Hit::new(finding.limit, key).cost(finding.cost));
        beside.watching.push((finding.rule, watching));
    }

    #[inline(always)]
    pub(super) fn posed(self) -> Option<Box<PendingChecks>> {
        if let Some(bans) = self.bans {
            self.enforced.append(bans);
        }
        self.beside
    }
}

/// Asks a store that answers at once: the rules that are enforced, unless they are known to deny, those that only watch,
/// and the strike that a denial is.
#[inline(always)]
pub(super) fn decide_now(
    outcome: &Outcome,
    posed: Option<&mut PendingChecks>,
    denied: Option<Decision>,
    decide: impl Fn(&Wanted) -> Decision,
) -> Decision {
    let mut decision = match denied {
        Some(denied) => denied,
        None => decide(&outcome.wanted),
    };
    if let Some(posed) = posed {
        posed.watched = posed.watching.iter().map(|(rule, wanted)| (*rule, decide(wanted))).collect();
    }
    if !decision.is_allowed()
        && let Some(strike) = strike(outcome, &decision)
    {
        decision = struck(decision, decide(&strike));
    }
    decision
}

impl PendingChecks {
    /// What the outcome needs beside the answers of the store. Who is denied gives back its place.
    #[inline(never)]
    pub(super) fn beside(self, state: &State, decision: &Decision) -> Option<Box<Beside>> {
        let Self { watching, mut watched, in_flight, taken, .. } = self;
        if watched.is_empty() && taken.is_none() {
            return None;
        }
        let place = taken.map(|taken| {
            watched.extend(taken.watched);
            taken.place
        });
        let place = place.filter(|_| decision.is_allowed());
        let watching = if state.rules.await_responses() { watching } else { Vec::new() };
        Some(Box::new(Beside { watched, watching, place, in_flight, ..Beside::default() }))
    }
}

/// The strike that a denial by a rule with a ban is. A failing store is nobody's fault.
pub(super) fn strike(outcome: &Outcome, decision: &Decision) -> Option<Wanted> {
    let denied_by = decision.limit().filter(|_| !decision.is_allowed() && decision.source() != Source::Policy)?;
    let rules = &outcome.state.rules;
    let ban = rules.ban(rules.owner(denied_by))?;
    (ban != denied_by).then(|| outcome.wanted.only(ban, 1))
}

/// What is told to who was denied and struck for it: of the ban, if it is banned by that, or was already, which the
/// denial may not have known (a node remembers denials, and asks nobody then).
pub(super) fn struck(denied: Decision, strike: Decision) -> Decision {
    match strike.source() {
        Source::Policy => denied,
        _ if !strike.is_allowed() => strike,
        _ if strike.remaining() == 0 => strike.denied_until_reset(),
        _ => denied,
    }
}

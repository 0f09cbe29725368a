//! A request's questions to the store.

use std::sync::Arc;

use super::in_flight::{InFlight, Place, TakenPlaces, WantedPlaces};
use super::store::{Store, Wanted};
use super::{Ruling, State};
use crate::decision::{Decision, Source};
use crate::key::Key;
use crate::limiter::Hit;
use crate::rules::{Finding, Mode};

/// What rules that only watch have said, with their numbers.
pub(super) type Watched = Vec<(u32, Decision)>;

/// All that one request asks: the rules that are enforced together, all or nothing, and each rule that only watches
/// by itself.
pub(super) struct Posed {
    pub(super) enforced: Wanted,
    /// With the rule that each is of. Few rules watch, and of most requests none.
    pub(super) watching: Vec<(u32, Wanted)>,
    pub(super) asked: AskedBy,
    /// Places among the requests in flight, of the few rules that have such a limit.
    pub(super) places: Option<Box<WantedPlaces>>,
    pub(super) taken: Option<Box<TakenPlaces>>,
}

/// What few requests need once they are ruled.
pub(super) struct Beside {
    /// What rules that only watch took, where they may want to know the answer.
    pub(super) watching: Vec<(u32, Wanted)>,
    /// Its place among the requests in flight.
    pub(super) place: Option<Place>,
}

/// Who chose the limit, the key and the cost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AskedBy {
    Rules,
    /// The one who asks, so that any cost may be an estimate.
    Name,
}

/// The questions of a request, while they are gathered.
pub(super) struct Posing<'s> {
    store: &'s Store,
    in_flight: &'s InFlight,
    enforced: Wanted,
    /// Whether keys are banned is asked last, so that a limit speaks where both have all of it left.
    bans: Option<Wanted>,
    watching: Vec<(u32, Wanted)>,
    places: Option<Box<WantedPlaces>>,
}

impl<'s> Posing<'s> {
    #[inline]
    pub(super) fn new(state: &'s State) -> Self {
        let State { store, in_flight, .. } = state;
        let enforced = store.want_nothing();
        Self { store, in_flight, enforced, bans: None, watching: Vec::new(), places: None }
    }

    #[inline]
    pub(super) fn add(&mut self, finding: &Finding, key: Key<'_>) {
        if finding.is_place {
            return self.places.get_or_insert_default().push(self.in_flight.want(finding, key));
        }
        let hit = Hit::new(finding.limit, key).cost(finding.cost);
        match finding.mode {
            Mode::Enforced => {
                self.store.want_too(&mut self.enforced, hit);
                if let Some(ban) = finding.ban {
                    let bans = self.bans.get_or_insert_with(|| self.store.want_nothing());
                    self.store.want_too(bans, Hit::new(ban, key).cost(0));
                }
            }
            Mode::Shadow => {
                let mut watching = self.store.want_nothing();
                self.store.want_too(&mut watching, hit);
                self.watching.push((finding.rule, watching));
            }
        }
    }

    #[inline(always)]
    pub(super) fn posed(self, asked: AskedBy) -> Posed {
        let Self { mut enforced, bans, watching, places, .. } = self;
        if let Some(bans) = bans {
            enforced.append(bans);
        }
        Posed { enforced, watching, asked, places, taken: None }
    }
}

impl Posed {
    /// Asks a store that answers at once.
    #[inline(always)]
    pub(super) fn decide_now(&self, state: &State, decide: impl Fn(&Wanted) -> Decision) -> (Decision, Watched) {
        let mut decision = decide(&self.enforced);
        let watched = self.watching.iter().map(|(rule, wanted)| (*rule, decide(wanted))).collect();
        if let Some(strike) = self.strike(state, &decision) {
            decision = struck(decision, decide(&strike));
        }
        (decision, watched)
    }

    /// Whether no rule was for the request.
    #[cfg_attr(not(feature = "redis"), expect(dead_code, reason = "memory is asked nothing as fast"))]
    pub(super) fn asks_nothing(&self) -> bool {
        self.watching.is_empty() && self.enforced.costs().next().is_none()
    }

    /// What is ruled, given the answers: of the rules that are enforced, and of each that watches.
    #[inline(always)]
    pub(super) fn ruling(self, state: Arc<State>, decision: Decision, watched: Watched) -> Ruling {
        Ruling::new(state, self, decision, watched)
    }

    /// What the ruling needs beside the answers of the store. Who is denied gives back its place.
    #[inline]
    pub(super) fn beside(&mut self, state: &State, decision: &Decision, watched: &mut Watched) -> Option<Box<Beside>> {
        let hears = state.rules.hear_answers() && !self.watching.is_empty();
        if !hears && self.taken.is_none() {
            return None;
        }
        let place = self.taken.take().map(|taken| {
            watched.extend(taken.watched);
            taken.place
        });
        let place = place.filter(|_| decision.is_allowed());
        Some(Box::new(Beside { watching: std::mem::take(&mut self.watching), place }))
    }

    /// The strike that a denial by a rule with a ban is. A failing store is nobody's fault.
    pub(super) fn strike(&self, state: &State, decision: &Decision) -> Option<Wanted> {
        let denied_by = decision.limit().filter(|_| !decision.is_allowed() && decision.source() != Source::Policy)?;
        let ban = state.rules.ban(state.rules.owner(denied_by))?;
        (ban != denied_by).then(|| self.enforced.only(ban, 1))
    }
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

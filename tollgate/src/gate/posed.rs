//! A request's questions to the store.

use std::sync::Arc;

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
}

/// What few requests need once they are ruled: what rules that only watch took, where they want to know the answer.
pub(super) struct Beside {
    pub(super) watching: Vec<(u32, Wanted)>,
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
    enforced: Wanted,
    /// Whether keys are banned is asked last, so that a limit speaks where both have all of it left.
    bans: Option<Wanted>,
    watching: Vec<(u32, Wanted)>,
}

impl<'s> Posing<'s> {
    #[inline]
    pub(super) fn new(store: &'s Store) -> Self {
        Self { store, enforced: store.want_nothing(), bans: None, watching: Vec::new() }
    }

    #[inline]
    pub(super) fn add(&mut self, finding: &Finding, key: Key<'_>) {
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
        let Self { mut enforced, bans, watching, .. } = self;
        if let Some(bans) = bans {
            enforced.append(bans);
        }
        Posed { enforced, watching, asked }
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

    /// What the ruling needs beside the answers of the store.
    #[inline]
    pub(super) fn beside(&mut self, state: &State) -> Option<Box<Beside>> {
        if !state.rules.hear_answers() || self.watching.is_empty() {
            return None;
        }
        Some(Box::new(Beside { watching: std::mem::take(&mut self.watching) }))
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

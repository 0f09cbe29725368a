//! Decides a request by rules of which some read a token: by the others first, and without its token if they refuse it.
//!
//! A request that is refused so gets the same answer as from all rules, and as little is taken for it. Rules that read
//! claims do not count it, not even those that only watch. Should one of them deny it for longer, nobody learns that.

use super::pending::{CheckCollector, PendingChecks};
use super::store::{self, RemoteCheck};
use super::{Outcome, State, in_flight};
use crate::limit::LimitId;
use crate::rules::{Facts, Phase, Request};

/// Whether a request is refused already.
enum Gathered {
    Refused,
    Open(Option<Box<PendingChecks>>),
}

/// Asks about a request. It is `Some` if that has to be asked elsewhere.
#[inline(never)]
pub(super) fn ask(outcome: &mut Outcome, facts: &Facts<'_>) -> Option<RemoteCheck> {
    let state = &*outcome.state.clone();
    let request = state.rules.request(facts);
    let mut posed = None;
    if state.rules.refuse_early() {
        posed = match gather(outcome, state, &request, Phase::WithoutToken, None) {
            Gathered::Refused => return None,
            Gathered::Open(posed) => posed,
        };
        if let Some(denied) = state.store.refuse(&outcome.wanted) {
            return store::ask_after_denial(outcome, posed, denied);
        }
    }
    let gathered = gather(outcome, state, &request, Phase::WithToken, posed);
    outcome.token = request.token_status();
    outcome.signatures_verified = request.signatures_verified();
    match gathered {
        Gathered::Refused => None,
        Gathered::Open(posed) => {
            outcome.wanted.sort_by_key(|limit| place(state, limit));
            store::ask(outcome, posed)
        }
    }
}

/// Gathers what the rules of one phase ask, and takes the request's places among those in flight.
fn gather(
    outcome: &mut Outcome,
    state: &State,
    request: &Request<'_>,
    phase: Phase,
    posed: Option<Box<PendingChecks>>,
) -> Gathered {
    let mut posing = CheckCollector::resume(state, &mut outcome.wanted, posed);
    let found = state.rules.find_in(phase, request, &mut |finding, key| posing.add(finding, key));
    let mut posed = posing.posed();
    if let Err((rule, refused)) = found {
        outcome.refused_by(rule, refused);
        return Gathered::Refused;
    }
    if let Some(posed) = &mut posed
        && let Err(full) = in_flight::take_wanted(state, posed, request.facts())
    {
        outcome.full(full, std::mem::take(&mut posed.in_flight));
        return Gathered::Refused;
    }
    Gathered::Open(posed)
}

/// The rules in their order, and bans last: of equals, the first speaks.
fn place(state: &State, limit: LimitId) -> (bool, u32) {
    let rule = state.rules.owner(limit);
    (state.rules.ban(rule) == Some(limit), rule)
}

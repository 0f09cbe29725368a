//! Decides a request by rules of which some read a token: by the others first, and without its token if they refuse it.
//!
//! A request that is refused so gets the same answer as from all rules, and as little is taken for it. Rules that read
//! claims do not count it, not even those that only watch. Should one of them deny it for longer, nobody learns that.

use super::posed::{Posed, Posing};
use super::store::{self, Elsewhere};
use super::{Ruling, State, in_flight};
use crate::limit::LimitId;
use crate::rules::{Facts, Phase, Request};

/// Whether a request is refused already.
enum Gathered {
    Refused,
    Open(Option<Box<Posed>>),
}

/// Asks about a request. It is `Some` if that has to be asked elsewhere.
#[inline(never)]
pub(super) fn ask(ruling: &mut Ruling, facts: &Facts<'_>) -> Option<Elsewhere> {
    let state = &*ruling.state.clone();
    let request = state.rules.request(facts);
    let mut posed = None;
    if state.rules.refuse_early() {
        posed = match gather(ruling, state, &request, Phase::WithoutToken, None) {
            Gathered::Refused => return None,
            Gathered::Open(posed) => posed,
        };
        if let Some(denied) = state.store.refuse(&ruling.wanted) {
            return store::ask_after_denial(ruling, posed, denied);
        }
    }
    let gathered = gather(ruling, state, &request, Phase::WithToken, posed);
    ruling.token = request.token_status();
    ruling.signatures_verified = request.signatures_verified();
    match gathered {
        Gathered::Refused => None,
        Gathered::Open(posed) => {
            ruling.wanted.sort_by_key(|limit| place(state, limit));
            store::ask(ruling, posed)
        }
    }
}

/// Gathers what the rules of one phase ask, and takes the request's places among those in flight.
fn gather(
    ruling: &mut Ruling,
    state: &State,
    request: &Request<'_>,
    phase: Phase,
    posed: Option<Box<Posed>>,
) -> Gathered {
    let mut posing = Posing::resume(state, &mut ruling.wanted, posed);
    let found = state.rules.find_in(phase, request, &mut |finding, key| posing.add(finding, key));
    let mut posed = posing.posed();
    if let Err((rule, refused)) = found {
        ruling.refused_by(rule, refused);
        return Gathered::Refused;
    }
    if let Some(posed) = &mut posed
        && let Err(full) = in_flight::take_wanted(state, posed, request.facts())
    {
        ruling.full(full, std::mem::take(&mut posed.in_flight));
        return Gathered::Refused;
    }
    Gathered::Open(posed)
}

/// The rules in their order, and bans last: of equals, the first speaks.
fn place(state: &State, limit: LimitId) -> (bool, u32) {
    let rule = state.rules.owner(limit);
    (state.rules.ban(rule) == Some(limit), rule)
}

//! Checks requests in two phases if some rules read a token: first the rules that do not, then, unless they refuse, all
//! the others.
//!
//! A request that is refused in the first phase gets the same response as from all rules, and its token is not
//! verified. Rules that read claims do not count it, not even shadow rules. If one of them would deny it for longer,
//! the client does not learn that.

use super::pending::{CheckCollector, PendingChecks};
use super::store::{self, RemoteCheck};
use super::{Outcome, State, in_flight};
use crate::limit::LimitId;
use crate::rules::{Facts, Phase, Request};

/// The result of one phase.
enum Gathered {
    Refused,
    Open(Option<Box<PendingChecks>>),
}

/// Checks a request. Returns `Some` if a remote store has to decide.
#[inline(never)]
pub(super) fn check(outcome: &mut Outcome, facts: &Facts<'_>) -> Option<RemoteCheck> {
    let state = &*outcome.state.clone();
    let request = state.rules.request(facts);
    let mut pending = None;
    if state.rules.refuse_early() {
        pending = match gather(outcome, state, &request, Phase::WithoutToken, None) {
            Gathered::Refused => return None,
            Gathered::Open(pending) => pending,
        };
        if let Some(denied) = state.store.refuse(&outcome.hits) {
            return store::check_after_decision(outcome, pending, denied);
        }
    }
    let gathered = gather(outcome, state, &request, Phase::WithToken, pending);
    outcome.token = request.token_status();
    outcome.signatures_verified = request.signatures_verified();
    match gathered {
        Gathered::Refused => None,
        Gathered::Open(pending) => {
            outcome.hits.sort_by_key(|limit| rank(state, limit));
            store::check(outcome, pending)
        }
    }
}

/// Collects the checks of one phase, and takes the request's permits.
fn gather(
    outcome: &mut Outcome,
    state: &State,
    request: &Request<'_>,
    phase: Phase,
    pending: Option<Box<PendingChecks>>,
) -> Gathered {
    let mut collector = CheckCollector::resume(state, &mut outcome.hits, pending);
    let found = state.rules.find_in(phase, request, &mut |rule_hit, key| collector.add(rule_hit, key));
    let (mut pending, banned) = collector.finish();
    if let Err((rule, refused)) = found {
        outcome.refused_by(rule, refused);
        return Gathered::Refused;
    }
    if let Some(banned) = &banned {
        outcome.refuse_banned(banned);
        return Gathered::Refused;
    }
    if let Some(pending) = &mut pending
        && let Err(full) = in_flight::take_permits(state, pending, request.facts())
    {
        outcome.refuse_full(&full, std::mem::take(&mut pending.in_flight));
        return Gathered::Refused;
    }
    Gathered::Open(pending)
}

/// Orders limits by rule, with bans last. Of equal decisions, the first is reported.
fn rank(state: &State, limit: LimitId) -> (bool, u32) {
    let rule = state.rules.owner(limit);
    (state.rules.ban(rule) == Some(limit), rule)
}

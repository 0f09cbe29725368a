//! The short way: what is hit by the client's address alone, and what is kept of a request that one limit let in.
//!
//! An outcome knows all that can ever be hit of it, and is large for that. A layer has something of it travel with each
//! request to the service and back, where it is moved more often than it is looked at, so that is no more than what an
//! answer needs.

use std::net::IpAddr;
use std::sync::Arc;

use http::HeaderMap;

use super::{Gate, Outcome, State};
use crate::decision::{Admission, Decision, Source, Verdict};
use crate::key::Key;
use crate::limiter::{Hit, Limiter};
use crate::rules::PerAddress;
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

/// A request that one limit of this process's memory let in at once, with nothing else to be known of it.
pub(crate) struct Admitted {
    state: Arc<State>,
    hit: HashedHit,
    at: Timestamp,
    wall_offset: i64,
    remaining: u64,
    reset_after: u64,
}

/// How far a request has come by its address.
pub(crate) enum ByAddress {
    Admitted(Admitted),
    /// It may not go on at once.
    Decided(Box<Outcome>),
    /// The rules want to know more of it.
    Unchecked(Unchecked),
}

/// The rules that a request is to be decided by.
pub(crate) struct Unchecked(Arc<State>);

impl Gate {
    /// Asks by the address of a request, if that is all that the rules want to know of it.
    #[inline]
    pub(crate) fn check_by_address(&self, peer: impl FnOnce() -> Option<IpAddr>) -> ByAddress {
        let state = self.0.state.load_full();
        let (Some(rule), Some(limiter)) = (state.rules.per_address(), state.store.in_memory()) else {
            return ByAddress::Unchecked(Unchecked(state));
        };
        // What to do with a request of unknown address is for the rules to say.
        let Some(peer) = peer() else { return ByAddress::Unchecked(Unchecked(state)) };
        let (hit, decision) = decide(limiter, rule, peer);
        let Verdict { admission, remaining, reset_after } = decision.verdict;
        if admission == AT_ONCE {
            let Decision { at, wall_offset, .. } = decision;
            return ByAddress::Admitted(Admitted { state, hit, at, wall_offset, remaining, reset_after });
        }
        ByAddress::Decided(outcome_of(state, hit, decision))
    }
}

impl Unchecked {
    /// The outcome, to be hit for: large, so in a box from the start.
    #[inline]
    pub(crate) fn outcome(self) -> Box<Outcome> {
        Box::new(Outcome::unlimited(self.0))
    }
}

/// What most requests are reported.
const AT_ONCE: Admission = Admission::Allowed { delay: 0 };

#[inline(never)]
fn decide(limiter: &Limiter, rule: PerAddress, peer: IpAddr) -> (HashedHit, Decision) {
    let text = rule.group.text(peer);
    let hit = limiter.hash_hit(&Hit::new(rule.limit, Key::from(text.as_bytes())).cost(rule.cost));
    (hit, limiter.decide_one_hashed(hit))
}

#[cold]
#[inline(never)]
fn outcome_of(state: Arc<State>, hit: HashedHit, decision: Decision) -> Box<Outcome> {
    let mut outcome = Unchecked(state).outcome();
    outcome.hits.push(hit);
    outcome.decided(None, decision);
    outcome
}

impl Admitted {
    #[inline(always)]
    fn decision(&self) -> Decision {
        let Self { state, hit, at, wall_offset, remaining, reset_after } = self;
        let verdict = Verdict { admission: AT_ONCE, remaining: *remaining, reset_after: *reset_after };
        Decision {
            limit: Some(hit.limit),
            quota: state.rules.policy(hit.limit).quota(),
            cost: hit.cost,
            at: *at,
            wall_offset: *wall_offset,
            source: Source::Store,
            verdict,
        }
    }

    /// As a [`Outcome`] does it.
    #[inline]
    pub(crate) fn write_headers(&self, headers: &mut HeaderMap) {
        self.state.rules.policy(self.hit.limit).merge(&self.decision(), headers);
    }

    /// The whole outcome, for what is rarely done with one.
    #[cold]
    #[inline(never)]
    pub(crate) fn into_outcome(self) -> Box<Outcome> {
        let decision = self.decision();
        outcome_of(self.state, self.hit, decision)
    }
}

//! Fast path: a single limit per client address, in memory.
//!
//! An [`Outcome`] supports everything a caller may do with it, so it is large. The tower layer carries the result of
//! each request to the service and back, and moves it more often than it reads it. [`Admitted`] therefore holds only
//! the fields that the response headers need.

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

/// A request that one in-memory limit allowed without delay.
pub(crate) struct Admitted {
    state: Arc<State>,
    hit: HashedHit,
    at: Timestamp,
    wall_offset: i64,
    remaining: u64,
    reset_after: u64,
}

/// The result of checking a request by its address alone.
pub(crate) enum ByAddress {
    Admitted(Admitted),
    /// The request was denied, or has to be delayed.
    Decided(Box<Outcome>),
    /// The rules need more than the address.
    Unchecked(Unchecked),
}

/// The rules by which a request is still to be checked.
pub(crate) struct Unchecked(Arc<State>);

impl Gate {
    /// Checks a request by its address, if the rules need nothing else.
    #[inline]
    pub(crate) fn check_by_address(&self, peer: impl FnOnce() -> Option<IpAddr>) -> ByAddress {
        let state = self.0.state.load_full();
        let (Some(rule), Some(limiter), None) = (state.rules.per_address(), state.store.in_memory(), &state.bans)
        else {
            return ByAddress::Unchecked(Unchecked(state));
        };
        // The rules decide how to treat a request of unknown address.
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
    /// Returns an outcome that is not checked yet. It is boxed because it is large.
    #[inline]
    pub(crate) fn outcome(self) -> Box<Outcome> {
        Box::new(Outcome::unlimited(self.0))
    }
}

/// The verdict on most requests.
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

    /// Writes the same headers as [`Outcome::write_headers`].
    #[inline]
    pub(crate) fn write_headers(&self, headers: &mut HeaderMap) {
        self.state.rules.policy(self.hit.limit).merge(&self.decision(), headers);
    }

    /// Builds the full outcome, for the rarely used operations.
    #[cold]
    #[inline(never)]
    pub(crate) fn into_outcome(self) -> Box<Outcome> {
        let decision = self.decision();
        outcome_of(self.state, self.hit, decision)
    }
}

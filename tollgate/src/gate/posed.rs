//! A request's questions to the store.

use std::sync::Arc;

use smallvec::SmallVec;

use super::store::Wanted;
use super::{Ruling, State};
use crate::decision::{Decision, Source};
use crate::key::Key;
use crate::limiter::Hit;
use crate::rules::{Finding, Mode, Piece};

/// What rules that only watch have said, with their numbers.
pub(super) type Watched = SmallVec<[(u32, Decision); 1]>;

/// All that one request asks: the rules that are enforced together, all or nothing, and each rule that only watches
/// by itself.
pub(super) struct Posed {
    pub(super) findings: SmallVec<[Finding; 6]>,
    pub(super) enforced: Wanted,
    /// With the rule that each is of.
    pub(super) watching: SmallVec<[(u32, Wanted); 1]>,
}

impl Posed {
    pub(super) fn new(state: &State, pieces: &[Piece<'_>], findings: SmallVec<[Finding; 6]>) -> Self {
        let slices: SmallVec<[&[u8]; 8]> = pieces.iter().map(Piece::as_bytes).collect();
        let key = |finding: &Finding| Key::byte_parts(&slices[finding.key.clone()]);
        let mut hits: SmallVec<[Hit<'_>; 8]> = SmallVec::new();
        let mut watching = SmallVec::new();
        for finding in &findings {
            let hit = Hit::new(finding.limit, key(finding)).cost(finding.cost);
            match finding.mode {
                Mode::Enforced => hits.push(hit),
                Mode::Shadow => watching.push((finding.rule, state.store.want(&[hit]))),
            }
        }
        // Whether a key is banned is asked last, so that a limit speaks where both have all of it left.
        let enforced = findings.iter().filter(|finding| finding.mode == Mode::Enforced);
        hits.extend(enforced.filter_map(|finding| Some(Hit::new(finding.ban?, key(finding)).cost(0))));
        let enforced = state.store.want(&hits);
        Self { findings, enforced, watching }
    }

    /// Asks a store that answers at once.
    pub(super) fn ask_now(self, state: Arc<State>, decide: impl Fn(&Wanted) -> Decision) -> Ruling {
        let mut decision = decide(&self.enforced);
        let watched = self.watching.iter().map(|(rule, wanted)| (*rule, decide(wanted))).collect();
        if let Some(strike) = self.strike(&state, &decision) {
            decision = struck(decision, decide(&strike));
        }
        self.ruling(state, decision, watched)
    }

    /// What is ruled, given the answers: of the rules that are enforced, and of each that watches.
    pub(super) fn ruling(self, state: Arc<State>, decision: Decision, watched: Watched) -> Ruling {
        Ruling::new(state, self.findings, self.enforced, decision, watched)
    }

    /// The strike that a denial by a rule with a ban is. A failing store is nobody's fault.
    pub(super) fn strike(&self, state: &State, decision: &Decision) -> Option<Wanted> {
        let denied_by = decision.limit().filter(|_| !decision.is_allowed() && decision.source() != Source::Policy)?;
        let rule = state.rules.owner(denied_by);
        let ban = self.findings.iter().find(|finding| finding.rule == rule)?.ban?;
        (ban != denied_by).then(|| self.enforced.only(ban, 1))
    }
}

/// What is told to who was denied and struck for it. A strike is denied to who is banned already, which the denial may
/// not have known: a node remembers denials, and asks nobody then.
pub(super) fn struck(denied: Decision, strike: Decision) -> Decision {
    let is_banned = !strike.is_allowed() && strike.source() != Source::Policy;
    if is_banned { strike } else { denied }
}

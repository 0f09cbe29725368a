//! What is ruled about a request, and what to tell the client.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response};

use super::State;
use super::in_flight::Place;
use super::posed::{AskedBy, Beside, Posed, Watched};
use super::store::Wanted;
use crate::decision::{Decision, Source};
use crate::http::{Answer, Headers, Message, Policy, Refusal};
use crate::limit::LimitId;
use crate::reservation::Settlement;
use crate::rules::{Refused, RuleSet};

/// What is ruled about a request: whether it may pass, by which rule, and what the client is to be told.
#[must_use = "a ruling that nobody looks at limits nothing"]
pub struct Ruling {
    pub(super) state: Arc<State>,
    /// What was asked of the store by the rules that are enforced, and by whom.
    pub(super) wanted: Option<(Wanted, AskedBy)>,
    /// Of the rules that are enforced; `None` if none was asked.
    pub(super) decision: Option<Decision>,
    refusal: Option<Refusal>,
    /// The rule that speaks.
    rule: Option<u32>,
    pub(super) watched: Watched,
    /// What few requests need; see [`Beside`].
    pub(super) beside: Option<Box<Beside>>,
}

impl Ruling {
    #[inline(always)]
    pub(super) fn new(state: Arc<State>, mut posed: Posed, decision: Decision, mut watched: Watched) -> Self {
        let beside = posed.beside(&state, &decision, &mut watched);
        let Some(limit) = decision.limit() else {
            return Self { watched, beside, ..Self::unlimited(state) };
        };
        let (rules, wanted) = (&state.rules, posed.enforced);
        let rule = rules.owner(limit);
        let of_ban = |limit: &LimitId| rules.owner(*limit) == rule && rules.ban(rule) != Some(*limit);
        // Who is banned is told so by the limit that the ban is of: all of it is spent.
        let spoken = match rules.ban(rule) == Some(limit) {
            true => wanted.costs().map(|(limit, _)| limit).find(of_ban),
            false => None,
        };
        let decision = spoken.map_or(decision, |limit| decision.speaking_of(limit, rules.quota(limit)));
        let refusal = match (decision.is_allowed(), decision.source()) {
            (true, _) => None,
            (false, Source::Policy) => Some(Refusal::StoreUnavailable),
            (false, _) if spoken.is_some() => {
                Some(Refusal::Banned { retry_after: decision.retry_after().unwrap_or_default() })
            }
            (false, _) => Some(Refusal::Limited),
        };
        let wanted = Some((wanted, posed.asked));
        Self { state, wanted, decision: Some(decision), refusal, rule: Some(rule), watched, beside }
    }

    pub(super) fn refused(state: Arc<State>, rule: u32, refused: Refused) -> Self {
        Self { refusal: Some(refused.into()), rule: Some(rule), ..Self::unlimited(state) }
    }

    /// As many as may are in flight.
    pub(super) fn full(state: Arc<State>, rule: u32, decision: Decision) -> Self {
        let (refusal, decision) = (Some(Refusal::Limited), Some(decision));
        Self { refusal, decision, rule: Some(rule), ..Self::unlimited(state) }
    }

    /// No rule is for the request.
    pub(super) fn unlimited(state: Arc<State>) -> Self {
        Self { state, wanted: None, decision: None, refusal: None, rule: None, watched: Watched::new(), beside: None }
    }

    /// The place of an admitted request among those in flight, if a rule bounds those: to be kept until the request is
    /// over. Not taken, it is given back with the ruling.
    pub fn take_place(&mut self) -> Option<Place> {
        self.beside.as_mut()?.place.take()
    }

    /// Whether the request may pass.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.refusal.is_none()
    }

    /// Why it may not.
    #[must_use]
    pub fn refusal(&self) -> Option<&Refusal> {
        self.refusal.as_ref()
    }

    /// The name of the limit that decided, or that has the least share left; `None` if no rule was for the request, or
    /// none but such as bound what is in flight.
    #[must_use]
    pub fn limit(&self) -> Option<&str> {
        self.rule.map(|rule| self.state.rules.name(rule))
    }

    /// What that limit decided; `None` if no rule was for the request, or one refused it whatever is left.
    #[must_use]
    pub fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref()
    }

    /// How long an admitted request has to be held before it may go on: zero, but for a queue.
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.decision.as_ref().map_or(Duration::ZERO, Decision::delay)
    }

    /// What each rule that only watches has decided, by its name.
    pub fn watched(&self) -> impl Iterator<Item = (&str, &Decision)> {
        self.watched.iter().map(|(rule, decision)| (self.state.rules.name(*rule), decision))
    }

    fn policy(&self) -> Option<&Policy> {
        let limit = self.decision.as_ref()?.limit()?;
        Some(self.state.rules.policy(limit))
    }

    /// Adds what the client is to know of its limits to the headers of an answer. Stricter ones that are there
    /// already stay.
    pub fn write_headers(&self, headers: &mut HeaderMap) {
        if let (Some(policy), Some(decision)) = (self.policy(), &self.decision) {
            policy.merge(decision, headers);
        }
    }

    fn answer(&self) -> Option<Answer<'_>> {
        let mut answer = Answer::new(self.refusal.as_ref()?);
        if let Some(policy) = self.policy() {
            answer = answer.limit(policy);
        }
        if let Some(decision) = &self.decision {
            answer = answer.decision(decision);
        }
        Some(answer)
    }

    /// The same as [`write_headers`](Self::write_headers) for an answer that says nothing of limits yet: lines of
    /// HTTP/1.1, behind what `out` has.
    pub fn write_header_lines(&self, out: &mut Vec<u8>) {
        if let (Some(policy), Some(decision)) = (self.policy(), &self.decision) {
            policy.write_lines(decision, out);
        }
    }

    /// The whole answer to a request with these headers, if it was refused.
    #[must_use]
    pub fn response<'h>(&self, request: impl Into<Headers<'h>>) -> Option<Response<Bytes>> {
        self.answer().map(|answer| answer.response(self.state.rules.body(), request))
    }

    /// The same as a message of HTTP/1.1; see [`Answer::write_message`].
    pub fn write_message<'h>(
        &self,
        request: impl Into<Headers<'h>>,
        more: &[u8],
        out: &mut Vec<u8>,
    ) -> Option<Message> {
        self.answer().map(|answer| answer.write_message(self.state.rules.body(), request, more, out))
    }

    /// The whole answer to a gRPC request, if it was refused: there is only a head.
    #[must_use]
    pub fn grpc_response(&self) -> Option<Response<()>> {
        self.answer().map(|answer| answer.grpc())
    }

    /// The rules that it was ruled by.
    #[must_use]
    pub fn rules(&self) -> &RuleSet {
        &self.state.rules
    }

    /// Brings the request to its actual cost, once that is known: in every rule whose cost was more than one unit or
    /// not a constant, gives back what was too much, as far as it still weighs on the key, or takes what was too
    /// little, as far as there is any.
    pub async fn settle(&self, actual: u64) -> Settlement {
        self.settle_each(|asked, rule| self.is_estimate(asked, rule).then_some(actual)).await
    }

    /// The same for the rule of that name alone, whatever its cost was.
    pub async fn settle_limit(&self, name: &str, actual: u64) -> Settlement {
        self.settle_each(|_, rule| (self.state.rules.name(rule) == name).then_some(actual)).await
    }

    /// Gives back all that the request took, as far as it still weighs on its keys.
    pub async fn refund(&self) -> Settlement {
        self.settle_each(|_, _| Some(0)).await
    }
}

impl std::fmt::Debug for Ruling {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Ruling")
            .field("limit", &self.limit())
            .field("decision", &self.decision)
            .field("refusal", &self.refusal)
            .finish_non_exhaustive()
    }
}

impl From<Refused> for Refusal {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Blocked => Self::Blocked,
            Refused::KeyMissing(part) => Self::KeyMissing { part },
        }
    }
}

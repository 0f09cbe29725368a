//! What is ruled about a request, and what to tell the client.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response};
use smallvec::SmallVec;

use super::in_flight::{self, InFlightLimits, InFlightPermit};
use super::pending::{CheckCollector, Extras, PendingChecks, SelectedBy};
use super::store::{self, Hits, RemoteCheck};
use super::{Gate, State, phases};
use crate::decision::Decision;
use crate::http::{Answer, Headers, Policy, Refusal, UnreadableRequest};
use crate::internal::{ReusedResponse, WrittenResponse};
use crate::key::Key;
use crate::limit::LimitId;
use crate::limiter::Hit;
use crate::reservation::Settlement;
use crate::rules::{Facts, Met, Refused, RuleSet, TokenStatus};

/// Policies that an answer lists.
type Policies<'a> = SmallVec<[&'a Policy; 4]>;

/// The most policies that an answer lists, the first ones: a head of an answer has a bound, whatever the number of rules.
const MAX_POLICIES: usize = 32;

/// What is ruled about a request: whether it may pass, by which rule, and what the client is to be reported.
#[must_use = "an outcome that nobody looks at limits nothing"]
pub struct Outcome {
    pub(super) state: Arc<State>,
    /// What was selected_by of the store by the rules that are enforced.
    pub(super) hits: Hits,
    pub(super) selected_by: SelectedBy,
    /// Of the rules that are enforced; `None` if none was selected_by.
    pub(super) decision: Option<Decision>,
    refusal: Option<Refusal>,
    /// What few requests need; see [`Extras`].
    pub(super) extras: Option<Box<Extras>>,
    pub(super) token: TokenStatus,
    pub(super) signatures_verified: u8,
    /// A bit for each of the first 32 limits that was settled, so that each is settled once. [`Extras`] has the others.
    pub(super) settled: AtomicU32,
}

impl Outcome {
    /// Rules by the answers: of the rules that are enforced, and of each that watches. It is made where it stays, because
    /// it is large.
    #[inline(always)]
    pub(super) fn decided(&mut self, pending: Option<Box<PendingChecks>>, decision: Decision) {
        self.extras = pending.and_then(|pending| pending.into_extras(&self.state, &decision));
        let limits = self.hits.len() + self.extras.as_ref().map_or(0, |extras| extras.shadow_hits.len());
        if limits > u32::BITS as usize {
            self.track_settlements_of(limits);
        }
        if let Some(limit) = decision.limit() {
            self.decision = Some(decision);
            self.refusal = Refusal::of(&decision);
            if self.state.rules.have_bans() {
                self.report_ban(decision, limit);
            }
        }
    }

    /// Who is banned is reported so by the limit that the ban is of: all of it is spent.
    #[inline(never)]
    fn report_ban(&mut self, decision: Decision, limit: LimitId) {
        let (rules, hits) = (&self.state.rules, &self.hits);
        let rule = rules.owner(limit);
        if rules.ban(rule) != Some(limit) {
            return;
        }
        let of_ban = |limit: &LimitId| rules.owner(*limit) == rule && rules.ban(rule) != Some(*limit);
        let Some(limit) = hits.costs().map(|(limit, _)| limit).find(of_ban) else { return };
        let decision = decision.for_limit(limit, rules.quota(limit));
        if self.refusal == Some(Refusal::Limited) {
            self.refusal = Some(Refusal::Banned { retry_after: decision.retry_after().unwrap_or_default() });
        }
        self.decision = Some(decision);
    }

    /// A rule refuses the request, whatever is left.
    pub(super) fn refused_by(&mut self, rule: Option<u32>, refused: Refused) {
        self.refusal = Some(refused.into());
        self.extras = Some(Box::new(Extras { refused_by: rule, ..Extras::default() }));
    }

    /// As many as may are in flight.
    pub(super) fn refuse_full(&mut self, decision: Decision, in_flight: InFlightLimits) {
        self.refusal = Some(Refusal::Limited);
        self.decision = Some(decision);
        self.extras = Some(Box::new(Extras { in_flight, ..Extras::default() }));
    }

    /// Asks about a request. It is `Some` if that has to be selected_by elsewhere: see [`elsewhere`](Self::elsewhere).
    ///
    /// In permit, because an outcome is large and on the way of every request.
    #[inline]
    pub(crate) fn check(&mut self, facts: &Facts<'_>) -> Option<RemoteCheck> {
        if self.state.rules.read_tokens() {
            return phases::check(self, facts);
        }
        let Self { state, hits, .. } = &mut *self;
        let mut collector = CheckCollector::new(state, hits);
        let found = state.rules.find(&state.rules.request(facts), |finding, key| collector.add(finding, key));
        let pending = collector.finish();
        match found {
            Ok(()) => match pending {
                Some(pending) if !pending.permits.is_empty() => in_flight::check(self, pending, facts),
                pending => store::check(self, pending),
            },
            Err((rule, refused)) => {
                self.refused_by(rule, refused);
                None
            }
        }
    }

    /// Takes a strike from every ban that a request weighs on which was refused before any rule could look at it.
    pub(super) fn strike(&mut self, facts: &Facts<'_>) -> Option<RemoteCheck> {
        let Self { state, hits, .. } = &mut *self;
        let State { rules, store, .. } = &**state;
        rules.find_bans(&rules.request(facts), |ban, key| store.add_hit(hits, Hit::new(ban, key).cost(1)));
        store::check(self, None)
    }

    /// Asks about a key of the rule of that name; `None` if there is no such rule.
    #[expect(clippy::option_option, reason = "whether there is the rule, and then what a remote store has to check")]
    pub(super) fn check_by_name(&mut self, rule: &str, key: &[&[u8]], cost: u64) -> Option<Option<RemoteCheck>> {
        self.selected_by = SelectedBy::Name;
        let Self { state, hits, .. } = &mut *self;
        let mut collector = CheckCollector::new(state, hits);
        let key = state.rules.normal_key(rule, key);
        let key: SmallVec<[&[u8]; 3]> = key.iter().map(|part| &**part).collect();
        match state.rules.named(rule, &key, cost)? {
            Met::Hit(finding) => collector.add(&finding, Key::byte_parts(&key)),
            Met::Refused(number, refused) => {
                self.refused_by(Some(number), refused);
                return Some(None);
            }
            Met::Not(_) | Met::Disabled | Met::Lacks(_) | Met::Exempt => return Some(None),
        }
        let pending = collector.finish();
        Some(store::check(self, pending))
    }

    /// The outcome, once a store that is somewhere else has been selected_by.
    pub(crate) fn complete(self, remote: RemoteCheck) -> Pin<Box<dyn Future<Output = Self> + Send>> {
        store::check_remotely(self, remote)
    }

    /// Of a request that a gate has not been selected_by about yet.
    #[inline(always)]
    pub(crate) fn unchecked(gate: &Gate) -> Self {
        Self::unlimited(gate.0.state.load_full())
    }

    /// No rule is for the request, as far as is known.
    #[inline(always)]
    pub(super) fn unlimited(state: Arc<State>) -> Self {
        let hits = state.store.no_hits();
        Self {
            state,
            hits,
            selected_by: SelectedBy::Rules,
            decision: None,
            refusal: None,
            extras: None,
            token: TokenStatus::NotRead,
            signatures_verified: 0,
            settled: AtomicU32::new(0),
        }
    }

    /// The permit of an admitted request among those in flight, if a rule bounds those: to be kept until the request is
    /// over. Not taken, it is given back with the outcome.
    pub fn take_permit(&mut self) -> Option<InFlightPermit> {
        self.extras.as_mut()?.permit.take()
    }

    /// Whether it still has the permit of its request.
    #[cfg(feature = "tower")]
    pub(crate) fn has_permit(&self) -> bool {
        self.extras.as_ref().is_some_and(|extras| extras.permit.is_some())
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

    /// Whether a token was read for the request, and what came of it. A request that is refused without one does not
    /// have its token read.
    #[must_use]
    pub fn token(&self) -> TokenStatus {
        self.token
    }

    /// How many signatures were verified for the request: none if its token was verified or refused a moment ago, and
    /// several if it names no key.
    #[must_use]
    pub fn signatures_verified(&self) -> u8 {
        self.signatures_verified
    }

    /// The name of the limit that decided, or that has the least share left; `None` if no rule was for the request, or
    /// none but such as bound what is in flight.
    #[must_use]
    pub fn limit(&self) -> Option<&str> {
        let rules = &self.state.rules;
        let decided_by = self.decision.as_ref().and_then(Decision::limit).map(|limit| rules.owner(limit));
        let rule = decided_by.or_else(|| self.extras.as_ref()?.refused_by);
        rule.map(|rule| rules.name(rule))
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
    pub fn shadow_decisions(&self) -> impl Iterator<Item = (&str, &Decision)> {
        self.all_shadow_decisions().iter().map(|(rule, decision)| (self.state.rules.name(*rule), decision))
    }

    pub(super) fn all_shadow_decisions(&self) -> &[(u32, Decision)] {
        self.extras.as_ref().map_or(&[], |extras| &extras.shadow_decisions)
    }

    fn policy(&self) -> Option<&Policy> {
        let limit = self.decision.as_ref()?.limit()?;
        Some(self.state.rules.policy(limit))
    }

    /// The policies of all enforced rules that the request matched, in the order of the rules and those of requests in
    /// flight last. They depend on what matched alone, not on what was decided, so the list stays the same from answer
    /// to answer.
    fn matched_policies(&self) -> Policies<'_> {
        let rules = &self.state.rules;
        let is_ban = |limit: LimitId| rules.have_bans() && rules.ban(rules.owner(limit)) == Some(limit);
        let rates = self.hits.costs().map(|(limit, _)| limit).filter(|limit| !is_ban(*limit));
        let in_flight = self.extras.iter().flat_map(|extras| extras.in_flight.iter().copied());
        rates.chain(in_flight).take(MAX_POLICIES).map(|limit| rules.policy(limit)).collect()
    }

    /// Adds what the client is to know of its limits to the headers of an answer. Stricter ones that are there
    /// already stay.
    pub fn write_headers(&self, headers: &mut HeaderMap) {
        if let (Some(policy), Some(decision)) = (self.policy(), &self.decision) {
            policy.merge_listing(decision, &self.matched_policies(), headers);
        }
    }

    fn answer<'a>(&'a self, matched: &'a [&'a Policy]) -> Option<Answer<'a>> {
        let mut answer = Answer::new(self.refusal.as_ref()?).challenge(self.state.rules.challenge());
        if let Some(policy) = self.policy() {
            answer = answer.limit(policy).matched(matched);
        }
        if let Some(decision) = &self.decision {
            answer = answer.decision(decision);
        }
        Some(answer)
    }

    /// The same as [`write_headers`](Self::write_headers) for an answer that says nothing of limits yet: lines of
    /// HTTP/1.1, behind what `out` has.
    #[doc(hidden)]
    pub fn write_header_lines(&self, out: &mut Vec<u8>) {
        if let (Some(policy), Some(decision)) = (self.policy(), &self.decision) {
            policy.write_lines_listing(decision, &self.matched_policies(), out);
        }
    }

    /// The whole answer to a request with these headers, if it was refused.
    #[must_use]
    pub fn response<'h>(&self, request: impl Into<Headers<'h>>) -> Option<Response<Bytes>> {
        self.answer(&self.matched_policies()).map(|answer| answer.response(self.state.rules.body(), request))
    }

    /// The same as a message of HTTP/1.1; see [`Answer::write_http1`].
    #[doc(hidden)]
    pub fn write_http1<'h>(
        &self,
        request: impl Into<Headers<'h>>,
        more: &[u8],
        out: &mut Vec<u8>,
    ) -> Option<WrittenResponse> {
        self.answer(&self.matched_policies())
            .map(|answer| answer.write_http1(self.state.rules.body(), request, more, out))
    }

    /// The same, written only if it is not what was written last; see [`Answer::write_http1_reusing`].
    #[doc(hidden)]
    pub fn write_http1_reusing<'l, 'h>(
        &self,
        last: &'l mut ReusedResponse,
        request: impl Into<Headers<'h>>,
        more: &[u8],
    ) -> Option<(WrittenResponse, &'l [u8])> {
        self.answer(&self.matched_policies())
            .map(|answer| answer.write_http1_reusing(last, self.state.rules.body(), request, more))
    }

    /// The whole answer to a gRPC request, if it was refused: there is only a head.
    #[must_use]
    pub fn grpc_response(&self) -> Option<Response<()>> {
        self.answer(&self.matched_policies()).map(|answer| answer.grpc())
    }

    /// The rules that it was ruled by.
    #[must_use]
    pub fn rules(&self) -> &RuleSet {
        &self.state.rules
    }

    /// Brings the request to its actual cost, once that is known: in every rule whose cost was more than one unit or
    /// not a constant, gives back what was too much, as far as it still weighs on the key, or takes what was too
    /// little, as far as there is any.
    ///
    /// Each limit can be settled once, by this or by [`settle_limit`](Self::settle_limit), [`refund`](Self::refund) or
    /// [`settle_response`](Self::settle_response). What comes later changes nothing: [`Settlement::AlreadySettled`].
    pub async fn settle(&self, actual: u64) -> Settlement {
        self.settle_each(|selected_by, rule| self.is_estimate(selected_by, rule).then_some(actual)).await
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

impl std::fmt::Debug for Outcome {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Outcome")
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
            Refused::TokenInvalid { error, challenge } => Self::TokenInvalid { error, challenge },
            Refused::Unreadable(problem) => {
                Self::Unreadable(Box::new(UnreadableRequest::new(problem.reason(), problem.to_string())))
            }
        }
    }
}

//! The outcome of a request: the decision, and the response to send.

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response};
use smallvec::SmallVec;

use super::deferred::{DeferredCharges, DeferredHits};
use super::in_flight::{Full, InFlightLimits, InFlightPermit, PermitRequests, ShadowDecisions, TakenPermits};
use super::store::Hits;
use super::{Gate, State};
#[cfg(all(feature = "file", feature = "redis"))]
use tollgate::Source;
use tollgate::internal::Held;
use tollgate::{Decision, LimitId};
use tollgate_http::internal::{ReusedResponse, WrittenResponse};
use tollgate_http::{Headers, Policy, Refusal, RefusalBuilder, UnreadableRequest};

#[cfg(feature = "file")]
use crate::demand::Observation;
use crate::{Refused, RuleSet, TokenStatus};

/// The policies that a response lists.
type Policies<'a> = SmallVec<[&'a Policy; 4]>;

/// The number of policies that a response lists at most. Bounds the response head for any number of rules.
const MAX_POLICIES: usize = 32;

/// The result for a whole request: whether it is allowed, which limit decided, the headers for its response, and what
/// to settle once its actual cost is known.
///
/// ```
/// use http::HeaderMap;
/// use tollgate_rules::{Facts, KeyPart, Rule, RuleSet};
/// use tollgate::{FixedWindow, Limit, MINUTE};
/// use tollgate_rules::Gate;
///
/// let per_ip = Rule::new(Limit::new("per-ip", FixedWindow::new(1, MINUTE))?).key(KeyPart::ip());
/// let gate = Gate::in_memory(RuleSet::builder().rule(per_ip).build()?)?;
/// let facts = Facts::new("GET", "/").peer([192, 0, 2, 7].into());
///
/// let allowed = gate.decide_now(&facts).expect("the store is in memory");
/// assert!(allowed.is_allowed());
/// let mut headers = HeaderMap::new();
/// allowed.write_headers(&mut headers);
/// assert_eq!(headers["x-ratelimit-remaining"], "0");
///
/// let denied = gate.decide_now(&facts).expect("the store is in memory");
/// assert_eq!(denied.limit(), Some("per-ip"));
/// let response = denied.response(&HeaderMap::new()).expect("the request is refused");
/// assert_eq!(response.status(), 429);
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[must_use = "the request is limited only if its outcome is used"]
pub struct Outcome {
    pub(super) state: Arc<State>,
    /// The hits of the enforced rules.
    pub(super) hits: Hits,
    pub(super) selected_by: SelectedBy,
    /// The decision of the enforced rules; `None` if none of them counted the request.
    pub(super) decision: Option<Decision>,
    refusal: Option<Refusal>,
    /// Parts that few requests need.
    pub(super) extras: Option<Box<Extras>>,
    pub(super) token: TokenStatus,
    pub(super) signatures_verified: u8,
    /// One bit for each of the first 32 limits, set when the limit is settled, so that each is settled once. [`Extras`]
    /// has the bits of the others.
    pub(super) settled: AtomicU32,
    /// The decision after a settlement that changed the cost, for the headers of the response.
    pub(super) settled_at: OnceLock<Box<Decision>>,
}

/// Checks beside those of the enforced rules, which are all-or-nothing and kept in the outcome. Few requests have any.
#[derive(Default)]
pub(super) struct PendingChecks {
    /// The hits of shadow rules. Each rule is checked by itself.
    pub(super) shadow_hits: Vec<(u32, Hits)>,
    pub(super) shadow_decisions: ShadowDecisions,
    /// Permits that the request needs, of the few rules that limit requests in flight.
    pub(super) permits: PermitRequests,
    /// The enforced limits among these.
    pub(super) in_flight: InFlightLimits,
    pub(super) taken: Option<TakenPermits>,
    /// The hits that count only after the response.
    pub(super) deferred: DeferredHits,
}

/// Parts of an outcome that few requests need.
#[derive(Default)]
pub(super) struct Extras {
    /// The rule that refuses the request regardless of the remaining quota.
    pub(super) refused_by: Option<u32>,
    pub(super) shadow_decisions: ShadowDecisions,
    /// The hits of shadow rules, in the order of their decisions.
    pub(super) shadow_hits: Vec<(u32, Hits)>,
    /// The request's in-flight permit.
    pub(super) permit: Option<InFlightPermit>,
    /// The enforced in-flight limits that the request matched.
    pub(super) in_flight: InFlightLimits,
    /// The hash of the key that has too many requests in flight, if that denied the request.
    pub(super) full_key: Option<u64>,
    /// One bit for each limit after the first 32, set when the limit is settled.
    pub(super) settled: Box<[AtomicU32]>,
    /// The units that a settlement may give back. They are pending until they are settled or the outcome is dropped.
    pub(super) open: Option<Held>,
    /// The charges that follow the response.
    pub(super) deferred: Option<Box<DeferredCharges>>,
}

/// The party that selected the limit, the key and the cost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SelectedBy {
    Rules,
    /// The rules, in a process that sees the response, so that limits may count the request after it.
    RulesUntilResponse,
    /// The caller, so any cost may be an estimate.
    Name,
}

impl Outcome {
    /// Sets the decision of the enforced rules and the results of the shadow rules. It works in place because an
    /// outcome is large.
    #[inline(always)]
    pub(super) fn decided(&mut self, mut pending: Option<Box<PendingChecks>>, decision: Decision) {
        let deferred = pending.as_mut().and_then(|pending| pending.take_deferred(&self.state, &decision));
        #[cfg(feature = "file")]
        if self.state.rules.have_observers() {
            observe(self, pending.as_deref(), &decision);
        }
        self.extras = pending.and_then(|pending| pending.into_extras(&decision));
        if deferred.is_some() {
            self.extras.get_or_insert_default().deferred = deferred;
        }
        let limits = self.hits.len() + self.extras.as_ref().map_or(0, |extras| extras.shadow_hits.len());
        if limits > u32::BITS as usize {
            self.track_settlements_of(limits);
        }
        self.report(decision);
    }

    /// Sets the decision to report, and the refusal if it is a denial.
    #[inline(always)]
    pub(super) fn report(&mut self, decision: Decision) {
        if let Some(limit) = decision.limit() {
            self.decision = Some(decision);
            self.refusal = Refusal::of(&decision);
            if self.state.rules.have_bans() {
                self.report_ban(decision, limit);
            }
        }
    }

    /// Reports a ban as a denial by the limit that the ban belongs to, with nothing remaining.
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

    /// Refuses the request regardless of the remaining quota.
    pub(super) fn refused_by(&mut self, rule: Option<u32>, refused: Refused) {
        self.refusal = Some(refused.into());
        self.extras = Some(Box::new(Extras { refused_by: rule, ..Extras::default() }));
    }

    /// Refuses the request for this reason.
    pub(super) fn refuse(&mut self, refusal: Refusal) {
        self.refusal = Some(refusal);
    }

    /// Refuses the request because too many are in flight.
    pub(super) fn refuse_full(&mut self, full: &Full, in_flight: InFlightLimits) {
        self.refusal = Some(Refusal::Limited);
        self.decision = Some(full.decision);
        let full_key = Some(full.fingerprint);
        self.extras = Some(Box::new(Extras { in_flight, full_key, ..Extras::default() }));
    }

    /// Creates the outcome of a request that is not checked yet.
    #[inline(always)]
    pub(crate) fn unchecked(gate: &Gate) -> Self {
        Self::unlimited(gate.0.state.load_full())
    }

    /// Creates the outcome of a request to which no rule applies.
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
            settled_at: OnceLock::new(),
        }
    }

    /// Takes the in-flight permit of an allowed request, if a rule limits requests in flight. Keep it until the request
    /// ends. A permit that is not taken is returned when the outcome is dropped.
    pub fn take_permit(&mut self) -> Option<InFlightPermit> {
        self.extras.as_mut()?.permit.take()
    }

    /// Returns `true` if the outcome still holds the request's permit.
    #[doc(hidden)]
    pub fn has_permit(&self) -> bool {
        self.extras.as_ref().is_some_and(|extras| extras.permit.is_some())
    }

    /// Returns `true` if the request is allowed.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.refusal.is_none()
    }

    /// Returns the reason of a refusal, or `None` if the request is allowed.
    #[must_use]
    pub fn refusal(&self) -> Option<&Refusal> {
        self.refusal.as_ref()
    }

    /// Returns the result of verifying the request's token. A token is not read if the request is refused without it.
    #[must_use]
    pub fn token(&self) -> TokenStatus {
        self.token
    }

    /// Returns the number of signatures that were verified for the request. It is 0 if the token was verified or
    /// rejected recently, and can be more than 1 if the token names no key.
    #[must_use]
    pub fn signatures_verified(&self) -> u8 {
        self.signatures_verified
    }

    /// Returns the name of the limit that decided, or of the one with the smallest share left. Returns `None` if no
    /// rule matched, or if only in-flight limits matched and allowed the request.
    #[must_use]
    pub fn limit(&self) -> Option<&str> {
        let rules = &self.state.rules;
        let decided_by = self.decision.as_ref().and_then(Decision::limit).map(|limit| rules.owner(limit));
        let rule = decided_by.or_else(|| self.extras.as_ref()?.refused_by);
        rule.map(|rule| rules.name(rule))
    }

    /// Returns the window of that limit, or the time in which a bucket refills. Returns `None` if there is no decision.
    #[must_use]
    pub fn window(&self) -> Option<Duration> {
        let limit = self.decision.as_ref()?.limit()?;
        Some(self.state.rules.window(limit))
    }

    /// Returns the decision of that limit. Returns `None` if no rule matched, or if a rule refused the request
    /// regardless of the remaining quota.
    #[must_use]
    pub fn decision(&self) -> Option<&Decision> {
        self.decision.as_ref()
    }

    /// Returns the decision of every enforced limit that counted the request, with its name, in the order of the rules.
    /// [`decision`](Self::decision) is one of them: the limit that denied, or otherwise the one with the smallest share of
    /// its quota left. If the request is denied, the decisions of the limits that would allow it show what they have left:
    /// nothing was taken from them.
    ///
    /// On Redis, the decisions are those of the check. Limits that this process did not look at are missing, for example
    /// after a denial from the denial cache. In memory, the other limits are read when this is called, so requests in the
    /// meantime count too.
    #[must_use]
    pub fn each_limit(&self) -> Vec<(&str, Decision)> {
        let Some(reported) = &self.decision else { return Vec::new() };
        let rules = &self.state.rules;
        let named = |decision: Decision| Some((rules.name(rules.owner(decision.limit()?)), decision));
        // Too many requests in flight: the rate limits have not counted the request.
        if self.hits.costs().all(|(limit, _)| reported.limit() != Some(limit)) {
            return named(*reported).into_iter().collect();
        }
        let is_ban = |limit: LimitId| rules.have_bans() && rules.ban(rules.owner(limit)) == Some(limit);
        let own = |(position, (limit, _)): (usize, (LimitId, u64))| match reported.limit() == Some(limit) {
            true => Some(*reported),
            false => self.state.store.own_decision(&self.hits, position, reported.is_allowed()),
        };
        let limits = self.hits.costs().enumerate().filter(|(_, (limit, _))| !is_ban(*limit));
        limits.filter_map(own).filter_map(named).collect()
    }

    /// Reads what is left under the limits that [`each_limit`](Self::each_limit) lacks, because this process knew without a
    /// call to Redis that another one denies the request. A flood of such requests is not read: at most 100 are in a
    /// second.
    #[doc(hidden)]
    pub async fn read_each_limit(&mut self) {
        #[cfg(feature = "redis")]
        if let Some(denied) = self.decision.filter(|decision| !decision.is_allowed()) {
            self.state.store.read_undecided(&mut self.hits, &denied).await;
        }
    }

    /// Returns the time for which an allowed request has to be delayed. It is zero unless a queue shapes the traffic.
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.decision.as_ref().map_or(Duration::ZERO, Decision::delay)
    }

    /// Returns the decisions of the rules in shadow mode, with their names.
    pub fn shadow_decisions(&self) -> impl Iterator<Item = (&str, &Decision)> {
        self.all_shadow_decisions().iter().map(|(rule, decision)| (self.state.rules.name(*rule), decision))
    }

    pub(super) fn all_shadow_decisions(&self) -> &[(u32, Decision)] {
        self.extras.as_ref().map_or(&[], |extras| &extras.shadow_decisions)
    }

    fn policy(&self) -> Option<&Policy> {
        Some(self.state.rules.policy(self.shown()?.limit()?))
    }

    /// Returns the decision that headers show: the one after the settlement, if that changed the cost.
    fn shown(&self) -> Option<&Decision> {
        self.settled_at.get().map(|decision| &**decision).or(self.decision.as_ref())
    }

    /// Returns the policies of all enforced rules that the request matched: rate limits in the order of the rules, then
    /// in-flight limits. The list depends only on the rules that matched, so it is the same in every response to the
    /// same kind of request.
    fn matched_policies(&self) -> Policies<'_> {
        let rules = &self.state.rules;
        let is_ban = |limit: LimitId| rules.have_bans() && rules.ban(rules.owner(limit)) == Some(limit);
        let rates = self.hits.costs().map(|(limit, _)| limit).filter(|limit| !is_ban(*limit));
        let in_flight = self.extras.iter().flat_map(|extras| extras.in_flight.iter().copied());
        rates.chain(in_flight).take(MAX_POLICIES).map(|limit| rules.policy(limit)).collect()
    }

    /// Adds the rate limit headers to the headers of a response. Stricter headers that are already present stay.
    ///
    /// After a settlement, they show the quota that is left then. So settle a response before you write its headers.
    pub fn write_headers(&self, headers: &mut HeaderMap) {
        if let (Some(policy), Some(decision)) = (self.policy(), self.shown()) {
            policy.merge_listing(decision, &self.matched_policies(), headers);
        }
    }

    fn answer<'a>(&'a self, matched: &'a [&'a Policy]) -> Option<RefusalBuilder<'a>> {
        let mut answer = RefusalBuilder::new(self.refusal.as_ref()?).challenge(self.state.rules.challenge());
        if let Some(policy) = self.policy() {
            answer = answer.limit(policy).matched(matched);
        }
        if let Some(decision) = &self.decision {
            answer = answer.decision(decision);
        }
        Some(answer)
    }

    /// Appends the headers of [`write_headers`](Self::write_headers) to `out` as HTTP/1.1 lines. The response must not
    /// have rate limit headers yet.
    #[doc(hidden)]
    pub fn write_header_lines(&self, out: &mut Vec<u8>) {
        if let (Some(policy), Some(decision)) = (self.policy(), self.shown()) {
            policy.write_lines_listing(decision, &self.matched_policies(), out);
        }
    }

    /// Returns the response to a refused request that has the headers `request`. Returns `None` if the request is
    /// allowed.
    #[must_use]
    pub fn response<'h>(&self, request: impl Into<Headers<'h>>) -> Option<Response<Bytes>> {
        let (request, rules) = (request.into(), &self.state.rules);
        let mut response = self.answer(&self.matched_policies())?.response(rules.body(), request);
        if let Some(cors) = rules.cors() {
            response.headers_mut().extend(cors.headers(request));
        }
        Some(response)
    }

    /// Appends that response to `out` in HTTP/1.1 format; see [`RefusalBuilder::write_http1`].
    #[doc(hidden)]
    pub fn write_http1<'h>(
        &self,
        request: impl Into<Headers<'h>>,
        more: &[u8],
        out: &mut Vec<u8>,
    ) -> Option<WrittenResponse> {
        let request = request.into();
        let lines = self.cors_lines(request, more);
        self.answer(&self.matched_policies())
            .map(|answer| answer.write_http1(self.state.rules.body(), request, lines.as_deref().unwrap_or(more), out))
    }

    /// Writes that response, reusing the one written before; see [`RefusalBuilder::write_http1_reusing`].
    #[doc(hidden)]
    pub fn write_http1_reusing<'l, 'h>(
        &self,
        last: &'l mut ReusedResponse,
        request: impl Into<Headers<'h>>,
        more: &[u8],
    ) -> Option<(WrittenResponse, &'l [u8])> {
        let (request, body) = (request.into(), self.state.rules.body());
        let lines = self.cors_lines(request, more);
        self.answer(&self.matched_policies())
            .map(|answer| answer.write_http1_reusing(last, body, request, lines.as_deref().unwrap_or(more)))
    }

    /// Returns `more` with the lines for a script of another origin, if it may read the response.
    fn cors_lines(&self, request: Headers<'_>, more: &[u8]) -> Option<Vec<u8>> {
        self.state.rules.cors()?.lines(request, more)
    }

    /// Returns the response to a refused gRPC request, which consists of headers only. Returns `None` if the request is
    /// allowed.
    #[must_use]
    pub fn grpc_response(&self) -> Option<Response<()>> {
        self.answer(&self.matched_policies()).map(|answer| answer.grpc())
    }

    /// Returns the rules that decided the request.
    #[must_use]
    pub fn rules(&self) -> &RuleSet {
        &self.state.rules
    }
}

impl PendingChecks {
    /// Returns the extra parts of the outcome. A denied request returns its permit.
    #[inline(never)]
    fn into_extras(self, decision: &Decision) -> Option<Box<Extras>> {
        let Self { shadow_hits, mut shadow_decisions, in_flight, taken, .. } = self;
        if shadow_decisions.is_empty() && taken.is_none() {
            return None;
        }
        let permit = taken.map(|taken| {
            shadow_decisions.extend(taken.shadow_decisions);
            taken.permit
        });
        let permit = permit.filter(|_| decision.is_allowed());
        Some(Box::new(Extras { shadow_decisions, shadow_hits, permit, in_flight, ..Extras::default() }))
    }
}

/// Shows a decided request to the observers of its limits. Call it only if a limit learns.
#[cfg(feature = "file")]
#[inline(never)]
fn observe(outcome: &Outcome, pending: Option<&PendingChecks>, decision: &Decision) {
    let rules = &outcome.state.rules;
    observe_hits(rules, &outcome.hits, decision);
    let shadow = pending.into_iter().flat_map(|pending| pending.shadow_hits.iter().zip(&pending.shadow_decisions));
    for ((_, hits), (_, decision)) in shadow {
        observe_hits(rules, hits, decision);
    }
}

#[cfg(feature = "file")]
fn observe_hits(rules: &RuleSet, hits: &Hits, decision: &Decision) {
    // A ban is a denial by its limit.
    let denied_by = decision.limit().filter(|_| !decision.is_allowed()).map(|limit| rules.owner(limit));
    let is_denied = |limit: LimitId| denied_by == Some(rules.owner(limit));
    for hit in hits.hashed() {
        let Some(observer) = rules.observer(hit.limit) else { continue };
        observer.observe(Observation {
            client: hit.fingerprint,
            cost: hit.cost,
            at: decision.at,
            is_denied: is_denied(hit.limit),
            need_on_store: 0,
        });
    }
    #[cfg(feature = "redis")]
    for hit in hits.on_redis() {
        let (limit, cost) = tollgate::internal::redis::cost(hit);
        let Some(observer) = rules.observer(limit) else { continue };
        // The store counts the requests to all nodes. A denied request would have needed its cost in addition.
        let own =
            tollgate::internal::redis::decided(hit).or_else(|| (decision.limit() == Some(limit)).then_some(decision));
        let need_on_store = own.filter(|own| own.source() == Source::Store).map_or(0, |own| {
            let used = own.quota().saturating_sub(own.remaining());
            if own.is_allowed() { used } else { used.saturating_add(cost) }
        });
        let client = observer.hash(tollgate::internal::redis::key_name(hit));
        observer.observe(Observation { client, cost, at: decision.at, is_denied: is_denied(limit), need_on_store });
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
            Refused::ClientAddressUnknown => Self::ClientAddressUnknown,
        }
    }
}

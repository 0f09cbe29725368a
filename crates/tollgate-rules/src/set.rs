//! Compiled rules, which turn requests into hits.
//!
//! As much work as possible is done at load time. Finding the hits of a plain request (no escapes in matched parts, no
//! expression, no token) allocates nothing.

mod building;
mod by_key;
mod last_plans;
mod phases;
mod plain;
mod unknown;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tollgate::internal::Generation;

pub use self::building::RuleSetBuilder;
use self::by_key::Treatment;
use self::last_plans::LastPlans;
pub(crate) use self::phases::Phase;
use self::phases::Phases;
pub(crate) use self::plain::PerAddress;
use self::plain::PlainRule;
pub use self::unknown::UnknownPlan;
use super::client::TrustedProxies;
use tollgate::{Algorithm, LimitId};
use tollgate_http::internal::Challenge;
use tollgate_http::{Body, Cors, Policy, TokenError};

#[cfg(feature = "file")]
use super::envoy::Domains;
use super::index::{Candidates, Index, IndexedBy};
use super::key_map::KeyMap;
use super::key_part::Piece;
use super::matching::{Known, Miss};
use super::named_key::{KeyReadings, OtherKeys, Pieces, with_key};
use super::normal::{ReadError, Unreadable};
use super::request::{TokenStatus, Tokens};
use super::response::ResponseSettlement;
use super::rule::{Missing, Mode, Rule};
use super::{ExpressionField, Facts, KeyPart, PathReading, Request};
use tollgate::{InvalidLimit, Key, Limit, LimitSet, Limiter, LimiterBuilder};

#[cfg(feature = "file")]
use crate::demand::Observer;

/// More key parts than rules need, and few enough to hash on the stack.
pub const MAX_KEY_PARTS: usize = 8;

/// A compiled set of rules. Clones are cheap.
#[derive(Clone, Debug)]
pub struct RuleSet(Arc<Inner>);

struct Inner {
    rules: Box<[Compiled]>,
    /// For each rule: the checks that can be skipped. Kept apart, so that most of a rule need not be loaded.
    shortcuts: Box<[Shortcut]>,
    /// For each rule: how it counts.
    plain: Box<[PlainRule]>,
    /// Rule numbers by the names of their limits.
    numbers: HashMap<Box<str>, u32, ahash::RandomState>,
    index: Index,
    proxies: TrustedProxies,
    path_reading: PathReading,
    tokens: Option<Tokens>,
    /// The generation of all limit ids.
    generation: Generation,
    /// The limits of the store: the limit of each rule, then bans, then variants.
    limits: Vec<Limit>,
    /// The number of rate limits of rules, which come first.
    rates: usize,
    /// Maximum requests in flight: of each rule that limits them, then of variants. Their ids follow those of the
    /// store's limits.
    in_flight: Box<[u64]>,
    /// The rule of each limit id.
    owners: Box<[u32]>,
    /// The headers of each limit id.
    policies: Box<[Policy]>,
    body: Body,
    cors: Option<Cors>,
    /// `true` if a rule is settled by responses.
    await_responses: bool,
    /// `true` if the cost of a rule may be corrected later.
    may_change: bool,
    /// `true` if a rule counts requests only after their responses.
    have_deferred: bool,
    /// `true` if a rule has a ban.
    have_bans: bool,
    /// The plan that each key last used. `None` if no rule has numbers for plans.
    last_plans: Option<LastPlans>,
    /// `true` if the decision service denies requests that no rule applies to.
    deny_unknown: bool,
    per_address: Option<PerAddress>,
    phases: Phases,
    challenge: Option<Challenge>,
    /// The observers of limits that learn, by limit id. Empty if no limit learns.
    #[cfg(feature = "file")]
    observers: Box<[Option<Arc<Observer>>]>,
    #[cfg(feature = "file")]
    domains: Domains,
    /// Hashes of the names of the rules, by which their keys are counted.
    #[cfg(feature = "file")]
    name_hashes: Box<[u64]>,
}

struct Compiled {
    rule: Rule,
    limit: LimitId,
    by_plan: HashMap<Box<str>, LimitId, ahash::RandomState>,
    by_key: KeyMap<LimitId>,
    exempt: KeyMap<()>,
    blocked: KeyMap<()>,
    ban: Option<LimitId>,
    /// The limit with the strictest of all numbers of the rule, if the reading of a path may choose between them.
    strictest: LimitId,
}

/// Checks that can be skipped for a rule that the index found.
#[derive(Clone, Copy)]
struct Shortcut {
    known: Known,
    exceptions: Exceptions,
}

/// Whether the case of a path is known to match the rules that the index found by path. The index ignores case.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    Known,
    Unknown,
}

/// Whether a rule has exemptions, blocks or overrides.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Exceptions {
    None,
    Some,
}

impl Shortcut {
    /// Skips no check.
    const NONE: Self = Self { known: Known::Nothing, exceptions: Exceptions::Some };
}

/// A rule that counts a request.
#[derive(Clone, Debug)]
pub(crate) struct RuleHit {
    pub(crate) rule: u32,
    pub(crate) limit: LimitId,
    pub(crate) ban: Option<LimitId>,
    pub(crate) cost: u64,
    pub(crate) mode: Mode,
    /// `true` if the rule limits requests in flight. Its limit is not in the store.
    pub(crate) is_in_flight: bool,
}

/// The reason that a request is refused without checking the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Blocked,
    KeyMissing(String),
    TokenInvalid { error: TokenError, challenge: bool },
    Unreadable(Unreadable),
    ClientAddressUnknown,
}

impl From<ReadError> for Refused {
    fn from(error: ReadError) -> Self {
        match error {
            ReadError::Unreadable(problem) => Self::Unreadable(problem),
            ReadError::ClientAddressUnknown => Self::ClientAddressUnknown,
        }
    }
}

/// The result of checking one rule.
pub(crate) enum RuleMatch<'r> {
    NotMatched(Miss<'r>),
    /// The rule is disabled.
    Disabled,
    /// The request lacks a part of the key, and the rule skips such requests.
    KeyMissing(&'r KeyPart),
    Exempt,
    Refused(u32, Refused),
    Hit(RuleHit),
}

impl RuleSet {
    /// Returns a builder of rule sets.
    pub fn builder() -> RuleSetBuilder {
        RuleSetBuilder::default()
    }

    pub(crate) fn request<'a>(&'a self, facts: &'a Facts<'a>) -> Request<'a> {
        Request::new(facts, self.0.path_reading, &self.0.proxies, self.0.tokens.as_ref())
    }

    pub(super) fn path_reading(&self) -> PathReading {
        self.0.path_reading
    }

    /// Finds every rule that counts the request, with its key and the other keys of the request.
    ///
    /// # Errors
    ///
    /// The rule that refuses the request regardless of the remaining quota, and the reason. Rules found before are
    /// void.
    pub(crate) fn find(
        &self,
        request: &Request<'_>,
        mut found: impl FnMut(&RuleHit, Key<'_>, OtherKeys<'_, '_>),
    ) -> Result<(), (Option<u32>, Refused)> {
        let (candidates, case);
        let numbers = match self.0.index.all_always() {
            Some(all) => {
                case = Case::Known;
                all
            }
            None => {
                candidates = self.candidates(request);
                case = self.check_candidates(request)?;
                &*candidates
            }
        };
        for &number in numbers {
            let compiled = &self.0.rules[number as usize];
            let Shortcut { known, exceptions } = self.shortcut(number, case);
            if compiled.rule.matching.first_miss(request, known).is_some() {
                compiled.check_read(number, request)?;
                continue;
            }
            // Fast path for most rules: a key of few parts, all present, and no exceptions (`rules1_ns` of the benchmark
            // `rules`).
            if exceptions == Exceptions::None {
                let plain = &self.0.plain[number as usize];
                let (first, second, pair);
                let key = match &*plain.key {
                    [] => Some(Key::byte_parts(&[])),
                    [part] => {
                        first = part.of(request);
                        first.as_ref().map(|piece| Key::from(piece.as_bytes()))
                    }
                    [one, other] => {
                        // If the first part is missing, the second is not read: it may be ambiguous.
                        first = one.of(request);
                        second = if first.is_some() { other.of(request) } else { None };
                        match (&first, &second) {
                            (Some(one), Some(other)) => {
                                pair = [one.as_bytes(), other.as_bytes()];
                                Some(Key::byte_parts(&pair))
                            }
                            _ => None,
                        }
                    }
                    _ => None,
                };
                if let Some(key) = key
                    && !(plain.may_have_several_keys && request.has_several_keys())
                {
                    let whole = || compiled.rule_hit(number, compiled.limit, request, &self.0.limits);
                    let rule_hit = plain.rule_hit(number, request).unwrap_or_else(whole);
                    compiled.check_read(number, request)?;
                    found(&rule_hit, key, OtherKeys::default());
                    continue;
                }
            }
            self.find_one(number, request, Shortcut { known: Known::Everything, exceptions }, &mut found)?;
        }
        Ok(())
    }

    /// Returns the rules that may match a request. Call [`check_candidates`](Self::check_candidates) next.
    fn candidates(&self, request: &Request<'_>) -> Candidates {
        self.0.index.candidates(|| request.readings(), || request.host())
    }

    /// Refuses a request whose path or host cannot be read, if the index needed it.
    fn check_candidates(&self, request: &Request<'_>) -> Result<Case, (Option<u32>, Refused)> {
        let is_unusual = self.0.index.has_paths() && request.has_upper_case_path();
        match request.errors().take() {
            Some(error) if self.enforces_by_path_or_host() => Err((None, error.into())),
            _ => Ok(if is_unusual { Case::Unknown } else { Case::Known }),
        }
    }

    /// Returns `true` if a rule that is indexed by path or host can refuse. Shadow rules cannot.
    fn enforces_by_path_or_host(&self) -> bool {
        let placed = self.0.rules.iter().zip(self.0.index.indexed_by());
        placed
            .into_iter()
            .any(|(one, by)| matches!(by, IndexedBy::Path | IndexedBy::Host) && one.rule.mode == Mode::Enforced)
    }

    fn shortcut(&self, number: u32, case: Case) -> Shortcut {
        let shortcut = self.0.shortcuts[number as usize];
        match case {
            Case::Unknown if self.0.index.indexed_by()[number as usize] == IndexedBy::Path => {
                Shortcut { known: Known::Nothing, ..shortcut }
            }
            _ => shortcut,
        }
    }

    /// Checks one rule.
    #[inline(never)]
    fn find_one(
        &self,
        number: u32,
        request: &Request<'_>,
        shortcut: Shortcut,
        found: &mut dyn FnMut(&RuleHit, Key<'_>, OtherKeys<'_, '_>),
    ) -> Result<(), (Option<u32>, Refused)> {
        let mut key = KeyReadings::default();
        let result = self.check_rule_with(number, request, &mut key, shortcut);
        self.0.rules[number as usize].check_read(number, request)?;
        match result {
            RuleMatch::Hit(rule_hit) => {
                if let Some(plan) = key.plan {
                    self.note_plan(number, plan, key.counted());
                }
                with_key(key.counted(), |counted| found(&rule_hit, counted, key.others()));
            }
            RuleMatch::Refused(number, refused) => return Err((Some(number), refused)),
            RuleMatch::NotMatched(_) | RuleMatch::Disabled | RuleMatch::KeyMissing(_) | RuleMatch::Exempt => {}
        }
        Ok(())
    }

    /// Checks one rule, and reads its key into `key`, which must be empty.
    pub(crate) fn check_rule<'r>(
        &'r self,
        number: u32,
        request: &'r Request<'_>,
        key: &mut KeyReadings<'r>,
    ) -> RuleMatch<'r> {
        let result = self.check_rule_with(number, request, key, Shortcut::NONE);
        match self.0.rules[number as usize].check_read(number, request) {
            Ok(()) => result,
            Err((_, refused)) => RuleMatch::Refused(number, refused),
        }
    }

    #[inline]
    fn check_rule_with<'r>(
        &'r self,
        number: u32,
        request: &'r Request<'_>,
        key: &mut KeyReadings<'r>,
        Shortcut { known, exceptions }: Shortcut,
    ) -> RuleMatch<'r> {
        let compiled = &self.0.rules[number as usize];
        let rule = &compiled.rule;
        if let Some(miss) = rule.matching.first_miss(request, known) {
            return if rule.mode == Mode::Disabled { RuleMatch::Disabled } else { RuleMatch::NotMatched(miss) };
        }
        // Entries other than keys apply whether or not the request has a key.
        if exceptions == Exceptions::Some && rule.exempt.lists_every_reading(request) {
            return RuleMatch::Exempt;
        }
        if exceptions == Exceptions::Some && rule.mode == Mode::Enforced && rule.blocked.lists(request) {
            return RuleMatch::Refused(number, Refused::Blocked);
        }
        for part in &rule.key {
            let piece = match (part.of(request), rule.missing) {
                (Some(piece), _) => piece,
                (None, _) if part.is_absent_descriptor(request) => return RuleMatch::KeyMissing(part),
                (None, Missing::Anonymous) => Piece::ANONYMOUS,
                (None, Missing::Deny) if rule.mode == Mode::Enforced => {
                    return RuleMatch::Refused(number, self.key_missing(part, request));
                }
                (None, Missing::Skip | Missing::Deny) => return RuleMatch::KeyMissing(part),
            };
            key.first.push(piece);
        }
        if request.has_several_readings() && rule.may_read_path() {
            let of_reading = || {
                let pieces = rule.key.iter().map(|part| part.of(request).unwrap_or(Piece::ANONYMOUS));
                pieces.collect()
            };
            request.for_other_readings(of_reading).for_each(|pieces| key.add_other(pieces));
        }
        if request.has_two_fingerprints() && rule.key.iter().any(KeyPart::may_have_two_names) {
            key.add_names(|number| rule.key.get(number)?.other_of(request));
        }
        let limit = match exceptions {
            Exceptions::None => compiled.limit,
            Exceptions::Some => match self.treat(compiled, key, request) {
                Treatment::Exempt => return RuleMatch::Exempt,
                Treatment::Blocked => return RuleMatch::Refused(number, Refused::Blocked),
                Treatment::Counted(limit) => limit,
            },
        };
        RuleMatch::Hit(compiled.rule_hit(number, limit, request, &self.0.limits))
    }

    /// Returns the reason to refuse a request that lacks a part of the key: the token error, if the part is a claim.
    #[cold]
    fn key_missing(&self, part: &KeyPart, request: &Request<'_>) -> Refused {
        match request.token_status() {
            TokenStatus::Invalid(error) if part.reads_token() => {
                Refused::TokenInvalid { error, challenge: self.0.challenge.is_some() }
            }
            _ => Refused::KeyMissing(part.to_string()),
        }
    }

    /// Returns the challenge for requests without a valid token, if the rules send one.
    pub(crate) fn challenge(&self) -> Option<&Challenge> {
        self.0.challenge.as_ref()
    }

    /// Finds the bans for a request that was refused before any rule was checked: those of rules that match every
    /// request and whose key depends on the connection only.
    pub(crate) fn find_bans(&self, request: &Request<'_>, mut found: impl FnMut(LimitId, Key<'_>)) {
        for compiled in self.0.rules.iter().filter(|_| self.0.have_bans) {
            let Rule { matching, key, mode, .. } = &compiled.rule;
            let applies = *mode == Mode::Enforced && matching.is_everything();
            // With a shared key, one client could have everybody banned.
            let is_of_connection = !key.is_empty() && key.iter().all(KeyPart::is_of_connection);
            let (Some(ban), true) = (compiled.ban, applies && is_of_connection) else { continue };
            let pieces: Option<Pieces<'_>> = key.iter().map(|part| part.of(request)).collect();
            if let Some(pieces) = pieces {
                with_key(&pieces, |key| found(ban, key));
            }
        }
    }

    pub(crate) fn number(&self, name: &str) -> Option<u32> {
        self.0.numbers.get(name).copied()
    }

    /// Returns the names of all rules, in their order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.rules.iter().map(|compiled| compiled.rule.name())
    }

    /// Returns the key parts of the rule named `name`, or `None` if there is no such rule.
    #[must_use]
    pub fn key_parts(&self, name: &str) -> Option<&[KeyPart]> {
        self.number(name).map(|number| &*self.rule(number).key)
    }

    /// Returns the domains of envoyproxy/ratelimit's configuration.
    #[cfg(feature = "file")]
    #[doc(hidden)]
    #[must_use]
    pub fn domains(&self) -> &Domains {
        &self.0.domains
    }

    /// Returns whether a rule is checked by its name only, never by the facts of a request.
    pub(crate) fn is_by_name_only(&self, number: u32) -> bool {
        self.rule(number).by_name_only
    }

    /// Returns the limits of all rules in their order, without overrides and bans. Rules that limit requests in flight
    /// have none.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        &self.0.limits[..self.0.rates]
    }

    /// Returns the number of failures of every expression, by limit name and field, in the order of the rules.
    /// [`ExpressionField`] describes how a failure affects the request.
    pub fn expression_errors(&self) -> impl Iterator<Item = (&str, ExpressionField, u64)> {
        self.0.rules.iter().flat_map(|compiled| {
            let counts = compiled.rule.expression_errors.iter();
            counts.map(|count| (compiled.rule.name(), count.field(), count.value()))
        })
    }

    /// Continues the failure counts of the rules that these replace.
    pub(crate) fn adopt_expression_errors(&self, before: &Self) {
        for compiled in &self.0.rules {
            let Some(number) = before.number(compiled.rule.name()) else { continue };
            for count in &compiled.rule.expression_errors {
                let counts = &before.rule(number).expression_errors;
                if let Some(before) = counts.iter().find(|before| before.field() == count.field()) {
                    count.adopt(before);
                }
            }
        }
    }

    /// Returns whether a limit learns.
    #[cfg(feature = "file")]
    #[inline(always)]
    pub(crate) fn have_observers(&self) -> bool {
        !self.0.observers.is_empty()
    }

    /// Returns the observer of a limit, if its quota learns. The variants of such a limit have none: their numbers are
    /// fixed.
    #[cfg(feature = "file")]
    pub(crate) fn observer(&self, limit: LimitId) -> Option<&Observer> {
        self.0.observers.get(limit.index())?.as_deref()
    }

    pub(crate) fn rule(&self, number: u32) -> &Rule {
        &self.0.rules[number as usize].rule
    }

    pub(crate) fn len(&self) -> u32 {
        self.0.rules.len() as u32
    }

    /// Creates an in-memory limiter with the limits of these rules.
    pub(crate) fn limiter(&self, settings: LimiterBuilder) -> Result<Limiter, InvalidLimit> {
        settings.limits(self.limit_set()).build()
    }

    /// Creates a limiter with the limits of these rules, and with the keys of `before` where their limits are
    /// compatible.
    pub(crate) fn limiter_after(&self, before: &Limiter) -> Result<Limiter, InvalidLimit> {
        before.with_limits(self.limit_set())
    }

    /// Returns the limits of the store, in the order of their ids.
    pub(crate) fn limit_set(&self) -> LimitSet {
        let (limits, beside) = self.0.limits.split_at(self.0.rates);
        LimitSet::from_rules(limits, beside, self.0.generation)
    }

    pub(crate) fn quota(&self, limit: LimitId) -> u64 {
        self.0.limits[limit.index()].quota()
    }

    pub(crate) fn window(&self, limit: LimitId) -> Duration {
        self.0.limits[limit.index()].window()
    }

    /// Returns the rule of a limit.
    #[doc(hidden)]
    pub fn owner(&self, limit: LimitId) -> u32 {
        self.0.owners[limit.index()]
    }

    /// Returns the ban of a rule.
    pub(crate) fn ban(&self, rule: u32) -> Option<LimitId> {
        self.0.rules[rule as usize].ban
    }

    /// Returns `true` if the cost of a rule is an estimate.
    pub(crate) fn estimates(&self, rule: u32) -> bool {
        self.0.rules[rule as usize].rule.cost.is_estimate()
    }

    /// Returns `true` if the cost of any rule is an estimate.
    pub(crate) fn have_estimates(&self) -> bool {
        self.0.rules.iter().any(|compiled| compiled.rule.cost.is_estimate())
    }

    /// Returns the rule of the rate limit with this name.
    pub(crate) fn rate_limit_named(&self, name: &str) -> Option<u32> {
        (0..)
            .zip(&self.0.rules)
            .find_map(|(number, Compiled { rule, .. })| (!rule.is_in_flight() && rule.name() == name).then_some(number))
    }

    /// Returns `true` if a rule may leave out requests that it matches.
    pub(crate) fn may_leave_out(&self, rule: u32) -> bool {
        let rule = self.rule(rule);
        !rule.exempt.is_empty() || rule.missing == Missing::Skip || rule.mode == Mode::Disabled
    }

    /// Returns `true` if any rule has a ban.
    #[inline]
    pub(crate) fn have_bans(&self) -> bool {
        self.0.have_bans
    }

    /// Returns `true` if any rule is settled by responses.
    #[inline]
    pub(crate) fn await_responses(&self) -> bool {
        self.0.await_responses
    }

    /// Returns `true` if a rule is settled by responses.
    pub(crate) fn awaits_response(&self, rule: u32) -> bool {
        self.response_settlement(rule).is_needed()
    }

    /// Returns `true` if any rule counts requests only after their responses.
    #[doc(hidden)]
    #[inline]
    #[must_use]
    pub fn have_deferred(&self) -> bool {
        self.0.have_deferred
    }

    /// Returns `true` if a limit of the store is a fixed window.
    pub(crate) fn is_fixed_window(&self, limit: LimitId) -> bool {
        let limit = self.0.limits.get(limit.index());
        limit.is_some_and(|limit| matches!(limit.algorithm(), Algorithm::FixedWindow(_)))
    }

    /// Returns `true` if this rule counts requests only after their responses.
    pub(crate) fn is_deferred(&self, rule: u32) -> bool {
        self.response_settlement(rule).is_deferred()
    }

    /// Returns how a rule is settled by responses.
    pub(crate) fn response_settlement(&self, rule: u32) -> &ResponseSettlement {
        &self.0.rules[rule as usize].rule.response_settlement
    }

    /// Returns `true` if the cost of any rule may be corrected later.
    #[inline]
    pub(crate) fn have_changing_costs(&self) -> bool {
        self.0.may_change
    }

    /// Returns `true` if the cost that a rule takes may be corrected later.
    pub(crate) fn may_change(&self, rule: u32) -> bool {
        self.estimates(rule) || self.awaits_response(rule)
    }

    pub(crate) fn policy(&self, limit: LimitId) -> &Policy {
        &self.0.policies[limit.index()]
    }

    /// Returns the body of refusals.
    pub(crate) fn body(&self) -> &Body {
        &self.0.body
    }

    /// Returns the web pages that may read refusals.
    pub(crate) fn cors(&self) -> Option<&Cors> {
        self.0.cors.as_ref()
    }

    /// Returns the name of a rule's limit.
    #[doc(hidden)]
    pub fn name(&self, rule: u32) -> &str {
        self.rule(rule).name()
    }

    /// Returns the hash of the name of a rule.
    #[cfg(feature = "file")]
    pub(crate) fn name_hash(&self, rule: u32) -> u64 {
        self.0.name_hashes[rule as usize]
    }

    /// Returns `true` if any rule limits requests in flight.
    pub(crate) fn limit_in_flight(&self) -> bool {
        !self.0.in_flight.is_empty()
    }

    /// Returns `true` if a rule limits requests in flight.
    pub(crate) fn is_in_flight(&self, rule: u32) -> bool {
        self.rule(rule).is_in_flight()
    }

    /// Returns the maximum of requests in flight of a limit.
    pub(crate) fn max_in_flight(&self, limit: LimitId) -> u64 {
        let place = limit.index().checked_sub(self.0.limits.len());
        place.and_then(|place| self.0.in_flight.get(place)).copied().unwrap_or(u64::MAX)
    }
}

impl Compiled {
    fn shortcut(&self, indexed_by: IndexedBy) -> Shortcut {
        let rule = &self.rule;
        let has_no_exceptions = rule.exempt.is_empty() && rule.blocked.is_empty() && rule.overrides.is_empty();
        let exceptions = if has_no_exceptions { Exceptions::None } else { Exceptions::Some };
        Shortcut { known: rule.matching.known_if_found_by(indexed_by), exceptions }
    }

    #[inline(always)]
    fn rule_hit(&self, number: u32, limit: LimitId, request: &Request<'_>, limits: &[Limit]) -> RuleHit {
        let quota = || limits.get(limit.index()).map_or(1, Limit::quota);
        let (cost, is_in_flight) = (self.rule.cost.of(request, quota), self.rule.is_in_flight());
        RuleHit { rule: number, limit, ban: self.ban, cost, mode: self.rule.mode, is_in_flight }
    }

    /// Refuses a request that this rule could not read. A shadow rule refuses nothing.
    #[inline(always)]
    fn check_read(&self, number: u32, request: &Request<'_>) -> Result<(), (Option<u32>, Refused)> {
        match request.errors().take() {
            None => Ok(()),
            Some(error) => self.check_error(number, error),
        }
    }

    #[cold]
    fn check_error(&self, number: u32, error: ReadError) -> Result<(), (Option<u32>, Refused)> {
        match self.rule.mode {
            Mode::Enforced => Err((Some(number), error.into())),
            Mode::Shadow | Mode::Disabled => Ok(()),
        }
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rules: Vec<&Rule> = self.rules.iter().map(|compiled| &compiled.rule).collect();
        out.debug_struct("RuleSet").field("rules", &rules).finish_non_exhaustive()
    }
}

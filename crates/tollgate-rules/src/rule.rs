//! A rule: a limit, the requests it applies to, and their key and cost.

use std::cell::OnceCell;
use std::sync::Arc;

use http::HeaderName;
use tollgate::internal::MAX_QUOTA;
use tollgate::{Algorithm, Ban};

use super::expression_errors::ErrorCount;
use super::key_part::header_name;
use super::matching::Condition;
use super::normal::Unreadable;
use super::response::{CountWhen, ResponseSettlement, StatusSet, whole_number};
use super::{KeyPart, Match, Networks, Request};
use tollgate::internal::check_name;
use tollgate::{InvalidLimit, Limit};

#[cfg(feature = "file")]
use crate::demand::Observer;

/// A limit, the requests it applies to, and how they are counted.
///
/// ```
/// use tollgate_rules::{KeyPart, Match, Rule};
/// use tollgate::{FixedWindow, Limit, MINUTE};
///
/// let rule = Rule::new(Limit::new("search", FixedWindow::new(10, MINUTE))?)
///     .matching(Match::everything().path("/search/**"))
///     .key(KeyPart::ip());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct Rule {
    pub(super) bound: Bound,
    pub(super) matching: Match,
    pub(super) key: Vec<KeyPart>,
    pub(super) missing: Missing,
    pub(super) cost: Cost,
    pub(super) plan: Option<KeyPart>,
    pub(super) overrides: Vec<(OverrideTarget, Numbers)>,
    pub(super) exempt: Listing,
    pub(super) blocked: Listing,
    pub(crate) mode: Mode,
    pub(super) ban: Option<Ban>,
    pub(super) response_settlement: ResponseSettlement,
    /// Error counts of the rule's expressions, which only rule files have.
    pub(super) expression_errors: Vec<ErrorCount>,
    /// What the expressions need a token for. The key and the plan are examined when the set is built.
    pub(super) expressions_read_token: TokenUse,
    /// Whether the rule is checked by its name only, never by the facts of a request.
    pub(super) by_name_only: bool,
    /// The observer of the demand, if the quota of the limit learns.
    #[cfg(feature = "file")]
    pub(super) observer: Option<Arc<Observer>>,
    /// The error of an invalid name.
    problem: Option<InvalidLimit>,
}

/// What a rule needs the claims of a token for. Later variants include earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum TokenUse {
    /// Nothing.
    #[default]
    Never,
    /// Counting: the key, the plan or the cost.
    Counting,
    /// Matching: whether the rule applies to a request, exempts it or blocks it.
    Matching,
}

/// What a rule limits.
#[derive(Clone)]
pub(super) enum Bound {
    /// Units per time: a limit of the store.
    Rate(Limit),
    /// Requests in flight.
    InFlight { name: Box<str>, max: u64 },
}

/// The numbers of an override.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Numbers {
    Rate(Algorithm),
    InFlight(u64),
}

/// The requests that an override applies to.
#[derive(Clone, Debug)]
pub(super) enum OverrideTarget {
    Plan(Box<str>),
    Key(Box<[Box<[u8]>]>),
}

/// How a rule treats a request that lacks a part of the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "file", derive(serde::Deserialize, schemars::JsonSchema), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Missing {
    /// All such requests share one key, `anonymous`.
    #[default]
    Anonymous,
    /// The rule does not apply.
    Skip,
    /// The request is refused.
    Deny,
}

/// Whether a rule is enforced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// The rule refuses requests.
    #[default]
    Enforced,
    /// The rule decides and counts, but never refuses: use it to try out a rule.
    Shadow,
    /// The rule applies to no request. Its counts are kept for when it is enabled again.
    Disabled,
}

/// Computes a cost.
type CostOf = Arc<dyn Fn(&Request<'_>) -> Option<u64> + Send + Sync>;

/// The number of units that a request takes.
#[derive(Clone)]
pub struct Cost(pub(super) CostSource);

#[derive(Clone)]
pub(super) enum CostSource {
    Constant(u64),
    Header(HeaderName),
    /// An invalid header name. Building the rule set reports it.
    Invalid(InvalidLimit),
    Custom(CostOf),
    /// An expression of a rule file, and the cost if it fails: the whole quota if `None`.
    Expression(CostOf, Option<u64>),
}

impl Cost {
    /// Takes a constant number of units.
    #[must_use]
    pub const fn constant(units: u64) -> Self {
        Self(CostSource::Constant(units))
    }

    /// Takes the number in a request header. If it is missing, not a number or 0, the request takes one unit, so that a
    /// client cannot make its requests free.
    #[must_use]
    pub fn header(name: impl AsRef<str>) -> Self {
        Self(header_name("cost", name.as_ref()).map_or_else(CostSource::Invalid, CostSource::Header))
    }

    /// Takes the result of a closure, or one unit if it returns `None`.
    pub fn custom(cost: impl Fn(&Request<'_>) -> Option<u64> + Send + Sync + 'static) -> Self {
        Self(CostSource::Custom(Arc::new(cost)))
    }

    /// Takes the result of an expression. If it fails, the request takes `when_error`, but never more than the quota,
    /// which would refuse the request forever. Without `when_error` it takes the whole quota.
    #[doc(hidden)]
    pub fn expression(
        cost: impl Fn(&Request<'_>) -> Option<u64> + Send + Sync + 'static,
        when_error: Option<u64>,
    ) -> Self {
        Self(CostSource::Expression(Arc::new(cost), when_error))
    }

    /// Returns the units that a request takes from a limit with this quota.
    #[inline]
    pub(super) fn of(&self, request: &Request<'_>, quota_of: impl Fn() -> u64) -> u64 {
        match &self.0 {
            _ if request.facts().given_cost() == Some(0) => 0,
            CostSource::Constant(units) => Self::of_constant(*units, request),
            CostSource::Header(name) => {
                let Some(value) = request.header(name) else { return 1 };
                whole_number(&value).map_or_else(
                    || {
                        // An upstream may read more than one unit in it: no cost is assumed.
                        request.refuse(Unreadable::InvalidCost(name.as_str().into()));
                        1
                    },
                    |units| units.max(1),
                )
            }
            CostSource::Invalid(_) => 1,
            CostSource::Custom(cost) => request.max_over_readings(|| cost(request).unwrap_or(1)),
            CostSource::Expression(cost, when_error) => {
                let quota = OnceCell::new();
                let failed = || {
                    let quota = *quota.get_or_init(&quota_of);
                    when_error.map_or(quota, |units| units.min(quota))
                };
                request.max_over_readings(|| cost(request).unwrap_or_else(failed))
            }
        }
    }

    /// Returns the units that a request takes from a limit with a constant cost.
    #[inline]
    pub(super) fn of_constant(units: u64, request: &Request<'_>) -> u64 {
        match (units, request.facts().given_cost()) {
            (_, Some(0)) => 0,
            (1, given) => given.unwrap_or(1),
            (units, _) => units,
        }
    }

    /// Returns `true` if the rule itself may take nothing for a request.
    pub(super) fn may_be_zero(&self) -> bool {
        match &self.0 {
            CostSource::Constant(units) => *units == 0,
            CostSource::Header(_) | CostSource::Invalid(_) => false,
            CostSource::Custom(_) | CostSource::Expression(..) => true,
        }
    }

    /// Returns the units, if they are constant.
    pub(super) fn as_constant(&self) -> Option<u64> {
        match self.0 {
            CostSource::Constant(units) => Some(units),
            _ => None,
        }
    }

    /// Returns `true` if the actual cost may differ.
    pub(super) fn is_estimate(&self) -> bool {
        !matches!(self.0, CostSource::Constant(1))
    }
}

/// A list of exempt or blocked requests: by address, key, or condition.
#[derive(Clone, Default)]
#[must_use]
pub struct Listing {
    networks: Networks,
    pub(super) keys: Vec<Box<[Box<[u8]>]>>,
    conditions: Vec<Condition>,
    everything: bool,
}

impl Listing {
    /// Returns an empty list.
    pub fn none() -> Self {
        Self::default()
    }

    /// Returns a list of every request and key.
    #[doc(hidden)]
    pub fn everything() -> Self {
        Self { everything: true, ..Self::default() }
    }

    /// Returns `true` if every request and key is listed.
    pub(super) fn is_everything(&self) -> bool {
        self.everything
    }

    /// Adds clients with an address in these networks.
    pub fn networks(mut self, networks: Networks) -> Self {
        self.networks = networks;
        self
    }

    /// Adds a key of the rule, by its parts.
    pub fn key(mut self, parts: &[&str]) -> Self {
        self.keys.push(owned(parts));
        self
    }

    /// Adds requests for which a condition holds.
    pub fn when(mut self, condition: impl Fn(&Request<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.conditions.push(Arc::new(condition));
        self
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.everything && self.networks.is_empty() && self.keys.is_empty() && self.conditions.is_empty()
    }

    /// Returns `true` if every address is listed.
    pub(super) fn has_every_address(&self) -> bool {
        self.networks.contains_all()
    }

    /// Returns `true` if the list has other entries than keys.
    pub(super) fn has_more_than_keys(&self) -> bool {
        !self.networks.is_empty() || !self.conditions.is_empty()
    }

    /// Returns `true` if the request is listed other than by its key, in any reading of its path.
    pub(super) fn lists(&self, request: &Request<'_>) -> bool {
        self.lists_network(request)
            || self.conditions.iter().any(|condition| request.in_any_reading(|| condition(request)))
    }

    /// Returns `true` if the request is listed in every reading of its path: an exemption for one reading must not
    /// apply to another.
    pub(super) fn lists_every_reading(&self, request: &Request<'_>) -> bool {
        self.lists_network(request)
            || self.conditions.iter().any(|condition| request.in_every_reading(|| condition(request)))
    }

    fn lists_network(&self, request: &Request<'_>) -> bool {
        let within = |address| self.networks.contains(address);
        !self.networks.is_empty() && request.client().is_some_and(within)
    }
}

pub(super) fn owned(parts: &[&str]) -> Box<[Box<[u8]>]> {
    parts.iter().map(|part| part.as_bytes().into()).collect()
}

impl Rule {
    /// Passes the fingerprints of certificates that the rule names to its key.
    pub(super) fn note_listed_fingerprints(&mut self) {
        let overridden = self.overrides.iter().filter_map(|(target, _)| match target {
            OverrideTarget::Key(parts) => Some(parts),
            OverrideTarget::Plan(_) => None,
        });
        let listed: Vec<_> = self.exempt.keys.iter().chain(&self.blocked.keys).chain(overridden).collect();
        for (number, part) in self.key.iter_mut().enumerate() {
            part.with_listed_fingerprints(listed.iter().filter_map(|parts| parts.get(number)).map(|value| &**value));
        }
    }

    /// Creates a rule that applies to every request, with one count for all.
    pub fn new(limit: Limit) -> Self {
        Self::of(Bound::Rate(limit))
    }

    /// Creates a rule that limits requests in flight in this process. It applies to every request, with one count for
    /// all; add a [`key`](Self::key) to limit each client.
    ///
    /// A request that gets no permit takes nothing from other rules, and a request that another rule denies holds no
    /// permit. Such a rule has no [`cost`](Self::cost) and no [`ban`](Self::ban), and is not settled by responses.
    ///
    /// ```
    /// use tollgate_rules::{KeyPart, Rule};
    ///
    /// let per_client = Rule::in_flight("per-client", 10)?.key(KeyPart::ip());
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the name is invalid, or `max` is 0 or above 2^32.
    pub fn in_flight(name: &str, max: u64) -> Result<Self, InvalidLimit> {
        check_name(name)?;
        check_in_flight(max).map_err(|error| error.of_limit(name))?;
        Ok(Self::of(Bound::InFlight { name: name.into(), max }))
    }

    fn of(bound: Bound) -> Self {
        Self {
            bound,
            matching: Match::everything(),
            key: Vec::new(),
            missing: Missing::default(),
            cost: Cost::constant(1),
            plan: None,
            overrides: Vec::new(),
            exempt: Listing::none(),
            blocked: Listing::none(),
            mode: Mode::default(),
            ban: None,
            response_settlement: ResponseSettlement::default(),
            expressions_read_token: TokenUse::Never,
            expression_errors: Vec::new(),
            by_name_only: false,
            #[cfg(feature = "file")]
            observer: None,
            problem: None,
        }
    }

    /// Sets what is known of the expressions that the rule was made with.
    #[doc(hidden)]
    pub fn with_expressions(self, errors: Vec<ErrorCount>, token_use: TokenUse) -> Self {
        Self { expression_errors: errors, expressions_read_token: token_use, ..self }
    }

    /// Lets an observer see the demand on the limit.
    #[cfg(feature = "file")]
    #[doc(hidden)]
    pub fn observed_by(self, observer: Arc<Observer>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    /// Lets the rule be checked by its name only. It matches no request.
    #[doc(hidden)]
    pub fn by_name_only(mut self) -> Self {
        self.by_name_only = true;
        self
    }

    /// Returns what the rule needs a token for. Closures are not examined: rules made in code have no tokens.
    pub(super) fn token_use(&self) -> TokenUse {
        let counts_by_claim = self.key.iter().chain(&self.plan).any(KeyPart::reads_token);
        let counting = if counts_by_claim { TokenUse::Counting } else { TokenUse::Never };
        self.expressions_read_token.max(counting)
    }

    /// Describes the numbers and the mode of a limit: `10 per 60 s (fixed_window), shadow`.
    #[doc(hidden)]
    pub fn description(&self) -> String {
        let numbers = match self.numbers() {
            _ if self.blocked.is_everything() => "blocked".to_owned(),
            None => "unlimited".to_owned(),
            Some(algorithm) => {
                let name = match algorithm {
                    Algorithm::FixedWindow(_) => "fixed_window",
                    Algorithm::SlidingWindowLog(_) => "sliding_window_log",
                    Algorithm::SlidingWindowCounter(_) => "sliding_window_counter",
                    Algorithm::TokenBucket(_) => "token_bucket",
                    Algorithm::LeakyBucket(_) => "leaky_bucket",
                    _ => "ban",
                };
                format!("{} per {} s ({name})", algorithm.quota(), algorithm.window().as_secs())
            }
        };
        match self.mode {
            Mode::Enforced => numbers,
            Mode::Shadow => format!("{numbers}, shadow"),
            Mode::Disabled => format!("{numbers}, disabled"),
        }
    }

    #[doc(hidden)]
    pub fn name(&self) -> &str {
        match &self.bound {
            Bound::Rate(limit) => limit.name(),
            Bound::InFlight { name, .. } => name,
        }
    }

    /// Returns the algorithm with its numbers, if the rule limits a rate.
    pub(super) fn numbers(&self) -> Option<&Algorithm> {
        match &self.bound {
            Bound::Rate(limit) => Some(limit.algorithm()),
            Bound::InFlight { .. } => None,
        }
    }

    /// Returns `true` if the key or the plan may depend on the reading of the path.
    pub(super) fn may_read_path(&self) -> bool {
        self.key.iter().chain(&self.plan).any(KeyPart::may_read_path)
    }

    /// Returns the error of the first invalid text.
    pub(super) fn problem(&self) -> Option<&InvalidLimit> {
        let cost = match &self.cost.0 {
            CostSource::Invalid(problem) => Some(problem),
            _ => None,
        };
        let parts = self.key.iter().chain(&self.plan).filter_map(KeyPart::problem);
        self.matching.problem().into_iter().chain(parts).chain(cost).chain(&self.problem).next()
    }

    pub(super) fn is_in_flight(&self) -> bool {
        matches!(self.bound, Bound::InFlight { .. })
    }

    /// Sets the requests that the rule applies to.
    pub fn matching(mut self, matching: Match) -> Self {
        self.matching = matching;
        self
    }

    /// Adds a part to the key.
    pub fn key(mut self, part: KeyPart) -> Self {
        self.key.push(part);
        self
    }

    /// Sets how requests are treated that lack a part of the key.
    pub fn missing(mut self, missing: Missing) -> Self {
        self.missing = missing;
        self
    }

    /// Sets the cost of a request.
    pub fn cost(mut self, cost: Cost) -> Self {
        self.cost = cost;
        self
    }

    /// Sets the source of a request's plan. Clients that can set it choose their own quota, so use a claim of a
    /// verified token, or a header that a trusted gateway sets.
    pub fn plan(mut self, source: KeyPart) -> Self {
        self.plan = Some(source);
        self
    }

    /// Sets other numbers for a plan. The algorithm must be the limit's own.
    pub fn plan_limit(mut self, plan: &str, algorithm: impl Into<Algorithm>) -> Self {
        self.overrides.push((OverrideTarget::Plan(plan.into()), Numbers::Rate(algorithm.into())));
        self
    }

    /// Sets another number for a plan, for a rule [`in_flight`](Self::in_flight).
    pub fn plan_in_flight(mut self, plan: &str, max: u64) -> Self {
        self.overrides.push((OverrideTarget::Plan(plan.into()), Numbers::InFlight(max)));
        self
    }

    /// Sets another number for one key, for a rule [`in_flight`](Self::in_flight). It takes precedence over that of a
    /// plan.
    pub fn key_in_flight(mut self, parts: &[&str], max: u64) -> Self {
        self.overrides.push((OverrideTarget::Key(owned(parts)), Numbers::InFlight(max)));
        self
    }

    /// Sets other numbers for one key, which take precedence over those of a plan. The algorithm must be the limit's
    /// own.
    pub fn key_limit(mut self, parts: &[&str], algorithm: impl Into<Algorithm>) -> Self {
        self.overrides.push((OverrideTarget::Key(owned(parts)), Numbers::Rate(algorithm.into())));
        self
    }

    /// Sets the requests that the rule exempts.
    pub fn exempt(mut self, listing: Listing) -> Self {
        self.exempt = listing;
        self
    }

    /// Sets the requests that the rule refuses regardless of the remaining quota.
    pub fn blocked(mut self, listing: Listing) -> Self {
        self.blocked = listing;
        self
    }

    /// Sets whether the rule is enforced.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Bans a key for a time once it has been denied too often. Each denial by this rule is a strike.
    pub fn ban(mut self, ban: Ban) -> Self {
        self.ban = Some(ban);
        self
    }

    /// Sets the response statuses that count. The cost is taken when the request arrives, and refunded if its response
    /// has another status, as far as the algorithm supports refunds (see [`Limiter::refund`](tollgate::Limiter::refund)).
    /// The decision service does not see responses, so there every request counts.
    ///
    /// An error of gRPC has the status 200, and counts as the status that corresponds to it: `UNAUTHENTICATED` as 401,
    /// `PERMISSION_DENIED` as 403. It is known if the service fails before it sends a message.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tollgate_rules::{KeyPart, Rule, StatusSet};
    /// use tollgate::{FixedWindow, Limit, MINUTE};
    ///
    /// let logins = Rule::new(Limit::new("logins", FixedWindow::new(5, MINUTE))?)
    ///     .key(KeyPart::ip())
    ///     .count(StatusSet::none().status(StatusCode::UNAUTHORIZED));
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn count(mut self, answers: StatusSet) -> Self {
        self.response_settlement.count = (answers != StatusSet::all()).then_some(answers);
        self.response_settlement.when = CountWhen::Arrival;
        self
    }

    /// Sets the response statuses that count, and counts a request only after its response. When the request arrives, it
    /// is denied if its cost does not fit, or else takes nothing. A response that counts is charged in full: units beyond
    /// the quota are owed.
    ///
    /// Any number of concurrent requests pass together before the first of them counts: use [`count`](Self::count)
    /// where that matters. A request whose response never comes is charged, unless it never reached its service: see
    /// [`Outcome::settle_response`](crate::Outcome::settle_response). Checks by name, reservations and the decision
    /// service, which sees no responses, count at once.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tollgate_rules::{KeyPart, Rule, StatusSet};
    /// use tollgate::{FixedWindow, Limit, MINUTE};
    ///
    /// // Eight correct logins at once all pass.
    /// let logins = Rule::new(Limit::new("logins", FixedWindow::new(5, MINUTE))?)
    ///     .key(KeyPart::ip())
    ///     .count_after(StatusSet::none().status(StatusCode::UNAUTHORIZED));
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn count_after(self, answers: StatusSet) -> Self {
        let mut rule = self.count(answers);
        rule.response_settlement.when = CountWhen::After;
        rule
    }

    /// Settles each request at the whole number in this header of its *response*. Without such a number, the cost stays
    /// unchanged.
    pub fn settle_by(mut self, header: impl AsRef<str>) -> Self {
        match header_name("settle", header.as_ref()) {
            Ok(name) => self.response_settlement.settle_by = Some(name),
            Err(problem) => self.problem = Some(problem),
        }
        self
    }
}

/// Checks the bound of a limit on requests in flight.
pub fn check_in_flight(max: u64) -> Result<(), InvalidLimit> {
    match max {
        0 => {
            let fix = "use 1 or more, or `blocked` to refuse every request";
            Err(InvalidLimit::new("in_flight", "in_flight 0 admits nothing".into(), fix))
        }
        1..=MAX_QUOTA => Ok(()),
        _ => {
            let problem = format!("in_flight {max} is above {MAX_QUOTA} (2^32)");
            Err(InvalidLimit::new("in_flight", problem, "use 4294967296 or less"))
        }
    }
}

impl std::fmt::Debug for Rule {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Rule")
            .field("limit", &self.name())
            .field("matching", &self.matching)
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

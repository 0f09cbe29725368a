//! A rule: a limit, the requests it is for, and the key and cost by which they count.

use std::cell::OnceCell;
use std::sync::Arc;

use http::HeaderName;

use super::expression_errors::ErrorCount;
use super::key_part::header_name;
use super::matching::Condition;
use super::response::{ResponseSettlement, StatusSet};
use super::{KeyPart, Match, Networks, PathReading, Request};
use crate::algorithm::{Algorithm, Ban, MAX_QUOTA};
use crate::error::InvalidLimit;
use crate::limit::{Limit, check_name};

/// A limit, the requests it is for, and how they count.
///
/// ```
/// use tollgate::rules::{KeyPart, Match, Rule};
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
    pub(super) overrides: Vec<(Whom, Numbers)>,
    pub(super) exempt: Listing,
    pub(super) blocked: Listing,
    pub(crate) mode: Mode,
    pub(super) ban: Option<Ban>,
    pub(super) response_settlement: ResponseSettlement,
    /// Of its expressions, those of a rule file.
    pub(super) expression_errors: Vec<ErrorCount>,
    /// What its expressions read a token for. Its key and plan are looked at when the set is built.
    pub(super) expressions_read_token: TokenUse,
    /// Why a name that was given cannot be one.
    problem: Option<InvalidLimit>,
}

/// What a rule reads the claims of a token for. The later ones include the earlier ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TokenUse {
    /// For nothing.
    #[default]
    Never,
    /// To count: for the key, the plan or the cost.
    Counting,
    /// To tell whether the rule is for a request, or exempts or blocks it.
    #[cfg_attr(not(feature = "file"), expect(dead_code, reason = "only expressions of a rule file match by claims"))]
    Matching,
}

/// What a rule bounds.
#[derive(Clone)]
pub(super) enum Bound {
    /// What requests take in a time: a limit of the store.
    Rate(Limit),
    /// How many requests are served at the same time.
    InFlight { name: Box<str>, most: u64 },
}

/// The numbers of an override.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Numbers {
    Rate(Algorithm),
    InFlight(u64),
}

/// Whose numbers an override changes.
#[derive(Clone, Debug)]
pub(super) enum Whom {
    Plan(Box<str>),
    Key(Box<[Box<[u8]>]>),
}

/// What happens to a request that lacks a part of the key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// It shares one key, `anonymous`, with all others that lack it.
    #[default]
    Anonymous,
    /// The rule is not for it.
    Skip,
    /// It is refused.
    Deny,
}

/// Whether a rule refuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// It does.
    #[default]
    Enforced,
    /// It decides and counts, for every request it is for, but never refuses: to see what a rule would do.
    Shadow,
    /// It is not for any request, and counts nothing. Its counts are kept for when it is enabled again.
    Disabled,
}

/// Computes a cost.
type CostOf = Arc<dyn Fn(&Request<'_>) -> Option<u64> + Send + Sync>;

/// How much a request takes.
#[derive(Clone)]
pub struct Cost(pub(super) CostSource);

#[derive(Clone)]
pub(super) enum CostSource {
    Constant(u64),
    Header(HeaderName),
    /// A header whose name cannot be one: the set of rules is not built.
    Invalid(InvalidLimit),
    Custom(CostOf),
    /// An expression of a rule file, and the cost of a request for which it fails: the whole quota if `None`.
    Expression(CostOf, Option<u64>),
}

impl Cost {
    /// Always so many units.
    #[must_use]
    pub const fn constant(units: u64) -> Self {
        Self(CostSource::Constant(units))
    }

    /// The number in a header. If it is missing, no number or 0, the request takes one unit: what a client sends
    /// must not make its request free.
    #[must_use]
    pub fn header(name: impl AsRef<str>) -> Self {
        Self(header_name("cost", name.as_ref()).map_or_else(CostSource::Invalid, CostSource::Header))
    }

    /// What a closure says; one unit where it says nothing.
    pub fn custom(cost: impl Fn(&Request<'_>) -> Option<u64> + Send + Sync + 'static) -> Self {
        Self(CostSource::Custom(Arc::new(cost)))
    }

    /// An expression, and the cost of a request for which it gives nothing: `when_error`, but never more than the
    /// quota, which would refuse the request for ever; the whole quota if there is no `when_error`.
    #[cfg_attr(not(feature = "file"), expect(dead_code, reason = "expressions come with the rule file"))]
    pub(super) fn expression(
        cost: impl Fn(&Request<'_>) -> Option<u64> + Send + Sync + 'static,
        when_error: Option<u64>,
    ) -> Self {
        Self(CostSource::Expression(Arc::new(cost), when_error))
    }

    /// Returns the units that a request takes from a limit with that quota.
    #[inline]
    pub(super) fn of(&self, request: &Request<'_>, quota_of: impl Fn() -> u64) -> u64 {
        match &self.0 {
            _ if request.facts().given_cost() == Some(0) => 0,
            CostSource::Constant(units) => Self::of_constant(*units, request),
            CostSource::Header(name) => {
                let units = request.header(name).and_then(|value| std::str::from_utf8(value).ok()?.parse().ok());
                units.unwrap_or(1).max(1)
            }
            CostSource::Invalid(_) => 1,
            CostSource::Custom(cost) => request.most_of_readings(|| cost(request).unwrap_or(1)),
            CostSource::Expression(cost, when_error) => {
                let quota = OnceCell::new();
                let failed = || {
                    let quota = *quota.get_or_init(&quota_of);
                    when_error.map_or(quota, |units| units.min(quota))
                };
                request.most_of_readings(|| cost(request).unwrap_or_else(failed))
            }
        }
    }

    /// Returns the units that a request takes from a limit whose cost is that constant.
    #[inline]
    pub(super) fn of_constant(units: u64, request: &Request<'_>) -> u64 {
        match (units, request.facts().given_cost()) {
            (_, Some(0)) => 0,
            (1, given) => given.unwrap_or(1),
            (units, _) => units,
        }
    }

    /// Returns the units, if they are a constant.
    pub(super) fn as_constant(&self) -> Option<u64> {
        match self.0 {
            CostSource::Constant(units) => Some(units),
            _ => None,
        }
    }

    /// Whether it may be other than what a request is known to take.
    pub(super) fn is_estimate(&self) -> bool {
        !matches!(self.0, CostSource::Constant(1))
    }
}

/// Whom a rule exempts or blocks: addresses, keys, or whatever a condition says.
#[derive(Clone, Default)]
#[must_use]
pub struct Listing {
    networks: Networks,
    pub(super) keys: Vec<Box<[Box<[u8]>]>>,
    conditions: Vec<Condition>,
}

impl Listing {
    /// Nobody.
    pub fn nobody() -> Self {
        Self::default()
    }

    /// Clients with an address in these networks too.
    pub fn networks(mut self, networks: Networks) -> Self {
        self.networks = networks;
        self
    }

    /// This key of the rule too, by its parts.
    pub fn key(mut self, parts: &[&str]) -> Self {
        self.keys.push(owned(parts));
        self
    }

    /// Requests for which this is true too.
    pub fn when(mut self, condition: impl Fn(&Request<'_>) -> bool + Send + Sync + 'static) -> Self {
        self.conditions.push(Arc::new(condition));
        self
    }

    pub(super) fn is_nobody(&self) -> bool {
        self.networks.is_empty() && self.keys.is_empty() && self.conditions.is_empty()
    }

    /// Whether it can list a request by anything but its key.
    pub(super) fn has_more_than_keys(&self) -> bool {
        !self.networks.is_empty() || !self.conditions.is_empty()
    }

    /// Whether the request is listed, by anything but its key, in any reading of its path.
    pub(super) fn lists(&self, request: &Request<'_>) -> bool {
        self.lists_network(request)
            || self.conditions.iter().any(|condition| request.in_any_reading(|| condition(request)))
    }

    /// The same in every reading of its path: one spelling must not exempt what another reading would not.
    pub(super) fn lists_every_reading(&self, request: &Request<'_>) -> bool {
        self.lists_network(request)
            || self.conditions.iter().any(|condition| request.in_every_reading(|| condition(request)))
    }

    fn lists_network(&self, request: &Request<'_>) -> bool {
        let within = |address| self.networks.contain(address);
        !self.networks.is_empty() && request.client().is_some_and(within)
    }
}

pub(super) fn owned(parts: &[&str]) -> Box<[Box<[u8]>]> {
    parts.iter().map(|part| part.as_bytes().into()).collect()
}

impl Rule {
    /// Brings the keys that its lists and overrides name to the form in which requests have them.
    pub(super) fn normalize_listed_keys(&mut self, path_reading: PathReading) {
        let normal = |key: &[KeyPart], parts: &mut Box<[Box<[u8]>]>| {
            for (part, value) in key.iter().zip(parts.iter_mut()) {
                *value = part.normal(value, path_reading).into();
            }
        };
        let listed = self.exempt.keys.iter_mut().chain(&mut self.blocked.keys);
        listed.for_each(|parts| normal(&self.key, parts));
        for (whom, _) in &mut self.overrides {
            if let Whom::Key(parts) = whom {
                normal(&self.key, parts);
            }
        }
    }

    /// The limit for every request, one bucket for all.
    pub fn new(limit: Limit) -> Self {
        Self::of(Bound::Rate(limit))
    }

    /// At most so many requests of a key at the same time, in this process; for every request, with one count for all.
    ///
    /// A request that finds no place spends nothing in other rules, and one that another rule denies holds no place.
    /// Such a rule takes no [`cost`](Self::cost), no [`ban`](Self::ban), and hears no answers.
    ///
    /// ```
    /// use tollgate::rules::{KeyPart, Rule};
    ///
    /// let per_client = Rule::in_flight("per-client", 10)?.key(KeyPart::ip());
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When the name cannot be one, or the number admits nothing or is above 2^32.
    pub fn in_flight(name: &str, most: u64) -> Result<Self, InvalidLimit> {
        check_name(name)?;
        check_in_flight(most).map_err(|error| error.of_limit(name))?;
        Ok(Self::of(Bound::InFlight { name: name.into(), most }))
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
            exempt: Listing::nobody(),
            blocked: Listing::nobody(),
            mode: Mode::default(),
            ban: None,
            response_settlement: ResponseSettlement::default(),
            expressions_read_token: TokenUse::Never,
            expression_errors: Vec::new(),
            problem: None,
        }
    }

    /// What the rule reads a token for. Closures of a rule that was made in code are not asked: such rules have no
    /// tokens.
    pub(super) fn token_use(&self) -> TokenUse {
        let counts_by_claim = self.key.iter().chain(&self.plan).any(KeyPart::reads_token);
        let counting = if counts_by_claim { TokenUse::Counting } else { TokenUse::Never };
        self.expressions_read_token.max(counting)
    }

    pub(super) fn name(&self) -> &str {
        match &self.bound {
            Bound::Rate(limit) => limit.name(),
            Bound::InFlight { name, .. } => name,
        }
    }

    /// Returns the first text that cannot be what it was given for.
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

    /// For these requests only.
    pub fn matching(mut self, matching: Match) -> Self {
        self.matching = matching;
        self
    }

    /// Counted by this part too. Several make one key together.
    pub fn key(mut self, part: KeyPart) -> Self {
        self.key.push(part);
        self
    }

    /// What happens to requests that lack a part of the key.
    pub fn missing(mut self, missing: Missing) -> Self {
        self.missing = missing;
        self
    }

    /// How much a request takes.
    pub fn cost(mut self, cost: Cost) -> Self {
        self.cost = cost;
        self
    }

    /// Where a request tells its plan. Whoever can set it chooses their own numbers: take it from a verified
    /// token, or from a header that a gateway before this one sets.
    pub fn plan(mut self, source: KeyPart) -> Self {
        self.plan = Some(source);
        self
    }

    /// Other numbers for a plan. It must be the limit's own algorithm.
    pub fn plan_limit(mut self, plan: &str, algorithm: impl Into<Algorithm>) -> Self {
        self.overrides.push((Whom::Plan(plan.into()), Numbers::Rate(algorithm.into())));
        self
    }

    /// Another number for a plan, of a rule [`in_flight`](Self::in_flight).
    pub fn plan_in_flight(mut self, plan: &str, most: u64) -> Self {
        self.overrides.push((Whom::Plan(plan.into()), Numbers::InFlight(most)));
        self
    }

    /// Another number for one key, by its parts, of a rule [`in_flight`](Self::in_flight); it wins over that of a plan.
    pub fn key_in_flight(mut self, parts: &[&str], most: u64) -> Self {
        self.overrides.push((Whom::Key(owned(parts)), Numbers::InFlight(most)));
        self
    }

    /// Other numbers for one key, by its parts; they win over those of a plan. It must be the limit's own
    /// algorithm.
    pub fn key_limit(mut self, parts: &[&str], algorithm: impl Into<Algorithm>) -> Self {
        self.overrides.push((Whom::Key(owned(parts)), Numbers::Rate(algorithm.into())));
        self
    }

    /// Who is not limited by this rule.
    pub fn exempt(mut self, listing: Listing) -> Self {
        self.exempt = listing;
        self
    }

    /// Who is refused by this rule, whatever is left.
    pub fn blocked(mut self, listing: Listing) -> Self {
        self.blocked = listing;
        self
    }

    /// Whether the rule refuses, or only counts.
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Refuses a key for a time once it has been denied too often: each denial by this rule is a strike.
    pub fn ban(mut self, ban: Ban) -> Self {
        self.ban = Some(ban);
        self
    }

    /// Which answers count. The cost is taken when the request comes in, and given back when its answer is none of
    /// these, as far as the algorithm gives back (see [`Limiter::refund`](crate::Limiter::refund)). Who decides without
    /// serving hears no answers: there all count.
    ///
    /// ```
    /// use http::StatusCode;
    /// use tollgate::rules::{StatusSet, KeyPart, Rule};
    /// use tollgate::{FixedWindow, Limit, MINUTE};
    ///
    /// let logins = Rule::new(Limit::new("logins", FixedWindow::new(5, MINUTE))?)
    ///     .key(KeyPart::ip())
    ///     .count(StatusSet::none().status(StatusCode::UNAUTHORIZED));
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn count(mut self, answers: StatusSet) -> Self {
        self.response_settlement.count = (answers != StatusSet::all()).then_some(answers);
        self
    }

    /// A request really costs the whole number in that header of its *answer*: what was taken for it is brought to
    /// that. Where there is no such number, the cost stays what it was.
    pub fn settle_by(mut self, header: impl AsRef<str>) -> Self {
        match header_name("settle", header.as_ref()) {
            Ok(name) => self.response_settlement.settle_by = Some(name),
            Err(problem) => self.problem = Some(problem),
        }
        self
    }
}

/// Whether so many requests may be bounded to.
pub(super) fn check_in_flight(most: u64) -> Result<(), InvalidLimit> {
    match most {
        0 => {
            let fix = "use 1 or more, or `blocked` to refuse every request";
            Err(InvalidLimit::new("in_flight", "in_flight 0 admits nothing".into(), fix))
        }
        1..=MAX_QUOTA => Ok(()),
        _ => {
            let problem = format!("in_flight {most} is above {MAX_QUOTA} (2^32)");
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

//! A limit: the requests it matches, its key, its quota, its overrides and the responses it counts.

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;
use tollgate::internal::MAX_QUOTA;
use tollgate::{InvalidLimit, Limit};
use tollgate_rules::Missing;
use tollgate_rules::internal::config::CountWhen;
use tollgate_rules::internal::demand::Measure;

use super::notation::{or_value, or_value_of};
use super::{AlgorithmName, ConsistencyName, FailurePolicy, LearnRule, Modes, Numbers, OneOrMany, QuotaRule};
use crate::forms::{
    Cidr, CostText, DurationText, Expression, HeaderName, HostGlob, KeyPart, LimitName, MethodName, PathGlob,
    PlanSource, SettleSource, StatusClass, StoreName,
};

/// A limit.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = false))]
pub struct LimitRule {
    /// Name in headers, logs and metrics. Must be unique.
    pub name: LimitName,
    /// A description for readers of the file.
    pub description: Option<String>,
    /// Whether the limit applies. A disabled limit is validated, but matches and counts nothing.
    #[serde(default = "enabled")]
    pub enabled: bool,
    /// The requests that the limit applies to. All if left out.
    #[serde(rename = "match", default)]
    pub matches: MatchRule,
    /// The key to count by, of one or several parts: `ip`, `ip/56`, `header:NAME`, `cookie:NAME`, `query:NAME`, `path`,
    /// `method`, `host`, `route`, `jwt:CLAIM`, `cert:fingerprint`, `cert:cn`, `cert:san`, `descriptor:NAME`, `const:TEXT`. All requests share one count if left out.
    pub key: Option<OneOrMany<KeyPart>>,
    /// The treatment of a request without a part of the key.
    #[serde(default)]
    pub missing: Missing,
    /// The algorithm.
    #[serde(default)]
    pub algorithm: AlgorithmName,
    /// The numbers of the algorithm.
    #[serde(flatten)]
    pub numbers: Numbers,
    /// The modes of the algorithm.
    #[serde(flatten)]
    pub modes: Modes,
    /// Most concurrent requests of a key, in each process. Such a limit has no algorithm.
    #[schemars(range(min = 1, max = MAX_QUOTA))]
    pub in_flight: Option<u64>,
    /// Units that a request costs (1): a whole number, `header:NAME`, an expression in CEL, or
    /// `{ expression, when_error }`.
    pub cost: Option<CostRule>,
    /// The responses that count: `all` (the default), `failures` (status 400 and above), `successes` (below 400), or a
    /// list of statuses and classes such as `[401, 5xx]`. The cost of other responses is refunded. With
    /// `{ statuses: [401], when: after }`, requests take nothing when they arrive, and count after their responses.
    pub count: Option<CountRule>,
    /// The response header with the actual cost, `header:NAME`. `cost` is taken first and then settled to it.
    pub settle: Option<SettleSource>,
    /// The source of the client's plan, for overrides: `header:NAME`, `jwt:CLAIM` or `descriptor:NAME`.
    pub plan: Option<PlanSource>,
    /// Other numbers for plans and single keys. A single key takes precedence over a plan.
    #[serde(default)]
    pub overrides: Vec<OverrideRule>,
    /// Requests that are not counted.
    #[serde(default)]
    pub exempt: ListRule,
    /// Requests that are always refused.
    #[serde(default)]
    pub blocked: ListRule,
    /// Counts and reports, but never denies.
    #[serde(default)]
    pub shadow: bool,
    /// The consistency if nodes share the limit.
    #[serde(default)]
    pub consistency: ConsistencyName,
    /// The name of the store of its counts, one of `stores`. The file's `store` if left out.
    pub store: Option<StoreName>,
    /// The policy while the store fails. That of the file if left out.
    pub on_store_failure: Option<FailurePolicy>,
    /// A temporary ban of keys that were denied too often.
    pub ban: Option<BanRule>,
}

fn enabled() -> bool {
    true
}

impl LimitRule {
    /// Returns the limit with its own numbers.
    ///
    /// # Errors
    ///
    /// Fails for an `in_flight` limit, which has no rate. Numbers of a parsed file are always valid.
    pub fn limit(&self) -> Result<Limit, InvalidLimit> {
        self.with(self.numbers)
    }

    /// Returns the limit with the numbers of an override, and its own numbers where the override has none.
    ///
    /// # Errors
    ///
    /// As [`limit`](Self::limit).
    pub fn overridden(&self, by: &OverrideRule) -> Result<Limit, InvalidLimit> {
        self.with(by.numbers.or(self.numbers))
    }

    /// Returns how the quota of the limit learns, if it does.
    pub fn learn(&self) -> Option<LearnRule> {
        self.quota().and_then(QuotaRule::learn)
    }

    /// Returns what the demand on the limit is measured by, if its quota learns.
    pub fn measure(&self) -> Option<Measure> {
        self.learn()?;
        Measure::of(self.limit().ok()?.algorithm())
    }

    /// Returns the name of the quota: `limit` or `capacity`.
    pub fn quota_name(&self) -> &'static str {
        self.algorithm.quota_key()
    }

    fn quota(&self) -> Option<QuotaRule> {
        if self.quota_name() == "capacity" { self.numbers.capacity } else { self.numbers.limit }
    }

    /// Returns the limit with another number for its quota.
    pub(crate) fn with_quota(&self, units: u64) -> Self {
        let mut changed = self.clone();
        let quota = Some(QuotaRule::Units(units));
        if self.quota_name() == "capacity" {
            changed.numbers.capacity = quota;
        } else {
            changed.numbers.limit = quota;
        }
        changed
    }

    fn with(&self, numbers: Numbers) -> Result<Limit, InvalidLimit> {
        if self.in_flight.is_some() {
            let problem = "an in_flight limit has no rate".into();
            return Err(InvalidLimit::new("in_flight", problem, "read `in_flight` instead"));
        }
        let limit = Limit::new(self.name.as_str(), numbers.algorithm(self.algorithm, self.modes))?;
        let limit = limit.with_consistency(self.consistency.into());
        let limit = match &self.store {
            Some(store) => limit.with_store(store.as_str()),
            None => limit,
        };
        Ok(match self.on_store_failure {
            Some(policy) => limit.with_on_store_failure(policy.into()),
            None => limit,
        })
    }
}

/// The requests that a limit applies to. All conditions must hold; of a list, one entry must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MatchRule {
    /// Paths: `*` matches anything within a segment, `**` any number of segments.
    pub path: Option<OneOrMany<PathGlob>>,
    /// Methods, in upper case. `GET` includes `HEAD`, unless another limit that names `HEAD` counts the same requests.
    #[schemars(length(min = 1))]
    pub methods: Option<Vec<MethodName>>,
    /// Hosts: `api.example.com`, or `*.example.com` for all names under it.
    #[schemars(length(min = 1))]
    pub hosts: Option<Vec<HostGlob>>,
    /// Required values of headers. `*` matches anything.
    #[schemars(extend("propertyNames" = HeaderName::SYNTAX.schema()))]
    pub headers: BTreeMap<String, String>,
    /// The domain in a request to the decision service.
    pub domain: Option<String>,
    /// A CEL expression that returns true or false.
    pub when: Option<Expression>,
}

/// The cost of a request.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum CostRule {
    /// A fixed number of units.
    Units(#[schemars(range(min = 1, max = MAX_QUOTA))] u64),
    /// A number from the request.
    Found(CostText),
    /// The result of an expression, with a cost for the case that it fails.
    Computed(ComputedCost),
}

impl CostRule {
    /// Returns the expression that computes the cost, which may fail.
    pub(crate) fn expression(&self) -> Option<&Expression> {
        match self {
            Self::Found(CostText::Expression(text)) => Some(text),
            Self::Computed(cost) => Some(&cost.expression),
            Self::Units(_) | Self::Found(CostText::Header(_)) => None,
        }
    }
}

/// A cost from an expression, with the cost of a request for which it fails.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ComputedCost {
    /// A CEL expression that returns a whole number.
    #[schemars(extend("examples" = ["request.method == \"POST\" ? 5 : 1"]))]
    pub expression: Expression,
    /// The cost of a request for which the expression fails. If left out: the largest result of the expression if it is
    /// known from its text, else the whole quota.
    #[schemars(range(min = 1, max = MAX_QUOTA))]
    pub when_error: Option<u64>,
}

/// Other numbers for a plan or a single key.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = false))]
pub struct OverrideRule {
    /// The plan.
    pub plan: Option<String>,
    /// The key, with as many parts as the limit's key.
    pub key: Option<OneOrMany<String>>,
    /// Most concurrent requests, for a limit with `in_flight`.
    #[schemars(range(min = 1, max = MAX_QUOTA))]
    pub in_flight: Option<u64>,
    /// The numbers that differ.
    #[serde(flatten)]
    pub numbers: Numbers,
}

/// A list of clients: by address, by key, or by an expression.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ListRule {
    /// Networks and addresses of clients.
    pub ips: Vec<Cidr>,
    /// Keys, each with as many parts as the limit's key.
    pub keys: Vec<OneOrMany<String>>,
    /// A CEL expression that returns true or false.
    pub when: Option<Expression>,
}

/// A temporary ban of keys that were denied too often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BanRule {
    /// Number of denials that cause the ban.
    #[schemars(range(min = 1, max = MAX_QUOTA))]
    pub after: u64,
    /// The period in which they are counted.
    pub within: DurationText,
    /// Duration of the ban.
    #[serde(rename = "for")]
    pub lasts: DurationText,
}

/// The responses that a limit counts, and when.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
#[schemars(transform = or_value_of("statuses"))]
pub struct CountRule {
    /// The responses that count.
    #[serde(default)]
    pub statuses: CountedStatuses,
    /// When a request counts (`arrival`): `arrival` takes the cost when it arrives, `after` when its response counts.
    #[serde(default)]
    pub when: CountWhen,
}

or_value!(CountRule, "statuses");

impl CountRule {
    /// Returns `true` if requests count only after their responses.
    pub fn is_after(&self) -> bool {
        self.when == CountWhen::After
    }

    /// Returns `true` if requests of every response count when they arrive, as without `count`.
    pub(crate) fn is_default(&self) -> bool {
        self.statuses == CountedStatuses::default() && self.when == CountWhen::default()
    }
}

/// The statuses of responses that count.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum CountedStatuses {
    /// All, failures or successes.
    Named(CountName),
    /// The statuses and classes of statuses: `[401, 5xx]`.
    Listed(#[schemars(length(min = 1), extend("examples" = [[401, "5xx"]]))] Vec<StatusRule>),
}

impl Default for CountedStatuses {
    fn default() -> Self {
        Self::Named(CountName::All)
    }
}

/// A named set of responses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CountName {
    /// Every response.
    All,
    /// Responses with status 400 and above.
    Failures,
    /// Responses with a status below 400.
    Successes,
}

/// A status, or a class of statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(untagged)]
pub enum StatusRule {
    /// A single status.
    Status(u16),
    /// Every status with the same first digit.
    Class(StatusClass),
}

/// Written out, so that `shape` sees a list of single values.
impl JsonSchema for StatusRule {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "StatusRule".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let status = json_schema!({ "type": "integer", "minimum": 100, "maximum": 599 });
        json_schema!({ "anyOf": [status, StatusClass::SYNTAX.schema()] })
    }
}

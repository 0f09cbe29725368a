//! A limit: what it matches, what it counts by, how much it lets through, and for whom it is different.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use super::{AlgorithmName, ConsistencyName, CountRule, FailurePolicy, Modes, Numbers, OneOrMany};
use crate::algorithm::MAX_QUOTA;
use crate::rules::file::forms::{
    Cidr, CostText, DurationText, Expression, HeaderName, HostGlob, KeyPart, LimitName, MethodName, PathGlob,
    PlanSource, SettleSource, StoreName, schema_of,
};
use crate::{InvalidLimit, Limit};

/// A limit.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = false))]
#[non_exhaustive]
pub struct LimitRule {
    /// What it is called in headers, logs and metrics. Names differ.
    pub name: LimitName,
    /// What it is for, for the people who read the file.
    pub description: Option<String>,
    /// Whether it is in force. One that is not is checked like the others, but matches and counts nothing.
    #[serde(default = "enabled")]
    pub enabled: bool,
    /// Which requests it is about; all of them if this is left out.
    #[serde(rename = "match", default)]
    pub matches: MatchRule,
    /// What it counts by: one part or several of `ip`, `ip/56`, `header:NAME`, `cookie:NAME`, `query:NAME`, `path`,
    /// `method`, `host`, `route`, `jwt:CLAIM`, `cert:fingerprint`, `cert:cn`, `cert:san`, `descriptor:NAME`, `const:TEXT`. One count for all if left out.
    pub key: Option<OneOrMany<KeyPart>>,
    /// What a request without a part of the key is.
    #[serde(default)]
    pub missing: Missing,
    /// How it counts.
    #[serde(default)]
    pub algorithm: AlgorithmName,
    /// Its numbers.
    #[serde(flatten)]
    pub numbers: Numbers,
    /// What it chooses beside them.
    #[serde(flatten)]
    pub modes: Modes,
    /// How many requests of a key are served at the same time at most, in each process. Such a limit has no algorithm.
    #[schemars(range(min = 1, max = MAX_QUOTA))]
    pub in_flight: Option<u64>,
    /// How many units a request takes (1): a whole number, `header:NAME`, an expression in CEL, or
    /// `{ expression, when_error }`.
    pub cost: Option<CostRule>,
    /// Which answers spend it: `all` (the default), `failures` (status 400 and above), `successes` (below 400), or a
    /// list of statuses and classes such as `[401, 5xx]`. What was taken is given back when the answer is none of them.
    pub count: Option<CountRule>,
    /// Where the answer tells what the request really cost, `header:NAME`: `cost` is taken first and brought to that.
    pub settle: Option<SettleSource>,
    /// Where a caller's plan is found, for overrides: `header:NAME`, `jwt:CLAIM` or `descriptor:NAME`.
    pub plan: Option<PlanSource>,
    /// Plans and single keys with numbers of their own. A single key goes before a plan.
    #[serde(default)]
    pub overrides: Vec<OverrideRule>,
    /// Whom it does not count.
    #[serde(default)]
    pub exempt: ListRule,
    /// Whom it always refuses.
    #[serde(default)]
    pub blocked: ListRule,
    /// Whether it only decides and counts, and never denies.
    #[serde(default)]
    pub shadow: bool,
    /// How it is kept when many nodes share it.
    #[serde(default)]
    pub consistency: ConsistencyName,
    /// The name of the store that keeps its counts, one of `stores`. The file's `store` keeps them if left out.
    pub store: Option<StoreName>,
    /// What it answers while the store fails, if not what the file says.
    pub on_store_failure: Option<FailurePolicy>,
    /// Refuses for a while who was denied too often.
    pub ban: Option<BanRule>,
}

fn enabled() -> bool {
    true
}

impl LimitRule {
    /// The limit, with its own numbers.
    ///
    /// # Errors
    ///
    /// When a number makes no sense, of which a file that was parsed has none, and of a limit `in_flight`, which has no
    /// rate.
    pub fn limit(&self) -> Result<Limit, InvalidLimit> {
        self.with(self.numbers)
    }

    /// The limit with the numbers of an override, and its own where that has none.
    ///
    /// # Errors
    ///
    /// When a number makes no sense. A file that was parsed has none of those.
    pub fn overridden(&self, by: &OverrideRule) -> Result<Limit, InvalidLimit> {
        self.with(by.numbers.or(self.numbers))
    }

    fn with(&self, numbers: Numbers) -> Result<Limit, InvalidLimit> {
        if self.in_flight.is_some() {
            let problem = "a limit of what is in flight has no rate".into();
            return Err(InvalidLimit::new("in_flight", problem, "look at in_flight itself"));
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

/// Which requests a limit is about. All that is written must hold; in a list, one entry must.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct MatchRule {
    /// Paths: `*` is anything within a segment, `**` any number of segments.
    pub path: Option<OneOrMany<PathGlob>>,
    /// Methods, in capitals.
    #[schemars(length(min = 1))]
    pub methods: Option<Vec<MethodName>>,
    /// Hosts: `api.example.com`, or `*.example.com` for all names under it.
    #[schemars(length(min = 1))]
    pub hosts: Option<Vec<HostGlob>>,
    /// Values of headers, in which `*` is anything.
    #[schemars(extend("propertyNames" = schema_of::<HeaderName>()))]
    pub headers: BTreeMap<String, String>,
    /// The domain that a client of the decision service names.
    pub domain: Option<String>,
    /// An expression in CEL that gives true or false.
    pub when: Option<Expression>,
}

/// What a request without a part of the key is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Missing {
    /// One of those who are all called `anonymous`.
    #[default]
    Anonymous,
    /// Not counted by this limit.
    Skip,
    /// Refused.
    Deny,
}

/// How many units a request takes.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
#[non_exhaustive]
pub enum CostRule {
    /// Always so many.
    Units(#[schemars(range(min = 1, max = MAX_QUOTA))] u64),
    /// As many as the request says.
    Found(CostText),
    /// As many as an expression gives, and so many if it fails.
    Computed(ComputedCost),
}

impl CostRule {
    /// The expression that computes it, which may fail.
    pub(in crate::rules::file) fn expression(&self) -> Option<&Expression> {
        match self {
            Self::Found(CostText::Expression(text)) => Some(text),
            Self::Computed(cost) => Some(&cost.expression),
            Self::Units(_) | Self::Found(CostText::Header(_)) => None,
        }
    }
}

/// A cost by an expression, with the cost of a request for which it fails.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ComputedCost {
    /// An expression in CEL that gives a whole number.
    #[schemars(extend("examples" = ["request.method == \"POST\" ? 5 : 1"]))]
    pub expression: Expression,
    /// How many units a request takes for which the expression fails. If left out: the most that the expression can give
    /// where its text shows that, else the whole quota.
    #[schemars(range(min = 1, max = MAX_QUOTA))]
    pub when_error: Option<u64>,
}

/// A plan or a single key with numbers of its own.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = false))]
#[non_exhaustive]
pub struct OverrideRule {
    /// The plan.
    pub plan: Option<String>,
    /// The key; as many parts as the limit's key has.
    pub key: Option<OneOrMany<String>>,
    /// How many requests at the same time, for a limit of that.
    #[schemars(range(min = 1, max = MAX_QUOTA))]
    pub in_flight: Option<u64>,
    /// The numbers that differ.
    #[serde(flatten)]
    pub numbers: Numbers,
}

/// Some callers: by address, by key, or by an expression.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct ListRule {
    /// Networks and addresses of clients.
    pub ips: Vec<Cidr>,
    /// Keys; each with as many parts as the limit's key has.
    pub keys: Vec<OneOrMany<String>>,
    /// An expression in CEL that gives true or false.
    pub when: Option<Expression>,
}

/// Refuses for a while who was denied too often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct BanRule {
    /// How many denials bring the ban.
    #[schemars(range(min = 1, max = MAX_QUOTA))]
    pub after: u64,
    /// In how short a time they have to come.
    pub within: DurationText,
    /// How long the key is refused then.
    #[serde(rename = "for")]
    pub lasts: DurationText,
}

impl MatchRule {
    /// The headers to look at and the globs that their values must match.
    pub fn headers(&self) -> impl Iterator<Item = (HeaderName, &str)> {
        self.headers.iter().map(|(name, value)| (HeaderName::new(&name.to_ascii_lowercase()), value.as_str()))
    }
}

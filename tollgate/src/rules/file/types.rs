//! The rule file as types. Their fields are its keys, and their docs are the descriptions in the JSON Schema.
//!
//! One truth: the schema is generated from these types, and the shape of a file is checked against that schema.
//! What the schema cannot say is checked in `meaning`, so a value of these types that [`RuleFile::parse`] returned
//! is good to use. Deliberately not here: matching, which works on something faster.
//!
//! [`RuleFile::parse`]: super::RuleFile::parse

mod answers;
mod gateway;
mod limit;
mod numbers;
mod one_or_many;
mod service;
mod store;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use super::forms::{ByteSize, ContentType, DurationText, StoreName, schema_of};

pub(super) use self::answers::STATUSES;
pub use self::answers::{CountName, CountRule, StatusRule};
pub use self::gateway::{
    AccessLogRule, Balance, CertificateRule, ClientCertificates, EjectRule, ForwardingName, GatewayRule, HeaderEdits,
    HealthCheckRule, HostHeader, LogFormat, PathsRule, RespondRule, RewriteRule, RouteRule, TimeoutsRule, TlsRule,
    UnderscoreHeaders, UpstreamConnectionsRule, UpstreamHeader, UpstreamRule, UpstreamTlsRule,
};
pub use self::limit::{BanRule, ComputedCost, CostRule, LimitRule, ListRule, MatchRule, Missing, OverrideRule};
pub use self::numbers::{AlgorithmName, Align, Modes, Numbers, Overflow, RefillMode};
pub use self::one_or_many::OneOrMany;
pub use self::service::{AdminRule, JwtAlgorithm, JwtRule, Listener, ServiceRule};
pub use self::store::StoreRule;

/// The most stores that limits can choose. Each has connections and background tasks.
pub(super) const MAX_STORES: usize = 15;

/// The rules of a rate limiter: limits, and where they are kept and applied.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(title = "Tollgate rule file", extend("patternProperties" = { "^x-": {} }))]
#[non_exhaustive]
pub struct RuleFile {
    /// Where counts are kept: `memory`, or a URL: `redis://h:6379`, `rediss://h:6379`,
    /// `redis+cluster://h1:7001,h2:7002`, `redis+sentinel://h1:26379,h2:26379/mymaster`, `unix:///path/to/socket`; or a map
    /// with the URL and other settings.
    #[doc(hidden)]
    pub store: StoreRule,
    /// More stores, by name, for limits that choose one with `store`. Each is the URL of a Redis, or a map with the URL and
    /// other settings.
    #[schemars(extend("propertyNames" = schema_of::<StoreName>(), "maxProperties" = MAX_STORES))]
    #[doc(hidden)]
    pub stores: BTreeMap<String, StoreRule>,
    /// How long one decision may wait for the store.
    #[doc(hidden)]
    pub store_timeout: DurationText,
    /// What is answered while the store fails; a limit may choose for itself.
    #[doc(hidden)]
    pub on_store_failure: FailurePolicy,
    /// The least number of nodes that limits are divided by while the store fails and the policy is `local`. Nodes that
    /// have seen each other on the store know their number without it.
    #[schemars(range(min = 1, max = 10_000))]
    #[doc(hidden)]
    pub expected_nodes: Option<u32>,
    /// The most memory that counts may take in this process.
    #[doc(hidden)]
    pub max_memory: Option<ByteSize>,
    /// Which families of headers tell a client about its limits.
    #[schemars(length(max = 4))]
    #[doc(hidden)]
    pub headers: Vec<HeaderFamily>,
    /// What a denied request is answered with.
    #[doc(hidden)]
    pub body: BodyRule,
    /// The gateway; off unless named.
    #[doc(hidden)]
    pub gateway: Option<GatewayRule>,
    /// The decision service; each listener is off unless named.
    #[doc(hidden)]
    pub service: ServiceRule,
    /// Health, metrics and the dashboard; off unless named.
    #[doc(hidden)]
    pub admin: Option<AdminRule>,
    /// How tokens are verified, for `jwt:CLAIM`.
    #[doc(hidden)]
    pub jwt: Option<JwtRule>,
    /// The limits. A request passes when all that match it let it pass, and then spends in all of them.
    #[schemars(length(max = 10_000))]
    #[doc(hidden)]
    pub limits: Vec<LimitRule>,
}

impl Default for RuleFile {
    fn default() -> Self {
        Self {
            store: StoreRule::default(),
            stores: BTreeMap::new(),
            store_timeout: DurationText::new(std::time::Duration::from_millis(50)),
            on_store_failure: FailurePolicy::default(),
            expected_nodes: None,
            max_memory: None,
            headers: vec![HeaderFamily::Legacy, HeaderFamily::Ietf],
            body: BodyRule::default(),
            gateway: None,
            service: ServiceRule::default(),
            admin: None,
            jwt: None,
            limits: Vec::new(),
        }
    }
}

/// What is answered while the store fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FailurePolicy {
    /// This process's own memory takes over with its share of the limits, by the number of nodes seen on the store.
    #[default]
    Local,
    /// Everything passes.
    Allow,
    /// Nothing passes.
    Deny,
}

impl From<FailurePolicy> for crate::OnStoreFailure {
    fn from(policy: FailurePolicy) -> Self {
        match policy {
            FailurePolicy::Local => Self::Local,
            FailurePolicy::Allow => Self::Allow,
            FailurePolicy::Deny => Self::Deny,
        }
    }
}

/// How a limit that many nodes share is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ConsistencyName {
    /// The store makes every decision.
    #[default]
    Exact,
    /// A node takes slices of a busy key's quota in advance.
    Leased,
}

impl From<ConsistencyName> for crate::Consistency {
    fn from(name: ConsistencyName) -> Self {
        match name {
            ConsistencyName::Exact => Self::Exact,
            ConsistencyName::Leased => Self::Leased,
        }
    }
}

/// A family of headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HeaderFamily {
    /// `X-RateLimit-Limit`, `X-RateLimit-Remaining`, `X-RateLimit-Reset`.
    Legacy,
    /// `RateLimit-Limit`, `RateLimit-Remaining`, `RateLimit-Reset`.
    Draft6,
    /// `RateLimit: limit=…, remaining=…, reset=…`.
    Draft7,
    /// `RateLimit` and `RateLimit-Policy`, as structured fields.
    Ietf,
}

/// What a denied request is answered with.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
#[non_exhaustive]
pub enum BodyRule {
    /// A body that Tollgate writes.
    Named(BodyName),
    /// A text of your own.
    Template(TemplateRule),
}

impl Default for BodyRule {
    fn default() -> Self {
        Self::Named(BodyName::Json)
    }
}

/// A body that Tollgate writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BodyName {
    /// `{"error":"rate_limit_exceeded",…}`.
    Json,
    /// `application/problem+json` of RFC 9457.
    Problem,
}

/// A text with `{{limit}}`, `{{retry_after}}` and others in it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TemplateRule {
    /// The text.
    pub template: String,
    /// What kind of text it is; values are escaped accordingly.
    pub content_type: ContentType,
}

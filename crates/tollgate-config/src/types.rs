//! The types of the rule file. Their fields are its keys, and their docs are the descriptions in the JSON Schema.
//!
//! The schema is generated from these types, and files are checked against that schema. `meaning` checks what the schema
//! cannot express, so the values that [`RuleFile::parse`] returns can be used without further checks. Deliberately not
//! here: matching, which uses compiled rules.
//!
//! [`RuleFile::parse`]: super::RuleFile::parse

mod gateway;
mod limit;
mod notation;
mod numbers;
mod route;
mod service;
mod store;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;
use tollgate_rules::PathReading;

use super::forms::{ByteSize, ContentType, DurationText, StoreName};

use self::notation::{at_least, between};
pub use self::{gateway::*, limit::*, notation::OneOrMany, numbers::*, route::*, service::*, store::*};

/// The most additional stores. Each has connections and background tasks.
const MAX_STORES: usize = 15;

/// A rule file: limits, the store that keeps their counts, and the servers that apply them.
///
/// Read one with [`load`](Self::load) or [`parse`](Self::parse). `docs/rules.md` describes its keys.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(title = "Tollgate rule file", extend("patternProperties" = { "^x-": {} }))]
#[schemars(description = "Limits, the store that keeps their counts, and the servers that apply them.")]
#[non_exhaustive]
pub struct RuleFile {
    /// The store of the counts: `memory`, or a URL: `redis://h:6379`, `rediss://h:6379`,
    /// `redis+cluster://h1:7001,h2:7002`, `redis+sentinel://h1:26379,h2:26379/mymaster`, `unix:///path/to/socket`; or a map
    /// with the URL and other settings.
    #[doc(hidden)]
    pub store: StoreRule,
    /// Additional stores by name, for limits with `store`. Each is the URL of a Redis, or a map with the URL and other
    /// settings.
    #[schemars(extend("propertyNames" = StoreName::SYNTAX.schema(), "maxProperties" = MAX_STORES))]
    #[doc(hidden)]
    pub stores: BTreeMap<String, StoreRule>,
    /// The longest time that a decision waits for the store.
    #[schemars(transform = between("1ms", "1m"))]
    #[doc(hidden)]
    pub store_timeout: DurationText,
    /// The policy while the store fails. A limit can override it.
    #[doc(hidden)]
    pub on_store_failure: FailurePolicy,
    /// The least number of nodes that limits are divided by while the store fails and the policy is `local`. Nodes that
    /// have seen each other on the store count themselves.
    #[schemars(range(min = 1, max = 10_000))]
    #[doc(hidden)]
    pub expected_nodes: Option<u32>,
    /// The most memory for counts in this process.
    #[schemars(transform = at_least("1MiB"))]
    #[doc(hidden)]
    pub max_memory: Option<ByteSize>,
    /// The header families that report limits to clients.
    #[schemars(length(max = 4))]
    #[doc(hidden)]
    pub headers: Vec<HeaderFamily>,
    /// The body of the response to a denied request.
    #[doc(hidden)]
    pub body: BodyRule,
    /// The web pages of other origins whose scripts may read refusals. None if left out.
    #[doc(hidden)]
    pub cors: Option<CorsRule>,
    /// The gateway. Off if left out.
    #[doc(hidden)]
    pub gateway: Option<GatewayRule>,
    /// The decision service. Each listener is off if left out.
    #[doc(hidden)]
    pub service: ServiceRule,
    /// Health checks, metrics and the dashboard. Off if left out.
    #[doc(hidden)]
    pub admin: Option<AdminRule>,
    /// The verification of tokens, for `jwt:CLAIM`.
    #[doc(hidden)]
    pub jwt: Option<JwtRule>,
    /// The limits. A request passes if every matching limit allows it, and is then counted by all of them.
    #[schemars(length(max = 10_000))]
    #[doc(hidden)]
    pub limits: Vec<LimitRule>,
}

impl RuleFile {
    /// Returns how limits read paths.
    pub(super) fn path_reading(&self) -> PathReading {
        let any = PathReading::default();
        self.gateway.as_ref().map_or(any, |gateway| gateway.paths.over(any))
    }
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
            cors: None,
            gateway: None,
            service: ServiceRule::default(),
            admin: None,
            jwt: None,
            limits: Vec::new(),
        }
    }
}

/// The policy while the store fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailurePolicy {
    /// Counts in the memory of this process, with its share of the limits by the number of nodes seen on the store.
    #[default]
    Local,
    /// Allows every request.
    Allow,
    /// Denies every request.
    Deny,
}

impl From<FailurePolicy> for tollgate::OnStoreFailure {
    fn from(policy: FailurePolicy) -> Self {
        match policy {
            FailurePolicy::Local => Self::Local,
            FailurePolicy::Allow => Self::Allow,
            FailurePolicy::Deny => Self::Deny,
        }
    }
}

/// The consistency of a limit that nodes share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ConsistencyName {
    /// The store decides every request.
    #[default]
    Exact,
    /// A node leases slices of a busy key's quota in advance.
    Leased,
}

impl From<ConsistencyName> for tollgate::Consistency {
    fn from(name: ConsistencyName) -> Self {
        match name {
            ConsistencyName::Exact => Self::Exact,
            ConsistencyName::Leased => Self::Leased,
        }
    }
}

/// A header family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
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

/// The body of the response to a denied request.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum BodyRule {
    /// A built-in body.
    Named(BodyName),
    /// A template.
    Template(TemplateRule),
}

impl Default for BodyRule {
    fn default() -> Self {
        Self::Named(BodyName::Json)
    }
}

/// A built-in body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BodyName {
    /// `{"error":"rate_limit_exceeded",…}`.
    Json,
    /// `application/problem+json` (RFC 9457).
    Problem,
}

/// A template with placeholders such as `{{limit}}` and `{{retry_after}}`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TemplateRule {
    /// The text of the template.
    pub template: String,
    /// The content type. Values are escaped accordingly.
    pub content_type: ContentType,
}

/// The web pages of other origins whose scripts may read refusals.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CorsRule {
    /// `any`, or a list of origins: `https://shop.example.com`.
    pub origins: OriginsRule,
}

/// The origins of web pages.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum OriginsRule {
    /// Every origin.
    Named(AnyOrigin),
    /// These origins.
    Listed(
        #[schemars(length(min = 1, max = 1_000), extend("examples" = [["https://shop.example.com"]]))]
        Vec<String>,
    ),
}

/// Every origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AnyOrigin {
    /// Every origin.
    Any,
}

//! Routes: which requests go where, and what is changed on the way.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;

use super::super::{MatchRule, OneOrMany};
use super::PathsRule;
use crate::rules::file::forms::{
    DurationText, HeaderName, HostGlob, MethodName, PathGlob, PathText, Pattern, Upstream, schema_of,
};

/// A route of the gateway. Of all that match a request, the most specific serves it: by host, then by path, then by
/// methods, then by headers, then by their order.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RouteRule {
    /// What it is called in logs, metrics and the key part `route`; its first path if left out.
    pub name: Option<String>,
    /// Which paths it serves: `*` is anything within a segment, `**` any number of segments.
    pub path: OneOrMany<PathGlob>,
    /// Which methods it serves, in capitals; all if left out.
    #[schemars(length(min = 1))]
    pub methods: Option<Vec<MethodName>>,
    /// Which hosts it serves: `api.example.com`, or `*.example.com` for all names under it; all if left out.
    #[schemars(length(min = 1))]
    pub hosts: Option<Vec<HostGlob>>,
    /// Values that headers must have; `*` is anything.
    #[serde(default)]
    #[schemars(extend("propertyNames" = schema_of::<HeaderName>()))]
    pub headers: BTreeMap<String, String>,
    /// Where requests go: one URL, or several to balance over. `http://`, `https://`, `h2c://` for HTTP/2 without TLS;
    /// `echo` answers with what it was asked.
    pub upstream: Option<OneOrMany<UpstreamRule>>,
    /// An answer that is always the same, in place of an upstream.
    pub respond: Option<RespondRule>,
    /// How its upstreams read paths; as `gateway.paths` has it where left out.
    #[serde(default)]
    pub paths: PathsRule,
    /// What is taken from the beginning of the path.
    pub strip_prefix: Option<PathText>,
    /// A change of the path by a pattern.
    pub rewrite: Option<RewriteRule>,
    /// Which host the upstream is asked for.
    #[serde(default)]
    pub host: HostHeader,
    /// Changes of the request's headers.
    #[serde(default)]
    pub request_headers: HeaderEdits,
    /// Changes of the answer's headers.
    #[serde(default)]
    pub response_headers: HeaderEdits,
    /// How long an upstream may take to begin its answer, and then between two parts of it.
    #[serde(default = "answer_timeout")]
    pub timeout: DurationText,
    /// How long a connection to an upstream may take.
    #[serde(default = "connect_timeout")]
    pub connect_timeout: DurationText,
    /// How often a request that may be repeated is tried again when an upstream fails.
    #[serde(default = "retries")]
    #[schemars(range(max = 10))]
    pub retries: u8,
    /// How the upstream is chosen.
    #[serde(default)]
    pub balance: Balance,
    /// Asks upstreams now and then whether they are well.
    pub health_check: Option<HealthCheckRule>,
    /// Leaves an upstream alone that failed several times in a row.
    #[serde(default)]
    pub eject: EjectRule,
    /// How long connections to upstreams are kept for further requests.
    #[serde(default)]
    pub upstream_connections: UpstreamConnectionsRule,
    /// TLS to upstreams.
    #[serde(default)]
    pub upstream_tls: UpstreamTlsRule,
}

fn answer_timeout() -> DurationText {
    DurationText::new(std::time::Duration::from_secs(30))
}

fn connect_timeout() -> DurationText {
    DurationText::new(std::time::Duration::from_secs(5))
}

fn retries() -> u8 {
    1
}

impl RouteRule {
    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_deref().or_else(|| self.path.first().map(PathGlob::as_str)).unwrap_or_default()
    }

    /// What it matches, as a limit would write it.
    pub(in crate::rules::file) fn matches(&self) -> MatchRule {
        MatchRule {
            path: Some(self.path.clone()),
            methods: self.methods.clone(),
            hosts: self.hosts.clone(),
            headers: self.headers.clone(),
            ..MatchRule::default()
        }
    }
}

/// An upstream: its URL, alone or with a weight.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(from = "UpstreamText")]
#[schemars(with = "UpstreamText", inline)]
#[non_exhaustive]
pub struct UpstreamRule {
    /// Where it is.
    pub url: Upstream,
    /// How much of the requests it gets, beside the others.
    pub weight: u32,
}

/// How an upstream is written.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(inline)]
enum UpstreamText {
    /// The URL alone.
    Url(Upstream),
    /// The URL with a weight.
    Settings(UpstreamSettings),
}

/// An upstream with a weight.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct UpstreamSettings {
    /// Where it is.
    url: Upstream,
    /// How much of the requests it gets, beside the others (1).
    #[serde(default = "weight")]
    #[schemars(range(min = 1, max = 1000))]
    weight: u32,
}

fn weight() -> u32 {
    1
}

impl From<UpstreamText> for UpstreamRule {
    fn from(text: UpstreamText) -> Self {
        match text {
            UpstreamText::Url(url) => Self { url, weight: weight() },
            UpstreamText::Settings(UpstreamSettings { url, weight }) => Self { url, weight },
        }
    }
}

/// An answer that is always the same.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RespondRule {
    /// Its status.
    #[serde(default = "ok")]
    #[schemars(range(min = 200, max = 599))]
    pub status: u16,
    /// Its headers.
    #[serde(default)]
    #[schemars(extend("propertyNames" = schema_of::<HeaderName>()))]
    pub headers: BTreeMap<String, String>,
    /// Its body.
    #[serde(default)]
    pub body: String,
}

fn ok() -> u16 {
    200
}

/// A change of the path.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RewriteRule {
    /// A regular expression that finds a part of the path.
    pub pattern: Pattern,
    /// What takes its place; `$1` is what the first group found.
    pub to: String,
}

/// Which host an upstream is asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HostHeader {
    /// The one that the client asked for.
    #[default]
    Client,
    /// The one in the upstream's URL.
    Upstream,
}

/// Changes of headers: first what is removed, then what is set, then what is added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct HeaderEdits {
    /// Headers that have this value in place of any other.
    #[schemars(extend("propertyNames" = schema_of::<HeaderName>()))]
    pub set: BTreeMap<String, String>,
    /// Headers that have this value beside others.
    #[schemars(extend("propertyNames" = schema_of::<HeaderName>()))]
    pub add: BTreeMap<String, String>,
    /// Headers that are removed.
    pub remove: Vec<HeaderName>,
}

/// How the upstream is chosen among those that are well.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Balance {
    /// The one with the fewest requests under way, by weight.
    #[default]
    LeastRequests,
    /// One after the other, by weight.
    RoundRobin,
}

/// Asks upstreams now and then whether they are well: a GET that is answered with 2xx or 3xx.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct HealthCheckRule {
    /// What is asked for: the whole path, before which the path of the upstream's URL is not put.
    pub path: PathText,
    /// How often.
    #[serde(default = "check_every")]
    pub every: DurationText,
    /// How long the answer may take.
    #[serde(default = "check_timeout")]
    pub timeout: DurationText,
    /// After how many bad answers in a row an upstream is left alone.
    #[serde(default = "unhealthy_after")]
    #[schemars(range(min = 1, max = 100))]
    pub unhealthy_after: u32,
    /// After how many good answers in a row it is used again.
    #[serde(default = "healthy_after")]
    #[schemars(range(min = 1, max = 100))]
    pub healthy_after: u32,
}

fn check_every() -> DurationText {
    DurationText::new(std::time::Duration::from_secs(5))
}

fn check_timeout() -> DurationText {
    DurationText::new(std::time::Duration::from_secs(2))
}

fn unhealthy_after() -> u32 {
    3
}

fn healthy_after() -> u32 {
    2
}

/// Leaves an upstream alone that failed several times in a row. If all are left alone, all are used.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct EjectRule {
    /// Number of failures in a row: no connection, no answer in time, an answer that breaks off or is not HTTP, or one of
    /// `statuses`.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub after: u32,
    /// For how long.
    #[serde(rename = "for")]
    pub lasts: DurationText,
    /// Statuses of answers that count as failures, from 500 to 599. None by default: a client that can provoke such answers
    /// could have an upstream ejected.
    #[schemars(length(max = 100), inner(range(min = 500, max = 599)))]
    pub statuses: Vec<u16>,
}

impl Default for EjectRule {
    fn default() -> Self {
        Self { after: 5, lasts: DurationText::new(std::time::Duration::from_secs(10)), statuses: Vec::new() }
    }
}

/// How long connections to upstreams are kept for further requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct UpstreamConnectionsRule {
    /// Longest time that a connection of HTTP/1.1 waits for its next request. Must be shorter than the time after which the
    /// upstream closes idle connections; a shorter time in the upstream's `Keep-Alive: timeout=` takes precedence.
    pub idle: DurationText,
    /// Age at which a connection takes no further requests.
    pub max_age: DurationText,
    /// Number of requests after which a connection takes no further ones.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub max_requests: u32,
}

impl Default for UpstreamConnectionsRule {
    fn default() -> Self {
        Self {
            // Node.js and uvicorn close idle connections after 5 s. A request that crosses the close is lost.
            idle: DurationText::new(std::time::Duration::from_secs(4)),
            // Bounds how long a change in DNS or in a load balancer behind the address goes unnoticed.
            max_age: DurationText::new(std::time::Duration::from_secs(300)),
            // Bounds what a leak per connection in the upstream can cost.
            max_requests: 10_000,
        }
    }
}

/// TLS to upstreams.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct UpstreamTlsRule {
    /// A file in PEM with the authorities that are believed, relative to the rule file; the public ones if left out.
    pub ca: Option<String>,
    /// The name that the upstream's certificate must be for; the host of its URL if left out.
    pub server_name: Option<String>,
}

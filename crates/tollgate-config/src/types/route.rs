//! Routes: the requests they serve, their upstreams, and the changes to requests and responses.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;
use tollgate_rules::{EncodedSlash, PathCase, PathParameters, PathReading};

use super::notation::{number, or_value, or_value_of, seconds, wait};
use super::{MatchRule, OneOrMany};
use crate::forms::{
    DurationText, HeaderName, HeaderSource, HostGlob, MethodName, PathGlob, PathText, Pattern, Upstream,
};

/// Weights above this add no useful precision.
pub(crate) const MAX_WEIGHT: u32 = 1000;

/// A route of the gateway. The most specific matching route serves a request: by host, then by path, then by methods,
/// then by headers, then by order.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RouteRule {
    /// Name in logs, metrics and the key part `route`. The first path if left out.
    pub name: Option<String>,
    /// Paths: `*` matches anything within a segment, `**` any number of segments.
    pub path: OneOrMany<PathGlob>,
    /// Methods, in upper case. All if left out. `GET` includes `HEAD`, unless another route that names `HEAD` matches the same
    /// requests.
    #[schemars(length(min = 1))]
    pub methods: Option<Vec<MethodName>>,
    /// Hosts: `api.example.com`, or `*.example.com` for all names under it. All if left out.
    #[schemars(length(min = 1))]
    pub hosts: Option<Vec<HostGlob>>,
    /// Required values of headers. `*` matches anything.
    #[serde(default)]
    #[schemars(extend("propertyNames" = HeaderName::SYNTAX.schema()))]
    pub headers: BTreeMap<String, String>,
    /// The upstream: one URL, or several to balance over. `http://`, `https://`, or `h2c://` for HTTP/2 without TLS.
    /// `echo` returns the request.
    pub upstream: Option<OneOrMany<UpstreamRule>>,
    /// A fixed response, instead of an upstream.
    pub respond: Option<RespondRule>,
    /// How its upstreams interpret paths. As in `gateway.paths` if left out.
    #[serde(default)]
    pub paths: PathsRule,
    /// The prefix to remove from the path.
    pub strip_prefix: Option<PathText>,
    /// A replacement in the path by a pattern.
    pub rewrite: Option<RewriteRule>,
    /// The Host header of requests to the upstream.
    #[serde(default)]
    pub host: HostHeader,
    /// What happens to `Location` in responses.
    #[serde(default)]
    pub redirects: Redirects,
    /// Changes to the request headers.
    #[serde(default)]
    pub request_headers: RequestHeaderEdits,
    /// Changes to the response headers.
    #[serde(default)]
    pub response_headers: HeaderEdits,
    /// Timeout for the start of a response, and between two parts of it.
    #[serde(default = "seconds::<30>")]
    #[schemars(transform = wait())]
    pub timeout: DurationText,
    /// Timeout for connecting to an upstream.
    #[serde(default = "seconds::<5>")]
    #[schemars(transform = wait())]
    pub connect_timeout: DurationText,
    /// Number of retries of an idempotent request after an upstream failed.
    #[serde(default = "number::<u8, 1>")]
    #[schemars(range(max = 10))]
    pub retries: u8,
    /// The balancing policy.
    #[serde(default)]
    pub balance: Balance,
    /// Active health checks of the upstreams.
    pub health_check: Option<HealthCheckRule>,
    /// Ejection of an upstream after consecutive failures.
    #[serde(default)]
    pub eject: EjectRule,
    /// Reuse of connections to upstreams.
    #[serde(default)]
    pub upstream_connections: UpstreamConnectionsRule,
    /// TLS to upstreams.
    #[serde(default)]
    pub upstream_tls: UpstreamTlsRule,
}

impl RouteRule {
    /// Returns the name, or the first path of a route without one.
    pub fn name(&self) -> &str {
        self.name.as_deref().or_else(|| self.path.first().map(PathGlob::as_str)).unwrap_or_default()
    }

    /// Returns its conditions as the `match` of a limit.
    pub(crate) fn matches(&self) -> MatchRule {
        MatchRule {
            path: Some(self.path.clone()),
            methods: self.methods.clone(),
            hosts: self.hosts.clone(),
            headers: self.headers.clone(),
            ..MatchRule::default()
        }
    }
}

/// How upstreams interpret paths. `docs/normal-form.md` lists the settings for common frameworks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PathsRule {
    /// The interpretation of `%2F` and `%5C`: `any` (a limit applies if any interpretation matches), `refuse`, `decode` or
    /// `keep`.
    pub encoded_slash: Option<EncodedSlash>,
    /// The interpretation of `;` in a path: `any` (a limit applies if any interpretation matches), `refuse`, `strip` or
    /// `keep`.
    pub parameters: Option<PathParameters>,
    /// Whether `/API` and `/api` differ: `sensitive` or `insensitive`.
    pub case: Option<PathCase>,
}

impl PathsRule {
    /// Returns `reading` with these settings applied.
    pub fn over(&self, reading: PathReading) -> PathReading {
        PathReading {
            encoded_slash: self.encoded_slash.unwrap_or(reading.encoded_slash),
            parameters: self.parameters.unwrap_or(reading.parameters),
            case: self.case.unwrap_or(reading.case),
        }
    }
}

/// An upstream: its URL, with or without a weight.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(remote = "Self", deny_unknown_fields)]
#[schemars(transform = or_value_of("url"))]
pub struct UpstreamRule {
    /// The URL.
    pub url: Upstream,
    /// Share of the requests, relative to the other upstreams (1).
    #[serde(default = "number::<u32, 1>")]
    #[schemars(range(min = 1, max = MAX_WEIGHT))]
    pub weight: u32,
}

or_value!(UpstreamRule, "url");

/// A fixed response.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RespondRule {
    /// The status.
    #[serde(default = "number::<u16, 200>")]
    #[schemars(range(min = 200, max = 599))]
    pub status: u16,
    /// The headers.
    #[serde(default)]
    #[schemars(extend("propertyNames" = HeaderName::SYNTAX.schema()))]
    pub headers: BTreeMap<String, String>,
    /// The body.
    #[serde(default)]
    pub body: String,
}

/// A replacement in the path.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RewriteRule {
    /// A regular expression that matches a part of the path.
    pub pattern: Pattern,
    /// The replacement. `$1` is the match of the first group.
    pub to: String,
}

/// The Host header of requests to an upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HostHeader {
    /// The host that the client sent.
    #[default]
    Client,
    /// The host of the upstream's URL.
    Upstream,
}

/// What happens to `Location` in responses of upstreams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Redirects {
    /// The upstream's own address is left out, and `strip_prefix` and the path of the upstream's URL are undone.
    #[default]
    Rewrite,
    /// It stays.
    Keep,
}

/// Changes to request headers: `remove` first, then `set`, then `add`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RequestHeaderEdits {
    /// Headers to set, which replaces other values. The value is a text, or `{ from: SOURCE }` for a fact about the request.
    #[schemars(extend("propertyNames" = HeaderName::SYNTAX.schema()))]
    pub set: BTreeMap<String, HeaderValueRule>,
    /// Headers to add, which keeps other values.
    #[schemars(extend("propertyNames" = HeaderName::SYNTAX.schema()))]
    pub add: BTreeMap<String, String>,
    /// Headers to remove.
    pub remove: Vec<HeaderName>,
}

/// The value of a request header.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum HeaderValueRule {
    /// The same for all requests.
    Constant(String),
    /// A fact about the request.
    From(HeaderFrom),
}

/// A fact about the request as the value of a header.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HeaderFrom {
    /// The fact: `ip`, `ip/BITS`, `route`, `limit`, `jwt:CLAIM`, `cert:fingerprint`, `cert:cn` or `cert:san`. If the request
    /// lacks it, the upstream gets no such header.
    pub from: HeaderSource,
}

/// Changes to headers: `remove` first, then `set`, then `add`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct HeaderEdits {
    /// Headers to set, which replaces other values.
    #[schemars(extend("propertyNames" = HeaderName::SYNTAX.schema()))]
    pub set: BTreeMap<String, String>,
    /// Headers to add, which keeps other values.
    #[schemars(extend("propertyNames" = HeaderName::SYNTAX.schema()))]
    pub add: BTreeMap<String, String>,
    /// Headers to remove.
    pub remove: Vec<HeaderName>,
}

/// How an upstream is chosen among the healthy ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Balance {
    /// The one with the fewest requests in progress, by weight.
    #[default]
    LeastRequests,
    /// One after the other, by weight.
    RoundRobin,
}

/// Active health checks: a GET that must return 2xx or 3xx.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HealthCheckRule {
    /// The whole path of the request. The path of the upstream's URL is not prepended.
    pub path: PathText,
    /// The interval.
    #[serde(default = "seconds::<5>")]
    #[schemars(transform = wait())]
    pub every: DurationText,
    /// Timeout for the response.
    #[serde(default = "seconds::<2>")]
    #[schemars(transform = wait())]
    pub timeout: DurationText,
    /// Consecutive failures after which an upstream is unhealthy.
    #[serde(default = "number::<u32, 3>")]
    #[schemars(range(min = 1, max = 100))]
    pub unhealthy_after: u32,
    /// Consecutive successes after which it is healthy again.
    #[serde(default = "number::<u32, 2>")]
    #[schemars(range(min = 1, max = 100))]
    pub healthy_after: u32,
}

/// Ejection of an upstream after consecutive failures. If all upstreams are ejected, all are used.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EjectRule {
    /// Consecutive failures: no connection, no response in time, a response that breaks off or is not HTTP, or one of
    /// `statuses`.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub after: u32,
    /// Duration of the ejection.
    #[serde(rename = "for")]
    #[schemars(transform = wait())]
    pub lasts: DurationText,
    /// Statuses of responses that count as failures, from 500 to 599. None by default: a client that can provoke such
    /// responses could have an upstream ejected.
    #[schemars(length(max = 100), inner(range(min = 500, max = 599)))]
    pub statuses: Vec<u16>,
}

impl Default for EjectRule {
    fn default() -> Self {
        Self { after: 5, lasts: seconds::<10>(), statuses: Vec::new() }
    }
}

/// Reuse of connections to upstreams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpstreamConnectionsRule {
    /// Longest idle time of an HTTP/1.1 connection. Must be shorter than the time after which the
    /// upstream closes idle connections; a shorter time in the upstream's `Keep-Alive: timeout=` takes precedence.
    #[schemars(transform = wait())]
    pub idle: DurationText,
    /// Age at which a connection takes no further requests.
    #[schemars(transform = wait())]
    pub max_age: DurationText,
    /// Number of requests after which a connection takes no further ones.
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub max_requests: u32,
}

impl Default for UpstreamConnectionsRule {
    fn default() -> Self {
        Self {
            // Node.js and uvicorn close idle connections after 5 s. A request that crosses the close is lost.
            idle: seconds::<4>(),
            // Bounds how long a change in DNS or in a load balancer behind the address goes unnoticed.
            max_age: seconds::<300>(),
            // Bounds what a leak per connection in the upstream can cost.
            max_requests: 10_000,
        }
    }
}

/// TLS to upstreams.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpstreamTlsRule {
    /// A PEM file with the trusted authorities, relative to the rule file. The public ones if left out.
    pub ca: Option<String>,
    /// A PEM file with the client certificate, for upstreams that require one, relative to the rule file. Needs
    /// `client_key`.
    pub client_cert: Option<String>,
    /// A PEM file with the private key of `client_cert`, relative to the rule file.
    pub client_key: Option<String>,
    /// The name that the upstream's certificate must be valid for. The host of its URL if left out.
    pub server_name: Option<String>,
}

//! The explanation as JSON.

use std::collections::BTreeMap;
use std::net::IpAddr;

use schemars::JsonSchema;
use serde::Serialize;
use tollgate::Decision;
use tollgate_config::internal::RouteRule;
use tollgate_http::TokenError;
use tollgate_rules::TokenStatus;
use tollgate_rules::{RuleExplained, RuleState};
use tollgate_telemetry::seconds::Seconds;

use super::overall::reason;
use super::{Counts, Explained, FactHeader, FactValue, Routed, path_reading};
use crate::gateway::upstream_urls;
use crate::learning::{Learned, Learners};

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Explanation")]
pub(crate) struct Json<'a> {
    allowed: bool,
    /// The limit that decides the answer.
    limit: Option<&'a str>,
    reason: Option<&'static str>,
    /// The status of a refusal.
    status: Option<u16>,
    /// Whole seconds, as in the header.
    retry_after: Option<u64>,
    /// The source of the counts: `fresh`, `live` or `unknown`.
    counts: &'static str,
    /// The address of the client. `null` if none was given: limits by `ip` then have no address to count by.
    ip: Option<IpAddr>,
    /// The route. `null` if no route serves the request; left out if the file has no gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    route: Option<Option<RouteJson<'a>>>,
    /// The result of checking the token; left out if no limit reads one.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<TokenJson>,
    limits: Vec<LimitJson<'a>>,
}

#[derive(Serialize, JsonSchema)]
struct TokenJson {
    valid: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<&'static str>,
}

impl TokenJson {
    fn of(status: TokenStatus) -> Option<Self> {
        let error = match status {
            TokenStatus::Valid => None,
            TokenStatus::Invalid(error) => Some(error),
            _ => return None,
        };
        let (reason, message) = (error.map(TokenError::code), error.map(TokenError::description));
        Some(Self { valid: error.is_none(), reason, message })
    }
}

#[derive(Serialize, JsonSchema)]
struct RouteJson<'a> {
    name: &'a str,
    upstreams: Vec<&'a str>,
    /// The URL that would be requested from each upstream.
    upstream_urls: Vec<String>,
    /// The status of a route that responds itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    respond: Option<u16>,
    /// The headers that the upstream gets with facts about the request. `null` if the request lacks the fact.
    /// Without those whose fact is not known here: the address if it is not given, and the client's certificate.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    fact_headers: BTreeMap<&'a str, Option<&'a str>>,
}

#[derive(Default, Serialize, JsonSchema)]
#[schemars(rename = "ExplainedLimit")]
struct LimitJson<'a> {
    limit: &'a str,
    shadow: bool,
    /// `disabled`, `not_matched`, `key_missing`, `exempt`, `refused`, `counted` or `in_flight`.
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counted: Option<CountedJson<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    in_flight: Option<InFlightJson<'a>>,
    /// What a limit that learns has learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    learned: Option<Learned>,
    /// The expressions that failed for the request.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    expression_errors: Vec<ExpressionErrorJson<'a>>,
}

#[derive(Serialize, JsonSchema)]
struct ExpressionErrorJson<'a> {
    field: &'static str,
    error: &'a str,
}

#[derive(Serialize, JsonSchema)]
struct InFlightJson<'a> {
    key: &'a [String],
    allowed: bool,
    quota: u64,
    in_flight: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    banned_for: Option<Seconds>,
}

#[derive(Serialize, JsonSchema)]
struct CountedJson<'a> {
    key: &'a [String],
    cost: u64,
    /// `null` if the store does not answer, like all fields below.
    allowed: Option<bool>,
    quota: Option<u64>,
    remaining: Option<u64>,
    reset_after: Option<Seconds>,
    retry_after: Option<Seconds>,
    banned_for: Option<Seconds>,
}

impl<'a> Json<'a> {
    pub(crate) fn of(explained: &'a Explained<'_>) -> Self {
        let Explained { explanation, overall, counts, .. } = explained;
        Self {
            allowed: overall.allowed,
            limit: overall.limit.as_deref(),
            reason: overall.refusal.as_ref().map(reason),
            status: overall.status.map(|status| status.as_u16()),
            retry_after: overall.retry_after,
            counts: match counts {
                Counts::Fresh => "fresh",
                Counts::Live => "live",
                Counts::Unknown => "unknown",
            },
            ip: explained.request.ip,
            route: match explained.routed {
                Routed::NoGateway => None,
                Routed::NoRoute => Some(None),
                Routed::By(rule) => Some(Some(route(rule, explained))),
            },
            token: TokenJson::of(explanation.token),
            limits: explanation.rules.iter().map(|rule| limit(rule, explained.learners)).collect(),
        }
    }

    /// Returns the text for people.
    pub(crate) fn pretty(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

fn route<'a>(rule: &'a RouteRule, explained: &'a Explained<'_>) -> RouteJson<'a> {
    let upstreams = rule.upstream.iter().flatten().map(|upstream| upstream.url.as_str()).collect();
    let reading = path_reading(explained.file, Routed::NoRoute);
    let upstream_urls = upstream_urls(rule, reading, &explained.request.path);
    let respond = rule.respond.as_ref().map(|respond| respond.status);
    let fact_header = |header: &'a FactHeader<'_>| match &header.value {
        FactValue::Known(value) => Some((header.name, Some(&**value))),
        FactValue::Missing => Some((header.name, None)),
        FactValue::Unknown => None,
    };
    let fact_headers = explained.fact_headers.iter().filter_map(fact_header).collect();
    RouteJson { name: rule.name(), upstreams, upstream_urls, respond, fact_headers }
}

fn limit<'a>(rule: &'a RuleExplained, learners: &Learners) -> LimitJson<'a> {
    let failed = rule.failed_expressions.iter();
    let expression_errors =
        failed.map(|failed| ExpressionErrorJson { field: failed.field.as_str(), error: &failed.error }).collect();
    let learned = learners.describe(&rule.name);
    let limit =
        LimitJson { limit: &rule.name, shadow: rule.shadow, expression_errors, learned, ..LimitJson::default() };
    match &rule.state {
        RuleState::NotMatched(why) => LimitJson { state: "not_matched", why: Some(why), ..limit },
        RuleState::Disabled => LimitJson { state: "disabled", ..limit },
        RuleState::KeyMissing(part) => LimitJson { state: "key_missing", why: Some(part), ..limit },
        RuleState::Exempt => LimitJson { state: "exempt", ..limit },
        RuleState::Refused(refusal) => LimitJson { state: "refused", reason: Some(reason(refusal)), ..limit },
        RuleState::InFlight { key, in_flight, decision, banned_for } => {
            let (allowed, quota) = (decision.is_allowed() && banned_for.is_none(), decision.quota());
            let in_flight =
                InFlightJson { key, allowed, quota, in_flight: *in_flight, banned_for: banned_for.map(Seconds) };
            LimitJson { state: "in_flight", in_flight: Some(in_flight), ..limit }
        }
        RuleState::Counted { key, cost, decision, banned_for } => {
            let counted = CountedJson {
                key,
                cost: *cost,
                allowed: decision.as_ref().map(|decision| decision.is_allowed() && banned_for.is_none()),
                quota: decision.as_ref().map(Decision::quota),
                remaining: decision.as_ref().map(Decision::remaining),
                reset_after: decision.as_ref().map(|decision| Seconds(decision.reset_after())),
                retry_after: decision.as_ref().and_then(Decision::retry_after).map(Seconds),
                banned_for: banned_for.map(Seconds),
            };
            LimitJson { state: "counted", counted: Some(counted), ..limit }
        }
        // Variants that the library may add.
        _ => limit,
    }
}

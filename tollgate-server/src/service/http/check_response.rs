//! The response to a check, as JSON.

use schemars::JsonSchema;
use serde::Serialize;
use tollgate::http::{Refusal, TokenError};
use tollgate::{Decision, Outcome, Source};

use crate::seconds::Seconds;

/// The response to one check. Times are in seconds.
#[derive(JsonSchema, Serialize)]
pub(crate) struct CheckResponse<'a> {
    /// Whether the request may pass.
    allowed: bool,
    /// The limit that refused, or else the one with the smallest share left.
    limit: Option<&'a str>,
    /// The whole quota of that limit.
    quota: Option<u64>,
    /// The largest cost that would pass now.
    remaining: Option<u64>,
    /// Seconds until the full quota is available again.
    #[schemars(with = "Option<f64>")]
    reset_after: Option<Seconds>,
    /// Seconds until the same check passes, if waiting helps.
    #[schemars(with = "Option<f64>")]
    retry_after: Option<Seconds>,
    /// Seconds for which an admitted request must wait in a queue.
    #[schemars(with = "f64")]
    delay: Seconds,
    /// The reason of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    /// The reason why the token failed, if a rule reads one.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<&'static str>,
    /// The place of the decision: the store, a cache, a lease, local memory or the failure policy.
    source: Option<&'static str>,
    /// The decisions of shadow limits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shadow: Vec<ShadowDecision<'a>>,
}

/// The decision of a shadow limit.
#[derive(JsonSchema, Serialize)]
struct ShadowDecision<'a> {
    limit: &'a str,
    allowed: bool,
}

impl<'a> CheckResponse<'a> {
    pub(crate) fn new(outcome: &'a Outcome) -> Self {
        let decision = outcome.decision();
        let watched = outcome
            .shadow_decisions()
            .map(|(limit, decision)| ShadowDecision { limit, allowed: decision.is_allowed() });
        Self {
            allowed: outcome.is_allowed(),
            limit: outcome.limit(),
            quota: decision.map(Decision::quota),
            remaining: decision.map(Decision::remaining),
            reset_after: decision.map(|decision| Seconds(decision.reset_after())),
            retry_after: decision.and_then(Decision::retry_after).map(Seconds),
            delay: Seconds(outcome.delay()),
            reason: outcome.refusal().map(reason),
            token: outcome.token().error().map(TokenError::code),
            source: decision.map(|decision| source(decision.source())),
            shadow: watched.collect(),
        }
    }
}

/// Returns the `reason` of a refusal.
pub(crate) fn reason(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::Limited => "limited",
        Refusal::Unreadable(request) => request.reason,
        // The other reasons are the same in all responses.
        other => other.code(),
    }
}

fn source(source: Source) -> &'static str {
    match source {
        Source::DenialCache => "denial_cache",
        Source::Lease => "lease",
        Source::Local => "local",
        Source::Policy => "policy",
        _ => "store",
    }
}

//! The response to a check, as JSON.

use schemars::JsonSchema;
use serde::Serialize;
use tollgate::{Decision, Source};
use tollgate_http::{Refusal, TokenError};
use tollgate_rules::Outcome;
use tollgate_telemetry::decisions::source_name;
use tollgate_telemetry::seconds::Seconds;
use tollgate_telemetry::unknown::Unknown;

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
    /// A problem with the question: no limit applies to the request, or its plan is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
    /// The reason why the token failed, if a rule reads one.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<&'static str>,
    /// The place of the decision: the store, a cache, a lease, local memory or the failure policy.
    source: Option<&'static str>,
    /// Of a described request: the decision of every limit that counted it, in the order of the rule file.
    #[serde(skip_serializing_if = "Option::is_none")]
    limits: Option<Vec<LimitDecision<'a>>>,
    /// The decisions of shadow limits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shadow: Vec<ShadowDecision<'a>>,
}

/// The decision of one of several limits.
#[derive(JsonSchema, Serialize)]
struct LimitDecision<'a> {
    limit: &'a str,
    /// Whether this limit would allow the request by itself.
    allowed: bool,
    /// The whole quota.
    quota: u64,
    /// The largest cost that would pass now.
    remaining: Option<u64>,
    /// Seconds until the full quota is available again.
    #[schemars(with = "Option<f64>")]
    reset_after: Option<Seconds>,
    /// Seconds until the same check passes this limit, if waiting helps.
    #[schemars(with = "Option<f64>")]
    retry_after: Option<Seconds>,
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
        let counted = decision.filter(|decision| is_counted(decision));
        let watched = outcome
            .shadow_decisions()
            .map(|(limit, decision)| ShadowDecision { limit, allowed: decision.is_allowed() });
        Self {
            allowed: outcome.is_allowed(),
            limit: outcome.limit(),
            quota: decision.map(Decision::quota),
            remaining: counted.map(Decision::remaining),
            reset_after: counted.map(|decision| Seconds(decision.reset_after())),
            retry_after: decision.and_then(Decision::retry_after).map(Seconds),
            delay: Seconds(outcome.delay()),
            reason: outcome.refusal().map(reason),
            warning: None,
            token: outcome.token().error().map(TokenError::code),
            source: decision.map(|decision| source_name(decision.source())),
            limits: None,
            shadow: watched.collect(),
        }
    }

    /// Creates the response to a check that any number of limits may have counted.
    pub(crate) fn with_limits(outcome: &'a Outcome) -> Self {
        let limits = outcome.each_limit().into_iter().map(|(limit, decision)| {
            let counted = Some(decision).filter(is_counted);
            LimitDecision {
                limit,
                allowed: decision.is_allowed(),
                quota: decision.quota(),
                remaining: counted.as_ref().map(Decision::remaining),
                reset_after: counted.as_ref().map(|decision| Seconds(decision.reset_after())),
                retry_after: decision.retry_after().map(Seconds),
            }
        });
        Self { limits: Some(limits.collect()), ..Self::new(outcome) }
    }

    /// Adds the problem with a question that was answered without the limit that the client probably means.
    pub(crate) fn warn(self, unknown: &Unknown) -> Self {
        Self { warning: Some(unknown.to_string()), ..self }
    }

    /// Denies a question that was answered without the limit that the client probably means.
    pub(crate) fn deny(self, unknown: &Unknown) -> Self {
        Self { allowed: false, reason: Some(unknown.reason()), warning: Some(unknown.to_string()), ..self }
    }
}

/// Returns whether a decision counted the request. The failure policy counts nothing, so that what is left is unknown.
fn is_counted(decision: &Decision) -> bool {
    decision.source() != Source::Policy
}

impl CheckResponse<'_> {
    /// Appends the same JSON as [`Serialize`], in a third of the time: serde parses the text of [`Seconds`] again.
    pub(crate) fn write(&self, output: &mut Vec<u8>) {
        let Self {
            allowed,
            limit,
            quota,
            remaining,
            reset_after,
            retry_after,
            delay,
            reason,
            warning,
            token,
            source,
            limits,
            shadow,
        } = self;
        output.extend_from_slice(b"{\"allowed\":");
        write_bool(*allowed, output);
        output.extend_from_slice(b",\"limit\":");
        write_or_null(*limit, output, write_str);
        output.extend_from_slice(b",\"quota\":");
        write_or_null(*quota, output, write_units);
        output.extend_from_slice(b",\"remaining\":");
        write_or_null(*remaining, output, write_units);
        output.extend_from_slice(b",\"reset_after\":");
        write_or_null(reset_after.as_ref(), output, Seconds::write);
        output.extend_from_slice(b",\"retry_after\":");
        write_or_null(retry_after.as_ref(), output, Seconds::write);
        output.extend_from_slice(b",\"delay\":");
        delay.write(output);
        let warning = warning.as_deref();
        for (name, value) in [(&b",\"reason\":"[..], *reason), (b",\"warning\":", warning), (b",\"token\":", *token)] {
            if let Some(value) = value {
                output.extend_from_slice(name);
                write_str(value, output);
            }
        }
        output.extend_from_slice(b",\"source\":");
        write_or_null(*source, output, write_str);
        if let Some(limits) = limits {
            output.extend_from_slice(b",\"limits\":");
            // Writing to a vector cannot fail.
            _ = serde_json::to_writer(&mut *output, limits);
        }
        for (number, ShadowDecision { limit, allowed }) in shadow.iter().enumerate() {
            output.extend_from_slice(if number == 0 { b",\"shadow\":[{\"limit\":" } else { b",{\"limit\":" });
            write_str(limit, output);
            output.extend_from_slice(b",\"allowed\":");
            write_bool(*allowed, output);
            output.push(b'}');
        }
        output.extend_from_slice(if shadow.is_empty() { b"}" } else { b"]}" });
    }
}

fn write_or_null<T>(value: Option<T>, output: &mut Vec<u8>, write: impl FnOnce(T, &mut Vec<u8>)) {
    match value {
        Some(value) => write(value, output),
        None => output.extend_from_slice(b"null"),
    }
}

fn write_bool(value: bool, output: &mut Vec<u8>) {
    output.extend_from_slice(if value { b"true" } else { b"false" });
}

fn write_units(units: u64, output: &mut Vec<u8>) {
    output.extend_from_slice(itoa::Buffer::new().format(units).as_bytes());
}

/// Appends a string with escapes.
fn write_str(text: &str, output: &mut Vec<u8>) {
    // Writing to a vector cannot fail.
    _ = serde_json::to_writer(output, text);
}

/// Returns the `reason` of a refusal.
pub(crate) fn reason(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::Limited => "limited",
        Refusal::Pending => "pending",
        Refusal::Unreadable(request) => request.reason,
        // The other reasons are the same in all responses.
        other => other.code(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn both_ways_to_write_a_response_agree() {
        let nothing = || CheckResponse {
            allowed: true,
            limit: None,
            quota: None,
            remaining: None,
            reset_after: None,
            retry_after: None,
            delay: Seconds(Duration::ZERO),
            reason: None,
            warning: None,
            token: None,
            source: None,
            limits: None,
            shadow: Vec::new(),
        };
        let seconds = |micros| Some(Seconds(Duration::from_micros(micros)));
        let shadow = |limit, allowed| ShadowDecision { limit, allowed };
        let limit = |limit, remaining| LimitDecision {
            limit,
            allowed: true,
            quota: 5,
            remaining,
            reset_after: seconds(1),
            retry_after: None,
        };
        for response in [
            nothing(),
            CheckResponse { limits: Some(Vec::new()), ..nothing() },
            CheckResponse { limits: Some(vec![limit("o\"ne", None), limit("two", Some(3))]), ..nothing() },
            CheckResponse { shadow: vec![shadow("one", true)], ..nothing() },
            CheckResponse {
                allowed: false,
                limit: Some("a \"name\" of ż\n"),
                quota: Some(u64::MAX),
                remaining: Some(0),
                reset_after: seconds(1),
                retry_after: seconds(u64::MAX),
                delay: Seconds(Duration::from_millis(2500)),
                reason: Some("limited"),
                warning: Some("a \"name\" is unknown".to_owned()),
                token: Some("expired"),
                source: Some("store"),
                limits: None,
                shadow: vec![shadow("one", true), shadow("t\"wo", false)],
            },
        ] {
            let mut written = Vec::new();
            response.write(&mut written);
            assert_eq!(String::from_utf8(written).unwrap(), serde_json::to_string(&response).unwrap());
        }
    }
}

//! The response to a request.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, header};
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use smallvec::SmallVec;
use tollgate::Decision;
use tollgate_rules::Outcome;
use tollgate_telemetry::unknown::Unknown;

use super::request::{Denials, Descriptors, Overridden, Target};
use crate::service::envoy;
use crate::service::http::reason;
use crate::service::proto::envoy::config::core::v3::HeaderValue;
use crate::service::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use crate::service::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use crate::service::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit};

/// Enough for the headers of a response.
const MOST_HEADERS: usize = 6;

/// Builds the response. `outcomes` are those of the descriptors that were checked together.
pub(super) fn build(
    descriptors: &Descriptors<'_>,
    denials: &Denials,
    outcomes: &[Outcome],
    overrides: &[Overridden],
) -> RateLimitResponse {
    let mut statuses: Vec<DescriptorStatus> = descriptors.each.iter().map(|one| without_limit(&one.target)).collect();
    let checked = descriptors.checked(denials).zip(outcomes);
    let all: SmallVec<[(usize, &Outcome); 4]> =
        checked.chain(denials.0.iter().map(|(index, outcome)| (*index, outcome))).collect();
    for &(index, outcome) in &all {
        statuses[index] = status(&descriptors.each[index].target, outcome);
    }
    for overridden in overrides {
        statuses[overridden.index] = overridden_status(&descriptors.each[overridden.index].target, overridden);
    }
    let is_allowed = outcomes.iter().all(Outcome::is_allowed) && overrides.iter().all(Overridden::is_allowed);
    let (headers, body) = answer(outcomes, overrides);
    RateLimitResponse {
        overall_code: code(is_allowed),
        statuses,
        response_headers_to_add: headers,
        request_headers_to_add: Vec::new(),
        raw_body: body,
        dynamic_metadata: metadata(descriptors, &all, overrides),
        // Envoy does not implement it.
        quota: None,
    }
}

impl Descriptors<'_> {
    /// Shows what is left after the charges of a denied request.
    pub(super) fn show_charged(&self, charged: &[usize], response: &mut RateLimitResponse) {
        for index in charged {
            let left = &mut response.statuses[*index].limit_remaining;
            *left = left.saturating_sub(saturated(self.each[*index].hits()));
        }
    }
}

/// Builds the response to a request that is denied because no limit applies to some of its descriptors.
pub(super) fn of_unknown(descriptors: &Descriptors<'_>, unknown: &[(usize, Unknown)]) -> RateLimitResponse {
    let mut statuses: Vec<DescriptorStatus> = descriptors.each.iter().map(|one| without_limit(&one.target)).collect();
    let mut fields = BTreeMap::new();
    for (index, unknown) in unknown {
        statuses[*index].code = code(false);
        let text = |text: &str| Value { kind: Some(Kind::StringValue(text.to_owned())) };
        fields.entry("reason".to_owned()).or_insert_with(|| text(unknown.reason()));
        fields.entry("warning".to_owned()).or_insert_with(|| text(&unknown.to_string()));
    }
    RateLimitResponse {
        overall_code: code(false),
        statuses,
        dynamic_metadata: Some(Struct { fields }),
        ..RateLimitResponse::default()
    }
}

fn code(is_allowed: bool) -> i32 {
    (if is_allowed { Code::Ok } else { Code::OverLimit }).into()
}

/// Returns the status of a descriptor that no limit applies to.
fn without_limit(target: &Target<'_>) -> DescriptorStatus {
    let limit_remaining = if matches!(target, Target::Unlimited) { u32::MAX } else { 0 };
    DescriptorStatus { code: code(true), limit_remaining, ..DescriptorStatus::default() }
}

fn status(target: &Target<'_>, outcome: &Outcome) -> DescriptorStatus {
    // A limit in shadow mode reports what it would decide, and denies nothing.
    let decision = outcome.decision().or_else(|| outcome.shadow_decisions().next().map(|(_, decision)| decision));
    let current_limit = match target {
        Target::Found(found) => Some(RateLimit {
            name: found.limit.name.to_string(),
            requests_per_unit: found.limit.requests_per_unit,
            unit: envoy::unit(found.limit.unit).into(),
        }),
        _ => outcome.decision().zip(outcome.limit()).map(|(decision, name)| RateLimit {
            name: name.to_owned(),
            requests_per_unit: saturated(decision.quota()),
            unit: unit(outcome.window().unwrap_or_default()).into(),
        }),
    };
    let status = DescriptorStatus { code: code(outcome.is_allowed()), current_limit, ..DescriptorStatus::default() };
    match decision {
        Some(decision) => with_decision(status, decision),
        None => status,
    }
}

fn overridden_status(target: &Target<'_>, overridden: &Overridden) -> DescriptorStatus {
    let current_limit = match target {
        Target::Override(limit, period) => Some(RateLimit {
            name: String::new(),
            requests_per_unit: limit.requests_per_unit,
            unit: unit(*period).into(),
        }),
        _ => None,
    };
    let status = DescriptorStatus { code: code(overridden.is_allowed()), current_limit, ..DescriptorStatus::default() };
    match &overridden.decision {
        Some(decision) => with_decision(status, decision),
        None => status,
    }
}

fn with_decision(status: DescriptorStatus, decision: &Decision) -> DescriptorStatus {
    let reset = decision.reset_after();
    let duration = prost_types::Duration {
        seconds: i64::try_from(reset.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(reset.subsec_nanos()).unwrap_or(0),
    };
    DescriptorStatus {
        limit_remaining: saturated(decision.remaining()),
        duration_until_reset: Some(duration),
        ..status
    }
}

fn saturated(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Returns the unit of this length, if there is one.
fn unit(length: Duration) -> Unit {
    const DAY: u64 = 24 * 60 * 60;
    match (length.as_secs(), length.subsec_nanos()) {
        (1, 0) => Unit::Second,
        (60, 0) => Unit::Minute,
        (3600, 0) => Unit::Hour,
        (DAY, 0) => Unit::Day,
        (secs, 0) if secs == 7 * DAY => Unit::Week,
        (secs, 0) if secs == 30 * DAY => Unit::Month,
        (secs, 0) if secs == 365 * DAY => Unit::Year,
        _ => Unit::Unknown,
    }
}

/// Returns the headers of the most restrictive outcome, and the body of a denial.
fn answer(outcomes: &[Outcome], overrides: &[Overridden]) -> (Vec<HeaderValue>, Bytes) {
    if let Some(denied) = outcomes.iter().find(|outcome| !outcome.is_allowed()) {
        let Some(response) = denied.response(&HeaderMap::new()) else { return Default::default() };
        let (head, body) = response.into_parts();
        return (header_values(&head.headers), body);
    }
    let mut headers = HeaderMap::with_capacity(MOST_HEADERS);
    if let Some(denied) = overrides.iter().find(|overridden| !overridden.is_allowed()) {
        let wait = denied.decision.as_ref().and_then(Decision::retry_after);
        let seconds = wait.map(|wait| wait.as_secs() + u64::from(wait.subsec_nanos() > 0));
        headers.extend(seconds.map(|seconds| (header::RETRY_AFTER, seconds.into())));
        return (header_values(&headers), Bytes::new());
    }
    let share = |outcome: &&Outcome| {
        outcome.decision().map_or(u128::MAX, |decision| {
            (u128::from(decision.remaining()) << 64) / u128::from(decision.quota().max(1))
        })
    };
    let most_restrictive = match outcomes {
        [only] => Some(only),
        several => several.iter().min_by_key(share),
    };
    if let Some(outcome) = most_restrictive {
        outcome.write_headers(&mut headers);
    }
    (header_values(&headers), Bytes::new())
}

/// Converts headers. Envoy computes the length of the body itself.
fn header_values(headers: &HeaderMap) -> Vec<HeaderValue> {
    let value = |value: &axum::http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let mut values = Vec::with_capacity(headers.len());
    for (name, given) in headers.iter().filter(|(name, _)| **name != header::CONTENT_LENGTH) {
        values.push(HeaderValue { key: name.as_str().to_owned(), value: value(given), raw_value: Bytes::new() });
    }
    values
}

/// Returns the metadata for other filters: the limit and the reason of a denial, and the metadata of limits that allow.
fn metadata(descriptors: &Descriptors<'_>, outcomes: &[(usize, &Outcome)], overrides: &[Overridden]) -> Option<Struct> {
    let mut fields = BTreeMap::new();
    let mut add = |name: &str, kind: Kind| fields.insert(name.to_owned(), Value { kind: Some(kind) });
    if let Some((outcome, refusal)) = outcomes.iter().find_map(|(_, outcome)| Some((outcome, outcome.refusal()?))) {
        add("reason", Kind::StringValue(reason(refusal).to_owned()));
        if let Some(limit) = outcome.limit() {
            add("limit", Kind::StringValue(limit.to_owned()));
        }
        if let Some(wait) = outcome.decision().and_then(Decision::retry_after) {
            add("retry_after", Kind::NumberValue(wait.as_secs_f64()));
        }
    } else if let Some(denied) = overrides.iter().find(|overridden| !overridden.is_allowed()) {
        add("reason", Kind::StringValue("limited".to_owned()));
        if let Some(wait) = denied.decision.as_ref().and_then(Decision::retry_after) {
            add("retry_after", Kind::NumberValue(wait.as_secs_f64()));
        }
    }
    let mut merged = BTreeMap::new();
    for &(index, _) in outcomes.iter().filter(|(_, outcome)| outcome.is_allowed()) {
        if let Target::Found(found) = &descriptors.each[index].target
            && let Some(metadata) = found.limit.metadata.as_ref().and_then(envoy::metadata)
        {
            for (name, value) in metadata.fields {
                merged.entry(name).or_insert(value);
            }
        }
    }
    if !merged.is_empty() {
        add("metadata", Kind::StructValue(Struct { fields: merged }));
    }
    (!fields.is_empty()).then_some(Struct { fields })
}

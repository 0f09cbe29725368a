//! The explanation as text: one line per limit, in columns, then the answer.

use std::time::Duration;

use tollgate::Decision;
use tollgate_http::Refusal;
use tollgate_rules::{ExpressionField, FailedExpression, TokenStatus};
use tollgate_rules::{RuleExplained, RuleState};
use tollgate_telemetry::notice::policy_name;

use super::address::effects_without_address;
use crate::explanation::{Counts, Explained, FactHeader, FactValue, Routed, counts_after, path_reading, policy};
use crate::gateway::upstream_urls;

/// The widest column of names. A longer name is printed in full and breaks its column.
const MAX_NAME_WIDTH: usize = 32;

/// The longest part of a key that is printed.
const MAX_KEY_CHARS: usize = 60;

pub(super) fn show(explained: &Explained<'_>) -> String {
    let rows: Vec<[String; 3]> = explained.explanation.rules.iter().map(|rule| row(explained, rule)).collect();
    let width =
        |column: usize, most: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0).min(most);
    let (names, verdicts) = (width(0, MAX_NAME_WIDTH), width(1, usize::MAX));
    let mut text = format!("{} {}\n\n", explained.request.method, explained.request.path);
    text += &route(explained);
    let beneath = explained.explanation.rules.iter().map(|rule| learned(explained, rule) + &expression_errors(rule));
    for ([name, verdict, detail], beneath) in rows.iter().zip(beneath) {
        let line = format!("  {name:names$}  {verdict:verdicts$}  {detail}");
        text += line.trim_end();
        text.push('\n');
        text += &beneath;
    }
    if rows.is_empty() {
        text += "  there are no limits\n";
    }
    text += &token(explained.explanation.token);
    text + "\n" + &answer(explained) + "\n" + counts(explained.counts) + &address(explained)
}

/// Describes the route.
fn route(explained: &Explained<'_>) -> String {
    let Explained { routed, file, request, .. } = explained;
    let path = &request.path;
    let rule = match *routed {
        Routed::NoGateway => return String::new(),
        Routed::NoRoute => return "Route: none, so an allowed request gets 404.\n\n".to_owned(),
        Routed::By(rule) => rule,
    };
    let leads = match &rule.respond {
        Some(respond) => format!("answers with {}", respond.status),
        None => {
            format!("to {}", upstream_urls(rule, path_reading(file, Routed::NoRoute), path).join(", "))
        }
    };
    format!("Route: {}, {leads}.\n{}\n", rule.name(), fact_headers(explained))
}

/// Lists the headers that the upstream gets with facts about the request, one per line.
fn fact_headers(explained: &Explained<'_>) -> String {
    let line = |FactHeader { name, source, value }: &FactHeader<'_>| match value {
        FactValue::Known(value) => format!("  {name}: {value} (from {source})\n"),
        FactValue::Unknown if source.is_of_certificate() => {
            format!("  {name}: from {source}, if the client has a certificate\n")
        }
        FactValue::Unknown => format!("  {name}: from {source}, which is unknown: use --ip\n"),
        FactValue::Missing => format!("  {name} is removed, because the request has no {source}\n"),
    };
    explained.fact_headers.iter().map(line).collect()
}

/// Describes the result of checking the token.
fn token(status: TokenStatus) -> String {
    match status {
        TokenStatus::Valid => "\nToken: valid.\n".to_owned(),
        TokenStatus::Invalid(error) => format!("\nToken: {}. {error}\n", error.code()),
        _ => String::new(),
    }
}

/// Describes the number in force of a limit that learns.
fn learned(explained: &Explained<'_>, rule: &RuleExplained) -> String {
    explained.learners.describe(&rule.name).map(|learned| format!("    {}\n", learned.text)).unwrap_or_default()
}

/// Lists the expressions that failed for the request, one per line.
fn expression_errors(rule: &RuleExplained) -> String {
    let line = |failed: &FailedExpression| {
        let effect = match failed.field {
            ExpressionField::MatchWhen => "so the limit applies",
            ExpressionField::ExemptWhen => "so the request is not exempt",
            ExpressionField::BlockedWhen => "so the request is blocked",
            ExpressionField::Cost => "so its `when_error` is the cost",
            _ => "which counts against the request",
        };
        format!("    {} failed, {effect}: {}\n", failed.field, failed.error)
    };
    rule.failed_expressions.iter().map(line).collect()
}

/// Returns the name, the verdict and the details.
fn row(explained: &Explained<'_>, rule: &RuleExplained) -> [String; 3] {
    let (verdict, detail) = match &rule.state {
        RuleState::NotMatched(why) => ("not matched", why.clone()),
        RuleState::Disabled => ("disabled", "`enabled` is false".to_owned()),
        RuleState::KeyMissing(part) => ("not matched", format!("the request has no {part}")),
        RuleState::Exempt => ("exempt", "not counted".to_owned()),
        RuleState::Refused(Refusal::KeyMissing { part }) => ("refused", format!("the request has no {part}")),
        RuleState::Refused(Refusal::TokenInvalid { error, .. }) => ("refused", format!("token {}", error.code())),
        RuleState::Refused(Refusal::Blocked) => ("refused", "blocked".to_owned()),
        RuleState::Refused(Refusal::Unreadable(request)) => ("refused", request.message.clone()),
        RuleState::Counted { key, cost, decision, banned_for } => {
            let when = if counts_after(explained.file, &rule.name) { " after the response" } else { "" };
            let hit = format!("{}, cost {cost}{when}", describe_key(key));
            match (decision, banned_for) {
                (_, Some(left)) => ("refused", format!("{hit}: banned for {}", seconds(*left))),
                (Some(decision), None) if decision.is_allowed() => ("allowed", format!("{hit}: {}", left(decision))),
                (Some(decision), None) => ("refused", format!("{hit}: {}, {}", left(decision), again(decision))),
                (None, None) => {
                    let policy = policy_name(policy(explained.file, &rule.name).into());
                    ("unknown", format!("{hit}: store unavailable, on_store_failure is {policy}"))
                }
            }
        }
        RuleState::InFlight { key, banned_for: Some(left), .. } => {
            ("refused", format!("{}: banned for {}", describe_key(key), seconds(*left)))
        }
        RuleState::InFlight { key, in_flight, decision, .. } => {
            let verdict = if decision.is_allowed() { "allowed" } else { "refused" };
            (verdict, format!("{}: {in_flight} of {} in flight", describe_key(key), decision.quota()))
        }
        _ => ("refused", String::new()),
    };
    let verdict = match (rule.shadow, verdict) {
        (true, "refused") => "would be refused (shadow)".to_owned(),
        (true, "allowed") => "would be allowed (shadow)".to_owned(),
        (true, other) => format!("{other} (shadow)"),
        (false, other) => other.to_owned(),
    };
    [rule.name.clone(), verdict, detail]
}

fn describe_key(key: &[String]) -> String {
    if key.is_empty() {
        return "one counter for all".to_owned();
    }
    let parts: Vec<String> = key.iter().map(|part| part.escape_debug().to_string()).collect();
    let joined = parts.join(" + ");
    match joined.char_indices().nth(MAX_KEY_CHARS) {
        Some((end, _)) => format!("key {}…", &joined[..end]),
        None => format!("key {joined}"),
    }
}

fn left(decision: &Decision) -> String {
    format!("{} of {} left", decision.remaining(), decision.quota())
}

fn again(decision: &Decision) -> String {
    match decision.retry_after() {
        Some(wait) => format!("retry in {}", seconds(wait)),
        None => "cost exceeds the limit".to_owned(),
    }
}

fn seconds(span: Duration) -> String {
    format!("{}.{:03} s", span.as_secs(), span.subsec_millis())
}

fn answer(explained: &Explained<'_>) -> String {
    let overall = &explained.overall;
    match (&overall.refusal, overall.limit.as_deref()) {
        (None, _) if explained.counts == Counts::Unknown => {
            "Result: allowed, as far as is known without the store.".to_owned()
        }
        (None, None) => "Result: allowed; no limit counts it.".to_owned(),
        (None, Some(limit)) => format!("Result: allowed; {limit} has the smallest share left."),
        (Some(Refusal::Unreadable(request)), _) => {
            format!("Result: 400 Bad Request, {}. {}", request.reason, request.message)
        }
        (Some(_), limit) => {
            let status = overall.status.map(|status| status.to_string()).unwrap_or_default();
            let retry_after = overall.retry_after.map(|wait| format!(", Retry-After: {wait}")).unwrap_or_default();
            format!("Result: {status}{retry_after}; {} refuses it.", limit.unwrap_or("a limit"))
        }
    }
}

/// Describes the effect of a missing client address.
fn address(explained: &Explained<'_>) -> String {
    let parts = effects_without_address(explained);
    let made = match parts.split_last() {
        None => return String::new(),
        Some((only, [])) => only.clone(),
        Some((last, before)) => format!("{}, and {last}", before.join(", ")),
    };
    let clients = match explained.routed {
        Routed::NoGateway => "",
        Routed::NoRoute | Routed::By(_) => "; clients of the gateway always have one",
    };
    format!("\nThe request has no client address, so {made}{clients}: pass one with --ip, such as --ip 192.0.2.7.")
}

fn counts(counts: Counts) -> &'static str {
    match counts {
        Counts::Fresh => "Counts start from zero: only the server itself can read its in-memory store.",
        Counts::Live => "Counts are the current ones of the store; nothing was taken.",
        Counts::Unknown => "The store does not answer, so counts are unknown; each limit follows its on_store_failure.",
    }
}

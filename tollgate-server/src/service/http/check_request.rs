//! Parses the body of `POST /v1/check` and resolves it against the rules.

use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Deserialize;
use tollgate_rules::{Check, Gate, KeyError, NamedRule, RuleSet};

use super::batch::Question;
use super::facts::RequestFacts;
use super::values::{Object, OneOrMany, StringOrStrings, Units};
use crate::service::error_body::{ErrorBody, quoted};

/// The most names of limits in a message.
const MAX_NAMES: usize = 20;

/// A check by limit and key, or of a described request. Fields that are `null` count as left out.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CheckRequest {
    /// The name of a limit.
    limit: Option<String>,
    /// The key: a string, or one string for each part of the limit's key.
    #[schemars(with = "Option<StringOrStrings>")]
    key: Option<OneOrMany>,
    /// The plan whose numbers apply to the key: one that the limit has overrides for. Without it, that of the key's last
    /// request, if this process remembers one, or else the limit's own numbers.
    plan: Option<String>,
    /// A description of a request, in place of `limit` and `key`.
    #[schemars(with = "Option<RequestFacts>")]
    request: Option<Object<RequestFacts>>,
    /// The units to take: 1 by default. 0 returns the state and takes nothing.
    cost: Option<Units>,
}

impl Question for CheckRequest {
    const ONE: &'static str = "a check";
    const MANY: &'static str = "checks";
}

/// A check that is valid under the rules it was resolved with.
pub(crate) enum ResolvedCheck<'q> {
    /// A key of a limit, by the name of the limit.
    Named { limit: NamedRule<'q>, key: Vec<&'q [u8]>, cost: u64 },
    /// All limits that match the request.
    Request { facts: &'q RequestFacts, cost: Option<u64> },
}

impl CheckRequest {
    /// Returns whether the cost is 0.
    pub(crate) fn is_peek(&self) -> bool {
        self.cost.as_ref().is_some_and(|cost| cost.0 == 0)
    }

    /// Returns the request that the check describes, to which any number of limits may apply.
    pub(crate) fn described_request(&self) -> Option<&RequestFacts> {
        self.request.as_ref().map(|Object(facts)| facts)
    }

    /// Resolves the check. `place` returns the prefix of field names in a batch, such as `[1].`.
    pub(crate) fn resolve(&self, rules: &RuleSet, place: &dyn Fn() -> String) -> Result<ResolvedCheck<'_>, ErrorBody> {
        let refuse = |field: &str, problem: &str| Err(invalid_field(place, field, problem));
        let cost = self.cost.as_ref().map(|cost| cost.0);
        match (&self.limit, &self.key, &self.request) {
            (None, None, Some(Object(facts))) if self.plan.is_none() => {
                match (facts.path_problem(), facts.method_problem()) {
                    (Some(problem), _) => refuse("request.path", problem),
                    (None, Some(problem)) => refuse("request.method", problem),
                    (None, None) => Ok(ResolvedCheck::Request { facts, cost }),
                }
            }
            (None, None, None) if self.plan.is_none() => {
                refuse("limit", "is missing: send `limit` and `key`, or `request`")
            }
            (None, None, _) if self.plan.is_some() => refuse(
                "plan",
                "is given without `limit` and `key`: in `request`, send the plan where the limit reads it",
            ),
            (_, _, Some(_)) => refuse("request", "excludes `limit` and `key`: send one or the other"),
            (limit, key, None) => {
                let limit = (limit.as_deref(), self.plan.as_deref());
                let (limit, key) = resolve_key(limit, key.as_ref(), rules, place)?;
                Ok(ResolvedCheck::Named { limit, key, cost: cost.unwrap_or(1) })
            }
        }
    }

    /// Resolves the check as a peek, which costs nothing.
    pub(crate) fn resolve_peek(
        &self,
        rules: &RuleSet,
        place: &dyn Fn() -> String,
    ) -> Result<ResolvedCheck<'_>, ErrorBody> {
        if self.cost.as_ref().is_some_and(|cost| cost.0 > 0) {
            return Err(invalid_field(place, "cost", "is not 0, and a peek takes nothing: remove it"));
        }
        Ok(match self.resolve(rules, place)? {
            ResolvedCheck::Named { limit, key, .. } => ResolvedCheck::Named { limit, key, cost: 0 },
            ResolvedCheck::Request { facts, .. } => ResolvedCheck::Request { facts, cost: Some(0) },
        })
    }
}

/// Resolves the name of a limit, the plan of a key, and the key.
pub(crate) fn resolve_key<'q>(
    (limit, plan): (Option<&'q str>, Option<&'q str>),
    key: Option<&'q OneOrMany>,
    rules: &RuleSet,
    place: &dyn Fn() -> String,
) -> Result<(NamedRule<'q>, Vec<&'q [u8]>), ErrorBody> {
    let Some(limit) = limit else {
        return Err(invalid_field(place, "limit", "is missing: send it with `key`"));
    };
    let limit = NamedRule::new(limit).plan(plan);
    let parts: Vec<&[u8]> = key.map_or(&[][..], OneOrMany::as_slice).iter().map(String::as_bytes).collect();
    match rules.check_key(limit, &parts) {
        Err(KeyError::PartCount { .. }) if key.is_none() => {
            Err(invalid_field(place, "key", "is missing: send it with `limit`"))
        }
        Err(error) => Err(invalid_key(&error, rules, place)),
        Ok(()) => Ok((limit, parts)),
    }
}

/// Returns the error of a key that no request can have. `place` returns the prefix of field names.
pub(crate) fn invalid_key(error: &KeyError, rules: &RuleSet, place: &dyn Fn() -> String) -> ErrorBody {
    match error {
        KeyError::UnknownRule { rule } => {
            let error = unknown_limit(rule, rules);
            match place() {
                // The only check.
                place if place.is_empty() => error,
                place => ErrorBody { message: format!("`{place}limit`: {}", error.message), ..error },
            }
        }
        KeyError::UnknownPlan { .. } => {
            let message = format!("`{}plan`: {error}", place());
            ErrorBody { status: StatusCode::BAD_REQUEST, error: "unknown_plan", message }
        }
        KeyError::PartCount { rule, given, parts } => invalid_field(place, "key", &wrong_parts(rule, *given, parts)),
        KeyError::InvalidValue { rule, part, .. } => {
            let is_only = rules.key_parts(rule).is_none_or(|parts| parts.len() == 1);
            let part = if is_only { String::new() } else { format!("[{part}]") };
            ErrorBody::invalid(format!("`{}key{part}`: {error}", place()))
        }
        _ => ErrorBody::invalid(format!("`{}key`: {error}", place())),
    }
}

/// Returns an error about a field. `place` returns the prefix of its name.
pub(super) fn invalid_field(place: &dyn Fn() -> String, field: &str, problem: &str) -> ErrorBody {
    ErrorBody::invalid(format!("`{}{field}` {problem}", place()))
}

impl ResolvedCheck<'_> {
    /// Starts a check of the same limits that takes nothing.
    pub(crate) fn start_peek(&self, gate: &Gate) -> Check {
        match self {
            Self::Named { limit, key, .. } => Self::Named { limit: *limit, key: key.clone(), cost: 0 }.start(gate),
            Self::Request { facts, .. } => facts.start(gate, Some(0)),
        }
    }

    /// Starts the check on a gate with the same rules.
    pub(crate) fn start(&self, gate: &Gate) -> Check {
        match self {
            Self::Named { limit, key, cost } => {
                gate.check_by_name(*limit, key, *cost).expect("the key was checked when the check was resolved")
            }
            Self::Request { facts, cost } => facts.start(gate, *cost),
        }
    }
}

/// Describes a key with the wrong number of parts.
fn wrong_parts(limit: &str, given: usize, parts: &[String]) -> String {
    let names = parts.join(", ");
    match parts.len() {
        0 => format!("is given, but {} has one counter for all requests: remove it", quoted(limit)),
        1 => format!("has {given} parts, but {} counts by {names}: send one string", quoted(limit)),
        most => {
            let has = if given == 1 { "1 part".to_owned() } else { format!("{given} parts") };
            format!("has {has}, but {} counts by {names}: send a list of {most} strings", quoted(limit))
        }
    }
}

pub(crate) fn unknown_limit(name: &str, rules: &RuleSet) -> ErrorBody {
    let mut known = rules.names().take(MAX_NAMES).collect::<Vec<_>>().join(", ");
    if rules.names().nth(MAX_NAMES).is_some() {
        known += ", …";
    }
    let fix = if known.is_empty() { "the rule file has no limits".to_owned() } else { format!("use one of: {known}") };
    let message = format!("no limit is named {}: {fix}", quoted(name));
    ErrorBody { status: StatusCode::BAD_REQUEST, error: "unknown_limit", message }
}

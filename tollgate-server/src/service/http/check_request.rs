//! Parses the body of `POST /v1/check` and resolves it against the rules.

mod facts;
mod values;

use std::fmt;

use axum::http::StatusCode;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use tollgate::rules::RuleSet;
use tollgate::{Check, Gate};

use self::facts::RequestFacts;
use self::values::{Cost, Object, OneOrMany};
use super::error_body::{ErrorBody, parse_error, quoted};

/// About a millisecond of decisions, during which the thread serves no other client.
const MAX_BATCH: usize = 1000;

/// The most names of limits in a message.
const MAX_NAMES: usize = 20;

/// The checks of a body, and whether the response is an object or an array.
#[derive(Debug)]
pub(crate) struct CheckRequests {
    shape: Shape,
    checks: Vec<CheckRequest>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Shape {
    One,
    Batch,
}

/// One check. Fields that are `null` count as left out.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckRequest {
    limit: Option<String>,
    key: Option<OneOrMany>,
    request: Option<Object<RequestFacts>>,
    cost: Option<Cost>,
}

/// A check that is valid under the rules it was resolved with.
pub(crate) enum ResolvedCheck<'q> {
    /// A key of a limit, by the name of the limit.
    Named { limit: &'q str, key: Vec<&'q [u8]>, cost: u64 },
    /// All limits that match the request.
    Request { facts: &'q RequestFacts, cost: Option<u64> },
}

impl CheckRequests {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ErrorBody> {
        let mut json = serde_json::Deserializer::from_slice(body);
        let checks = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let path = error.path().to_string();
            refuse_json(&path, &error.into_inner())
        })?;
        json.end().map_err(|error| refuse_json(".", &error))?;
        Ok(checks)
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns for each check whether its cost is 0.
    pub(crate) fn is_peek(&self) -> impl Iterator<Item = bool> {
        self.checks.iter().map(|check| check.cost.as_ref().is_some_and(|cost| cost.0 == 0))
    }

    /// Resolves every check against the rules, or returns the error of the first invalid one.
    pub(crate) fn resolve(&self, rules: &RuleSet) -> Result<Vec<ResolvedCheck<'_>>, ErrorBody> {
        let place = |index| match self.shape {
            Shape::One => String::new(),
            Shape::Batch => format!("[{index}]."),
        };
        self.checks.iter().enumerate().map(|(index, one)| one.resolve(rules, || place(index))).collect()
    }
}

impl CheckRequest {
    /// `place` returns the prefix of field names in a batch, such as `[1].`.
    fn resolve(&self, rules: &RuleSet, place: impl Fn() -> String) -> Result<ResolvedCheck<'_>, ErrorBody> {
        let refuse = |field: &str, problem: &str| Err(invalid_request(format!("`{}{field}` {problem}", place())));
        let cost = self.cost.as_ref().map(|cost| cost.0);
        let (limit, key) = match (&self.limit, &self.key, &self.request) {
            (None, None, Some(Object(facts))) => match (facts.path_problem(), facts.method_problem()) {
                (Some(problem), _) => return refuse("request.path", problem),
                (None, Some(problem)) => return refuse("request.method", problem),
                (None, None) => return Ok(ResolvedCheck::Request { facts, cost }),
            },
            (Some(limit), key, None) => (limit, key),
            (None, Some(_), None) => return refuse("limit", "is missing; send it with `key`"),
            (None, None, None) => return refuse("limit", "is missing; send `limit` and `key`, or `request`"),
            (_, _, Some(_)) => return refuse("request", "excludes `limit` and `key`; send one or the other"),
        };
        let Some(parts) = rules.key_parts(limit) else { return Err(unknown_limit(limit, rules)) };
        let given = key.as_ref().map_or(&[][..], OneOrMany::as_slice);
        if given.len() != parts.len() {
            if key.is_none() {
                return refuse("key", "is missing; send it with `limit`");
            }
            return refuse("key", &wrong_parts(limit, given.len(), parts));
        }
        let key = given.iter().map(String::as_bytes).collect();
        Ok(ResolvedCheck::Named { limit, key, cost: cost.unwrap_or(1) })
    }
}

impl ResolvedCheck<'_> {
    /// Starts the check on a gate with the same rules.
    pub(crate) fn start(&self, gate: &Gate) -> Check {
        match self {
            Self::Named { limit, key, cost } => {
                gate.check_by_name(limit, key, *cost).expect("the limit was found when the check was resolved")
            }
            Self::Request { facts, cost } => facts.start(gate, *cost),
        }
    }
}

/// Describes a key with the wrong number of parts.
fn wrong_parts(limit: &str, given: usize, parts: &[impl ToString]) -> String {
    let names = parts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match parts.len() {
        0 => format!("is given, but {} has one counter for all requests; remove it", quoted(limit)),
        1 => format!("has {given} parts, but {} counts by {names}; send one string", quoted(limit)),
        most => {
            let has = if given == 1 { "1 part".to_owned() } else { format!("{given} parts") };
            format!("has {has}, but {} counts by {names}; send a list of {most} strings", quoted(limit))
        }
    }
}

fn unknown_limit(name: &str, rules: &RuleSet) -> ErrorBody {
    let mut known = rules.names().take(MAX_NAMES).collect::<Vec<_>>().join(", ");
    if rules.names().nth(MAX_NAMES).is_some() {
        known += ", …";
    }
    let fix = if known.is_empty() { "the rule file has no limits".to_owned() } else { format!("use one of: {known}") };
    let message = format!("no limit is named {}; {fix}", quoted(name));
    ErrorBody { status: StatusCode::BAD_REQUEST, error: "unknown_limit", message }
}

fn refuse_json(path: &str, error: &serde_json::Error) -> ErrorBody {
    let parse_error = parse_error(error);
    if error.is_data() {
        let place = if path == "." { "the body".to_owned() } else { quoted(path) };
        invalid_request(format!("{place}: {parse_error}"))
    } else {
        ErrorBody {
            status: StatusCode::BAD_REQUEST,
            error: "invalid_json",
            message: format!(r#"the body is not JSON: {parse_error}; send {{"limit":"per-user","key":"42"}}"#),
        }
    }
}

fn invalid_request(message: String) -> ErrorBody {
    ErrorBody { status: StatusCode::BAD_REQUEST, error: "invalid_question", message }
}

impl<'de> Deserialize<'de> for CheckRequests {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrSeveral;

        impl<'de> Visitor<'de> for OneOrSeveral {
            type Value = CheckRequests;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a check or an array of checks")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<CheckRequests, A::Error> {
                let check = CheckRequest::deserialize(MapAccessDeserializer::new(map))?;
                Ok(CheckRequests { shape: Shape::One, checks: vec![check] })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<CheckRequests, A::Error> {
                let mut checks = Vec::new();
                while let Some(Object(check)) = seq.next_element()? {
                    if checks.len() == MAX_BATCH {
                        return Err(A::Error::custom(format_args!(
                            "a batch holds at most {MAX_BATCH} checks; send the rest in another request"
                        )));
                    }
                    checks.push(check);
                }
                Ok(CheckRequests { shape: Shape::Batch, checks })
            }
        }

        deserializer.deserialize_any(OneOrSeveral)
    }
}

//! The body of a request, resolve: JSON to what the gate is asked.

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

/// About a millisecond of decisions, during which the thread serves nobody else.
const MAX_BATCH: usize = 1000;

/// As many names of limits as a message repeats.
const MAX_NAMES: usize = 20;

/// What was asked, and whether the answer is one object or an array of them.
#[derive(Debug)]
pub(crate) struct CheckRequests {
    shape: Shape,
    questions: Vec<CheckRequest>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Shape {
    One,
    Batch,
}

/// One decision asked for. Fields that are null count as left out.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckRequest {
    limit: Option<String>,
    key: Option<OneOrMany>,
    request: Option<Object<RequestFacts>>,
    cost: Option<Cost>,
}

/// A question that makes sense under the rules it was held against.
pub(crate) enum ResolvedCheck<'q> {
    /// A key of the limit of that name.
    Named { limit: &'q str, key: Vec<&'q [u8]>, cost: u64 },
    /// Whatever limits the request meets.
    Request { facts: &'q RequestFacts, cost: Option<u64> },
}

impl CheckRequests {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ErrorBody> {
        let mut json = serde_json::Deserializer::from_slice(body);
        let questions = serde_path_to_error::deserialize(&mut json).map_err(|error| {
            let path = error.path().to_string();
            refuse_json(&path, &error.into_inner())
        })?;
        json.end().map_err(|error| refuse_json(".", &error))?;
        Ok(questions)
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    /// Of each question, whether it takes nothing.
    pub(crate) fn is_peek(&self) -> impl Iterator<Item = bool> {
        self.questions.iter().map(|question| question.cost.as_ref().is_some_and(|cost| cost.0 == 0))
    }

    /// Every question held against the rules, or the refusal of the first that makes no sense.
    pub(crate) fn resolve(&self, rules: &RuleSet) -> Result<Vec<ResolvedCheck<'_>>, ErrorBody> {
        let place = |index| match self.shape {
            Shape::One => String::new(),
            Shape::Batch => format!("[{index}]."),
        };
        self.questions.iter().enumerate().map(|(index, one)| one.resolve(rules, || place(index))).collect()
    }
}

impl CheckRequest {
    /// `place` is what stands before the field's name when the question is one of several.
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
    /// Asks a gate with the rules that the question was held against.
    pub(crate) fn start(&self, gate: &Gate) -> Check {
        match self {
            Self::Named { limit, key, cost } => {
                gate.check_by_name(limit, key, *cost).expect("the rules have been asked for this limit")
            }
            Self::Request { facts, cost } => facts.start(gate, *cost),
        }
    }
}

/// What a key has too many or too few of.
fn wrong_parts(limit: &str, given: usize, parts: &[impl ToString]) -> String {
    let names = parts.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match parts.len() {
        0 => format!("is given, but {} is one count for all; leave it out", quoted(limit)),
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
    let fix = if known.is_empty() { "there are no limits".to_owned() } else { format!("use one of: {known}") };
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
                out.write_str("a question or an array of questions")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<CheckRequests, A::Error> {
                let question = CheckRequest::deserialize(MapAccessDeserializer::new(map))?;
                Ok(CheckRequests { shape: Shape::One, questions: vec![question] })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<CheckRequests, A::Error> {
                let mut questions = Vec::new();
                while let Some(Object(question)) = seq.next_element()? {
                    if questions.len() == MAX_BATCH {
                        return Err(A::Error::custom(format_args!(
                            "a batch holds at most {MAX_BATCH} questions; send the rest in another request"
                        )));
                    }
                    questions.push(question);
                }
                Ok(CheckRequests { shape: Shape::Batch, questions })
            }
        }

        deserializer.deserialize_any(OneOrSeveral)
    }
}

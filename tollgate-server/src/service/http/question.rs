//! The body of a request, understood: JSON to the hits that the limiter decides.

use std::fmt;
use std::marker::PhantomData;
use std::net::IpAddr;

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use tollgate::{Hit, Limiter};

use super::refusal::{Refusal, complaint, quoted};
use crate::builtin;

/// About a millisecond of decisions, during which the thread serves nobody else.
const MAX_BATCH: usize = 1000;

/// As many as the HTTP server itself takes from a request.
const MAX_HEADERS: usize = 100;

/// What was asked, and whether the answer is one object or an array of them.
#[derive(Debug)]
pub(crate) struct Questions {
    shape: Shape,
    questions: Vec<Question>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Shape {
    One,
    Batch,
}

/// One decision asked for. Fields that are null count as left out.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    limit: Option<String>,
    key: Option<String>,
    request: Option<Object<Facts>>,
    cost: Option<Cost>,
}

/// What is known of the request that someone wants to let through.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "clients may send every fact; the built-in limit reads the headers alone")]
struct Facts {
    method: Option<String>,
    path: Option<String>,
    host: Option<String>,
    ip: Option<IpAddr>,
    #[serde(default)]
    headers: Headers,
}

#[derive(Debug)]
struct Cost(u64);

/// A struct that is written with the names of its fields. serde by itself takes an array for it too.
#[derive(Debug)]
struct Object<T>(T);

/// Names are case-insensitive, and each stands for one value: of two, a client could not know which one counts.
#[derive(Debug, Default)]
struct Headers(HeaderMap);

impl Questions {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Refusal> {
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

    /// Every question as the limiter takes it, or the refusal of the first that makes no sense.
    pub(crate) fn hits(&self, limiter: &Limiter) -> Result<Vec<Hit<'_>>, Refusal> {
        let place = |index| match self.shape {
            Shape::One => String::new(),
            Shape::Batch => format!("[{index}]."),
        };
        self.questions.iter().enumerate().map(|(index, question)| question.hit(limiter, || place(index))).collect()
    }
}

impl Question {
    /// `place` is what stands before the field's name when the question is one of several.
    fn hit(&self, limiter: &Limiter, place: impl Fn() -> String) -> Result<Hit<'_>, Refusal> {
        let refuse = |field: &str, problem: &str| Err(invalid_question(format!("`{}{field}` {problem}", place())));
        let (name, key) = match (&self.limit, &self.key, &self.request) {
            (Some(limit), Some(key), None) => (limit.as_str(), key.as_bytes()),
            (None, None, Some(request)) => (builtin::NAME, builtin::key(&request.0.headers.0)),
            (Some(_), None, None) => return refuse("key", "is missing; send it with `limit`"),
            (None, Some(_), None) => return refuse("limit", "is missing; send it with `key`"),
            (None, None, None) => return refuse("limit", "is missing; send `limit` and `key`, or `request`"),
            (_, _, Some(_)) => return refuse("request", "excludes `limit` and `key`; send one or the other"),
        };
        let Some(id) = limiter.id(name) else {
            let known = limiter.limits().iter().map(|limit| limit.name()).collect::<Vec<_>>().join(", ");
            return Err(Refusal {
                status: StatusCode::BAD_REQUEST,
                error: "unknown_limit",
                message: format!("no limit is named {}; use one of: {known}", quoted(name)),
            });
        };
        let cost = self.cost.as_ref().map_or(1, |cost| cost.0);
        Ok(Hit::new(id, key).cost(cost))
    }
}

fn refuse_json(path: &str, error: &serde_json::Error) -> Refusal {
    let complaint = complaint(error);
    if error.is_data() {
        let place = if path == "." { "the body".to_owned() } else { quoted(path) };
        invalid_question(format!("{place}: {complaint}"))
    } else {
        Refusal {
            status: StatusCode::BAD_REQUEST,
            error: "invalid_json",
            message: format!(r#"the body is not JSON: {complaint}; send {{"limit":"{}","key":"42"}}"#, builtin::NAME),
        }
    }
}

fn invalid_question(message: String) -> Refusal {
    Refusal { status: StatusCode::BAD_REQUEST, error: "invalid_question", message }
}

impl<'de> Deserialize<'de> for Questions {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMany;

        impl<'de> Visitor<'de> for OneOrMany {
            type Value = Questions;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a question or an array of questions")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Questions, A::Error> {
                let question = Question::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Questions { shape: Shape::One, questions: vec![question] })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Questions, A::Error> {
                let mut questions = Vec::new();
                while let Some(Object(question)) = seq.next_element()? {
                    if questions.len() == MAX_BATCH {
                        return Err(A::Error::custom(format_args!(
                            "a batch holds at most {MAX_BATCH} questions; send the rest in another request"
                        )));
                    }
                    questions.push(question);
                }
                Ok(Questions { shape: Shape::Batch, questions })
            }
        }

        deserializer.deserialize_any(OneOrMany)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Fields<T> {
            type Value = Object<T>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }

        deserializer.deserialize_map(Fields(PhantomData))
    }
}

impl<'de> Deserialize<'de> for Cost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WholeNumber;

        impl Visitor<'_> for WholeNumber {
            type Value = Cost;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(out, "a whole number from 0 to {}", u64::MAX)
            }

            fn visit_u64<E>(self, cost: u64) -> Result<Cost, E> {
                Ok(Cost(cost))
            }
        }

        deserializer.deserialize_u64(WholeNumber)
    }
}

impl<'de> Deserialize<'de> for Headers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NamesAndValues;

        impl<'de> Visitor<'de> for NamesAndValues {
            type Value = Headers;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object of header names and their values")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Headers, A::Error> {
                let mut headers = HeaderMap::new();
                while let Some((name, value)) = map.next_entry::<String, String>()? {
                    if headers.len() == MAX_HEADERS {
                        return Err(A::Error::custom(format_args!(
                            "a request has at most {MAX_HEADERS} headers; send those that keys are made of"
                        )));
                    }
                    insert(&mut headers, &name, &value).map_err(A::Error::custom)?;
                }
                Ok(Headers(headers))
            }
        }

        deserializer.deserialize_map(NamesAndValues)
    }
}

fn insert(headers: &mut HeaderMap, name: &str, value: &str) -> Result<(), String> {
    let parsed = HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| format!("{} is not a header name; use letters, digits and hyphens", quoted(name)))?;
    let value = HeaderValue::from_bytes(value.as_bytes())
        .map_err(|_| format!("the value of {} has control characters; send it without", quoted(name)))?;
    match headers.insert(parsed, value) {
        None => Ok(()),
        Some(_) => Err(format!("{} is there twice; names are case-insensitive, send it once", quoted(name))),
    }
}

//! A body with one question or an array of them.

use std::fmt;
use std::marker::PhantomData;

use axum::http::StatusCode;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::values::Object;
use crate::service::error_body::{ErrorBody, field_error, parse_error};

/// About a millisecond of decisions, during which the thread serves no other client.
pub(super) const MAX_BATCH: usize = 1000;

/// The questions of a body, and whether the response is an object or an array.
#[derive(Debug)]
pub(crate) struct Batch<T> {
    pub(crate) shape: Shape,
    pub(crate) items: Vec<T>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    One,
    Batch,
}

/// A question, named in messages.
pub(crate) trait Question: DeserializeOwned {
    /// With its article, such as `a check`.
    const ONE: &'static str;
    /// Such as `checks`.
    const MANY: &'static str;
}

impl<T: Question> Batch<T> {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, ErrorBody> {
        parse(body)
    }

    /// Resolves each question, or returns the error of the first invalid one. `resolve` gets the prefix of field names,
    /// such as `[1].`.
    pub(crate) fn resolve<'q, R>(
        &'q self,
        resolve: impl Fn(&'q T, &dyn Fn() -> String) -> Result<R, ErrorBody>,
    ) -> Result<Vec<R>, ErrorBody> {
        let place = |index| match self.shape {
            Shape::One => String::new(),
            Shape::Batch => format!("[{index}]."),
        };
        self.items.iter().enumerate().map(|(index, item)| resolve(item, &|| place(index))).collect()
    }
}

/// Parses a whole body.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ErrorBody> {
    let mut json = serde_json::Deserializer::from_slice(body);
    let parsed = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        refuse_json(&path, &error.into_inner())
    })?;
    json.end().map_err(|error| refuse_json(".", &error))?;
    Ok(parsed)
}

fn refuse_json(path: &str, error: &serde_json::Error) -> ErrorBody {
    if error.is_data() {
        ErrorBody::invalid(field_error(path, error))
    } else {
        let parse_error = parse_error(error);
        ErrorBody {
            status: StatusCode::BAD_REQUEST,
            error: "invalid_json",
            message: format!(
                r#"the body is not JSON: {parse_error}: send JSON such as {{"limit":"per-user","key":"42"}}"#
            ),
        }
    }
}

impl<'de, T: Question> Deserialize<'de> for Batch<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrSeveral<T>(PhantomData<T>);

        impl<'de, T: Question> Visitor<'de> for OneOrSeveral<T> {
            type Value = Batch<T>;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(out, "{} or an array of {}", T::ONE, T::MANY)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Batch<T>, A::Error> {
                let item = T::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Batch { shape: Shape::One, items: vec![item] })
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Batch<T>, A::Error> {
                let mut items = Vec::new();
                while let Some(Object(item)) = seq.next_element()? {
                    if items.len() == MAX_BATCH {
                        return Err(A::Error::custom(format_args!(
                            "a batch holds at most {MAX_BATCH} {}: send the rest in another request",
                            T::MANY
                        )));
                    }
                    items.push(item);
                }
                Ok(Batch { shape: Shape::Batch, items })
            }
        }

        deserializer.deserialize_any(OneOrSeveral(PhantomData))
    }
}

//! A single value or a list.

use std::borrow::Cow;
use std::ops::Deref;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

/// A single value or a list of at least one: `path: /a` or `path: [/a, /b]`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(from = "Written<T>", bound = "T: Deserialize<'de>")]
pub struct OneOrMany<T>(Vec<T>);

#[derive(Deserialize)]
#[serde(untagged)]
enum Written<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> From<Written<T>> for OneOrMany<T> {
    fn from(values: Written<T>) -> Self {
        match values {
            Written::One(value) => Self(vec![value]),
            Written::Many(values) => Self(values),
        }
    }
}

impl<T> Deref for OneOrMany<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<'a, T> IntoIterator for &'a OneOrMany<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl<T: JsonSchema> JsonSchema for OneOrMany<T> {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        format!("OneOrMany_{}", T::schema_name()).into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let one = generator.subschema_for::<T>();
        json_schema!({ "anyOf": [one, { "type": "array", "items": one, "minItems": 1 }] })
    }
}

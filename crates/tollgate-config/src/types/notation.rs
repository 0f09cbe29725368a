//! Short notations, a single value in place of a list or a map; defaults; and the bounds of durations and sizes.

use std::borrow::Cow;
use std::ops::Deref;
use std::time::Duration;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::Deserialize;

use crate::forms::DurationText;

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

/// A default of a duration.
pub(super) fn seconds<const N: u64>() -> DurationText {
    DurationText::new(Duration::from_secs(N))
}

/// A default of a number.
pub(super) fn number<T: From<u8>, const N: u8>() -> T {
    N.into()
}

/// Adds the bounds of a duration or a size to its schema, where `shape` finds them.
pub(super) fn between(least: &'static str, most: &'static str) -> impl FnMut(&mut Schema) {
    move |schema| {
        at_least(least)(schema);
        schema.insert("formatMaximum".into(), most.into());
    }
}

/// Adds the bounds of a wait to its schema. No request, connection or health check waits longer than a day, so a longer one
/// is a mistake.
pub(super) fn wait() -> impl FnMut(&mut Schema) {
    between("1ms", "24h")
}

/// Adds the lower bound of a duration or a size to its schema.
pub(super) fn at_least(least: &'static str) -> impl FnMut(&mut Schema) {
    move |schema| {
        schema.insert("formatMinimum".into(), least.into());
    }
}

/// Adds the short notation to the schema of a map: the value of `key` alone.
pub(super) fn or_value_of(key: &'static str) -> impl FnMut(&mut Schema) {
    move |schema| {
        let mut map = std::mem::take(schema);
        let description = map.remove("description");
        let properties = map.get("properties").and_then(|properties| properties.get(key));
        let mut value = properties.cloned().unwrap_or_default();
        if let Some(value) = value.as_object_mut() {
            value.remove("description");
        }
        *schema = json_schema!({ "anyOf": [value, map] });
        if let Some(description) = description {
            schema.insert("description".into(), description);
        }
    }
}

/// Implements `Deserialize` for a map that can be written as the value of one of its keys: `store: memory` is `store: {
/// url: memory }`.
macro_rules! or_value {
    ($rule:ty, $key:literal) => {
        impl<'de> serde::Deserialize<'de> for $rule {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let map = match <serde_json::Value as serde::Deserialize>::deserialize(from)? {
                    map @ serde_json::Value::Object(_) => map,
                    value => serde_json::json!({ $key: value }),
                };
                // The function of the type, which `remote = "Self"` derives.
                Self::deserialize(map).map_err(serde::de::Error::custom)
            }
        }
    };
}

pub(super) use or_value;

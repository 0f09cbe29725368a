//! Values in the bodies of requests, each with its own error message.

use std::fmt;
use std::marker::PhantomData;

use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// More than the parts of a key or the lines of one header.
const MAX_STRINGS: usize = 100;

/// A number of units.
#[derive(Debug, JsonSchema)]
pub(crate) struct Units(pub(crate) u64);

/// A struct written as an object. serde alone would also accept an array.
#[derive(Debug)]
pub(crate) struct Object<T>(pub(crate) T);

/// A string, or a list of them.
#[derive(Debug)]
pub(crate) struct OneOrMany(Vec<String>);

// The schema of `OneOrMany`.
/// A string, or a list of strings.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "only its schema is used")]
pub(crate) enum StringOrStrings {
    String(String),
    Strings(Vec<String>),
}

impl OneOrMany {
    pub(crate) fn new(strings: Vec<String>) -> Self {
        Self(strings)
    }

    pub(crate) fn as_slice(&self) -> &[String] {
        &self.0
    }
}

impl<'de> Deserialize<'de> for OneOrMany {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Strings;

        impl<'de> Visitor<'de> for Strings {
            type Value = OneOrMany;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("a string or a list of strings")
            }

            fn visit_str<E>(self, text: &str) -> Result<OneOrMany, E> {
                Ok(OneOrMany(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<OneOrMany, A::Error> {
                let mut strings = Vec::new();
                while let Some(text) = seq.next_element()? {
                    if strings.len() == MAX_STRINGS {
                        return Err(A::Error::custom(format_args!(
                            "a list holds at most {MAX_STRINGS} strings: send fewer"
                        )));
                    }
                    strings.push(text);
                }
                Ok(OneOrMany(strings))
            }
        }

        deserializer.deserialize_any(Strings)
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

impl<'de> Deserialize<'de> for Units {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WholeNumber;

        impl Visitor<'_> for WholeNumber {
            type Value = Units;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(out, "a whole number from 0 to {}", u64::MAX)
            }

            fn visit_u64<E>(self, units: u64) -> Result<Units, E> {
                Ok(Units(units))
            }
        }

        deserializer.deserialize_u64(WholeNumber)
    }
}

//! Strings with a syntax: durations, rates, addresses, globs, key parts.
//!
//! Each syntax is a type with one constructor, `read`. Its [`Syntax`] has the pattern for the JSON Schema, so that
//! editors reject the same texts. A pattern may accept a text that `read` rejects, never the other way round.

mod key;
mod net;
mod quantity;
mod request;
mod text;

use serde_json::{Value, json};

use super::problem::InvalidValue;

pub use self::{key::*, net::*, quantity::*, request::*, text::*};

/// A syntax of strings, which `shape` finds by its `format` in the schema.
pub(super) struct Syntax {
    pub(super) format: &'static str,
    /// A noun phrase for messages.
    pub(super) noun: &'static str,
    /// A valid text.
    pub(super) example: &'static str,
    /// A regular expression that JavaScript supports too.
    pattern: &'static str,
    pub(super) check: fn(&str) -> Result<(), InvalidValue>,
}

impl Syntax {
    pub(super) fn schema(&self) -> Value {
        json!({ "type": "string", "format": self.format, "pattern": self.pattern, "examples": [self.example] })
    }
}

/// Returns the syntax with that `format`.
pub(super) fn by_format(format: &str) -> Option<&'static Syntax> {
    ALL.iter().find(|known| known.format == format)
}

/// Returns a number in the order of the values, for the syntaxes that have bounds.
pub(super) fn magnitude(format: &str, text: &str) -> Option<u128> {
    match format {
        "span" => Some(DurationText::read(text).ok()?.duration().as_nanos()),
        "bytes" => Some(ByteSize::read(text).ok()?.bytes().into()),
        _ => None,
    }
}

/// Describes the syntax of a type that has a constructor `read`, and implements `Deserialize` and `JsonSchema` for it.
/// `text` declares the type too: it keeps its text.
macro_rules! form {
    ($(#[$doc:meta])* text $form:ident $syntax:tt) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $form(String);

        impl $form {
            /// Returns the text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        form! { $form $syntax }
    };
    ($form:ident { format: $format:literal, noun: $noun:literal, example: $example:literal, pattern: $pattern:literal }) => {
        impl $form {
            pub(crate) const SYNTAX: super::Syntax = super::Syntax {
                format: $format,
                noun: $noun,
                example: $example,
                pattern: $pattern,
                check: |text| Self::read(text).map(drop),
            };
        }

        impl<'de> serde::Deserialize<'de> for $form {
            fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let text = <String as serde::Deserialize>::deserialize(from)?;
                Self::read(&text).map_err(serde::de::Error::custom)
            }
        }

        impl schemars::JsonSchema for $form {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                $format.into()
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::Schema::try_from(Self::SYNTAX.schema()).unwrap_or_default()
            }
        }
    };
}

macro_rules! all {
    ($($form:ident)*) => {
        const ALL: &[Syntax] = &[$($form::SYNTAX),*];
    };
}

all! {
    Address ByteSize Cidr ContentType CostText DurationText Expression HeaderName HeaderSource HostGlob KeyPart KeyPrefix
    LimitName MethodName PathGlob PathText Pattern PlanSource RateText SettleSource StatusClass StoreName StoreUrl
    TokenSource Upstream
}

/// Returns whether a text matches the pattern of its type, for a type that the pattern describes completely.
macro_rules! matches_pattern {
    ($form:ty, $text:expr) => {{
        static PATTERN: std::sync::LazyLock<Option<regex::Regex>> =
            std::sync::LazyLock::new(|| regex::Regex::new(<$form>::SYNTAX.pattern).ok());
        PATTERN.as_ref().is_some_and(|pattern| pattern.is_match($text))
    }};
}

use {form, matches_pattern};

/// Returns the known word with the smallest edit distance, if it is probably a typo: at most one edit in a short word,
/// two in a longer one, none in a single letter. Case is ignored.
pub(super) fn nearest<'w>(word: &str, known: impl IntoIterator<Item = &'w str>) -> Option<&'w str> {
    /// Longer than any known word with a typo. Comparing costs the product of both lengths.
    const MAX_WORD: usize = 64;
    if word.len() > MAX_WORD {
        return None;
    }
    let word = word.to_lowercase();
    let near = match word.chars().count() {
        0 | 1 => 0,
        2 | 3 => 1,
        _ => 2,
    };
    let far = |known: &str| strsim::osa_distance(&word, &known.to_lowercase());
    known.into_iter().map(|known| (far(known), known)).filter(|(far, _)| *far <= near).min().map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_example_is_of_its_form() {
        for known in ALL {
            assert!((known.check)(known.example).is_ok(), "{} {}", known.format, known.example);
        }
    }

    #[test]
    fn only_near_words_are_suggested() {
        assert_eq!(nearest("capcity", ["name", "capacity"]), Some("capacity"));
        assert_eq!(nearest("Limit", ["limit"]), Some("limit"));
        assert_eq!(nearest("eu", ["ip"]), None);
        assert_eq!(nearest("i", ["ip"]), None);
        assert_eq!(nearest("banana", ["ban"]), None);
    }
}

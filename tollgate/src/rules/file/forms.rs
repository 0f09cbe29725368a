//! Strings with a syntax: durations, rates, addresses, globs, key parts.
//!
//! Each syntax is a type with one constructor, [`Form::read`]. It also provides the pattern for the JSON Schema, so
//! that editors reject the same texts. A pattern may accept a text that `read` rejects, never the other way round.

mod key;
mod net;
mod quantity;
mod request;
mod text;

use serde_json::{Value, json};

use super::problem::InvalidValue;

pub use self::{key::*, net::*, quantity::*, request::*, text::*};

/// A type that is written as a string with a syntax.
pub(super) trait Form: Sized {
    /// The `format` in the schema.
    const FORMAT: &'static str;
    /// The `pattern` in the schema: a regular expression that JavaScript supports too.
    const PATTERN: &'static str;
    /// A noun phrase for messages.
    const NOUN: &'static str;
    /// A valid example.
    const EXAMPLE: &'static str;

    fn read(text: &str) -> Result<Self, InvalidValue>;

    /// Returns a number in the order of the values, for forms that have bounds.
    fn magnitude(&self) -> u128 {
        0
    }
}

/// A form that `shape` finds by its `format` in the schema.
pub(super) struct FormInfo {
    pub(super) format: &'static str,
    pub(super) noun: &'static str,
    pub(super) example: &'static str,
    /// Reads a text, and returns its [`Form::magnitude`].
    pub(super) read: fn(&str) -> Result<u128, InvalidValue>,
}

/// Returns the form with that `format`.
pub(super) fn by_format(format: &str) -> Option<&'static FormInfo> {
    ALL.iter().find(|known| known.format == format)
}

pub(super) fn schema_of<F: Form>() -> Value {
    json!({ "type": "string", "format": F::FORMAT, "pattern": F::PATTERN, "examples": [F::EXAMPLE] })
}

/// Lists the forms, and implements `Deserialize` and `JsonSchema` for them.
macro_rules! forms {
    ($($form:ty),* $(,)?) => {
        const ALL: &[FormInfo] = &[$(FormInfo {
            format: <$form>::FORMAT,
            noun: <$form>::NOUN,
            example: <$form>::EXAMPLE,
            read: |text| <$form>::read(text).map(|value| value.magnitude()),
        }),*];

        $(
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
                    Self::FORMAT.into()
                }

                fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                    schemars::Schema::try_from(schema_of::<Self>()).unwrap_or_default()
                }
            }
        )*
    };
}

forms!(
    Address,
    ByteSize,
    Cidr,
    ContentType,
    CostText,
    DurationText,
    Expression,
    HeaderName,
    HeaderSource,
    HostGlob,
    KeyPart,
    KeyPrefix,
    LimitName,
    MethodName,
    PathGlob,
    PathText,
    Pattern,
    PlanSource,
    RateText,
    SettleSource,
    StatusClass,
    StoreName,
    StoreUrl,
    TokenSource,
    Upstream,
);

/// Declares types of forms that keep their text.
macro_rules! texts {
    ($($(#[$doc:meta])* $form:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $form(String);

        impl $form {
            /// Returns the text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
    )*};
}

/// Returns whether a text matches the pattern of its form, for a form that the pattern describes completely.
macro_rules! matches_pattern {
    ($form:ty, $text:expr) => {{
        static PATTERN: std::sync::LazyLock<Option<regex::Regex>> =
            std::sync::LazyLock::new(|| regex::Regex::new(<$form>::PATTERN).ok());
        PATTERN.as_ref().is_some_and(|pattern| pattern.is_match($text))
    }};
}

use {matches_pattern, texts};

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
            assert!((known.read)(known.example).is_ok(), "{} {}", known.format, known.example);
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

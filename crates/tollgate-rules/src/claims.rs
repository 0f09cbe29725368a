//! Claims of a token as text.

use std::borrow::Cow;

use serde_json::{Map, Value};

/// Returns a claim as text: strings unchanged, numbers and booleans in JSON syntax. Lists, objects and null return
/// `None`, because their text does not identify a client reliably.
///
/// If no claim has the whole name, dots select members of objects: `realm.plan` is the claim `realm.plan` or else
/// `plan` in the object `realm`.
pub(super) fn text<'m>(claims: &'m Map<String, Value>, name: &str) -> Option<Cow<'m, str>> {
    match find(claims, name)? {
        Value::String(text) => Some(Cow::Borrowed(text)),
        Value::Number(number) => Some(Cow::Owned(number.to_string())),
        Value::Bool(true) => Some(Cow::Borrowed("true")),
        Value::Bool(false) => Some(Cow::Borrowed("false")),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// Names can contain dots themselves, such as `https://example.com/claims`, so every dot may be the separator.
fn find<'a>(claims: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    if let Some(value) = claims.get(name) {
        return Some(value);
    }
    name.match_indices('.').find_map(|(dot, _)| {
        let (outer, inner) = (name.get(..dot)?, name.get(dot + 1..)?);
        find(claims.get(outer)?.as_object()?, inner)
    })
}

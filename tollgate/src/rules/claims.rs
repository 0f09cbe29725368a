//! What a token says of whoever sent it.

use std::borrow::Cow;

use serde_json::{Map, Value};

/// A claim as text: strings as they are, numbers and booleans as JSON writes them. Lists, objects and null are none,
/// for no text of them would be one client's for sure.
///
/// A name with dots looks into objects when there is no claim of the whole name: `realm.plan` is first the claim
/// `realm.plan`, and then `plan` in the object `realm`.
pub(super) fn text<'m>(claims: &'m Map<String, Value>, name: &str) -> Option<Cow<'m, str>> {
    match find(claims, name)? {
        Value::String(text) => Some(Cow::Borrowed(text)),
        Value::Number(number) => Some(Cow::Owned(number.to_string())),
        Value::Bool(true) => Some(Cow::Borrowed("true")),
        Value::Bool(false) => Some(Cow::Borrowed("false")),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// Names have dots of their own, such as `https://example.com/claims`, so each dot may be the one that divides.
fn find<'a>(claims: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    if let Some(value) = claims.get(name) {
        return Some(value);
    }
    name.match_indices('.').find_map(|(dot, _)| {
        let (outer, inner) = (name.get(..dot)?, name.get(dot + 1..)?);
        find(claims.get(outer)?.as_object()?, inner)
    })
}

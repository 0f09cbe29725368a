//! What a verified token says. Only [`super::Verifier`] makes these.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::http::TokenError;
use crate::units::Timestamp;

/// The claims of a token whose signature is good. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Claims(Arc<Read>);

#[derive(Debug)]
struct Read {
    claims: Arc<Map<String, Value>>,
    not_before: Option<Timestamp>,
    expires: Option<Timestamp>,
}

impl Claims {
    /// The claims of a payload, if it is an object whose times are times.
    pub(super) fn read(payload: &[u8]) -> Option<Self> {
        let claims: Map<String, Value> = serde_json::from_slice(payload).ok()?;
        let not_before = time(&claims, "nbf")?;
        let expires = time(&claims, "exp")?;
        Some(Self(Arc::new(Read { claims: Arc::new(claims), not_before, expires })))
    }

    /// Whether that moment is before `exp` and not before `nbf`, give or take the leeway.
    pub(super) fn are_current(&self, now: Timestamp, leeway: Duration) -> Result<(), TokenError> {
        let Read { not_before, expires, .. } = &*self.0;
        if expires.is_some_and(|end| now >= end.saturating_add(leeway)) {
            return Err(TokenError::Expired);
        }
        if not_before.is_some_and(|start| now.saturating_add(leeway) < start) {
            return Err(TokenError::NotYetValid);
        }
        Ok(())
    }

    /// Whether the claim is one of these texts, or a list that has one of them.
    pub(super) fn name_one_of(&self, claim: &str, wanted: &[String]) -> bool {
        let is_wanted = |value: &Value| value.as_str().is_some_and(|text| wanted.iter().any(|one| one == text));
        match self.0.claims.get(claim) {
            Some(Value::Array(values)) => values.iter().any(is_wanted),
            Some(value) => is_wanted(value),
            None => false,
        }
    }

    /// All claims.
    pub(crate) fn map(&self) -> Arc<Map<String, Value>> {
        self.0.claims.clone()
    }
}

/// A time that is there must be a number of seconds; the outer none says that it is not.
fn time(claims: &Map<String, Value>, name: &str) -> Option<Option<Timestamp>> {
    let Some(value) = claims.get(name) else { return Some(None) };
    let number = value.as_number()?;
    let moment = match (number.as_u64(), number.as_f64()) {
        (Some(seconds), _) => Timestamp::from_secs(seconds),
        // Before the epoch, in fractions, or beyond all times: the cast goes to the nearest that there is.
        (None, Some(seconds)) => Timestamp::from_micros((seconds * 1e6) as u64),
        (None, None) => return None,
    };
    Some(Some(moment))
}

//! The claims of a verified token. Only [`super::Verifier`] creates them.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use tollgate::Timestamp;
use tollgate_http::TokenError;

/// The claims of a token with a valid signature. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Claims(Arc<ParsedClaims>);

#[derive(Debug)]
struct ParsedClaims {
    claims: Arc<Map<String, Value>>,
    not_before: Option<Timestamp>,
    expires: Option<Timestamp>,
}

impl Claims {
    /// Parses a payload, which must be an object with valid times.
    pub(super) fn read(payload: &[u8]) -> Option<Self> {
        let claims: Map<String, Value> = serde_json::from_slice(payload).ok()?;
        let not_before = time(&claims, "nbf")?;
        let expires = time(&claims, "exp")?;
        Some(Self(Arc::new(ParsedClaims { claims: Arc::new(claims), not_before, expires })))
    }

    /// Checks `exp` and `nbf` at a given time, with leeway.
    pub(super) fn check_times(&self, now: Timestamp, leeway: Duration) -> Result<(), TokenError> {
        let ParsedClaims { not_before, expires, .. } = &*self.0;
        if expires.is_some_and(|end| now >= end.saturating_add(leeway)) {
            return Err(TokenError::Expired);
        }
        if not_before.is_some_and(|start| now.saturating_add(leeway) < start) {
            return Err(TokenError::NotYetValid);
        }
        Ok(())
    }

    /// Returns `true` if a claim is one of these texts, or a list that contains one.
    pub(super) fn contain_one_of(&self, claim: &str, wanted: &[String]) -> bool {
        let is_wanted = |value: &Value| value.as_str().is_some_and(|text| wanted.iter().any(|one| one == text));
        match self.0.claims.get(claim) {
            Some(Value::Array(values)) => values.iter().any(is_wanted),
            Some(value) => is_wanted(value),
            None => false,
        }
    }

    /// Returns all claims.
    pub fn map(&self) -> Arc<Map<String, Value>> {
        self.0.claims.clone()
    }
}

/// Parses an optional time. The outer `None` means that it is present but not a number of seconds.
fn time(claims: &Map<String, Value>, name: &str) -> Option<Option<Timestamp>> {
    let Some(value) = claims.get(name) else { return Some(None) };
    let number = value.as_number()?;
    let moment = match (number.as_u64(), number.as_f64()) {
        (Some(seconds), _) => Timestamp::from_secs(seconds),
        // Before the epoch, in fractions, or out of range: the cast saturates.
        (None, Some(seconds)) => Timestamp::from_micros((seconds * 1e6) as u64),
        (None, None) => return None,
    };
    Some(Some(moment))
}

//! Token errors, and the challenge that asks for another token (RFC 6750).

use std::fmt;

use ::http::HeaderValue;

/// The reason that the bearer token of a request was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TokenError {
    /// The request carries no token.
    Missing,
    /// The token is not a JWT, is too long, or requires extensions that are not supported.
    Malformed,
    /// No key is configured for the token's algorithm.
    WrongAlgorithm,
    /// The token names a key that is not configured.
    UnknownKey,
    /// The signature does not verify.
    BadSignature,
    /// `exp` has passed.
    Expired,
    /// The time in `nbf` has not been reached.
    NotYetValid,
    /// `iss` is not the configured issuer.
    WrongIssuer,
    /// `aud` contains none of the configured audiences.
    WrongAudience,
}

impl TokenError {
    /// All errors.
    pub const ALL: [Self; 9] = [
        Self::Missing,
        Self::Malformed,
        Self::WrongAlgorithm,
        Self::UnknownKey,
        Self::BadSignature,
        Self::Expired,
        Self::NotYetValid,
        Self::WrongIssuer,
        Self::WrongAudience,
    ];

    /// Returns the error code, for logs and metrics.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Malformed => "malformed",
            Self::WrongAlgorithm => "wrong_algorithm",
            Self::UnknownKey => "unknown_key",
            Self::BadSignature => "bad_signature",
            Self::Expired => "expired",
            Self::NotYetValid => "not_yet_valid",
            Self::WrongIssuer => "wrong_issuer",
            Self::WrongAudience => "wrong_audience",
        }
    }

    /// Returns the error code of a refusal, the `error` member of its body.
    pub(super) const fn refusal_code(self) -> &'static str {
        match self {
            Self::Missing => "token_missing",
            Self::Malformed => "token_malformed",
            Self::WrongAlgorithm => "token_wrong_algorithm",
            Self::UnknownKey => "token_unknown_key",
            Self::BadSignature => "token_bad_signature",
            Self::Expired => "token_expired",
            Self::NotYetValid => "token_not_yet_valid",
            Self::WrongIssuer => "token_wrong_issuer",
            Self::WrongAudience => "token_wrong_audience",
        }
    }

    /// Returns a description for people.
    #[must_use]
    pub const fn description(self) -> &'static str {
        match self {
            Self::Missing => "The request carries no token.",
            Self::Malformed => "The token is malformed.",
            Self::WrongAlgorithm => "The token is signed with an algorithm that is not accepted.",
            Self::UnknownKey => "The token is signed with an unknown key.",
            Self::BadSignature => "The signature of the token is invalid.",
            Self::Expired => "The token has expired.",
            Self::NotYetValid => "The token is not valid yet.",
            Self::WrongIssuer => "The token is from another issuer.",
            Self::WrongAudience => "The token is for another audience.",
        }
    }
}

impl fmt::Display for TokenError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.description())
    }
}

impl std::error::Error for TokenError {}

/// The values of `WWW-Authenticate`, one for each [`TokenError`].
#[derive(Clone, Debug)]
pub(crate) struct Challenge([HeaderValue; TokenError::ALL.len()]);

impl Challenge {
    /// Formats the challenges for a realm. Returns `None` if the realm has characters that would have to be escaped in
    /// a quoted string.
    #[cfg_attr(not(feature = "file"), allow(dead_code, reason = "tokens come with the rule file"))]
    pub(crate) fn new(realm: Option<&str>) -> Option<Self> {
        let is_plain =
            |text: &str| text.bytes().all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'"' | b'\\'));
        if !realm.is_none_or(is_plain) {
            return None;
        }
        let mut values = TokenError::ALL.map(|_| HeaderValue::from_static("Bearer"));
        for (value, error) in values.iter_mut().zip(TokenError::ALL) {
            *value = HeaderValue::try_from(challenge(realm, error)).ok()?;
        }
        Some(Self(values))
    }

    pub(super) fn value(&self, error: TokenError) -> HeaderValue {
        self.0[error as usize].clone()
    }
}

/// Formats a challenge. A request without a token is not in error, so its challenge has no error code (RFC 6750,
/// section 3.1).
pub(super) fn challenge(realm: Option<&str>, error: TokenError) -> String {
    let realm = realm.map(|realm| format!("realm=\"{realm}\""));
    let details = match error {
        TokenError::Missing => None,
        other => Some(format!("error=\"invalid_token\", error_description=\"{}\"", other.description())),
    };
    match [realm, details].into_iter().flatten().collect::<Vec<_>>().join(", ") {
        none if none.is_empty() => "Bearer".to_owned(),
        parameters => format!("Bearer {parameters}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_challenge_names_the_error_unless_there_was_no_token() {
        let challenge_of =
            |realm: Option<&str>, error| Challenge::new(realm).unwrap().value(error).to_str().unwrap().to_owned();
        assert_eq!(challenge_of(None, TokenError::Missing), "Bearer");
        assert_eq!(challenge_of(Some("api"), TokenError::Missing), "Bearer realm=\"api\"");
        assert_eq!(
            challenge_of(None, TokenError::Expired),
            "Bearer error=\"invalid_token\", error_description=\"The token has expired.\""
        );
        assert_eq!(
            challenge_of(Some("api"), TokenError::BadSignature),
            "Bearer realm=\"api\", error=\"invalid_token\", error_description=\"The signature of the token is invalid.\""
        );
        for error in TokenError::ALL {
            assert!(error.refusal_code().ends_with(error.code()));
        }
        for realm in ["a\"b", "a\\b", "a\r\nx: y", "ä"] {
            assert!(Challenge::new(Some(realm)).is_none(), "{realm}");
        }
    }
}

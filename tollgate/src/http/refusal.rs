//! Reasons to refuse a request, with their status, error code and problem type.

use std::time::Duration;

use ::http::StatusCode;

use super::token::TokenError;
use crate::decision::{Decision, Source};

/// The reason that a request is refused. None is a 500: a limiter that cannot decide returns 503.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// A limit is exceeded: 429.
    Limited,
    /// The client is banned for a while, because it was denied too often or by an operator, regardless of the remaining
    /// quota: 429.
    Banned {
        /// The time until the ban ends.
        retry_after: Duration,
    },
    /// The client is on a block list: 403.
    Blocked,
    /// The request lacks a part of the key, and the limit requires it: 403.
    KeyMissing {
        /// The missing part, as written in the rule file: `header:x-user-id`.
        part: String,
    },
    /// The request has no valid token, and the limit requires a claim: 403, or 401 if the rules challenge the client.
    TokenInvalid {
        /// The problem with the token.
        error: TokenError,
        /// `true` for a 401 response with `WWW-Authenticate`.
        challenge: bool,
    },
    /// A part of the request that the limit reads is ambiguous: 400.
    Unreadable(Box<UnreadableRequest>),
    /// The store failed, and the limit denies in that case: 503.
    StoreUnavailable,
}

/// The ambiguous part of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UnreadableRequest {
    /// The reason as one word, also used in metrics.
    pub reason: &'static str,
    /// The problem and how to fix it.
    pub message: String,
}

impl UnreadableRequest {
    /// Creates the refusal of an ambiguous request.
    #[must_use]
    pub fn new(reason: &'static str, message: String) -> Self {
        Self { reason, message }
    }
}

impl Refusal {
    /// Returns the reason that a decision denies, or `None` if it allows.
    #[must_use]
    pub fn of(decision: &Decision) -> Option<Self> {
        match (decision.is_allowed(), decision.source()) {
            (true, _) => None,
            (false, Source::Policy) => Some(Self::StoreUnavailable),
            (false, _) => Some(Self::Limited),
        }
    }

    /// Returns the status of the response.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limited | Self::Banned { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::TokenInvalid { challenge: true, .. } => StatusCode::UNAUTHORIZED,
            Self::Blocked | Self::KeyMissing { .. } | Self::TokenInvalid { .. } => StatusCode::FORBIDDEN,
            Self::Unreadable(_) => StatusCode::BAD_REQUEST,
            Self::StoreUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns the error code, the `error` member of the JSON body.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Limited => "rate_limit_exceeded",
            Self::Banned { .. } => "banned",
            Self::Blocked => "blocked",
            Self::KeyMissing { .. } => "key_missing",
            Self::TokenInvalid { error, .. } => error.refusal_code(),
            Self::Unreadable(_) => "bad_request",
            Self::StoreUnavailable => "store_unavailable",
        }
    }

    /// Returns the gRPC status code.
    pub(super) fn grpc_code(&self) -> i32 {
        match self {
            Self::Limited | Self::Banned { .. } => 8,         // RESOURCE_EXHAUSTED
            Self::TokenInvalid { challenge: true, .. } => 16, // UNAUTHENTICATED
            Self::Blocked | Self::KeyMissing { .. } | Self::TokenInvalid { .. } => 7, // PERMISSION_DENIED
            Self::Unreadable(_) => 3,                         // INVALID_ARGUMENT
            Self::StoreUnavailable => 14,                     // UNAVAILABLE
        }
    }

    /// Returns the problem type of RFC 9457 and its title, as defined by draft-ietf-httpapi-ratelimit-headers. Reasons
    /// that it does not cover have the title of the status.
    pub(super) fn problem_type(&self) -> (&'static str, &'static str) {
        match self {
            Self::Limited => (
                "https://iana.org/assignments/http-problem-types#quota-exceeded",
                "Request cannot be satisfied as assigned quota has been exceeded",
            ),
            Self::Banned { .. } => (
                "https://iana.org/assignments/http-problem-types#abnormal-usage-detected",
                "Request not satisfied due to detection of abnormal request pattern",
            ),
            Self::StoreUnavailable => (
                "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
                "Request cannot be satisfied due to temporary server capacity constraints",
            ),
            Self::TokenInvalid { challenge: true, .. } => ("about:blank", "Unauthorized"),
            Self::Blocked | Self::KeyMissing { .. } | Self::TokenInvalid { .. } => ("about:blank", "Forbidden"),
            Self::Unreadable(_) => ("about:blank", "Bad Request"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decision::{Admission, Verdict};
    use crate::units::Timestamp;

    fn decided(admission: Admission, source: Source) -> Decision {
        let verdict = Verdict { admission, remaining: 0, reset_after: 1_000_000 };
        Decision { source, verdict, ..Decision::without_limit(Timestamp::EPOCH) }
    }

    #[test]
    fn a_store_that_fails_is_not_a_limit_that_is_spent() {
        let denied = Admission::Denied { retry_after: 1_000_000 };
        for source in [Source::Store, Source::DenialCache, Source::Lease, Source::Local] {
            assert_eq!(Refusal::of(&decided(denied, source)), Some(Refusal::Limited), "{source:?}");
        }
        assert_eq!(Refusal::of(&decided(denied, Source::Policy)), Some(Refusal::StoreUnavailable));
        assert_eq!(Refusal::of(&decided(Admission::NeverFits, Source::Store)), Some(Refusal::Limited));
        assert_eq!(Refusal::of(&decided(Admission::Allowed { delay: 0 }, Source::Policy)), None);
    }

    #[test]
    fn a_store_that_fails_says_when_to_retry_and_not_what_is_left() {
        use crate::http::{Body, Families, Policy, RefusalBuilder};
        use crate::{Limit, TokenBucket};

        let policy = Policy::new(&Limit::new("per-user", TokenBucket::default()).unwrap(), Families::default());
        let decision = decided(Admission::Denied { retry_after: 1_500_000 }, Source::Policy);
        let refusal = Refusal::of(&decision).unwrap();
        let response = RefusalBuilder::new(&refusal).limit(&policy).decision(&decision);
        let response = response.response(&Body::Json, &::http::HeaderMap::new());
        assert_eq!(response.status(), 503);
        assert_eq!(response.headers()["retry-after"], "2");
        assert!(!response.headers().keys().any(|name| name.as_str().contains("ratelimit")));
        assert_eq!(
            &response.body()[..],
            br#"{"error":"store_unavailable","message":"The limit cannot be checked at the moment. Please retry after 2 seconds.","retry_after":2}"#
        );

        let mut headers = ::http::HeaderMap::new();
        policy.write(&decision, &mut headers);
        assert_eq!(headers.len(), 1, "{headers:?}");
        assert_eq!(headers["retry-after"], "2");
    }
}

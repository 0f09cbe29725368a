//! Reasons to refuse a request, with their status, error code and problem type; token errors, and the challenge that asks
//! for another token (RFC 6750); and the parts of a refusal, from which `response.rs` and `grpc.rs` build the response.

use std::fmt;
use std::time::Duration;

use ::http::{HeaderValue, StatusCode};
use tollgate::{Decision, Source};

use super::policy::Policy;
use super::wait_seconds;

/// The reason that a request is refused. Only a mistake in the service itself is a 500: a limiter that cannot decide
/// returns 503.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// A limit is exceeded: 429.
    Limited,
    /// Units that are reserved and not settled yet leave too little of a limit: 429. They may be given back.
    Pending,
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
    /// The limit needs the client's address, and the service does not pass it to its
    /// layer of `tollgate-tower`: 500.
    ClientAddressUnknown,
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
            (false, _) if decision.is_pending() => Some(Self::Pending),
            (false, _) => Some(Self::Limited),
        }
    }

    /// Returns the status of the response.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limited | Self::Pending | Self::Banned { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::TokenInvalid { challenge: true, .. } => StatusCode::UNAUTHORIZED,
            Self::Blocked | Self::KeyMissing { .. } | Self::TokenInvalid { .. } => StatusCode::FORBIDDEN,
            Self::Unreadable(_) => StatusCode::BAD_REQUEST,
            Self::StoreUnavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::ClientAddressUnknown => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns the error code, the `error` member of the JSON body.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Limited | Self::Pending => "rate_limit_exceeded",
            Self::Banned { .. } => "banned",
            Self::Blocked => "blocked",
            Self::KeyMissing { .. } => "key_missing",
            Self::TokenInvalid { error, .. } => error.refusal_code(),
            Self::Unreadable(_) => "bad_request",
            Self::StoreUnavailable => "store_unavailable",
            Self::ClientAddressUnknown => "client_address_unknown",
        }
    }

    /// Returns the gRPC status code.
    pub(super) fn grpc_code(&self) -> i32 {
        match self {
            Self::Limited | Self::Pending | Self::Banned { .. } => 8, // RESOURCE_EXHAUSTED
            Self::TokenInvalid { challenge: true, .. } => 16,         // UNAUTHENTICATED
            Self::Blocked | Self::KeyMissing { .. } | Self::TokenInvalid { .. } => 7, // PERMISSION_DENIED
            Self::Unreadable(_) => 3,                                 // INVALID_ARGUMENT
            Self::StoreUnavailable => 14,                             // UNAVAILABLE
            Self::ClientAddressUnknown => 13,                         // INTERNAL
        }
    }

    /// Returns the problem type of RFC 9457 and its title, as defined by draft-ietf-httpapi-ratelimit-headers. Reasons
    /// that it does not cover have the title of the status.
    pub(super) fn problem_type(&self) -> (&'static str, &'static str) {
        match self {
            Self::Limited | Self::Pending => (
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
            Self::ClientAddressUnknown => ("about:blank", "Internal Server Error"),
        }
    }
}

/// The reason of a denial that only pending units cause, as one word.
pub(super) const PENDING: &str = "pending";

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
    const fn refusal_code(self) -> &'static str {
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
pub struct Challenge([HeaderValue; TokenError::ALL.len()]);

impl Challenge {
    /// Formats the challenges for a realm. Returns `None` if the realm has characters that would have to be escaped in
    /// a quoted string.
    pub fn new(realm: Option<&str>) -> Option<Self> {
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

/// The mistake and its fix, as a response and the log describe them.
pub const UNKNOWN_ADDRESS: &str = "The service does not know the address of its clients, which a limit needs: \
    serve it with into_make_service_with_connect_info::<SocketAddr>(), or set RateLimitLayer::peer_address.";

/// The wait after a store failure if the decision has none. A store is usually reachable again, and known to be, after
/// about a second.
const STORE_FAILURE_WAIT: Duration = Duration::from_secs(1);

/// Builds the response to a refused request, from the reason and the limit that refused it.
///
/// The response has `Cache-Control: no-store`, because RFC 6585 forbids caching a 429. It needs no `Vary`, although its
/// body depends on `Accept`, because it is never stored.
#[derive(Clone, Copy, Debug)]
#[must_use = "call `response` to build the response"]
pub struct RefusalBuilder<'a> {
    pub(super) refusal: &'a Refusal,
    pub(super) policy: Option<&'a Policy>,
    /// The policies that the request matched, if there are others than `policy`.
    matched: Option<&'a [&'a Policy]>,
    pub(super) decision: Option<&'a Decision>,
    pub(super) challenge: Option<&'a Challenge>,
}

impl<'a> RefusalBuilder<'a> {
    /// Creates the response for a reason.
    pub fn new(refusal: &'a Refusal) -> Self {
        Self { refusal, policy: None, matched: None, decision: None, challenge: None }
    }

    /// Sets the limit that refused the request.
    pub fn limit(self, policy: &'a Policy) -> Self {
        Self { policy: Some(policy), ..self }
    }

    /// Sets all policies that the request matched, for `RateLimit-Policy`.
    #[doc(hidden)]
    #[inline]
    pub fn matched(self, policies: &'a [&'a Policy]) -> Self {
        Self { matched: Some(policies), ..self }
    }

    /// Calls `read` with the policy that refused the request and all policies that matched.
    pub(super) fn with_policies<T>(&self, read: impl FnOnce(&'a Policy, &[&Policy]) -> T) -> Option<T> {
        let policy = self.policy?;
        Some(read(policy, self.matched.unwrap_or(&[policy])))
    }

    /// Sets the decision, for the remaining quota and the time to wait.
    pub fn decision(self, decision: &'a Decision) -> Self {
        Self { decision: Some(decision), ..self }
    }

    /// Sets the challenge for `WWW-Authenticate`.
    #[doc(hidden)]
    #[inline]
    pub fn challenge(self, challenge: Option<&'a Challenge>) -> Self {
        Self { challenge, ..self }
    }

    /// Returns the time to wait, or `None` if waiting does not help.
    pub(super) fn wait(&self) -> Option<Duration> {
        let of_decision = || self.decision.and_then(Decision::retry_after);
        match self.refusal {
            Refusal::Limited | Refusal::Pending => of_decision(),
            Refusal::Banned { retry_after } => Some(*retry_after),
            Refusal::Blocked
            | Refusal::KeyMissing { .. }
            | Refusal::TokenInvalid { .. }
            | Refusal::Unreadable(_)
            | Refusal::ClientAddressUnknown => None,
            Refusal::StoreUnavailable => Some(of_decision().unwrap_or(STORE_FAILURE_WAIT)),
        }
    }

    pub(super) fn wait_secs(&self) -> Option<u64> {
        self.wait().map(wait_seconds)
    }

    /// Returns the message for people.
    pub(super) fn message(&self) -> String {
        let problem = match self.refusal {
            Refusal::Limited if self.wait().is_none() && self.decision.is_some() => {
                "The request asks for more than the limit ever allows."
            }
            Refusal::Limited => "Too many requests.",
            Refusal::Pending => "Too many requests are in progress.",
            Refusal::Banned { .. } => "This client is banned.",
            Refusal::Blocked => "This client is blocked.",
            Refusal::KeyMissing { part } => {
                return format!("The request lacks {part}, which the limit counts by.");
            }
            Refusal::TokenInvalid { error, .. } => error.description(),
            Refusal::Unreadable(request) => return request.message.clone(),
            Refusal::StoreUnavailable => "The limit cannot be checked at the moment.",
            Refusal::ClientAddressUnknown => UNKNOWN_ADDRESS,
        };
        match self.wait_secs() {
            Some(1) => format!("{problem} Please retry after 1 second."),
            Some(seconds) => format!("{problem} Please retry after {seconds} seconds."),
            None => problem.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use tollgate::Timestamp;
    use tollgate::internal::{Admission, Verdict};

    use super::*;

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
        use tollgate::{Limit, TokenBucket};

        use crate::{Body, Families, Policy, RefusalBuilder};

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

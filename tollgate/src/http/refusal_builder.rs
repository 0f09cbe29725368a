//! Builds the response to a refused request.

use std::time::Duration;

use ::http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use ::http::{HeaderMap, HeaderValue, Response, StatusCode};
use bytes::Bytes;

use super::body::Body;
use super::headers::Headers;
use super::lines::Number;
use super::policy::{Policy, set_number};
use super::refusal::Refusal;
use super::token::{self, Challenge};
use super::wait_seconds;
use crate::decision::Decision;

/// The wait after a store failure if the decision has none. A store is usually reachable again, and known to be, after
/// about a second.
const STORE_FAILURE_WAIT: Duration = Duration::from_secs(1);

/// The start of the head of nearly every refusal.
const LIMITED: &str = "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\ncache-control: no-store\r\n";

/// Headers of a response other than those of its limit, including the server's.
const OTHER_HEADERS: usize = 5;

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
    challenge: Option<&'a Challenge>,
}

/// A response that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrittenResponse {
    /// The status of the response.
    pub status: StatusCode,
    /// Length of the body, at the end of the response. Cut it off in a response to HEAD.
    pub body_bytes: usize,
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
    #[cfg_attr(not(feature = "rules"), allow(dead_code, reason = "several limits come with rules"))]
    pub(crate) fn matched(self, policies: &'a [&'a Policy]) -> Self {
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
    #[cfg_attr(not(feature = "rules"), expect(dead_code, reason = "tokens come with rules"))]
    pub(crate) fn challenge(self, challenge: Option<&'a Challenge>) -> Self {
        Self { challenge, ..self }
    }

    /// Returns the HTTP response. Its body is `body`, or the format that the request's `Accept` header prefers.
    /// `request` holds the headers of the request.
    #[must_use]
    pub fn response<'h>(&self, body: &Body, request: impl Into<Headers<'h>>) -> Response<Bytes> {
        let (content_type, content) = body.render(self, request.into());
        let mut response = Response::new(content);
        *response.status_mut() = self.refusal.status();
        let headers = response.headers_mut();
        // Reserves room for all headers and those that a server adds. If that fails, headers are dropped one by one.
        let _ = headers.try_reserve(self.policy.map_or(0, Policy::fields) + OTHER_HEADERS);
        self.write_headers(headers);
        headers.insert(CONTENT_TYPE, content_type);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }

    /// Appends the response to `out` in HTTP/1.1 format. `more` is inserted into the head: header lines that end in
    /// CRLF, such as `date`.
    #[doc(hidden)]
    pub fn write_http1<'h>(
        &self,
        body: &Body,
        request: impl Into<Headers<'h>>,
        more: &[u8],
        out: &mut Vec<u8>,
    ) -> WrittenResponse {
        let request = request.into();
        if let Some(message) = self.write_limited(body, request, more, out, |_, _| {}) {
            return message;
        }
        let response = self.response(body, request);
        let status = response.status();
        let reason = status.canonical_reason().unwrap_or_default();
        put(out, &["HTTP/1.1 ", status.as_str(), " ", reason, "\r\n"]);
        for (name, value) in response.headers() {
            put(out, &[name.as_str(), ": "]);
            out.extend_from_slice(value.as_bytes());
            put(out, &["\r\n"]);
        }
        let content = response.body();
        put(out, &["content-length: ", itoa::Buffer::new().format(content.len()), "\r\n"]);
        out.extend_from_slice(more);
        put(out, &["\r\n"]);
        out.extend_from_slice(content);
        WrittenResponse { status, body_bytes: content.len() }
    }

    /// Fast path for a denial with a JSON body, which nearly every refusal is. Calls `on_number` with the position of
    /// each number in `out`.
    #[inline]
    pub(super) fn write_limited(
        &self,
        body: &Body,
        request: Headers<'_>,
        more: &[u8],
        out: &mut Vec<u8>,
        mut on_number: impl FnMut(usize, Number),
    ) -> Option<WrittenResponse> {
        let (Refusal::Limited, Some(_), Some(decision)) = (self.refusal, self.policy, self.decision) else {
            return None;
        };
        let mut digits = itoa::Buffer::new();
        let seconds = digits.format(self.wait_secs()?);
        let parts = body.limited(seconds, request)?;
        let body_bytes = parts.iter().map(|part| part.len()).sum();
        put(out, &[LIMITED]);
        self.with_policies(|policy, matched| policy.write_remaining_lines(decision, matched, out, &mut on_number));
        put(out, &["retry-after: "]);
        on_number(out.len(), Number::ResetIn);
        put(out, &[seconds, "\r\ncontent-length: ", itoa::Buffer::new().format(body_bytes), "\r\n"]);
        out.extend_from_slice(more);
        put(out, &["\r\n"]);
        for (number, part) in parts.into_iter().enumerate() {
            // Every second part is the wait.
            if number % 2 == 1 {
                on_number(out.len(), Number::ResetIn);
            }
            out.extend_from_slice(part.as_bytes());
        }
        Some(WrittenResponse { status: StatusCode::TOO_MANY_REQUESTS, body_bytes })
    }

    /// Writes the rate limit headers, `Retry-After` and `WWW-Authenticate`.
    pub(super) fn write_headers(&self, headers: &mut HeaderMap) {
        let by_limit = matches!(self.refusal, Refusal::Limited | Refusal::Banned { .. });
        if let (Some(decision), true) = (self.decision, by_limit) {
            self.with_policies(|policy, matched| policy.write_remaining(decision, matched, headers));
        }
        if let Some(seconds) = self.wait_secs() {
            set_number(headers, &RETRY_AFTER, seconds);
        }
        if let Refusal::TokenInvalid { error, challenge: true } = self.refusal {
            let prepared = self.challenge.map(|challenge| challenge.value(*error));
            let value = prepared.or_else(|| HeaderValue::try_from(token::challenge(None, *error)).ok());
            headers.extend(value.map(|value| (WWW_AUTHENTICATE, value)));
        }
    }

    /// Returns the time to wait, or `None` if waiting does not help.
    pub(super) fn wait(&self) -> Option<Duration> {
        let of_decision = || self.decision.and_then(Decision::retry_after);
        match self.refusal {
            Refusal::Limited => of_decision(),
            Refusal::Banned { retry_after } => Some(*retry_after),
            Refusal::Blocked | Refusal::KeyMissing { .. } | Refusal::TokenInvalid { .. } | Refusal::Unreadable(_) => {
                None
            }
            Refusal::StoreUnavailable => Some(of_decision().unwrap_or(STORE_FAILURE_WAIT)),
        }
    }

    pub(super) fn wait_secs(&self) -> Option<u64> {
        self.wait().map(wait_seconds)
    }

    /// Returns the message for people. The wording of a denial is specified, including `seconds` for a single second.
    pub(super) fn message(&self) -> String {
        let problem = match self.refusal {
            Refusal::Limited if self.wait().is_none() && self.decision.is_some() => {
                "The request asks for more than the limit ever allows."
            }
            Refusal::Limited => "Too many requests.",
            Refusal::Banned { .. } => "This client is banned.",
            Refusal::Blocked => "This client is blocked.",
            Refusal::KeyMissing { part } => {
                return format!("The request lacks {part}, which the limit counts by.");
            }
            Refusal::TokenInvalid { error, .. } => error.description(),
            Refusal::Unreadable(request) => return request.message.clone(),
            Refusal::StoreUnavailable => "The limit cannot be checked at the moment.",
        };
        match self.wait_secs() {
            Some(seconds) => format!("{problem} Please retry after {seconds} seconds."),
            None => problem.to_owned(),
        }
    }
}

fn put(out: &mut Vec<u8>, parts: &[&str]) {
    out.reserve(parts.iter().map(|part| part.len()).sum());
    parts.iter().for_each(|part| out.extend_from_slice(part.as_bytes()));
}

//! The whole answer to a request that is refused.

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

/// How long to wait for a store that fails, when nobody knows better: about as long as it takes to notice that it
/// is back.
const RETRY_A_FAILED_STORE: Duration = Duration::from_secs(1);

/// How the head of nearly every refusal begins.
const LIMITED: &str = "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\ncache-control: no-store\r\n";

/// Headers of an answer beside those of its limit, the server's among them.
const BESIDE: usize = 5;

/// The answer to a request that is refused: why, and by what.
///
/// It is not to be kept by a cache (RFC 6585 forbids it for a 429), which `Cache-Control: no-store` says. So there
/// is no `Vary` either, although the body follows `Accept`: it tells caches what to compare, and there is nothing
/// in them.
#[derive(Clone, Copy, Debug)]
#[must_use = "an answer says nothing until it is made a response"]
pub struct Answer<'a> {
    pub(super) refusal: &'a Refusal,
    pub(super) policy: Option<&'a Policy>,
    /// The policies that the request matched, if there are others than `policy`.
    matched: Option<&'a [&'a Policy]>,
    pub(super) decision: Option<&'a Decision>,
    challenge: Option<&'a Challenge>,
}

/// A message that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrittenResponse {
    /// Its status.
    pub status: StatusCode,
    /// How much of its end is the body. For an answer to HEAD, that has to be cut off.
    pub body_bytes: usize,
}

impl<'a> Answer<'a> {
    /// An answer that says why.
    pub fn new(refusal: &'a Refusal) -> Self {
        Self { refusal, policy: None, matched: None, decision: None, challenge: None }
    }

    /// Names the limit that refuses.
    pub fn limit(self, policy: &'a Policy) -> Self {
        Self { policy: Some(policy), ..self }
    }

    /// Names all policies that the request matched, for `RateLimit-Policy`.
    #[cfg_attr(not(feature = "rules"), allow(dead_code, reason = "several limits come with rules"))]
    pub(crate) fn matched(self, policies: &'a [&'a Policy]) -> Self {
        Self { matched: Some(policies), ..self }
    }

    /// Runs a function with the policy that refuses and the list of those that matched.
    pub(super) fn with_policies<T>(&self, read: impl FnOnce(&'a Policy, &[&Policy]) -> T) -> Option<T> {
        let policy = self.policy?;
        Some(read(policy, self.matched.unwrap_or(&[policy])))
    }

    /// Tells what is left, and when it is worth to try again.
    pub fn decision(self, decision: &'a Decision) -> Self {
        Self { decision: Some(decision), ..self }
    }

    /// Asks for another token in these words.
    #[cfg_attr(not(feature = "rules"), expect(dead_code, reason = "tokens come with rules"))]
    pub(crate) fn challenge(self, challenge: Option<&'a Challenge>) -> Self {
        Self { challenge, ..self }
    }

    /// The answer in HTTP: status, headers, and of the bodies there are the one that the request's `Accept`
    /// likes best. `request` is the headers of the request.
    #[must_use]
    pub fn response<'h>(&self, body: &Body, request: impl Into<Headers<'h>>) -> Response<Bytes> {
        let (content_type, content) = body.render(self, request.into());
        let mut response = Response::new(content);
        *response.status_mut() = self.refusal.status();
        let headers = response.headers_mut();
        // For all of them at once, and what a server adds. Without the room they are left out one by one.
        let _ = headers.try_reserve(self.policy.map_or(0, Policy::fields) + BESIDE);
        self.write_headers(headers);
        headers.insert(CONTENT_TYPE, content_type);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }

    /// The same as a whole message of HTTP/1.1, behind what `out` has. `more` goes among its headers: lines that end in
    /// CRLF, such as a date.
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

    /// What nearly every refusal is, put together from its parts: a flood should cost little. Where in `out` its numbers
    /// begin is `placed`.
    #[inline]
    pub(super) fn write_limited(
        &self,
        body: &Body,
        request: Headers<'_>,
        more: &[u8],
        out: &mut Vec<u8>,
        mut placed: impl FnMut(usize, Number),
    ) -> Option<WrittenResponse> {
        let (Refusal::Limited, Some(_), Some(decision)) = (self.refusal, self.policy, self.decision) else {
            return None;
        };
        let mut digits = itoa::Buffer::new();
        let seconds = digits.format(self.wait_secs()?);
        let parts = body.limited(seconds, request)?;
        let body_bytes = parts.iter().map(|part| part.len()).sum();
        put(out, &[LIMITED]);
        self.with_policies(|policy, matched| policy.write_left_lines(decision, matched, out, &mut placed));
        put(out, &["retry-after: "]);
        placed(out.len(), Number::ResetIn);
        put(out, &[seconds, "\r\ncontent-length: ", itoa::Buffer::new().format(body_bytes), "\r\n"]);
        out.extend_from_slice(more);
        put(out, &["\r\n"]);
        for (number, part) in parts.into_iter().enumerate() {
            // Every second part is the wait.
            if number % 2 == 1 {
                placed(out.len(), Number::ResetIn);
            }
            out.extend_from_slice(part.as_bytes());
        }
        Some(WrittenResponse { status: StatusCode::TOO_MANY_REQUESTS, body_bytes })
    }

    /// What is left, and when to try again.
    pub(super) fn write_headers(&self, headers: &mut HeaderMap) {
        let by_limit = matches!(self.refusal, Refusal::Limited | Refusal::Banned { .. });
        if let (Some(decision), true) = (self.decision, by_limit) {
            self.with_policies(|policy, matched| policy.write_left(decision, matched, headers));
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

    /// How long to wait; `None` where that does not help.
    pub(super) fn wait(&self) -> Option<Duration> {
        let of_decision = || self.decision.and_then(Decision::retry_after);
        match self.refusal {
            Refusal::Limited => of_decision(),
            Refusal::Banned { retry_after } => Some(*retry_after),
            Refusal::Blocked | Refusal::KeyMissing { .. } | Refusal::TokenInvalid { .. } | Refusal::Unreadable(_) => {
                None
            }
            Refusal::StoreUnavailable => Some(of_decision().unwrap_or(RETRY_A_FAILED_STORE)),
        }
    }

    pub(super) fn wait_secs(&self) -> Option<u64> {
        self.wait().map(wait_seconds)
    }

    /// The answer in a sentence or two, for people. Its first wording is the documents', so it says `seconds` of
    /// one second too.
    pub(super) fn message(&self) -> String {
        let problem = match self.refusal {
            Refusal::Limited if self.wait().is_none() && self.decision.is_some() => {
                "The request asks for more than the limit ever allows."
            }
            Refusal::Limited => "Too many requests.",
            Refusal::Banned { .. } => "Too many refused requests.",
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

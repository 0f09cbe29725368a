//! The body of a refusal: JSON, problem details or a template, depending on `Accept`.

use ::http::HeaderValue;
use bytes::Bytes;
use serde::Serialize;

use super::accept;
use super::error::InvalidResponse;
use super::headers::Headers;
use super::problem::Problem;
use super::refusal::Refusal;
use super::refusal_builder::RefusalBuilder;
use super::template::Template;

/// The default body of a refusal. A request's `Accept` header can select another format.
///
/// JSON and problem details are always available. The default is sent if there is no `Accept` header, if it accepts
/// several formats equally, and if it accepts none of them: a reason in an unexpected format is better than no reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Body {
    /// `application/json`: `{"error":"rate_limit_exceeded","message":"…","retry_after":60}`.
    #[default]
    Json,
    /// `application/problem+json` of RFC 9457, with the problem types of draft-ietf-httpapi-ratelimit-headers.
    Problem,
    /// A custom text.
    Template(Template),
}

/// A custom plain text; see [`Body::template`].
impl TryFrom<&str> for Body {
    type Error = InvalidResponse;

    fn try_from(text: &str) -> Result<Self, InvalidResponse> {
        Self::template(text, "text/plain; charset=utf-8")
    }
}

#[derive(Serialize)]
struct Json<'a> {
    error: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    message: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after: Option<u64>,
}

impl Body {
    /// Creates a body with a custom text; see [`Template::new`].
    ///
    /// # Errors
    ///
    /// If the text or its type cannot be sent.
    pub fn template(text: &str, content_type: &str) -> Result<Self, InvalidResponse> {
        Ok(Self::Template(Template::new(text, content_type)?))
    }

    /// Returns the body for a request and its content type.
    pub(super) fn render(&self, answer: &RefusalBuilder<'_>, request: Headers<'_>) -> (HeaderValue, Bytes) {
        match self {
            Self::Json => match accept::choose(request, [Self::JSON, Self::PROBLEM]) {
                0 => json(answer),
                _ => problem(answer),
            },
            Self::Problem => match accept::choose(request, [Self::PROBLEM, Self::JSON]) {
                0 => problem(answer),
                _ => json(answer),
            },
            Self::Template(template) => {
                match accept::choose(request, [template.media_type(), Self::JSON, Self::PROBLEM]) {
                    0 => (template.content_type(), template.render(answer)),
                    1 => json(answer),
                    _ => problem(answer),
                }
            }
        }
    }

    /// Returns the parts of the JSON body of a denial with this wait, if the request gets that body.
    pub(super) fn limited<'s>(&self, seconds: &'s str, request: Headers<'_>) -> Option<[&'s str; 5]> {
        self.is_limited_json(request).then(|| limited_parts(seconds))
    }

    /// Returns `true` if a denied request with these headers gets the JSON body.
    pub(super) fn is_limited_json(&self, request: Headers<'_>) -> bool {
        matches!(self, Self::Json) && accept::choose(request, [Self::JSON, Self::PROBLEM]) == 0
    }

    const JSON: &'static str = "application/json";
    const PROBLEM: &'static str = "application/problem+json";
}

fn json(answer: &RefusalBuilder<'_>) -> (HeaderValue, Bytes) {
    (HeaderValue::from_static(Body::JSON), limited(answer).unwrap_or_else(|| any(answer)))
}

/// Returns the JSON body of a denial without serializing it.
fn limited(answer: &RefusalBuilder<'_>) -> Option<Bytes> {
    let (Refusal::Limited, Some(seconds)) = (answer.refusal, answer.wait_secs()) else { return None };
    let mut digits = itoa::Buffer::new();
    Some(Bytes::from(limited_parts(digits.format(seconds)).concat()))
}

fn limited_parts(seconds: &str) -> [&str; 5] {
    [
        r#"{"error":"rate_limit_exceeded","message":"Too many requests. Please retry after "#,
        seconds,
        r#" seconds.","retry_after":"#,
        seconds,
        "}",
    ]
}

fn any(answer: &RefusalBuilder<'_>) -> Bytes {
    let message = answer.message();
    let reason = match answer.refusal {
        Refusal::Unreadable(request) => Some(request.reason),
        _ => None,
    };
    written(&Json { error: answer.refusal.code(), reason, message: &message, retry_after: answer.wait_secs() })
}

fn problem(answer: &RefusalBuilder<'_>) -> (HeaderValue, Bytes) {
    let message = answer.message();
    (HeaderValue::from_static(Body::PROBLEM), written(&Problem::new(answer, &message)))
}

/// Serializes a body. Strings and numbers always serialize; if they ever did not, the body would be empty.
fn written(json: &impl Serialize) -> Bytes {
    serde_json::to_vec(json).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FixedWindow, Limit, Limiter, MINUTE};

    #[test]
    fn the_fast_path_writes_what_serde_would() {
        let limiter = Limiter::new(Limit::new("l", FixedWindow::new(1, MINUTE)).unwrap());
        let decisions: Vec<_> = (0..2).map(|_| limiter.check("k")).collect();
        let answer = RefusalBuilder::new(&Refusal::Limited).decision(&decisions[1]);
        assert_eq!(limited(&answer).unwrap(), any(&answer));
        assert!(limited(&RefusalBuilder::new(&Refusal::Limited)).is_none());
    }
}

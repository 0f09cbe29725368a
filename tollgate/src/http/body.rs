//! The body of a refusal: the documents' JSON, problem details, or a template, whichever the client likes best.

use ::http::HeaderValue;
use bytes::Bytes;
use serde::Serialize;

use super::accept;
use super::answer::Answer;
use super::error::InvalidAnswer;
use super::headers::Headers;
use super::problem::Problem;
use super::refusal::Refusal;
use super::template::Template;

/// What a refusal says, unless the request's `Accept` prefers one of the others.
///
/// JSON and problem details can always be had. The body that is set here is sent when there is no `Accept`, when it
/// likes several equally well, and when it likes none: a client that is refused is better told why in a language it
/// did not ask for than not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Body {
    /// `application/json`: `{"error":"rate_limit_exceeded","message":"…","retry_after":60}`.
    #[default]
    Json,
    /// `application/problem+json` of RFC 9457, with the problem types of draft-ietf-httpapi-ratelimit-headers.
    Problem,
    /// A text of the user's own.
    Template(Template),
}

/// A plain text of the user's own; see [`Body::template`].
impl TryFrom<&str> for Body {
    type Error = InvalidAnswer;

    fn try_from(text: &str) -> Result<Self, InvalidAnswer> {
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
    /// A text of the user's own; see [`Template::new`].
    ///
    /// # Errors
    ///
    /// When the text or its type cannot be sent.
    pub fn template(text: &str, content_type: &str) -> Result<Self, InvalidAnswer> {
        Ok(Self::Template(Template::new(text, content_type)?))
    }

    /// The body for that request and its type.
    pub(super) fn render(&self, answer: &Answer<'_>, request: Headers<'_>) -> (HeaderValue, Bytes) {
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

    /// The JSON for a request that is limited for so many seconds, if that is what it gets.
    pub(super) fn limited<'s>(&self, seconds: &'s str, request: Headers<'_>) -> Option<[&'s str; 5]> {
        self.is_limited_json(request).then(|| limited_parts(seconds))
    }

    /// Whether that is what a request gets.
    pub(super) fn is_limited_json(&self, request: Headers<'_>) -> bool {
        matches!(self, Self::Json) && accept::choose(request, [Self::JSON, Self::PROBLEM]) == 0
    }

    const JSON: &'static str = "application/json";
    const PROBLEM: &'static str = "application/problem+json";
}

fn json(answer: &Answer<'_>) -> (HeaderValue, Bytes) {
    (HeaderValue::from_static(Body::JSON), limited(answer).unwrap_or_else(|| any(answer)))
}

/// What nearly every refusal is, put together from its parts.
fn limited(answer: &Answer<'_>) -> Option<Bytes> {
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

fn any(answer: &Answer<'_>) -> Bytes {
    let message = answer.message();
    let reason = match answer.refusal {
        Refusal::Unreadable(request) => Some(request.reason),
        _ => None,
    };
    written(&Json { error: answer.refusal.code(), reason, message: &message, retry_after: answer.wait_secs() })
}

fn problem(answer: &Answer<'_>) -> (HeaderValue, Bytes) {
    let message = answer.message();
    (HeaderValue::from_static(Body::PROBLEM), written(&Problem::new(answer, &message)))
}

/// Texts and numbers always make JSON; an empty body is what an answer would be left with if they ever did not.
fn written(json: &impl Serialize) -> Bytes {
    serde_json::to_vec(json).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FixedWindow, Limit, Limiter, MINUTE};

    #[test]
    fn what_is_put_together_is_what_would_be_serialized() {
        let limiter = Limiter::new(Limit::new("l", FixedWindow::new(1, MINUTE)).unwrap());
        let decisions: Vec<_> = (0..2).map(|_| limiter.check("k")).collect();
        let answer = Answer::new(&Refusal::Limited).decision(&decisions[1]);
        assert_eq!(limited(&answer).unwrap(), any(&answer));
        assert!(limited(&Answer::new(&Refusal::Limited)).is_none());
    }
}

//! The body of a refusal: JSON, problem details or a template, depending on `Accept`.
//!
//! Problem details are those of RFC 9457, and a template is a text with placeholders. Content negotiation follows RFC 9110,
//! section 12.5.1. Parameters of a media range other than `q` are ignored: `application/json; charset=utf-8` means JSON.

use std::fmt::Write;

use ::http::HeaderValue;
use ::http::header::ACCEPT;
use bytes::Bytes;
use serde::Serialize;

use super::families::{InvalidResponse, shown};
use super::headers::Headers;
use super::refusal::{PENDING, Refusal, RefusalBuilder};
use super::seconds;

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
            Self::Json => match choose(request, [Self::JSON, Self::PROBLEM]) {
                0 => json(answer),
                _ => problem(answer),
            },
            Self::Problem => match choose(request, [Self::PROBLEM, Self::JSON]) {
                0 => problem(answer),
                _ => json(answer),
            },
            Self::Template(template) => match choose(request, [template.media_type(), Self::JSON, Self::PROBLEM]) {
                0 => (template.content_type(), template.render(answer)),
                1 => json(answer),
                _ => problem(answer),
            },
        }
    }

    /// Returns the parts of the JSON body of a denial with this wait, if the request gets that body.
    pub(super) fn limited<'s>(&self, seconds: &'s str, request: Headers<'_>) -> Option<[&'s str; 5]> {
        self.is_limited_json(request).then(|| limited_parts(seconds))
    }

    /// Returns `true` if a denied request with these headers gets the JSON body.
    pub(super) fn is_limited_json(&self, request: Headers<'_>) -> bool {
        matches!(self, Self::Json) && choose(request, [Self::JSON, Self::PROBLEM]) == 0
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
        if seconds == "1" { r#" second.","retry_after":"# } else { r#" seconds.","retry_after":"# },
        seconds,
        "}",
    ]
}

fn any(answer: &RefusalBuilder<'_>) -> Bytes {
    let message = answer.message();
    let reason = match answer.refusal {
        Refusal::Unreadable(request) => Some(request.reason),
        Refusal::Pending => Some(PENDING),
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

/// The members of RFC 9457, and `violated-policies` of draft-ietf-httpapi-ratelimit-headers. There is no `instance`,
/// because refusals have no identity of their own.
#[derive(Serialize)]
pub(super) struct Problem<'a> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: &'a str,
    /// Names of policies as in `RateLimit-Policy`, so that a client can match them.
    #[serde(rename = "violated-policies", skip_serializing_if = "Option::is_none")]
    violated_policies: Option<[&'a str; 1]>,
}

/// The problem type that adds nothing to the status.
const STATUS_ONLY: &str = "about:blank";

impl<'a> Problem<'a> {
    pub(super) fn new(answer: &RefusalBuilder<'a>, detail: &'a str) -> Self {
        let (r#type, title) = answer.refusal.problem_type();
        let violated = answer.policy.filter(|_| r#type != STATUS_ONLY);
        Self {
            r#type,
            title,
            status: answer.refusal.status().as_u16(),
            detail,
            violated_policies: violated.map(|policy| [policy.ascii_name()]),
        }
    }
}

/// The longest template. It is sent with every refusal, so a flood of requests must not cause megabytes of responses.
const MAX_TEXT: usize = 64 * 1024;

/// The longest media type with its parameters.
const MAX_CONTENT_TYPE: usize = 256;

const PLACEHOLDERS: [(&str, Placeholder); 7] = [
    ("limit", Placeholder::Limit),
    ("quota", Placeholder::Quota),
    ("remaining", Placeholder::Remaining),
    ("retry_after", Placeholder::RetryAfter),
    ("reset_after", Placeholder::ResetAfter),
    ("message", Placeholder::Message),
    ("status", Placeholder::Status),
];

/// A text with placeholders such as `{{retry_after}}`, parsed when it is loaded.
///
/// The placeholders are `limit` (its name), `quota`, `remaining`, `retry_after` and `reset_after` (whole seconds),
/// `message` and `status`. Values are escaped for HTML and XML, or for a JSON string, depending on the content type. An
/// unknown number, such as the time to wait where waiting does not help, is `null` in JSON and empty elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    pieces: Vec<Piece>,
    content_type: HeaderValue,
    media_type: String,
    escape: Escape,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Placeholder(Placeholder),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Placeholder {
    Limit,
    Quota,
    Remaining,
    RetryAfter,
    ResetAfter,
    Message,
    Status,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    Markup,
    Json,
    Nothing,
}

impl Template {
    /// Parses a template that is sent as `content_type`. A `text` type without a charset is sent with `charset=utf-8`.
    ///
    /// ```
    /// use tollgate_http::Template;
    ///
    /// assert!(Template::new("<h1>Wait {{retry_after}} s</h1>", "text/html").is_ok());
    /// let error = Template::new("Wait {{retry}} s", "text/plain").unwrap_err();
    /// assert!(error.to_string().starts_with("unknown placeholder `retry` in the template: use limit, quota,"));
    /// ```
    ///
    /// # Errors
    ///
    /// If a placeholder is unknown or not closed, the text is longer than 64 KiB, or the type is not a media type of
    /// UTF-8 text. The error names the field and the fix.
    pub fn new(text: &str, content_type: &str) -> Result<Self, InvalidResponse> {
        if text.len() > MAX_TEXT {
            let problem = format!("a template of {} bytes is too long", text.len());
            return Err(InvalidResponse::new("template", problem, "use 64 KiB or less"));
        }
        let (content_type, media_type) = checked_type(content_type)?;
        let escape = Escape::of(&media_type);
        Ok(Self { pieces: pieces(text)?, content_type, media_type, escape })
    }

    pub(super) fn content_type(&self) -> HeaderValue {
        self.content_type.clone()
    }

    /// Returns the content type without its parameters.
    pub(super) fn media_type(&self) -> &str {
        &self.media_type
    }

    pub(super) fn render(&self, answer: &RefusalBuilder<'_>) -> Bytes {
        let mut text = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(part) => text.push_str(part),
                Piece::Placeholder(placeholder) => self.fill(*placeholder, answer, &mut text),
            }
        }
        text.into()
    }

    fn fill(&self, placeholder: Placeholder, answer: &RefusalBuilder<'_>, text: &mut String) {
        let number = match placeholder {
            Placeholder::Limit => return self.escape.push(answer.policy.map_or("", |policy| policy.name()), text),
            Placeholder::Message => return self.escape.push(&answer.message(), text),
            Placeholder::Quota => answer.policy.map(|policy| policy.quota()),
            Placeholder::Remaining => answer.decision.map(|decision| decision.remaining()),
            Placeholder::RetryAfter => answer.wait_secs(),
            Placeholder::ResetAfter => answer.decision.map(|decision| seconds(decision.reset_after())),
            Placeholder::Status => Some(answer.refusal.status().as_u16().into()),
        };
        match (number, self.escape) {
            (Some(number), _) => text.push_str(itoa::Buffer::new().format(number)),
            (None, Escape::Json) => text.push_str("null"),
            (None, Escape::Markup | Escape::Nothing) => {}
        }
    }
}

impl Escape {
    fn of(media_type: &str) -> Self {
        let subtype = media_type.split_once('/').map_or("", |(_, subtype)| subtype);
        match subtype.rsplit('+').next().unwrap_or(subtype) {
            "html" | "xml" => Self::Markup,
            "json" => Self::Json,
            _ => Self::Nothing,
        }
    }

    fn push(self, value: &str, text: &mut String) {
        for letter in value.chars() {
            match (self, letter) {
                (Self::Markup, '&') => text.push_str("&amp;"),
                (Self::Markup, '<') => text.push_str("&lt;"),
                (Self::Markup, '>') => text.push_str("&gt;"),
                (Self::Markup, '"') => text.push_str("&quot;"),
                (Self::Markup, '\'') => text.push_str("&#39;"),
                (Self::Json, '"') => text.push_str("\\\""),
                (Self::Json, '\\') => text.push_str("\\\\"),
                (Self::Json, '\0'..='\x1f') => {
                    // Writing to a string cannot fail.
                    let _ = write!(text, "\\u{:04x}", u32::from(letter));
                }
                _ => text.push(letter),
            }
        }
    }
}

fn pieces(text: &str) -> Result<Vec<Piece>, InvalidResponse> {
    let (mut pieces, mut rest) = (Vec::new(), text);
    while let Some((before, after)) = rest.split_once("{{") {
        let Some((name, behind)) = after.split_once("}}") else {
            let problem = format!("unclosed `{{{{` in the template, before `{}`", shown(after));
            return Err(InvalidResponse::new("template", problem, "close it with `}}`"));
        };
        pieces.push(Piece::Text(before.to_owned()));
        pieces.push(Piece::Placeholder(placeholder(name.trim())?));
        rest = behind;
    }
    pieces.push(Piece::Text(rest.to_owned()));
    pieces.retain(|piece| !matches!(piece, Piece::Text(text) if text.is_empty()));
    Ok(pieces)
}

fn placeholder(name: &str) -> Result<Placeholder, InvalidResponse> {
    let known = PLACEHOLDERS.into_iter().find(|(known, _)| *known == name);
    known.map(|(_, placeholder)| placeholder).ok_or_else(|| {
        let names = PLACEHOLDERS.map(|(name, _)| name).join(", ");
        let problem = format!("unknown placeholder `{}` in the template", shown(name));
        InvalidResponse::new("template", problem, format!("use {names}"))
    })
}

/// Returns the content type as a header value, and its media type in lower case and without parameters.
fn checked_type(text: &str) -> Result<(HeaderValue, String), InvalidResponse> {
    let invalid = || {
        let problem = format!("`{}` is not a content type", shown(text));
        InvalidResponse::new("content_type", problem, "write a media type such as text/html")
    };
    let mut parts = text.split(';').map(str::trim);
    let media_type = parts.next().unwrap_or_default().to_ascii_lowercase();
    let (kind, subtype) = media_type.split_once('/').ok_or_else(invalid)?;
    if text.len() > MAX_CONTENT_TYPE || !is_token(kind) || !is_token(subtype) {
        return Err(invalid());
    }
    let mut full = media_type.clone();
    let mut charset = false;
    for parameter in parts {
        let (name, value) = parameter.split_once('=').ok_or_else(invalid)?;
        let bare = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
        if !is_token(name) || !is_token(bare) {
            return Err(invalid());
        }
        if name.eq_ignore_ascii_case("charset") {
            charset = true;
            if !bare.eq_ignore_ascii_case("utf-8") {
                let problem = format!("a template is sent as UTF-8, not as {}", shown(bare));
                return Err(InvalidResponse::new("content_type", problem, "use charset=utf-8, or leave it out"));
            }
        }
        full = format!("{full}; {name}={value}");
    }
    if kind == "text" && !charset {
        full.push_str("; charset=utf-8");
    }
    Ok((HeaderValue::try_from(full).map_err(|_| invalid())?, media_type))
}

/// Returns `true` for a token of RFC 9110, section 5.6.2.
fn is_token(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

/// The number of media ranges that are read. Browsers send about eight.
const MAX_RANGES: usize = 32;

/// A media range and its quality, in thousandths.
#[derive(Clone, Copy)]
struct Range<'a> {
    kind: &'a str,
    subtype: &'a str,
    quality: u16,
}

/// Returns the index of the offer with the highest quality, the first one of equals, and 0 if no offer is acceptable.
fn choose<const N: usize>(request: Headers<'_>, offers: [&str; N]) -> usize {
    let mut best = (0, 0);
    if request.get_named(&ACCEPT).is_some() {
        for (index, offer) in offers.into_iter().enumerate() {
            let quality = quality(request, offer);
            if quality > best.1 {
                best = (index, quality);
            }
        }
    }
    best.0
}

/// Returns the quality of a media type, as given by the most specific range that contains it, or 0 if no range does.
fn quality(request: Headers<'_>, offer: &str) -> u16 {
    let Some((kind, subtype)) = offer.split_once('/') else { return 0 };
    let lines = request.get_all(&ACCEPT).filter_map(|line| std::str::from_utf8(line).ok());
    let ranges = lines.flat_map(|line| line.split(',')).take(MAX_RANGES).filter_map(range);
    let fitting = ranges.filter_map(|range| {
        let specific = match (range.kind, range.subtype) {
            ("*", "*") => 0,
            (of, "*") if of.eq_ignore_ascii_case(kind) => 1,
            (of, sub) if of.eq_ignore_ascii_case(kind) && sub.eq_ignore_ascii_case(subtype) => 2,
            _ => return None,
        };
        Some((specific, range.quality))
    });
    fitting.max().map_or(0, |(_, quality)| quality)
}

/// Parses a media range such as `text/html;level=1;q=0.5`. An invalid range or quality is ignored.
fn range(text: &str) -> Option<Range<'_>> {
    let mut parts = text.split(';').map(str::trim);
    let (kind, subtype) = parts.next()?.split_once('/')?;
    let mut quality = 1000;
    for parameter in parts {
        let Some((name, value)) = parameter.split_once('=') else { continue };
        if name.trim_end().eq_ignore_ascii_case("q") {
            quality = thousandths(value.trim_start())?;
            break;
        }
    }
    Some(Range { kind, subtype, quality })
}

/// Parses `0.5` as 500: one digit, and at most three after the point.
fn thousandths(text: &str) -> Option<u16> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    if fraction.len() > 3 || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let fraction = fraction.bytes().zip([100, 10, 1]).map(|(digit, weight)| u16::from(digit - b'0') * weight).sum();
    match whole {
        "0" => Some(fraction),
        "1" if fraction == 0 => Some(1000),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use ::http::{HeaderMap, HeaderValue};
    use tollgate::{FixedWindow, Limit, Limiter, MINUTE};

    use super::*;

    #[test]
    fn the_fast_path_writes_what_serde_would() {
        let limiter = Limiter::new(Limit::new("l", FixedWindow::new(1, MINUTE)).unwrap());
        let decisions: Vec<_> = (0..2).map(|_| limiter.check("k")).collect();
        let answer = RefusalBuilder::new(&Refusal::Limited).decision(&decisions[1]);
        assert_eq!(limited(&answer).unwrap(), any(&answer));
        assert!(limited(&RefusalBuilder::new(&Refusal::Limited)).is_none());
    }

    #[test]
    fn the_most_specific_range_sets_the_quality() {
        // (Accept, index of the offer below)
        let table: &[(&[&str], usize)] = &[
            (&[], 0),
            (&[""], 0),
            (&["*/*"], 0),
            (&["application/*"], 1),
            (&["application/json"], 1),
            (&["APPLICATION/JSON"], 1),
            (&["application/problem+json"], 2),
            (&["application/json, application/problem+json"], 1),
            (&["application/json;q=0.5, application/problem+json;q=0.6"], 2),
            (&["application/json;q=0.5", "application/problem+json;q=0.6"], 2),
            (&["*/*;q=0.1, application/problem+json"], 2),
            (&["text/html;q=0, */*"], 1),
            (&["text/*;q=0.2, application/*;q=0.3"], 1),
            (&["text/html, application/xhtml+xml, application/xml;q=0.9, */*;q=0.8"], 0),
            (&["application/json; charset=utf-8"], 1),
            (&["application/json ; Q=0.4 , application/problem+json ; q=0.41"], 2),
            // Nothing is acceptable, so the configured body is sent.
            (&["image/png"], 0),
            (&["*/*;q=0"], 0),
            (&["application/json;q=0"], 0),
            // Invalid ranges are ignored.
            (&["json"], 0),
            (&["application/json;q=2, application/problem+json;q=0.1"], 2),
            (&["application/json;q=0.1234, application/problem+json;q=0.1"], 2),
            (&["application/json;q=, application/problem+json;q=0.1"], 2),
            (&["*/json"], 0),
            (&[",,;;/,=,"], 0),
        ];
        for (lines, best) in table {
            let mut request = HeaderMap::new();
            for line in *lines {
                request.append(ACCEPT, HeaderValue::from_static(line));
            }
            let chosen = choose((&request).into(), ["text/html", "application/json", "application/problem+json"]);
            assert_eq!(chosen, *best, "{lines:?}");
        }
    }

    #[test]
    fn an_accept_header_that_is_not_text_is_ignored() {
        let mut request = HeaderMap::new();
        request.append(ACCEPT, HeaderValue::from_bytes(b"application/json, \xff").unwrap());
        assert_eq!(choose((&request).into(), ["text/html", "application/json"]), 0);
    }
}

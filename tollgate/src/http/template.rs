//! Custom bodies: a text with placeholders.

use std::fmt::Write;

use ::http::HeaderValue;
use bytes::Bytes;

use super::error::{InvalidResponse, shown};
use super::refusal_builder::RefusalBuilder;
use super::seconds;

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
    /// use tollgate::http::Template;
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

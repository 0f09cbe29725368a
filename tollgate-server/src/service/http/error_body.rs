//! What a client reads when its question could not be answered.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// As much of a client's own text as an error message repeats: enough to recognise it.
const MAX_QUOTED_CHARS: usize = 80;

/// As much of a parser's parse_error, which may repeat a client's text, too.
const MAX_PARSE_ERROR_CHARS: usize = 300;

/// An error answer: `error` for programs, `message` for people, with the field and the fix.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorBody {
    #[serde(skip)]
    pub(crate) status: StatusCode,
    pub(crate) error: &'static str,
    pub(crate) message: String,
}

impl IntoResponse for ErrorBody {
    fn into_response(self) -> Response {
        (self.status, Json(self)).into_response()
    }
}

/// A client's text in backticks, cut to a length that is fit to read.
pub(crate) fn quoted(text: &str) -> String {
    format!("`{}`", cut(text, MAX_QUOTED_CHARS))
}

/// What a parser complains of, cut to a length that is fit to read.
pub(crate) fn parse_error(error: &serde_json::Error) -> String {
    cut(&error.to_string(), MAX_PARSE_ERROR_CHARS)
}

fn cut(text: &str, max_chars: usize) -> String {
    let mut start = text.chars().take(max_chars).collect::<String>();
    if start.len() < text.len() {
        start.push('…');
    }
    start
}

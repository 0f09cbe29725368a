//! What a client reads when its question could not be answered.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// As much of a client's own text as an error message repeats: enough to recognise it.
const MAX_QUOTED_CHARS: usize = 80;

/// An error answer: `error` for programs, `message` for people, with the field and the fix.
#[derive(Debug, Serialize)]
pub(crate) struct Refusal {
    #[serde(skip)]
    pub(crate) status: StatusCode,
    pub(crate) error: &'static str,
    pub(crate) message: String,
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.status, Json(self)).into_response()
    }
}

/// A client's text in backticks, cut to a length that is fit to read.
pub(crate) fn quoted(text: &str) -> String {
    let mut start = text.chars().take(MAX_QUOTED_CHARS).collect::<String>();
    if start.len() < text.len() {
        start.push('…');
    }
    format!("`{start}`")
}

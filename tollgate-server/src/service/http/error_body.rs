//! Error responses of the decision service.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;
use tollgate::StoreUnavailable;

/// The longest part of a client's text in an error message.
const MAX_QUOTED_CHARS: usize = 80;

/// The longest error of the JSON parser in a message. It may repeat a client's text.
const MAX_PARSE_ERROR_CHARS: usize = 300;

/// An error response: `error` for programs; `message` for people, with the field and the fix.
#[derive(Debug, JsonSchema, Serialize)]
pub(crate) struct ErrorBody {
    #[serde(skip)]
    pub(crate) status: StatusCode,
    pub(crate) error: &'static str,
    pub(crate) message: String,
}

impl ErrorBody {
    /// Returns the error of a request with an invalid field.
    pub(crate) fn invalid(message: String) -> Self {
        Self { status: StatusCode::BAD_REQUEST, error: "invalid_question", message }
    }

    /// Returns the error of an operation that the store did not confirm.
    pub(crate) fn store_unavailable(error: &StoreUnavailable) -> Self {
        let message = error.to_string();
        Self { status: StatusCode::SERVICE_UNAVAILABLE, error: "store_unavailable", message }
    }
}

impl IntoResponse for ErrorBody {
    fn into_response(self) -> Response {
        let status = self.status;
        let mut response = (status, Json(self)).into_response();
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// Returns a client's text in backticks, shortened.
pub(crate) fn quoted(text: &str) -> String {
    format!("`{}`", cut(text, MAX_QUOTED_CHARS))
}

/// Returns the error of the JSON parser, shortened.
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

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

    /// Returns the error of a handler that failed.
    pub(crate) fn failed() -> Self {
        let message = "the request failed: see the log of the server".to_owned();
        Self { status: StatusCode::INTERNAL_SERVER_ERROR, error: "internal_error", message }
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

/// Returns the error of the JSON parser in the words of the other messages, shortened: the problem, its position and the
/// fix.
pub(crate) fn parse_error(error: &serde_json::Error) -> String {
    let text = error.to_string();
    cut(&reworded(&text).unwrap_or(text), MAX_PARSE_ERROR_CHARS)
}

/// Rewords the messages of serde that clients meet. Returns `None` for others.
fn reworded(text: &str) -> Option<String> {
    let (problem, at) = text.rsplit_once(" at line ")?;
    let of_type = problem.strip_prefix("invalid type: ").or_else(|| problem.strip_prefix("invalid value: "));
    if let Some((found, expected)) = of_type.and_then(|problem| problem.rsplit_once(", expected ")) {
        return Some(format!("found {} at line {at}: send {expected}", found_name(found)));
    }
    if let Some((_, expected)) =
        problem.strip_prefix("unknown field ").and_then(|problem| problem.split_once(", expected "))
    {
        return Some(format!("unknown field at line {at}: use {expected}"));
    }
    if let Some(field) = problem.strip_prefix("missing field ") {
        return Some(format!("{field} is missing at line {at}: send it"));
    }
    if let Some(field) = problem.strip_prefix("duplicate field ") {
        return Some(format!("{field} occurs twice at line {at}: send it once"));
    }
    problem.strip_prefix("EOF while parsing ").map(|what| format!("it ends in the middle of {what} at line {at}"))
}

/// Returns the name of a JSON value that serde has found.
fn found_name(found: &str) -> String {
    let number = found.strip_prefix("integer ").or_else(|| found.strip_prefix("floating point "));
    match (number, found) {
        (Some(number), _) => format!("the number {}", number.trim_matches('`')),
        (_, "map") => "an object".to_owned(),
        (_, "sequence") => "a list".to_owned(),
        (_, "unit value") => "null".to_owned(),
        (_, other) => other.strip_prefix("boolean ").map_or_else(|| format!("the {other}"), str::to_owned),
    }
}

fn cut(text: &str, max_chars: usize) -> String {
    let mut start = text.chars().take(max_chars).collect::<String>();
    if start.len() < text.len() {
        start.push('…');
    }
    start
}

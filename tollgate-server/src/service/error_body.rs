//! Error responses of the decision service.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;
use tollgate_rules::StoreUnavailable;
use tollgate_telemetry::words::cut;
pub(crate) use tollgate_telemetry::words::quoted;

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
        Self { status: StatusCode::BAD_REQUEST, error: "invalid_request", message }
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

/// Returns the error of the JSON parser in the words of the other messages, shortened: the problem, its position and the
/// fix.
pub(super) fn parse_error(error: &serde_json::Error) -> String {
    let text = error.to_string();
    cut(&reworded(&text, error.is_data()).unwrap_or(text), MAX_PARSE_ERROR_CHARS)
}

/// Returns the problem of a field, by its path in the body. `.` is the whole body.
pub(crate) fn field_error(path: &str, error: &serde_json::Error) -> String {
    let problem = parse_error(error);
    match path {
        "." if problem.starts_with('`') => problem,
        "." => format!("the body: {problem}"),
        _ if problem.starts_with("is ") => format!("{} {problem}", quoted(path)),
        _ => format!("{}: {problem}", quoted(path)),
    }
}

/// Rewords the messages of serde that clients meet. Returns `None` for others. The messages about data that are not
/// serde's own end with the fix, and need no position.
fn reworded(text: &str, is_data: bool) -> Option<String> {
    let (problem, at) = text.rsplit_once(" at line ")?;
    let of_type = problem.strip_prefix("invalid type: ").or_else(|| problem.strip_prefix("invalid value: "));
    if let Some((found, expected)) = of_type.and_then(|problem| problem.rsplit_once(", expected ")) {
        return Some(format!("found {} at line {at}: send {}", found_name(found), type_name(expected)));
    }
    if let Some((_, expected)) =
        problem.strip_prefix("unknown field ").and_then(|problem| problem.split_once(", expected "))
    {
        return Some(format!("unknown field at line {at}: use {expected}"));
    }
    if let Some(field) = problem.strip_prefix("missing field ") {
        return Some(format!("{field} is missing: send it"));
    }
    if let Some(field) = problem.strip_prefix("duplicate field ") {
        return Some(format!("{field} occurs twice at line {at}: send it once"));
    }
    if problem == "invalid IP address syntax" {
        return Some("is not an IP address: send one such as 192.0.2.7".to_owned());
    }
    if is_data {
        return Some(problem.to_owned());
    }
    problem.strip_prefix("EOF while parsing ").map(|what| format!("it ends in the middle of {what} at line {at}"))
}

/// Returns the name of a JSON value that serde has expected.
fn type_name(expected: &str) -> &str {
    match expected {
        "u64" | "u32" | "u16" | "u8" | "usize" => "a whole number",
        "f64" => "a number",
        "a sequence" => "a list",
        "a boolean" => "true or false",
        "IP address" => "an IP address such as 192.0.2.7",
        _ if expected.starts_with("struct ") => "an object",
        _ => expected,
    }
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

//! The response to a refused gRPC request: headers only, with a status and the time to wait.
//!
//! The messages are those of `google/rpc/status.proto`, `google/rpc/error_details.proto` and the well-known types. They
//! have only five fields that we need, so they are written by hand instead of generated.

use std::time::Duration;

use ::http::StatusCode;
use ::http::header::CONTENT_TYPE;
use ::http::{HeaderMap, HeaderName, HeaderValue, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use prost::Message;

use super::policy::percent_encoded;
use super::refusal::RefusalBuilder;

static GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
static GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
static GRPC_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

/// The longest `google.protobuf.Duration`, ten thousand years: clients may refuse a longer one.
const MAX_DELAY_SECS: i64 = 315_576_000_000 - 1;

const GRPC: &str = "application/grpc";

/// The status of a cancelled call. It has no name in RFC 9110.
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// Returns `true` if the request with these headers is a gRPC request, to be answered with [`RefusalBuilder::grpc`].
/// gRPC-Web does not count.
#[must_use]
pub fn is_grpc(request: &HeaderMap) -> bool {
    let content_type = request.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    match content_type.split_at_checked(GRPC.len()) {
        Some((media_type, rest)) => {
            media_type.eq_ignore_ascii_case(GRPC.as_bytes()) && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
        }
        None => false,
    }
}

/// Returns the HTTP status that corresponds to the error in the headers of a gRPC response (`google/rpc/code.proto`), or
/// `None` if they have none. A server that fails before its first message sends its status there; otherwise the status
/// comes in the trailers. A response of gRPC-Web counts too: a client that can choose it must not get another status.
pub fn http_status(response: &HeaderMap) -> Option<StatusCode> {
    let kind = response.get(CONTENT_TYPE)?.as_bytes().get(..GRPC.len())?;
    if !kind.eq_ignore_ascii_case(GRPC.as_bytes()) {
        return None;
    }
    Some(match response.get(&GRPC_STATUS)?.as_bytes() {
        b"0" => return None,
        b"1" => StatusCode::from_u16(CLIENT_CLOSED_REQUEST).ok()?,
        b"3" | b"9" | b"11" => StatusCode::BAD_REQUEST,
        b"4" => StatusCode::GATEWAY_TIMEOUT,
        b"5" => StatusCode::NOT_FOUND,
        b"6" | b"10" => StatusCode::CONFLICT,
        b"7" => StatusCode::FORBIDDEN,
        b"8" => StatusCode::TOO_MANY_REQUESTS,
        b"12" => StatusCode::NOT_IMPLEMENTED,
        b"14" => StatusCode::SERVICE_UNAVAILABLE,
        b"16" => StatusCode::UNAUTHORIZED,
        // Unknown, internal, data loss, and codes that do not exist.
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    })
}

impl RefusalBuilder<'_> {
    /// Returns the response to a gRPC request. As gRPC requires, the HTTP status is 200. The refusal is in
    /// `grpc-status` and `grpc-message`, and the exact wait is a `google.rpc.RetryInfo` in `grpc-status-details-bin`.
    /// The HTTP rate limit headers are present too.
    #[must_use]
    pub fn grpc(&self) -> Response<()> {
        let mut response = Response::new(());
        let headers = response.headers_mut();
        self.write_headers(headers);
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(GRPC));
        let (code, message) = (self.refusal.grpc_code(), self.message());
        headers.insert(&GRPC_STATUS, HeaderValue::from(code));
        let stays = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'%';
        if let Ok(value) = HeaderValue::try_from(percent_encoded(&message, stays)) {
            headers.insert(&GRPC_MESSAGE, value);
        }
        if let Some(wait) = self.wait() {
            let details = STANDARD_NO_PAD.encode(Status::new(code, message, wait).encode_to_vec());
            if let Ok(value) = HeaderValue::try_from(details) {
                headers.insert(&GRPC_DETAILS, value);
            }
        }
        response
    }
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`.
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Delay>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Delay {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

impl Status {
    fn new(code: i32, message: String, wait: Duration) -> Self {
        let retry_delay = Some(Delay {
            seconds: i64::try_from(wait.as_secs()).unwrap_or(MAX_DELAY_SECS).min(MAX_DELAY_SECS),
            nanos: i32::try_from(wait.subsec_nanos()).unwrap_or(0),
        });
        let value = RetryInfo { retry_delay }.encode_to_vec();
        let type_url = "type.googleapis.com/google.rpc.RetryInfo".to_owned();
        Self { code, message, details: vec![Any { type_url, value }] }
    }
}

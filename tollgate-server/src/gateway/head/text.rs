//! Writes message heads as text.

use http::header::{CONNECTION, CONTENT_LENGTH, DATE};
use http::{HeaderMap, Response, StatusCode};

use super::headers::X_REQUEST_ID;

pub(in crate::gateway) const CLOSE: &[u8] = b"connection: close\r\n";

/// Only clients of HTTP/1.0 need it.
pub(in crate::gateway) const KEEP_ALIVE: &[u8] = b"connection: keep-alive\r\n";

pub(in crate::gateway) const UPGRADE: &[u8] = b"connection: upgrade\r\n";

pub(in crate::gateway) fn put(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.reserve(name.len() + value.len() + 4);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

pub(in crate::gateway) fn put_headers(out: &mut Vec<u8>, headers: &HeaderMap) {
    for (name, value) in headers {
        put(out, name.as_str(), value.as_bytes());
    }
}

/// Writes the status line.
pub(in crate::gateway) fn put_status(out: &mut Vec<u8>, status: StatusCode, reason: &[u8]) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(reason);
    out.extend_from_slice(b"\r\n");
}

/// Writes a complete response of the gateway. `date` and `connection` are header lines, of which the second may be
/// empty, and `id` is the request's ID.
pub(in crate::gateway) fn put_answer(
    out: &mut Vec<u8>,
    response: &Response<bytes::Bytes>,
    (date, connection): (&[u8], &[u8]),
    id: Option<&[u8]>,
) {
    let status = response.status();
    put_status(out, status, status.canonical_reason().unwrap_or_default().as_bytes());
    for (name, value) in response.headers() {
        if id.is_none() || *name != X_REQUEST_ID {
            put(out, name.as_str(), value.as_bytes());
        }
    }
    if let Some(id) = id {
        put(out, X_REQUEST_ID.as_str(), id);
    }
    let has_body = status != StatusCode::NO_CONTENT && status != StatusCode::NOT_MODIFIED;
    if has_body && !response.headers().contains_key(CONTENT_LENGTH) {
        put(out, CONTENT_LENGTH.as_str(), itoa::Buffer::new().format(response.body().len()).as_bytes());
    }
    if !response.headers().contains_key(DATE) {
        out.extend_from_slice(date);
    }
    if !response.headers().contains_key(CONNECTION) {
        out.extend_from_slice(connection);
    }
    out.extend_from_slice(b"\r\n");
    if has_body {
        out.extend_from_slice(response.body());
    }
}

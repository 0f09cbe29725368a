//! Writes status lines and headers.

use http::{HeaderMap, StatusCode};

/// `Connection: close`.
pub const CLOSE: &[u8] = b"connection: close\r\n";

/// `Connection: keep-alive`. Only clients of HTTP/1.0 need it.
pub const KEEP_ALIVE: &[u8] = b"connection: keep-alive\r\n";

/// `Connection: upgrade`.
pub const UPGRADE: &[u8] = b"connection: upgrade\r\n";

/// Writes a header.
#[inline]
pub fn put(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.reserve(name.len() + value.len() + 4);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

/// Writes headers.
pub fn put_headers(out: &mut Vec<u8>, headers: &HeaderMap) {
    for (name, value) in headers {
        put(out, name.as_str(), value.as_bytes());
    }
}

/// Writes the status line.
#[inline]
pub fn put_status(out: &mut Vec<u8>, status: StatusCode, reason: &[u8]) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(reason);
    out.extend_from_slice(b"\r\n");
}

/// Returns whether a final response with this status has no body, whatever its headers say.
#[inline]
#[must_use]
pub fn lacks_body(status: StatusCode) -> bool {
    matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED)
}

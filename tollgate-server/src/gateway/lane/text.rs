//! Heads as text.

use http::header::{CONTENT_LENGTH, DATE};
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};

/// A message with more headers is not plain.
pub(super) const MAX_HEADERS: usize = 64;

pub(super) fn put(out: &mut Vec<u8>, name: &HeaderName, value: &[u8]) {
    out.extend_from_slice(name.as_str().as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

pub(super) fn put_headers(out: &mut Vec<u8>, headers: &HeaderMap<HeaderValue>) {
    for (name, value) in headers {
        put(out, name, value.as_bytes());
    }
}

/// The first line of an answer.
pub(super) fn put_status(out: &mut Vec<u8>, status: StatusCode, reason: &[u8]) {
    out.extend_from_slice(b"HTTP/1.1 ");
    out.extend_from_slice(status.as_str().as_bytes());
    out.push(b' ');
    out.extend_from_slice(reason);
    out.extend_from_slice(b"\r\n");
}

/// The end of a head.
pub(super) fn put_end(out: &mut Vec<u8>, headers: &HeaderMap, date: &str, is_last: bool) {
    if !headers.contains_key(DATE) {
        put(out, &DATE, date.as_bytes());
    }
    if is_last {
        out.extend_from_slice(b"connection: close\r\n");
    }
    out.extend_from_slice(b"\r\n");
}

/// A whole answer that is written here.
pub(super) fn put_answer(out: &mut Vec<u8>, response: &Response<bytes::Bytes>, date: &str, is_last: bool) {
    let status = response.status();
    put_status(out, status, status.canonical_reason().unwrap_or_default().as_bytes());
    put_headers(out, response.headers());
    if !response.headers().contains_key(CONTENT_LENGTH) {
        put(out, &CONTENT_LENGTH, itoa::Buffer::new().format(response.body().len()).as_bytes());
    }
    put_end(out, response.headers(), date, is_last);
    out.extend_from_slice(response.body());
}

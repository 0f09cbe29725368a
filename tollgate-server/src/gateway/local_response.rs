//! Responses that the gateway itself writes, for HTTP/1 and HTTP/2: to requests that fail, and to those that it answers.

use std::collections::BTreeMap;

use bytes::Bytes;
use http::header::{ALLOW, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, DATE, HOST, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};
use serde::Serialize;
use tollgate_http::internal::HeaderLine;
use tollgate_http1::InvalidHead;
use tollgate_rules::internal::Unreadable;

use super::client::Client;
use super::failure::{Failure, MALFORMED};
use super::head::RequestHead;
use super::head::headers::{self, HeaderKind, X_REQUEST_ID};
use super::head::upstream_head;

/// The maximum length of an unwanted body that is read, so that the connection stays usable. A longer body closes the
/// connection.
pub(super) const MAX_DRAINED_BYTES: usize = 256 << 10;

/// The maximum length of an echoed body. Longer bodies are left out.
pub(super) const MAX_ECHOED_BYTES: usize = 64 << 10;

/// The methods in the `Allow` header. Others are accepted, too.
const METHODS: &str = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS, TRACE";

/// Returns the response for a failure.
pub(super) fn failure(failure: Failure) -> Response<Bytes> {
    let mut response = json(failure.status(), Bytes::from_static(failure.body().as_bytes()));
    if failure.status() == StatusCode::BAD_REQUEST {
        // The rest of the connection may have more than one interpretation, too.
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    if failure == Failure::Connect {
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(METHODS));
    }
    if failure.status() == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

/// Returns the response to a request with more than one interpretation. It names the ambiguous part, and the reason as
/// metrics do.
pub(super) fn unreadable(problem: &Unreadable) -> Response<Bytes> {
    let body = serde_json::json!({
        "error": "bad_request",
        "reason": problem.reason(),
        "message": problem.to_string(),
    });
    let mut response = json(StatusCode::BAD_REQUEST, Bytes::from(body.to_string()));
    // The rest of the connection may have more than one interpretation, too.
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Returns the response to a head that cannot be parsed. The caller closes the connection.
pub(super) fn unparsed(invalid: InvalidHead) -> Response<Bytes> {
    let (error, reason, message) = match invalid {
        InvalidHead::TooLong => (
            "head_too_long",
            None,
            "The request head is longer than gateway.max_head, or has more than 100 headers: send fewer or shorter headers."
                .to_owned(),
        ),
        InvalidHead::TargetTooLong => {
            ("target_too_long", None, "The request target is longer than 65,534 bytes: send a shorter one.".to_owned())
        }
        InvalidHead::Malformed => (
            "bad_request",
            Some(MALFORMED),
            "The request is not valid HTTP/1: send a request line and headers as in RFC 9112.".to_owned(),
        ),
        InvalidHead::Ambiguous(ambiguity) => {
            ("bad_request", ambiguity.reason(), format!("The request is refused, because {ambiguity}: {}.", ambiguity.fix()))
        }
    };
    let mut body = serde_json::json!({ "error": error });
    if let Some(reason) = reason {
        body["reason"] = reason.into();
    }
    body["message"] = message.into();
    json(invalid.status(), Bytes::from(body.to_string()))
}

fn json(status: StatusCode, body: Bytes) -> Response<Bytes> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The echo of a request.
#[derive(Serialize)]
struct EchoedRequest<'a> {
    method: &'a str,
    path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    query: Option<&'a str>,
    client: String,
    headers: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    body: String,
}

/// Returns the response of the built-in echo upstream: the request that it got, so that limits can be tried without a
/// service.
pub(super) fn echo(head: &RequestHead<'_>, client: &Client, body: String) -> Response<Bytes> {
    let (path, query) = head.path_and_query();
    let text =
        |line: &HeaderLine<'_>| (line.name.to_ascii_lowercase(), String::from_utf8_lossy(line.value).into_owned());
    let mut headers: BTreeMap<_, _> = head.headers.lines.iter().map(text).collect();
    if let Some(host) = head.host() {
        // Clients of HTTP/2 send it as `:authority`.
        headers.entry(HOST.as_str().to_owned()).or_insert_with(|| String::from_utf8_lossy(host).into_owned());
    }
    let client = String::from_utf8_lossy(client.address_text.as_bytes()).into_owned();
    let echoed = EchoedRequest { method: head.method, path, query, client, headers, body };
    let mut text = serde_json::to_vec(&echoed).unwrap_or_default();
    text.push(b'\n');
    json(StatusCode::OK, Bytes::from(text))
}

/// Returns the response of the gateway as the final recipient of a request with TRACE or OPTIONS, which may not be forwarded
/// (RFC 9110, section 7.6.2). Of its headers, a trace has only those that describe its way: others may be secrets, which a
/// script in a browser must not see.
pub(super) fn final_recipient(head: &RequestHead<'_>) -> Response<Bytes> {
    if head.method == "OPTIONS" {
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = StatusCode::NO_CONTENT;
        response.headers_mut().insert(ALLOW, HeaderValue::from_static(METHODS));
        return response;
    }
    let mut text = format!("{} {} {:?}\r\n", head.method, head.target.received_str(), head.version).into_bytes();
    if let Some(host) = head.host() {
        headers::put(&mut text, "Host", host);
    }
    for via in head.headers.values(HeaderKind::Via) {
        headers::put(&mut text, "Via", &upstream_head::without_node_names(via));
    }
    head.headers.values(HeaderKind::MaxForwards).for_each(|value| headers::put(&mut text, "Max-Forwards", value));
    text.extend_from_slice(b"\r\n");
    let mut response = Response::new(Bytes::from(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("message/http"));
    response
}

/// Writes a complete response of the gateway, without the body if it answers HEAD. `date` and `connection` are header
/// lines, of which the second may be empty, and `id` is the request's ID. Returns the length of the body that was written.
pub(super) fn put(
    out: &mut Vec<u8>,
    (response, is_head): (&Response<Bytes>, bool),
    (date, connection): (&[u8], &[u8]),
    id: Option<&[u8]>,
) -> usize {
    let status = response.status();
    headers::put_status(out, status, status.canonical_reason().unwrap_or_default().as_bytes());
    for (name, value) in response.headers() {
        if id.is_none() || *name != X_REQUEST_ID {
            headers::put(out, name.as_str(), value.as_bytes());
        }
    }
    if let Some(id) = id {
        headers::put(out, X_REQUEST_ID.as_str(), id);
    }
    let has_body = !headers::lacks_body(status);
    if has_body && !response.headers().contains_key(CONTENT_LENGTH) {
        headers::put(out, CONTENT_LENGTH.as_str(), itoa::Buffer::new().format(response.body().len()).as_bytes());
    }
    if !response.headers().contains_key(DATE) {
        out.extend_from_slice(date);
    }
    if !response.headers().contains_key(CONNECTION) {
        out.extend_from_slice(connection);
    }
    out.extend_from_slice(b"\r\n");
    if !has_body || is_head {
        return 0;
    }
    out.extend_from_slice(response.body());
    response.body().len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_http1::ambiguity::AMBIGUITIES;

    #[test]
    fn responses_to_heads_that_cannot_be_parsed_name_the_problem_and_the_fix() {
        let ambiguous = AMBIGUITIES.map(|(ambiguity, _)| InvalidHead::Ambiguous(ambiguity));
        let all =
            [InvalidHead::TooLong, InvalidHead::TargetTooLong, InvalidHead::Malformed].into_iter().chain(ambiguous);
        let lines = all.map(|invalid| {
            let response = unparsed(invalid);
            format!("{} {}", response.status().as_u16(), String::from_utf8_lossy(response.body()))
        });
        insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
    }
}

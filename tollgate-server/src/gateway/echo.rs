//! The built-in echo upstream: it responds with the request it got, so that limits can be tried without a service.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response};
use http_body_util::BodyExt;
use serde::Serialize;
use tollgate::internal::HeaderLine;

use super::client::Client;
use super::head::RequestHead;
use super::http2::request_body::{ClientBody, ToUpstream};

/// The maximum length of an echoed body. Longer bodies are left out.
pub(super) const MAX_BODY_BYTES: usize = 64 << 10;

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

/// Reads the body of a request. A body that is too long or broken is left out.
pub(super) async fn collect(body: ClientBody, client: &Arc<Client>) -> String {
    let body = ToUpstream::new(body, client, MAX_BODY_BYTES as u64);
    match body.collect().await {
        Ok(body) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        Err(_) => String::new(),
    }
}

/// Returns the response to a request.
pub(super) fn response(head: &RequestHead<'_>, client: &Client, body: String) -> Response<Bytes> {
    let (path, query) = head.path_and_query();
    let text =
        |line: &HeaderLine<'_>| (line.name.to_ascii_lowercase(), String::from_utf8_lossy(line.value).into_owned());
    let headers = head.headers.lines.iter().map(text).collect();
    let client = client.address.ip().to_string();
    let echoed = EchoedRequest { method: head.method, path, query, client, headers, body };
    let mut text = serde_json::to_vec(&echoed).unwrap_or_default();
    text.push(b'\n');
    let mut response = Response::new(Bytes::from(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

//! The built-in echo upstream: it responds with the request it got, so that limits can be tried without a service.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response};
use http_body_util::BodyExt;
use serde::Serialize;

use super::body::{ClientBody, ToUpstream};
use super::client::Client;

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

pub(super) async fn answer(request: Request<ClientBody>, client: &Arc<Client>) -> Response<Bytes> {
    let (parts, body) = request.into_parts();
    let body = ToUpstream::new(body, client, MAX_BODY_BYTES as u64);
    let body = match body.collect().await {
        Ok(body) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        Err(_) => String::new(),
    };
    let line = (parts.method.as_str(), parts.uri.path(), parts.uri.query());
    let headers = parts.headers.iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
    response(line, headers, client, body)
}

/// Returns the response to a request with this method, path and query.
pub(super) fn response<'a>(
    (method, path, query): (&str, &str, Option<&str>),
    headers: impl Iterator<Item = (&'a str, &'a [u8])>,
    client: &Client,
    body: String,
) -> Response<Bytes> {
    let headers =
        headers.map(|(name, value)| (name.to_ascii_lowercase(), String::from_utf8_lossy(value).into_owned())).collect();
    let client = client.address.ip().to_string();
    let echoed = EchoedRequest { method, path, query, client, headers, body };
    let mut text = serde_json::to_vec(&echoed).unwrap_or_default();
    text.push(b'\n');
    let mut response = Response::new(Bytes::from(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

//! The built-in echo upstream: it responds with the request it got, so that limits can be tried without a service.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::Serialize;

use super::body::ToUpstream;
use super::client::Client;

/// The maximum length of an echoed body. Longer bodies are left out.
const MAX_BODY_BYTES: usize = 64 << 10;

/// The echo of a request.
#[derive(Serialize)]
struct EchoedRequest<'a> {
    method: &'a str,
    path: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    query: Option<&'a str>,
    client: String,
    headers: BTreeMap<&'a str, String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    body: String,
}

pub(super) async fn answer(request: Request<Incoming>, client: &Arc<Client>) -> Response<Bytes> {
    let (parts, body) = request.into_parts();
    let body = ToUpstream::new(body, client, MAX_BODY_BYTES as u64);
    let body = match body.collect().await {
        Ok(body) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        Err(_) => String::new(),
    };
    let echoed = EchoedRequest {
        method: parts.method.as_str(),
        path: parts.uri.path(),
        query: parts.uri.query(),
        client: client.address.ip().to_string(),
        headers: parts
            .headers
            .iter()
            .map(|(name, value)| (name.as_str(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
            .collect(),
        body,
    };
    let mut text = serde_json::to_vec(&echoed).unwrap_or_default();
    text.push(b'\n');
    let mut response = Response::new(Bytes::from(text));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

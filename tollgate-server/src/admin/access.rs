//! Authenticates the clients of the admin API.
//!
//! The API changes rules and keys, so it is never open to a network: a listener that other machines reach needs tokens
//! or client certificates. Local users need neither on a loopback address. Browsers are kept out by the check of
//! `Origin`, `Sec-Fetch-Site` and `Host` in front of the whole listener, and by the media type of changes: a form cannot
//! send JSON or YAML, and a script of another site needs a CORS preflight, which fails here.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::AdminState;
use crate::service::error_body::ErrorBody;
use crate::service::http::{self, authenticate, with_challenge};
use crate::service::tokens::Tokens;

/// The clients that may use the API of a listener.
#[derive(Debug)]
pub(crate) enum Access {
    /// Every user of this machine. The listener is on a loopback address.
    Local,
    /// Clients with a token.
    Tokens(Arc<Tokens>),
    /// Clients with a certificate, which the TLS handshake has verified.
    Certificates,
    /// No one: other machines reach the listener, and it has no tokens.
    Closed,
}

/// The client of a request, for the log. It is in the extensions of every request to the API.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    /// `local`, `certificate`, or `token` and the start of its digest.
    name: String,
    address: Option<SocketAddr>,
}

impl fmt::Display for Caller {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => write!(out, "{} at {}", self.name, address.ip().to_canonical()),
            None => out.write_str(&self.name),
        }
    }
}

/// Refuses requests that may not use the API, and notes the client of all others.
pub(super) async fn check(State(state): State<AdminState>, mut request: Request, next: Next) -> Response {
    let address = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|info| info.0);
    let name = match state.access.name(request.headers()) {
        Ok(name) => name,
        Err(refusal) if refusal.status == StatusCode::UNAUTHORIZED => return with_challenge(refusal),
        Err(refusal) => return refusal.into_response(),
    };
    if let Err(error) = check_media_type(request.method(), request.headers()) {
        return error.into_response();
    }
    request.extensions_mut().insert(Caller { name, address });
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

impl Access {
    /// Returns the name of a client for the log, or the refusal of a client that is not allowed.
    fn name(&self, headers: &HeaderMap) -> Result<String, ErrorBody> {
        match self {
            Self::Local => Ok("local".to_owned()),
            Self::Certificates => Ok("certificate".to_owned()),
            Self::Tokens(tokens) => {
                authenticate(headers, tokens).map(|credential| format!("token {}", credential.short_digest()))
            }
            Self::Closed => Err(ErrorBody {
                status: StatusCode::FORBIDDEN,
                error: "api_closed",
                message: "the admin API is closed, because other machines reach this listener and it has no tokens: \
                          set admin.tokens_file, or listen on 127.0.0.1"
                    .to_owned(),
            }),
        }
    }
}

/// Checks the media type of a change. A web page of another site can send forms and plain text without a CORS
/// preflight, but neither JSON nor YAML.
fn check_media_type(method: &Method, headers: &HeaderMap) -> Result<(), ErrorBody> {
    if matches!(*method, Method::GET | Method::HEAD) {
        return Ok(());
    }
    let fix = "send `Content-Type: application/json`, or `application/yaml` for rules";
    http::check_media_type(headers, &["application/json", "application/yaml"], fix)
}

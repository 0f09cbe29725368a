//! `/v1/authorize`: the answer to a reverse proxy that asks before it forwards a request. 200 means that the request may
//! pass. Any other status is the response to the client.
//!
//! The proxy describes the original request, in the way that [`Original`] reads. It is trusted to do so: a listener
//! that clients can reach would let them describe other requests than their own.
//!
//! The headers of the original client arrive here too, so `Origin` and `Sec-Fetch-Site` say nothing about the sender of
//! this request. A web page of another site cannot drive this endpoint nevertheless. It needs a header such as
//! `X-Forwarded-Uri`, which a browser sends to another site only after a CORS preflight, and no preflight succeeds here.
//! With DNS rebinding the `Host` is one that is not served, unless the listener requires a token, which a page lacks.

mod original;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use tokio::time::sleep;
use tollgate_rules::{Facts, Outcome};

use self::original::{Original, deny_status};
use super::super::cross_site::Hosts;
use super::super::tokens::Tokens;
use super::{ServiceState, authenticate};
use crate::service::error_body::ErrorBody;

/// The path of the endpoint. Envoy appends the original path to it.
const PATH: &str = "/v1/authorize";

/// The token of a proxy, in place of `Authorization`, which may be the original client's.
static TOKEN: HeaderName = HeaderName::from_static("x-tollgate-token");

/// Returns the routes of the endpoint, with their own checks of tokens and browsers.
pub(super) fn router(state: ServiceState, hosts: Hosts) -> Router {
    Router::new()
        .route(PATH, any(authorize))
        .route("/v1/authorize/", any(authorize))
        .route("/v1/authorize/{*path}", any(authorize))
        .with_state((state, hosts))
}

/// Answers a proxy. The body is not read: no limit needs it.
async fn authorize(State((state, hosts)): State<(ServiceState, Hosts)>, request: Request) -> Response {
    let (mut parts, _) = request.into_parts();
    if let Err(response) = admit(&mut parts, state.tokens.as_deref(), &hosts) {
        return *response;
    }
    let deny_status = match deny_status(&parts) {
        Ok(status) => status,
        Err(error) => return error.into_response(),
    };
    match Original::take(&mut parts) {
        Ok(original) => decide(&state, &original, &parts.headers, deny_status).await,
        Err(problem) => {
            let status = if problem.is_by_client { deny_status } else { None };
            with_status(problem.error.into_response(), status)
        }
    }
}

/// Checks that the sender may ask, and removes its credentials from the headers of the original request.
fn admit(parts: &mut Parts, tokens: Option<&Tokens>, hosts: &Hosts) -> Result<(), Box<Response>> {
    let Some(tokens) = tokens else {
        return hosts.check(&parts.uri, &parts.headers).map_err(|error| Box::new(error.into_response()));
    };
    let refuse = |error: ErrorBody| Box::new(([(header::WWW_AUTHENTICATE, "Bearer")], error).into_response());
    let mut sent = parts.headers.get_all(&TOKEN).iter();
    match (sent.next(), sent.next()) {
        (None, _) => {
            authenticate(&parts.headers, tokens).map(drop).map_err(|error| {
                // An invalid `Authorization` is probably the original client's.
                let message = "the request has no valid token: send one token from the tokens_file of this listener as \
                               `X-Tollgate-Token: TOKEN`, or as `Authorization: Bearer TOKEN`";
                refuse(ErrorBody { message: message.to_owned(), ..error })
            })?;
            parts.headers.remove(header::AUTHORIZATION);
        }
        (Some(token), None) if tokens.contains(token.as_bytes().trim_ascii()) => {
            parts.headers.remove(&TOKEN);
        }
        _ => {
            return Err(refuse(ErrorBody {
                status: StatusCode::UNAUTHORIZED,
                error: "token_invalid",
                message: "X-Tollgate-Token is not valid: send one token from the tokens_file of this listener"
                    .to_owned(),
            }));
        }
    }
    Ok(())
}

async fn decide(
    state: &ServiceState,
    original: &Original,
    headers: &HeaderMap,
    deny_status: Option<StatusCode>,
) -> Response {
    let check = {
        let mut facts = Facts::new(&original.method, &original.target).headers(headers).served_elsewhere();
        if let Some(host) = &original.host {
            facts = facts.host(host);
        }
        if let Some(peer) = original.peer {
            facts = facts.peer(peer);
        }
        state.gate.check(&facts)
    };
    let outcome = check.outcome().await;
    state.decisions.record([&outcome]);
    // Never `grpc_response`: its status is 200, which the proxy takes for a permission.
    match outcome.response(headers) {
        Some(refusal) => with_status(refusal.map(Body::from), deny_status),
        None => allow(&outcome).await,
    }
}

/// Returns the permission, after the time for which a queue delays the request.
async fn allow(outcome: &Outcome) -> Response {
    let delay = outcome.delay();
    if !delay.is_zero() {
        sleep(delay).await;
    }
    let mut response = Response::new(Body::empty());
    outcome.write_headers(response.headers_mut());
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn with_status(mut response: Response, status: Option<StatusCode>) -> Response {
    if let Some(status) = status {
        *response.status_mut() = status;
    }
    response
}

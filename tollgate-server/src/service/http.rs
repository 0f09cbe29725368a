//! Checks, refunds, resets and reservations as JSON.
//!
//! A valid check is answered with 200 whether it is allowed or denied: a denial is a decision too. All checks of a
//! batch are parsed before the first is decided, so an invalid batch spends nothing. Then each is decided separately,
//! all by the same rules. In memory they are decided in order. For Redis they are sent in order and share calls.

mod authorize;
mod batch;
mod changes;
mod check_request;
mod check_response;
mod connection;
mod facts;
mod openapi;
mod reservations;
mod simple_check;
mod values;

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::future::join_all;
use tokio::net::TcpListener;
use tokio::time::timeout;
use tollgate_http::Refusal;
use tollgate_net::listening::Stop;
use tollgate_rules::RuleSet;
use tollgate_rules::{Check, Gate, Outcome};
use tollgate_telemetry::decisions::Decisions;
use tollgate_telemetry::traces::{self, DecisionNote, RequestSpan, SpanEnd};
use tollgate_telemetry::unknown::Unknown;

pub(crate) use self::batch::parse as parse_json;
use self::batch::{Batch, Shape};
use self::check_request::{CheckRequest, ResolvedCheck};
pub(crate) use self::check_request::{invalid_key, resolve_key, unknown_limit};
use self::check_response::CheckResponse;
pub(crate) use self::check_response::reason;
use self::connection::CheckProtocol;
use self::simple_check::{After, SimpleChecks};
pub(crate) use self::values::{Object, OneOrMany, StringOrStrings, Units};
use super::connections::{self, BodyError, Options, Requests};
use super::cross_site::{Hosts, guard};
use super::error_body::{ErrorBody, quoted};
use super::tokens::{Credential, Tokens};

/// A full batch of checks of about 1,000 bytes each.
const MAX_BODY_BYTES: usize = 1024 * 1024;

/// The longest wait for a body. A client that has the whole body sends it much faster.
const BODY_DEADLINE: Duration = Duration::from_secs(10);

/// The state that requests share.
#[derive(Clone)]
pub(crate) struct ServiceState {
    pub(crate) gate: Gate,
    /// Counts of decisions.
    pub(crate) decisions: Arc<Decisions>,
    /// The tokens that clients send. Without them no client needs one.
    pub(crate) tokens: Option<Arc<Tokens>>,
}

/// Serves until `shutdown` resolves, then finishes pending requests.
pub(crate) async fn run(
    listener: Arc<TcpListener>,
    state: ServiceState,
    (options, hosts): (Options, Hosts),
    shutdown: impl Future<Output = Stop>,
) {
    let authorize = authorize::router(state.clone(), hosts.clone());
    let router = guard(router(state.clone()), hosts.clone()).merge(authorize);
    let router = if traces::is_on() { router.layer(from_fn(traced)) } else { router };
    let requests = Requests { surface: options.surface, surfaces: Arc::clone(&options.surfaces) };
    let protocol = CheckProtocol { router, requests, state, hosts };
    connections::serve_protocol(listener, protocol, options, shutdown).await;
}

/// Returns the routes of the service, for requests that need no connection.
pub(crate) fn routes(state: ServiceState) -> Router {
    router(state)
}

/// Answers a simple check as on a connection. Returns `None` if it is left to the router.
pub(crate) async fn answer_simple_check(state: ServiceState, request: &[u8]) -> Option<Vec<u8>> {
    let mut output = Vec::new();
    let mut checks = SimpleChecks::new(state, Hosts::new("service.http.hosts", [], None));
    checks.answer(request, &mut output, After::KeepAlive).await.map(|_| output)
}

/// Records a span for a request, with the decision that its response has.
async fn traced(request: Request, next: Next) -> Response {
    let mut span = RequestSpan::start(request.method().as_str(), request.uri().path(), request.headers().into());
    let route = format!("service.http {}", request.uri().path());
    let response = next.run(request).await;
    if let Some(note) = response.extensions().get::<DecisionNote>() {
        span.note_decision(note);
    }
    span.end(SpanEnd { status: Some(response.status()), route: Some(&route), id: None });
    response
}

fn router(state: ServiceState) -> Router {
    let tokens = state.tokens.clone();
    let router = Router::new()
        .route("/v1/check", post(check))
        .route("/v1/peek", post(peek))
        .route("/v1/refund", post(changes::refund))
        .route("/v1/reset", post(changes::reset))
        .route("/v1/reserve", post(reservations::reserve))
        .route("/v1/settle", post(reservations::settle))
        .method_not_allowed_fallback(wrong_method)
        .fallback(wrong_path)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(state);
    let router = match tokens {
        Some(tokens) => router.layer(from_fn(move |request: Request, next: Next| {
            let refusal = authenticate(request.headers(), &tokens).err();
            async move {
                match refusal {
                    Some(refusal) => with_challenge(refusal),
                    None => next.run(request).await,
                }
            }
        })),
        None => router,
    };
    // Health checks have no token, and the description has no secrets.
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/openapi.json", get(openapi::openapi))
        .merge(router)
}

/// Checks the token of a request. Two headers are refused, because a proxy may have checked the other one.
pub(crate) fn authenticate(headers: &HeaderMap, tokens: &Tokens) -> Result<Credential, ErrorBody> {
    let refuse =
        |error, message: &str| ErrorBody { status: StatusCode::UNAUTHORIZED, error, message: message.to_owned() };
    let mut sent = headers.get_all(header::AUTHORIZATION).iter();
    let (Some(value), None) = (sent.next(), sent.next()) else {
        return Err(refuse("token_missing", "the request has no token: send one `Authorization: Bearer TOKEN` header"));
    };
    let (scheme, token) = value.as_bytes().split_at(value.len().min("Bearer ".len()));
    if !scheme.eq_ignore_ascii_case(b"Bearer ") {
        return Err(refuse("token_missing", "the request has no bearer token: send `Authorization: Bearer TOKEN`"));
    }
    tokens.authenticate(token.trim_ascii()).ok_or_else(|| {
        refuse("token_invalid", "the token is not valid: send a token from the tokens_file of this listener")
    })
}

/// Returns the response to a request without a valid token.
pub(crate) fn with_challenge(refusal: ErrorBody) -> Response {
    ([(header::WWW_AUTHENTICATE, "Bearer")], refusal).into_response()
}

async fn check(State(state): State<ServiceState>, request: Request) -> Result<Response, ErrorBody> {
    let batch = Batch::<CheckRequest>::parse(&read_json(request).await?)?;
    let answers = decide(&state, &batch, CheckRequest::resolve).await?;
    // A check with cost 0 takes nothing and is not counted as a decision.
    let decided = answers.iter().zip(&batch.items).filter(|(answer, item)| !item.is_peek() && !answer.is_denied);
    state.decisions.record(decided.map(|(answer, _)| &answer.outcome));
    Ok(respond(&batch, &answers))
}

async fn peek(State(state): State<ServiceState>, request: Request) -> Result<Response, ErrorBody> {
    let batch = Batch::<CheckRequest>::parse(&read_json(request).await?)?;
    Ok(respond(&batch, &decide(&state, &batch, CheckRequest::resolve_peek).await?))
}

/// The answer to one check.
struct Answer {
    outcome: Outcome,
    /// A problem with the question.
    unknown: Option<Unknown>,
    /// Whether the check is denied for that problem.
    is_denied: bool,
}

/// Decides all checks of a batch by the same rules, even if a reload happens meanwhile.
async fn decide(
    state: &ServiceState,
    batch: &Batch<CheckRequest>,
    resolve: impl for<'q> Fn(&'q CheckRequest, &RuleSet, &dyn Fn() -> String) -> Result<ResolvedCheck<'q>, ErrorBody>,
) -> Result<Vec<Answer>, ErrorBody> {
    let gate = state.gate.pinned();
    let rules = gate.rules();
    let deny = rules.denies_unknown();
    let checks: Vec<(Check, Option<Unknown>)> = {
        let resolved = batch.resolve(|check, place| resolve(check, &rules, place))?;
        let start = |(check, question): (&ResolvedCheck<'_>, &CheckRequest)| {
            let unknown = question.described_request().and_then(|request| request.unknown_plan(&rules));
            // A check that is denied takes nothing.
            let check = if deny && unknown.is_some() { check.start_peek(&gate) } else { check.start(&gate) };
            (check, unknown)
        };
        resolved.iter().zip(&batch.items).map(start).collect()
    };
    let (checks, unknown): (Vec<_>, Vec<_>) = checks.into_iter().unzip();
    let mut outcomes = join_all(checks.into_iter().map(Check::outcome)).await;
    if let (Shape::One, [outcome]) = (batch.shape, &outcomes[..])
        && let Some(Refusal::Unreadable(request)) = outcome.refusal()
    {
        return Err(ErrorBody::invalid(request.message.clone()));
    }
    let of_requests = outcomes.iter_mut().zip(&batch.items).filter(|(_, check)| check.described_request().is_some());
    join_all(of_requests.map(|(outcome, _)| outcome.read_each_limit())).await;
    let answers = outcomes.into_iter().zip(unknown).zip(&batch.items).map(|((outcome, unknown), question)| {
        let Some(request) = question.described_request() else {
            return Answer { outcome, unknown: None, is_denied: false };
        };
        let has_no_limit = || {
            let is_counted = outcome.decision().is_some() || outcome.shadow_decisions().next().is_some();
            outcome.is_allowed() && !is_counted && !request.meets_limit(&rules)
        };
        let unknown = unknown.or_else(|| has_no_limit().then_some(Unknown::Request));
        if let Some(unknown) = &unknown {
            state.decisions.unknown.count(unknown, request.descriptor_names());
        }
        // A request that is refused for another reason keeps that.
        let is_denied = deny && unknown.is_some() && outcome.is_allowed();
        Answer { outcome, unknown, is_denied }
    });
    Ok(answers.collect())
}

fn respond(batch: &Batch<CheckRequest>, answers: &[Answer]) -> Response {
    let mut responses = batch.items.iter().zip(answers).map(|(check, Answer { outcome, unknown, is_denied })| {
        if check.described_request().is_none() {
            return CheckResponse::new(outcome);
        }
        let response = CheckResponse::with_limits(outcome);
        match unknown {
            Some(unknown) if *is_denied => response.deny(unknown),
            Some(unknown) => response.warn(unknown),
            None => response,
        }
    });
    let mut response = match batch.shape {
        Shape::One => Json(responses.next()).into_response(),
        Shape::Batch => Json(responses.collect::<Vec<_>>()).into_response(),
    };
    if traces::is_on() {
        // Of a batch, the first denial matters most.
        let mut outcomes = answers.iter().map(|answer| &answer.outcome);
        let noted = outcomes.clone().find(|outcome| !outcome.is_allowed()).or(outcomes.next());
        if let Some(outcome) = noted {
            response.extensions_mut().insert(DecisionNote::of(outcome));
        }
    }
    response
}

/// Reads the body of a request with JSON.
pub(crate) async fn read_json(request: Request) -> Result<Bytes, ErrorBody> {
    is_json(request.headers())?;
    read_body(request, MAX_BODY_BYTES).await
}

/// Reads the body of a request, up to `most` bytes.
pub(crate) async fn read_body(request: Request, most: usize) -> Result<Bytes, ErrorBody> {
    // A body with too large a Content-Length is refused before it is read.
    if request.body().size_hint().lower() > most as u64 {
        return Err(too_large(most));
    }
    match timeout(BODY_DEADLINE, Bytes::from_request(request, &())).await {
        Ok(Ok(body)) if body.len() > most => Err(too_large(most)),
        Ok(Ok(body)) => Ok(body),
        Ok(Err(rejection)) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => Err(too_large(most)),
        Ok(Err(rejection)) => Err(match BodyError::overload(&rejection) {
            Some(message) => {
                let (status, error) = (StatusCode::SERVICE_UNAVAILABLE, "overloaded");
                ErrorBody { status, error, message: message.to_owned() }
            }
            None => {
                let message = format!("{}: send the whole body", rejection.body_text());
                ErrorBody { status: StatusCode::BAD_REQUEST, error: "unreadable_body", message }
            }
        }),
        Err(_) => Err(ErrorBody {
            status: StatusCode::REQUEST_TIMEOUT,
            error: "body_timeout",
            message: format!("the body took longer than {} s: send it at once", BODY_DEADLINE.as_secs()),
        }),
    }
}

/// Checks the media type. A web page of another site cannot send this type without a CORS preflight, which fails here.
fn is_json(headers: &HeaderMap) -> Result<(), ErrorBody> {
    check_media_type(headers, &["application/json"], "send `Content-Type: application/json`, as `curl --json` does")
}

/// Checks that the media type of a body is one of those that are accepted.
pub(crate) fn check_media_type(headers: &HeaderMap, accepted: &[&str], fix: &str) -> Result<(), ErrorBody> {
    let sent = headers.get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or("?")).unwrap_or_default();
    let essence = sent.split(';').next().unwrap_or_default().trim();
    if accepted.iter().any(|known| essence.eq_ignore_ascii_case(known)) {
        return Ok(());
    }
    let problem = if sent.is_empty() {
        "the request has no Content-Type".to_owned()
    } else {
        format!("the Content-Type is {}", quoted(sent))
    };
    Err(ErrorBody {
        status: StatusCode::UNSUPPORTED_MEDIA_TYPE,
        error: "unsupported_media_type",
        message: format!("{problem}: {fix}"),
    })
}

fn too_large(most: usize) -> ErrorBody {
    ErrorBody {
        status: StatusCode::PAYLOAD_TOO_LARGE,
        error: "body_too_large",
        message: match most {
            MAX_BODY_BYTES => format!("the body is longer than {most} bytes: send smaller batches"),
            _ => format!("the body is longer than {most} bytes: send fewer rules"),
        },
    }
}

async fn wrong_method(method: Method, uri: Uri) -> impl IntoResponse {
    let error = ErrorBody {
        status: StatusCode::METHOD_NOT_ALLOWED,
        error: "method_not_allowed",
        message: format!("{} does not support {}: use POST", quoted(uri.path()), quoted(method.as_str())),
    };
    ([(header::ALLOW, "POST")], error)
}

async fn wrong_path(uri: Uri) -> ErrorBody {
    ErrorBody {
        status: StatusCode::NOT_FOUND,
        error: "not_found",
        message: format!(
            "no page is at {}: use POST /v1/check, /v1/peek, /v1/refund, /v1/reset, /v1/reserve or /v1/settle",
            quoted(uri.path())
        ),
    }
}

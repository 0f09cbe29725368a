//! Handlers, hooks and custom responses that use the decision.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode};
use tollgate_http::Refusal;
use tollgate_rules::{KeyPart, Match};
use tollgate_tower::LimitDecision;

use super::server::{Server, layer};
use super::{gate, per_minute};

async fn left(decision: LimitDecision) -> String {
    format!("{} of {} left by {}", decision.remaining(), decision.quota(), decision.limit_name())
}

async fn maybe_left(decision: Option<LimitDecision>) -> String {
    decision.map_or_else(|| "no limit".to_owned(), |decision| decision.remaining().to_string())
}

#[tokio::test]
async fn a_handler_reads_the_remaining_quota() {
    // Limits by address alone, which take the fast path, and others.
    for key in [KeyPart::ip(), KeyPart::method()] {
        for for_axum in [false, true] {
            let (gate, _) = gate([per_minute("small", 3).key(key.clone()), per_minute("large", 100)]);
            let layer = layer(&gate).share_decision();
            let app = Router::new().route("/", get(left));
            let app = if for_axum { app.layer(layer.for_axum()) } else { app.layer(layer) };
            let server = Server::serving(app).await;
            assert_eq!(server.get("/", &[]).await.body, "2 of 3 left by small");
            assert_eq!(server.get("/", &[]).await.body, "1 of 3 left by small");
        }
    }
}

#[tokio::test]
async fn a_handler_reads_the_remaining_quota_of_a_limit_by_address() {
    let (gate, _) = gate([per_minute("per-client", 3).key(KeyPart::ip())]);
    let app = Router::new().route("/", get(left)).layer(layer(&gate).share_decision());
    let server = Server::serving(app).await;
    assert_eq!(server.get("/", &[]).await.body, "2 of 3 left by per-client");
}

#[tokio::test]
async fn a_request_without_a_limit_has_no_decision() {
    let only = Match::everything().path("/limited");
    let (gate, _) = gate([per_minute("some", 3).matching(only)]);
    let app = Router::new()
        .route("/limited", get(maybe_left))
        .route("/free", get(maybe_left))
        .route("/strict", get(left))
        .layer(layer(&gate).share_decision());
    let server = Server::serving(app).await;
    assert_eq!(server.get("/limited", &[]).await.body, "2");
    assert_eq!(server.get("/free", &[]).await.body, "no limit");
    let strict = server.get("/strict", &[]).await;
    assert_eq!(strict.status, 500);
    insta::assert_snapshot!(strict.body, @"no rate limit decision in the request's extensions: call `share_decision` on a `RateLimitLayer` around this handler, or extract `Option<LimitDecision>` if not every request meets a limit");
}

#[tokio::test]
async fn decisions_are_not_shared_by_default() {
    let (gate, _) = gate([per_minute("all", 3)]);
    let server = Server::serving(Router::new().route("/", get(maybe_left)).layer(layer(&gate))).await;
    assert_eq!(server.get("/", &[]).await.body, "no limit");
}

#[tokio::test]
async fn a_hook_sees_every_decision_once() {
    for key in [KeyPart::ip(), KeyPart::method()] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        let (gate, _) = gate([per_minute("all", 1).key(key)]);
        let layer = layer(&gate).on_decision(move |outcome, request| {
            let remaining = outcome.decision().map(|decision| decision.remaining());
            let line = format!("{} {} {:?} {remaining:?}", request.method(), request.path(), outcome.refusal());
            log.lock().unwrap().push(line);
        });
        let server = Server::serving(Router::new().route("/a", get(async || "hello")).layer(layer)).await;
        assert_eq!(server.get("/a?b", &[]).await.status, 200);
        assert_eq!(server.get("/a", &[]).await.status, 429);
        assert_eq!(*seen.lock().unwrap(), ["GET /a None Some(0)", "GET /a Some(Limited) Some(0)"]);
    }
}

#[tokio::test]
async fn a_closure_builds_the_response_to_refused_requests() {
    let (gate, _) = gate([per_minute("all", 1)]);
    let layer = layer(&gate).refuse_with(|outcome, request, usual| {
        assert_eq!(outcome.refusal(), Some(&Refusal::Limited));
        let (mut head, _) = usual.into_parts();
        head.headers.insert("content-type", HeaderValue::from_static("text/plain"));
        let text = format!("{} is limited by {}", request.path(), outcome.limit().unwrap());
        Response::from_parts(head, Bytes::from(text))
    });
    let server = Server::serving(Router::new().fallback(async || "hello").layer(layer)).await;
    let allowed = server.get("/x", &[]).await;
    assert_eq!((allowed.status, allowed.body.as_str()), (200, "hello"));
    let refused = server.get("/x", &[]).await;
    assert_eq!((refused.status, refused.body.as_str()), (429, "/x is limited by all"));
    assert_eq!(refused.all(["content-type", "retry-after"]), [Some("text/plain"), Some("20")]);
    assert_eq!(refused.header("content-length"), Some("20"));
}

#[tokio::test]
async fn a_closure_may_replace_the_default_response() {
    let (gate, _) = gate([per_minute("all", 1)]);
    let layer = layer(&gate).refuse_with(|_, _, _| {
        let mut response = Response::new(Bytes::from_static(b"later"));
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
        response
    });
    let server = Server::serving(Router::new().fallback(async || "hello").layer(layer.for_axum())).await;
    server.get("/", &[]).await;
    let refused = server.get("/", &[]).await;
    assert_eq!((refused.status, refused.body.as_str(), refused.header("retry-after")), (503, "later", None));
}

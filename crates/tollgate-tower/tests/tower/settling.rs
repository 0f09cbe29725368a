//! Costs that are known only after a request was served.

use std::convert::Infallible;

use axum::Router;
use axum::extract::Query;
use axum::response::IntoResponse;
use axum::routing::get;
use bytes::Bytes;
use futures_util::future::poll_immediate;
use http::{Request, Response};
use http_body_util::Full;
use tollgate::{Limit, MINUTE, SlidingWindowLog};
use tollgate_rules::{Check, Cost, Gate, Match, Missing, Mode, Rule, StatusSet};
use tollgate_tower::{ActualCost, RateLimitLayer};
use tower::{Layer, Service, ServiceExt, service_fn};

use super::server::{Server, layer};
use super::{gate, per_minute, user};

fn tokens_and_requests() -> Gate {
    let log = |name: &str, limit| Rule::new(Limit::new(name, SlidingWindowLog::new(limit, MINUTE)).unwrap());
    gate([log("tokens", 1000).cost(Cost::constant(400)), log("requests", 50)]).0
}

fn left(gate: &Gate, limit: &str) -> u64 {
    let Ok(Check::Ready(looked)) = gate.check_by_name(limit, &[], 0) else { panic!("it is there, in memory") };
    looked.decision().unwrap().remaining()
}

/// `?units=N` reports the cost of the work, `?of=NAME` names the limit.
async fn work(Query(query): Query<Vec<(String, String)>>) -> impl IntoResponse {
    let value = |name: &str| query.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
    let mut response = "done".into_response();
    if let Some(units) = value("units").and_then(|units| units.parse().ok()) {
        let mut cost = ActualCost::new(units);
        if let Some(limit) = value("of") {
            cost = cost.of_limit(limit);
        }
        response.extensions_mut().insert(cost);
    }
    response
}

#[tokio::test]
async fn a_handler_reports_the_actual_cost_in_an_extension() {
    // (reported cost, tokens left, requests left)
    let table = [
        ("/", 600, 49),
        ("/?units=100", 900, 49),
        ("/?units=400", 600, 49),
        ("/?units=700", 300, 49),
        ("/?units=5000", 0, 49),
        ("/?units=0", 1000, 49),
        ("/?units=30&of=requests", 600, 20),
    ];
    for (path, tokens, requests) in table {
        let gate = tokens_and_requests();
        let server = Server::serving(Router::new().route("/", get(work)).layer(layer(&gate))).await;
        let answer = server.get(path, &[]).await;
        assert_eq!((answer.status, &*answer.body), (200, "done"));
        assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (tokens, requests), "{path}");
    }
}

#[tokio::test]
async fn the_actual_cost_settles_the_limits_of_every_layer() {
    for has_estimate in [false, true] {
        let outer = tokens_and_requests();
        let inner = if has_estimate { tokens_and_requests() } else { gate([per_minute("requests", 50)]).0 };
        let app = Router::new().route("/", get(work)).layer(layer(&inner)).layer(layer(&outer));
        let server = Server::serving(app).await;
        assert_eq!(server.get("/?units=700", &[]).await.status, 200);
        assert_eq!((left(&outer, "tokens"), left(&outer, "requests")), (300, 49));
        assert_eq!(left(&inner, "requests"), 49);
        assert!(!has_estimate || left(&inner, "tokens") == 300);
    }
}

/// In a release build, the response is unchanged and one line is written.
#[cfg(debug_assertions)]
#[tokio::test]
async fn actual_cost_that_belongs_to_no_limit_is_an_error_that_names_the_fix() {
    let requests = || per_minute("requests", 50);
    let posts = || per_minute("posts", 50).matching(Match::everything().method("POST"));
    let tokens = || per_minute("tokens", 50).cost(Cost::constant(5));
    // (limits of the outer layer, limits of the inner layer, path, fix)
    let table = [
        (vec![requests()], vec![], "/?units=3", "Rule::cost"),
        (vec![requests()], vec![posts()], "/?units=3", "Rule::cost"),
        (vec![requests()], vec![tokens()], "/?units=3", ""),
        (vec![tokens()], vec![requests()], "/?units=3", ""),
        (vec![requests()], vec![posts()], "/?units=3&of=tokens", "\"tokens\""),
        (vec![requests()], vec![posts()], "/?units=3&of=requests", ""),
        (vec![requests()], vec![posts()], "/?units=3&of=posts", "did not match"),
        (vec![requests()], vec![posts().mode(Mode::Disabled)], "/?units=3&of=posts", ""),
        (vec![requests()], vec![posts().key(user()).missing(Missing::Skip)], "/?units=3&of=posts", ""),
        (vec![requests()], vec![requests().mode(Mode::Shadow)], "/?units=3&of=requests", ""),
        (vec![requests()], vec![posts()], "/", ""),
    ];
    for (outer, inner, path, fix) in table {
        let app = Router::new().route("/", get(work)).layer(layer(&gate(inner).0)).layer(layer(&gate(outer).0));
        let answer = Server::serving(app).await.get(path, &[]).await;
        let is_error = !fix.is_empty();
        assert_eq!(answer.status, if is_error { 500 } else { 200 }, "{path}: {}", answer.body);
        assert!(answer.body.contains(fix), "{path}: {}", answer.body);
        assert_eq!(answer.body.contains("settles nothing"), is_error);
    }
}

#[tokio::test]
async fn actual_cost_settles_a_limit_in_shadow_mode() {
    let gate = gate([per_minute("tokens", 1000).cost(Cost::constant(400)).mode(Mode::Shadow)]).0;
    let server = Server::serving(Router::new().route("/", get(work)).layer(layer(&gate))).await;
    assert_eq!(server.get("/?units=100", &[]).await.status, 200);
    let Ok(Check::Ready(looked)) = gate.check_by_name("tokens", &[], 0) else { panic!("it is there, in memory") };
    assert_eq!(looked.shadow_decisions().next().unwrap().1.remaining(), 900);
}

#[tokio::test]
async fn an_estimate_above_the_quota_left_is_denied_until_others_settle() {
    let gate = tokens_and_requests();
    let server = Server::serving(Router::new().route("/", get(work)).layer(layer(&gate))).await;
    assert_eq!(server.get("/", &[]).await.status, 200);
    assert_eq!(server.get("/?units=390", &[]).await.status, 200);
    assert_eq!(server.get("/", &[]).await.status, 429);
    assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (210, 48));
}

fn one_success() -> Gate {
    gate([per_minute("jobs", 1).count(StatusSet::successes())]).0
}

/// The service may have done the work, so only its own response gives units back.
#[tokio::test]
async fn service_that_fails_after_its_call_gives_nothing_back() {
    for is_ready in [true, false] {
        let gate = one_success();
        let failing = service_fn(async |_: Request<()>| Err::<Response<Full<Bytes>>, _>("it has failed"));
        let mut service = RateLimitLayer::new(gate.clone()).layer(failing);
        if is_ready {
            service.ready().await.unwrap();
        }
        assert!(service.call(Request::new(())).await.is_err());
        assert_eq!(left(&gate, "jobs"), 0, "ready: {is_ready}");
    }
}

#[tokio::test]
async fn caller_that_drops_a_request_in_the_service_gets_nothing_back() {
    for is_ready in [true, false] {
        let gate = one_success();
        let pending = std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>;
        let mut service = RateLimitLayer::new(gate.clone()).layer(service_fn(move |_: Request<()>| pending()));
        if is_ready {
            service.ready().await.unwrap();
        }
        let mut waiting = service.call(Request::new(()));
        assert!(poll_immediate(&mut waiting).await.is_none());
        drop(waiting);
        assert_eq!(left(&gate, "jobs"), 0, "ready: {is_ready}");
    }
}

#[tokio::test]
async fn response_of_the_service_gives_units_back() {
    let gate = one_success();
    let failing = async |_: Request<()>| {
        let mut response = Response::new(Full::<Bytes>::default());
        *response.status_mut() = http::StatusCode::BAD_GATEWAY;
        Ok::<_, Infallible>(response)
    };
    let mut service = RateLimitLayer::new(gate.clone()).layer(service_fn(failing));
    for _ in 0..3 {
        assert_eq!(service.ready().await.unwrap().call(Request::new(())).await.unwrap().status(), 502);
    }
    assert_eq!(left(&gate, "jobs"), 1);
}

fn failed_logins() -> Gate {
    gate([per_minute("logins", 5).count_after(StatusSet::none().status(http::StatusCode::UNAUTHORIZED))]).0
}

async fn login(request: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut response = Response::new(Full::default());
    if request.uri().path() == "/wrong" {
        *response.status_mut() = http::StatusCode::UNAUTHORIZED;
    }
    tokio::task::yield_now().await;
    Ok(response)
}

fn login_to(path: &str) -> Request<()> {
    Request::builder().uri(path).body(()).unwrap()
}

#[tokio::test]
async fn correct_logins_pass_together_and_failed_ones_count_after_their_responses() {
    for is_ready in [true, false] {
        let gate = failed_logins();
        let mut service = RateLimitLayer::new(gate.clone()).layer(service_fn(login));
        let mut waiting = Vec::new();
        for _ in 0..8 {
            if is_ready {
                service.ready().await.unwrap();
            }
            let mut called = Box::pin(service.call(login_to("/right")));
            assert!(poll_immediate(&mut called).await.is_none(), "it waits for the service");
            waiting.push(called);
        }
        for called in waiting {
            assert_eq!(called.await.unwrap().status(), 200);
        }
        assert_eq!(left(&gate, "logins"), 5);
        for left in ["4", "3", "2", "1", "0"] {
            let response = service.ready().await.unwrap().call(login_to("/wrong")).await.unwrap();
            assert_eq!(
                (response.status(), &response.headers()["x-ratelimit-remaining"]),
                (http::StatusCode::UNAUTHORIZED, &left.parse().unwrap())
            );
        }
        assert_eq!(service.ready().await.unwrap().call(login_to("/right")).await.unwrap().status(), 429);
    }
}

#[tokio::test]
async fn request_without_a_response_counts_once_the_service_was_called() {
    for is_ready in [true, false] {
        let gate = failed_logins();
        let failing = service_fn(async |_: Request<()>| Err::<Response<Full<Bytes>>, _>("it has failed"));
        let mut service = RateLimitLayer::new(gate.clone()).layer(failing);
        if is_ready {
            service.ready().await.unwrap();
        }
        assert!(service.call(Request::new(())).await.is_err());
        assert_eq!(left(&gate, "logins"), 4, "ready: {is_ready}");
        let mut service = RateLimitLayer::new(gate.clone()).layer(service_fn(login));
        if is_ready {
            service.ready().await.unwrap();
        }
        let mut waiting = Box::pin(service.call(login_to("/right")));
        assert!(poll_immediate(&mut waiting).await.is_none());
        drop(waiting);
        assert_eq!(left(&gate, "logins"), 3, "ready: {is_ready}");
    }
}

#[tokio::test]
async fn request_that_never_reached_the_service_does_not_count() {
    let gate = failed_logins();
    // It is called without being ready, so it waits.
    let mut service = RateLimitLayer::new(gate.clone()).layer(NeverReady);
    let mut waiting = Box::pin(service.call(Request::new(())));
    assert!(poll_immediate(&mut waiting).await.is_none());
    drop(waiting);
    assert_eq!(left(&gate, "logins"), 5);
}

#[derive(Clone)]
struct NeverReady;

impl Service<Request<()>> for NeverReady {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::future::Pending<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Infallible>> {
        std::task::Poll::Pending
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        std::future::pending()
    }
}

//! With the feature `axum`, the address is read from `ConnectInfo`. Without an address, limits by address refuse.

use std::process::Command;

use axum::Router;
use axum::routing::get;
use http::{Method, Request};
use tollgate::{FixedWindow, Limit, MINUTE};
use tollgate_rules::{Gate, KeyPart, Listing, Match, Missing, Mode, Networks, Rule, RuleSet, TrustedProxies};
use tollgate_tower::RateLimitLayer;
use tower::{Layer, ServiceExt, service_fn};

use super::server::{Server, TestResponse, http1, http1_from, http2};
use super::{gate, per_minute};

#[tokio::test]
async fn two_lines_limit_each_client_of_an_axum_router() {
    let per_client = Limit::new("per-client", FixedWindow::new(1, MINUTE).from_first_request()).unwrap();
    let app = Router::new().route("/", get(async || "hello")).layer(RateLimitLayer::per_ip(per_client).unwrap());

    let server = Server::serving(app).await;
    let (one, other) = (http1_from("127.0.0.2"), http1_from("127.0.0.3"));
    let mut statuses = Vec::new();
    for client in [&one, &one, &other, &other] {
        statuses.push(server.send(client, Method::GET, "/", &[]).await.status);
    }
    assert_eq!(statuses, [200, 429, 200, 429]);
}

fn app(layer: RateLimitLayer) -> Router {
    Router::new().route("/", get(async || "hello")).layer(layer.for_axum())
}

fn networks() -> Listing {
    Listing::none().networks(Networks::parse(["192.0.2.0/24"]).unwrap())
}

/// One attacker could otherwise use up the only count, and deny the service to everybody.
#[tokio::test]
async fn a_limit_by_address_refuses_requests_of_unknown_address() {
    for client in [http1(), http2()] {
        let (gate, _) = gate([per_minute("per-ip", 10).key(KeyPart::ip())]);
        let server = Server::without_connect_info(app(RateLimitLayer::new(gate))).await;
        let response = server.send(&client, Method::GET, "/", &[]).await;
        assert_eq!(response.status, 500);
        assert_eq!(response.header("content-type"), Some("application/json"));
        assert!(response.body.contains(r#""error":"client_address_unknown""#), "{}", response.body);
        assert!(response.body.contains("into_make_service_with_connect_info"), "{}", response.body);
        assert_eq!(response.header("ratelimit"), None);
    }
}

async fn status(gate: Gate) -> u16 {
    let inner = service_fn(async |_: Request<()>| {
        Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Full::<bytes::Bytes>::default()))
    });
    let response = RateLimitLayer::new(gate).layer(inner).oneshot(Request::new(())).await.unwrap();
    TestResponse::of(response).await.status
}

#[tokio::test]
async fn every_use_of_an_unknown_address_is_refused() {
    let rule = || per_minute("one", 10);
    let rules = [
        rule().key(KeyPart::ip()),
        rule().key(KeyPart::method()).key(KeyPart::ip_network(48).unwrap()),
        rule().key(KeyPart::ip()).missing(Missing::Skip),
        rule().key(KeyPart::ip()).missing(Missing::Deny),
        rule().key(KeyPart::ip()).cost(tollgate_rules::Cost::constant(2)),
        rule().key(KeyPart::custom(|request| request.client().map(|client| client.to_string()))),
        rule().exempt(networks()),
        rule().blocked(networks()),
        rule().matching(Match::everything().when(|request| request.client().is_some())),
        Rule::in_flight("at-once", 10).unwrap().key(KeyPart::ip()),
    ];
    for rule in rules {
        let (gate, _) = gate([rule.clone()]);
        assert_eq!(status(gate).await, 500, "{rule:?}");
    }
    let (behind_proxies, _) = super::gate_of(
        RuleSet::builder()
            .rule(rule().key(KeyPart::ip()))
            .trusted_proxies(TrustedProxies::parse(["10.0.0.0/8"]).unwrap()),
    );
    assert_eq!(status(behind_proxies).await, 500);
    for rule in [
        rule(),
        rule().key(KeyPart::method()),
        rule().key(KeyPart::ip()).matching(Match::everything().path("/elsewhere")),
        rule().key(KeyPart::ip()).mode(Mode::Shadow),
        rule().key(KeyPart::ip()).mode(Mode::Disabled),
    ] {
        let (gate, _) = gate([rule.clone()]);
        assert_eq!(status(gate).await, 200, "{rule:?}");
    }
}

#[tokio::test]
async fn requests_of_unknown_address_share_one_count_if_the_layer_allows_them() {
    for client in [http1(), http2()] {
        let (gate, _) = gate([per_minute("per-ip", 1).key(KeyPart::ip())]);
        let server = Server::without_connect_info(app(RateLimitLayer::new(gate).allow_unknown_address())).await;
        let mut statuses = Vec::new();
        for _ in 0..2 {
            statuses.push(server.send(&client, Method::GET, "/", &[]).await.status);
        }
        assert_eq!(statuses, [200, 429]);
    }
}

#[tokio::test]
async fn an_expression_that_reads_an_unknown_address_is_refused() {
    for (when, expected) in [("request.ip == '192.0.2.1'", 500), ("request.method == 'GET'", 200)] {
        let text = format!("limits: [{{ name: a, limit: 9, window: 1h, match: {{ when: \"{when}\" }} }}]");
        let rules = tollgate_config::RuleFile::parse("tollgate.yaml", &text).unwrap().compile().unwrap();
        assert_eq!(status(Gate::in_memory(rules).unwrap()).await, expected, "{when}");
    }
}

/// Runs as a child of `one_log_line_names_the_fix`. A log line of this process would have no reader.
#[tokio::test]
#[ignore = "run by another test"]
async fn requests_of_unknown_address_in_a_child_process() {
    for _ in 0..3 {
        let (gate, _) = gate([per_minute("per-ip", 10).key(KeyPart::ip())]);
        assert_eq!(status(gate).await, 500);
    }
}

/// Runs as a child of `rules_that_refuse_nothing_log_nothing`.
#[tokio::test]
#[ignore = "run by another test"]
async fn allowed_requests_of_unknown_address_in_a_child_process() {
    let shadow = || per_minute("shadow", 10).mode(Mode::Shadow);
    for rule in [
        shadow().key(KeyPart::ip()),
        shadow().exempt(networks()),
        shadow().matching(Match::everything().when(|request| request.client().is_some())),
    ] {
        let (gate, _) = gate([rule.clone(), per_minute("enforced", 10)]);
        assert_eq!(status(gate).await, 200, "{rule:?}");
    }
}

/// Runs a test of this file in a process that has logged nothing yet, and returns its log.
fn log_of(test: &str) -> String {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("connect_info::{test}"), "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let (out, log) = (String::from_utf8(child.stdout).unwrap(), String::from_utf8(child.stderr).unwrap());
    assert!(child.status.success() && out.contains("1 passed"), "{out}{log}");
    log
}

#[test]
fn one_log_line_names_the_fix() {
    let log = log_of("requests_of_unknown_address_in_a_child_process");
    assert_eq!(log.matches("into_make_service_with_connect_info").count(), 1, "{log}");
}

/// The line is logged once, so it must not be lost before a rule refuses requests.
#[test]
fn rules_that_refuse_nothing_log_nothing() {
    let log = log_of("allowed_requests_of_unknown_address_in_a_child_process");
    assert!(!log.contains("tollgate:"), "{log}");
}

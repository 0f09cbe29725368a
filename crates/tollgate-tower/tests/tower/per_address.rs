//! Rules by address alone take a fast path, which must give the same responses as the general one.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tollgate::{Ban, FixedWindow, HOUR, LeakyBucket, Limit, MINUTE, ManualClock, Rate, TokenBucket};
use tollgate_rules::{
    Check, Cost, Gate, KeyPart, Listing, Match, Missing, Mode, Networks, Rule, RuleSet, RuleSetBuilder, StatusSet,
    TrustedProxies,
};
use tollgate_tower::{ActualCost, PeerAddress, RateLimitLayer};
use tower::{Layer, ServiceExt, service_fn};

use super::server::TestResponse;
use super::{gate_of, per_minute};

/// Requests in order: the peer, the client that the proxy names, and the path.
const REQUESTS: [(&str, &str, &str); 16] = [
    ("192.0.2.1:1", "", "/"),
    ("192.0.2.1:2", "198.51.100.7", "/"),
    ("192.0.2.1:3", "", "/"),
    ("192.0.2.1:4", "", "/"),
    ("[::ffff:192.0.2.1]:5", "", "/"),
    ("192.0.2.2:1", "198.51.100.7", "/"),
    ("192.0.2.3:1", "", "/login"),
    ("192.0.2.3:1", "", "/login"),
    ("192.0.2.3:1", "", "http://api.example.com/login"),
    ("192.0.2.3:1", "", "http://api.example.com/"),
    ("[2001:db8::1]:1", "", "/"),
    ("[2001:db8::2]:1", "", "/"),
    ("[2001:db8:0:1::1]:1", "", "/"),
    ("", "", "/"),
    ("", "198.51.100.7", "/"),
    ("", "", "/"),
];

fn per_client(limit: u64) -> Rule {
    per_minute("per-client", limit).key(KeyPart::ip())
}

fn of(rule: Rule) -> RuleSetBuilder {
    RuleSet::builder().rule(rule)
}

/// Adds a rule that matches no request, which disables the fast path.
fn without_fast_path(rules: RuleSetBuilder) -> RuleSetBuilder {
    rules.rule(per_minute("nobody", 1).matching(Match::everything().path("/nobody")))
}

async fn send(gate: &Gate, request: (&str, &str, &str), cost: Option<ActualCost>) -> TestResponse {
    send_through(RateLimitLayer::new(gate.clone()), request, cost).await
}

async fn send_through(
    layer: RateLimitLayer,
    (peer, forwarded_for, uri): (&str, &str, &str),
    cost: Option<ActualCost>,
) -> TestResponse {
    let inner = service_fn(move |_: Request<()>| {
        let mut response = Response::new(Full::<Bytes>::from("hello"));
        if let Some(cost) = cost.clone() {
            response.extensions_mut().insert(cost);
        }
        std::future::ready(Ok::<_, Infallible>(response))
    });
    let mut request = Request::new(());
    *request.uri_mut() = uri.parse().unwrap();
    if let Ok(peer) = peer.parse::<SocketAddr>() {
        request.extensions_mut().insert(PeerAddress(peer));
    }
    if !forwarded_for.is_empty() {
        request.headers_mut().insert("x-forwarded-for", forwarded_for.parse().unwrap());
    }
    TestResponse::of(layer.layer(inner).oneshot(request).await.unwrap()).await
}

/// Returns the response to each request. The clock advances by a second with each.
async fn responses((gate, clock): (Gate, ManualClock), of: fn(Gate) -> RateLimitLayer) -> Vec<String> {
    let mut all = Vec::new();
    for request in REQUESTS {
        all.push(format!("{:?}", send_through(of(gate.clone()), request, None).await));
        clock.advance(Duration::from_secs(1));
    }
    all
}

#[tokio::test(start_paused = true)]
async fn the_fast_path_gives_the_same_responses_for_every_kind_of_rule() {
    let bucket = |bucket: LeakyBucket| Rule::new(Limit::new("queue", bucket).unwrap()).key(KeyPart::ip());
    let token_bucket = TokenBucket::new(2, Rate::per_minute(10));
    let office = || Listing::none().networks(Networks::parse(["192.0.2.0/31"]).unwrap());
    let proxies = TrustedProxies::parse(["192.0.2.0/24"]).unwrap();
    let kinds = [
        ("plain", of(per_client(2))),
        ("a bucket", of(Rule::new(Limit::new("per-client", token_bucket).unwrap()).key(KeyPart::ip()))),
        ("a network", of(per_minute("per-client", 2).key(KeyPart::ip_network(48).unwrap()))),
        ("a cost", of(per_client(5).cost(Cost::constant(2)))),
        ("the whole quota", of(per_client(2).cost(Cost::constant(2)))),
        ("a queue", of(bucket(LeakyBucket::new(2, Rate::per_minute(1)).queue(HOUR)))),
        ("a shadow", of(per_client(1).mode(Mode::Shadow))),
        ("exempt", of(per_client(1).exempt(office()))),
        ("blocked", of(per_client(2).blocked(office()))),
        ("other numbers", of(per_client(1).key_limit(&["192.0.2.1"], FixedWindow::new(3, MINUTE)))),
        ("denied without", of(per_client(2).missing(Missing::Deny))),
        ("skipped without", of(per_client(2).missing(Missing::Skip))),
        ("a ban", of(per_client(1).ban(Ban { after: 2, within: MINUTE, for_: HOUR }))),
        ("failures", of(per_client(1).count(StatusSet::failures()))),
        ("two parts", of(per_client(2).key(KeyPart::method()))),
        ("proxies", of(per_client(2)).trusted_proxies(proxies)),
        ("one path", of(per_client(1).matching(Match::everything().path("/login")))),
        ("every path", of(per_client(1).matching(Match::everything().path("/**")))),
        ("one host", of(per_client(1).matching(Match::everything().host("api.example.com")))),
        ("one method", of(per_client(1).matching(Match::everything().method("POST")))),
        ("in flight", of(Rule::in_flight("per-client", 1).unwrap().key(KeyPart::ip()))),
    ];
    for (kind, rules) in kinds {
        let layers: [fn(Gate) -> RateLimitLayer; 2] =
            [RateLimitLayer::new, |gate| RateLimitLayer::new(gate).allow_unknown_address()];
        for of in layers {
            let fast = responses(gate_of(rules.clone()), of).await;
            let general = responses(gate_of(without_fast_path(rules.clone())), of).await;
            assert_eq!(fast, general, "{kind}");
        }
    }
}

#[tokio::test]
async fn the_fast_path_uses_the_same_key_as_a_check_by_name() {
    let (gate, _) = gate_of(of(per_client(5)));
    send(&gate, ("192.0.2.1:1", "", "/"), None).await;
    send(&gate, ("[2001:db8::1]:1", "", "/"), None).await;
    for (key, remaining) in [("192.0.2.1", 4), ("2001:db8::/64", 4), ("192.0.2.2", 5)] {
        let Ok(Check::Ready(looked)) = gate.check_by_name("per-client", &[key.as_bytes()], 0) else { panic!("{key}") };
        assert_eq!(looked.decision().unwrap().remaining(), remaining, "{key}");
    }
}

#[tokio::test]
async fn the_actual_cost_is_settled() {
    // (estimated cost, reported cost, remaining quota)
    let table = [
        (1, ActualCost::new(4).of_limit("per-client"), 6),
        (1, ActualCost::new(0).of_limit("per-client"), 10),
        (3, ActualCost::new(1), 9),
        (3, ActualCost::new(5), 5),
    ];
    for (cost, actual, left) in table {
        let (gate, _) = gate_of(of(per_client(10).cost(Cost::constant(cost))));
        let answer = send(&gate, ("192.0.2.1:1", "", "/"), Some(actual.clone())).await;
        assert_eq!(answer.header("x-ratelimit-remaining"), Some(&*left.to_string()));
        let Ok(Check::Ready(looked)) = gate.check_by_name("per-client", &[b"192.0.2.1"], 0) else {
            panic!("in memory")
        };
        assert_eq!(looked.decision().unwrap().remaining(), left, "{cost} {actual:?}");
    }
}

#[tokio::test]
async fn replaced_rules_apply_to_the_next_request() {
    let (gate, _) = gate_of(of(per_client(1)));
    let status = async || send(&gate, ("192.0.2.1:1", "", "/"), None).await.status;
    assert_eq!([status().await, status().await], [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS].map(|it| it.as_u16()));
    gate.replace(of(per_client(3)).build().unwrap()).unwrap();
    assert_eq!([status().await, status().await, status().await], [200, 200, 429]);
    gate.replace(RuleSet::builder().build().unwrap()).unwrap();
    assert_eq!(status().await, 200);
}

//! The identity of clients, and attempts to forge it.

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::routing::get;
use http::Method;
use tollgate::{FixedWindow, Limit, MINUTE};
use tollgate_rules::{KeyPart, RuleSet, TrustedProxies};
use tollgate_tower::{PeerAddress, RateLimitLayer};
use tower::{Layer, ServiceExt, service_fn};

use super::server::{Server, http1_from};
use super::{gate, gate_of, per_minute};

#[tokio::test]
async fn forwarding_headers_are_ignored_by_default() {
    let (gate, _) = gate([per_minute("per-ip", 1).key(KeyPart::ip())]);
    let server = Server::with(&gate).await;
    assert_eq!(server.get("/", &[]).await.status, 200);
    for spoofed in [
        ("x-forwarded-for", "203.0.113.1"),
        ("x-forwarded-for", "203.0.113.1, 127.0.0.1"),
        ("forwarded", "for=203.0.113.1"),
        ("x-real-ip", "203.0.113.1"),
        ("cf-connecting-ip", "203.0.113.1"),
    ] {
        assert_eq!(server.get("/", &[spoofed]).await.status, 429, "{spoofed:?}");
    }
    let elsewhere = server.send(&http1_from("127.0.0.2"), Method::GET, "/", &[]).await;
    assert_eq!(elsewhere.status, 200);
    assert_eq!(server.calls(), 2);
}

#[tokio::test]
async fn behind_a_trusted_proxy_the_rightmost_untrusted_address_is_the_client() {
    let rules = RuleSet::builder()
        .rule(per_minute("per-ip", 1).key(KeyPart::ip()))
        .trusted_proxies(TrustedProxies::parse(["127.0.0.1", "10.0.0.0/8"]).unwrap());
    let (gate, _) = gate_of(rules);
    let server = Server::with(&gate).await;
    // (X-Forwarded-For, whether it is a new client)
    let table = [
        ("203.0.113.9", true),
        ("203.0.113.9", false),
        ("6.6.6.6, 203.0.113.9", false),
        ("6.6.6.6, 203.0.113.9, 10.0.0.7", false),
        ("203.0.113.9:4711", false),
        ("203.0.113.10", true),
        // One customer has the whole /64.
        ("2001:db8:1:2::1", true),
        ("2001:db8:1:2:ffff::2", false),
        ("[2001:db8:1:2::3]:443", false),
        ("2001:db8:1:3::1", true),
        ("::ffff:203.0.113.10", false),
    ];
    for (chain, is_new) in table {
        let answer = server.get("/", &[("x-forwarded-for", chain)]).await;
        assert_eq!(answer.status, if is_new { 200 } else { 429 }, "{chain}");
    }
    // The same from a peer that is not a proxy.
    let stranger = http1_from("127.0.0.3");
    let spoofed = [("x-forwarded-for", "198.51.100.1")];
    assert_eq!(server.send(&stranger, Method::GET, "/", &spoofed).await.status, 200);
    let spoofed = [("x-forwarded-for", "198.51.100.2")];
    assert_eq!(server.send(&stranger, Method::GET, "/", &spoofed).await.status, 429);
}

/// The user of a request, as found by an outer layer.
#[derive(Clone)]
struct User(String);

async fn authenticate(mut request: Request, next: Next) -> axum::response::Response {
    let token = request.headers().get("authorization").and_then(|value| value.to_str().ok());
    if let Some(name) = token.and_then(|token| token.strip_prefix("Bearer secret-of-")) {
        let user = User(name.to_owned());
        request.extensions_mut().insert(user);
    }
    next.run(request).await
}

#[tokio::test]
async fn a_closure_derives_a_key_from_extensions_of_other_layers() {
    let limit = Limit::new("per-user", FixedWindow::new(1, MINUTE).from_first_request()).unwrap();
    let layer = RateLimitLayer::per_key(limit, |request| Some(request.facts().extension::<User>()?.0.clone())).unwrap();
    let app = Router::new().route("/", get(async || "hello")).layer(layer).layer(from_fn(authenticate));
    let server = Server::serving(app).await;
    let status = async |token: &str| server.get("/", &[("authorization", token)]).await.status;
    assert_eq!(status("Bearer secret-of-ann").await, 200);
    assert_eq!(status("Bearer secret-of-ann").await, 429);
    assert_eq!(status("Bearer secret-of-bob").await, 200);
    // Requests without a key share one.
    assert_eq!(status("Bearer wrong").await, 200);
    assert_eq!(status("Basic nonsense").await, 429);
}

#[tokio::test]
async fn other_servers_set_the_address_as_an_extension() {
    let limit = Limit::new("per-ip", FixedWindow::new(1, MINUTE).from_first_request()).unwrap();
    let inner = service_fn(async |_: http::Request<()>| {
        Ok::<_, std::convert::Infallible>(http::Response::new(http_body_util::Full::<bytes::Bytes>::default()))
    });
    let service = RateLimitLayer::per_ip(limit).unwrap().layer(inner);
    let status = async |address: &str| {
        let mut request = http::Request::new(());
        request.extensions_mut().insert(PeerAddress(address.parse().unwrap()));
        service.clone().oneshot(request).await.unwrap().status().as_u16()
    };
    assert_eq!(status("192.0.2.1:1000").await, 200);
    assert_eq!(status("192.0.2.1:2000").await, 429);
    assert_eq!(status("192.0.2.2:1000").await, 200);
    assert_eq!(status("[2001:db8::1]:1000").await, 200);
    assert_eq!(status("[2001:db8::2]:1000").await, 429);
}

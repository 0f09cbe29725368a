//! The layer inside a router that axum nests under a prefix sees the path that the client sent.

use axum::Router;
use axum::routing::get;
use http::Method;
use tollgate_rules::{Gate, KeyPart, Match};
use tollgate_tower::RateLimitLayer;

use super::server::{Server, http1, http2};
use super::{gate, per_minute};

/// An application with the layer in two routers, each of which is nested twice.
fn nested(gate: &Gate) -> Router {
    let limits = RateLimitLayer::new(gate.clone());
    let users = Router::new().route("/users/{id}", get(async || "user")).layer(limits.for_axum());
    Router::new().nest("/api", Router::new().nest("/v1", users.clone()).nest("/v2", users))
}

#[tokio::test]
async fn a_nested_layer_limits_by_the_whole_path() {
    for client in [http1(), http2()] {
        let (gate, _) = gate([per_minute("api", 1).matching(Match::everything().path("/api/**"))]);
        let server = Server::serving(nested(&gate)).await;
        let mut statuses = Vec::new();
        for path in ["/api/v1/users/1?a", "/api/v1/users/2"] {
            statuses.push(server.send(&client, Method::GET, path, &[]).await.status);
        }
        assert_eq!(statuses, [200, 429]);
    }
}

#[tokio::test]
async fn a_nested_layer_does_not_limit_by_the_rest_of_the_path() {
    let (gate, _) = gate([per_minute("users", 1).matching(Match::everything().path("/users/**"))]);
    let server = Server::serving(nested(&gate)).await;
    for _ in 0..2 {
        assert_eq!(server.get("/api/v1/users/1", &[]).await.status, 200);
    }
}

#[tokio::test]
async fn equal_paths_in_two_nested_routers_are_two_keys() {
    let (gate, _) = gate([per_minute("per-path", 1).key(KeyPart::path())]);
    let server = Server::serving(nested(&gate)).await;
    let mut statuses = Vec::new();
    for path in ["/api/v1/users/1?q=1", "/api/v2/users/1", "/api/v1/users/1"] {
        statuses.push(server.get(path, &[]).await.status);
    }
    assert_eq!(statuses, [200, 200, 429]);
}

#[tokio::test]
async fn a_layer_around_the_whole_router_sees_the_same_path() {
    let (gate, _) = gate([per_minute("api", 1).matching(Match::everything().path("/api/**"))]);
    let inner = Router::new().route("/x", get(async || "hello"));
    let server = Server::serving(Router::new().nest("/api", inner).layer(RateLimitLayer::new(gate).for_axum())).await;
    assert_eq!(server.get("/api/x", &[]).await.status, 200);
    assert_eq!(server.get("/api/x", &[]).await.status, 429);
}

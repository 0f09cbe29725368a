//! With the feature `axum`, the address is read from `ConnectInfo`.

use axum::Router;
use axum::routing::get;
use http::Method;
use tollgate::tower::RateLimitLayer;
use tollgate::{FixedWindow, Limit, MINUTE};

use super::server::{Server, http1_from};

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

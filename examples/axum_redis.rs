//! The layer on Redis: any number of servers share one quota per client.
//!
//! Start Redis with `redis-server --port 6379`, then run `cargo run --bin axum_redis -- redis://127.0.0.1:6379
//! 127.0.0.1:3000`, several times with different ports if you like.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use tollgate::redis::RedisLimiter;
use tollgate::{FixedWindow, HOUR, Limit, OnStoreFailure};
use tollgate_rules::{Gate, KeyPart, Rule, RuleSet};
use tollgate_tower::RateLimitLayer;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned());
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:3000".to_owned());

    let per_client = Limit::new("per-client", FixedWindow::new(5, HOUR).from_first_request())?;
    let rules = RuleSet::builder().rule(Rule::new(per_client).key(KeyPart::ip())).build()?;
    // While Redis is unreachable, each server counts for itself.
    let redis = RedisLimiter::builder(&url).on_store_failure(OnStoreFailure::Local);
    let limits = RateLimitLayer::new(Gate::on_redis(rules, redis).await?).for_axum();
    let app = Router::new().route("/", get(async || "hello\n")).layer(limits);

    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);
    axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
    Ok(())
}

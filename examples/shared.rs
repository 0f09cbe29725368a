//! Several servers, one quota: two limiters on the same Redis together admit as much as one.
//!
//! Start Redis with `redis-server --port 6379`, then run `cargo run --bin shared -- redis://127.0.0.1:6379`.

use std::time::Duration;

use tollgate::redis::RedisLimiter;
use tollgate::{FixedWindow, HOUR, Limit, OnStoreFailure};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "redis://127.0.0.1:6379".to_owned());
    let mut servers = Vec::new();
    for _ in 0..2 {
        // While Redis does not answer in time, each server counts for itself. A second lets this example print the same on
        // a slow machine; services keep the default of 50 ms.
        let server = RedisLimiter::builder(&url)
            .limit(Limit::new("signup", FixedWindow::new(5, HOUR).from_first_request())?)
            .on_store_failure(OnStoreFailure::Local)
            .store_timeout(Duration::from_secs(1))
            .connect()
            .await?;
        servers.push(server);
    }
    for call in 1..=6 {
        let server = call % 2;
        let decision = servers[server].check("203.0.113.7").await;
        let answer = if decision.is_allowed() { "passes" } else { "is denied" };
        println!(
            "call {call} on server {server} {answer}; {} left, says {:?}",
            decision.remaining(),
            decision.source()
        );
    }
    Ok(())
}

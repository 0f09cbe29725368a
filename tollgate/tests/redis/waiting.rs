//! `until_ready` on Redis.

use std::time::Duration;

use testkit::redis::RedisServer;
use tollgate::redis::RedisLimiter;
use tollgate::{Algorithm, HOUR, LeakyBucket, Limit, Rate, SECOND, Source, TokenBucket, Wait};

async fn limiter(server: &RedisServer, algorithm: impl Into<Algorithm>) -> RedisLimiter {
    let limit = Limit::new("waiting", algorithm).expect("a valid limit");
    let builder = RedisLimiter::builder(server.url()).limit(limit).store_timeout(Duration::from_secs(5));
    builder.connect().await.expect("valid settings")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waits_for_all_units_of_the_cost() {
    let server = RedisServer::start();
    let limiter = limiter(&server, TokenBucket::new(5, Rate::per_second(50))).await;
    let first = limiter.until_ready(42, Wait::at_most(Duration::ZERO).cost(5)).await.unwrap();
    let second = limiter.until_ready("42", Wait::at_most(HOUR).cost(4).jitter(SECOND / 100)).await.unwrap();
    assert_eq!((first.source(), second.source()), (Source::Store, Source::Store));
    assert!(second.at().as_micros() - first.at().as_micros() >= 80_000, "four units take 80 ms");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_waits_for_one_key_get_one_unit_each() {
    let server = RedisServer::start();
    let limiter = limiter(&server, TokenBucket::new(1, Rate::per_second(100))).await;
    let waiters = (0..20).map(|_| {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.until_ready("ann", Wait::at_most(HOUR).jitter(SECOND / 50)).await.unwrap() })
    });
    let mut times = Vec::new();
    for waiter in waiters.collect::<Vec<_>>() {
        times.push(waiter.await.unwrap().at().as_micros());
    }
    times.sort_unstable();
    assert!(times[19] - times[0] >= 190_000, "{times:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_that_would_be_too_long_ends_at_once() {
    let server = RedisServer::start();
    let limiter = limiter(&server, TokenBucket::new(1, Rate::per_hour(1))).await;
    limiter.until_ready("ann", Duration::ZERO).await.unwrap();
    let denied = limiter.until_ready("ann", 60 * SECOND).await.unwrap_err();
    assert!(denied.decision().retry_after().unwrap() > 3000 * SECOND);
    assert!(limiter.until_ready("ann", Wait::at_most(HOUR).cost(2)).await.is_err(), "more than the quota");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_turn_after_the_maximum_wait_is_not_taken() {
    let server = RedisServer::start();
    let limiter = limiter(&server, LeakyBucket::new(10, Rate::per_hour(1)).queue(HOUR * 10)).await;
    limiter.until_ready("ann", Duration::ZERO).await.unwrap();
    let refused = limiter.until_ready("ann", SECOND).await.unwrap_err();
    assert!(refused.decision().delay() > 3000 * SECOND);
    assert_eq!(limiter.peek("ann").await.unwrap().remaining(), 9, "only the first is in the queue");
}

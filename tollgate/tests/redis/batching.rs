//! Requests that arrive during a round trip are sent as one batch, and do not affect each other.

use std::time::Duration;

use futures_util::future::join_all;
use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tollgate::redis::RedisLimiter;
use tollgate::{
    Consistency, DAY, FixedWindow, Hit, Limit, OnStoreFailure, Rate, SlidingWindowCounter, Source, TokenBucket,
};

use crate::variants::variants;

const PATIENCE: Duration = Duration::from_secs(20);

async fn limiter(server: &RedisServer, limit: Limit) -> RedisLimiter {
    let builder = RedisLimiter::builder(server.url()).limit(limit).store_timeout(PATIENCE);
    builder.on_store_failure(OnStoreFailure::Deny).without_denial_cache().connect().await.expect("valid settings")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_take_few_calls() {
    let server = RedisServer::start();
    let limiter = limiter(&server, Limit::new("wide", FixedWindow::new(1_000_000, LONG_WINDOW)).unwrap()).await;
    let before = limiter.stats();
    let tasks = (0..256).map(|task| {
        let limiter = limiter.clone();
        tokio::spawn(async move {
            for turn in 0..20 {
                let decision = limiter.check(&format!("{task} {turn}")).await;
                assert_eq!((decision.is_allowed(), decision.source()), (true, Source::Store));
            }
        })
    });
    for task in join_all(tasks).await {
        task.expect("no task panics");
    }
    let (calls, requests) = (limiter.stats().calls - before.calls, limiter.stats().requests - before.requests);
    assert_eq!(requests, 256 * 20);
    assert!(calls * 8 < requests, "{calls} calls for {requests} requests");
}

/// A peek at a counter of 1,000 segments reads them all, so a batch of 64 would block Redis for long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expensive_requests_are_sent_in_small_batches() {
    let server = RedisServer::start();
    let counter = SlidingWindowCounter::new(1_000_000, DAY).segments(1_000);
    let limiter = limiter(&server, Limit::new("fine", counter).unwrap()).await;
    let before = limiter.stats();
    let keys: Vec<String> = (0..256).map(|key| key.to_string()).collect();
    for peeked in join_all(keys.iter().map(|key| limiter.peek(key))).await {
        assert_eq!(peeked.expect("Redis answers").remaining(), 1_000_000);
    }
    let calls = limiter.stats().calls - before.calls;
    assert!(calls >= 256 / 8, "{calls} calls");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_counted_with_their_sizes_times_and_bytes() {
    let server = RedisServer::start();
    let limiter = limiter(&server, Limit::new("user", FixedWindow::new(1_000_000, LONG_WINDOW)).unwrap()).await;
    let keys: Vec<String> = (0..40).map(|key| format!("user {key}")).collect();
    let before = limiter.stats();
    for decision in join_all(keys.iter().map(|key| limiter.check(key))).await {
        assert!(decision.is_allowed());
    }
    let stats = limiter.stats();
    assert_eq!((stats.batch_sizes.count(), stats.batch_sizes.sum()), (stats.calls, stats.requests));
    assert_eq!(stats.requests - before.requests, 40);
    let large: u64 = stats
        .batch_sizes
        .buckets()
        .filter(|(bound, _)| bound.is_none_or(|bound| bound > 1))
        .map(|(_, count)| count)
        .sum();
    assert!(large > 0, "{:?}", stats.batch_sizes);
    assert_eq!(stats.call_micros.count(), stats.calls);
    assert!(stats.call_micros.sum() > 0);
    let bytes: usize = keys.iter().map(|key| "rate_limit:{user|}".len() + key.len()).sum();
    assert!(stats.bytes_sent - before.bytes_sent > bytes as u64, "{stats:?}");
    assert!(stats.bytes_received > before.bytes_received, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_and_the_hits_that_they_serve_are_counted() {
    let server = RedisServer::start();
    let limit = Limit::new("global", TokenBucket::new(1_000_000, Rate::per_second(1_000_000))).unwrap();
    let limiter = limiter(&server, limit.with_consistency(Consistency::Leased)).await;
    for _ in 0..1000 {
        assert!(limiter.check("all").await.is_allowed());
    }
    let stats = limiter.stats();
    assert!(stats.leases >= 1 && stats.leased > stats.leases, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_request_is_sent_at_once() {
    let server = RedisServer::start();
    let limiter = limiter(&server, Limit::new("alone", FixedWindow::new(1_000, LONG_WINDOW)).unwrap()).await;
    let before = limiter.stats();
    for _ in 0..50 {
        assert!(limiter.check("key").await.is_allowed());
    }
    assert_eq!(limiter.stats().calls - before.calls, 50);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_with_foreign_data_fails_alone() {
    let server = RedisServer::start();
    for variant in variants(10, LONG_WINDOW) {
        let limiter = limiter(&server, variant.limit()).await;
        let _: () = redis::cmd("HSET")
            .arg(variant.name_of("taken"))
            .arg("their")
            .arg("data")
            .query(&mut server.connection())
            .expect("set");
        let before = limiter.stats().calls;
        let keys: Vec<String> =
            (0..100).map(|key| if key == 50 { "taken".to_owned() } else { format!("key {key}") }).collect();
        let decisions = join_all(keys.iter().map(|key| limiter.check(key))).await;
        assert!(limiter.stats().calls - before <= 50, "{}: it was batched with others", variant.name);
        for (key, decision) in keys.iter().zip(&decisions) {
            let expected = if key == "taken" { (false, Source::Policy) } else { (true, Source::Store) };
            assert_eq!((decision.is_allowed(), decision.source()), expected, "{}: {key}", variant.name);
        }
        assert!(limiter.is_store_available(), "{}: an invalid key is not an outage", variant.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_are_decided_in_order_of_arrival() {
    let server = RedisServer::start();
    for variant in variants(700, LONG_WINDOW) {
        let limiter = limiter(&server, variant.limit()).await;
        // More than two batches, so that several are in flight at once.
        let decisions = join_all((0..1_000).map(|_| limiter.check("key"))).await;
        let allowed: Vec<bool> = decisions.iter().map(|decision| decision.is_allowed()).collect();
        let first_denied = allowed.iter().position(|allowed| !allowed);
        assert_eq!(first_denied, Some(700), "{}", variant.name);
        assert!(!allowed[700..].contains(&true), "{}", variant.name);
        if !variant.counts_denied() {
            let remaining = decisions[..700].iter().map(|decision| decision.remaining());
            assert!(remaining.eq((0..700).rev()), "{}: each sees the units left by those before it", variant.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_with_very_many_limits_are_decided() {
    // 64 keys a request, 256 requests together: more keys than one script call could name.
    let server = RedisServer::start();
    let limits =
        (0..64).map(|limit| Limit::new(format!("limit {limit}"), FixedWindow::new(1_000, LONG_WINDOW)).unwrap());
    let builder = limits.fold(RedisLimiter::builder(server.url()), |builder, limit| builder.limit(limit));
    let builder = builder.store_timeout(PATIENCE).on_store_failure(OnStoreFailure::Deny);
    let limiter = builder.connect().await.expect("valid settings");
    let keys: Vec<String> = (0..300).map(|key| format!("key {key}")).collect();
    let decisions = join_all(keys.iter().map(|key| limiter.check(key))).await;
    let served = decisions.iter().filter(|decision| decision.source() == Source::Store).count();
    assert_eq!(served, keys.len());
    let id = limiter.id("limit 63").expect("it has that name");
    assert_eq!(limiter.decide(&[Hit::new(id, "key 7").cost(0)]).await.remaining(), 999);
}

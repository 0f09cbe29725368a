//! Code that is generic over the limiter, with both stores.

use testkit::redis::RedisServer;
use tollgate::redis::RedisLimiter;
use tollgate::{FixedWindow, Hit, Key, Limit, Limiter, MINUTE, RateLimiter, SECOND, Settlement, Wait};

/// Runs every operation and returns the results.
async fn exercise<L: RateLimiter>(limiter: L) -> Vec<u64> {
    let key = Key::from("key");
    let id = limiter.id("requests").expect("it has that limit");
    let mut left = vec![limiter.check(key).await.remaining()];
    left.push(limiter.decide(&[Hit::new(id, "key").cost(2)]).await.remaining());
    let reservation = limiter.reserve(key, 4, MINUTE).await.expect("4 of 7 fit");
    left.push(L::decision_of(&reservation).remaining());
    assert!(matches!(limiter.settle(reservation, 1).await, Ok(Settlement::Settled)));
    let reservation = limiter.reserve_hits(&[Hit::new(id, "key").cost(5)], MINUTE).await.expect("5 of 6 fit");
    left.push(limiter.peek(key).await.expect("it answers").remaining());
    assert!(matches!(limiter.refund(reservation).await, Ok(Settlement::Settled)));
    left.push(limiter.until_ready(key, Wait::at_most(SECOND).cost(6)).await.expect("6 are left").remaining());
    assert!(!limiter.check_n(key, 1).await.is_allowed());
    limiter.reset(key).await.expect("it answers");
    left.push(limiter.peek(key).await.expect("it answers").remaining());
    left
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn code_for_any_limiter_works_in_memory_and_on_redis() {
    let server = RedisServer::start();
    let limit = Limit::new("requests", FixedWindow::new(10, 60 * MINUTE).from_first_request()).unwrap();
    let builder = RedisLimiter::builder(server.url()).limit(limit.clone()).store_timeout(20 * SECOND);
    let shared = builder.connect().await.unwrap();
    let expected = vec![9, 7, 3, 1, 0, 10];
    // As tasks, because futures of generic code must be `Send`.
    assert_eq!(tokio::spawn(exercise(Limiter::new(limit))).await.unwrap(), expected);
    assert_eq!(tokio::spawn(exercise(shared)).await.unwrap(), expected);
}

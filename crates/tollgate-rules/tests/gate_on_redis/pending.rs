//! Units of requests in progress, and resets while they are.

use http::{HeaderMap, StatusCode};
use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tollgate::redis::RedisLimiter;
use tollgate::{
    Algorithm, Ban, DenialReason, FixedWindow, HOUR, Hit, LeakyBucket, Limit, MINUTE, ManualClock, Rate, SECOND,
    Settlement, SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};
use tollgate_http::Refusal;
use tollgate_rules::StatusSet;

use super::{check, gate, remaining, rule, user};

const START: Timestamp = Timestamp::from_secs(1_700_000_040);

fn algorithms() -> [Algorithm; 8] {
    let rate = Rate::new(10, HOUR);
    [
        TokenBucket::new(10, rate).into(),
        TokenBucket::new(10, rate).interval().into(),
        LeakyBucket::new(10, rate).into(),
        FixedWindow::new(10, HOUR).into(),
        FixedWindow::new(10, HOUR).from_first_request().into(),
        SlidingWindowLog::new(10, HOUR).into(),
        SlidingWindowCounter::new(10, HOUR).into(),
        SlidingWindowCounter::new(10, HOUR).segments(6).into(),
    ]
}

async fn node(server: &RedisServer, name: &str, algorithm: Algorithm, clock: Option<&ManualClock>) -> RedisLimiter {
    let limit = Limit::new(name, algorithm).unwrap();
    let builder = RedisLimiter::builder(server.url()).limit(limit).store_timeout(20 * SECOND);
    let builder = match clock {
        Some(clock) => builder.clock(clock.clone()),
        None => builder,
    };
    builder.connect().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_wait_ends_with_the_first_deadlines_that_suffice() {
    let server = RedisServer::start();
    for (number, algorithm) in algorithms().into_iter().enumerate() {
        let (name, clock) = (format!("limit {number}"), ManualClock::at(START));
        let limiter = node(&server, &name, algorithm, Some(&clock)).await;
        let id = limiter.id(&name).unwrap();
        let mut held = Vec::new();
        for (cost, seconds) in [(4, 30), (3, 10), (3, 20)] {
            held.push(limiter.reserve("ann", cost, seconds * SECOND).await.expect("there is enough left"));
        }
        for (cost, seconds) in [(3, 10), (4, 20), (6, 20), (7, 30), (10, 30)] {
            let denied = limiter.decide(&[Hit::new(id, "ann").cost(cost)]).await;
            assert_eq!(denied.reason(), Some(DenialReason::Pending), "{algorithm:?} {cost}");
            assert_eq!(denied.retry_after(), Some(seconds * SECOND), "{algorithm:?} {cost}");
        }
        let too_many = limiter.decide(&[Hit::new(id, "ann").cost(11)]).await;
        assert_eq!(too_many.reason(), Some(DenialReason::NeverFits), "{algorithm:?}");
        // Nothing has changed.
        assert_eq!(limiter.peek("ann").await.unwrap().remaining(), 0, "{algorithm:?}");
        // Another process knows nothing of them.
        let other = node(&server, &name, algorithm, Some(&clock)).await;
        assert_eq!(other.check("ann").await.reason(), Some(DenialReason::Limited), "{algorithm:?}");
        let settled = limiter.settle(held.pop().unwrap(), 1).await.unwrap();
        assert_eq!(settled, Settlement::Settled);
        assert!(limiter.check_n("ann", 2).await.is_allowed(), "{algorithm:?}");
        clock.advance(30 * SECOND);
        assert_eq!(limiter.check("ann").await.reason(), Some(DenialReason::Limited), "{algorithm:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_of_requests_in_progress_are_pending() {
    let server = RedisServer::start();
    let logins = rule("logins", 2).count(StatusSet::none().status(StatusCode::UNAUTHORIZED));
    let gate = gate(&server, [logins.ban(Ban { after: 1, within: HOUR, for_: HOUR })]).await;
    let mut first = check(&gate, "/login", "ann").await;
    let mut second = check(&gate, "/login", "ann").await;
    first.hold_open(MINUTE);
    second.hold_open(30 * SECOND);
    // The first denial is by the store, the next by the cache.
    for _ in 0..3 {
        let third = check(&gate, "/login", "ann").await;
        assert_eq!(third.refusal(), Some(&Refusal::Pending), "{third:?}");
        assert!(third.decision().unwrap().retry_after().unwrap() <= 30 * SECOND);
    }
    // Correct logins: nobody is banned for them.
    first.settle_response(StatusCode::OK, &HeaderMap::new()).await;
    assert!(check(&gate, "/login", "ann").await.is_allowed());
    drop(second);
    let spent = check(&gate, "/login", "ann").await;
    assert!(matches!(spent.refusal(), Some(Refusal::Banned { .. })), "{spent:?}");
}

/// A process examines a bounded number of denials in a second. Those beyond are no strikes if pending units may cause them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_denials_bans_nobody_for_pending_units() {
    let server = RedisServer::start();
    let logins = rule("logins", 1).key(user()).count(StatusSet::none().status(StatusCode::UNAUTHORIZED));
    let gate = gate(&server, [logins.ban(Ban { after: 1, within: HOUR, for_: HOUR })]).await;
    let mut held = Vec::new();
    for user in ["ann", "bob"] {
        let mut outcome = check(&gate, "/login", user).await;
        outcome.hold_open(MINUTE);
        held.push(outcome);
    }
    for _ in 0..300 {
        assert!(!check(&gate, "/login", "bob").await.is_allowed());
    }
    assert!(!check(&gate, "/login", "ann").await.is_allowed());
    for (outcome, user) in held.iter().zip(["ann", "bob"]) {
        outcome.settle_response(StatusCode::OK, &HeaderMap::new()).await;
        assert!(check(&gate, "/login", user).await.is_allowed(), "{user}");
    }
}

/// Reserve 5, reset, take 3, settle the reservation: the 3 stay spent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_from_before_a_reset_gives_nothing_back() {
    let server = RedisServer::start();
    for (number, algorithm) in algorithms().into_iter().enumerate() {
        let (name, clock) = (format!("limit {number}"), ManualClock::at(START));
        let limiter = node(&server, &name, algorithm, Some(&clock)).await;
        let reservation = limiter.reserve("ann", 5, MINUTE).await.expect("5 of 10 are left");
        limiter.reset("ann").await.unwrap();
        assert!(limiter.check_n("ann", 3).await.is_allowed());
        assert_eq!(limiter.settle(reservation, 0).await, Ok(Settlement::Settled));
        assert_eq!(limiter.peek("ann").await.unwrap().remaining(), 7, "{algorithm:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_by_another_process_ends_pending_units() {
    let server = RedisServer::start();
    let window = || FixedWindow::new(10, LONG_WINDOW).into();
    let (one, other) = (node(&server, "limit", window(), None).await, node(&server, "limit", window(), None).await);
    let reservation = one.reserve("ann", 10, MINUTE).await.expect("10 of 10 are left");
    assert_eq!(one.check("ann").await.reason(), Some(DenialReason::Pending));
    let is_reset = async {
        loop {
            other.reset("ann").await.unwrap();
            assert!(other.check_n("ann", 10).await.is_allowed());
            if one.check("ann").await.reason() == Some(DenialReason::Limited) {
                return;
            }
            tokio::time::sleep(SECOND / 100).await;
        }
    };
    // As soon as it has subscribed to resets.
    tokio::time::timeout(20 * SECOND, is_reset).await.expect("the message arrives");
    assert_eq!(one.settle(reservation, 0).await, Ok(Settlement::Settled));
    assert_eq!(one.peek("ann").await.unwrap().remaining(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_from_before_a_reset_gives_nothing_back_on_any_node() {
    let server = RedisServer::start();
    let nodes = [gate(&server, [rule("jobs", 10)]).await, gate(&server, [rule("jobs", 10)]).await];
    let reserving = nodes[0].reserve_by_name("jobs", &[], 5, MINUTE).unwrap();
    let token = reserving.await.unwrap().token.expect("5 of 10 are left");
    assert!(nodes[1].reset_by_name("jobs", &[]).unwrap().await.unwrap().is_allowed());
    assert!(nodes[0].check_by_name("jobs", &[], 3).unwrap().outcome().await.is_allowed());
    assert_eq!(nodes[1].settle_token(&token, 0).await, Ok(Settlement::Settled));
    assert_eq!(remaining(&nodes[0].check_by_name("jobs", &[], 0).unwrap().outcome().await), 7);
    assert_eq!(nodes[0].settle_token(&token, 0).await, Ok(Settlement::AlreadySettled));
    // One from after the reset does.
    let reserving = nodes[0].reserve_by_name("jobs", &[], 5, MINUTE).unwrap();
    let token = reserving.await.unwrap().token.expect("7 are left");
    assert_eq!(nodes[1].settle_token(&token, 0).await, Ok(Settlement::Settled));
    assert_eq!(remaining(&nodes[0].check_by_name("jobs", &[], 0).unwrap().outcome().await), 7);
}

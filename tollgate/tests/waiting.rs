//! Waiting for quota, on a real clock and a real runtime.
#![cfg(feature = "tokio")]

use std::time::Duration;

use tokio::time::Instant;
use tollgate::{
    FixedWindow, HOUR, LeakyBucket, Limit, Limiter, ManualClock, Rate, SECOND, Timestamp, TokenBucket, Wait,
};

fn limiter(algorithm: impl Into<tollgate::Algorithm>) -> Limiter {
    Limiter::new(Limit::new("waiting", algorithm).expect("a valid limit"))
}

/// Returns a limiter whose clock stands still, for tests in which only the runtime's time moves.
fn still(algorithm: impl Into<tollgate::Algorithm>) -> Limiter {
    let limit = Limit::new("waiting", algorithm).expect("a valid limit");
    let clock = ManualClock::at(Timestamp::from_secs(1));
    Limiter::builder().limit(limit).clock(clock).build().expect("a valid limiter")
}

/// Returns a limiter on the runtime's clock. In a test with a paused runtime, waits take no time.
fn on_runtime_time(algorithm: impl Into<tollgate::Algorithm>) -> Limiter {
    let limit = Limit::new("waiting", algorithm).expect("a valid limit");
    let start = Instant::now();
    let clock = move || Timestamp::from_secs(1).saturating_add(start.elapsed());
    Limiter::builder().limit(limit).clock(clock).build().expect("a valid limiter")
}

#[tokio::test(start_paused = true)]
async fn waits_for_as_many_units_as_are_asked_for() {
    let limiter = on_runtime_time(TokenBucket::new(5, Rate::per_second(1)));
    let start = Instant::now();
    limiter.until_ready("ann", Wait::at_most(HOUR).cost(5)).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    let decision = limiter.until_ready("ann", Wait::at_most(HOUR).cost(3)).await.unwrap();
    assert_eq!((decision.cost(), decision.remaining(), start.elapsed().as_secs()), (3, 0, 3));
    let denied = limiter.until_ready("ann", Wait::at_most(2 * SECOND).cost(3)).await.unwrap_err();
    assert_eq!(denied.decision().retry_after(), Some(3 * SECOND));
    assert!(limiter.until_ready("ann", Wait::at_most(HOUR).cost(6)).await.is_err(), "more than there ever is");
    assert_eq!(start.elapsed().as_secs(), 3);
}

#[tokio::test(start_paused = true)]
async fn jitter_comes_on_top_of_the_wait_and_within_its_maximum() {
    let limiter = on_runtime_time(TokenBucket::new(1, Rate::per_second(1)));
    let mut waits = Vec::new();
    for user in 0..50 {
        assert!(limiter.check(user).is_allowed());
        let start = Instant::now();
        limiter.until_ready(user, Wait::at_most(HOUR).jitter(10 * SECOND)).await.unwrap();
        waits.push(start.elapsed());
    }
    assert!(waits.iter().all(|wait| (SECOND..=SECOND * 11 + SECOND / 100).contains(wait)), "{waits:?}");
    assert!(waits.iter().any(|wait| wait.abs_diff(waits[0]) > SECOND), "all alike: {waits:?}");
    for user in 100..120 {
        assert!(limiter.check(user).is_allowed());
        let start = Instant::now();
        limiter.until_ready(user, Wait::at_most(2 * SECOND).jitter(HOUR)).await.unwrap();
        assert!(start.elapsed() <= 2 * SECOND + SECOND / 100, "{:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn turns_in_a_queue_get_no_jitter() {
    let limiter = on_runtime_time(LeakyBucket::new(3, Rate::per_second(1)).queue(HOUR));
    let start = Instant::now();
    for _ in 0..3 {
        limiter.until_ready("ann", Wait::at_most(HOUR).jitter(HOUR)).await.unwrap();
    }
    assert_eq!(start.elapsed().as_secs(), 2);
}

#[tokio::test]
async fn waits_until_quota_is_back() {
    let limiter = limiter(TokenBucket::new(1, Rate::per_second(20)));
    let first = limiter.until_ready("ann", Duration::ZERO).await.unwrap();
    let second = limiter.until_ready("ann", HOUR).await.unwrap();
    assert!(second.at().as_micros() - first.at().as_micros() >= 50_000);
}

#[tokio::test]
async fn does_not_begin_a_wait_that_would_be_too_long() {
    let limiter = limiter(TokenBucket::new(1, Rate::per_hour(1)));
    let _ = limiter.check("ann");
    let denied = limiter.until_ready("ann", Duration::from_secs(60)).await.unwrap_err();
    assert!(denied.decision().retry_after().unwrap() > Duration::from_secs(3000));
}

#[tokio::test]
async fn one_limit_that_denies_stands_in_the_way_of_all() {
    let limiter = Limiter::builder()
        .limit(Limit::new("one", FixedWindow::new(1, HOUR).from_first_request()).unwrap())
        .limit(Limit::new("other", FixedWindow::new(2, HOUR).from_first_request()).unwrap())
        .build()
        .unwrap();
    let _ = limiter.until_ready("ann", HOUR).await.unwrap();
    assert!(limiter.until_ready("ann", Duration::ZERO).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_queue_gives_each_its_turn() {
    let limiter = still(LeakyBucket::new(3, Rate::per_second(50)).queue(HOUR));
    let turns = [(); 3].map(|()| {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.until_ready("ann", HOUR).await.unwrap().delay() })
    });
    let mut delays = Vec::new();
    for turn in turns {
        delays.push(turn.await.unwrap());
    }
    delays.sort_unstable();
    assert_eq!(delays, [0, 20, 40].map(Duration::from_millis));
}

#[tokio::test]
async fn a_turn_that_is_too_far_off_is_not_taken() {
    let limiter = limiter(LeakyBucket::new(10, Rate::per_hour(1)).queue(HOUR * 10));
    let _ = limiter.until_ready("ann", Duration::ZERO).await.unwrap();
    let refused = limiter.until_ready("ann", Duration::from_secs(1)).await.unwrap_err();
    assert!(refused.decision().delay() > Duration::from_secs(3000));
    assert_eq!(limiter.peek("ann").remaining(), 9, "only the first is in the queue");
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_stands_still_is_not_waited_for_forever() {
    let limiter = still(TokenBucket::new(1, Rate::per_second(1)));
    let _ = limiter.check("ann");
    assert!(limiter.until_ready("ann", Duration::from_secs(30)).await.is_err());
}

#[tokio::test]
async fn a_wait_without_end_is_a_wait() {
    let limiter = limiter(TokenBucket::new(1, Rate::per_second(100)));
    let _ = limiter.until_ready("ann", Duration::MAX).await.unwrap();
    let _ = limiter.until_ready("ann", Duration::MAX).await.unwrap();
}

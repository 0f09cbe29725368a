//! Waiting for quota, on a real clock and a real runtime.
#![cfg(feature = "tokio")]

use std::time::Duration;

use tollgate::{FixedWindow, HOUR, LeakyBucket, Limit, Limiter, ManualClock, Rate, Timestamp, TokenBucket};

fn limiter(algorithm: impl Into<tollgate::Algorithm>) -> Limiter {
    Limiter::new(Limit::new("waiting", algorithm).expect("a valid limit"))
}

/// A limiter whose clock stands still, for tests in which only the runtime's time moves.
fn still(algorithm: impl Into<tollgate::Algorithm>) -> Limiter {
    let limit = Limit::new("waiting", algorithm).expect("a valid limit");
    let clock = ManualClock::at(Timestamp::from_secs(1));
    Limiter::builder().limit(limit).clock(clock).build().expect("a valid limiter")
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
        .limit(Limit::new("one", FixedWindow::new(1, HOUR)).unwrap())
        .limit(Limit::new("other", FixedWindow::new(2, HOUR)).unwrap())
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

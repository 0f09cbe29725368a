//! The test vectors that every store must satisfy, numbered as in the specification. Seconds count from a full hour.

mod common;

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use common::{Rig, SECOND_US, START_US};
use tollgate::{
    Algorithm, DAY, FixedWindow, Hit, LeakyBucket, Limit, Limiter, MINUTE, ManualClock, Rate, SECOND,
    SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

#[test]
fn v01_tokens_come_back_at_the_rate_and_the_burst_is_what_is_there() {
    let rig = Rig::of(TokenBucket::new(10, Rate::per_second(1)));
    assert_eq!(rig.admitted_at(0, 3), 3);
    assert_eq!(rig.ask(START_US, 0).remaining, 7);
    let answers: Vec<_> = (0..15).map(|_| rig.ask(START_US + 2 * SECOND_US, 1)).collect();
    assert_eq!(answers.iter().filter(|answer| answer.allowed).count(), 9);
    assert_eq!(answers.iter().filter(|answer| !answer.allowed).count(), 6);
    assert_eq!(answers.last().unwrap().remaining, 0);
    assert_eq!(answers.last().unwrap().retry_after, Some(SECOND_US));
}

#[test]
fn v02_of_two_concurrent_requests_for_the_last_token_one_passes() {
    const ROUNDS: usize = 2_000;
    let rig = Rig::of(TokenBucket::new(10, Rate::per_second(1)));
    let keys: Vec<String> = (0..ROUNDS).map(|round| format!("round {round}")).collect();
    for key in &keys {
        assert!(rig.limiter.check_n(key, 9).is_allowed());
    }
    let barrier = Barrier::new(2);
    let race = || -> Vec<bool> {
        let ask = |key| {
            barrier.wait();
            rig.limiter.check(key).is_allowed()
        };
        keys.iter().map(ask).collect()
    };
    let (ours, theirs) = thread::scope(|scope| {
        let other = scope.spawn(race);
        (race(), other.join().unwrap())
    });
    for (round, (ours, theirs)) in ours.into_iter().zip(theirs).enumerate() {
        assert!(ours ^ theirs, "round {round}: {ours} and {theirs}");
    }
}

#[test]
fn v03_interval_refill_brings_the_whole_portion_at_the_period_end() {
    let rig = Rig::of(TokenBucket::new(100_000, Rate::per_second(100_000)).interval());
    let passed = |at: u64| rig.ask(START_US + at, 1).allowed;
    assert!((0..100_000).all(&passed), "within the first 0.1 s");
    assert!(!(100_000..150_000).any(&passed), "before t=1");
    assert!(!passed(999_999));
    assert_eq!(rig.ask(START_US + SECOND_US, 0).remaining, 100_000);
    assert!(rig.ask(START_US + SECOND_US, 100_000).allowed);
}

#[test]
fn v04_a_leaky_bucket_takes_its_capacity_and_refuses_the_rest() {
    let rig = Rig::of(LeakyBucket::new(10, Rate::per_second(1)));
    assert_eq!(rig.admitted_at(0, 20), 10);
}

#[test]
fn v04_a_queue_lets_them_leave_one_by_one() {
    let rig = Rig::of(LeakyBucket::new(10, Rate::per_second(1)).queue(MINUTE));
    let answers: Vec<_> = (0..20).map(|_| rig.ask(START_US, 1)).collect();
    let delays: Vec<u64> = answers.iter().filter(|answer| answer.allowed).map(|answer| answer.delay).collect();
    assert_eq!(delays, (0..10).map(|second| second * SECOND_US).collect::<Vec<_>>());
    assert!(answers[10..].iter().all(|answer| !answer.allowed && answer.retry_after == Some(SECOND_US)));
}

#[test]
fn v04_a_queue_refuses_who_would_wait_longer_than_the_longest_wait() {
    let rig = Rig::of(LeakyBucket::new(10, Rate::per_second(1)).queue(Duration::from_millis(2_500)));
    assert_eq!(rig.admitted_at(0, 20), 3, "those that leave at 0, 1 and 2 s");
    assert_eq!(rig.ask(START_US, 1).retry_after, Some(SECOND_US / 2));
    assert_eq!(rig.ask(START_US + SECOND_US / 2, 1).delay, 2_500_000);
}

#[test]
fn v05_half_a_unit_a_second_frees_one_place_in_three_seconds_and_three_in_six() {
    let rig = Rig::of(LeakyBucket::new(10, "0.5/s".parse().unwrap()));
    assert_eq!(rig.admitted_at(0, 10), 10);
    assert_eq!(rig.admitted_at(3, 5), 1);
    assert_eq!(rig.admitted_at(6, 5), 2, "three in all since it was full");
}

#[test]
fn v06_a_window_of_the_clock_lets_twice_the_limit_round_its_end() {
    let rig = Rig::of(FixedWindow::new(100, MINUTE));
    assert_eq!(rig.admitted_at(59, 101), 100);
    assert_eq!(rig.admitted_at(60, 101), 100);
}

#[test]
fn v06_a_window_opened_by_a_request_closes_one_window_later() {
    let rig = Rig::of(FixedWindow::new(100, MINUTE).from_first_request());
    assert_eq!(rig.admitted_at(30, 101), 100);
    assert_eq!(rig.ask(START_US + 89_999_999, 1).retry_after, Some(1));
    assert_eq!(rig.admitted_at(90, 101), 100);
}

#[test]
fn v07_the_log_frees_a_place_when_its_request_is_a_window_old() {
    let rig = Rig::of(SlidingWindowLog::new(5, MINUTE));
    let passed: Vec<bool> = [0, 10, 20, 30, 40, 50, 70].map(|second| rig.passes_at(second)).to_vec();
    assert_eq!(passed, [true, true, true, true, true, false, true]);
}

#[test]
fn v08_a_denied_request_is_in_the_log_only_when_it_is_asked_for() {
    let seconds = [1, 30, 50, 100, 102];
    let admitted_only = Rig::of(SlidingWindowLog::new(2, MINUTE));
    assert_eq!(seconds.map(|second| admitted_only.passes_at(second)), [true, true, false, true, true]);
    let denied_too = Rig::of(SlidingWindowLog::new(2, MINUTE).count_denied());
    assert_eq!(seconds.map(|second| denied_too.passes_at(second)), [true, true, false, true, false]);
}

#[test]
fn v09_the_previous_window_counts_by_the_share_that_is_left_of_it() {
    let rig = Rig::of(SlidingWindowCounter::new(10, MINUTE));
    assert_eq!(rig.admitted_at(0, 8), 8);
    assert_eq!(rig.admitted_at(63, 3), 3);
    assert!(!rig.passes_at(66), "8 × 0.9 + 3 is 10.2");
    let halfway = rig.ask(START_US + 90 * SECOND_US, 0);
    assert_eq!(halfway.remaining, 3, "8 × 0.5 + 3 is 7");
    assert!(rig.passes_at(90));
}

#[test]
fn v09_what_remains_is_the_limit_without_the_estimate() {
    for (current, remaining) in [(40, 20), (30, 30)] {
        let rig = Rig::of(SlidingWindowCounter::new(100, MINUTE));
        assert_eq!(rig.admitted_at(0, 80), 80);
        assert_eq!(rig.admitted_at(85, current), current);
        assert_eq!(rig.ask(START_US + 90 * SECOND_US, 0).remaining, remaining);
    }
}

#[test]
fn v10_the_oldest_of_six_segments_counts_by_its_share() {
    let rig = Rig::of(SlidingWindowCounter::new(100, MINUTE).segments(6));
    for (segment, requests) in [20, 10, 10, 10, 10, 10].into_iter().enumerate() {
        assert_eq!(rig.admitted_at(10 * segment as u64, requests), requests);
    }
    assert_eq!(rig.ask(START_US + 59 * SECOND_US, 0).remaining, 30, "the sum is 70");
    assert_eq!(rig.ask(START_US + 65 * SECOND_US, 0).remaining, 40, "20 × 0.5 + 50 is 60");
    assert!(rig.passes_at(65));
}

#[test]
fn v11_of_ten_thousand_in_a_second_a_hundred_pass() {
    let slow = Rate::new(100, DAY);
    let algorithms: [Algorithm; 5] = [
        TokenBucket::new(100, slow).into(),
        LeakyBucket::new(100, slow).into(),
        FixedWindow::new(100, SECOND * 10).into(),
        SlidingWindowLog::new(100, SECOND * 10).into(),
        SlidingWindowCounter::new(100, SECOND * 10).into(),
    ];
    for algorithm in algorithms {
        let shown = format!("{algorithm:?}");
        let rig = Rig::of(algorithm);
        let passed = (0..10_000).filter(|request| rig.ask(START_US + request * 100, 1).allowed).count();
        assert_eq!(passed, 100, "{shown}");
    }
}

#[test]
fn v12_a_call_denied_by_one_limit_takes_nothing_from_the_others() {
    let per_minute = |name: &str, limit| Limit::new(name, SlidingWindowCounter::new(limit, MINUTE)).unwrap();
    let limiter = Limiter::builder()
        .limit(per_minute("global", 10_000))
        .limit(per_minute("user", 100))
        .limit(per_minute("endpoint", 10))
        .clock(ManualClock::at(Timestamp::from_micros(START_US)))
        .build()
        .unwrap();
    let [global, user, endpoint] = ["global", "user", "endpoint"].map(|name| limiter.id(name).unwrap());
    let call =
        || limiter.decide_now(&[Hit::new(global, "all"), Hit::new(user, "ann"), Hit::new(endpoint, "ann /search")]);
    for nth in 1..=10 {
        let decision = call();
        assert!(decision.is_allowed(), "call {nth}");
        assert_eq!(decision.limit(), Some(endpoint), "it has the least share left");
    }
    let eleventh = call();
    assert!(!eleventh.is_allowed());
    assert_eq!((eleventh.limit(), eleventh.quota()), (Some(endpoint), 10));
    let remaining = |id, key: &str| limiter.decide_now(&[Hit::new(id, key).cost(0)]).remaining();
    assert_eq!(remaining(global, "all"), 9_990);
    assert_eq!(remaining(user, "ann"), 90);
    assert_eq!(remaining(endpoint, "ann /search"), 0);
}

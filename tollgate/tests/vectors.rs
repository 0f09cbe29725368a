//! The test vectors that every store must satisfy, numbered as in the specification: in memory, and on Redis with the
//! feature `redis`. Seconds count from a full hour.

#[path = "common/rig.rs"]
mod rig;

use std::time::Duration;

use futures_util::future::join_all;
use tollgate::{
    Algorithm, DAY, FixedWindow, Hit, LeakyBucket, Limit, MINUTE, Rate, SECOND, SlidingWindowCounter, SlidingWindowLog,
    TokenBucket,
};

use rig::{SECOND_US, StoreServer, rigs, rigs_with};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v01_tokens_are_refilled_at_the_rate_and_the_burst_is_the_remaining_tokens() {
    for rig in rigs(&StoreServer::start(), TokenBucket::new(10, Rate::per_second(1))).await {
        assert_eq!(rig.admitted_at(0, 3).await, 3, "{rig:?}");
        assert_eq!(rig.remaining_at(0).await, 7, "{rig:?}");
        assert_eq!(rig.admitted_at(2, 15).await, 9, "{rig:?}");
        let denied = rig.check("key", 1).await;
        assert_eq!((denied.remaining(), denied.retry_after()), (0, Some(SECOND)), "{rig:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v02_one_of_two_concurrent_requests_for_the_last_token_is_allowed() {
    for rig in rigs(&StoreServer::start(), TokenBucket::new(10, Rate::per_second(1))).await {
        for round in 0..rig.sized(2_000, 200) {
            let key = format!("round {round}");
            assert!(rig.check(&key, 9).await.is_allowed());
            let [ours, theirs] = rig.race(&key).await;
            assert!(ours ^ theirs, "{rig:?} {key}: {ours} and {theirs}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v03_interval_refill_adds_all_tokens_at_the_end_of_the_period() {
    let bucket = TokenBucket::new(100_000, Rate::per_second(100_000)).interval();
    for rig in rigs(&StoreServer::start(), bucket).await {
        // One unit each microsecond, for 0.15 s; on Redis 100 units each 100 µs.
        let cost = rig.sized(1, 100);
        for at in (0..150_000).step_by(cost) {
            rig.set(at);
            let is_allowed = rig.check("key", cost as u64).await.is_allowed();
            assert_eq!(is_allowed, at < 100_000, "{rig:?}: at {at} µs");
        }
        rig.set(SECOND_US - 1);
        assert!(!rig.check("key", 1).await.is_allowed(), "{rig:?}");
        assert_eq!(rig.remaining_at(1).await, 100_000, "{rig:?}");
        assert!(rig.check("key", 100_000).await.is_allowed(), "{rig:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v04_a_leaky_bucket_admits_its_capacity_and_denies_the_rest() {
    for rig in rigs(&StoreServer::start(), LeakyBucket::new(10, Rate::per_second(1))).await {
        assert_eq!(rig.admitted_at(0, 20).await, 10, "{rig:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v04_a_queue_releases_requests_one_by_one() {
    for rig in rigs(&StoreServer::start(), LeakyBucket::new(10, Rate::per_second(1)).queue(MINUTE)).await {
        let answers = join_all((0..20).map(|_| rig.check("key", 1))).await;
        let (inside, outside) = answers.split_at(10);
        assert!(inside.iter().all(|answer| answer.is_allowed()), "{rig:?}");
        let delays: Vec<Duration> = inside.iter().map(|answer| answer.delay()).collect();
        assert_eq!(delays, (0..10).map(Duration::from_secs).collect::<Vec<_>>(), "{rig:?}");
        assert!(outside.iter().all(|answer| answer.retry_after() == Some(SECOND)), "{rig:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v04_a_queue_denies_requests_that_would_wait_too_long() {
    let queue = LeakyBucket::new(10, Rate::per_second(1)).queue(Duration::from_millis(2_500));
    for rig in rigs(&StoreServer::start(), queue).await {
        assert_eq!(rig.admitted_at(0, 20).await, 3, "{rig:?}: those that leave at 0, 1 and 2 s");
        assert_eq!(rig.check("key", 1).await.retry_after(), Some(SECOND / 2), "{rig:?}");
        rig.set(SECOND_US / 2);
        assert_eq!(rig.check("key", 1).await.delay(), Duration::from_millis(2_500), "{rig:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v05_half_a_unit_per_second_frees_one_unit_in_three_seconds_and_three_in_six() {
    for rig in rigs(&StoreServer::start(), LeakyBucket::new(10, Rate::new(1, SECOND * 2))).await {
        assert_eq!(rig.admitted_at(0, 10).await, 10, "{rig:?}");
        assert_eq!(rig.admitted_at(3, 5).await, 1, "{rig:?}");
        assert_eq!(rig.admitted_at(6, 5).await, 2, "{rig:?}: three in all since it was full");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v06_a_clock_aligned_window_admits_twice_the_limit_around_its_end() {
    for rig in rigs(&StoreServer::start(), FixedWindow::new(100, MINUTE)).await {
        assert_eq!(rig.admitted_at(59, 101).await, 100, "{rig:?}");
        assert_eq!(rig.admitted_at(60, 101).await, 100, "{rig:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v06_a_window_opened_by_a_request_closes_one_window_later() {
    for rig in rigs(&StoreServer::start(), FixedWindow::new(100, MINUTE).from_first_request()).await {
        assert_eq!(rig.admitted_at(30, 101).await, 100, "{rig:?}");
        rig.set(90 * SECOND_US - 1);
        assert_eq!(rig.check("key", 1).await.retry_after(), Some(Duration::from_micros(1)), "{rig:?}");
        assert_eq!(rig.admitted_at(90, 101).await, 100, "{rig:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v07_the_log_frees_a_unit_when_its_request_is_a_window_old() {
    for rig in rigs(&StoreServer::start(), SlidingWindowLog::new(5, MINUTE)).await {
        for (second, passes) in [(0, true), (10, true), (20, true), (30, true), (40, true), (50, false), (70, true)] {
            assert_eq!(rig.passes_at(second).await, passes, "{rig:?} at {second}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v08_a_denied_request_is_in_the_log_only_with_count_denied() {
    let server = StoreServer::start();
    let log = SlidingWindowLog::new(2, MINUTE);
    for (log, last) in [(log, true), (log.count_denied(), false)] {
        for rig in rigs(&server, log).await {
            for (second, passes) in [(1, true), (30, true), (50, false), (100, true), (102, last)] {
                assert_eq!(rig.passes_at(second).await, passes, "{rig:?} at {second}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v09_the_previous_window_counts_by_its_remaining_share() {
    let server = StoreServer::start();
    for rig in rigs(&server, SlidingWindowCounter::new(10, MINUTE)).await {
        assert_eq!(rig.admitted_at(0, 8).await, 8, "{rig:?}");
        assert_eq!(rig.admitted_at(63, 3).await, 3, "{rig:?}: 8 × 0.95 + 2 is 9.6");
        assert!(!rig.passes_at(66).await, "{rig:?}: 8 × 0.9 + 3 is 10.2");
        assert_eq!(rig.remaining_at(90).await, 3, "{rig:?}: 8 × 0.5 + 3 is 7");
        assert!(rig.passes_at(90).await, "{rig:?}");
    }
    for (current, remaining) in [(40, 20), (30, 30)] {
        for rig in rigs(&server, SlidingWindowCounter::new(100, MINUTE)).await {
            assert_eq!(rig.admitted_at(0, 80).await, 80, "{rig:?}");
            assert_eq!(rig.admitted_at(85, current).await, current, "{rig:?}");
            assert_eq!(rig.remaining_at(90).await, remaining, "{rig:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v10_the_oldest_of_six_segments_counts_by_its_share() {
    for rig in rigs(&StoreServer::start(), SlidingWindowCounter::new(100, MINUTE).segments(6)).await {
        for (segment, requests) in [20, 10, 10, 10, 10, 10].into_iter().enumerate() {
            assert_eq!(rig.admitted_at(10 * segment as u64, requests).await, requests, "{rig:?}");
        }
        assert_eq!(rig.remaining_at(59).await, 30, "{rig:?}: the sum is 70");
        assert_eq!(rig.remaining_at(65).await, 40, "{rig:?}: 20 × 0.5 + 50 is 60");
        assert!(rig.passes_at(65).await, "{rig:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v11_of_ten_thousand_requests_in_a_second_a_hundred_are_allowed() {
    let server = StoreServer::start();
    let slow = Rate::new(100, DAY);
    let algorithms: [Algorithm; 5] = [
        TokenBucket::new(100, slow).into(),
        LeakyBucket::new(100, slow).into(),
        FixedWindow::new(100, SECOND * 10).into(),
        SlidingWindowLog::new(100, SECOND * 10).into(),
        SlidingWindowCounter::new(100, SECOND * 10).into(),
    ];
    for algorithm in algorithms {
        for rig in rigs(&server, algorithm).await {
            let mut passed = 0;
            let steps: u64 = rig.sized(10_000, 100);
            for step in 0..steps {
                rig.set(step * SECOND_US / steps);
                let decisions = join_all((0..10_000 / steps).map(|_| rig.check("key", 1))).await;
                passed += decisions.iter().filter(|decision| decision.is_allowed()).count();
            }
            assert_eq!(passed, 100, "{rig:?} {algorithm:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn v12_a_request_denied_by_one_limit_takes_nothing_from_the_others() {
    let per_minute = |name: &str, limit| Limit::new(name, SlidingWindowCounter::new(limit, MINUTE)).unwrap();
    let limits = [per_minute("global", 10_000), per_minute("user", 100), per_minute("endpoint", 10)];
    for rig in rigs_with(&StoreServer::start(), &limits).await {
        let [global, user, endpoint] = ["global", "user", "endpoint"].map(|name| rig.id(name));
        let call = [Hit::new(global, "all"), Hit::new(user, "ann"), Hit::new(endpoint, "ann /search")];
        for nth in 1..=10 {
            let decision = rig.decide(&call).await;
            assert!(decision.is_allowed(), "{rig:?}: call {nth}");
            assert_eq!(decision.limit(), Some(endpoint), "{rig:?}: it has the least share left");
        }
        let eleventh = rig.decide(&call).await;
        assert!(!eleventh.is_allowed(), "{rig:?}");
        assert_eq!((eleventh.limit(), eleventh.quota()), (Some(endpoint), 10), "{rig:?}");
        for (id, key, remaining) in [(global, "all", 9_990), (user, "ann", 90), (endpoint, "ann /search", 0)] {
            assert_eq!(rig.decide(&[Hit::new(id, key).cost(0)]).await.remaining(), remaining, "{rig:?} {key}");
        }
    }
}

//! `retry_after` is exact, and a denied request takes nothing.

use std::time::Duration;

use testkit::redis::RedisServer;
use tollgate::{LeakyBucket, MINUTE, Rate, SECOND};

use super::rig::{Rig, rigs};
use crate::variants::variants;

/// Spends the quota of 10 per minute unevenly: units and times in seconds.
const SPENT: [(u64, u64); 4] = [(0, 3), (7, 2), (13, 4), (20, 1)];
const DENIED_AT: u64 = 25;

async fn spend(rig: &Rig, keys: &[&str]) {
    for (second, units) in SPENT {
        rig.set(second * 1_000_000);
        for key in keys {
            assert!(rig.check(key, units).await.is_allowed(), "{rig:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_allowed_after_retry_after_and_not_a_microsecond_earlier() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for cost in [1, 2, 6, 10] {
            for rig in rigs(&server, variant.algorithm).await {
                let what = format!("{rig:?}, {} at cost {cost}", variant.name);
                // Two keys with the same history, because a request that comes too early may be charged.
                spend(&rig, &["early", "in time"]).await;
                rig.set(DENIED_AT * 1_000_000);
                let denied = rig.check("early", cost).await;
                assert_eq!(rig.check("in time", cost).await, denied, "{what}");
                let Some(wait) = denied.retry_after() else {
                    assert!(denied.is_allowed(), "{what}: a cost within the quota has a `retry_after`");
                    continue;
                };
                let passes_at = DENIED_AT * 1_000_000 + wait.as_micros() as u64;
                rig.set(passes_at - 1);
                assert!(!rig.check("early", cost).await.is_allowed(), "{what}: {wait:?} but a microsecond");
                rig.set(passes_at);
                assert!(rig.check("in time", cost).await.is_allowed(), "{what}: {wait:?}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cost_above_the_quota_is_denied_without_retry_after() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for rig in rigs(&server, variant.algorithm).await {
            for cost in [11, 1 << 40, u64::MAX] {
                let denied = rig.check("key", cost).await;
                assert!(!denied.is_allowed() && denied.retry_after().is_none(), "{rig:?} {} {cost}", variant.name);
            }
            assert_eq!(rig.peek("key").await.remaining(), 10, "{rig:?} {}", variant.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denied_request_takes_nothing() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE).into_iter().filter(|variant| !variant.counts_denied()) {
        for rig in rigs(&server, variant.algorithm).await {
            assert!(rig.check("key", 7).await.is_allowed());
            let before = rig.peek("key").await;
            for _ in 0..20 {
                assert!(!rig.check("key", 4).await.is_allowed(), "{rig:?} {}", variant.name);
            }
            assert_eq!(rig.peek("key").await, before, "{rig:?} {}", variant.name);
            assert!(rig.check("key", 3).await.is_allowed(), "{rig:?} {}", variant.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_releases_one_request_per_interval() {
    let queue = LeakyBucket::new(5, Rate::per_second(2)).queue(MINUTE);
    for rig in rigs(&RedisServer::start(), queue).await {
        let mut leaves = Vec::new();
        // Arrivals in milliseconds: a burst, some stragglers, a pause that empties it, a burst.
        for at in [0, 0, 0, 100, 700, 1_300, 1_300, 60_000, 60_000, 60_100] {
            rig.set(at * 1_000);
            let decision = rig.check("key", 1).await;
            assert!(decision.is_allowed(), "{rig:?} at {at}");
            leaves.push(Duration::from_millis(at) + decision.delay());
        }
        assert!(leaves.windows(2).all(|pair| pair[1] - pair[0] >= SECOND / 2), "{rig:?}: {leaves:?}");
        assert_eq!(leaves[7], Duration::from_secs(60), "{rig:?}: nothing waits in an empty queue");
    }
}

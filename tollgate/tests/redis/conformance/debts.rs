//! A settlement above its estimate is counted in full: units beyond the quota are owed, and requests wait until they have
//! come back.

use std::time::Duration;

use testkit::redis::RedisServer;
use tollgate::{HOUR, MINUTE, SECOND, Settlement};

use super::rig::{Rig, SECOND_US, rigs};
use crate::variants::variants;

const LONG: Duration = Duration::from_secs(24 * 3600);

/// Reserves one unit of each key and settles it at 500.
async fn overrun(rig: &Rig, keys: &[&str]) -> Settlement {
    let mut settled = Settlement::Settled;
    for key in keys {
        let Ok(reserved) = rig.reserve(key, 1, LONG).await else { panic!("{rig:?}: 1 of 10 fits") };
        settled = rig.settle(reserved, 500).await;
    }
    settled
}

/// Checks that a request is admitted when its `retry_after` has passed, and not a microsecond earlier. Two keys have the
/// same history, because a request that comes too early may be charged. `now` is the time of the rig.
async fn waits_exactly(rig: &Rig, [early, in_time]: [&str; 2], now: u64, what: &str) -> Duration {
    let denied = rig.check(early, 1).await;
    assert_eq!((denied.is_allowed(), denied.remaining()), (false, 0), "{rig:?} {what}");
    assert_eq!(rig.check(in_time, 1).await, denied, "{rig:?} {what}");
    let wait = denied.retry_after().expect("waiting helps");
    let at = now + wait.as_micros() as u64;
    rig.set(at - 1);
    assert!(!rig.check(early, 1).await.is_allowed(), "{rig:?} {what}: {wait:?} but a microsecond");
    rig.set(at);
    assert!(rig.check(in_time, 1).await.is_allowed(), "{rig:?} {what}: {wait:?}");
    wait
}

/// The wait of a key that spent 500 units of 10 per minute at the start.
fn wait_for_500(name: &str) -> Duration {
    match name {
        // The bucket refills 491 units, one every 6 seconds.
        "tokens" | "meter" | "queue" => 491 * 6 * SECOND,
        "portions" => 50 * MINUTE,
        // The segment of 20 seconds has less than 10 units left when all but a fiftieth of it has left the window.
        "counter" => MINUTE + SECOND * 98 / 5 + Duration::from_micros(1),
        _ => MINUTE,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_above_the_quota_are_owed_and_requests_wait_until_they_are_back() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for rig in rigs(&server, variant.algorithm).await {
            let what = variant.name;
            assert_eq!(overrun(&rig, &["early", "in time"]).await, Settlement::Owed { units: 490 }, "{rig:?} {what}");
            assert_eq!(rig.peek("early").await.remaining(), 0, "{rig:?} {what}");
            assert_eq!(waits_exactly(&rig, ["early", "in time"], 0, what).await, wait_for_500(what), "{rig:?} {what}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_that_fits_owes_nothing_and_one_on_a_debt_owes_all() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for rig in rigs(&server, variant.algorithm).await {
            let what = variant.name;
            let mut reserved = Vec::new();
            for _ in 0..3 {
                let Ok(one) = rig.reserve("key", 1, LONG).await else { panic!("3 of 10 fit") };
                reserved.push(one);
            }
            let mut settled = Vec::new();
            for (one, actual) in reserved.into_iter().zip([8, 3, 5]) {
                settled.push(rig.settle(one, actual).await);
            }
            let owed = [Settlement::Settled, Settlement::Owed { units: 2 }, Settlement::Owed { units: 4 }];
            assert_eq!(settled, owed, "{rig:?} {what}");
            assert_eq!(rig.peek("key").await.remaining(), 0, "{rig:?} {what}");
        }
    }
}

/// Units that a bucket has refilled are not given back, so all of this happens at one moment, or in one period.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reservation_that_is_settled_below_its_estimate_shortens_the_debt() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE).into_iter().filter(|variant| variant.gives_back()) {
        let refills = matches!(variant.name, "tokens" | "meter");
        for step in if refills { [0, 0] } else { [0, SECOND_US] } {
            for rig in rigs(&server, variant.algorithm).await {
                let what = format!("{rig:?} {} every {step} µs", variant.name);
                let Ok(large) = rig.reserve("key", 5, LONG).await else { panic!("{what}: 5 of 10 fit") };
                let Ok(small) = rig.reserve("other", 2, LONG).await else { panic!("{what}: 2 of 10 fit") };
                rig.set(step);
                let _ = overrun(&rig, &["key", "other"]).await;
                rig.set(2 * step);
                assert_eq!(rig.settle(large, 2).await, Settlement::Settled, "{what}");
                assert_eq!(rig.settle(small, 2).await, Settlement::Settled, "{what}");
                assert_eq!(rig.peek("key").await, rig.peek("other").await, "{what}");
                assert_eq!(rig.check("key", 1).await, rig.check("other", 1).await, "{what}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_after_the_window_counts_only_the_excess_now() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for rig in rigs(&server, variant.algorithm).await {
            let what = variant.name;
            for key in ["early", "in time"] {
                rig.set(0);
                let Ok(reserved) = rig.reserve(key, 4, LONG).await else { panic!("4 of 10 fit") };
                // All windows are over, and all units are refilled.
                rig.set(5 * 60 * SECOND_US);
                assert_eq!(rig.settle(reserved, 504).await, Settlement::Owed { units: 490 }, "{rig:?} {what}");
            }
            let waited = waits_exactly(&rig, ["early", "in time"], 5 * 60 * SECOND_US, what).await;
            assert_eq!(waited, wait_for_500(what), "{rig:?} {what}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_forgives_a_debt() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for rig in rigs(&server, variant.algorithm).await {
            let _ = overrun(&rig, &["key"]).await;
            rig.reset("key").await;
            let peeked = rig.peek("key").await;
            assert_eq!((peeked.remaining(), peeked.reset_after()), (10, Duration::ZERO), "{rig:?} {}", variant.name);
            assert!(rig.check("key", 10).await.is_allowed(), "{rig:?} {}", variant.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_settlements_on_one_key_are_all_counted() {
    let server = RedisServer::start();
    for variant in variants(300, HOUR) {
        for rig in rigs(&server, variant.algorithm).await {
            let what = variant.name;
            for key in ["early", "in time"] {
                let mut reserved = Vec::new();
                for second in 0..300 {
                    rig.set(second * SECOND_US);
                    reserved.extend(rig.reserve(key, 1, LONG).await.ok());
                }
                assert!(reserved.len() >= 300, "{rig:?} {what}");
                for (second, one) in (300..).zip(reserved) {
                    rig.set(second * SECOND_US);
                    let _ = rig.settle(one, 6).await;
                }
            }
            let _ = waits_exactly(&rig, ["early", "in time"], 599 * SECOND_US, what).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_counts_a_bounded_number_of_units() {
    let server = RedisServer::start();
    for variant in variants(10, SECOND) {
        for rig in rigs(&server, variant.algorithm).await {
            let what = variant.name;
            for key in ["early", "in time"] {
                let Ok(first) = rig.reserve(key, 1, LONG).await else { panic!("1 of 10 fits") };
                let Ok(second) = rig.reserve(key, 1, LONG).await else { panic!("1 of 10 fits") };
                let short = rig.settle(first, u64::MAX).await;
                let Settlement::Short { missing } = short else { panic!("{rig:?} {what}: {short:?}") };
                assert!(u64::MAX - missing <= 1 << 39, "{rig:?} {what}: {missing} missing");
                let more = rig.settle(second, 1001).await;
                assert!(matches!(more, Settlement::Short { missing: 900.. }), "{rig:?} {what}: {more:?}");
            }
            let _ = waits_exactly(&rig, ["early", "in time"], 0, what).await;
        }
    }
}

/// A clock that steps back shortens no debt, and makes no key wait longer than for its debt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_debt_is_not_mistaken_for_a_clock_that_stepped_back() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for rig in rigs(&server, variant.algorithm).await {
            let what = variant.name;
            rig.set(3600 * SECOND_US);
            let _ = overrun(&rig, &["key"]).await;
            let before = rig.check("key", 1).await.retry_after().expect("waiting helps");
            for back in [MINUTE / 2, HOUR] {
                rig.set(3600 * SECOND_US - back.as_micros() as u64);
                let wait = rig.check("key", 1).await.retry_after().expect("the debt stays");
                assert!(wait >= before && wait <= before + 2 * MINUTE, "{rig:?} {what}: {wait:?} after {before:?}");
                rig.set(3600 * SECOND_US);
            }
        }
    }
}

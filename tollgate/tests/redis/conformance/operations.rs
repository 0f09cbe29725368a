//! The operations on a key other than `check`: peek, reset, refund, reserve and settle; several limits at once.

use std::time::Duration;

use testkit::redis::RedisServer;
use tollgate::{FixedWindow, Hit, Limit, MINUTE, Rate, SECOND, Settlement, SlidingWindowLog, TokenBucket};

use super::rig::{rigs, rigs_with};
use crate::variants::{Variant, variants};

/// The variants that can be refunded, of 10 per minute.
fn refundable() -> impl Iterator<Item = Variant> {
    variants(10, MINUTE).into_iter().filter(Variant::gives_back)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peek_takes_nothing() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for rig in rigs(&server, variant.algorithm).await {
            assert!(rig.check("key", 4).await.is_allowed());
            let peeked = rig.peek("key").await;
            assert_eq!((peeked.is_allowed(), peeked.remaining()), (true, 6), "{rig:?} {}", variant.name);
            for _ in 0..20 {
                assert_eq!(rig.peek("key").await, peeked, "{rig:?} {}", variant.name);
                assert_eq!(rig.check("key", 0).await, peeked, "{rig:?} {}", variant.name);
            }
            assert!(rig.check("key", 6).await.is_allowed(), "{rig:?} {}", variant.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_key_is_like_a_new_one() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for rig in rigs(&server, variant.algorithm).await {
            assert!(rig.check("key", 10).await.is_allowed());
            assert!(rig.check("other", 10).await.is_allowed());
            rig.reset("key").await;
            rig.reset("never seen").await;
            let peeked = rig.peek("key").await;
            assert_eq!((peeked.remaining(), peeked.reset_after()), (10, Duration::ZERO), "{rig:?} {}", variant.name);
            assert!(rig.check("key", 10).await.is_allowed(), "{rig:?} {}", variant.name);
            assert!(!rig.check("other", 1).await.is_allowed(), "{rig:?} {}", variant.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refunded_units_can_be_taken_again() {
    let server = RedisServer::start();
    for variant in refundable() {
        for rig in rigs(&server, variant.algorithm).await {
            assert!(rig.check("key", 3).await.is_allowed());
            let Ok(reserved) = rig.reserve("key", 5, MINUTE).await else { panic!("5 of 7 fit") };
            assert_eq!(rig.refund(reserved).await, Settlement::Settled, "{rig:?} {}", variant.name);
            assert_eq!(rig.peek("key").await.remaining(), 7, "{rig:?} {}", variant.name);
            assert!(rig.check("key", 7).await.is_allowed(), "{rig:?} {}", variant.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refilled_units_are_not_refunded_again() {
    let server = RedisServer::start();
    for rig in rigs(&server, TokenBucket::new(10, Rate::per_second(1))).await {
        let Ok(first) = rig.reserve("key", 5, MINUTE).await else { panic!("5 of 10 fit") };
        rig.clock.advance(SECOND * 3);
        assert!(rig.check("key", 8).await.is_allowed(), "{rig:?}: 3 of the 5 are back");
        rig.refund(first).await;
        assert_eq!(rig.peek("key").await.remaining(), 2, "{rig:?}: 2 of the 5 are still owed");
    }
    for rig in rigs(&server, FixedWindow::new(10, MINUTE)).await {
        let Ok(first) = rig.reserve("key", 5, 2 * MINUTE).await else { panic!("5 of 10 fit") };
        rig.clock.advance(MINUTE);
        assert!(rig.check("key", 5).await.is_allowed());
        rig.refund(first).await;
        assert_eq!(rig.peek("key").await.remaining(), 5, "{rig:?}: the charge was the last window's");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settled_reservation_is_charged_its_actual_cost() {
    let server = RedisServer::start();
    for variant in refundable() {
        for (actual, remaining) in [(0, 10), (3, 7), (6, 4), (9, 1), (10, 0)] {
            for rig in rigs(&server, variant.algorithm).await {
                let Ok(reserved) = rig.reserve("key", 6, MINUTE).await else { panic!("6 of 10 fit") };
                assert_eq!(rig.peek("key").await.remaining(), 4, "{rig:?} {}", variant.name);
                assert_eq!(rig.settle(reserved, actual).await, Settlement::Settled, "{rig:?} {}", variant.name);
                let left = rig.peek("key").await.remaining();
                assert_eq!(left, remaining, "{rig:?} {} settled for {actual}", variant.name);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_above_the_remaining_units_takes_all_and_owes_the_rest() {
    let server = RedisServer::start();
    for variant in refundable() {
        for rig in rigs(&server, variant.algorithm).await {
            let Ok(reserved) = rig.reserve("key", 6, MINUTE).await else { panic!("6 of 10 fit") };
            assert!(rig.check("key", 3).await.is_allowed());
            let settled = rig.settle(reserved, 9).await;
            assert_eq!(settled, Settlement::Owed { units: 2 }, "{rig:?} {}", variant.name);
            assert_eq!(rig.peek("key").await.remaining(), 0, "{rig:?} {}", variant.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_reservation_stays_charged() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for rig in rigs(&server, variant.algorithm).await {
            let Ok(reserved) = rig.reserve("key", 6, SECOND).await else { panic!("6 of 10 fit") };
            rig.clock.advance(SECOND);
            let before = rig.peek("key").await;
            assert_eq!(rig.settle(reserved, 0).await, Settlement::Expired, "{rig:?} {}", variant.name);
            assert_eq!(rig.peek("key").await, before, "{rig:?} {}", variant.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_estimate_above_the_remaining_units_is_denied() {
    let server = RedisServer::start();
    for variant in variants(10, MINUTE) {
        for rig in rigs(&server, variant.algorithm).await {
            assert!(rig.check("key", 7).await.is_allowed());
            let Err(denial) = rig.reserve("key", 6, MINUTE).await else { panic!("3 of 10 are left") };
            assert!(denial.decision().retry_after().is_some(), "{rig:?} {}", variant.name);
            let Err(never) = rig.reserve("key", 11, MINUTE).await else { panic!("there are 10 in all") };
            assert!(never.decision().retry_after().is_none(), "{rig:?} {}", variant.name);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_limits_are_taken_from_together_or_not_at_all() {
    let server = RedisServer::start();
    // Each variant in turn denies; all others would allow.
    let all = variants(10, MINUTE);
    for tight in all.iter().filter(|variant| !variant.counts_denied()) {
        let limits: Vec<Limit> = all.iter().map(Variant::limit).collect();
        let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
        for rig in rigs_with(&server, &limits).await {
            assert!(rig.decide(&[Hit::new(rig.id(tight.name), "key").cost(8)]).await.is_allowed());
            let hits: Vec<Hit<'_>> = all.iter().map(|variant| Hit::new(rig.id(variant.name), "key").cost(3)).collect();
            let denied = rig.decide(&hits).await;
            assert_eq!((denied.is_allowed(), denied.limit()), (false, Some(rig.id(tight.name))), "{rig:?}");
            for variant in &all {
                let left = rig.decide(&[Hit::new(rig.id(variant.name), "key").cost(0)]).await.remaining();
                let expected = if variant.name == tight.name { 2 } else { 10 };
                assert_eq!(left, expected, "{rig:?}: {} after a denial by {}", variant.name, tight.name);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_with_several_limits_is_refunded_to_those_limits_only() {
    let limits = [
        Limit::new("burst", TokenBucket::new(10, Rate::per_second(1))).unwrap(),
        Limit::new("minute", SlidingWindowLog::new(20, MINUTE)).unwrap(),
        Limit::new("unused", FixedWindow::new(10, MINUTE)).unwrap(),
    ];
    for rig in rigs_with(&RedisServer::start(), &limits).await {
        let [burst, minute, unused] = ["burst", "minute", "unused"].map(|name| rig.id(name));
        assert!(rig.decide(&[Hit::new(unused, "key").cost(5)]).await.is_allowed());
        let hits = [Hit::new(burst, "key").cost(10), Hit::new(minute, "key").cost(10)];
        for _ in 0..10 {
            let Ok(reserved) = rig.reserve_hits(&hits, MINUTE).await else { panic!("{rig:?}: nothing is left taken") };
            assert_eq!(rig.refund(reserved).await, Settlement::Settled, "{rig:?}");
        }
        for (id, left) in [(burst, 10), (minute, 20), (unused, 5)] {
            assert_eq!(rig.decide(&[Hit::new(id, "key").cost(0)]).await.remaining(), left, "{rig:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_key_twice_in_one_request_is_charged_twice() {
    let server = RedisServer::start();
    for variant in variants(3, MINUTE) {
        for rig in rigs_with(&server, &[variant.limit()]).await {
            let id = rig.id(variant.name);
            let denied = rig.decide(&[Hit::new(id, "new").cost(2), Hit::new(id, "new").cost(2)]).await;
            assert!(!denied.is_allowed(), "{rig:?} {}", variant.name);
            assert_eq!(rig.peek("new").await.remaining(), 3, "{rig:?} {}", variant.name);
            let both = rig.decide(&[Hit::new(id, "key"), Hit::new(id, "key").cost(2)]).await;
            assert!(both.is_allowed(), "{rig:?} {}", variant.name);
            assert!(!rig.check("key", 1).await.is_allowed(), "{rig:?} {}", variant.name);
        }
    }
}

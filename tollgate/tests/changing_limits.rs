//! Limits that change while they are in use: what survives, and what the new numbers make of it.

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use common::{Rig, START_US};
use tollgate::{
    Algorithm, Ban, FixedWindow, HOUR, Hit, LeakyBucket, Limit, LimitSet, Limiter, MINUTE, ManualClock, Rate, SECOND,
    Settlement, SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

/// Every way to count, by its quota. Rates are a unit a minute.
fn every_way() -> [fn(u64) -> Algorithm; 10] {
    [
        |quota| TokenBucket::new(quota, Rate::per_minute(1)).into(),
        |quota| TokenBucket::new(quota, Rate::per_minute(1)).interval().into(),
        |quota| LeakyBucket::new(quota, Rate::per_minute(1)).into(),
        |quota| LeakyBucket::new(quota, Rate::per_minute(1)).queue(1000 * HOUR).into(),
        |quota| FixedWindow::new(quota, HOUR).into(),
        |quota| FixedWindow::new(quota, HOUR).from_first_request().into(),
        |quota| SlidingWindowLog::new(quota, HOUR).into(),
        |quota| SlidingWindowLog::new(quota, HOUR).count_denied().into(),
        |quota| SlidingWindowCounter::new(quota, HOUR).into(),
        |quota| SlidingWindowCounter::new(quota, HOUR).segments(6).into(),
    ]
}

fn counts_denied(algorithm: &Algorithm) -> bool {
    format!("{algorithm:?}").contains("count: All")
}

fn limit(algorithm: impl Into<Algorithm>) -> Limit {
    Limit::new("limit", algorithm).expect("the numbers are within the bounds")
}

fn changed(limiter: &Limiter, algorithm: impl Into<Algorithm>) -> Limiter {
    limiter.with_limits(vec![limit(algorithm)]).expect("one valid limit")
}

#[test]
fn what_was_spent_counts_under_a_lower_limit_and_under_the_old_one_again() {
    for way in every_way() {
        let rig = Rig::of(way(1000));
        assert_eq!(rig.limiter.check_n("ann", 40).remaining(), 960);
        let lower = changed(&rig.limiter, way(100));
        assert_eq!(lower.check_n("ann", 20).remaining(), 40, "{:?}", way(100));
        let again = changed(&lower, way(1000));
        assert_eq!(again.peek("ann").remaining(), 940, "{:?}", way(1000));
        // The first is still there, and all three count together.
        assert_eq!(rig.limiter.peek("ann").remaining(), 940, "{:?}", way(1000));
    }
}

#[test]
fn what_was_spent_beyond_a_lower_limit_leaves_nothing_and_is_waited_for_exactly() {
    for way in every_way() {
        let rig = Rig::of(way(1000));
        assert!(rig.limiter.check_n("ann", 500).is_allowed());
        let lower = changed(&rig.limiter, way(7));
        let denied = lower.check("ann");
        assert!(!denied.is_allowed(), "{:?}", way(7));
        assert_eq!(denied.remaining(), 0, "{:?}", way(7));
        let wait = denied.retry_after().expect("waiting helps");
        let then = Timestamp::from_micros(START_US).saturating_add(wait);
        rig.clock.set(then.saturating_sub(Duration::from_micros(1)));
        assert!(counts_denied(&way(7)) || !lower.check("ann").is_allowed(), "{:?}", way(7));
        rig.clock.set(then);
        assert!(lower.check("ann").is_allowed(), "{:?}", way(7));
    }
}

#[test]
fn a_refund_under_a_lower_limit_does_not_give_back_what_it_does_not_have() {
    for way in every_way() {
        let rig = Rig::of(way(1000));
        let taken = rig.limiter.check_n("ann", 500);
        let lower = changed(&rig.limiter, way(10));
        lower.refund("ann", &taken);
        let left = lower.peek("ann").remaining();
        assert!(left == 10 || left == 0, "{left} of {:?}", way(10));
    }
}

#[test]
fn a_raise_keeps_what_was_spent_while_keys_need_no_more_words_for_it() {
    type Way = fn(u64) -> Algorithm;
    let raises: [(Way, u64); 6] = [
        (|quota| TokenBucket::new(quota, Rate::per_minute(1)).into(), 1 << 20),
        (|quota| TokenBucket::new(quota, Rate::per_minute(1)).interval().into(), 1 << 20),
        (|quota| LeakyBucket::new(quota, Rate::per_minute(1)).queue(HOUR).into(), 1 << 20),
        (|quota| FixedWindow::new(quota, MINUTE).into(), 1 << 32),
        (|quota| FixedWindow::new(quota, MINUTE).from_first_request().into(), 511),
        (|quota| SlidingWindowCounter::new(quota, MINUTE).into(), 100_000),
    ];
    for (way, most) in raises {
        let rig = Rig::of(way(10));
        let mut limiter = rig.limiter;
        assert_eq!(limiter.check_n("ann", 4).remaining(), 6);
        for quota in [100, 500, most] {
            limiter = changed(&limiter, way(quota));
            assert_eq!(limiter.peek("ann").remaining(), quota - 4, "{:?}", way(quota));
        }
    }
}

#[test]
fn the_time_at_which_a_bucket_is_full_again_survives() {
    let rig = Rig::of(TokenBucket::new(10, Rate::per_second(1)));
    assert_eq!(rig.limiter.check_n("ann", 4).reset_after(), 4 * SECOND);
    let faster = changed(&rig.limiter, TokenBucket::new(100, Rate::per_second(10)));
    let peeked = faster.peek("ann");
    assert_eq!((peeked.remaining(), peeked.reset_after()), (60, 4 * SECOND));
    // Three and a half of the new seconds' worth: at most what the bucket takes to fill.
    let small = changed(&faster, LeakyBucket::new(10, Rate::per_second(1)));
    assert_eq!(small.peek("ann").remaining(), 10, "another algorithm starts anew");
    let short = changed(&faster, TokenBucket::new(20, Rate::per_second(10)));
    assert_eq!((short.peek("ann").remaining(), short.peek("ann").reset_after()), (0, 2 * SECOND));
}

#[test]
fn parts_of_a_microsecond_that_a_new_rate_does_not_know_are_one_microsecond() {
    // One unit is 1000/7 µs.
    let rig = Rig::of(TokenBucket::new(100, Rate::new(7, Duration::from_millis(1))));
    assert_eq!(rig.limiter.check("ann").reset_after(), Duration::from_micros(143));
    let whole = changed(&rig.limiter, TokenBucket::new(100, Rate::per_second(1_000)));
    assert_eq!(whole.peek("ann").reset_after(), Duration::from_micros(143));
}

#[test]
fn another_window_another_name_and_another_algorithm_start_anew() {
    let pairs: [(Algorithm, Algorithm); 6] = [
        (FixedWindow::new(10, HOUR).into(), FixedWindow::new(10, MINUTE).into()),
        (FixedWindow::new(10, HOUR).into(), FixedWindow::new(10, HOUR).from_first_request().into()),
        (SlidingWindowLog::new(10, HOUR).into(), SlidingWindowLog::new(10, MINUTE).into()),
        (SlidingWindowLog::new(10, HOUR).into(), SlidingWindowLog::new(10, HOUR).count_denied().into()),
        (SlidingWindowCounter::new(10, HOUR).into(), SlidingWindowCounter::new(10, HOUR).segments(2).into()),
        (TokenBucket::new(10, Rate::per_hour(1)).into(), TokenBucket::new(10, Rate::per_hour(1)).interval().into()),
    ];
    for (before, after) in pairs {
        let rig = Rig::of(before);
        assert_eq!(rig.limiter.check_n("ann", 10).remaining(), 0);
        assert_eq!(changed(&rig.limiter, after).peek("ann").remaining(), 10, "{before:?} to {after:?}");
        let renamed = rig.limiter.with_limits(vec![Limit::new("other", before).unwrap()]).unwrap();
        assert_eq!(renamed.peek("ann").remaining(), 10, "{before:?}");
    }
}

#[test]
fn limits_that_are_refused_change_nothing() {
    let rig = Rig::of(FixedWindow::new(10, HOUR));
    assert_eq!(rig.limiter.check_n("ann", 4).remaining(), 6);
    assert!(rig.limiter.with_limits(vec![]).is_err());
    let twice = rig.limiter.with_limits(vec![limit(FixedWindow::new(1, HOUR)), limit(FixedWindow::new(2, HOUR))]);
    assert!(twice.unwrap_err().to_string().contains("two limits are named `limit`"));
    let other = LimitSet::new().limit(limit(FixedWindow::new(1, HOUR))).variant(limit(TokenBucket::default()));
    assert_eq!(rig.limiter.with_limits(other).unwrap_err().field(), "algorithm");
    let nobody = Limit::new("nobody", FixedWindow::new(1, HOUR)).unwrap();
    let nobody = LimitSet::new().limit(limit(FixedWindow::new(1, HOUR))).variant(nobody);
    assert_eq!(rig.limiter.with_limits(nobody).unwrap_err().field(), "name");
    assert_eq!(rig.limiter.peek("ann").remaining(), 6);
}

#[test]
fn memory_of_limits_that_are_gone_is_given_back() {
    let rig = Rig::of(SlidingWindowLog::new(1000, HOUR));
    for key in 0..500 {
        for _ in 0..50 {
            assert!(rig.limiter.check(&format!("key {key}")).is_allowed());
            rig.clock.advance(Duration::from_micros(1));
        }
    }
    let used = rig.limiter.memory_used();
    let mut limiter = changed(&rig.limiter, FixedWindow::new(10, HOUR));
    assert!(limiter.memory_used() > used, "both are there");
    drop(rig);
    let small = limiter.memory_used();
    assert!(small < used / 4, "{small} of {used}");
    for window in 1..200 {
        limiter = changed(&limiter, FixedWindow::new(10, MINUTE * window));
        assert_eq!(limiter.memory_used(), small);
    }
}

#[test]
fn a_limit_that_is_added_when_the_memory_is_spent_counts_all_the_same() {
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let limiter = Limiter::builder().limit(limit(FixedWindow::new(10, HOUR))).max_memory(64 << 10).clock(clock);
    let limiter = limiter.build().unwrap();
    for key in 0..20_000 {
        let _ = limiter.check(&format!("key {key}"));
    }
    assert_eq!(limiter.memory_used(), 64 << 10);
    let added = Limit::new("added", FixedWindow::new(3, HOUR)).unwrap();
    let limiter = limiter.with_limits(vec![limit(FixedWindow::new(10, HOUR)), added]).unwrap();
    let added = limiter.id("added").unwrap();
    let admitted = (0..10).filter(|_| limiter.decide_now(&[Hit::new(added, "ann")]).is_allowed());
    assert_eq!(admitted.count(), 3);
    assert!(limiter.memory_used() <= (64 << 10) + (8 << 10));
}

/// Decides in many threads while another exchanges the limits back and forth; how many were admitted.
fn admitted_under_exchange(ways: [Algorithm; 2]) -> (usize, u64) {
    const THREADS: usize = 4;
    let rig = Rig::of(ways[0]);
    let current = Mutex::new(rig.limiter.clone());
    let now = || current.lock().expect("nobody panics").clone();
    let (admitted, done) = (AtomicUsize::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        let deciding: Vec<_> = (0..THREADS)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..3_000 {
                        let limiter = now();
                        if limiter.check("key").is_allowed() {
                            admitted.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            for round in 0.. {
                let next = changed(&now(), ways[(round + 1) % 2]);
                *current.lock().expect("nobody panics") = next;
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        deciding.into_iter().for_each(|thread| thread.join().expect("no thread panics"));
        done.store(true, Ordering::Relaxed);
    });
    let limiter = changed(&now(), ways[0]);
    (admitted.into_inner(), limiter.peek("key").remaining())
}

#[test]
fn limits_exchanged_under_load_admit_no_more_than_the_larger() {
    // But for buckets, whose debt is cut to what the smaller can owe, and a log that forgets what it has denials for.
    let cut = |algorithm: &Algorithm| {
        let is_smooth = !format!("{algorithm:?}").contains("Interval");
        is_smooth && matches!(algorithm, Algorithm::TokenBucket(_) | Algorithm::LeakyBucket(_))
            || counts_denied(algorithm)
    };
    for way in every_way().into_iter().filter(|way| !cut(&way(1))) {
        let (admitted, left) = admitted_under_exchange([way(2_000), way(500)]);
        assert!(admitted >= 500, "{admitted} of {:?}", way(500));
        assert_eq!(admitted as u64 + left, 2_000, "{:?}", way(2_000));
    }
}

#[test]
fn the_same_limits_exchanged_under_load_lose_not_one_count() {
    for way in every_way() {
        let (admitted, left) = admitted_under_exchange([way(20_000), way(20_000)]);
        assert_eq!((admitted, left), (12_000, 8_000), "{:?}", way(1));
    }
}

#[test]
fn variants_of_a_limit_count_together_and_are_only_asked_by_hits() {
    for way in every_way() {
        let clock = ManualClock::at(Timestamp::from_micros(START_US));
        let limits = LimitSet::new().limit(limit(way(10))).variant(limit(way(1_000))).variant(limit(way(5)));
        let limiter = Limiter::builder().limits(limits).clock(clock).build().unwrap();
        let [large, small] = *limiter.beside().collect::<Vec<_>>() else { panic!("two") };
        assert_eq!(limiter.limits().len(), 1);
        assert_eq!(limiter.id("limit").map(|id| limiter.limit(id).quota()), Some(10));
        assert_eq!(limiter.check_n("ann", 3).remaining(), 7);
        assert_eq!(limiter.decide_now(&[Hit::new(large, "ann")]).remaining(), 996, "{:?}", way(1));
        assert_eq!(limiter.decide_now(&[Hit::new(small, "ann")]).remaining(), 0, "{:?}", way(1));
        assert_eq!(limiter.peek("ann").remaining(), 5, "{:?}", way(1));
        // Both in one request are one request for the sum.
        let both = limiter.decide_now(&[Hit::new(large, "ann").cost(2), Hit::new(small, "ann").cost(2)]);
        assert!(both.is_allowed(), "{:?}", way(1));
        assert_eq!(limiter.peek("ann").remaining(), 1, "{:?}", way(1));
        limiter.reset("ann");
        assert_eq!(limiter.decide_now(&[Hit::new(large, "ann").cost(0)]).remaining(), 1_000, "{:?}", way(1));
    }
}

#[test]
fn variants_keep_each_other_s_keys() {
    // A key at rest by the faster rate is not at rest by the slower, which must find it again.
    let way = |rate: u64| TokenBucket::new(1_000, Rate::per_minute(rate)).interval();
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let limits = LimitSet::new().limit(limit(way(1))).variant(limit(way(1_000)));
    let limiter = Limiter::builder().limits(limits).clock(clock.clone()).max_memory(1 << 15).build().unwrap();
    let fast = limiter.beside().next().unwrap();
    assert_eq!(limiter.check_n("ann", 1_000).remaining(), 0);
    clock.advance(MINUTE);
    for key in 0..5_000 {
        let _ = limiter.decide_now(&[Hit::new(fast, &format!("key {key}"))]);
    }
    assert_eq!(limiter.peek("ann").remaining(), 1);
}

#[test]
fn a_reservation_is_settled_by_the_limits_that_took_it() {
    let rig = Rig::of(FixedWindow::new(100, HOUR));
    let reserved = rig.limiter.reserve("ann", 50, HOUR).unwrap();
    let other = Limit::new("other", FixedWindow::new(100, HOUR)).unwrap();
    let after = rig.limiter.with_limits(vec![other, limit(FixedWindow::new(60, HOUR))]).unwrap();
    assert_eq!(after.settle(reserved, 10), Settlement::Settled);
    assert_eq!(rig.limiter.peek("ann").remaining(), 90);
    let id = after.id("limit").unwrap();
    assert_eq!(after.decide_now(&[Hit::new(id, "ann").cost(0)]).remaining(), 50);
}

#[test]
fn a_ban_survives_a_change_of_its_numbers() {
    let rig = Rig::of(Ban { after: 3, within: MINUTE, for_: HOUR });
    assert!(rig.limiter.check_n("eve", 3).is_allowed());
    assert!(rig.limiter.check_n("ann", 2).is_allowed());
    let longer = changed(&rig.limiter, Ban { after: 5, within: MINUTE, for_: 2 * HOUR });
    assert_eq!(longer.peek("eve").retry_after(), Some(2 * HOUR));
    assert_eq!(longer.check("ann").remaining(), 2, "of five strikes, two were there");
    let stricter = changed(&longer, Ban { after: 1, within: MINUTE, for_: HOUR });
    assert!(stricter.peek("ann").is_allowed(), "three strikes were no ban then");
    assert!(stricter.check("ann").is_allowed());
    assert_eq!(stricter.peek("ann").retry_after(), Some(HOUR));
}

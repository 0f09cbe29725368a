//! Operations on a key other than `check`: peek, reset, refund, reserve and settle.

mod common;

use std::time::Duration;

use common::{Answer, Rig, START_US};
use tollgate::{
    Algorithm, FixedWindow, HOUR, Hit, LeakyBucket, Limit, Limiter, MINUTE, ManualClock, Rate, SECOND, Settlement,
    SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

/// A clock that does not move, so that no window ends.
fn still() -> ManualClock {
    ManualClock::at(Timestamp::from_micros(START_US))
}

fn algorithms() -> [Algorithm; 8] {
    let rate = Rate::per_second(1);
    [
        TokenBucket::new(10, rate).into(),
        TokenBucket::new(10, rate).interval().into(),
        LeakyBucket::new(10, rate).into(),
        FixedWindow::new(10, MINUTE).into(),
        FixedWindow::new(10, MINUTE).from_first_request().into(),
        SlidingWindowLog::new(10, MINUTE).into(),
        SlidingWindowLog::new(10, MINUTE).count_denied().into(),
        SlidingWindowCounter::new(10, MINUTE).segments(3).into(),
    ]
}

#[test]
fn a_look_takes_nothing_however_often() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        assert!(rig.limiter.check_n("key", 4).is_allowed());
        let looks: Vec<_> = (0..100).map(|_| rig.limiter.peek("key")).collect();
        assert!(looks.iter().all(|look| look.is_allowed() && look.remaining() == 6), "{algorithm:?}");
        assert_eq!(Answer::from(rig.limiter.check_n("key", 0)), looks[0].into(), "{algorithm:?}");
    }
}

#[test]
fn a_key_that_was_reset_is_as_if_never_seen() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        assert!(rig.limiter.check_n("key", 10).is_allowed());
        assert!(rig.limiter.check_n("other", 10).is_allowed());
        rig.limiter.reset("key");
        rig.limiter.reset("never seen");
        let look = rig.limiter.peek("key");
        assert_eq!((look.remaining(), look.reset_after()), (10, Duration::ZERO), "{algorithm:?}");
        assert!(rig.limiter.check_n("key", 10).is_allowed(), "{algorithm:?}");
        assert!(!rig.limiter.check("other").is_allowed(), "{algorithm:?}");
    }
}

#[test]
fn refunded_units_can_be_taken_again_at_once() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        let _ = rig.limiter.check_n("key", 3);
        let reservation = rig.limiter.reserve("key", 5, MINUTE).unwrap();
        assert_eq!(rig.limiter.refund(reservation), Settlement::Settled);
        assert_eq!(rig.limiter.peek("key").remaining(), 7, "{algorithm:?}");
    }
}

#[test]
fn refilled_units_are_not_refunded_again() {
    let bucket = Rig::of(TokenBucket::new(10, Rate::per_second(1)));
    let first = bucket.limiter.reserve("key", 5, MINUTE).unwrap();
    bucket.clock.advance(SECOND * 3);
    assert!(bucket.limiter.check_n("key", 8).is_allowed(), "3 of the 5 are back");
    bucket.limiter.refund(first);
    assert_eq!(bucket.limiter.peek("key").remaining(), 2, "2 of the 5 are still owed");

    let window = Rig::of(FixedWindow::new(10, MINUTE));
    let first = window.limiter.reserve("key", 5, 2 * MINUTE).unwrap();
    window.clock.advance(MINUTE);
    let _ = window.limiter.check_n("key", 5);
    window.limiter.refund(first);
    assert_eq!(window.limiter.peek("key").remaining(), 5, "the charge was the last window's");
}

#[test]
fn the_last_of_any_number_of_limits_is_asked() {
    for others in 0..12 {
        let other = |number| Limit::new(format!("other-{number}"), TokenBucket::new(100, Rate::per_hour(1))).unwrap();
        let limiter = (0..others)
            .fold(Limiter::builder(), |builder, number| builder.limit(other(number)))
            .limit(Limit::new("last", TokenBucket::new(2, Rate::per_hour(1))).unwrap())
            .clock(still())
            .build()
            .unwrap();
        let admitted = (0..5).filter(|_| limiter.check("key").is_allowed()).count();
        assert_eq!(admitted, 2, "beside {others} others");
        if others > 0 {
            let first = limiter.decide_now(&[Hit::new(limiter.id("other-0").unwrap(), "key").cost(0)]);
            assert_eq!(first.remaining(), 98, "who is denied takes nothing, beside {others} others");
        }
    }
}

#[test]
fn a_request_of_several_limits_gives_back_to_all() {
    let limiter = Limiter::builder()
        .limit(Limit::new("burst", TokenBucket::new(10, Rate::per_second(1))).unwrap())
        .limit(Limit::new("hour", SlidingWindowLog::new(20, MINUTE)).unwrap())
        .clock(still())
        .build()
        .unwrap();
    for _ in 0..50 {
        let reservation = limiter.reserve("key", 10, MINUTE).expect("nothing is left taken");
        limiter.refund(reservation);
    }
}

#[test]
fn a_reservation_is_charged_what_the_work_cost() {
    for algorithm in algorithms() {
        for (actual, remaining) in [(0, 10), (3, 7), (6, 4), (9, 1), (10, 0)] {
            let rig = Rig::of(algorithm);
            let reservation = rig.limiter.reserve("key", 6, MINUTE).unwrap();
            assert_eq!(rig.limiter.peek("key").remaining(), 4, "{algorithm:?}");
            assert_eq!(rig.limiter.settle(reservation, actual), Settlement::Settled, "{algorithm:?}");
            assert_eq!(rig.limiter.peek("key").remaining(), remaining, "{algorithm:?} settled for {actual}");
        }
    }
}

#[test]
fn work_that_cost_more_than_is_left_is_owed() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        let reservation = rig.limiter.reserve("key", 6, MINUTE).unwrap();
        assert!(rig.limiter.check_n("key", 3).is_allowed());
        assert_eq!(rig.limiter.settle(reservation, 9), Settlement::Owed { units: 2 }, "{algorithm:?}");
        assert_eq!(rig.limiter.peek("key").remaining(), 0, "{algorithm:?}");
        let reservation = Rig::of(algorithm).limiter.reserve("key", 1, MINUTE).unwrap();
        // More than a key counts.
        assert!(matches!(rig.limiter.settle(reservation, u64::MAX), Settlement::Short { .. }), "{algorithm:?}");
    }
}

/// A key in the table of another configuration cannot be moved to a full table, so it is charged where it is.
#[test]
fn work_of_a_key_that_cannot_be_moved_is_counted() {
    let limit = |window| Limit::new("mails", FixedWindow::new(10, window)).expect("a valid limit");
    let clock = still();
    // The first buckets of two tables.
    let per_minute = Limiter::builder().limit(limit(MINUTE)).clock(clock).max_memory(16_384).build();
    let per_minute = per_minute.expect("a valid limiter");
    let per_hour = per_minute.with_limits(vec![limit(HOUR)]).expect("enough memory");
    let reservation = per_hour.reserve("ann", 2, MINUTE).expect("2 of 10 fit");
    assert!(per_minute.check("ann").is_allowed());
    for key in 0..4_000 {
        let _ = per_hour.check_n(&format!("key {key}"), 10);
    }
    assert_eq!(per_hour.peek("ann").remaining(), 7);
    assert!(!per_hour.check("ann").is_allowed());
    assert_eq!(per_hour.settle(reservation, 5), Settlement::Settled);
    assert_eq!(per_hour.peek("ann").remaining(), 4);
}

#[test]
fn a_reservation_that_expired_stands() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        let reservation = rig.limiter.reserve("key", 6, Duration::from_millis(500)).unwrap();
        rig.clock.advance(Duration::from_millis(500));
        let before = rig.limiter.peek("key");
        assert_eq!(rig.limiter.settle(reservation, 0), Settlement::Expired, "{algorithm:?}");
        assert_eq!(rig.limiter.peek("key"), before, "{algorithm:?}");
    }
}

#[test]
fn an_estimate_that_does_not_fit_is_denied_like_a_request() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        let _ = rig.limiter.check_n("key", 7);
        let denial = rig.limiter.reserve("key", 6, MINUTE).unwrap_err();
        assert!(!denial.decision().is_allowed() && denial.decision().retry_after().is_some(), "{algorithm:?}");
        let never = rig.limiter.reserve("key", 11, MINUTE).unwrap_err();
        assert!(!never.decision().is_allowed() && never.decision().retry_after().is_none(), "{algorithm:?}");
    }
}

#[test]
fn two_keys_of_one_limit_in_one_request_pay_each_for_itself() {
    let limiter = Rig::new(Limit::new("pairs", FixedWindow::new(1, MINUTE)).expect("a valid limit"), START_US).limiter;
    let id = limiter.id("pairs").expect("it has that name");
    // With this many pairs, some share a bucket, and many of those find it empty.
    for pair in 0..2_000 {
        let (one, other) = (format!("one {pair}"), format!("other {pair}"));
        let both = limiter.decide_now(&[Hit::new(id, &one), Hit::new(id, &other)]);
        assert!(both.is_allowed(), "{pair}");
        assert!(!limiter.check(&one).is_allowed() && !limiter.check(&other).is_allowed(), "{pair}");
    }
}

#[test]
fn keys_that_occur_twice_among_many_hits_pay_twice() {
    let limit = |name: &str| Limit::new(name, FixedWindow::new(1000, MINUTE)).unwrap();
    let limiter = Limiter::builder().limit(limit("one")).limit(limit("other")).clock(still()).build().unwrap();
    let ids = ["one", "other"].map(|name| limiter.id(name).unwrap());
    let keys: Vec<String> = (0..100).map(|number| number.to_string()).collect();
    let hits = || keys.iter().flat_map(|key| ids.map(|id| Hit::new(id, key.as_str())));
    let twice: Vec<Hit<'_>> = hits().chain(hits()).collect();
    let reservation = limiter.reserve_hits(&twice, MINUTE).unwrap();
    assert!(hits().all(|hit| limiter.decide_now(&[hit.cost(0)]).remaining() == 998));
    limiter.refund(reservation);
    assert!(hits().all(|hit| limiter.decide_now(&[hit.cost(0)]).remaining() == 1000));
}

#[test]
fn the_same_key_twice_in_one_request_pays_twice() {
    let limiter = Rig::new(Limit::new("twice", FixedWindow::new(3, MINUTE)).expect("a valid limit"), START_US).limiter;
    let id = limiter.id("twice").expect("it has that name");
    assert!(limiter.decide_now(&[Hit::new(id, "key"), Hit::new(id, "key").cost(2)]).is_allowed());
    assert!(!limiter.check("key").is_allowed());
    assert!(!limiter.decide_now(&[Hit::new(id, "new").cost(2), Hit::new(id, "new").cost(2)]).is_allowed());
    assert_eq!(limiter.peek("new").remaining(), 3, "denied, it took nothing");
}

#[test]
fn a_refund_reaches_only_the_limits_that_were_asked() {
    let limit = |name| Limit::new(name, FixedWindow::new(10, MINUTE)).expect("a valid limit");
    let limiter =
        Limiter::builder().limit(limit("a")).limit(limit("b")).clock(still()).build().expect("a valid limiter");
    let (a, b) = (limiter.id("a").expect("a"), limiter.id("b").expect("b"));
    let left = |id| limiter.decide_now(&[Hit::new(id, "key").cost(0)]).remaining();
    assert!(limiter.decide_now(&[Hit::new(b, "key").cost(5)]).is_allowed());
    let reservation = limiter.reserve_hits(&[Hit::new(a, "key").cost(4)], MINUTE).unwrap();
    assert_eq!((left(a), left(b)), (6, 5));
    limiter.refund(reservation);
    assert_eq!((left(a), left(b)), (10, 5));
}

#[test]
fn hits_of_different_costs_are_settled_each_by_its_own() {
    let limit = |name| Limit::new(name, FixedWindow::new(10, MINUTE)).expect("a valid limit");
    let limiter =
        Limiter::builder().limit(limit("a")).limit(limit("b")).clock(still()).build().expect("a valid limiter");
    let (a, b) = (limiter.id("a").expect("a"), limiter.id("b").expect("b"));
    let left = |id| limiter.decide_now(&[Hit::new(id, "key").cost(0)]).remaining();
    let hits = [Hit::new(a, "key").cost(8), Hit::new(b, "key").cost(2)];
    let settle = |actual| limiter.settle(limiter.reserve_hits(&hits, MINUTE).expect("both fit"), actual);
    assert_eq!(settle(5), Settlement::Settled);
    assert_eq!((left(a), left(b)), (5, 5));
    assert!(limiter.reserve_hits(&hits, MINUTE).is_err(), "8 of 5 do not fit");
    assert_eq!((left(a), left(b)), (5, 5));
}

#[test]
fn a_long_log_without_memory_forgets_all_of_it_in_the_end() {
    // Room for the first block of buckets only, and not for chunks.
    let clock = still();
    let limit = Limit::new("knocks", SlidingWindowLog::new(20, MINUTE).count_denied()).expect("a valid limit");
    let smallest = (1..)
        .map(|kib| kib * 1024)
        .find_map(|bytes| Limiter::builder().limit(limit.clone()).clock(clock.clone()).max_memory(bytes).build().ok());
    let limiter = smallest.expect("some memory is enough");
    assert!(limiter.check_n("key", 20).is_allowed());
    for _ in 0..100 {
        clock.advance(Duration::from_micros(1));
        assert!(!limiter.check("key").is_allowed());
    }
    clock.advance(MINUTE);
    assert_eq!(limiter.peek("key").remaining(), 20);
    assert!(limiter.check_n("key", 20).is_allowed());
}

#[test]
fn live_keys_are_those_that_have_something_to_get_back() {
    use tollgate::{HOUR, LeakyBucket, Rate, SECOND, SlidingWindowCounter, SlidingWindowLog, TokenBucket};

    let algorithms: [Algorithm; 6] = [
        TokenBucket::new(10, Rate::per_second(1)).into(),
        LeakyBucket::new(10, Rate::per_second(1)).into(),
        FixedWindow::new(10, SECOND).into(),
        SlidingWindowLog::new(10, SECOND).into(),
        SlidingWindowLog::new(100, SECOND).into(),
        SlidingWindowCounter::new(10, SECOND).into(),
    ];
    for algorithm in algorithms {
        let clock = still();
        let limiter = Limiter::builder()
            .limit(Limit::new("one", algorithm).unwrap())
            .limit(Limit::new("other", FixedWindow::new(10, HOUR)).unwrap())
            .clock(clock.clone())
            .build()
            .unwrap();
        let (one, other) = (limiter.id("one").unwrap(), limiter.id("other").unwrap());
        let live = || (limiter.live_keys(one), limiter.live_keys(other));
        assert_eq!(live(), (0, 0), "{algorithm:?}");
        for key in 0..10_000 {
            assert!(limiter.check(key).is_allowed());
            assert!(limiter.peek(key + 1_000_000).is_allowed());
        }
        assert_eq!(live(), (10_000, 10_000), "{algorithm:?}");
        limiter.reset(0);
        assert_eq!(live(), (9_999, 9_999), "{algorithm:?}");
        clock.advance(2 * SECOND);
        assert_eq!(live(), (0, 9_999), "{algorithm:?}");
    }
}

#[test]
fn the_memory_of_each_limit_follows_its_keys() {
    let clock = ManualClock::at(Timestamp::EPOCH);
    let limits = ["short", "long"].map(|name| {
        let window = if name == "short" { MINUTE } else { HOUR };
        Limit::new(name, FixedWindow::new(10, window)).unwrap()
    });
    let [short, long] = limits;
    let builder = Limiter::builder().limit(short).limit(long).clock(clock.clone()).max_memory(64 << 20);
    let mut limiter = builder.build().unwrap();
    assert_eq!(limiter.max_memory(), 64 << 20);
    let ids: Vec<_> = limiter.ids().collect();
    let names: Vec<&str> = ids.iter().filter_map(|id| limiter.limit(*id)).map(Limit::name).collect();
    assert_eq!(names, ["short", "long"]);
    let empty = limiter.occupancy(ids[0]);
    assert_eq!(empty.keys, 0);
    for key in 0..10_000_u32 {
        assert!(limiter.decide_now(&[Hit::new(ids[0], &key.to_le_bytes())]).is_allowed());
    }
    assert!(limiter.check("ann").is_allowed());
    let full = limiter.occupancy(ids[0]);
    assert_eq!(full.keys, 10_001);
    assert!(full.slots > full.keys && full.bytes > empty.bytes, "{full:?}");
    assert_eq!(limiter.occupancy(ids[1]).keys, 1);
    let sum: usize = ids.iter().map(|id| limiter.occupancy(*id).bytes).sum();
    assert_eq!(sum, limiter.memory_used());

    clock.advance(MINUTE);
    while let Some(smaller) = limiter.compacted() {
        limiter = smaller;
    }
    let after = limiter.occupancy(ids[0]);
    assert!(after.slots < full.slots && after.bytes < full.bytes && after.keys <= 1, "{after:?}");
}

//! Debts that the words of a key have no room for: reloads, several limits, snapshots, threads and memory.

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{Answer, START_US};
use tollgate::{
    Algorithm, FixedWindow, HOUR, Hit, Limit, Limiter, MAX_SPAN, MINUTE, ManualClock, SECOND, Settlement,
    SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

const LIMIT: u64 = 100;
/// More than the words of any of these limits have room for.
const DEBT: u64 = 1_000_000;

fn limits() -> Vec<Algorithm> {
    vec![
        FixedWindow::new(LIMIT, HOUR).into(),
        FixedWindow::new(LIMIT, HOUR).from_first_request().into(),
        SlidingWindowLog::new(LIMIT, HOUR).into(),
        SlidingWindowLog::new(5, HOUR).into(),
        SlidingWindowCounter::new(LIMIT, HOUR).into(),
        SlidingWindowCounter::new(LIMIT, HOUR).segments(6).into(),
        TokenBucket::new(LIMIT, tollgate::Rate::new(LIMIT, HOUR)).into(),
        TokenBucket::new(LIMIT, tollgate::Rate::new(10, MINUTE)).interval().into(),
    ]
}

fn limit(algorithm: Algorithm) -> Limit {
    Limit::new("limit", algorithm).expect("a valid limit")
}

fn limiter(algorithm: Algorithm) -> (Limiter, ManualClock) {
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let limiter = Limiter::builder().limit(limit(algorithm)).clock(clock.clone()).build();
    (limiter.expect("a valid limiter"), clock)
}

/// Charges a key with units whatever is left.
fn owe(limiter: &Limiter, key: &str, units: u64) -> Settlement {
    let reservation = limiter.reserve(key, 0, MAX_SPAN).expect("a cost of 0 is allowed");
    limiter.settle(reservation, units)
}

fn peek(limiter: &Limiter, key: &str) -> Answer {
    limiter.peek(key).into()
}

#[test]
fn keys_beside_a_key_that_owes_are_counted_as_before() {
    for algorithm in limits() {
        let (limiter, _) = limiter(algorithm);
        let quota = limiter.peek("ann").quota();
        for key in ["ann", "bob"] {
            assert!(limiter.check_n(key, 2).is_allowed(), "{algorithm:?}");
        }
        assert_eq!(owe(&limiter, "ann", DEBT), Settlement::Owed { units: DEBT + 2 - quota }, "{algorithm:?}");
        assert!(!limiter.check("ann").is_allowed(), "{algorithm:?}");
        for key in ["bob", "cid"] {
            assert!(limiter.check(key).is_allowed(), "{algorithm:?}");
        }
        assert_eq!((peek(&limiter, "bob").remaining, peek(&limiter, "cid").remaining), (quota - 3, quota - 1));
        let id = limiter.id("limit").expect("the limit");
        assert_eq!(limiter.live_keys(id), 3, "{algorithm:?}");
        limiter.reset("ann");
        assert_eq!(peek(&limiter, "ann").remaining, quota, "{algorithm:?}");
        assert_eq!(limiter.live_keys(id), 2, "{algorithm:?}");
    }
}

#[test]
fn a_denied_key_is_admitted_when_its_debt_is_paid_and_no_sooner() {
    for algorithm in limits() {
        let (limiter, clock) = limiter(algorithm);
        owe(&limiter, "ann", DEBT);
        let denied = limiter.check("ann");
        let wait = denied.retry_after().expect("the debt ends");
        clock.advance(wait - Duration::from_micros(1));
        assert!(!limiter.check("ann").is_allowed(), "{algorithm:?} after {wait:?} less a microsecond");
        clock.advance(Duration::from_micros(1));
        assert!(limiter.check("ann").is_allowed(), "{algorithm:?} after {wait:?}");
    }
}

#[test]
fn debts_survive_changes_of_the_numbers() {
    for algorithm in limits() {
        let (limiter, _) = limiter(algorithm);
        owe(&limiter, "ann", DEBT);
        let before = peek(&limiter, "ann");
        for other in limits() {
            let changed = limiter.with_limits(vec![limit(other)]).expect("a valid limit");
            assert!(!changed.check("ann").is_allowed(), "{algorithm:?} to {other:?}");
        }
        // A limit with room for the whole debt shows that every unit is counted.
        let (limiter, _) = limiter_of_debt(algorithm);
        let more = limiter.with_limits(vec![limit(with_quota(algorithm, 2 * DEBT))]).expect("a valid limit");
        assert_eq!(peek(&more, "ann").remaining, DEBT, "{algorithm:?}");
        let less = more.with_limits(vec![limit(algorithm)]).expect("a valid limit");
        assert_eq!(peek(&less, "ann"), before, "{algorithm:?}");
    }
}

/// A debt that was made under one limit is paid under the next.
#[test]
fn a_debt_is_paid_under_the_limits_that_come_later() {
    let paid_in = |first: Algorithm, then: Algorithm| {
        let (limiter, clock) = limiter(first);
        owe(&limiter, "ann", 1_000);
        let changed = limiter.with_limits(vec![limit(then)]).expect("a valid limit");
        let wait = changed.check("ann").retry_after().expect("the debt ends");
        clock.advance(wait / 2);
        let left = changed.check("ann").retry_after().expect("the debt ends");
        assert_eq!(left, wait - wait / 2, "{first:?} to {then:?}");
        clock.advance(left - Duration::from_micros(1));
        assert!(!changed.check("ann").is_allowed(), "{first:?} to {then:?}");
        clock.advance(Duration::from_micros(1));
        assert!(changed.check("ann").is_allowed(), "{first:?} to {then:?}");
        wait
    };
    let bucket = TokenBucket::new(10, tollgate::Rate::new(1, SECOND));
    let log = SlidingWindowLog::new(5, HOUR);
    // One unit must be left, of ten.
    assert_eq!(paid_in(TokenBucket::new(10, tollgate::Rate::new(2, SECOND)).into(), bucket.into()), 991 * SECOND);
    assert_eq!(paid_in(log.into(), SlidingWindowLog::new(5, HOUR / 2).into()), HOUR / 2);
}

/// The limits that took a reservation settle it, wherever its key is by now.
#[test]
fn a_reservation_of_former_limits_owes_under_the_new_ones() {
    for algorithm in limits() {
        for other in limits() {
            let (before, _) = limiter(algorithm);
            let reservation = before.reserve("ann", 1, MINUTE).expect("one of many");
            let after = before.with_limits(vec![limit(with_quota(other, 2 * DEBT))]).expect("a valid limit");
            assert!(after.check("ann").is_allowed());
            assert!(matches!(after.settle(reservation, DEBT), Settlement::Owed { .. } | Settlement::Settled));
            let left = peek(&after, "ann").remaining;
            assert!((DEBT - 1..=DEBT).contains(&left), "{algorithm:?} to {other:?}: {left}");
        }
    }
}

fn limiter_of_debt(algorithm: Algorithm) -> (Limiter, ManualClock) {
    let (limiter, clock) = limiter(algorithm);
    owe(&limiter, "ann", DEBT);
    (limiter, clock)
}

/// Returns the same algorithm with another quota.
fn with_quota(algorithm: Algorithm, quota: u64) -> Algorithm {
    match algorithm {
        _ if algorithm == FixedWindow::new(LIMIT, HOUR).into() => FixedWindow::new(quota, HOUR).into(),
        Algorithm::FixedWindow(_) => FixedWindow::new(quota, HOUR).from_first_request().into(),
        Algorithm::SlidingWindowLog(_) => SlidingWindowLog::new(quota, HOUR).into(),
        _ if algorithm == SlidingWindowCounter::new(LIMIT, HOUR).into() => {
            SlidingWindowCounter::new(quota, HOUR).into()
        }
        Algorithm::SlidingWindowCounter(_) => SlidingWindowCounter::new(quota, HOUR).segments(6).into(),
        _ if algorithm == TokenBucket::new(LIMIT, tollgate::Rate::new(LIMIT, HOUR)).into() => {
            TokenBucket::new(quota, tollgate::Rate::new(LIMIT, HOUR)).into()
        }
        _ => TokenBucket::new(quota, tollgate::Rate::new(10, MINUTE)).interval().into(),
    }
}

/// The share of a counter that is left shortly before its window ends is small enough for a request, but the counts
/// themselves have no room in the words of the key.
#[test]
fn a_key_that_is_still_in_the_table_for_debts_takes_from_all_limits_or_none() {
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let limiter = Limiter::builder()
        .limit(Limit::new("counter", SlidingWindowCounter::new(LIMIT, HOUR)).expect("a valid limit"))
        .limit(Limit::new("other", FixedWindow::new(1, HOUR)).expect("a valid limit"))
        .clock(clock.clone())
        .build()
        .expect("a valid limiter");
    let (counter, other) = (limiter.id("counter").expect("a limit"), limiter.id("other").expect("a limit"));
    let reservation = limiter.reserve_hits(&[Hit::new(counter, "ann").cost(0)], MAX_SPAN).expect("allowed");
    limiter.settle(reservation, DEBT);
    // 90 of the units count a moment before the end of the second window.
    let moment = HOUR.as_secs_f64() * 90.0 / DEBT as f64;
    clock.advance(2 * HOUR - Duration::from_secs_f64(moment));
    let both = [Hit::new(counter, "ann"), Hit::new(other, "ann")];
    let left = || limiter.decide_now(&[Hit::new(counter, "ann").cost(0)]).remaining();
    let before = left();
    assert!((5..20).contains(&before), "{before}");
    assert!(limiter.decide_now(&both).is_allowed());
    assert_eq!(left(), before - 1);
    assert!(!limiter.decide_now(&both).is_allowed(), "the other limit is spent");
    assert_eq!(left(), before - 1, "a denied request takes nothing");
    clock.advance(3 * HOUR);
    assert!(limiter.decide_now(&both).is_allowed());
    assert_eq!(left(), LIMIT - 1);
}

#[test]
fn debts_are_in_snapshots() {
    for algorithm in limits() {
        let (limiter, clock) = limiter_of_debt(algorithm);
        assert!(limiter.check("bob").is_allowed());
        clock.advance(SECOND);
        let mut bytes = Vec::new();
        limiter.snapshot(&mut bytes).expect("it is written");
        let builder = Limiter::builder().limit(limit(algorithm)).clock(clock.clone());
        let (restored, report) = builder.restore(&*bytes).expect("it is read");
        assert_eq!((report.keys, report.left_out), (2, 0), "{algorithm:?}");
        for key in ["ann", "bob"] {
            assert_eq!(peek(&restored, key), peek(&limiter, key), "{algorithm:?}");
        }
        let more = restored.with_limits(vec![limit(with_quota(algorithm, 2 * DEBT))]).expect("a valid limit");
        let shared = limiter.with_limits(vec![limit(with_quota(algorithm, 2 * DEBT))]).expect("a valid limit");
        assert_eq!(peek(&more, "ann"), peek(&shared, "ann"), "{algorithm:?}");
    }
}

/// Threads charge and check one key at the same time, and every unit that it owes is counted.
#[test]
fn threads_lose_no_unit() {
    const ROUNDS: u64 = 2_000;
    for algorithm in limits() {
        let (limiter, _) = limiter(algorithm);
        let admitted = AtomicU64::new(0);
        std::thread::scope(|threads| {
            for thread in 0..4_u64 {
                let (limiter, admitted) = (&limiter, &admitted);
                threads.spawn(move || {
                    for round in 0..ROUNDS {
                        owe(limiter, "ann", 1 + thread);
                        if limiter.check("ann").is_allowed() {
                            admitted.fetch_add(1, Ordering::Relaxed);
                        }
                        let _ = limiter.check(&(thread * ROUNDS + round).to_le_bytes());
                    }
                });
            }
        });
        let owed = ROUNDS * (1 + 2 + 3 + 4) + admitted.into_inner();
        let more = limiter.with_limits(vec![limit(with_quota(algorithm, 2 * DEBT))]).expect("a valid limit");
        assert_eq!(peek(&more, "ann").remaining, 2 * DEBT - owed, "{algorithm:?}");
        assert_eq!(peek(&limiter, "ann").remaining, 0, "{algorithm:?}");
    }
}

/// Keys that have no slot are looked up in the table for debts as well, so it is dropped when it is not needed.
#[test]
fn the_table_for_debts_is_dropped_when_they_are_paid() {
    let (limiter, clock) = limiter(FixedWindow::new(LIMIT, HOUR).from_first_request().into());
    assert!(limiter.check("bob").is_allowed());
    let before = limiter.memory_used();
    owe(&limiter, "ann", DEBT);
    let with_debts = limiter.memory_used();
    assert!(with_debts > before);
    clock.advance(2 * HOUR);
    assert!(limiter.check("cid").is_allowed());
    assert_eq!(limiter.memory_used(), before, "of {with_debts} bytes");
    owe(&limiter, "cid", DEBT);
    assert!(!limiter.check("cid").is_allowed());
}

#[test]
fn without_memory_the_remaining_quota_is_charged_and_the_rest_is_reported() {
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let opened = FixedWindow::new(LIMIT, HOUR).from_first_request();
    // Room for the first buckets of one table.
    let limiter = Limiter::builder().limit(limit(opened.into())).clock(clock).max_memory(10_000).build();
    let limiter = limiter.expect("a valid limiter");
    assert!(limiter.check("ann").is_allowed());
    assert_eq!(owe(&limiter, "ann", DEBT), Settlement::Short { missing: DEBT - (LIMIT - 1) });
    assert!(!limiter.check("ann").is_allowed());
    assert_eq!(owe(&limiter, "bob", 3), Settlement::Settled);
    assert_eq!(peek(&limiter, "bob").remaining, LIMIT - 3);
}

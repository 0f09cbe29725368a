//! Snapshots of a limiter, and limiters that are restored from them.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

use std::time::Duration;

use proptest::prelude::*;
use testkit::wait::SetOnDrop;
use tollgate::{
    Algorithm, Ban, DAY, FixedWindow, Hit, LeakyBucket, Limit, LimitSet, Limiter, MINUTE, ManualClock, Rate,
    RestoreError, SECOND, SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

const START: Timestamp = Timestamp::from_secs(1_700_000_000);

fn algorithms() -> Vec<Algorithm> {
    let rate = Rate::per_second(1);
    vec![
        TokenBucket::new(10, rate).into(),
        TokenBucket::new(10, rate).interval().into(),
        LeakyBucket::new(10, rate).into(),
        LeakyBucket::new(10, rate).queue(MINUTE).into(),
        FixedWindow::new(10, MINUTE).into(),
        FixedWindow::new(10, MINUTE).from_first_request().into(),
        SlidingWindowLog::new(10, MINUTE).into(),
        SlidingWindowLog::new(100, MINUTE).into(),
        SlidingWindowCounter::new(10, MINUTE).into(),
        SlidingWindowCounter::new(10, MINUTE).segments(6).into(),
    ]
}

fn limit(algorithm: impl Into<Algorithm>) -> Limit {
    Limit::new("limit", algorithm).unwrap()
}

fn limiter(limit: Limit, clock: &ManualClock) -> Limiter {
    Limiter::builder().limit(limit).clock(clock.clone()).build().unwrap()
}

fn snapshot(limiter: &Limiter) -> Vec<u8> {
    let mut snapshot = Vec::new();
    limiter.snapshot(&mut snapshot).unwrap();
    snapshot
}

/// Returns a limiter with this limit, restored from a snapshot.
fn restored(snapshot: &[u8], limit: Limit, clock: &ManualClock) -> Limiter {
    let (limiter, restored) = Limiter::builder().limit(limit).clock(clock.clone()).restore(snapshot).unwrap();
    assert_eq!(restored.left_out, 0);
    limiter
}

#[test]
fn keys_go_on_where_they_were() {
    for algorithm in algorithms() {
        let clock = ManualClock::at(START);
        let before = limiter(limit(algorithm), &clock);
        for number in 0..1000_u64 {
            let _ = before.check_n(number, number % 11);
            clock.advance(Duration::from_millis(7));
        }
        let after = restored(&snapshot(&before), limit(algorithm), &clock);
        for _ in 0..3 {
            for number in 0..1010_u64 {
                assert_eq!(after.peek(number), before.peek(number), "{algorithm:?}, key {number}");
                assert_eq!(after.check(number), before.check(number), "{algorithm:?}, key {number}");
            }
            clock.advance(Duration::from_millis(3_333));
        }
    }
}

#[test]
fn time_passes_between_a_snapshot_and_its_restoration() {
    let bucket = limit(TokenBucket::new(10, Rate::per_second(1)));
    let clock = ManualClock::at(START);
    let before = limiter(bucket.clone(), &clock);
    assert_eq!(before.check_n("ann", 10).remaining(), 0);
    let snapshot = snapshot(&before);
    clock.advance(4 * SECOND);
    assert_eq!(restored(&snapshot, bucket.clone(), &clock).peek("ann").remaining(), 4);
    clock.advance(DAY);
    assert_eq!(restored(&snapshot, bucket, &clock).peek("ann").remaining(), 10);
}

#[test]
fn a_clock_that_was_set_back_brings_nothing_back_and_locks_nobody_out() {
    for algorithm in algorithms() {
        let clock = ManualClock::at(START);
        let before = limiter(limit(algorithm), &clock);
        let all = before.peek("ann").remaining();
        assert!(before.check_n("ann", all).is_allowed());
        let snapshot = snapshot(&before);
        clock.set(START.saturating_sub(365 * DAY));
        let after = restored(&snapshot, limit(algorithm), &clock);
        assert!(!after.check_n("ann", all).is_allowed(), "{algorithm:?}");
        clock.advance(2 * MINUTE);
        assert_eq!(after.peek("ann").remaining(), all, "{algorithm:?}");
    }
}

#[test]
fn bans_and_variants_go_on_too() {
    let clock = ManualClock::at(START);
    let limits = || {
        LimitSet::new()
            .limit(limit(FixedWindow::new(10, MINUTE)))
            .variant("long", limit(FixedWindow::new(1000, 5 * MINUTE)))
            .ban("limit", Ban { after: 2, within: MINUTE, for_: DAY })
    };
    let before = Limiter::builder().limits(limits()).clock(clock.clone()).build().unwrap();
    let ids = |limiter: &Limiter| {
        let ids: Vec<_> = limiter.id("limit").into_iter().chain(limiter.variants()).collect();
        <[_; 3]>::try_from(ids).expect("three limits")
    };
    let [base, plan, ban] = ids(&before);
    assert!(before.decide_now(&[Hit::new(base, "ann").cost(7)]).is_allowed());
    assert!(before.decide_now(&[Hit::new(plan, "bob").cost(700)]).is_allowed());
    let _ = before.decide_now(&[Hit::new(ban, "eve").cost(2)]);
    let snapshot = snapshot(&before);
    clock.advance(2 * MINUTE);
    let (after, restored) = Limiter::builder().limits(limits()).clock(clock.clone()).restore(&*snapshot).unwrap();
    assert_eq!((restored.keys, restored.written_at), (3, START));
    for (index, key) in [(0, "ann"), (1, "bob"), (0, "bob"), (2, "eve")] {
        let [after, before] = [&after, &before].map(|limiter| {
            let looked = limiter.decide_now(&[Hit::new(ids(limiter)[index], key).cost(0)]);
            (looked.quota(), looked.remaining(), looked.reset_after(), looked.retry_after())
        });
        assert_eq!(after, before, "{index} {key}");
    }
    assert!(!after.decide_now(&[Hit::new(ids(&after)[2], "eve").cost(0)]).is_allowed());
}

#[test]
fn keys_of_former_limits_are_in_a_snapshot() {
    let clock = ManualClock::at(START);
    let before = limiter(limit(FixedWindow::new(10, MINUTE)), &clock);
    assert!(before.check_n("ann", 10).is_allowed());
    // The key is not used again, so it is still in the table of the former limit.
    let before = before.with_limits(vec![limit(SlidingWindowLog::new(12, 5 * MINUTE))]).unwrap();
    let after = restored(&snapshot(&before), limit(SlidingWindowLog::new(12, 5 * MINUTE)), &clock);
    assert_eq!(after.peek("ann").remaining(), 2);
}

proptest! {
    /// A restart with other limits is a reload: it never admits more.
    #[test]
    fn a_restart_with_other_limits_is_like_a_reload(
        from in 0..algorithms().len(), to in 0..algorithms().len(), spent in 1_u64..=10, pause in 0_u64..100_000_000,
    ) {
        let (from, to) = (algorithms()[from], algorithms()[to]);
        let clock = ManualClock::at(START);
        let before = limiter(limit(from), &clock);
        let _ = before.check_n("ann", spent);
        let snapshot = snapshot(&before);
        clock.advance(Duration::from_micros(pause));
        let reloaded = before.with_limits(vec![limit(to)]).unwrap();
        let restored = restored(&snapshot, limit(to), &clock);
        prop_assert_eq!(reloaded.peek("ann"), restored.peek("ann"));
        prop_assert_eq!(reloaded.check_n("ann", 3), restored.check_n("ann", 3));
    }

    #[test]
    fn damage_anywhere_is_noticed(at in any::<prop::sample::Index>(), bits in 1_u8..) {
        let clock = ManualClock::at(START);
        let before = limiter(limit(FixedWindow::new(10, MINUTE)), &clock);
        (0..20_u64).for_each(|key| assert!(before.check(key).is_allowed()));
        let mut damaged = snapshot(&before);
        let at = at.index(damaged.len());
        let truncated = &damaged.clone()[..at];
        damaged[at] ^= bits;
        for snapshot in [&*damaged, truncated] {
            let error = Limiter::builder().limit(limit(FixedWindow::new(10, MINUTE))).restore(snapshot).unwrap_err();
            prop_assert!(matches!(error, RestoreError::Unusable(_)), "{}", error);
        }
    }
}

#[test]
fn files_of_others_and_of_other_versions_are_named_so() {
    let error = |snapshot: &[u8]| {
        let builder = Limiter::builder().limit(limit(FixedWindow::new(10, MINUTE)));
        builder.restore(snapshot).unwrap_err().to_string()
    };
    let mut other_version = snapshot(&Limiter::new(limit(FixedWindow::new(10, MINUTE))));
    other_version[8] = 9;
    insta::assert_snapshot!(error(b"limits:\n  - name: per-user\n"), @"the input is not a Tollgate snapshot: use another file, or start without it");
    insta::assert_snapshot!(error(&other_version), @"the snapshot has format 9, and this version of Tollgate reads formats 1 to 2: delete it, or use the version that wrote it");
    insta::assert_snapshot!(error(b"tollgate"), @"the snapshot is truncated: restore a copy, or start without it");
    insta::assert_snapshot!(error(b""), @"the snapshot is truncated: restore a copy, or start without it");
}

#[test]
fn keys_that_find_no_room_are_counted() {
    let clock = ManualClock::at(START);
    let bucket = limit(TokenBucket::new(10, Rate::new(1, DAY)));
    let before = limiter(bucket.clone(), &clock);
    (0..50_000_u64).for_each(|key| assert!(before.check_n(key, 10).is_allowed()));
    let snapshot = snapshot(&before);
    let small = Limiter::builder().limit(bucket).clock(clock).max_memory(256 << 10);
    let (after, restored) = small.restore(&*snapshot).unwrap();
    assert_eq!(restored.keys + restored.left_out, 50_000);
    assert!(restored.left_out > 0 && restored.keys > 1_000, "{restored:?}");
    let denied = (0..50_000_u64).filter(|key| !after.check_n(*key, 10).is_allowed()).count() as u64;
    assert!(denied >= restored.keys);
}

#[test]
fn a_snapshot_of_too_many_limits_for_the_memory_is_unusable() {
    let clock = ManualClock::at(START);
    let named = |name: &str| Limit::new(name, FixedWindow::new(10, DAY)).unwrap();
    let before = Limiter::builder().limit(named("a")).limit(named("b")).clock(clock.clone()).build().unwrap();
    let snapshot = snapshot(&before);
    // The first buckets of one table, and of two.
    for (max_memory, is_enough) in [(8 << 10, false), (16 << 10, true)] {
        let small = || Limiter::builder().limit(named("c")).clock(clock.clone()).max_memory(max_memory);
        assert!(small().build().is_ok());
        match small().restore(&*snapshot) {
            Ok(_) => assert!(is_enough, "{max_memory}"),
            Err(error) => assert!(!is_enough && matches!(error, RestoreError::Unusable(_)), "{max_memory}: {error}"),
        }
    }
    let none = Limiter::builder().limit(named("c")).clock(clock).max_memory(1 << 10);
    assert!(matches!(none.restore(&*snapshot), Err(RestoreError::Limits(_))));
}

#[test]
fn snapshots_are_made_while_others_decide() {
    let limit = || limit(SlidingWindowCounter::new(1 << 30, DAY).segments(6));
    let limiter = Limiter::builder().limit(limit()).build().unwrap();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let _over = SetOnDrop(&is_over);
                for key in 0..20_000_u64 {
                    assert!(limiter.check(key).is_allowed());
                }
            });
        }
        while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
            let (after, _) = Limiter::builder().limit(limit()).restore(&*snapshot(&limiter)).unwrap();
            for key in 0..20_000_u64 {
                assert!(after.peek(key).remaining() >= (1 << 30) - 2);
            }
        }
    });
    let (after, restored) = Limiter::builder().limit(limit()).restore(&*snapshot(&limiter)).unwrap();
    assert_eq!(restored.keys, 20_000);
    assert!((0..20_000_u64).all(|key| after.peek(key).remaining() == (1 << 30) - 2));
}

//! Limits that change while they are in use: charges are kept, and the new numbers apply to them.

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use common::{Rig, START_US};
use testkit::wait::SetOnDrop;
use tollgate::{
    Algorithm, Ban, FixedWindow, HOUR, Hit, InvalidHits, LeakyBucket, Limit, LimitSet, Limiter, MINUTE, ManualClock,
    Rate, SECOND, Settlement, SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

/// Every algorithm and mode, by its quota. Rates are one unit per minute.
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
fn spent_units_count_under_a_lower_limit_and_under_the_old_one_again() {
    for way in every_way() {
        let rig = Rig::of(way(1000));
        assert_eq!(rig.limiter.check_n("ann", 40).remaining(), 960);
        let lower = changed(&rig.limiter, way(100));
        assert_eq!(lower.check_n("ann", 20).remaining(), 40, "{:?}", way(100));
        let again = changed(&lower, way(1000));
        assert_eq!(again.peek("ann").remaining(), 940, "{:?}", way(1000));
        // The first charge is still there, and all three count together.
        assert_eq!(rig.limiter.peek("ann").remaining(), 940, "{:?}", way(1000));
    }
}

#[test]
fn units_spent_beyond_a_lower_limit_leave_nothing_and_have_an_exact_wait() {
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
        let taken = rig.limiter.reserve("ann", 500, HOUR).unwrap();
        let lower = changed(&rig.limiter, way(10));
        lower.refund(taken);
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
fn debt_of_a_bucket_is_kept_in_units() {
    let rig = Rig::of(TokenBucket::new(10, Rate::per_second(1)));
    assert_eq!(rig.limiter.check_n("ann", 4).reset_after(), 4 * SECOND);
    let faster = changed(&rig.limiter, TokenBucket::new(100, Rate::per_second(10)));
    let peeked = faster.peek("ann");
    assert_eq!((peeked.remaining(), peeked.reset_after()), (96, Duration::from_millis(400)));
    let leaky = changed(&faster, LeakyBucket::new(10, Rate::per_second(1)));
    assert_eq!(leaky.peek("ann").remaining(), 6, "the algorithm makes no difference");
    let small = changed(&faster, TokenBucket::new(2, Rate::per_second(10)));
    assert_eq!((small.peek("ann").remaining(), small.peek("ann").reset_after()), (0, Duration::from_millis(400)));
    assert_eq!(small.check("ann").retry_after(), Some(Duration::from_millis(300)));
}

#[test]
fn a_tighter_rate_gives_nothing_back() {
    let rig = Rig::of(TokenBucket::new(1_000, Rate::per_second(1_000)));
    assert!(rig.limiter.check_n("ann", 1_000).is_allowed());
    let tighter = changed(&rig.limiter, TokenBucket::new(1_000, Rate::per_second(10)));
    rig.set(START_US + 1);
    assert!(!tighter.check("ann").is_allowed());
    assert_eq!(tighter.peek("ann").remaining(), 0);
}

#[test]
fn a_unit_that_is_partly_paid_is_not_owed_in_full() {
    // One unit is 1000/7 µs.
    let rig = Rig::of(TokenBucket::new(100, Rate::new(7, Duration::from_millis(1))));
    assert_eq!(rig.limiter.check("ann").reset_after(), Duration::from_micros(143));
    let slower = changed(&rig.limiter, TokenBucket::new(100, Rate::per_second(1_000)));
    rig.set(START_US + 100);
    // 300/7 µs of the 1000/7 µs of a unit are left, three tenths of a unit.
    assert_eq!(slower.peek("ann").reset_after(), Duration::from_micros(300));
}

#[test]
fn another_window_and_another_algorithm_keep_what_was_spent_but_another_name_does_not() {
    let pairs: [(Algorithm, Algorithm); 9] = [
        (FixedWindow::new(10, HOUR).into(), FixedWindow::new(10, MINUTE).into()),
        (FixedWindow::new(10, HOUR).into(), FixedWindow::new(10, HOUR).from_first_request().into()),
        (SlidingWindowLog::new(10, HOUR).into(), SlidingWindowLog::new(10, MINUTE).into()),
        (SlidingWindowLog::new(10, HOUR).into(), SlidingWindowLog::new(10, HOUR).count_denied().into()),
        (SlidingWindowLog::new(10, HOUR).into(), SlidingWindowCounter::new(10, HOUR).into()),
        (SlidingWindowCounter::new(10, HOUR).into(), SlidingWindowCounter::new(10, HOUR).segments(2).into()),
        (SlidingWindowCounter::new(10, HOUR).into(), TokenBucket::new(10, Rate::per_hour(10)).into()),
        (TokenBucket::new(10, Rate::per_hour(1)).into(), TokenBucket::new(10, Rate::per_hour(1)).interval().into()),
        (TokenBucket::new(10, Rate::per_hour(1)).into(), FixedWindow::new(10, HOUR).into()),
    ];
    for (before, after) in pairs {
        for (before, after) in [(before, after), (after, before)] {
            let rig = Rig::of(before);
            assert_eq!(rig.limiter.check_n("ann", 10).remaining(), 0);
            let new = changed(&rig.limiter, after);
            assert_eq!(new.peek("ann").remaining(), 0, "{before:?} to {after:?}");
            assert!(!new.check("ann").is_allowed(), "{before:?} to {after:?}");
            assert_eq!(rig.limiter.peek("ann").remaining(), 0, "{before:?} after {after:?}");
            let renamed = rig.limiter.with_limits(vec![Limit::new("other", before).unwrap()]).unwrap();
            assert_eq!(renamed.peek("ann").remaining(), 10, "{before:?}");
            // The limit is added again under its name before its window has passed.
            assert_eq!(changed(&renamed, after).peek("ann").remaining(), 0, "{before:?}");
        }
    }
}

#[test]
fn a_log_and_a_window_that_are_raised_past_their_words_keep_what_was_spent() {
    let ways: [fn(u64) -> Algorithm; 3] = [
        |quota| SlidingWindowLog::new(quota, HOUR).into(),
        |quota| FixedWindow::new(quota, HOUR).from_first_request().into(),
        |quota| SlidingWindowCounter::new(quota, HOUR).segments(6).into(),
    ];
    for way in ways {
        let rig = Rig::of(way(10));
        assert_eq!(rig.limiter.check_n("ann", 10).remaining(), 0);
        for quota in [20, 100, 5_000] {
            let raised = changed(&rig.limiter, way(quota));
            assert_eq!(raised.peek("ann").remaining(), quota - 10, "{:?}", way(quota));
            // A decision by the old limits counts too.
            assert!(!rig.limiter.check("ann").is_allowed(), "{:?}", way(10));
        }
    }
}

/// Pairs of configurations whose words differ, so that keys move between tables.
fn apart() -> [[Algorithm; 2]; 6] {
    let log = SlidingWindowLog::new(2_000, HOUR);
    [
        [TokenBucket::new(2_000, Rate::per_hour(1)).into(), TokenBucket::new(2_000, Rate::per_hour(7)).into()],
        [FixedWindow::new(2_000, HOUR).into(), FixedWindow::new(2_000, 2 * HOUR).into()],
        [FixedWindow::new(2_000, HOUR).into(), FixedWindow::new(2_000, HOUR).from_first_request().into()],
        [log.into(), SlidingWindowLog::new(2_000, 2 * HOUR).into()],
        [log.into(), SlidingWindowCounter::new(2_000, HOUR).segments(6).into()],
        [TokenBucket::new(2_000, Rate::per_hour(1)).into(), FixedWindow::new(2_000, HOUR).into()],
    ]
}

#[test]
fn keys_that_move_between_tables_under_load_lose_nothing() {
    for ways in apart() {
        let (admitted, left) = admitted_under_exchange(ways);
        assert_eq!((admitted as u64, left), (2_000, 0), "{ways:?}");
    }
}

#[test]
fn a_refund_and_a_reset_find_a_key_that_has_moved() {
    for [before, after] in apart() {
        let rig = Rig::of(before);
        let taken = rig.limiter.reserve("ann", 500, HOUR).unwrap();
        let new = changed(&rig.limiter, after);
        assert_eq!(new.check_n("ann", 1_000).remaining(), 500, "{after:?}");
        rig.limiter.refund(taken);
        assert_eq!(new.peek("ann").remaining(), 1_000, "{before:?} to {after:?}");
        assert_eq!(rig.limiter.peek("ann").remaining(), 1_000, "{before:?} to {after:?}");
        rig.limiter.reset("ann");
        assert_eq!(new.peek("ann").remaining(), 2_000, "{before:?} to {after:?}");
    }
}

#[test]
fn a_refund_gives_back_no_more_than_every_configuration_still_counts() {
    let slow = TokenBucket::new(1_000, Rate::per_hour(1));
    let fast = TokenBucket::new(1_000, Rate::per_second(1_000));
    let rig = Rig::of(fast);
    let first = rig.limiter.reserve("ann", 1_000, HOUR).unwrap();
    rig.set(START_US + 1_000_000);
    assert!(rig.limiter.check_n("ann", 1_000).is_allowed(), "the first charge has been paid off");
    let new = changed(&rig.limiter, slow);
    assert!(!new.check("ann").is_allowed());
    new.refund(first);
    assert_eq!(new.peek("ann").remaining(), 0);
}

#[test]
fn plans_of_other_windows_and_rates_count_together() {
    for [one, other] in apart() {
        let clock = ManualClock::at(Timestamp::from_micros(START_US));
        // A variant has the algorithm of its limit.
        let limits = LimitSet::new().limit(limit(one)).variant("plan", limit(other));
        let Ok(limiter) = Limiter::builder().limits(limits).clock(clock).build() else { continue };
        let plan = limiter.variant("limit", "plan").unwrap();
        let mut admitted = 0;
        for round in 0..30 {
            let id = if round % 2 == 0 { limiter.id("limit").unwrap() } else { plan };
            admitted += if limiter.decide_now(&[Hit::new(id, "ann").cost(100)]).is_allowed() { 100 } else { 0 };
        }
        assert_eq!(admitted, 2_000, "{one:?} and {other:?}");
    }
}

#[test]
fn a_long_chain_of_reloads_takes_no_more_memory_than_a_few_tables() {
    let rig = Rig::of(TokenBucket::new(1_000, Rate::per_hour(1)));
    for key in 0..100 {
        assert!(rig.limiter.check_n(&format!("key {key}"), 900).is_allowed());
    }
    let (mut limiter, table) = (rig.limiter, 8 << 10);
    for rate in 2..100 {
        limiter = changed(&limiter, TokenBucket::new(1_000, Rate::per_hour(rate)));
        assert!(limiter.memory_used() <= 10 * table, "{} at {rate}", limiter.memory_used());
    }
    for key in 0..100 {
        assert_eq!(limiter.peek(&format!("key {key}")).remaining(), 100);
    }
}

#[test]
fn limits_that_are_refused_change_nothing() {
    let rig = Rig::of(FixedWindow::new(10, HOUR));
    assert_eq!(rig.limiter.check_n("ann", 4).remaining(), 6);
    assert!(rig.limiter.with_limits(vec![]).is_err());
    let twice = rig.limiter.with_limits(vec![limit(FixedWindow::new(1, HOUR)), limit(FixedWindow::new(2, HOUR))]);
    assert!(twice.unwrap_err().to_string().contains("two limits are named `limit`"));
    let other = LimitSet::new().limit(limit(FixedWindow::new(1, HOUR))).variant("plan", limit(TokenBucket::default()));
    assert_eq!(rig.limiter.with_limits(other).unwrap_err().field(), "algorithm");
    let unknown = Limit::new("unknown", FixedWindow::new(1, HOUR)).unwrap();
    let unknown = LimitSet::new().limit(limit(FixedWindow::new(1, HOUR))).variant("plan", unknown);
    assert_eq!(rig.limiter.with_limits(unknown).unwrap_err().field(), "name");
    assert_eq!(rig.limiter.peek("ann").remaining(), 6);
}

#[test]
fn variants_and_bans_are_found_by_name() {
    let hourly = |quota| limit(FixedWindow::new(quota, HOUR));
    let ban = Ban { after: 2, within: HOUR, for_: HOUR };
    let limits = LimitSet::new().limit(hourly(1)).variant("silver", hourly(2)).variant("gold", hourly(3));
    let limits = limits.ban("limit", ban);
    let limiter = Limiter::builder().limits(limits).build().unwrap();
    let quota = |variant| limiter.variant("limit", variant).and_then(|id| limiter.limit(id)).map(Limit::quota);
    assert_eq!([quota("silver"), quota("gold"), quota("bronze")], [Some(2), Some(3), None]);
    assert_eq!(limiter.variant("other", "gold"), None);
    let ban = limiter.ban("limit").expect("the ban");
    assert_eq!((limiter.limit(ban).map(Limit::quota), limiter.ban("other")), (Some(2), None));
    let twice = LimitSet::new().limit(hourly(1)).variant("gold", hourly(2)).variant("gold", hourly(3));
    let error = Limiter::builder().limits(twice).build().unwrap_err();
    assert_eq!((error.field(), error.fix()), ("variant", "give each variant its own name"));
}

#[test]
fn bans_are_checked_and_are_no_variants() {
    let ban = Ban { after: 2, within: HOUR, for_: HOUR };
    let error = |limits: LimitSet| Limiter::builder().limits(limits).build().unwrap_err();
    let limits = || LimitSet::new().limit(limit(FixedWindow::new(1, HOUR)));
    assert_eq!(error(limits().ban("limit", Ban { after: 0, ..ban })).field(), "after");
    assert_eq!(error(limits().ban("limit", ban).ban("limit", ban)).problem(), "two bans are named `limit`");
    assert_eq!(error(limits().ban("", ban)).field(), "name");
    let refused = error(limits().variant("gold", limit(ban)));
    assert_eq!((refused.problem(), refused.fix()), ("a ban is not a variant of a limit", "add it with `ban`"));
}

#[test]
fn an_id_of_former_limits_is_an_error_and_never_another_limit() {
    let hourly = |name: &str, quota| Limit::new(name, FixedWindow::new(quota, HOUR)).unwrap();
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let builder = Limiter::builder().limit(hourly("a", 1)).limit(hourly("b", 100)).clock(clock);
    let before = builder.build().unwrap();
    let stale = ["a", "b"].map(|name| before.id(name).unwrap());
    let after = before.with_limits(vec![hourly("b", 100), hourly("a", 1)]).unwrap();
    for id in stale {
        let denied = after.decide_now(&[Hit::new(id, "ann")]);
        assert_eq!((denied.is_allowed(), denied.invalid_hits()), (false, Some(InvalidHits::UnknownLimit)));
        assert_eq!((denied.limit(), denied.retry_after()), (None, None));
        let mixed = [Hit::new(after.id("b").unwrap(), "ann"), Hit::new(id, "ann")];
        assert!(after.decide_now(&mixed).invalid_hits().is_some());
        let refused = after.reserve_hits(&[Hit::new(id, "ann")], HOUR).unwrap_err();
        assert!(refused.to_string().contains("read ids from the limiter that checks the hit"), "{refused}");
        assert!(after.limit(id).is_none());
        assert_eq!((after.occupancy(id).slots, after.live_keys(id)), (0, 0));
        // The former limiter goes on.
        assert!(before.decide_now(&[Hit::new(id, "bob")]).invalid_hits().is_none());
    }
    assert_eq!(after.peek("ann").remaining(), 100, "nothing was taken");
    // Other numbers under the same names leave ids valid.
    let raised = before.with_limits(vec![hourly("a", 2), hourly("b", 200)]).unwrap();
    assert_eq!(raised.decide_now(&[Hit::new(stale[1], "cid")]).remaining(), 199);
    // So does the same set of limits in another limiter, but not with another variant or ban.
    let limits = || LimitSet::new().limit(hourly("a", 1)).limit(hourly("b", 100));
    let other = |limits: LimitSet| Limiter::builder().limits(limits).build().unwrap();
    assert!(other(limits()).decide_now(&[Hit::new(stale[0], "ann")]).is_allowed());
    let more = limits().variant("gold", hourly("a", 3));
    assert!(other(more).decide_now(&[Hit::new(stale[0], "ann")]).invalid_hits().is_some());
    let more = limits().ban("a", Ban { after: 1, within: HOUR, for_: HOUR });
    assert!(other(more).decide_now(&[Hit::new(stale[0], "ann")]).invalid_hits().is_some());
    // A smaller limiter of the same limits has the same ids.
    for key in 0..100_000_u32 {
        let _ = before.decide_now(&[Hit::new(stale[0], &key.to_le_bytes())]);
    }
    let mut smaller = before.clone();
    while let Some(next) = smaller.compacted() {
        smaller = next;
    }
    assert!(smaller.decide_now(&[Hit::new(stale[1], "ann")]).is_allowed());
}

#[test]
fn hits_on_two_variants_of_a_limit_with_one_key_are_an_error() {
    let hourly = |quota| limit(FixedWindow::new(quota, HOUR));
    let limiter = Limiter::builder().limit(hourly(1)).variant("gold", hourly(100)).build().unwrap();
    let (base, gold) = (limiter.id("limit").unwrap(), limiter.variant("limit", "gold").unwrap());
    for hits in [[Hit::new(base, "ann"), Hit::new(gold, "ann")], [Hit::new(gold, "ann"), Hit::new(base, "ann")]] {
        let denied = limiter.decide_now(&hits);
        assert_eq!(denied.invalid_hits(), Some(InvalidHits::TwoVariants));
        let refused = limiter.reserve_hits(&hits, HOUR).unwrap_err();
        assert!(refused.to_string().contains("choose one variant for each key"), "{refused}");
    }
    assert_eq!(limiter.peek("ann").remaining(), 1, "nothing was taken");
    assert!(limiter.decide_now(&[Hit::new(base, "ann"), Hit::new(gold, "bob")]).is_allowed());
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
    let limiter = changed(&rig.limiter, FixedWindow::new(10, HOUR));
    assert!(limiter.memory_used() > used, "both are there");
    let common::Rig { limiter: old, clock } = rig;
    drop(old);
    assert_eq!(limiter.peek("key 0").remaining(), 0, "what was spent is still there");
    let limiter = changed(&limiter, FixedWindow::new(20, HOUR));
    clock.advance(3 * HOUR);
    assert!(limiter.check("somebody else").is_allowed());
    let small = limiter.memory_used();
    assert!(small < used / 4, "{small} of {used}");
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

/// Decides in several threads while another thread changes the limits back and forth. Returns how many requests were
/// admitted, and the remaining quota.
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
        let _done = SetOnDrop(&done);
        deciding.into_iter().for_each(|thread| thread.join().expect("no thread panics"));
    });
    let limiter = changed(&now(), ways[0]);
    (admitted.into_inner(), limiter.peek("key").remaining())
}

#[test]
fn limits_exchanged_under_load_admit_no_more_than_the_larger() {
    // Except a log that counts denials, of which there are many.
    for way in every_way().into_iter().filter(|way| !counts_denied(&way(1))) {
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
        let limits =
            LimitSet::new().limit(limit(way(10))).variant("large", limit(way(1_000))).variant("small", limit(way(5)));
        let limiter = Limiter::builder().limits(limits).clock(clock).build().unwrap();
        let [large, small] = ["large", "small"].map(|plan| limiter.variant("limit", plan).unwrap());
        assert_eq!(limiter.limits().len(), 1);
        assert_eq!(limiter.id("limit").and_then(|id| limiter.limit(id)).map(Limit::quota), Some(10));
        assert_eq!(limiter.check_n("ann", 3).remaining(), 7);
        assert_eq!(limiter.decide_now(&[Hit::new(large, "ann")]).remaining(), 996, "{:?}", way(1));
        assert_eq!(limiter.decide_now(&[Hit::new(small, "ann")]).remaining(), 0, "{:?}", way(1));
        assert_eq!(limiter.peek("ann").remaining(), 5, "{:?}", way(1));
        let twice = limiter.decide_now(&[Hit::new(large, "ann").cost(2), Hit::new(large, "ann").cost(2)]);
        assert!(twice.is_allowed(), "{:?}", way(1));
        assert_eq!(limiter.peek("ann").remaining(), 1, "{:?}", way(1));
        limiter.reset("ann");
        assert_eq!(limiter.decide_now(&[Hit::new(large, "ann").cost(0)]).remaining(), 1_000, "{:?}", way(1));
    }
}

#[test]
fn variants_keep_each_other_s_keys() {
    // A key that is at rest at the faster rate is not at rest at the slower rate, which must find it again.
    let way = |rate: u64| TokenBucket::new(1_000, Rate::per_minute(rate)).interval();
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let limits = LimitSet::new().limit(limit(way(1))).variant("fast", limit(way(1_000)));
    let limiter = Limiter::builder().limits(limits).clock(clock.clone()).max_memory(1 << 15).build().unwrap();
    let fast = limiter.variant("limit", "fast").unwrap();
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

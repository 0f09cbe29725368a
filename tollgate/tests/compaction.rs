//! Tables that shrink after a burst of keys: decisions do not change, and the memory is freed.

mod common;

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use common::{Answer, Dice, Rig, START_US};
use testkit::wait::SetOnDrop;
use tollgate::{
    Algorithm, FixedWindow, HOUR, Hit, LeakyBucket, Limit, LimitSet, Limiter, MINUTE, ManualClock, Rate,
    SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

/// Every algorithm in every variant, with the same quota, which is back after ten minutes at most.
fn algorithms(quota: u64) -> Vec<Algorithm> {
    let rate = Rate::per_minute(quota);
    vec![
        TokenBucket::new(quota, rate).into(),
        TokenBucket::new(quota, rate).interval().into(),
        LeakyBucket::new(quota, rate).into(),
        LeakyBucket::new(quota, rate).queue(MINUTE).into(),
        FixedWindow::new(quota, MINUTE).into(),
        FixedWindow::new(quota, MINUTE).from_first_request().into(),
        SlidingWindowLog::new(quota, MINUTE).into(),
        SlidingWindowLog::new(quota, MINUTE).count_denied().into(),
        SlidingWindowCounter::new(quota, MINUTE).into(),
        SlidingWindowCounter::new(quota, MINUTE).segments(6).into(),
    ]
}

fn limit(algorithm: impl Into<Algorithm>) -> Limit {
    Limit::new("limit", algorithm).expect("the numbers are within the bounds")
}

/// Takes one unit from each of many keys.
fn burst(limiter: &Limiter, keys: u32) {
    for key in 0..keys {
        assert!(limiter.check(&key.to_le_bytes()).is_allowed());
    }
}

/// Compacts until there is nothing left to replace or to free.
fn settled(mut limiter: Limiter) -> Limiter {
    while let Some(smaller) = limiter.compacted() {
        limiter = smaller;
    }
    limiter
}

#[test]
fn memory_of_a_burst_is_freed_once_its_keys_are_at_rest() {
    let Rig { limiter, clock } = Rig::of(FixedWindow::new(10, MINUTE));
    burst(&limiter, 50_000);
    assert!(limiter.compacted().is_none(), "its keys are not at rest");
    let used = limiter.memory_used();
    clock.advance(MINUTE);
    let without_burst = Rig::of(FixedWindow::new(10, MINUTE)).limiter;
    for key in 0..2_000_u32 {
        assert_eq!(limiter.check_n(&key.to_be_bytes(), 3).remaining(), 7);
        assert!(without_burst.check(&key.to_be_bytes()).is_allowed());
    }
    let limiter = settled(limiter);
    let needed = without_burst.memory_used();
    assert!(limiter.memory_used() <= 2 * needed, "{} bytes of {used}, for {needed}", limiter.memory_used());
    for key in 0..2_000_u32 {
        assert_eq!(limiter.check(&key.to_be_bytes()).remaining(), 6);
    }
    assert!(limiter.compacted().is_none());
}

#[test]
fn memory_of_long_logs_is_freed_too() {
    let Rig { limiter, clock } = Rig::of(SlidingWindowLog::new(1_000, MINUTE));
    for _ in 0..500 {
        clock.advance(std::time::Duration::from_millis(1));
        burst(&limiter, 100);
    }
    let used = limiter.memory_used();
    assert_eq!(limiter.check("ann").remaining(), 999);
    clock.advance(MINUTE / 2);
    for _ in 0..100 {
        clock.advance(std::time::Duration::from_millis(1));
        assert!(limiter.check("ann").is_allowed());
    }
    clock.advance(MINUTE * 3 / 4);
    let limiter = settled(limiter);
    assert!(limiter.memory_used() <= used / 4, "{} bytes of {used}", limiter.memory_used());
    assert_eq!(limiter.peek("ann").remaining(), 900);
}

#[test]
fn keys_are_judged_as_if_no_table_had_shrunk() {
    const QUOTA: u64 = 6;
    const KEYS: u64 = 30;
    for algorithm in algorithms(QUOTA) {
        let clock = ManualClock::at(Timestamp::from_micros(START_US));
        let mut limiter =
            Limiter::builder().limit(limit(algorithm)).clock(clock.clone()).build().expect("enough memory");
        let alone: Vec<Rig> = (0..KEYS).map(|_| Rig::of(algorithm)).collect();
        let (mut dice, mut now, mut shrunk, mut before) = (Dice(11), START_US, 0, limiter.clone());
        for step in 0..3_000_u64 {
            now += dice.below(5_000_000);
            clock.set(Timestamp::from_micros(now));
            if step % 500 == 0 {
                burst(&limiter, 1_500);
            }
            if dice.below(50) == 0
                && let Some(smaller) = limiter.compacted()
            {
                shrunk += 1;
                before = std::mem::replace(&mut limiter, smaller);
            }
            // The limiter that was replaced is used for a while, and then dropped.
            if dice.below(100) == 0 {
                before = limiter.clone();
            }
            let used = if dice.below(3) == 0 { &before } else { &limiter };
            let (key, cost) = (dice.below(KEYS), dice.below(QUOTA));
            let name = format!("key {key}");
            let answer = Answer::from(used.check_n(&name, cost));
            assert_eq!(answer, alone[key as usize].ask(now, cost), "{algorithm:?}: {name} for {cost} at step {step}");
        }
        assert!(shrunk >= 3, "{algorithm:?}: {shrunk}");
        drop(before);
        assert!(settled(limiter).memory_used() <= 512 << 10, "{algorithm:?}");
    }
}

/// Spends from a few keys in many threads while another makes the tables grow and shrink.
fn admitted_while_shrinking(limits: LimitSet, check: impl Fn(&Limiter, &str) -> bool + Sync) -> Vec<usize> {
    const KEYS: usize = 20;
    const ROUNDS: u32 = 6;
    const MAX_ROUNDS: u32 = 10_000;
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let current = Mutex::new(Limiter::builder().limits(limits).clock(clock).build().expect("enough memory"));
    let lock = || current.lock().unwrap_or_else(PoisonError::into_inner);
    let (admitted, is_over) = ([const { AtomicUsize::new(0) }; KEYS], AtomicBool::new(false));
    let (check, admitted_of, lock, is_over) = (&check, &admitted, &lock, &is_over);
    thread::scope(|scope| {
        let _over = SetOnDrop(is_over);
        for thread in 0..3 {
            scope.spawn(move || {
                let mut dice = Dice(thread);
                while !is_over.load(Ordering::Relaxed) {
                    let (limiter, key) = (lock().clone(), dice.below(KEYS as u64) as usize);
                    for _ in 0..1 + dice.below(20) {
                        if check(&limiter, &format!("key {key}")) {
                            admitted_of[key].fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        // On a busy machine, a thread may use a table for several rounds. Meanwhile nothing shrinks.
        let (mut rounds, mut shrunk) = (0, 0);
        while rounds < ROUNDS || shrunk < 2 {
            rounds += 1;
            assert!(rounds < MAX_ROUNDS, "{shrunk}");
            let limiter = lock().clone();
            for key in 0..1_500_u32 {
                assert!(check(&limiter, &key.to_string()));
            }
            // Keys that are reset are at rest. The clock does not move for the others.
            (0..1_500_u32).for_each(|key| limiter.reset(&key.to_string()));
            drop(limiter);
            let smaller = lock().compacted();
            if let Some(smaller) = smaller {
                shrunk += 1;
                *lock() = smaller;
            }
        }
    });
    // Takes the rest of the quota that the threads have left.
    let limiter = settled(current.into_inner().unwrap_or_else(PoisonError::into_inner));
    let rest = |key: usize| (0..400).filter(|_| check(&limiter, &format!("key {key}"))).count();
    admitted.into_iter().enumerate().map(|(key, admitted)| admitted.into_inner() + rest(key)).collect()
}

#[test]
fn threads_admit_exactly_the_limit_while_tables_shrink() {
    for algorithm in algorithms(300) {
        let limits = LimitSet::new().limit(limit(algorithm));
        let admitted = admitted_while_shrinking(limits, |limiter, key| limiter.check(key).is_allowed());
        assert!(admitted.iter().all(|admitted| *admitted == 300), "{algorithm:?}: {admitted:?}");
    }
}

#[test]
fn several_limits_admit_together_while_tables_shrink() {
    let other = Limit::new("other", TokenBucket::new(200, Rate::per_hour(1))).expect("valid");
    let limits = LimitSet::new().limit(limit(FixedWindow::new(300, HOUR))).limit(other);
    let admitted = admitted_while_shrinking(limits, |limiter, key| limiter.check(key).is_allowed());
    assert!(admitted.iter().all(|admitted| *admitted == 200), "{admitted:?}");
}

#[test]
fn variants_in_several_tables_shrink_together() {
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let limits =
        LimitSet::new().limit(limit(FixedWindow::new(10, MINUTE))).variant("hourly", limit(FixedWindow::new(50, HOUR)));
    let limiter = Limiter::builder().limits(limits).clock(clock.clone()).build().expect("enough memory");
    let hourly = limiter.variant("limit", "hourly").expect("the variant");
    for key in 0..20_000_u32 {
        let key = key.to_le_bytes();
        let is_hourly = key[0] % 2 == 0;
        let decision = if is_hourly { limiter.decide_now(&[Hit::new(hourly, &key)]) } else { limiter.check(&key) };
        assert!(decision.is_allowed());
    }
    clock.advance(2 * HOUR);
    assert_eq!(limiter.check_n("ann", 4).remaining(), 6);
    assert_eq!(limiter.decide_now(&[Hit::new(hourly, "bob").cost(4)]).remaining(), 46);
    let limiter = settled(limiter);
    assert!(limiter.memory_used() <= 32 << 10, "{}", limiter.memory_used());
    assert_eq!(limiter.check("bob").remaining(), 5);
    assert_eq!(limiter.decide_now(&[Hit::new(hourly, "ann")]).remaining(), 45);
}

/// A denial by one variant leaves the charges of another where they are, in the larger table too.
#[test]
fn a_denial_by_another_variant_changes_nothing_in_a_replaced_table() {
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let limits =
        LimitSet::new().limit(limit(FixedWindow::new(10, MINUTE))).variant("hourly", limit(FixedWindow::new(50, HOUR)));
    let limiter = Limiter::builder().limits(limits).clock(clock.clone()).build().expect("enough memory");
    let hourly = limiter.variant("limit", "hourly").expect("the variant");
    for key in 0..20_000_u32 {
        assert!(limiter.decide_now(&[Hit::new(hourly, &key.to_le_bytes())]).is_allowed());
    }
    clock.advance(2 * HOUR);
    assert_eq!(limiter.decide_now(&[Hit::new(hourly, "ann").cost(20)]).remaining(), 30);
    let smaller = limiter.compacted().expect("the table is mostly empty");
    assert!(!smaller.check("ann").is_allowed());
    clock.advance(2 * MINUTE);
    assert_eq!(smaller.decide_now(&[Hit::new(hourly, "ann").cost(0)]).remaining(), 30);
    // The other way round: the old store finds the key in the smaller table.
    assert_eq!(smaller.decide_now(&[Hit::new(hourly, "ann").cost(5)]).remaining(), 25);
    assert!(!limiter.check("ann").is_allowed());
    clock.advance(2 * MINUTE);
    assert_eq!(limiter.decide_now(&[Hit::new(hourly, "ann").cost(0)]).remaining(), 25);
}

#[test]
fn the_larger_table_stays_while_it_is_used_and_counts_with_the_other() {
    let Rig { limiter, clock } = Rig::of(FixedWindow::new(10, MINUTE));
    burst(&limiter, 50_000);
    clock.advance(MINUTE);
    assert_eq!(limiter.check_n("ann", 2).remaining(), 8);
    let reservation = limiter.reserve("bob", 5, MINUTE).expect("there is enough");
    let used = limiter.memory_used();
    let smaller = limiter.compacted().expect("the table is mostly empty");
    let id = smaller.id("limit").expect("it has the limit");
    assert_eq!((smaller.live_keys(id), limiter.live_keys(id)), (2, 2));
    assert!(limiter.compacted().is_none() && smaller.compacted().is_none(), "one after the other");
    assert_eq!(smaller.check("ann").remaining(), 7);
    assert_eq!(limiter.check("ann").remaining(), 6);
    assert!(smaller.memory_used() > used);
    drop(limiter);
    assert!(smaller.compacted().is_none() && smaller.memory_used() > used, "the reservation has the old limiter");
    // A change in the meantime uses the smaller table.
    let smaller = smaller.with_limits(vec![limit(FixedWindow::new(20, MINUTE))]).expect("a valid limit");
    smaller.refund(reservation);
    assert!(smaller.compacted().is_none());
    assert_eq!(smaller.memory_used(), 8 << 10);
    assert_eq!([smaller.peek("ann").remaining(), smaller.peek("bob").remaining()], [16, 20]);
}

#[test]
fn a_table_is_not_replaced_if_the_budget_has_no_room_for_another() {
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let limits = [10, 20].map(|minutes| {
        let name = format!("per {minutes} minutes");
        Limit::new(name, FixedWindow::new(10, minutes * MINUTE)).expect("valid")
    });
    let limiter = Limiter::builder().limits(LimitSet::from(limits.to_vec())).max_memory(64 << 10).clock(clock.clone());
    let limiter = limiter.build().expect("enough memory");
    let hit = |limit: usize, key: u32| {
        let id = limiter.id(limits[limit].name()).expect("there is such a limit");
        limiter.decide_now(&[Hit::new(id, &key.to_le_bytes())]).is_allowed()
    };
    // Most keys find no slot.
    let admitted = (0..4_000).filter(|key| hit(0, *key) && hit(1, *key)).count();
    assert!(admitted > 448, "{admitted}");
    assert_eq!(limiter.memory_used(), 64 << 10);
    clock.advance(25 * MINUTE);
    assert!(limiter.compacted().is_none());
}

#[test]
fn overflow_is_counted_on_in_the_smaller_table() {
    let clock = ManualClock::at(Timestamp::from_micros(START_US));
    let limits = vec![limit(FixedWindow::new(10, MINUTE))];
    let limiter = Limiter::builder().limits(limits).max_memory(80 << 10).clock(clock.clone()).build();
    let limiter = limiter.expect("enough memory");
    for key in 0..10_000_u32 {
        let _ = limiter.check(&key.to_le_bytes());
    }
    let id = limiter.id("limit").expect("there is such a limit");
    let before = limiter.overflow(id);
    assert!(before.evicted > 0);
    clock.advance(3 * MINUTE);
    let limiter = settled(limiter);
    assert_eq!(limiter.memory_used(), 8 << 10);
    assert_eq!(limiter.overflow(id), before);
}

#[test]
fn a_snapshot_has_the_keys_of_both_tables() {
    let Rig { limiter, clock } = Rig::of(FixedWindow::new(10, MINUTE));
    burst(&limiter, 50_000);
    clock.advance(MINUTE);
    assert!(limiter.check_n("ann", 2).is_allowed() && limiter.check_n("bob", 3).is_allowed());
    let smaller = limiter.compacted().expect("the table is mostly empty");
    assert_eq!(smaller.check("ann").remaining(), 7);
    let mut snapshot = Vec::new();
    smaller.snapshot(&mut snapshot).expect("a vector takes everything");
    let restored = Limiter::builder().limit(limit(FixedWindow::new(10, MINUTE))).clock(clock).restore(&snapshot[..]);
    let (restored, _) = restored.expect("it was just written");
    assert_eq!([restored.peek("ann").remaining(), restored.peek("bob").remaining()], [7, 7]);
}

/// Takes a snapshot, and moves the keys to a smaller table once it has begun.
struct MovesKeys<'a> {
    limiter: &'a Limiter,
    smaller: Option<Limiter>,
    written: Vec<u8>,
}

impl Write for MovesKeys<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let smaller = self.smaller.get_or_insert_with(|| {
            let smaller = self.limiter.compacted().expect("the table is mostly empty");
            for key in 0..200_u32 {
                assert_eq!(smaller.check(&key.to_le_bytes()).remaining(), 7);
            }
            smaller
        });
        assert!(smaller.limits().len() == 1);
        self.written.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_snapshot_has_the_keys_that_move_while_it_is_made() {
    let Rig { limiter, clock } = Rig::of(FixedWindow::new(10, MINUTE));
    burst(&limiter, 50_000);
    clock.advance(MINUTE);
    for key in 0..200_u32 {
        assert_eq!(limiter.check_n(&key.to_le_bytes(), 2).remaining(), 8);
    }
    let mut writer = MovesKeys { limiter: &limiter, smaller: None, written: Vec::new() };
    limiter.snapshot(&mut writer).expect("a vector takes everything");
    let restored =
        Limiter::builder().limit(limit(FixedWindow::new(10, MINUTE))).clock(clock).restore(&writer.written[..]);
    let (restored, _) = restored.expect("it was just written");
    for key in 0..200_u32 {
        let left = restored.peek(&key.to_le_bytes()).remaining();
        // Charges made during the snapshot may be missing from it, and nothing else.
        assert!(left == 7 || left == 8, "{key}: {left} left");
    }
}

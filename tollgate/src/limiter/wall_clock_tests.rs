//! Limits while the wall clock is stepped and the machine's other clocks are not.

use std::time::Duration;

use proptest::prelude::*;

use crate::clock::fake::FakeMachine;
use crate::{
    Algorithm, Decision, FixedWindow, HOUR, LeakyBucket, Limit, Limiter, MINUTE, Rate, SlidingWindowCounter,
    SlidingWindowLog, Timestamp, TokenBucket,
};

/// The start of the wall clock of a [`FakeMachine`]: 20 s into a minute.
const START_SECS: u64 = 1_700_000_000;
/// Long enough that the clock has compared, and short enough to affect no count.
const SETTLED: Duration = Duration::from_secs(1);

fn limiter(algorithm: impl Into<Algorithm>) -> (FakeMachine, Limiter) {
    let machine = FakeMachine::new();
    let limit = Limit::new("test", algorithm).unwrap();
    let limiter = Limiter::builder().limit(limit).time_source(machine.time_source()).build().unwrap();
    (machine, limiter)
}

/// Steps the wall clock, and lets a second pass in which the limiter is used.
fn step(machine: &FakeMachine, limiter: &Limiter, seconds: f64) {
    machine.step_wall(seconds);
    machine.run(SETTLED);
    let _ = limiter.peek("");
}

/// Algorithms that do not depend on the wall clock.
fn unaligned() -> [Algorithm; 5] {
    [
        TokenBucket::new(10, Rate::per_hour(10)).into(),
        LeakyBucket::new(10, Rate::per_hour(10)).into(),
        FixedWindow::new(10, HOUR).from_first_request().into(),
        SlidingWindowLog::new(10, HOUR).into(),
        SlidingWindowCounter::new(10, HOUR).into(),
    ]
}

#[test]
fn wall_clock_that_is_stepped_an_hour_refills_nothing() {
    for algorithm in unaligned() {
        for seconds in [3600.0, -3600.0, 100_000.0] {
            let (machine, limiter) = limiter(algorithm);
            assert!(limiter.check_n("ann", 10).is_allowed());
            step(&machine, &limiter, seconds);
            let decision = limiter.check("ann");
            assert!(!decision.is_allowed(), "{algorithm:?} after {seconds} s");
            assert!(decision.retry_after().unwrap() <= 2 * HOUR);
        }
    }
}

#[test]
fn aligned_window_ends_when_the_wall_clock_reaches_its_end() {
    let (machine, limiter) = limiter(FixedWindow::new(10, MINUTE));
    assert!(limiter.check_n("ann", 10).is_allowed());
    assert_eq!(limiter.check("ann").retry_after(), Some(Duration::from_secs(40)));
    step(&machine, &limiter, 24.0);
    assert_eq!(limiter.check("ann").retry_after(), Some(Duration::from_secs(15)));
    machine.run(Duration::from_secs(15));
    assert_eq!(limiter.peek("ann").remaining(), 10);
}

#[test]
fn aligned_window_that_the_wall_clock_jumps_over_has_ended() {
    let (machine, limiter) = limiter(FixedWindow::new(10, MINUTE));
    assert!(limiter.check_n("ann", 10).is_allowed());
    step(&machine, &limiter, 3600.0);
    assert_eq!(limiter.check_n("ann", 10).remaining(), 0);
    // After the step back, spent units stay spent, and no key waits for more than two windows.
    step(&machine, &limiter, -3600.0);
    let decision = limiter.check("ann");
    assert!(!decision.is_allowed());
    assert!(decision.retry_after().unwrap() <= 2 * MINUTE);
}

#[test]
fn steps_below_a_second_leave_aligned_windows_alone() {
    for seconds in [0.5, -0.5] {
        let (machine, limiter) = limiter(FixedWindow::new(10, MINUTE));
        assert!(limiter.check_n("ann", 10).is_allowed());
        step(&machine, &limiter, seconds);
        assert_eq!(limiter.check("ann").retry_after(), Some(Duration::from_secs(39)));
    }
}

#[test]
fn portions_come_at_the_full_minutes_of_the_wall_clock_and_none_is_made_up() {
    let (machine, limiter) = limiter(TokenBucket::new(100, Rate::per_minute(10)).interval());
    assert!(limiter.check_n("ann", 100).is_allowed());
    step(&machine, &limiter, 3600.0);
    let decision = limiter.check("ann");
    assert_eq!((decision.is_allowed(), decision.retry_after()), (false, Some(Duration::from_secs(39))));
    step(&machine, &limiter, 3624.0);
    assert_eq!(limiter.check("ann").retry_after(), Some(Duration::from_secs(14)));
    machine.run(Duration::from_secs(14));
    assert_eq!(limiter.peek("ann").remaining(), 10);
}

#[test]
fn decision_tells_the_time_of_the_wall_clock() {
    let (machine, limiter) = limiter(TokenBucket::new(10, Rate::per_second(1)));
    assert_eq!(limiter.check("ann").at(), Timestamp::from_secs(START_SECS));
    step(&machine, &limiter, -7200.0);
    let decisions = [limiter.check("ann"), limiter.peek("ann"), limiter.decide_now(&[])];
    let reserved = limiter.reserve("ann", 1, MINUTE).unwrap();
    for at in decisions.iter().chain([reserved.decision()]).map(Decision::at) {
        assert_eq!(at, Timestamp::from_secs(START_SECS + 1 - 7200));
    }
    assert_eq!(reserved.expires_at(), Timestamp::from_secs(START_SECS + 61 - 7200));
}

#[test]
fn end_of_a_window_follows_the_wall_clock() {
    let (machine, limiter) = limiter(FixedWindow::new(10, MINUTE));
    let reset = |decision: &Decision| decision.at().saturating_add(decision.reset_after()).as_micros() / 1_000_000;
    assert_eq!(reset(&limiter.check("ann")), START_SECS + 40);
    for (seconds, next_minute) in [(3600.0, START_SECS + 3600 + 40), (-7200.0, START_SECS - 3600 + 40)] {
        step(&machine, &limiter, seconds);
        assert_eq!(reset(&limiter.check("bob")), next_minute);
        limiter.reset("bob");
    }
}

#[test]
fn refund_across_a_step_gives_nothing_back() {
    let (machine, limiter) = limiter(FixedWindow::new(10, MINUTE));
    let before = limiter.reserve("ann", 10, 2 * HOUR).unwrap();
    step(&machine, &limiter, 3600.0);
    assert!(limiter.check_n("ann", 10).is_allowed());
    limiter.refund(before);
    assert_eq!(limiter.peek("ann").remaining(), 0);
}

proptest! {
    #[test]
    fn stepped_wall_clock_changes_no_decision_of_what_is_not_aligned(
        which in 0..5_usize,
        moves in prop::collection::vec((-7200.0..7200.0_f64, 0..900_u64, 1..5_u64), 1..60),
    ) {
        let ((stepped, one), (steady, other)) = (limiter(unaligned()[which]), limiter(unaligned()[which]));
        for (seconds, secs, cost) in moves {
            stepped.step_wall(seconds);
            let span = Duration::from_secs(secs);
            stepped.run(span);
            steady.run(span);
            let (one, other) = (one.check_n("ann", cost), other.check_n("ann", cost));
            prop_assert_eq!(one.verdict, other.verdict);
        }
    }

    #[test]
    fn each_step_admits_one_more_window_or_portion_at_most(
        is_window in any::<bool>(),
        moves in prop::collection::vec((-7200.0..7200.0_f64, 0..90_u64, 1..10_u64), 1..60),
    ) {
        let algorithm: Algorithm = match is_window {
            true => FixedWindow::new(10, MINUTE).into(),
            false => TokenBucket::new(10, Rate::per_minute(10)).interval().into(),
        };
        let (machine, limiter) = limiter(algorithm);
        let (mut admitted, mut forward, mut passed) = (0, 0, 0);
        for (seconds, secs, cost) in moves {
            machine.step_wall(seconds);
            machine.run(Duration::from_secs(secs));
            forward += u64::from(seconds > 0.0 || !is_window);
            passed += secs;
            let decision = limiter.check_n("ann", cost);
            admitted += if decision.is_allowed() { cost } else { 0 };
            if let Some(wait) = decision.retry_after() {
                prop_assert!(wait <= 2 * MINUTE, "{:?}", wait);
            }
            prop_assert!(admitted <= 10 * (passed / 60 + 2 + forward), "{} in {} s, {} steps", admitted, passed, forward);
        }
    }
}

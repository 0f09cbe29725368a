//! Reservations that another gate takes over with the counts: each is settled once, and gives back no more than it took.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use tollgate::{
    Algorithm, DenialReason, FixedWindow, HOUR, LeakyBucket, Limit, Limiter, MINUTE, ManualClock, Rate, SECOND,
    Settlement, SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};
use tollgate_rules::{Gate, KeyPart, ReservationError, Rule, RuleSet};

const KEY: &[&[u8]] = &[b"ann"];
const START: Timestamp = Timestamp::from_secs(1_700_000_000);

fn algorithms() -> [Algorithm; 7] {
    let rate = Rate::per_second(1);
    [
        TokenBucket::new(100, rate).into(),
        TokenBucket::new(100, rate).interval().into(),
        LeakyBucket::new(100, rate).into(),
        FixedWindow::new(100, HOUR).into(),
        FixedWindow::new(100, HOUR).from_first_request().into(),
        SlidingWindowLog::new(100, HOUR).into(),
        SlidingWindowCounter::new(100, HOUR).segments(6).into(),
    ]
}

fn named(name: &str, algorithm: impl Into<Algorithm>) -> RuleSet {
    super::rule_set([Rule::new(Limit::new(name, algorithm).unwrap()).key(KeyPart::header("x-user-id"))])
}

fn rules(algorithm: impl Into<Algorithm>) -> RuleSet {
    named("tokens", algorithm)
}

fn gate(algorithm: impl Into<Algorithm>, clock: &ManualClock) -> Gate {
    Gate::with_limiter(rules(algorithm), Limiter::builder().clock(clock.clone())).unwrap()
}

/// Returns the gate of a process that continues after another one.
fn restored(snapshot: &[u8], rules: RuleSet, clock: &ManualClock) -> Gate {
    Gate::restore(rules, Limiter::builder().clock(clock.clone()), snapshot).unwrap().0
}

fn last_snapshot(gate: &Gate) -> Vec<u8> {
    let mut snapshot = Vec::new();
    assert!(gate.last_snapshot(&mut snapshot).unwrap().is_some());
    snapshot
}

fn offered(gate: &Gate) -> Vec<u8> {
    let mut snapshot = Vec::new();
    assert!(gate.offer_snapshot(&mut snapshot).unwrap().is_some());
    snapshot
}

async fn reserve(gate: &Gate, cost: u64) -> String {
    let reserving = gate.reserve_by_name("tokens", KEY, cost, MINUTE).expect("the rule exists");
    reserving.await.expect("there is room").token.expect("it fits")
}

async fn left(gate: &Gate) -> u64 {
    super::remaining(&gate.check_by_name("tokens", KEY, 0).expect("the rule exists").outcome().await)
}

#[tokio::test]
async fn the_next_process_settles_a_reservation_once_as_this_one_would() {
    for algorithm in algorithms() {
        for actual in [0, 30, 80, 500] {
            let clock = ManualClock::at(START);
            let [before, other] = [(); 2].map(|()| gate(algorithm, &clock));
            let tokens = [reserve(&before, 80).await, reserve(&other, 80).await];
            clock.advance(7 * SECOND);
            let after = restored(&last_snapshot(&before), rules(algorithm), &clock);
            assert_eq!(before.settle_token(&tokens[0], 0).await, Err(ReservationError::HandedOver));
            clock.advance(7 * SECOND);
            let context = format!("{algorithm:?}, {actual}");
            let settled = after.settle_token(&tokens[0], actual).await;
            assert_eq!(settled, other.settle_token(&tokens[1], actual).await, "{context}");
            assert!(matches!(settled, Ok(Settlement::Settled | Settlement::Owed { .. })), "{context}");
            for again in [0, actual, 99] {
                assert_eq!(after.settle_token(&tokens[0], again).await, Ok(Settlement::AlreadySettled), "{context}");
            }
            assert_eq!(left(&after).await, left(&other).await, "{context}");
        }
    }
}

#[tokio::test]
async fn reservations_go_through_several_processes_until_they_expire() {
    let clock = ManualClock::at(START);
    let algorithm = FixedWindow::new(100, HOUR);
    let mut gate = gate(algorithm, &clock);
    let mut tokens = Vec::new();
    for _ in 0..4 {
        tokens.push(reserve(&gate, 10).await);
        clock.advance(14 * SECOND);
        gate = restored(&last_snapshot(&gate), rules(algorithm), &clock);
    }
    assert_eq!(left(&gate).await, 60);
    clock.advance(4 * SECOND);
    let settled = |token| gate.settle_token(token, 0);
    assert_eq!(settled(&tokens[0]).await, Ok(Settlement::Expired), "it was made a minute ago");
    for token in &tokens[1..] {
        assert_eq!(settled(token).await, Ok(Settlement::Settled));
        assert_eq!(settled(token).await, Ok(Settlement::AlreadySettled));
    }
    assert_eq!(left(&gate).await, 90);
}

#[tokio::test]
async fn an_ordinary_snapshot_leaves_reservations_spent() {
    let clock = ManualClock::at(START);
    let algorithm = FixedWindow::new(100, HOUR);
    let before = gate(algorithm, &clock);
    let token = reserve(&before, 80).await;
    let mut snapshot = Vec::new();
    before.snapshot(&mut snapshot).unwrap();
    let after = restored(&snapshot, rules(algorithm), &clock);
    assert_eq!(after.settle_token(&token, 0).await, Err(ReservationError::Foreign));
    assert_eq!(left(&after).await, 20);
    assert_eq!(before.settle_token(&token, 0).await, Ok(Settlement::Settled), "it stays here");
}

#[tokio::test]
async fn a_settlement_waits_until_the_process_before_has_released_its_reservations() {
    let clock = ManualClock::at(START);
    let algorithm = FixedWindow::new(100, HOUR);
    let before = gate(algorithm, &clock);
    let [moved, settled] = [reserve(&before, 10).await, reserve(&before, 20).await];
    let after = restored(&offered(&before), rules(algorithm), &clock);
    let late = reserve(&before, 40).await;
    // It stays with the process that made it until it is released.
    assert_eq!(before.settle_token(&settled, 0).await, Ok(Settlement::Settled));
    let waiting = [&moved, &settled].map(|token| {
        let (after, token) = (after.clone(), token.clone());
        tokio::spawn(async move { after.settle_token(&token, 4).await })
    });
    tokio::task::yield_now().await;
    assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
    after.accept_reservations(&before.release_reservations());
    let [moved_result, settled_result] = waiting;
    assert_eq!(moved_result.await.unwrap(), Ok(Settlement::Settled));
    assert_eq!(settled_result.await.unwrap(), Err(ReservationError::Foreign));
    assert_eq!(left(&after).await, 76, "4 of the first, and all of the second");
    assert_eq!(after.settle_token(&late, 0).await, Err(ReservationError::Foreign));
    assert_eq!(before.settle_token(&moved, 0).await, Err(ReservationError::HandedOver));
    assert_eq!(before.settle_token(&late, 0).await, Ok(Settlement::Settled));
    assert_eq!(left(&before).await, 90, "the first stays spent here");
}

#[tokio::test]
async fn reservations_that_were_never_released_stay_spent() {
    let clock = ManualClock::at(START);
    let algorithm = FixedWindow::new(100, HOUR);
    let before = gate(algorithm, &clock);
    let token = reserve(&before, 10).await;
    let after = restored(&offered(&before), rules(algorithm), &clock);
    drop(before);
    after.accept_reservations(&[]);
    assert_eq!(after.settle_token(&token, 0).await, Err(ReservationError::Foreign));
    assert_eq!(left(&after).await, 90);
}

#[tokio::test]
async fn a_new_process_that_fails_changes_nothing() {
    let clock = ManualClock::at(START);
    let algorithm = FixedWindow::new(100, HOUR);
    let before = gate(algorithm, &clock);
    let tokens = [reserve(&before, 10).await, reserve(&before, 20).await];
    drop(restored(&offered(&before), rules(algorithm), &clock));
    assert_eq!(before.settle_token(&tokens[0], 0).await, Ok(Settlement::Settled));
    let after = restored(&offered(&before), rules(algorithm), &clock);
    after.accept_reservations(&before.release_reservations());
    assert_eq!(after.settle_token(&tokens[1], 0).await, Ok(Settlement::Settled));
    assert_eq!(left(&after).await, 100);
}

#[tokio::test]
async fn a_reset_in_either_process_ends_what_a_reservation_gives_back() {
    for algorithm in algorithms() {
        let clock = ManualClock::at(START);
        let before = gate(algorithm, &clock);
        let reset = async |gate: &Gate| _ = gate.reset_by_name("tokens", KEY).expect("the rule exists").await;
        let token = reserve(&before, 80).await;
        reset(&before).await;
        let second = reserve(&before, 50).await;
        let after = restored(&last_snapshot(&before), rules(algorithm), &clock);
        assert_eq!(after.settle_token(&token, 0).await, Ok(Settlement::Settled));
        assert_eq!(left(&after).await, 50, "{algorithm:?}");
        reset(&after).await;
        assert!(after.check_by_name("tokens", KEY, 60).unwrap().outcome().await.is_allowed());
        assert_eq!(after.settle_token(&second, 0).await, Ok(Settlement::Settled));
        assert_eq!(left(&after).await, 40, "{algorithm:?}");
    }
}

/// Without the time of a charge among those of the counts, a settlement could give back units of others.
#[tokio::test]
async fn a_wall_clock_that_was_set_back_between_two_processes_mints_nothing() {
    for algorithm in algorithms() {
        let clock = ManualClock::at(START);
        let before = gate(algorithm, &clock);
        let token = reserve(&before, 50).await;
        clock.advance(7 * SECOND);
        assert!(before.check_by_name("tokens", KEY, 50).unwrap().outcome().await.is_allowed());
        let snapshot = last_snapshot(&before);
        clock.set(Timestamp::from_secs(1_700_000_000 - 120));
        let after = restored(&snapshot, rules(algorithm), &clock);
        let spent = left(&after).await;
        assert_eq!(after.settle_token(&token, 0).await, Ok(Settlement::Settled));
        assert_eq!(left(&after).await, spent, "{algorithm:?}");
    }
}

/// Resets the key as soon as the open reservations are in the snapshot, and before its count is.
struct ResetsAtFirst<'g>(&'g Gate, Vec<u8>);

impl std::io::Write for ResetsAtFirst<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.1.is_empty() {
            let reset = self.0.reset_by_name("tokens", KEY).expect("the rule exists");
            assert!(reset.now_or_never().is_some(), "a store in memory never waits");
            let taken = self.0.check_by_name("tokens", KEY, 50).expect("the rule exists").outcome();
            assert!(taken.now_or_never().is_some_and(|outcome| outcome.is_allowed()));
        }
        self.1.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_reset_while_reservations_are_handed_over_ends_what_they_give_back() {
    for algorithm in algorithms() {
        let clock = ManualClock::at(START);
        let before = gate(algorithm, &clock);
        let token = reserve(&before, 80).await;
        // So that most counts are written after the reset.
        for number in 0..2_000 {
            let other = format!("other {number}");
            assert!(before.check_by_name("tokens", &[other.as_bytes()], 1).unwrap().outcome().await.is_allowed());
        }
        let mut snapshot = ResetsAtFirst(&before, Vec::new());
        assert!(before.offer_snapshot(&mut snapshot).unwrap().is_some());
        let after = restored(&snapshot.1, rules(algorithm), &clock);
        after.accept_reservations(&before.release_reservations());
        let spent = left(&after).await;
        assert_eq!(after.settle_token(&token, 0).await, Err(ReservationError::Foreign));
        assert_eq!(before.settle_token(&token, 0).await, Ok(Settlement::Settled));
        assert_eq!([left(&before).await, left(&after).await], [50, spent], "{algorithm:?}");
    }
}

/// What a reservation cost beyond its estimate counts in the next process, whatever has become of the estimate.
#[tokio::test]
async fn a_reservation_from_before_a_reset_is_handed_over_for_its_excess() {
    let clock = ManualClock::at(START);
    let algorithm = FixedWindow::new(100, HOUR);
    let before = gate(algorithm, &clock);
    let token = reserve(&before, 30).await;
    _ = before.reset_by_name("tokens", KEY).expect("the rule exists").await;
    let after = restored(&offered(&before), rules(algorithm), &clock);
    after.accept_reservations(&before.release_reservations());
    assert_eq!(after.settle_token(&token, 50).await, Ok(Settlement::Settled));
    assert_eq!(left(&after).await, 80);
}

#[tokio::test]
async fn the_units_stay_pending_in_the_next_process() {
    for algorithm in algorithms() {
        let clock = ManualClock::at(START);
        let before = gate(algorithm, &clock);
        let token = reserve(&before, 100).await;
        clock.advance(SECOND / 2);
        let after = restored(&last_snapshot(&before), rules(algorithm), &clock);
        let check = async || *after.check_by_name("tokens", KEY, 50).unwrap().outcome().await.decision().unwrap();
        assert_eq!(check().await.reason(), Some(DenialReason::Pending), "{algorithm:?}");
        assert!(check().await.retry_after() <= Some(MINUTE), "{algorithm:?}");
        assert_eq!(after.settle_token(&token, 100).await, Ok(Settlement::Settled));
        assert_eq!(check().await.reason(), Some(DenialReason::Limited), "{algorithm:?}");
    }
}

#[tokio::test]
async fn the_next_process_may_have_other_rules() {
    let clock = ManualClock::at(START);
    for (from, to) in algorithms().into_iter().flat_map(|from| algorithms().map(|to| (from, to))) {
        let before = gate(from, &clock);
        let token = reserve(&before, 80).await;
        let after = restored(&last_snapshot(&before), rules(to), &clock);
        assert_eq!(after.settle_token(&token, 30).await, Ok(Settlement::Settled), "{from:?} {to:?}");
        let left = left(&after).await;
        assert!(left == 20 || left == 70, "{from:?} {to:?}: {left}");
    }
    let before = gate(FixedWindow::new(100, HOUR), &clock);
    let token = reserve(&before, 80).await;
    let after = restored(&last_snapshot(&before), named("renamed", FixedWindow::new(100, HOUR)), &clock);
    let removed = Err(ReservationError::LimitRemoved { limit: "tokens".to_owned() });
    assert_eq!(after.settle_token(&token, 0).await, removed);
    after.replace(rules(FixedWindow::new(100, HOUR))).unwrap();
    assert_eq!(left(&after).await, 20);
    // The counts of a limit that was removed may be gone, so nothing is given back.
    assert_eq!(after.settle_token(&token, 0).await, Ok(Settlement::Settled));
    assert_eq!(left(&after).await, 20);
}

#[tokio::test]
async fn units_that_the_next_process_does_not_count_are_not_given_back() {
    let clock = ManualClock::at(START);
    let algorithm = FixedWindow::new(100, HOUR);
    let before = gate(algorithm, &clock);
    let token = reserve(&before, 80).await;
    // A process without the limit loses the counts.
    let without = restored(&last_snapshot(&before), named("renamed", algorithm), &clock);
    let after = restored(&last_snapshot(&without), rules(algorithm), &clock);
    assert!(after.check_by_name("tokens", KEY, 90).unwrap().outcome().await.is_allowed());
    assert_eq!(after.settle_token(&token, 0).await, Ok(Settlement::Settled));
    assert_eq!(left(&after).await, 10);
}

/// Settles on both sides of a hand-over at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn tokens_are_settled_once_while_they_are_handed_over() {
    const TOKENS: usize = 4_000;
    const OTHERS: u64 = 1_000;
    let clock = ManualClock::at(START);
    let quota = TOKENS as u64 + OTHERS;
    let rules = || rules(SlidingWindowLog::new(quota, HOUR));
    let before = gate(SlidingWindowLog::new(quota, HOUR), &clock);
    assert!(before.check_by_name("tokens", KEY, OTHERS).unwrap().outcome().await.is_allowed());
    let mut tokens = Vec::new();
    for _ in 0..TOKENS {
        tokens.push(reserve(&before, 1).await);
    }
    let started = std::sync::Arc::new(AtomicBool::new(false));
    let settling = tokio::spawn({
        let (before, tokens, started) = (before.clone(), tokens.clone(), started.clone());
        async move {
            let mut settled = Vec::new();
            for (number, token) in tokens.iter().enumerate() {
                let result = before.settle_token(token, 0).await;
                started.store(number > TOKENS / 8, Ordering::Relaxed);
                settled.push(result == Ok(Settlement::Settled));
                tokio::task::yield_now().await;
            }
            settled
        }
    });
    while !started.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_micros(50)).await;
    }
    let after = restored(&offered(&before), rules(), &clock);
    after.accept_reservations(&before.release_reservations());
    let settled_before = settling.await.unwrap();
    for (token, settled_before) in tokens.iter().zip(settled_before) {
        let expected = if settled_before { Err(ReservationError::Foreign) } else { Ok(Settlement::Settled) };
        assert_eq!(after.settle_token(token, 0).await, expected);
    }
    assert!(left(&after).await <= TOKENS as u64, "the others stay spent");
}

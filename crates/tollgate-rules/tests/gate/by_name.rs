//! Refunds and resets by the name of a limit and a key.

use tollgate::{
    Algorithm, FixedWindow, LeakyBucket, Limit, MINUTE, Rate, SECOND, SlidingWindowCounter, SlidingWindowLog,
    TokenBucket,
};
use tollgate_rules::{Gate, KeyPart, Listing, Outcome, Rule};

use super::{gate, remaining};

const ANN: &[&[u8]] = &[b"ann"];

fn per_user(algorithm: impl Into<Algorithm>) -> Rule {
    Rule::new(Limit::new("per-user", algorithm).unwrap()).key(KeyPart::header("x-user-id"))
}

fn take(gate: &Gate, cost: u64) -> Outcome {
    ready(gate.check_by_name("per-user", ANN, cost).unwrap().outcome())
}

fn refund(gate: &Gate, units: u64) -> Outcome {
    ready(gate.refund_by_name("per-user", ANN, units).unwrap()).unwrap()
}

/// A gate in memory never waits, so no runtime is needed.
pub(super) fn ready<T>(future: impl Future<Output = T>) -> T {
    let future = std::pin::pin!(future);
    match future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
        std::task::Poll::Ready(output) => output,
        std::task::Poll::Pending => panic!("a gate in memory waits"),
    }
}

#[test]
fn every_algorithm_but_a_queue_gives_units_back_and_never_more_than_the_quota() {
    let algorithms: [Algorithm; 7] = [
        TokenBucket::new(10, Rate::per_second(1)).into(),
        TokenBucket::new(10, Rate::per_second(1)).interval().into(),
        LeakyBucket::new(10, Rate::per_second(1)).into(),
        FixedWindow::new(10, MINUTE).into(),
        FixedWindow::new(10, MINUTE).from_first_request().into(),
        SlidingWindowLog::new(10, MINUTE).into(),
        SlidingWindowCounter::new(10, MINUTE).segments(6).into(),
    ];
    for algorithm in algorithms {
        let (gate, _) = gate([per_user(algorithm)]);
        assert_eq!(remaining(&take(&gate, 6)), 4, "{algorithm:?}");
        assert_eq!(remaining(&refund(&gate, 2)), 6, "{algorithm:?}");
        assert_eq!(remaining(&refund(&gate, 1000)), 10, "{algorithm:?}");
        assert_eq!(remaining(&refund(&gate, 1)), 10, "{algorithm:?}");
        assert!(take(&gate, 10).is_allowed() && !take(&gate, 1).is_allowed(), "{algorithm:?}");
    }
    let (gate, _) = gate([per_user(LeakyBucket::new(10, Rate::per_second(1)).queue(MINUTE))]);
    assert_eq!(remaining(&take(&gate, 6)), 4);
    assert_eq!(remaining(&refund(&gate, 2)), 4);
}

#[test]
fn the_newest_charges_are_given_back_first() {
    let log: Algorithm = SlidingWindowLog::new(10, MINUTE).into();
    let counter = SlidingWindowCounter::new(10, MINUTE).segments(6).into();
    for algorithm in [log, counter] {
        let (gate, clock) = gate([per_user(algorithm)]);
        assert_eq!(remaining(&take(&gate, 4)), 6);
        clock.advance(30 * SECOND);
        assert_eq!(remaining(&take(&gate, 4)), 2);
        // All of the second charge, and one unit of the first.
        assert_eq!(remaining(&refund(&gate, 5)), 7);
        clock.advance(40 * SECOND);
        assert_eq!(remaining(&take(&gate, 0)), 10, "{algorithm:?}: the first charge has expired");
    }
}

#[test]
fn a_long_log_gives_back_entries_of_its_list() {
    let (gate, clock) = gate([per_user(SlidingWindowLog::new(500, MINUTE))]);
    for _ in 0..400 {
        assert!(take(&gate, 1).is_allowed());
        clock.advance(SECOND / 1000);
    }
    assert_eq!(remaining(&refund(&gate, 350)), 450);
    clock.advance(59 * SECOND + 610 * (SECOND / 1000));
    assert_eq!(remaining(&take(&gate, 0)), 461, "the oldest entries expire first");
}

#[test]
fn overrides_and_plans_are_reset_and_refunded_with_their_limit() {
    let rule = per_user(FixedWindow::new(10, MINUTE))
        .plan(KeyPart::header("x-plan"))
        .plan_limit("gold", FixedWindow::new(1000, MINUTE))
        .key_limit(&["ann"], FixedWindow::new(20, MINUTE));
    let (gate, _) = gate([rule]);
    assert_eq!(remaining(&take(&gate, 15)), 5);
    assert_eq!(remaining(&refund(&gate, 10)), 15);
    let bob = |cost| super::check(&gate, "GET", "/", &[("x-user-id", "bob"), ("x-plan", cost)]);
    assert_eq!(remaining(&bob("gold")), 999);
    let reset = ready(gate.reset_by_name("per-user", &[b"bob"]).unwrap()).unwrap();
    assert_eq!(remaining(&reset), 1000, "the plan of the last request");
    assert_eq!(remaining(&bob("gold")), 999);
    assert_eq!(remaining(&ready(gate.reset_by_name("per-user", ANN).unwrap()).unwrap()), 20);
}

#[test]
fn blocked_and_exempt_keys_and_unknown_rules_change_nothing() {
    let (gate, _) = gate([per_user(FixedWindow::new(10, MINUTE)).exempt(Listing::none().key(&["ann"]))]);
    assert!(refund(&gate, 1).is_allowed());
    assert!(refund(&gate, 1).decision().is_none());
    assert!(gate.refund_by_name("other", ANN, 1).is_err());
    assert!(gate.reset_by_name("other", ANN).is_err());
}

//! Rules that are replaced while requests are decided.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use testkit::wait::SetOnDrop;
use tollgate::{FixedWindow, HOUR, Limit, MINUTE, Rate, TokenBucket};
use tollgate_rules::{Facts, Gate, KeyPart, Rule};

use super::{check, gate, headers, remaining, rule_set};

fn per_user(limit: u64) -> Rule {
    let key = KeyPart::header("x-user-id");
    Rule::new(Limit::new("per-user", FixedWindow::new(limit, MINUTE)).unwrap()).key(key)
}

const ANN: [(&str, &str); 1] = [("x-user-id", "ann")];

#[test]
fn counts_survive_and_new_numbers_apply_at_once() {
    let (gate, _) = gate([per_user(10)]);
    assert_eq!(remaining(&check(&gate, "GET", "/", &ANN)), 9);
    gate.replace(rule_set([per_user(100)])).unwrap();
    assert_eq!(remaining(&check(&gate, "GET", "/", &ANN)), 98);
    gate.replace(rule_set([per_user(2)])).unwrap();
    assert!(!check(&gate, "GET", "/", &ANN).is_allowed());
    gate.replace(rule_set([])).unwrap();
    assert!(check(&gate, "GET", "/", &ANN).limit().is_none());
}

#[test]
fn memory_of_a_burst_is_freed_and_counts_stay() {
    let (gate, clock) = gate([per_user(10)]);
    for user in 0..20_000 {
        assert!(check(&gate, "GET", "/", &[("x-user-id", &user.to_string())]).is_allowed());
    }
    let used = || gate.memory().unwrap().memory_used();
    let before = used();
    assert!(!gate.compact(), "the keys are still in use");
    clock.advance(MINUTE);
    let outcome = check(&gate, "GET", "/", &ANN);
    assert!(gate.compact());
    assert!(!gate.compact() && used() > before, "a pending request may still be settled");
    drop(outcome);
    assert!(!gate.compact());
    assert!(used() < before / 16, "{} bytes of {before}", used());
    assert_eq!(remaining(&check(&gate, "GET", "/", &ANN)), 8);
}

#[test]
fn other_rules_do_not_change_the_counts_of_a_limit() {
    let (gate, _) = gate([per_user(10)]);
    let _ = check(&gate, "GET", "/", &ANN);
    let bucket = Limit::new("bucket", TokenBucket::new(100, Rate::per_second(1))).unwrap();
    let before = Rule::new(bucket).matching(tollgate_rules::Match::everything().method("POST"));
    gate.replace(rule_set([
        before,
        per_user(10).plan(KeyPart::header("x-plan")).plan_limit("gold", FixedWindow::new(50, MINUTE)),
    ]))
    .unwrap();
    assert_eq!(remaining(&check(&gate, "GET", "/", &ANN)), 8);
}

#[test]
fn a_limit_with_another_window_keeps_what_was_spent() {
    let (gate, _) = gate([per_user(10)]);
    let _ = check(&gate, "GET", "/", &ANN);
    let key = KeyPart::header("x-user-id");
    let hourly = Rule::new(Limit::new("per-user", FixedWindow::new(10, HOUR)).unwrap()).key(key);
    gate.replace(rule_set([hourly])).unwrap();
    assert_eq!(remaining(&check(&gate, "GET", "/", &ANN)), 8);
}

#[test]
fn an_outcome_is_settled_by_the_rules_that_made_it() {
    let (gate, _) = gate([per_user(10)]);
    let outcome = check(&gate, "GET", "/", &ANN);
    gate.replace(rule_set([Rule::new(Limit::new("other", FixedWindow::new(5, MINUTE)).unwrap()), per_user(20)]))
        .unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(outcome.refund());
    let after = gate.check_by_name("per-user", &[b"ann"], 0).unwrap();
    assert_eq!(remaining(&runtime.block_on(after.outcome())), 20);
}

/// Threads send requests while the rules are replaced continuously. The quota is never above 1000, so at most 1000
/// requests are allowed, and with equal numbers exactly 1000.
#[test]
fn rules_are_replaced_under_load_without_a_wrong_decision() {
    let (gate, _) = gate([per_user(1000)]);
    let (admitted, done) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let headers = headers(&ANN);
                    for _ in 0..20_000 {
                        let outcome = gate.decide_now(&Facts::new("GET", "/").headers(&headers)).unwrap();
                        let quota = outcome.decision().map(tollgate::Decision::quota);
                        assert!(matches!(quota, Some(1000 | 600)), "{quota:?}");
                        if outcome.is_allowed() {
                            admitted.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| replace_without_end(&gate, &done));
        let _done = SetOnDrop(&done);
        for thread in threads {
            thread.join().unwrap();
        }
    });
    gate.replace(rule_set([per_user(1000)])).unwrap();
    while check(&gate, "GET", "/", &ANN).is_allowed() {
        admitted.fetch_add(1, Ordering::Relaxed);
    }
    assert_eq!(admitted.into_inner(), 1000);
}

fn replace_without_end(gate: &Gate, done: &AtomicBool) {
    let mut tick = 0_u64;
    while !done.load(Ordering::Relaxed) {
        tick += 1;
        let other = Rule::new(Limit::new(format!("other-{tick}"), FixedWindow::new(1_000_000, MINUTE)).unwrap())
            .matching(tollgate_rules::Match::everything().method("POST"));
        let limit = if tick.is_multiple_of(2) { 1000 } else { 600 };
        gate.replace(rule_set([other, per_user(limit)])).unwrap();
    }
}

#[test]
fn a_pinned_gate_keeps_its_rules_and_shares_its_counts() {
    let (gate, _) = gate([per_user(10)]);
    let kept = gate.pinned();
    gate.replace(rule_set([per_user(20)])).unwrap();
    assert_eq!(remaining(&check(&kept, "GET", "/", &ANN)), 9);
    assert_eq!(remaining(&check(&gate, "GET", "/", &ANN)), 18);
    assert_eq!(remaining(&check(&kept, "GET", "/", &ANN)), 7);
}

#[test]
fn a_cost_from_the_caller_replaces_the_default_and_zero_takes_nothing() {
    let fixed = |name: &str| Rule::new(Limit::new(name, FixedWindow::new(100, MINUTE)).unwrap());
    let (gate, _) = gate([fixed("plain"), fixed("dear").cost(tollgate_rules::Cost::constant(10))]);
    let left = |cost: u64| {
        let _ = gate.decide_now(&Facts::new("GET", "/").cost(cost)).unwrap();
        ["plain", "dear"].map(|name| match gate.check_by_name(name, &[], 0).unwrap() {
            tollgate_rules::Check::Ready(outcome) => remaining(&outcome),
            tollgate_rules::Check::Pending(_) => unreachable!("the store is memory"),
        })
    };
    assert_eq!(left(7), [93, 90]);
    assert_eq!(left(0), [93, 90]);
}

//! Bans of rules: which denials are strikes, and what a request that gets one reports.

use std::time::Duration;

use tollgate::{Ban, DAY, FixedWindow, HOUR, Limit, MINUTE};
use tollgate_http::Refusal;
use tollgate_rules::{Checks, Facts, Gate, JointCheck, KeyPart, Match, Outcome, Rule};

use super::{check, gate};

const EVE: [(&str, &str); 1] = [("x-user-id", "eve")];

fn rule(name: &str, quota: u64, window: Duration) -> Rule {
    let limit = Limit::new(name, FixedWindow::new(quota, window).from_first_request()).unwrap();
    Rule::new(limit).key(KeyPart::header("x-user-id"))
}

/// A ban that is longer than every window here.
fn ban(after: u64) -> Ban {
    Ban { after, within: 2 * DAY, for_: 3 * DAY }
}

fn get(gate: &Gate, path: &str) -> Outcome {
    check(gate, "GET", path, &EVE)
}

fn is_banned(outcome: &Outcome) -> bool {
    matches!(outcome.refusal(), Some(Refusal::Banned { .. }))
}

#[test]
fn an_exhausted_limit_counts_its_strike_although_another_denial_is_reported() {
    for order in [[0, 1], [1, 0]] {
        let rules = [rule("daily", 1, DAY), rule("per-minute", 1, MINUTE).ban(ban(3))];
        let (gate, _) = gate(order.map(|index| rules[index].clone()));
        assert!(get(&gate, "/").is_allowed());
        for _ in 0..2 {
            let denied = get(&gate, "/");
            assert_eq!((denied.limit(), denied.refusal()), (Some("daily"), Some(&Refusal::Limited)));
        }
        let banned = get(&gate, "/");
        assert_eq!(
            (banned.limit(), banned.refusal()),
            (Some("per-minute"), Some(&Refusal::Banned { retry_after: 3 * DAY }))
        );
        assert!(is_banned(&get(&gate, "/")));
    }
}

#[test]
fn a_limit_that_would_allow_the_request_counts_no_strike() {
    let (gate, clock) = gate([rule("daily", 1, DAY), rule("per-minute", 1, MINUTE).ban(ban(2))]);
    assert!(get(&gate, "/").is_allowed());
    clock.advance(MINUTE);
    for _ in 0..10 {
        let denied = get(&gate, "/");
        assert_eq!((denied.limit(), denied.refusal()), (Some("daily"), Some(&Refusal::Limited)));
    }
}

#[test]
fn every_ban_counts_its_own_strikes() {
    let (gate, _) = gate([rule("first", 1, MINUTE).ban(ban(1)), rule("second", 1, MINUTE).ban(ban(4))]);
    assert!(get(&gate, "/").is_allowed());
    // The first of these denials bans the key in one limit. The other limit goes on counting.
    for _ in 0..4 {
        assert_eq!(get(&gate, "/").limit(), Some("first"));
    }
    let only_second = gate.check_by_name("second", &[b"eve"], 0).unwrap();
    let tollgate_rules::Check::Ready(only_second) = only_second else { panic!("the store is in memory") };
    assert!(is_banned(&only_second), "{only_second:?}");
}

#[test]
fn a_ban_that_ends_before_the_denial_of_another_limit_is_not_reported() {
    let short = Ban { after: 1, within: HOUR, for_: HOUR };
    let (gate, clock) = gate([rule("per-minute", 1, MINUTE).ban(short), rule("daily", 1, DAY)]);
    assert!(get(&gate, "/").is_allowed());
    for _ in 0..2 {
        let denied = get(&gate, "/");
        assert_eq!((denied.limit(), denied.refusal()), (Some("daily"), Some(&Refusal::Limited)));
        assert_eq!(denied.decision().unwrap().retry_after(), Some(DAY));
    }
    clock.advance(DAY - Duration::from_micros(1));
    assert!(!get(&gate, "/").is_allowed());
    clock.advance(Duration::from_micros(1));
    assert!(get(&gate, "/").is_allowed());
}

#[test]
fn an_exhausted_limit_counts_its_strike_if_too_many_requests_are_in_flight() {
    let at_once = Rule::in_flight("at-once", 1).unwrap().key(KeyPart::header("x-user-id"));
    let at_once = at_once.matching(Match::everything().path("/slow"));
    let (gate, clock) = gate([at_once, rule("per-minute", 1, MINUTE).ban(ban(3))]);
    let mut held = get(&gate, "/slow");
    let _permit = held.take_permit().unwrap();
    for _ in 0..2 {
        let denied = get(&gate, "/slow");
        assert_eq!((denied.limit(), denied.refusal()), (Some("at-once"), Some(&Refusal::Limited)));
        let decision = denied.decision().unwrap();
        assert_eq!((decision.quota(), decision.retry_after()), (1, Some(Duration::from_secs(1))));
    }
    let banned = get(&gate, "/slow");
    assert_eq!(
        (banned.limit(), banned.refusal()),
        (Some("per-minute"), Some(&Refusal::Banned { retry_after: 3 * DAY }))
    );
    clock.advance(MINUTE);
    assert!(is_banned(&get(&gate, "/")));
}

#[test]
fn requests_in_flight_are_no_strike_of_a_limit_that_would_allow_them() {
    let at_once = Rule::in_flight("at-once", 1).unwrap();
    let (gate, _) = gate([at_once, rule("per-minute", 2, MINUTE).ban(ban(1))]);
    let mut held = get(&gate, "/");
    let permit = held.take_permit().unwrap();
    for _ in 0..5 {
        assert_eq!(get(&gate, "/").limit(), Some("at-once"));
    }
    drop(permit);
    assert!(get(&gate, "/").is_allowed());
}

#[test]
fn joint_checks_count_the_strikes_of_every_exhausted_limit() {
    let (gate, _) = gate([rule("daily", 1, DAY), rule("per-minute", 1, MINUTE).ban(ban(2)), rule("other", 9, MINUTE)]);
    assert!(get(&gate, "/").is_allowed());
    let pairs = super::headers(&EVE);
    let facts = Facts::new("GET", "/").headers(&pairs);
    for turn in 0..3 {
        let other = JointCheck::Named { rule: "other", key: &[b"ann"], cost: 1 };
        let Ok(Checks::Ready(outcomes)) = gate.check_together(&[JointCheck::Request(&facts), other]) else {
            panic!("the store is in memory")
        };
        assert_eq!((is_banned(&outcomes[0]), is_banned(&outcomes[1])), (turn > 0, false), "{turn}");
    }
}

#[test]
fn a_malformed_request_is_a_strike_in_every_ban() {
    let by_ip = |name: &str, after| {
        let limit = Limit::new(name, FixedWindow::new(100, MINUTE)).unwrap();
        Rule::new(limit).key(KeyPart::ip()).ban(ban(after))
    };
    let (gate, _) = gate([by_ip("first", 1), by_ip("second", 3)]);
    let facts = Facts::new("GET", "/").peer([192, 0, 2, 7].into());
    for _ in 0..3 {
        let tollgate_rules::Check::Ready(_) = gate.strike(&facts) else { panic!("the store is in memory") };
    }
    let Ok(tollgate_rules::Check::Ready(second)) = gate.check_by_name("second", &[b"192.0.2.7"], 0) else {
        panic!("the store is in memory")
    };
    assert!(is_banned(&second), "{second:?}");
}

//! All limits of a request, with the decision of each.

use tollgate::{Ban, FixedWindow, HOUR, Limit, MINUTE};
use tollgate_rules::{Cost, JointCheck, KeyPart, Match, Mode, Outcome, Rule};

use super::{check, gate};

const ANN: [(&str, &str); 1] = [("x-user-id", "ann")];

fn per_user(name: &str, limit: u64) -> Rule {
    let window = FixedWindow::new(limit, MINUTE).from_first_request();
    Rule::new(Limit::new(name, window).unwrap()).key(KeyPart::header("x-user-id"))
}

/// Returns each limit with whether it allows the request, and the units left.
fn each(outcome: &Outcome) -> Vec<(&str, bool, u64)> {
    let each = outcome.each_limit().into_iter();
    each.map(|(name, decision)| (name, decision.is_allowed(), decision.remaining())).collect()
}

#[test]
fn every_limit_that_counted_a_request_has_a_decision() {
    let elsewhere = Match::everything().path("/elsewhere");
    let rules = [
        per_user("wide", 100),
        per_user("other path", 5).matching(elsewhere),
        per_user("narrow", 5).cost(Cost::constant(2)),
        per_user("watched", 1).mode(Mode::Shadow),
    ];
    let (gate, _) = gate(rules);
    assert_eq!(each(&check(&gate, "GET", "/", &ANN)), [("wide", true, 99), ("narrow", true, 3)]);
    assert_eq!(each(&check(&gate, "GET", "/", &ANN)), [("wide", true, 98), ("narrow", true, 1)]);
    let denied = check(&gate, "GET", "/", &ANN);
    assert_eq!(denied.limit(), Some("narrow"));
    // Nothing was taken from the other limit.
    assert_eq!(each(&denied), [("wide", true, 98), ("narrow", false, 1)]);
    let reported = denied.each_limit().into_iter().find(|(name, _)| *name == "narrow").unwrap().1;
    assert_eq!(Some(&reported), denied.decision());
}

#[test]
fn two_limits_that_deny_a_request_both_do_so() {
    let (gate, _) = gate([per_user("one", 1), per_user("other", 1)]);
    assert_eq!(each(&check(&gate, "GET", "/", &ANN)), [("one", true, 0), ("other", true, 0)]);
    assert_eq!(each(&check(&gate, "GET", "/", &ANN)), [("one", false, 0), ("other", false, 0)]);
}

#[test]
fn a_ban_is_shown_as_a_denial_by_its_limit() {
    let (gate, _) = gate([per_user("one", 1).ban(Ban { after: 1, within: MINUTE, for_: HOUR }), per_user("wide", 9)]);
    assert_eq!(each(&check(&gate, "GET", "/", &ANN)), [("one", true, 0), ("wide", true, 8)]);
    for _ in 0..2 {
        let banned = check(&gate, "GET", "/", &ANN);
        assert_eq!(each(&banned), [("one", false, 0), ("wide", true, 8)]);
        assert_eq!(banned.each_limit()[0].1.retry_after(), Some(HOUR));
    }
}

#[test]
fn only_the_limit_on_requests_in_flight_is_listed_if_it_denies() {
    let (gate, _) = gate([per_user("rate", 9), Rule::in_flight("at once", 1).unwrap()]);
    let first = check(&gate, "GET", "/", &ANN);
    assert_eq!(each(&first), [("rate", true, 8)]);
    assert_eq!(each(&check(&gate, "GET", "/", &ANN)), [("at once", false, 0)]);
}

#[test]
fn each_of_several_checks_has_its_own_limits() {
    let (gate, _) = gate([per_user("one", 2), per_user("other", 9)]);
    let check = |rule, cost| JointCheck::Named { rule, key: &[b"ann"], cost };
    let outcomes = |costs: [u64; 2]| {
        let checks = [check("one", costs[0]), check("other", costs[1])];
        let tollgate_rules::Checks::Ready(outcomes) = gate.check_together(&checks).unwrap() else {
            panic!("in memory")
        };
        outcomes
    };
    let allowed = outcomes([1, 1]);
    assert_eq!((each(&allowed[0]), each(&allowed[1])), (vec![("one", true, 1)], vec![("other", true, 8)]));
    let denied = outcomes([2, 1]);
    assert_eq!((each(&denied[0]), each(&denied[1])), (vec![("one", false, 1)], vec![("other", true, 8)]));
}

#[test]
fn a_request_that_no_rule_counts_has_no_limits() {
    let (gate, _) = gate([per_user("one", 1).matching(Match::everything().path("/elsewhere"))]);
    assert_eq!(each(&check(&gate, "GET", "/", &ANN)), []);
}

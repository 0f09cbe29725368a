//! Limits that hear how requests were answered.

use http::{HeaderMap, HeaderName, StatusCode};
use tollgate::rules::{Cost, Mode, Rule, StatusSet};
use tollgate::{Ban, Gate, Limit, MINUTE, Settlement, SlidingWindowLog};

use super::{ask, gate, headers, remaining};

const COST: HeaderName = HeaderName::from_static("x-cost");

fn log(name: &str, limit: u64) -> Rule {
    Rule::new(Limit::new(name, SlidingWindowLog::new(limit, MINUTE)).unwrap())
}

fn left(gate: &Gate, limit: &str) -> u64 {
    let tollgate::Check::Ready(looked) = gate.check_by_name(limit, &[], 0).unwrap() else { panic!("in memory") };
    remaining(&looked)
}

fn status(code: u16) -> StatusCode {
    StatusCode::from_u16(code).unwrap()
}

#[tokio::test]
async fn only_the_answers_that_count_spend_a_limit() {
    let refused = StatusSet::none().status(StatusCode::UNAUTHORIZED).class(StatusCode::INTERNAL_SERVER_ERROR);
    let (gate, _) = gate([log("logins", 3).count(refused), log("requests", 100)]);
    for code in [200, 302, 403, 404] {
        let outcome = ask(&gate, "POST", "/login", &[]);
        assert!(outcome.awaits_response());
        assert_eq!(outcome.settle_response(status(code), &HeaderMap::new()).await, Settlement::Settled);
        assert_eq!(left(&gate, "logins"), 3, "{code}");
    }
    for (code, after) in [(401, 2), (503, 1), (599, 0)] {
        _ = ask(&gate, "POST", "/login", &[]).settle_response(status(code), &HeaderMap::new()).await;
        assert_eq!(left(&gate, "logins"), after, "{code}");
    }
    let denied = ask(&gate, "POST", "/login", &[]);
    assert!(!denied.is_allowed() && !denied.awaits_response());
    _ = denied.settle_response(StatusCode::OK, &HeaderMap::new()).await;
    assert_eq!((left(&gate, "logins"), left(&gate, "requests")), (0, 93));
}

#[tokio::test]
async fn tries_at_the_same_time_cannot_pass_a_limit_before_any_is_answered() {
    let (gate, _) = gate([log("logins", 3).count(StatusSet::failures())]);
    let open: Vec<_> = (0..5).map(|_| ask(&gate, "POST", "/", &[])).collect();
    assert_eq!(open.iter().filter(|outcome| outcome.is_allowed()).count(), 3);
    for outcome in &open {
        _ = outcome.settle_response(StatusCode::OK, &HeaderMap::new()).await;
    }
    assert_eq!(left(&gate, "logins"), 3);
}

#[tokio::test]
async fn an_answer_tells_what_the_request_really_cost() {
    // (status, header, left of 1000 after an estimate of 400)
    let table = [
        (200, Some("100"), 900),
        (200, Some("700"), 300),
        (500, Some("0"), 1000),
        (200, Some("400"), 600),
        (200, None, 600),
        (200, Some("much"), 600),
        (200, Some("-3"), 600),
    ];
    for (code, cost, after) in table {
        let (gate, _) = gate([log("tokens", 1000).cost(Cost::constant(400)).settle_by(COST), log("requests", 10)]);
        let pairs: Vec<_> = cost.map(|cost| ("x-cost", cost)).into_iter().collect();
        assert_eq!(
            ask(&gate, "POST", "/", &[]).settle_response(status(code), &headers(&pairs)).await,
            Settlement::Settled
        );
        assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (after, 9), "{code} {cost:?}");
    }
}

#[tokio::test]
async fn more_than_there_is_leaves_nothing_and_is_told() {
    let (gate, _) = gate([log("tokens", 1000).settle_by(COST)]);
    let settled = ask(&gate, "POST", "/", &[]).settle_response(StatusCode::OK, &headers(&[("x-cost", "1500")])).await;
    assert_eq!((settled, left(&gate, "tokens")), (Settlement::Short { missing: 500 }, 0));
}

#[tokio::test]
async fn an_answer_that_does_not_count_costs_nothing_whatever_it_tells() {
    let (gate, _) = gate([log("tokens", 1000).settle_by(COST).count(StatusSet::successes())]);
    _ = ask(&gate, "POST", "/", &[]).settle_response(StatusCode::BAD_GATEWAY, &headers(&[("x-cost", "70")])).await;
    assert_eq!(left(&gate, "tokens"), 1000);
    _ = ask(&gate, "POST", "/", &[]).settle_response(StatusCode::OK, &headers(&[("x-cost", "70")])).await;
    assert_eq!(left(&gate, "tokens"), 930);
}

#[tokio::test]
async fn a_rule_that_only_watches_hears_answers_too() {
    let (gate, _) = gate([log("trial", 3).count(StatusSet::failures()).mode(Mode::Shadow), log("requests", 10)]);
    let watched = |gate: &Gate| {
        let outcome = ask(gate, "GET", "/", &[]);
        assert!(outcome.awaits_response());
        let left = outcome.shadow_decisions().map(|(_, decision)| decision.remaining()).collect::<Vec<_>>();
        (outcome, left)
    };
    let (outcome, left) = watched(&gate);
    assert_eq!(left, [2]);
    _ = outcome.settle_response(StatusCode::OK, &HeaderMap::new()).await;
    let (outcome, left) = watched(&gate);
    assert_eq!(left, [2]);
    _ = outcome.settle_response(StatusCode::NOT_FOUND, &HeaderMap::new()).await;
    assert_eq!(watched(&gate).1, [1]);
}

#[test]
fn rules_that_count_every_answer_do_not_ask_for_any() {
    let ban = Ban { after: 5, within: MINUTE, for_: MINUTE };
    let (gate, _) = gate([log("a", 10).ban(ban), log("b", 10).count(StatusSet::all())]);
    assert!(!ask(&gate, "GET", "/", &[]).awaits_response());
}

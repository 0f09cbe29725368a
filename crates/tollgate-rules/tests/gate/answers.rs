//! Limits that are settled by responses.

use http::{HeaderMap, HeaderName, StatusCode};
use tollgate::{Ban, Limit, MINUTE, Settlement, SlidingWindowLog};
use tollgate_rules::{Cost, Gate, Mode, Rule, StatusSet};

use super::{check, gate, headers, remaining};

const COST: HeaderName = HeaderName::from_static("x-cost");

fn log(name: &str, limit: u64) -> Rule {
    Rule::new(Limit::new(name, SlidingWindowLog::new(limit, MINUTE)).unwrap())
}

fn left(gate: &Gate, limit: &str) -> u64 {
    let tollgate_rules::Check::Ready(looked) = gate.check_by_name(limit, &[], 0).unwrap() else { panic!("in memory") };
    remaining(&looked)
}

fn status(code: u16) -> StatusCode {
    StatusCode::from_u16(code).unwrap()
}

#[tokio::test]
async fn responses_that_do_not_count_are_refunded() {
    let refused = StatusSet::none().status(StatusCode::UNAUTHORIZED).class(StatusCode::INTERNAL_SERVER_ERROR);
    let (gate, _) = gate([log("logins", 3).count(refused), log("requests", 100)]);
    for code in [200, 302, 403, 404] {
        let outcome = check(&gate, "POST", "/login", &[]);
        assert!(outcome.awaits_response());
        assert_eq!(outcome.settle_response(status(code), &HeaderMap::new()).await, Settlement::Settled);
        assert_eq!(left(&gate, "logins"), 3, "{code}");
    }
    for (code, after) in [(401, 2), (503, 1), (599, 0)] {
        _ = check(&gate, "POST", "/login", &[]).settle_response(status(code), &HeaderMap::new()).await;
        assert_eq!(left(&gate, "logins"), after, "{code}");
    }
    let denied = check(&gate, "POST", "/login", &[]);
    assert!(!denied.is_allowed() && !denied.awaits_response());
    _ = denied.settle_response(StatusCode::OK, &HeaderMap::new()).await;
    assert_eq!((left(&gate, "logins"), left(&gate, "requests")), (0, 93));
}

#[tokio::test]
async fn concurrent_requests_cannot_exceed_a_limit_before_any_response() {
    let (gate, _) = gate([log("logins", 3).count(StatusSet::failures())]);
    let open: Vec<_> = (0..5).map(|_| check(&gate, "POST", "/", &[])).collect();
    assert_eq!(open.iter().filter(|outcome| outcome.is_allowed()).count(), 3);
    for outcome in &open {
        _ = outcome.settle_response(StatusCode::OK, &HeaderMap::new()).await;
    }
    assert_eq!(left(&gate, "logins"), 3);
}

#[tokio::test]
async fn a_response_header_settles_the_actual_cost() {
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
            check(&gate, "POST", "/", &[]).settle_response(status(code), &headers(&pairs)).await,
            Settlement::Settled
        );
        assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (after, 9), "{code} {cost:?}");
    }
}

#[tokio::test]
async fn a_cost_above_the_remaining_quota_is_reported() {
    let (gate, _) = gate([log("tokens", 1000).settle_by(COST)]);
    let settled = check(&gate, "POST", "/", &[]).settle_response(StatusCode::OK, &headers(&[("x-cost", "1500")])).await;
    assert_eq!((settled, left(&gate, "tokens")), (Settlement::Owed { units: 500 }, 0));
}

#[tokio::test]
async fn a_status_that_does_not_count_takes_precedence_over_the_cost_header() {
    let (gate, _) = gate([log("tokens", 1000).settle_by(COST).count(StatusSet::successes())]);
    _ = check(&gate, "POST", "/", &[]).settle_response(StatusCode::BAD_GATEWAY, &headers(&[("x-cost", "70")])).await;
    assert_eq!(left(&gate, "tokens"), 1000);
    _ = check(&gate, "POST", "/", &[]).settle_response(StatusCode::OK, &headers(&[("x-cost", "70")])).await;
    assert_eq!(left(&gate, "tokens"), 930);
}

#[tokio::test]
async fn shadow_rules_are_settled_by_responses_too() {
    let (gate, _) = gate([log("trial", 3).count(StatusSet::failures()).mode(Mode::Shadow), log("requests", 10)]);
    let watched = |gate: &Gate| {
        let outcome = check(gate, "GET", "/", &[]);
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
fn rules_that_count_every_response_await_none() {
    let ban = Ban { after: 5, within: MINUTE, for_: MINUTE };
    let (gate, _) = gate([log("a", 10).ban(ban), log("b", 10).count(StatusSet::all())]);
    assert!(!check(&gate, "GET", "/", &[]).awaits_response());
}

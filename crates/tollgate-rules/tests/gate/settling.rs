//! Costs that are known only afterwards.

use tollgate::{FixedWindow, HOUR, Limit, MINUTE, SECOND, Settlement, SlidingWindowLog};
use tollgate_rules::{Cost, Facts, Gate, Mode, Rule, StatusSet};

use super::{check, gate, remaining};

fn tokens_and_requests() -> Gate {
    let log = |name: &str, limit| Rule::new(Limit::new(name, SlidingWindowLog::new(limit, MINUTE)).unwrap());
    gate([log("tokens", 1000).cost(Cost::constant(500)), log("requests", 10)]).0
}

fn left(gate: &Gate, limit: &str) -> u64 {
    let tollgate_rules::Check::Ready(looked) = gate.check_by_name(limit, &[], 0).unwrap() else { panic!("in memory") };
    remaining(&looked)
}

#[tokio::test]
async fn an_estimate_that_was_too_high_is_refunded() {
    let gate = tokens_and_requests();
    let outcome = check(&gate, "POST", "/", &[]);
    assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (500, 9));
    assert_eq!(outcome.settle(120).await, Settlement::Settled);
    assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (880, 9));
}

#[tokio::test]
async fn units_beyond_the_quota_are_owed() {
    let gate = tokens_and_requests();
    let outcome = check(&gate, "POST", "/", &[]);
    assert_eq!(outcome.settle(1200).await, Settlement::Owed { units: 200 });
    assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (0, 9));
}

#[tokio::test]
async fn a_refund_applies_to_every_limit_and_not_to_a_denial() {
    let gate = tokens_and_requests();
    let outcome = check(&gate, "POST", "/", &[]);
    assert_eq!(outcome.refund().await, Settlement::Settled);
    assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (1000, 10));
    let facts = Facts::new("GET", "/");
    let taken: Vec<_> = (0..2).map(|_| gate.decide_now(&facts).unwrap()).collect();
    let denied = gate.decide_now(&facts).unwrap();
    assert!(taken.iter().all(tollgate_rules::Outcome::is_allowed) && !denied.is_allowed());
    _ = denied.refund().await;
    assert_eq!(left(&gate, "tokens"), 0);
}

#[tokio::test]
async fn one_limit_can_be_settled_by_name() {
    let gate = tokens_and_requests();
    let outcome = check(&gate, "POST", "/", &[]);
    assert_eq!(outcome.settle_limit("requests", 3).await, Settlement::Settled);
    assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (500, 7));
}

#[tokio::test]
async fn a_settled_limit_is_not_refunded_again() {
    let gate = tokens_and_requests();
    let first = check(&gate, "POST", "/", &[]);
    let outcome = check(&gate, "POST", "/", &[]);
    assert!(first.is_allowed());
    assert_eq!(outcome.settle(120).await, Settlement::Settled);
    assert_eq!(outcome.settle(0).await, Settlement::AlreadySettled);
    assert_eq!(outcome.settle_limit("tokens", 0).await, Settlement::AlreadySettled);
    assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (380, 8));
    // The other limit was not settled yet.
    assert_eq!(outcome.refund().await, Settlement::Settled);
    assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (380, 9));
    assert_eq!(outcome.refund().await, Settlement::AlreadySettled);
    assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (380, 9));
}

#[tokio::test]
async fn concurrent_settlements_of_one_request_refund_once() {
    let gate = tokens_and_requests();
    let other = check(&gate, "POST", "/", &[]);
    let outcome = std::sync::Arc::new(check(&gate, "POST", "/", &[]));
    let tasks = [(); 8].map(|()| {
        let outcome = outcome.clone();
        tokio::spawn(async move { outcome.refund().await })
    });
    let mut settled = Vec::new();
    for task in tasks {
        settled.push(task.await.unwrap());
    }
    assert!(settled.contains(&Settlement::Settled) && other.is_allowed());
    assert_eq!((left(&gate, "tokens"), left(&gate, "requests")), (500, 9));
}

#[tokio::test]
async fn every_limit_of_a_request_with_many_is_settled_once() {
    let log =
        |number: u32| Rule::new(Limit::new(format!("limit-{number}"), SlidingWindowLog::new(10, MINUTE)).unwrap());
    let gate = gate((0..100).map(log)).0;
    let outcome = check(&gate, "GET", "/", &[]);
    for number in [31, 32, 63, 64, 99] {
        let name = format!("limit-{number}");
        assert_eq!(left(&gate, &name), 9, "{name}");
        assert_eq!(outcome.settle_limit(&name, 0).await, Settlement::Settled, "{name}");
        assert_eq!(outcome.settle_limit(&name, 0).await, Settlement::AlreadySettled, "{name}");
    }
    assert_eq!(outcome.refund().await, Settlement::Settled);
    assert_eq!(outcome.refund().await, Settlement::AlreadySettled);
    assert!((0..100).all(|number| left(&gate, &format!("limit-{number}")) == 10));
}

#[tokio::test]
async fn any_number_of_shadow_limits_are_settled_once() {
    let log = |number: u32| {
        let limit = Limit::new(format!("limit-{number}"), SlidingWindowLog::new(10, MINUTE)).unwrap();
        let mode = if number < 20 { Mode::Enforced } else { Mode::Shadow };
        Rule::new(limit).count(StatusSet::failures()).mode(mode)
    };
    let gate = gate((0..80).map(log)).0;
    let other = check(&gate, "GET", "/", &[]);
    let outcome = check(&gate, "GET", "/", &[]);
    for _ in 0..2 {
        _ = outcome.settle_response(http::StatusCode::OK, &http::HeaderMap::new()).await;
    }
    let looked = check(&gate, "GET", "/", &[]);
    assert!(other.is_allowed() && looked.shadow_decisions().count() == 60);
    // One of `other`, one of `looked`: `outcome` has refunded its own, and nothing else.
    assert!(looked.shadow_decisions().all(|(_, decision)| decision.remaining() == 8));
    assert_eq!(remaining(&looked), 8);
}

#[tokio::test]
async fn units_of_requests_in_progress_are_pending() {
    let logins = Rule::new(Limit::new("logins", FixedWindow::new(2, HOUR)).unwrap())
        .count(StatusSet::none().status(http::StatusCode::UNAUTHORIZED))
        .ban(tollgate::Ban { after: 1, within: HOUR, for_: HOUR });
    let gate = gate([logins]).0;
    let [mut first, mut second] = [0, 1].map(|_| check(&gate, "POST", "/login", &[]));
    first.hold_open(30 * SECOND);
    second.hold_open(10 * SECOND);
    let third = check(&gate, "POST", "/login", &[]);
    assert_eq!(third.refusal(), Some(&tollgate_http::Refusal::Pending));
    let response = third.response(&http::HeaderMap::new()).expect("it is refused");
    assert_eq!((response.status().as_u16(), &response.headers()["retry-after"]), (429, &"10".parse().unwrap()));
    let body = String::from_utf8_lossy(response.body());
    assert!(body.contains("\"reason\":\"pending\"") && body.contains("are in progress"), "{body}");
    // The logins were correct, and pending denials are no strikes.
    first.settle_response(http::StatusCode::OK, &http::HeaderMap::new()).await;
    assert!(check(&gate, "POST", "/login", &[]).is_allowed());
    drop(second);
    let spent = check(&gate, "POST", "/login", &[]);
    assert!(matches!(spent.refusal(), Some(tollgate_http::Refusal::Banned { .. })), "{spent:?}");
}

#[tokio::test]
async fn headers_show_the_quota_after_the_settlement() {
    let gate = tokens_and_requests();
    let outcome = check(&gate, "POST", "/", &[]);
    let shown = |outcome: &tollgate_rules::Outcome| {
        let mut headers = http::HeaderMap::new();
        outcome.write_headers(&mut headers);
        headers["x-ratelimit-remaining"].to_str().expect("a number").to_owned()
    };
    assert_eq!(shown(&outcome), "500");
    outcome.settle(120).await;
    assert_eq!(shown(&outcome), "880");
    let outcome = check(&gate, "POST", "/", &[]);
    outcome.settle(5000).await;
    assert_eq!(shown(&outcome), "0");
}

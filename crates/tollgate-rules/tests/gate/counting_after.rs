//! Limits that count a request only after its response.

use http::{HeaderMap, StatusCode};
use tollgate::{Ban, FixedWindow, HOUR, Limit, MINUTE, Settlement, SlidingWindowLog};
use tollgate_rules::{Check, Cost, Facts, Gate, KeyPart, Mode, Outcome, Rule, StatusSet};

use super::{check, gate, headers, remaining};

fn failed() -> StatusSet {
    StatusSet::none().status(StatusCode::UNAUTHORIZED)
}

fn log(name: &str, limit: u64) -> Rule {
    Rule::new(Limit::new(name, SlidingWindowLog::new(limit, MINUTE)).unwrap())
}

fn logins() -> Rule {
    log("logins", 5).count_after(failed())
}

fn left(gate: &Gate, limit: &str) -> u64 {
    let Check::Ready(looked) = gate.check_by_name(limit, &[], 0).unwrap() else { panic!("in memory") };
    remaining(&looked)
}

fn ask(gate: &Gate) -> Outcome {
    check(gate, "POST", "/login", &[])
}

async fn respond(outcome: &Outcome, status: u16) -> Settlement {
    outcome.settle_response(StatusCode::from_u16(status).unwrap(), &HeaderMap::new()).await
}

#[tokio::test]
async fn concurrent_requests_pass_together_and_each_response_that_counts_is_charged() {
    let (gate, _clock) = gate([logins()]);
    let asked: Vec<Outcome> = (0..8).map(|_| ask(&gate)).collect();
    assert!(asked.iter().all(Outcome::is_allowed));
    assert_eq!(left(&gate, "logins"), 5);
    for outcome in &asked {
        assert_eq!(respond(outcome, 200).await, Settlement::Settled);
    }
    drop(asked);
    assert_eq!(left(&gate, "logins"), 5);
    let asked: Vec<Outcome> = (0..8).map(|_| ask(&gate)).collect();
    let mut settled = Vec::new();
    for outcome in &asked {
        settled.push(respond(outcome, 401).await);
    }
    assert_eq!(settled[..5], [Settlement::Settled; 5]);
    assert_eq!(settled[5..], [Settlement::Owed { units: 1 }; 3]);
    drop(asked);
    let denied = ask(&gate);
    assert!(!denied.is_allowed());
    // Eight entries of the same moment: they all leave the log at once.
    assert_eq!(denied.decision().unwrap().retry_after(), Some(MINUTE));
}

#[tokio::test]
async fn a_denial_is_that_of_a_limit_that_counts_at_arrival() {
    let denied = |rule: Rule| async move {
        let (gate, clock) = gate([rule, log("all", 100)]);
        for _ in 0..5 {
            respond(&ask(&gate), 401).await;
            clock.advance(std::time::Duration::from_secs(7));
        }
        let denied = ask(&gate);
        assert!(!denied.is_allowed());
        assert_eq!(left(&gate, "all"), 95, "a denied request takes nothing from other limits");
        let decision = denied.decision().unwrap();
        (denied.limit().map(str::to_owned), decision.retry_after(), decision.remaining(), decision.quota())
    };
    assert_eq!(denied(logins()).await, denied(log("logins", 5).count(failed())).await);
}

#[tokio::test]
async fn a_request_that_another_limit_denies_is_not_counted() {
    let (gate, _clock) = gate([logins(), log("all", 1)]);
    respond(&ask(&gate), 200).await;
    let denied = ask(&gate);
    assert_eq!((denied.is_allowed(), denied.limit()), (false, Some("all")));
    drop(denied);
    assert_eq!(left(&gate, "logins"), 5);
}

#[tokio::test]
async fn an_outcome_without_a_response_is_charged_unless_it_is_refunded() {
    let (gate, _clock) = gate([logins(), log("all", 10)]);
    drop(ask(&gate));
    assert_eq!((left(&gate, "logins"), left(&gate, "all")), (4, 9));
    let unserved = ask(&gate);
    assert_eq!(unserved.refund().await, Settlement::Settled);
    drop(unserved);
    assert_eq!((left(&gate, "logins"), left(&gate, "all")), (4, 9));
    let settled = ask(&gate);
    assert_eq!(respond(&settled, 401).await, Settlement::Settled);
    assert_eq!(respond(&settled, 200).await, Settlement::AlreadySettled);
    drop(settled);
    assert_eq!((left(&gate, "logins"), left(&gate, "all")), (3, 8));
}

#[tokio::test]
async fn a_cost_in_the_response_is_charged_in_full() {
    let rule = log("tokens", 100).cost(Cost::constant(10)).settle_by("x-cost").count_after(StatusSet::successes());
    let (gate, clock) = gate([rule]);
    let costing = |cost: &str| headers(&[("x-cost", cost)]);
    // The lower cost, the estimate, and nothing for a response that does not count.
    let mut tokens = Vec::new();
    for (status, headers) in [(200, costing("3")), (200, HeaderMap::new()), (500, costing("40"))] {
        let outcome = ask(&gate);
        outcome.settle_response(StatusCode::from_u16(status).unwrap(), &headers).await;
        tokens.push(left(&gate, "tokens"));
    }
    assert_eq!(tokens, [97, 87, 87]);
    let outcome = ask(&gate);
    clock.advance(std::time::Duration::from_secs(20));
    assert_eq!(outcome.settle_response(StatusCode::OK, &costing("150")).await, Settlement::Owed { units: 63 });
    // 13 units leave the log 60 s after they were taken, and 150 when they are 60 s old.
    let denied = ask(&gate);
    assert_eq!(denied.decision().unwrap().retry_after(), Some(MINUTE));
}

#[tokio::test]
async fn headers_show_the_quota_after_the_response() {
    let (gate, _clock) = gate([logins()]);
    for (status, shown) in [(200, "5"), (401, "4")] {
        let outcome = ask(&gate);
        respond(&outcome, status).await;
        let mut written = HeaderMap::new();
        outcome.write_headers(&mut written);
        assert_eq!(written["x-ratelimit-remaining"], shown);
    }
}

#[tokio::test]
async fn a_limit_in_shadow_mode_counts_after_the_response_too() {
    let shadow = |name, limit| log(name, limit).count_after(failed()).mode(Mode::Shadow);
    let (gate, _clock) = gate([shadow("few", 1), shadow("more", 3)]);
    let asked: Vec<Outcome> = (0..2).map(|_| ask(&gate)).collect();
    for outcome in &asked {
        respond(outcome, 401).await;
    }
    drop(asked);
    let shadow = |outcome: &Outcome| -> Vec<(bool, u64)> {
        outcome.shadow_decisions().map(|(_, decision)| (decision.is_allowed(), decision.remaining())).collect()
    };
    let outcome = ask(&gate);
    assert_eq!(shadow(&outcome), [(false, 0), (true, 1)]);
    respond(&outcome, 401).await;
    drop(outcome);
    // The limit that denies counts nothing, and the other one counted once.
    let outcome = ask(&gate);
    assert_eq!(shadow(&outcome), [(false, 0), (false, 0)]);
    respond(&outcome, 401).await;
}

/// The gate does not see the response to a check by name, or to a request that another server serves.
#[tokio::test]
async fn checks_without_a_response_count_at_once() {
    let (gate, _clock) = gate([logins()]);
    let Check::Ready(named) = gate.check_by_name("logins", &[], 2).unwrap() else { panic!("in memory") };
    assert_eq!((remaining(&named), left(&gate, "logins")), (3, 3));
    drop(named);
    let elsewhere = gate.decide_now(&Facts::new("POST", "/login").served_elsewhere()).unwrap();
    assert_eq!((remaining(&elsewhere), left(&gate, "logins")), (2, 2));
    drop(elsewhere);
    assert_eq!(left(&gate, "logins"), 2);
}

#[tokio::test]
async fn denials_are_strikes() {
    let ban = Ban { after: 2, within: MINUTE, for_: HOUR };
    let (gate, clock) = gate([logins().key(KeyPart::header("x-user-id")).ban(ban)]);
    let ask = || check(&gate, "POST", "/login", &[("x-user-id", "ann")]);
    for _ in 0..5 {
        respond(&ask(), 401).await;
    }
    assert_eq!([ask(), ask()].map(|outcome| outcome.is_allowed()), [false, false]);
    clock.advance(2 * MINUTE);
    assert!(!ask().is_allowed(), "the key is banned");
}

#[test]
fn a_queue_and_a_limit_on_requests_in_flight_cannot_count_after_the_response() {
    let build = |rule: Rule| tollgate_rules::RuleSet::builder().rule(rule).build().unwrap_err().to_string();
    let queue = tollgate::LeakyBucket::new(5, tollgate::Rate::per_second(1)).queue(MINUTE);
    let queue = build(Rule::new(Limit::new("queue", queue).unwrap()).count_after(StatusSet::all()));
    assert!(queue.contains("`when: after`") && queue.contains("overflow: reject"), "{queue}");
    let in_flight = build(Rule::in_flight("slots", 1).unwrap().count_after(StatusSet::all()));
    assert!(in_flight.contains("count does not apply"), "{in_flight}");
}

#[tokio::test]
async fn all_responses_can_count_after_them() {
    let rule = Rule::new(Limit::new("window", FixedWindow::new(2, MINUTE)).unwrap()).count_after(StatusSet::all());
    let (gate, _clock) = gate([rule]);
    let asked = [ask(&gate), ask(&gate), ask(&gate)];
    assert!(asked.iter().all(Outcome::is_allowed));
    for outcome in &asked {
        respond(outcome, 204).await;
    }
    drop(asked);
    assert!(!ask(&gate).is_allowed());
}

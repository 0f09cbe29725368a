//! Limits on requests in flight.

use std::sync::atomic::{AtomicU64, Ordering};

use http::HeaderMap;
use tollgate::{Ban, FixedWindow, Limit, MINUTE};
use tollgate_http::Refusal;
use tollgate_rules::{
    Check, Cost, Facts, Gate, InFlightPermit, KeyPart, Listing, Match, Mode, Outcome, Rule, RuleSet, RuleState,
};

use super::{check, gate, headers, remaining, rule_set};

fn per_user(most: u64) -> Rule {
    Rule::in_flight("at-once", most).unwrap().key(KeyPart::header("x-user-id"))
}

fn rate(limit: u64) -> Rule {
    Rule::new(Limit::new("rate", FixedWindow::new(limit, MINUTE)).unwrap())
}

fn left(gate: &Gate, limit: &str) -> u64 {
    let Check::Ready(looked) = gate.check_by_name(limit, &[], 0).unwrap() else { panic!("in memory") };
    remaining(&looked)
}

fn get(gate: &Gate, user: &str) -> Outcome {
    check(gate, "GET", "/", &[("x-user-id", user)])
}

fn permit(gate: &Gate, user: &str) -> Option<InFlightPermit> {
    get(gate, user).take_permit()
}

#[test]
fn a_permit_is_returned_when_it_is_dropped_or_was_never_taken() {
    let (gate, _) = gate([per_user(2)]);
    let (first, second) = (permit(&gate, "ann").unwrap(), permit(&gate, "ann").unwrap());
    assert!(!get(&gate, "ann").is_allowed() && get(&gate, "bob").is_allowed());
    drop(first);
    let outcome = get(&gate, "ann");
    assert!(outcome.is_allowed() && !get(&gate, "ann").is_allowed());
    drop(outcome);
    let third = permit(&gate, "ann").unwrap();
    assert!(!get(&gate, "ann").is_allowed());
    std::thread::spawn(move || drop((second, third))).join().unwrap();
    assert!(get(&gate, "ann").is_allowed());
}

#[test]
fn a_request_without_a_permit_spends_nothing() {
    let (gate, _) = gate([rate(10), per_user(1)]);
    let _held = permit(&gate, "ann");
    for _ in 0..3 {
        assert!(!get(&gate, "ann").is_allowed());
    }
    assert_eq!(left(&gate, "rate"), 9);
}

#[test]
fn a_request_that_a_rate_limit_denies_holds_no_permit() {
    let everyone = Rule::in_flight("everyone", 2).unwrap();
    let (gate, clock) = gate([per_user(1), everyone, rate(1)]);
    drop(get(&gate, "ann"));
    let denied: Vec<_> = (0..5).map(|_| get(&gate, "ann")).collect();
    assert!(denied.iter().all(|outcome| outcome.limit() == Some("rate")));
    clock.advance(MINUTE);
    assert!(get(&gate, "ann").is_allowed(), "while the denied outcomes exist");
}

#[test]
fn permits_of_several_limits_are_taken_all_or_nothing() {
    let everyone = Rule::in_flight("everyone", 3).unwrap();
    let (gate, _) = gate([everyone, per_user(2)]);
    let _held = [permit(&gate, "ann").unwrap(), permit(&gate, "ann").unwrap()];
    assert_eq!(get(&gate, "ann").limit(), Some("at-once"));
    let last = permit(&gate, "bob");
    assert!(last.is_some(), "the permit that ann did not get is free");
    assert_eq!(get(&gate, "cid").limit(), Some("everyone"));
}

#[test]
fn a_request_without_a_permit_gets_the_response_of_a_denied_one() {
    let (gate, _) = gate([per_user(3)]);
    let _held: Vec<_> = (0..3).map(|_| permit(&gate, "ann").unwrap()).collect();
    let refused = get(&gate, "ann");
    assert_eq!((refused.refusal(), refused.limit()), (Some(&Refusal::Limited), Some("at-once")));
    let decision = refused.decision().unwrap();
    assert_eq!((decision.quota(), decision.remaining()), (3, 0));
    let response = refused.response(&HeaderMap::new()).unwrap();
    assert_eq!(response.status(), 429);
    assert_eq!(response.headers()["retry-after"], "1");
    assert_eq!(response.headers()["x-ratelimit-limit"], "3");
    assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
    assert_eq!(response.headers()["ratelimit-policy"], r#""at-once";q=3;qu="concurrent-requests""#);
    let body = String::from_utf8(response.body().to_vec()).unwrap();
    assert_eq!(
        body,
        r#"{"error":"rate_limit_exceeded","message":"Too many requests. Please retry after 1 second.","retry_after":1}"#
    );
}

#[test]
fn an_allowed_request_reports_its_rate_limit() {
    let (gate, _) = gate([per_user(3), rate(10)]);
    let mut headers = HeaderMap::new();
    let outcome = get(&gate, "ann");
    outcome.write_headers(&mut headers);
    assert_eq!((outcome.limit(), &headers["x-ratelimit-limit"]), (Some("rate"), &"10".parse().unwrap()));
}

#[test]
fn plans_and_single_keys_have_overrides() {
    let rule = per_user(1).plan(KeyPart::header("x-plan")).plan_in_flight("gold", 3).key_in_flight(&["vip"], 5);
    let (gate, _) = gate([rule]);
    let most = |user: &str, plan: &str| {
        let mut held = Vec::new();
        while let Some(permit) = check(&gate, "GET", "/", &[("x-user-id", user), ("x-plan", plan)]).take_permit() {
            held.push(permit);
        }
        held.len()
    };
    assert_eq!([most("ann", ""), most("ann", "gold"), most("vip", "gold"), most("vip", "")], [1, 3, 5, 5]);
}

#[test]
fn matches_exemptions_and_blocks_work_as_for_rate_limits() {
    let rule = per_user(1)
        .matching(Match::everything().method("POST"))
        .exempt(Listing::none().key(&["ops"]))
        .blocked(Listing::none().key(&["eve"]));
    let (gate, _) = gate([rule]);
    let post = |user| check(&gate, "POST", "/", &[("x-user-id", user)]);
    assert!(get(&gate, "ann").take_permit().is_none() && post("ops").take_permit().is_none());
    assert_eq!(post("eve").refusal(), Some(&Refusal::Blocked));
    assert!(post("ann").take_permit().is_some());
}

#[test]
fn a_shadow_rule_reports_what_it_would_do() {
    let (gate, _) = gate([per_user(1).mode(Mode::Shadow)]);
    let watched =
        |outcome: &Outcome| outcome.shadow_decisions().map(|(_, decision)| decision.is_allowed()).collect::<Vec<_>>();
    let mut first = get(&gate, "ann");
    assert_eq!(watched(&first), [true]);
    let second = get(&gate, "ann");
    assert!(second.is_allowed());
    assert_eq!(watched(&second), [false]);
    drop(first.take_permit());
    assert_eq!(watched(&get(&gate, "ann")), [true]);
}

#[test]
fn new_numbers_apply_at_once_and_permits_survive_the_change() {
    let (gate, _) = gate([per_user(3)]);
    let held: Vec<_> = (0..3).map(|_| permit(&gate, "ann").unwrap()).collect();
    gate.replace(rule_set([rate(100), per_user(4)])).unwrap();
    let fourth = permit(&gate, "ann").unwrap();
    assert_eq!(get(&gate, "ann").limit(), Some("at-once"));
    gate.replace(rule_set([per_user(2)])).unwrap();
    drop(held);
    assert!(get(&gate, "ann").is_allowed());
    gate.adopt(&Gate::in_memory(rule_set([per_user(1)])).unwrap());
    assert!(!get(&gate, "ann").is_allowed());
    drop(fourth);
    assert!(get(&gate, "ann").is_allowed());
}

#[test]
fn a_request_served_elsewhere_takes_no_permit() {
    let (gate, _) = gate([per_user(1), rate(10)]);
    let _held = permit(&gate, "ann").unwrap();
    let ann = headers(&[("x-user-id", "ann")]);
    let elsewhere = Facts::new("GET", "/").headers(&ann).served_elsewhere();
    let mut outcome = gate.decide_now(&elsewhere).unwrap();
    assert!(outcome.is_allowed() && outcome.take_permit().is_none());
    assert_eq!((outcome.limit(), left(&gate, "rate")), (Some("rate"), 8));
    let Ok(Check::Ready(named)) = gate.check_by_name("at-once", &[b"ann"], 1) else { panic!("in memory") };
    assert!(named.is_allowed());
}

#[tokio::test]
async fn an_explanation_contains_the_requests_in_flight() {
    let (gate, _) = gate([per_user(2)]);
    let ann = headers(&[("x-user-id", "ann")]);
    let mut held = Vec::new();
    for (expected, allowed) in [(0, true), (1, true), (2, false)] {
        let explanation = gate.explain(&Facts::new("GET", "/").headers(&ann)).await;
        let RuleState::InFlight { key, in_flight, decision, .. } = &explanation.rules[0].state else {
            panic!("in flight")
        };
        assert_eq!((&**key, *in_flight, decision.quota()), (&["ann".to_owned()][..], expected, 2));
        assert_eq!((explanation.allowed, decision.is_allowed()), (allowed, allowed));
        held.extend(permit(&gate, "ann"));
    }
}

#[test]
fn settings_of_rate_limits_are_rejected_for_in_flight_limits() {
    let refused = |rule: Rule| RuleSet::builder().rule(rule).build().unwrap_err().to_string();
    let ban = Ban { after: 5, within: MINUTE, for_: MINUTE };
    assert_eq!(
        refused(per_user(1).ban(ban)),
        "limit `at-once`: ban does not apply to a limit on requests in flight: remove it, or use a separate limit"
    );
    for rule in [
        per_user(1).cost(Cost::constant(2)),
        per_user(1).settle_by("x-cost"),
        per_user(1).plan_limit("gold", FixedWindow::new(1, MINUTE)),
        per_user(1).plan_in_flight("gold", 0),
        rate(1).plan_in_flight("gold", 5),
    ] {
        assert!(refused(rule).starts_with("limit `"));
    }
    assert_eq!(
        Rule::in_flight("a", 0).unwrap_err().to_string(),
        "limit `a`: in_flight 0 admits nothing: use 1 or more, or `blocked` to refuse every request"
    );
}

#[test]
fn threads_never_hold_more_permits_than_the_maximum() {
    let (gate, _) = gate([per_user(5)]);
    let (now, most) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..5_000 {
                    let held: Vec<_> = (0..2).filter_map(|_| permit(&gate, "ann")).collect();
                    let taken = now.fetch_add(held.len() as u64, Ordering::SeqCst) + held.len() as u64;
                    most.fetch_max(taken, Ordering::SeqCst);
                    now.fetch_sub(held.len() as u64, Ordering::SeqCst);
                    drop(held);
                }
            });
        }
    });
    assert!((1..=5).contains(&most.into_inner()));
    let held: Vec<_> = (0..9).filter_map(|_| permit(&gate, "ann")).collect();
    assert_eq!(held.len(), 5, "all permits are free again");
}

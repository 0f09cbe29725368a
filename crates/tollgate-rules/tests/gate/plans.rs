//! Overrides and costs.

use tollgate::{FixedWindow, Limit, MINUTE, Rate, TokenBucket};
use tollgate_rules::{Cost, KeyPart, NamedRule, Rule};

use super::by_name::ready;
use super::{check, gate, remaining, rule_set};

fn per_user() -> Rule {
    let key = KeyPart::header("x-user-id");
    Rule::new(Limit::new("per-user", FixedWindow::new(10, MINUTE)).unwrap()).key(key)
}

fn tiered() -> Rule {
    per_user()
        .plan(KeyPart::header("x-plan"))
        .plan_limit("gold", FixedWindow::new(1000, MINUTE))
        .plan_limit("trial", FixedWindow::new(3, MINUTE))
        .key_limit(&["vip"], FixedWindow::new(5000, MINUTE))
}

#[test]
fn plans_and_single_keys_have_overrides() {
    let (gate, _) = gate([tiered()]);
    let left = |user: &str, plan: &str| {
        let outcome = check(&gate, "GET", "/", &[("x-user-id", user), ("x-plan", plan)]);
        let decision = outcome.decision().unwrap();
        assert_eq!(outcome.limit(), Some("per-user"));
        (decision.quota(), decision.remaining())
    };
    assert_eq!(left("ann", "gold"), (1000, 999));
    assert_eq!(left("bob", "trial"), (3, 2));
    assert_eq!(left("cid", "unknown"), (10, 9));
    assert_eq!(left("dan", ""), (10, 9));
    assert_eq!(left("vip", "trial"), (5000, 4999));
    // A client that changes plans keeps what it has spent.
    assert_eq!(left("bob", "gold"), (1000, 998));
    assert_eq!(left("bob", "trial"), (3, 0));
}

#[test]
fn operations_by_name_use_the_plan_of_the_last_request() {
    let (gate, _) = gate([tiered()]);
    let request =
        |user: &str, plan: &str| remaining(&check(&gate, "GET", "/", &[("x-user-id", user), ("x-plan", plan)]));
    let by_name = |user: &str, plan: Option<&str>| {
        let check = gate.check_by_name(NamedRule::new("per-user").plan(plan), &[user.as_bytes()], 0).unwrap();
        let decision = *ready(check.outcome()).decision().unwrap();
        (decision.quota(), decision.remaining())
    };
    assert_eq!(by_name("ann", None), (10, 10), "no request has named a plan");
    assert_eq!(request("ann", "gold"), 999);
    assert_eq!(by_name("ann", None), (1000, 999));
    assert_eq!(by_name("ann", Some("trial")), (3, 2));
    assert_eq!(by_name("ann", None), (1000, 999), "an operation by name is no request");
    assert_eq!(request("ann", "trial"), 1);
    assert_eq!(by_name("ann", None), (3, 1));
    assert_eq!(request("vip", "gold"), 4999);
    assert_eq!(by_name("vip", None), (5000, 4999), "a key's own numbers come first");
    gate.compact();
    let units = ready(gate.refund_by_name("per-user", &[b"ann"], 1).unwrap()).unwrap();
    assert_eq!(units.decision().unwrap().quota(), 3);

    // Another limit comes first now, and the plan has other numbers.
    let other = Rule::new(Limit::new("other", FixedWindow::new(1, MINUTE)).unwrap()).key(KeyPart::header("x-other"));
    let raised = per_user().plan(KeyPart::header("x-plan")).plan_limit("trial", FixedWindow::new(5, MINUTE));
    gate.replace(rule_set([other.clone(), raised])).unwrap();
    assert_eq!(by_name("ann", None), (5, 4));
    gate.replace(rule_set([other, per_user()])).unwrap();
    assert_eq!(by_name("ann", None), (10, 9), "there is no such plan any more");
}

#[test]
fn rules_that_come_back_do_not_bring_back_plans() {
    let (gate, _) = gate([tiered()]);
    let first = gate.rules();
    let request = |plan: &str| check(&gate, "GET", "/", &[("x-user-id", "ann"), ("x-plan", plan)]);
    let quota = || ready(gate.check_by_name("per-user", &[b"ann"], 0).unwrap().outcome()).decision().unwrap().quota();
    assert!(request("gold").is_allowed());
    gate.replace(rule_set([tiered()])).unwrap();
    assert_eq!(quota(), 1000);
    assert!(request("").is_allowed());
    assert_eq!(quota(), 10);
    gate.replace(first).unwrap();
    assert_eq!(quota(), 10, "the last request had no plan");
}

#[test]
fn many_plans_are_remembered_until_others_take_their_places() {
    let (gate, _) = gate([tiered()]);
    let names: Vec<String> = (0..20_000).map(|number| format!("user {number}")).collect();
    for name in &names {
        assert!(check(&gate, "GET", "/", &[("x-user-id", name), ("x-plan", "gold")]).is_allowed());
    }
    let quota = |name: &str| {
        let outcome = ready(gate.check_by_name("per-user", &[name.as_bytes()], 0).unwrap().outcome());
        outcome.decision().unwrap().quota()
    };
    let kept = names.iter().filter(|name| quota(name) == 1000).count();
    assert!(kept > names.len() * 99 / 100, "{kept} of {} are remembered", names.len());
}

#[test]
fn an_override_must_have_the_same_algorithm_and_valid_numbers() {
    let other =
        per_user().plan(KeyPart::header("x-plan")).plan_limit("gold", TokenBucket::new(10, Rate::per_second(1)));
    let error = tollgate_rules::RuleSet::builder().rule(other).build().unwrap_err();
    assert_eq!(
        error.to_string(),
        "limit `per-user`: an override has another algorithm than its limit: change numbers only, or use a limit of \
         its own"
    );
    let zero = per_user().key_limit(&["ann"], FixedWindow::new(0, MINUTE));
    let error = tollgate_rules::RuleSet::builder().rule(zero).build().unwrap_err();
    assert_eq!(error.field(), "limit");
}

#[test]
fn the_rule_sets_the_cost_of_a_request() {
    let header = Cost::header("x-cost");
    let (gate, _) = gate([per_user().cost(header)]);
    let spent =
        |user: &str, cost: &str| 10 - remaining(&check(&gate, "GET", "/", &[("x-user-id", user), ("x-cost", cost)]));
    assert_eq!(spent("a", "4"), 4);
    assert_eq!(spent("b", "0"), 1, "a client's header never makes its request free");
    let never = check(&gate, "GET", "/", &[("x-user-id", "h"), ("x-cost", "11")]);
    assert!(!never.is_allowed() && never.decision().unwrap().retry_after().is_none());
}

#[test]
fn a_cost_can_be_computed() {
    let by_path = Cost::custom(|request| request.path().starts_with("/export").then_some(5));
    let (gate, _) = gate([per_user().cost(by_path)]);
    assert_eq!(remaining(&check(&gate, "GET", "/export/all", &[])), 5);
    assert_eq!(remaining(&check(&gate, "GET", "/list", &[])), 4);
}

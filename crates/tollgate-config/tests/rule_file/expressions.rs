//! Expressions that fail for a request decide against the client, are counted, and are explained.

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate_config::RuleFile;
use tollgate_http::Refusal;
use tollgate_rules::{ExpressionField, Facts, Gate, Outcome, RuleExplained, RuleState};

use super::compiled::{block_on, gate};

fn with_headers<T>(target: &str, headers: &[(&str, &str)], ask: impl FnOnce(&Facts<'_>) -> T) -> T {
    let headers: HeaderMap = headers
        .iter()
        .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap()))
        .collect();
    ask(&Facts::new("GET", target).headers(&headers).peer(IpAddr::from([192, 0, 2, 1])))
}

fn get(gate: &Gate, target: &str) -> Outcome {
    with_headers(target, &[], |facts| gate.decide_now(facts).unwrap())
}

fn remaining(outcome: &Outcome) -> Option<u64> {
    outcome.decision().map(tollgate::Decision::remaining)
}

fn explained(gate: &Gate, target: &str) -> RuleExplained {
    let explanation = with_headers(target, &[], |facts| gate.explain(facts));
    block_on(explanation).rules.remove(0)
}

fn errors(gate: &Gate) -> Vec<(String, ExpressionField, u64)> {
    let rules = gate.rules();
    rules.expression_errors().map(|(limit, field, count)| (limit.to_owned(), field, count)).collect()
}

/// Conditions, each with a request for which it fails.
fn failing() -> Vec<(&'static str, String)> {
    let many: String = (0..2_000).map(|number| format!("&p{number}=1")).collect();
    vec![
        (r#"request.query["dry_run"] != "1""#, "/".to_owned()),
        (r#"request.query["dry_run"] == "1""#, "/".to_owned()),
        (r#"!(request.headers["x-absent"] == "1")"#, "/".to_owned()),
        (r#"int(request.query["page"]) > 100"#, "/?page=99999999999999999999".to_owned()),
        (r#"int(request.query["page"]) > 100"#, "/?page=ten".to_owned()),
        (r#"int(request.query["page"]) * 9223372036854775807 > 100"#, "/?page=3".to_owned()),
        (r#"100 / int(request.query["page"]) > 100"#, "/?page=0".to_owned()),
        (r#"request.query.exists(name, name == "debug")"#, format!("/?x=1{many}")),
        (r#"request.query.all(name, name != "debug")"#, format!("/?x=1{many}")),
    ]
}

#[test]
fn a_limit_applies_where_its_condition_fails() {
    for (when, target) in failing() {
        let gate = gate(&format!("limits: [{{ name: a, limit: 1, window: 1h, match: {{ when: '{when}' }} }}]\n"));
        assert!(get(&gate, &target).is_allowed(), "{when}");
        assert_eq!(get(&gate, &target).refusal(), Some(&Refusal::Limited), "{when}");
        assert_eq!(errors(&gate), [("a".to_owned(), ExpressionField::MatchWhen, 2)], "{when}");
    }
}

#[test]
fn a_request_is_blocked_where_the_condition_fails() {
    for (when, target) in failing() {
        let gate = gate(&format!("limits: [{{ name: a, blocked: {{ when: '{when}' }} }}]\n"));
        assert_eq!(get(&gate, &target).refusal(), Some(&Refusal::Blocked), "{when}");
        assert_eq!(errors(&gate), [("a".to_owned(), ExpressionField::BlockedWhen, 1)], "{when}");
    }
}

#[test]
fn a_request_is_not_exempt_where_the_condition_fails() {
    for (when, target) in failing() {
        let gate = gate(&format!("limits: [{{ name: a, limit: 1, window: 1h, exempt: {{ when: '{when}' }} }}]\n"));
        assert!(get(&gate, &target).is_allowed(), "{when}");
        assert_eq!(get(&gate, &target).refusal(), Some(&Refusal::Limited), "{when}");
        assert_eq!(errors(&gate), [("a".to_owned(), ExpressionField::ExemptWhen, 2)], "{when}");
    }
}

#[test]
fn conditions_that_do_not_fail_are_not_counted_as_errors() {
    let gate = gate(
        r#"limits: [{ name: a, limit: 10, window: 1h, match: { when: '"x" in request.query && request.query["x"] == "1"' } }]"#,
    );
    assert_eq!(remaining(&get(&gate, "/?x=1")), Some(9));
    assert_eq!(get(&gate, "/?x=2").limit(), None);
    assert_eq!(get(&gate, "/").limit(), None);
    assert_eq!(errors(&gate), [("a".to_owned(), ExpressionField::MatchWhen, 0)]);
}

#[test]
fn a_cost_that_fails_takes_what_the_file_says() {
    let costs = [
        // Garbage, 20 digits, a negative number, nothing at all.
        ("{ expression: 'int(request.query.n)', when_error: 7 }", 7),
        // The most that it can be, where its text shows that.
        ("'min(int(request.query.n), 40)'", 40),
        ("'max(1, min(int(request.query.n), 40)) * 2'", 80),
        // Above the quota, nothing would ever pass.
        ("'min(int(request.query.n), 4000)'", 100),
        // Else the whole quota, whatever numbers it contains.
        ("'int(request.query.n)'", 100),
        ("'int(request.query.n) * 2'", 100),
    ];
    for (cost, taken) in costs {
        for target in ["/?n=garbage", "/?n=99999999999999999999", "/?n=", "/"] {
            let gate = gate(&format!("limits: [{{ name: a, limit: 100, window: 1h, cost: {cost} }}]\n"));
            let outcome = get(&gate, target);
            assert_eq!((outcome.is_allowed(), remaining(&outcome)), (true, Some(100 - taken)), "{cost} {target}");
            assert_eq!(errors(&gate), [("a".to_owned(), ExpressionField::Cost, 1)], "{cost} {target}");
        }
    }
    let gate = gate("limits: [{ name: a, limit: 100, window: 1h, cost: 'int(request.query.n)' }]\n");
    assert_eq!(remaining(&get(&gate, "/?n=-5")), Some(0));
}

#[test]
fn a_cost_that_fails_takes_at_most_the_quota_of_the_plan() {
    let gate = gate(
        "limits:\n  - name: a\n    key: ip\n    limit: 100\n    window: 1h\n    cost: { expression: \
         'int(request.query.n)', when_error: 50 }\n    plan: header:x-plan\n    overrides: [{ plan: small, limit: 20 }]\n",
    );
    let small = with_headers("/", &[("x-plan", "small")], |facts| gate.decide_now(facts).unwrap());
    assert_eq!((small.is_allowed(), remaining(&small)), (true, Some(0)));
}

#[test]
fn an_error_is_explained_and_not_counted() {
    let gate = gate(
        "limits: [{ name: a, match: { when: 'request.query.x != \"1\"' }, exempt: { when: 'request.query.y == \"1\"' }, \
         cost: { expression: 'int(request.query.z)', when_error: 3 } }]\n",
    );
    let rule = explained(&gate, "/?z=ten");
    assert!(matches!(rule.state, RuleState::Counted { cost: 3, .. }), "{rule:?}");
    let failed: Vec<(&str, &str)> =
        rule.failed_expressions.iter().map(|failed| (failed.field.as_str(), failed.error.as_str())).collect();
    assert_eq!(failed[..2], [("match.when", "there is no entry `x`"), ("exempt.when", "there is no entry `y`")]);
    assert_eq!(failed[2].0, "cost");
    assert!(failed[2].1.contains("int"), "{failed:?}");
    assert!(errors(&gate).iter().all(|(.., count)| *count == 0));
    assert!(explained(&gate, "/?x=2&y=2&z=2").failed_expressions.is_empty());
}

#[test]
fn counts_of_errors_outlive_a_change_of_rules() {
    let rules = |limit: u64| {
        let text = format!("limits: [{{ name: a, limit: {limit}, match: {{ when: 'request.query.x != \"1\"' }} }}]\n");
        RuleFile::parse("tollgate.yaml", text).unwrap().compile().unwrap()
    };
    let first = rules(10);
    let gate = Gate::in_memory(first.clone()).unwrap();
    assert!(get(&gate, "/").is_allowed());
    gate.replace(rules(20)).unwrap();
    assert!(get(&gate, "/").is_allowed());
    assert_eq!(errors(&gate), [("a".to_owned(), ExpressionField::MatchWhen, 2)]);
    // Adopted rules continue the counts of the previous ones.
    gate.replace(first).unwrap();
    assert_eq!(errors(&gate), [("a".to_owned(), ExpressionField::MatchWhen, 2)]);
}

#[test]
fn closures_are_not_changed_by_that() {
    use tollgate::{FixedWindow, HOUR, Limit};
    use tollgate_rules::{Cost, Match, Rule, RuleSet};
    let limit = Limit::new("a", FixedWindow::new(10, HOUR)).unwrap();
    let rule = Rule::new(limit).matching(Match::everything().when(|_| true)).cost(Cost::custom(|_| None));
    let gate = Gate::in_memory(RuleSet::builder().rule(rule).build().unwrap()).unwrap();
    assert_eq!(remaining(&get(&gate, "/")), Some(9));
    assert_eq!(errors(&gate), []);
}

//! Several checks that are decided all or nothing.

use tollgate::{FixedWindow, Limit, MINUTE, Settlement};
use tollgate_rules::{Checks, Facts, Gate, JointCheck, KeyPart, Listing, Match, Outcome, Rule};

use crate::{gate, remaining};

fn rule(name: &str, quota: u64) -> Rule {
    Rule::new(Limit::new(name, FixedWindow::new(quota, MINUTE)).unwrap()).key(KeyPart::descriptor("user"))
}

fn named<'a>(rule: &'a str, key: &'a [&'a [u8]], cost: u64) -> JointCheck<'a> {
    JointCheck::Named { rule, key, cost }
}

fn together(gate: &Gate, checks: &[JointCheck<'_>]) -> Vec<Outcome> {
    match gate.check_together(checks).expect("the rules exist") {
        Checks::Ready(outcomes) => outcomes,
        Checks::Pending(_) => panic!("the store is in memory"),
    }
}

#[tokio::test]
async fn a_denied_check_takes_nothing_from_the_others() {
    let (gate, _) = gate([rule("large", 10), rule("small", 2)]);
    let outcomes = together(&gate, &[named("large", &[b"ann"], 4), named("small", &[b"ann"], 3)]);
    assert!(outcomes[0].is_allowed());
    assert_eq!((outcomes[0].limit(), remaining(&outcomes[0])), (Some("large"), 10));
    assert!(!outcomes[1].is_allowed());
    assert_eq!((outcomes[1].limit(), remaining(&outcomes[1])), (Some("small"), 2));
    // Nothing was taken, so nothing can be refunded.
    assert_eq!(outcomes[0].refund().await, Settlement::AlreadySettled);

    let outcomes = together(&gate, &[named("large", &[b"ann"], 4), named("small", &[b"ann"], 2)]);
    assert!(outcomes.iter().all(Outcome::is_allowed));
    assert_eq!((remaining(&outcomes[0]), remaining(&outcomes[1])), (6, 0));
    assert_eq!(outcomes[0].refund().await, Settlement::Settled);
    assert_eq!(remaining(&together(&gate, &[named("large", &[b"ann"], 0)])[0]), 10);
}

#[test]
fn checks_on_the_same_key_are_added_up() {
    let (gate, _) = gate([rule("one", 5)]);
    let twice = [named("one", &[b"ann"], 3), named("one", &[b"ann"], 3)];
    assert!(together(&gate, &twice).iter().all(|outcome| !outcome.is_allowed()));
    let outcomes = together(&gate, &[named("one", &[b"ann"], 3), named("one", &[b"ann"], 2)]);
    assert!(outcomes.iter().all(|outcome| outcome.is_allowed() && remaining(outcome) == 0));
    // Another key has its own quota.
    let outcomes = together(&gate, &[named("one", &[b"ann"], 1), named("one", &[b"bob"], 1)]);
    assert_eq!(outcomes.iter().map(Outcome::is_allowed).collect::<Vec<_>>(), [false, true]);
    assert_eq!(remaining(&outcomes[1]), 5);
}

#[test]
fn checks_of_one_key_under_several_plans_must_fit_into_each() {
    let limit = Limit::new("one", FixedWindow::new(5, MINUTE)).unwrap();
    let rule = Rule::new(limit).key(KeyPart::descriptor("user")).plan(KeyPart::descriptor("plan"));
    let (gate, _) = gate([rule.plan_limit("gold", FixedWindow::new(8, MINUTE))]);
    let (with_plan, without) = ([("user", "ann"), ("plan", "gold")], [("user", "ann")]);
    let (gold, plain) = (Facts::new("GET", "/").descriptors(&with_plan), Facts::new("GET", "/").descriptors(&without));
    let of_both = |of_limit| {
        let plain = std::iter::repeat_with(|| JointCheck::Request(&plain)).take(of_limit);
        std::iter::once(JointCheck::Request(&gold)).chain(plain).collect::<Vec<_>>()
    };
    let numbers = |outcome: &Outcome| (outcome.decision().unwrap().quota(), remaining(outcome));
    // The plan has room for six units, the limit itself has not.
    let mut reversed = of_both(5);
    reversed.reverse();
    for (checks, last_quota) in [(of_both(5), 5), (reversed, 8)] {
        let outcomes = together(&gate, &checks);
        assert!(outcomes.iter().any(|outcome| !outcome.is_allowed()), "{outcomes:?}");
        let peeked = numbers(&together(&gate, &[named("one", &[b"ann"], 0)])[0]);
        assert_eq!(peeked, (last_quota, last_quota), "nothing was taken");
    }
    let outcomes = together(&gate, &of_both(3));
    assert!(outcomes.iter().all(Outcome::is_allowed));
    assert_eq!((numbers(&outcomes[0]), numbers(&outcomes[1])), ((8, 4), (5, 1)), "each reports its own numbers");
}

#[test]
fn a_blocked_check_takes_nothing_from_the_others() {
    let (gate, _) = gate([rule("blocking", 5).blocked(Listing::none().key(&["mallory"])), rule("other", 5)]);
    let outcomes = together(&gate, &[named("other", &[b"ann"], 1), named("blocking", &[b"mallory"], 1)]);
    assert_eq!(outcomes.iter().map(Outcome::is_allowed).collect::<Vec<_>>(), [true, false]);
    assert_eq!(remaining(&together(&gate, &[named("other", &[b"ann"], 0)])[0]), 5);
}

#[test]
fn limits_apply_to_descriptors_that_have_all_their_entries() {
    let per_address = Rule::new(Limit::new("per-address", FixedWindow::new(1, MINUTE)).unwrap()).key(KeyPart::ip());
    let edge = rule("edge", 3).matching(Match::everything().domain("edge"));
    let (gate, _) = gate([rule("per-user", 5), edge, per_address]);
    let limits = |domain: &str, entries: &[(&str, &str)]| {
        let facts = Facts::of_descriptor(domain, entries).cost(1);
        let [outcome] = <[Outcome; 1]>::try_from(together(&gate, &[JointCheck::Request(&facts)])).unwrap();
        outcome.limit().map(str::to_owned)
    };
    assert_eq!(limits("other", &[("user", "ann")]).as_deref(), Some("per-user"));
    assert_eq!(limits("edge", &[("user", "bob")]).as_deref(), Some("edge"));
    // The limits by user and by address do not count these as `anonymous`.
    assert_eq!(limits("edge", &[("path", "/")]), None);
}

#[test]
fn an_unknown_rule_is_reported() {
    let (gate, _) = gate([rule("one", 5)]);
    assert!(gate.check_together(&[named("two", &[b"ann"], 1)]).is_err());
}

//! Exempt, blocked, shadowed and banned requests.

use tollgate::{Ban, FixedWindow, HOUR, Limit, MINUTE, SECOND};
use tollgate_http::Refusal;
use tollgate_rules::{Facts, KeyPart, Listing, Missing, Mode, Networks, Rule};

use super::{check, gate, headers, remaining};

fn per_user(limit: u64) -> Rule {
    let key = KeyPart::header("x-user-id");
    Rule::new(Limit::new("per-user", FixedWindow::new(limit, MINUTE)).unwrap()).key(key)
}

const ANN: [(&str, &str); 1] = [("x-user-id", "ann")];
const EVE: [(&str, &str); 1] = [("x-user-id", "eve")];

#[test]
fn exempt_requests_are_not_counted() {
    let listing = Listing::none()
        .key(&["ann"])
        .networks(Networks::parse(["10.0.0.0/8"]).unwrap())
        .when(|request| request.path().starts_with("/health"));
    let (gate, _) = gate([per_user(1).exempt(listing)]);
    let local = Facts::new("GET", "/").peer("10.1.2.3".parse().unwrap());
    for _ in 0..3 {
        assert!(check(&gate, "GET", "/", &ANN).is_allowed());
        assert!(check(&gate, "GET", "/healthz", &EVE).is_allowed());
        assert!(gate.decide_now(&local).unwrap().is_allowed());
    }
    assert_eq!(remaining(&check(&gate, "GET", "/", &EVE)), 0);
    assert!(!check(&gate, "GET", "/", &EVE).is_allowed());
}

#[test]
fn blocked_requests_get_no_retry_after() {
    let listing = Listing::none().key(&["eve"]).networks(Networks::parse(["192.0.2.0/24"]).unwrap());
    let (gate, _) = gate([per_user(10).blocked(listing)]);
    let refused = check(&gate, "GET", "/", &EVE);
    assert_eq!((refused.refusal(), refused.limit()), (Some(&Refusal::Blocked), Some("per-user")));
    let response = refused.response(&headers(&[])).unwrap();
    assert_eq!((response.status().as_u16(), response.headers().get("retry-after")), (403, None));
    let from_there = Facts::new("GET", "/").peer("192.0.2.9".parse().unwrap());
    assert_eq!(gate.decide_now(&from_there).unwrap().refusal(), Some(&Refusal::Blocked));
    assert!(check(&gate, "GET", "/", &ANN).is_allowed());
}

#[test]
fn a_shadow_rule_counts_every_request_and_refuses_none() {
    let watching = per_user(2).mode(Mode::Shadow);
    let enforced = Rule::new(Limit::new("all", FixedWindow::new(3, MINUTE)).unwrap());
    let (gate, _) = gate([watching, enforced]);
    let seen: Vec<(bool, bool, Option<String>)> = (0..5)
        .map(|_| {
            let outcome = check(&gate, "GET", "/", &ANN);
            let (name, decision) = outcome.shadow_decisions().next().unwrap();
            assert_eq!(name, "per-user");
            (outcome.is_allowed(), decision.is_allowed(), outcome.limit().map(Into::into))
        })
        .collect();
    let all = || Some("all".to_owned());
    // It counts denied requests too: it shows what it would do if it were the only rule.
    let expected = [(true, true), (true, true), (true, false), (false, false), (false, false)];
    assert_eq!(seen, expected.map(|(allowed, would)| (allowed, would, all())));
}

#[test]
fn clients_that_are_denied_too_often_are_banned() {
    let (gate, clock) = gate([per_user(1).ban(Ban { after: 3, within: MINUTE, for_: HOUR })]);
    assert!(check(&gate, "GET", "/", &EVE).is_allowed());
    for _ in 0..2 {
        assert_eq!(check(&gate, "GET", "/", &EVE).refusal(), Some(&Refusal::Limited));
    }
    // The denial that causes the ban reports it: a client that waits this long is allowed.
    let banned = check(&gate, "GET", "/", &EVE);
    assert_eq!(banned.refusal(), Some(&Refusal::Banned { retry_after: HOUR }));
    let banned = check(&gate, "GET", "/", &EVE);
    assert_eq!(banned.refusal(), Some(&Refusal::Banned { retry_after: HOUR }));
    assert_eq!((banned.limit(), remaining(&banned)), (Some("per-user"), 0));
    let response = banned.response(&headers(&[])).unwrap();
    assert_eq!((response.status().as_u16(), response.headers()["retry-after"].to_str().unwrap()), (429, "3600"));
    assert!(check(&gate, "GET", "/", &ANN).is_allowed());
    // The window has ended long ago, the ban has not.
    clock.advance(HOUR - SECOND);
    assert_eq!(check(&gate, "GET", "/", &EVE).refusal(), Some(&Refusal::Banned { retry_after: SECOND }));
    clock.advance(SECOND);
    assert!(check(&gate, "GET", "/", &EVE).is_allowed());
}

#[test]
fn a_ban_is_not_reported_before_it_begins() {
    let (gate, clock) = gate([per_user(2).ban(Ban { after: 100, within: HOUR, for_: HOUR })]);
    let first = check(&gate, "GET", "/", &ANN);
    assert_eq!((first.limit(), remaining(&first)), (Some("per-user"), 1));
    let _ = check(&gate, "GET", "/", &ANN);
    for _ in 0..90 {
        let denied = check(&gate, "GET", "/", &ANN);
        assert_eq!(denied.refusal(), Some(&Refusal::Limited));
        assert!(denied.decision().unwrap().retry_after().unwrap() <= MINUTE);
    }
    // However close the ban is, an allowed request reports its limit.
    clock.advance(MINUTE);
    let later = check(&gate, "GET", "/", &ANN);
    assert_eq!((later.limit(), remaining(&later), later.decision().unwrap().quota()), (Some("per-user"), 1, 2));
}

#[test]
fn lists_by_address_apply_without_a_key_too() {
    let listing = |network: &str| Listing::none().networks(Networks::parse([network]).unwrap());
    let skipping = per_user(10).missing(Missing::Skip).blocked(listing("192.0.2.0/24"));
    let (gate, _) = super::gate([skipping]);
    let blocked = gate.decide_now(&Facts::new("GET", "/").peer("192.0.2.9".parse().unwrap())).unwrap();
    assert_eq!(blocked.refusal(), Some(&Refusal::Blocked));
    let denying = per_user(10).missing(Missing::Deny).exempt(listing("10.0.0.0/8"));
    let (gate, _) = super::gate([denying]);
    assert!(gate.decide_now(&Facts::new("GET", "/").peer("10.0.0.5".parse().unwrap())).unwrap().is_allowed());
}

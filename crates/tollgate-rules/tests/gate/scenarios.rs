//! Scenarios from the specification.

use tollgate::{FixedWindow, Limit, MINUTE};
use tollgate_rules::{KeyPart, Match, Rule};

use super::{check, gate, remaining};

fn per_minute(name: &str, limit: u64) -> Rule {
    Rule::new(Limit::new(name, FixedWindow::new(limit, MINUTE)).unwrap())
}

fn user() -> KeyPart {
    KeyPart::header("x-user-id")
}

#[test]
fn the_eleventh_call_to_an_endpoint_takes_nothing_from_the_other_limits() {
    let endpoint = Match::everything().path("/api/expensive");
    let (gate, _) = gate([
        per_minute("global", 10_000),
        per_minute("user", 100).key(user()),
        per_minute("endpoint", 10).matching(endpoint).key(user()).key(KeyPart::path()),
    ]);
    let ann = [("x-user-id", "ann")];
    for left in (0..10).rev() {
        let outcome = check(&gate, "GET", "/api/expensive", &ann);
        assert!(outcome.is_allowed());
        assert_eq!((outcome.limit(), remaining(&outcome)), (Some("endpoint"), left));
    }
    let denied = check(&gate, "GET", "/api/expensive", &ann);
    assert_eq!((denied.is_allowed(), denied.limit()), (false, Some("endpoint")));
    let elsewhere = check(&gate, "GET", "/api/cheap", &ann);
    assert_eq!((elsewhere.limit(), remaining(&elsewhere)), (Some("user"), 89));
    let another = check(&gate, "GET", "/api/cheap", &[("x-user-id", "bob")]);
    assert_eq!((another.limit(), remaining(&another)), (Some("user"), 99));
}

#[test]
fn search_has_its_own_limit_and_the_general_one() {
    let search = Match::everything().path("/search/**");
    let (gate, _) =
        gate([per_minute("general", 100).key(user()), per_minute("search", 10).matching(search).key(user())]);
    let ann = [("x-user-id", "ann")];
    for _ in 0..10 {
        assert!(check(&gate, "GET", "/search?q=x", &ann).is_allowed());
    }
    assert!(!check(&gate, "GET", "/search?q=x", &ann).is_allowed());
    let general = check(&gate, "GET", "/users", &ann);
    assert_eq!((general.limit(), remaining(&general)), (Some("general"), 89));
}

#[test]
fn a_request_without_the_header_is_anonymous() {
    let (gate, _) = gate([per_minute("user", 2).key(user())]);
    assert!(check(&gate, "GET", "/", &[]).is_allowed());
    assert!(check(&gate, "GET", "/", &[("x-user-id", "")]).is_allowed());
    assert!(!check(&gate, "GET", "/", &[]).is_allowed());
    assert!(!check(&gate, "GET", "/", &[("x-user-id", "anonymous")]).is_allowed());
    assert!(check(&gate, "GET", "/", &[("x-user-id", "ann")]).is_allowed());
}

#[test]
fn a_request_without_a_matching_rule_gets_no_headers() {
    let (gate, _) = gate([per_minute("posts", 1).matching(Match::everything().method("POST"))]);
    for _ in 0..3 {
        let outcome = check(&gate, "GET", "/", &[]);
        assert!(outcome.is_allowed() && outcome.limit().is_none() && outcome.decision().is_none());
    }
}

#[test]
fn an_empty_rule_set_allows_everything() {
    let (gate, _) = gate([]);
    assert!(check(&gate, "GET", "/", &[]).is_allowed());
}

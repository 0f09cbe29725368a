//! Paths with several readings: the strictest of them decides.

use tollgate::{Ban, FixedWindow, HOUR, Limit, MINUTE, Rate, SECOND, TokenBucket};
use tollgate_http::Refusal;
use tollgate_rules::{
    EncodedSlash, Facts, Gate, KeyBan, KeyPart, Listing, Match, Outcome, PathParameters, PathReading, Rule, RuleSet,
};

use super::{gate, gate_of, remaining};

fn per_path(limit: u64) -> Rule {
    Rule::new(Limit::new("per-path", FixedWindow::new(limit, MINUTE)).unwrap()).key(KeyPart::path())
}

/// A key that a closure derives from the path, so that other readings can be named.
fn custom(limit: u64) -> Rule {
    let path = KeyPart::custom(|request| Some(request.path().to_owned()));
    Rule::new(Limit::new("per-path", FixedWindow::new(limit, MINUTE)).unwrap()).key(path)
}

fn get(gate: &Gate, path: &str) -> Outcome {
    gate.decide_now(&Facts::new("GET", path)).unwrap()
}

fn quota(outcome: &Outcome) -> u64 {
    outcome.decision().unwrap().quota()
}

fn operator_ban(gate: &Gate, key: &str) {
    let (since, by) = (gate.wall_time(), "an operator".to_owned());
    let (limit, until) = ("per-path".to_owned(), since.saturating_add(HOUR));
    gate.set_key_bans(vec![KeyBan { limit, key: vec![key.to_owned()], since, until, by }]);
}

#[test]
fn an_override_is_not_spelled_around() {
    let limited = [("/login", "/login;x"), ("/a/b", "/a%2Fb"), ("/a/b", "/a%5Cb")];
    for (listed, sent) in limited {
        let (gate, _) = gate([per_path(100).key_limit(&[listed], FixedWindow::new(5, MINUTE))]);
        for path in [listed, sent, listed, sent, sent] {
            assert!(get(&gate, path).is_allowed());
        }
        assert!((0..20).all(|_| !get(&gate, sent).is_allowed() && !get(&gate, listed).is_allowed()), "{sent}");
    }
}

#[test]
fn a_looser_override_needs_every_reading() {
    let (gate, _) = gate([per_path(5).key_limit(&["/bulk"], FixedWindow::new(100, MINUTE))]);
    assert_eq!((quota(&get(&gate, "/bulk")), quota(&get(&gate, "/bulk;x"))), (100, 5));
}

#[test]
fn the_strictest_of_an_override_a_plan_and_the_default_applies() {
    let rule = per_path(50)
        .plan(KeyPart::header("x-plan"))
        .plan_limit("gold", FixedWindow::new(100, MINUTE))
        .plan_limit("trial", FixedWindow::new(3, MINUTE))
        .key_limit(&["/login"], FixedWindow::new(20, MINUTE));
    let (gate, _) = gate([rule]);
    let quota = |path: &str, plan: &str| quota(&super::check(&gate, "GET", path, &[("x-plan", plan)]));
    assert_eq!((quota("/login", "gold"), quota("/login;x", "gold")), (20, 20));
    assert_eq!((quota("/login", "trial"), quota("/login;x", "trial")), (20, 3));
    assert_eq!((quota("/other", "gold"), quota("/other;x", "gold")), (100, 100));
}

#[test]
fn numbers_that_cannot_be_compared_give_way_to_the_strictest_of_each() {
    let bucket = |capacity, rate| TokenBucket::new(capacity, rate);
    let limit = Limit::new("per-path", bucket(100, Rate::per_minute(1))).unwrap();
    let rule = Rule::new(limit).key(KeyPart::path()).key_limit(&["/login"], bucket(2, Rate::per_second(100)));
    let (gate, clock) = gate([rule]);
    assert_eq!(
        (quota(&get(&gate, "/login")), quota(&get(&gate, "/other;x")), quota(&get(&gate, "/other"))),
        (2, 100, 100)
    );
    assert!(get(&gate, "/login;x").is_allowed());
    let denied = get(&gate, "/login;x");
    assert!(!denied.is_allowed() && quota(&denied) == 2);
    clock.advance(30 * SECOND);
    assert!(!get(&gate, "/login;x").is_allowed(), "the slower refill applies");
    clock.advance(30 * SECOND);
    assert!(get(&gate, "/login;x").is_allowed());
}

#[test]
fn windows_that_cannot_be_compared_give_way_to_the_strictest_of_each() {
    let (gate, clock) = gate([per_path(100).key_limit(&["/login"], FixedWindow::new(2, SECOND))]);
    assert!(get(&gate, "/login;x").is_allowed() && get(&gate, "/login;x").is_allowed());
    clock.advance(2 * SECOND);
    let denied = get(&gate, "/login;x");
    assert!(!denied.is_allowed() && denied.decision().unwrap().retry_after().unwrap() > 2 * SECOND);
}

#[test]
fn a_limit_on_requests_in_flight_is_the_strictest_of_all_readings() {
    let rule = Rule::in_flight("at-once", 10).unwrap().key(KeyPart::path()).key_in_flight(&["/login"], 1);
    let (gate, _) = gate([rule]);
    let held = get(&gate, "/login;x");
    assert!(held.is_allowed() && !get(&gate, "/login;y").is_allowed() && !get(&gate, "/login").is_allowed());
    drop(held);
    assert!(get(&gate, "/login").is_allowed());
}

#[test]
fn a_block_or_a_ban_of_one_reading_blocks_the_request_and_an_exemption_needs_all() {
    let (blocked, _) = gate([custom(9).blocked(Listing::none().key(&["/a%2Fb"]))]);
    assert_eq!(get(&blocked, "/a%2Fb").refusal(), Some(&Refusal::Blocked));
    assert!(get(&blocked, "/a/b").is_allowed());
    let (exempt, _) = gate([custom(9).exempt(Listing::none().key(&["/a/b"]))]);
    assert!(get(&exempt, "/a%2Fb").decision().is_some() && get(&exempt, "/a/b").decision().is_none());
    let both = Listing::none().key(&["/a/b"]).key(&["/a%2Fb"]);
    let (exempt, _) = gate([custom(9).exempt(both)]);
    assert!(get(&exempt, "/a%2Fb").decision().is_none());
    for key in ["/a/b", "/a%2Fb"] {
        let (gate, _) = gate([custom(9)]);
        operator_ban(&gate, key);
        assert!(matches!(get(&gate, "/a%2Fb").refusal(), Some(Refusal::Banned { .. })), "{key}");
        assert_eq!(get(&gate, "/a/b").is_allowed(), key != "/a/b");
    }
}

/// Routes may read paths in different ways, so the key of one route can be another reading of a request to the next.
#[test]
fn a_key_that_a_limit_has_banned_is_banned_in_every_reading() {
    let kept =
        PathReading { encoded_slash: EncodedSlash::Keep, parameters: PathParameters::Keep, ..PathReading::default() };
    let banned = |ban: &dyn Fn(&Gate)| {
        let rule = per_path(1).ban(Ban { after: 1, within: MINUTE, for_: HOUR });
        let (gate, _) = gate_of(RuleSet::builder().path_reading(kept).rule(rule).build().unwrap());
        ban(&gate);
        let any = Facts::new("GET", "/a%2Fb").path_reading(PathReading::default());
        let outcome = gate.decide_now(&any).unwrap();
        assert!(matches!(outcome.refusal(), Some(Refusal::Banned { .. })), "{:?}", outcome.refusal());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let explained = runtime.block_on(gate.explain(&any));
        assert!(matches!(explained.refusal, Some(Refusal::Banned { .. })), "{explained:?}");
    };
    banned(&|gate| {
        assert!(get(gate, "/a%2Fb").is_allowed() && !get(gate, "/a%2Fb").is_allowed());
    });
    banned(&|gate| operator_ban(gate, "/a%2Fb"));
}

#[test]
fn the_key_that_is_counted_is_the_first_reading() {
    let (gate, _) = gate([per_path(10)]);
    assert_eq!(remaining(&get(&gate, "/a%2Fb")), 9);
    assert_eq!(remaining(&get(&gate, "/a/b")), 8);
    let struck = per_path(1).matching(Match::everything()).ban(Ban { after: 2, within: HOUR, for_: HOUR });
    let (gate, _) = super::gate([struck]);
    assert!(get(&gate, "/a;x").is_allowed());
    assert_eq!(get(&gate, "/a;x").refusal(), Some(&Refusal::Limited));
    assert!(matches!(get(&gate, "/a;y").refusal(), Some(Refusal::Banned { .. })));
    assert!(get(&gate, "/b").is_allowed());
}

#[test]
fn a_check_by_name_uses_the_strictest_reading_too() {
    let (gate, _) = gate([per_path(100).key_limit(&["/bulk"], FixedWindow::new(1000, MINUTE))]);
    let quota = |path: &str| match gate.check_by_name("per-path", &[path.as_bytes()], 1).unwrap() {
        tollgate_rules::Check::Ready(outcome) => quota(&outcome),
        tollgate_rules::Check::Pending(_) => panic!("in memory"),
    };
    assert_eq!((quota("/bulk"), quota("/bulk;x"), quota("/bulk/")), (1000, 100, 1000));
}

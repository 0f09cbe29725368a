//! Rules on a real Redis: the same outcomes as in memory, shared by several gates.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail as tests do")]

mod bans;
mod by_name;
mod counting_after;
mod on_two_stores;
mod pending;
mod refunds;
mod reservations;
mod rotation;

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tollgate::redis::RedisLimiter;
use tollgate::{
    Ban, Consistency, FixedWindow, HOUR, Limit, OnStoreFailure, Rate, Settlement, SlidingWindowLog, TokenBucket,
};
use tollgate_http::Refusal;
use tollgate_rules::{Cost, Facts, Gate, KeyPart, Match, Mode, Outcome, Rule, RuleSet, StatusSet};

fn user() -> KeyPart {
    KeyPart::header("x-user-id")
}

/// A rule of a fixed window that does not end during a test.
fn rule(name: &str, limit: u64) -> Rule {
    Rule::new(Limit::new(name, FixedWindow::new(limit, LONG_WINDOW)).unwrap())
}

fn rule_set(rules: impl IntoIterator<Item = Rule>) -> RuleSet {
    rules.into_iter().fold(RuleSet::builder(), |builder, rule| builder.rule(rule)).build().unwrap()
}

async fn gate(server: &RedisServer, rules: impl IntoIterator<Item = Rule>) -> Gate {
    let settings = RedisLimiter::builder(server.url()).store_timeout(Duration::from_secs(5));
    Gate::on_redis(rule_set(rules), settings).await.unwrap()
}

async fn check(gate: &Gate, path: &str, user: &str) -> Outcome {
    let headers: HeaderMap =
        [(HeaderName::from_static("x-user-id"), HeaderValue::from_str(user).unwrap())].into_iter().collect();
    gate.decide(&Facts::new("GET", path).headers(&headers)).await
}

fn remaining(outcome: &Outcome) -> u64 {
    outcome.decision().expect("a limit matched").remaining()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_gates_share_limits_and_a_denial_takes_nothing_from_the_others() {
    let server = RedisServer::start();
    let rules = || {
        let endpoint = Match::everything().path("/api/expensive");
        [
            rule("global", 10_000),
            rule("user", 100).key(user()),
            rule("endpoint", 10).matching(endpoint).key(user()).key(KeyPart::path()),
        ]
    };
    let gates = [gate(&server, rules()).await, gate(&server, rules()).await];
    for left in (0..10).rev() {
        let outcome = check(&gates[left as usize % 2], "/api/expensive", "ann").await;
        assert_eq!((outcome.limit(), remaining(&outcome)), (Some("endpoint"), left));
    }
    for gate in &gates {
        let denied = check(gate, "/api/expensive", "ann").await;
        assert_eq!((denied.refusal(), denied.limit()), (Some(&Refusal::Limited), Some("endpoint")));
    }
    let elsewhere = check(&gates[0], "/api/cheap", "ann").await;
    assert_eq!((elsewhere.limit(), remaining(&elsewhere)), (Some("user"), 89));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ban_on_one_gate_is_a_ban_on_all() {
    let server = RedisServer::start();
    let rules = || [rule("login", 1).key(user()).ban(Ban { after: 3, within: HOUR, for_: 2 * HOUR })];
    let gates = [gate(&server, rules()).await, gate(&server, rules()).await];
    assert!(check(&gates[0], "/", "eve").await.is_allowed());
    for turn in 0..2 {
        assert_eq!(check(&gates[turn % 2], "/", "eve").await.refusal(), Some(&Refusal::Limited), "{turn}");
    }
    // The denial that causes the ban reports it, and so does every later one on every gate.
    for gate in [&gates[0], &gates[1], &gates[0]] {
        let banned = check(gate, "/", "eve").await;
        assert!(matches!(banned.refusal(), Some(Refusal::Banned { retry_after }) if *retry_after > HOUR), "{banned:?}");
        assert_eq!((banned.limit(), remaining(&banned)), (Some("login"), 0));
    }
    assert!(check(&gates[1], "/", "ann").await.is_allowed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_within_a_leased_limit_is_not_banned() {
    let server = RedisServer::start();
    let ban = Ban { after: 3, within: HOUR, for_: 2 * HOUR };
    let leased =
        || Limit::new("login", FixedWindow::new(100, LONG_WINDOW)).unwrap().with_consistency(Consistency::Leased);
    let rules = || [Rule::new(leased()).key(user()).ban(ban)];
    let gates = [gate(&server, rules()).await, gate(&server, rules()).await];
    for user in ["ann", "bob", "eve"] {
        // One gate takes most of the quota, then the other takes the rest.
        for turn in 0..100 {
            let outcome = check(&gates[turn / 80], "/", user).await;
            assert!(outcome.is_allowed(), "{user}, request {turn}: {outcome:?}");
        }
        for _ in 0..2 {
            assert_eq!(check(&gates[1], "/", user).await.refusal(), Some(&Refusal::Limited));
        }
        assert!(matches!(check(&gates[0], "/", user).await.refusal(), Some(Refusal::Banned { .. })));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_share_the_count_of_a_key() {
    let server = RedisServer::start();
    let rule = rule("user", 10)
        .key(user())
        .plan(KeyPart::custom(|request| request.path().strip_prefix('/').map(Into::into)))
        .plan_limit("gold", FixedWindow::new(1000, LONG_WINDOW))
        .key_limit(&["vip"], FixedWindow::new(5000, LONG_WINDOW));
    let gate = gate(&server, [rule]).await;
    assert_eq!(remaining(&check(&gate, "/free", "ann").await), 9);
    assert_eq!(remaining(&check(&gate, "/gold", "ann").await), 998);
    assert_eq!(remaining(&check(&gate, "/free", "ann").await), 7);
    assert_eq!(remaining(&check(&gate, "/free", "vip").await), 4999);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shadow_rule_is_checked_with_the_others() {
    let server = RedisServer::start();
    let gate = gate(&server, [rule("new", 1).key(user()).mode(Mode::Shadow), rule("old", 5).key(user())]).await;
    let mut would = Vec::new();
    for _ in 0..3 {
        let outcome = check(&gate, "/", "ann").await;
        assert!(outcome.is_allowed());
        would.extend(outcome.shadow_decisions().map(|(name, decision)| (name.to_owned(), decision.is_allowed())));
    }
    assert_eq!(would, [("new".into(), true), ("new".into(), false), ("new".into(), false)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn costs_are_settled_on_the_store() {
    let server = RedisServer::start();
    let tokens = Rule::new(Limit::new("tokens", SlidingWindowLog::new(1000, HOUR)).unwrap()).key(user());
    let gate = gate(&server, [tokens.cost(Cost::constant(500))]).await;
    let outcome = check(&gate, "/", "ann").await;
    assert_eq!(outcome.settle(120).await, Settlement::Settled);
    assert_eq!(outcome.settle(0).await, Settlement::AlreadySettled);
    assert_eq!(outcome.refund().await, Settlement::AlreadySettled);
    let outcome = check(&gate, "/", "ann").await;
    assert_eq!(remaining(&outcome), 380);
    assert_eq!(outcome.settle(2000).await, Settlement::Owed { units: 1120 });
    assert!(!check(&gate, "/", "ann").await.is_allowed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn rules_are_replaced_under_load_without_a_wrong_decision() {
    let server = RedisServer::start();
    let gate = gate(&server, [rule("user", 1000).key(user())]).await;
    let asking: Vec<_> = (0..8)
        .map(|_| {
            let gate = gate.clone();
            tokio::spawn(async move {
                let mut admitted = 0;
                for _ in 0..250 {
                    let outcome = check(&gate, "/", "ann").await;
                    let quota = outcome.decision().map(tollgate::Decision::quota);
                    assert!(matches!(quota, Some(1000 | 700)), "{quota:?}");
                    admitted += u64::from(outcome.is_allowed());
                }
                admitted
            })
        })
        .collect();
    for turn in 0..40 {
        let other = rule(&format!("other-{turn}"), 1_000_000).matching(Match::everything().method("POST"));
        let limit = if turn % 2 == 0 { 700 } else { 1000 };
        gate.replace(rule_set([other, rule("user", limit).key(user())])).unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut admitted = 0;
    for task in asking {
        admitted += task.await.unwrap();
    }
    while check(&gate, "/", "ann").await.is_allowed() {
        admitted += 1;
    }
    assert_eq!(admitted, 1000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_its_store_a_gate_decides_by_policy() {
    let mut server = RedisServer::start();
    let deny =
        Limit::new("deny", FixedWindow::new(5, LONG_WINDOW)).unwrap().with_on_store_failure(OnStoreFailure::Deny);
    let settings = RedisLimiter::builder(server.url());
    let rules = rule_set([Rule::new(deny).matching(Match::everything().path("/deny")), rule("local", 2).key(user())]);
    let gate = Gate::on_redis(rules, settings).await.unwrap();
    server.kill();
    let refused = check(&gate, "/deny", "ann").await;
    assert_eq!(refused.refusal(), Some(&Refusal::StoreUnavailable));
    assert_eq!(refused.response(&HeaderMap::new()).unwrap().status(), 503);
    let allowed = [check(&gate, "/", "bob").await, check(&gate, "/", "bob").await, check(&gate, "/", "bob").await];
    assert_eq!(allowed.map(|outcome| outcome.is_allowed()), [true, true, false]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_explanation_has_the_state_of_the_store_and_takes_nothing() {
    let server = RedisServer::start();
    let leased = Limit::new("leased", FixedWindow::new(10, LONG_WINDOW)).unwrap().with_consistency(Consistency::Leased);
    let gate = gate(&server, [rule("user", 3), Rule::new(leased).matching(Match::everything().method("POST"))]).await;
    let facts = Facts::new("GET", "/");
    let _ = gate.decide(&facts).await;
    for _ in 0..2 {
        let explained = gate.explain(&facts).await;
        assert!(explained.allowed);
        let tollgate_rules::RuleState::Counted { decision: Some(decision), .. } = &explained.rules[0].state else {
            panic!("{explained:?}")
        };
        // After this request there would be one left.
        assert_eq!((decision.is_allowed(), decision.remaining()), (true, 1));
        assert!(
            matches!(&explained.rules[1].state, tollgate_rules::RuleState::NotMatched(why) if why == "method is not POST")
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_estimate_is_never_taken_from_a_lease() {
    let server = RedisServer::start();
    let leased =
        Limit::new("tokens", FixedWindow::new(10_000, LONG_WINDOW)).unwrap().with_consistency(Consistency::Leased);
    let gate = gate(&server, [Rule::new(leased).key(user()).cost(Cost::constant(2))]).await;
    for _ in 0..50 {
        let outcome = check(&gate, "/", "ann").await;
        assert_eq!(outcome.settle(10).await, Settlement::Settled);
    }
    let explained = gate.explain(&Facts::new("GET", "/")).await;
    assert!(explained.allowed);
    let left = check(&gate, "/", "ann").await;
    assert_eq!(remaining(&left), 10_000 - 50 * 10 - 2);
}

/// Returns the remaining units of a limit once leases have been given back.
async fn left(gate: &Gate, limit: &str, key: &[&[u8]]) -> u64 {
    gate.redis().expect("on Redis").return_leases().await;
    remaining(&gate.check_by_name(limit, key, 0).unwrap().outcome().await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_limit_uses_its_lease_beside_a_limit_that_is_settled() {
    let server = RedisServer::start();
    let leased =
        Limit::new("global", FixedWindow::new(10_000, LONG_WINDOW)).unwrap().with_consistency(Consistency::Leased);
    let failures = rule("failures", 10_000).key(user()).count(StatusSet::failures());
    let gate = gate(&server, [Rule::new(leased), failures]).await;
    for turn in 0..200 {
        let outcome = check(&gate, "/", "ann").await;
        let status = if turn % 4 == 0 { http::StatusCode::BAD_GATEWAY } else { http::StatusCode::OK };
        assert_eq!(outcome.settle_response(status, &HeaderMap::new()).await, Settlement::Settled);
    }
    assert!(gate.redis().expect("on Redis").stats().leased > 0);
    assert_eq!(left(&gate, "global", &[]).await, 10_000 - 200);
    assert_eq!(left(&gate, "failures", &[b"ann"]).await, 10_000 - 50);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_beside_a_lease_returns_all_units() {
    let server = RedisServer::start();
    // Almost nothing is refilled.
    let leased = Limit::new("global", TokenBucket::new(10_000, Rate::per_day(10_000))).unwrap();
    let leased = leased.with_consistency(Consistency::Leased);
    let gate = gate(&server, [Rule::new(leased), rule("user", 10_000).key(user())]).await;
    let (mut out_of_leases, mut before) = (0, 0);
    for _ in 0..200 {
        let outcome = check(&gate, "/", "ann").await;
        let now = gate.redis().expect("on Redis").stats().leased;
        out_of_leases += now - before;
        before = now;
        assert_eq!(outcome.refund().await, Settlement::Settled);
    }
    assert!(out_of_leases > 0);
    assert_eq!(left(&gate, "user", &[b"ann"]).await, 10_000);
    // The leased bucket holds back one unit. The refund went to the lease.
    let spent = 10_000 - left(&gate, "global", &[]).await;
    assert!(spent <= 10, "{spent}, {out_of_leases} out of leases");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ban_follows_the_policy_of_its_limit_while_the_store_fails() {
    let mut server = RedisServer::start();
    let allowing =
        Limit::new("login", FixedWindow::new(5, LONG_WINDOW)).unwrap().with_on_store_failure(OnStoreFailure::Allow);
    let ban = Ban { after: 3, within: HOUR, for_: HOUR };
    let settings = RedisLimiter::builder(server.url()).on_store_failure(OnStoreFailure::Deny);
    let gate = Gate::on_redis(rule_set([Rule::new(allowing).ban(ban)]), settings).await.unwrap();
    server.kill();
    let outcome = gate.decide(&Facts::new("GET", "/")).await;
    assert!(outcome.is_allowed(), "{outcome:?}");
    assert_eq!(remaining(&outcome), 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_matches_no_rule_is_allowed_at_once() {
    let server = RedisServer::start();
    let gate = gate(&server, [rule("posts", 1).matching(Match::everything().method("POST"))]).await;
    assert!(gate.decide_now(&Facts::new("GET", "/")).is_some_and(|outcome| outcome.is_allowed()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_settle_limits_on_redis_and_each_gate_has_its_own_permits() {
    let server = RedisServer::start();
    let rules = || {
        let leased =
            Limit::new("leased", FixedWindow::new(1000, LONG_WINDOW)).unwrap().with_consistency(Consistency::Leased);
        [
            rule("failures", 10).count(StatusSet::failures()),
            Rule::new(leased).cost(Cost::constant(100)).settle_by("x-cost"),
            Rule::in_flight("at-once", 1).unwrap().key(user()),
        ]
    };
    let gates = [gate(&server, rules()).await, gate(&server, rules()).await];
    let cost: HeaderMap = [(HeaderName::from_static("x-cost"), HeaderValue::from_static("30"))].into_iter().collect();
    for (turn, status) in [200, 404, 200, 503].into_iter().enumerate() {
        let outcome = check(&gates[turn % 2], "/", "ann").await;
        assert!(outcome.is_allowed() && outcome.awaits_response());
        let status = http::StatusCode::from_u16(status).unwrap();
        assert_eq!(outcome.settle_response(status, &cost).await, Settlement::Settled);
    }
    for (limit, left) in [("failures", 8), ("leased", 880)] {
        assert_eq!(remaining(&gates[0].check_by_name(limit, &[], 0).unwrap().outcome().await), left, "{limit}");
    }
    let held = check(&gates[0], "/", "ann").await.take_permit();
    let refused = check(&gates[0], "/", "ann").await;
    assert_eq!((held.is_some(), refused.limit()), (true, Some("at-once")));
    assert!(check(&gates[1], "/", "ann").await.is_allowed());
    assert_eq!(remaining(&gates[1].check_by_name("failures", &[], 0).unwrap().outcome().await), 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_permit_is_held_without_limits_on_redis() {
    let server = RedisServer::start();
    let gate = gate(&server, [Rule::in_flight("at-once", 1).unwrap().key(user())]).await;
    let mut outcome = check(&gate, "/", "ann").await;
    let held = outcome.take_permit();
    assert!(held.is_some() && !check(&gate, "/", "ann").await.is_allowed());
    drop(held);
    assert!(check(&gate, "/", "ann").await.is_allowed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cached_denial_costs_no_token_verification() {
    use tollgate_rules::TokenStatus;

    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("secret"), "a secret of at least thirty-two bytes").unwrap();
    let path = folder.path().join("tollgate.yaml");
    let text = "jwt: { key_file: secret, algorithms: [HS256] }
limits:
  - { name: per-user, key: 'jwt:sub', algorithm: fixed_window, limit: 100, window: 10220d }
  - { name: per-ip, key: ip, algorithm: fixed_window, limit: 1, window: 10220d, ban: { after: 3, within: 1h, for: 2h } }
";
    std::fs::write(&path, text).unwrap();
    let rules = tollgate_config::RuleFile::load(&path).unwrap().compile().unwrap();
    let settings = RedisLimiter::builder(server.url()).store_timeout(Duration::from_secs(5));
    let gate = Gate::on_redis(rules, settings).await.unwrap();
    let check_from = async |peer: [u8; 4], number: u64| {
        let claims = serde_json::json!({ "sub": number });
        let key = jsonwebtoken::EncodingKey::from_secret(b"another secret of at least thirty-two bytes");
        let token = jsonwebtoken::encode(&jsonwebtoken::Header::default(), &claims, &key).unwrap();
        let value = HeaderValue::from_str(&format!("Bearer {token}")).unwrap();
        let headers = HeaderMap::from_iter([(http::header::AUTHORIZATION, value)]);
        gate.decide(&Facts::new("GET", "/").headers(&headers).peer(peer.into())).await
    };
    // A node caches denials only once it has subscribed to resets.
    let mut tries = 100..3_000;
    while check_from([192, 0, 2, 2], tries.next().expect("the node caches denials")).await.token()
        != TokenStatus::NotRead
    {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let check = async |number: u64| check_from([192, 0, 2, 1], number).await;
    assert!(check(0).await.is_allowed());
    // The node has cached the denial, or does so after one denied request.
    assert_eq!(check(1).await.refusal(), Some(&Refusal::Limited));
    let known = check(2).await;
    assert_eq!((known.refusal(), known.limit()), (Some(&Refusal::Limited), Some("per-ip")));
    assert_eq!((known.token(), known.signatures_verified()), (TokenStatus::NotRead, 0));
    // Each denial was one strike, and the third bans.
    for number in 3..6 {
        let banned = check(number).await;
        assert!(matches!(banned.refusal(), Some(Refusal::Banned { .. })), "{number}: {banned:?}");
        assert_eq!((banned.token(), banned.signatures_verified()), (TokenStatus::NotRead, 0));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cached_denial_does_not_use_up_units_of_a_lease() {
    let server = RedisServer::start();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("secret"), "a secret of at least thirty-two bytes").unwrap();
    let path = folder.path().join("tollgate.yaml");
    // With a rule that reads tokens, cached denials are answered before the token is verified.
    let text = "jwt: { key_file: secret, algorithms: [HS256] }
limits:
  - { name: per-user, key: 'jwt:sub', algorithm: fixed_window, limit: 100, window: 10220d }
  - { name: site, key: 'header:x-site', algorithm: fixed_window, limit: 4000, window: 10220d, consistency: leased }
";
    std::fs::write(&path, text).unwrap();
    let rules = tollgate_config::RuleFile::load(&path).unwrap().compile().unwrap();
    let settings = RedisLimiter::builder(server.url()).store_timeout(Duration::from_secs(5));
    let gate = Gate::on_redis(rules, settings).await.unwrap();
    let peek =
        async |site: &str| remaining(&gate.check_by_name("site", &[site.as_bytes()], 0).unwrap().outcome().await);
    let mut unspent = Vec::new();
    for round in 0..3 {
        let site = format!("site-{round}");
        let value = HeaderValue::from_str(&site).unwrap();
        let headers = HeaderMap::from_iter([(HeaderName::from_static("x-site"), value)]);
        let facts = Facts::new("GET", "/").headers(&headers);
        let mut admitted = 0;
        while admitted < 1_500 && gate.decide(&facts).await.is_allowed() {
            admitted += 1;
        }
        // Another process takes the rest of the quota, while this one has a lease.
        let rest = peek(&site).await;
        let taken = gate.check_by_name("site", &[site.as_bytes()], rest).unwrap().outcome().await;
        admitted += if taken.is_allowed() { rest } else { 0 };
        while gate.decide(&facts).await.is_allowed() {
            admitted += 1;
        }
        unspent.push(4_000 - peek(&site).await - admitted);
    }
    // On a machine that pauses, a lease may expire, but not every time.
    assert!(unspent.contains(&0), "units in leases when a request was denied: {unspent:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_limit_that_the_store_decided_is_listed() {
    let server = RedisServer::start();
    let rules = || [rule("wide", 100).key(user()), rule("narrow", 5).key(user()).cost(Cost::constant(2))];
    let gates = [gate(&server, rules()).await, gate(&server, rules()).await];
    let each = async |gate: &Gate| {
        let outcome = check(gate, "/", "ann").await;
        let each = outcome.each_limit().into_iter();
        each.map(|(name, own)| (name.to_owned(), own.is_allowed(), own.remaining())).collect::<Vec<_>>()
    };
    let wide = |left| ("wide".to_owned(), true, left);
    let narrow = |is_allowed, left| ("narrow".to_owned(), is_allowed, left);
    assert_eq!(each(&gates[0]).await, [wide(99), narrow(true, 3)]);
    assert_eq!(each(&gates[0]).await, [wide(98), narrow(true, 1)]);
    // Redis decides. Nothing was taken from the other limit.
    assert_eq!(each(&gates[1]).await, [wide(98), narrow(false, 1)]);
    // Here, the denial is known without a call, which says nothing about the other limit.
    assert_eq!(each(&gates[0]).await, [narrow(false, 1)]);
}

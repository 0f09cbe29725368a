//! Bans of rules count the same strikes on Redis as in memory, whichever part of this process denies.

use tollgate::{Checks, JointCheck, MINUTE, ManualClock, Source, Timestamp};

use super::*;

const START: Timestamp = Timestamp::from_secs(1_700_000_000);

fn opened(name: &str, quota: u64, window: Duration) -> Rule {
    Rule::new(Limit::new(name, FixedWindow::new(quota, window).from_first_request()).unwrap()).key(user())
}

fn ban(after: u64) -> Ban {
    Ban { after, within: 48 * HOUR, for_: 72 * HOUR }
}

/// Gates with these rules and a manual clock: in memory and on Redis.
async fn both(server: &RedisServer, rules: impl Fn() -> Vec<Rule>) -> [(Gate, ManualClock); 2] {
    let clocks = [ManualClock::at(START), ManualClock::at(START)];
    let settings = RedisLimiter::builder(server.url()).store_timeout(Duration::from_secs(5)).clock(clocks[1].clone());
    let memory = tollgate::Limiter::builder().clock(clocks[0].clone());
    let memory = Gate::with_limiter(rule_set(rules()), memory).unwrap();
    let [first, second] = clocks;
    [(memory, first), (Gate::on_redis(rule_set(rules()), settings).await.unwrap(), second)]
}

fn is_banned(outcome: &Outcome) -> bool {
    matches!(outcome.refusal(), Some(Refusal::Banned { .. }))
}

fn said(outcome: &Outcome) -> (Option<&str>, Option<&Refusal>, Option<Duration>) {
    (outcome.limit(), outcome.refusal(), outcome.decision().and_then(|decision| decision.retry_after()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_stores_count_the_strikes_of_every_exhausted_limit() {
    let server = RedisServer::start();
    let rules = || {
        vec![
            opened("daily", 2, 24 * HOUR),
            opened("per-minute", 1, MINUTE).ban(ban(3)),
            opened("hourly", 2, HOUR).ban(ban(5)),
        ]
    };
    let [(memory, first), (redis, second)] = both(&server, rules).await;
    for turn in 0..20_u64 {
        let outcomes = [check(&memory, "/", "eve").await, check(&redis, "/", "eve").await];
        assert_eq!(said(&outcomes[0]), said(&outcomes[1]), "{turn}");
        let step = if turn % 4 == 0 { MINUTE } else { MINUTE / 4 };
        first.advance(step);
        second.advance(step);
    }
    assert!(is_banned(&check(&redis, "/", "eve").await), "the loop has banned the key");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exhausted_limit_counts_its_strike_if_too_many_requests_are_in_flight() {
    let server = RedisServer::start();
    let rules = || vec![Rule::in_flight("at-once", 1).unwrap(), opened("per-minute", 1, MINUTE).ban(ban(3))];
    for (gate, _) in both(&server, rules).await {
        let mut held = check(&gate, "/", "eve").await;
        let _permit = held.take_permit().unwrap();
        for _ in 0..2 {
            let denied = check(&gate, "/", "eve").await;
            assert_eq!((denied.limit(), denied.refusal()), (Some("at-once"), Some(&Refusal::Limited)));
        }
        let banned = check(&gate, "/", "eve").await;
        assert_eq!(banned.limit(), Some("per-minute"), "{banned:?}");
        assert!(is_banned(&banned));
        // Another client has its own strikes, and a limit that would allow the request counts none.
        for _ in 0..5 {
            assert_eq!(check(&gate, "/", "ann").await.refusal(), Some(&Refusal::Limited));
        }
        drop(_permit);
        assert!(check(&gate, "/", "ann").await.is_allowed());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joint_checks_count_the_strikes_of_every_exhausted_limit() {
    let server = RedisServer::start();
    let rules =
        || vec![opened("daily", 1, 24 * HOUR), opened("per-minute", 1, MINUTE).ban(ban(2)), opened("other", 9, HOUR)];
    for (gate, _) in both(&server, rules).await {
        assert!(check(&gate, "/", "eve").await.is_allowed());
        let headers: HeaderMap =
            [(HeaderName::from_static("x-user-id"), HeaderValue::from_static("eve"))].into_iter().collect();
        let facts = Facts::new("GET", "/").headers(&headers);
        for turn in 0..3 {
            let other = JointCheck::Named { rule: "other", key: &[b"ann"], cost: 1 };
            let checks: Checks = gate.check_together(&[JointCheck::Request(&facts), other]).unwrap();
            let outcomes = checks.outcomes().await;
            assert_eq!((is_banned(&outcomes[0]), is_banned(&outcomes[1])), (turn > 0, false), "{turn}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_malformed_request_is_a_strike_in_every_ban() {
    let server = RedisServer::start();
    let by_ip = |name: &str, after| rule(name, 100).key(KeyPart::ip()).ban(ban(after));
    for (gate, _) in both(&server, || vec![by_ip("first", 1), by_ip("second", 3)]).await {
        for _ in 0..3 {
            let _ = gate.strike(&Facts::new("GET", "/").peer([192, 0, 2, 7].into())).outcome().await;
        }
        let second = gate.check_by_name("second", &[b"192.0.2.7"], 0).unwrap().outcome().await;
        assert!(is_banned(&second), "{second:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exhausted_limit_counts_its_strike_although_the_denial_is_cached() {
    let server = RedisServer::start();
    // Long enough that a busy machine does not run out of strikes before the denial is in the cache.
    let rules = [rule("long", 1).key(user()), opened("short", 1, 24 * HOUR).ban(ban(2_000))];
    let gate = gate(&server, rules).await;
    assert!(check(&gate, "/", "eve").await.is_allowed());
    let (mut denials, mut cached) = (0, 0);
    loop {
        let denied = check(&gate, "/", "eve").await;
        denials += 1;
        cached += u64::from(denied.decision().unwrap().source() == Source::DenialCache);
        // The window of the other limit is longer than the ban, so its denial is reported.
        assert_eq!(denied.limit(), Some("long"));
        if denials == 1_999 {
            break;
        }
    }
    assert!(cached > 0, "no denial came from the cache");
    let not_yet = gate.check_by_name("short", &[b"eve"], 0).unwrap().outcome().await;
    assert!(!is_banned(&not_yet), "{not_yet:?}");
    let _ = check(&gate, "/", "eve").await;
    let banned = gate.check_by_name("short", &[b"eve"], 0).unwrap().outcome().await;
    assert!(is_banned(&banned), "{banned:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_limits_count_the_strikes_of_every_exhausted_limit() {
    let rules = [rule("long", 1).key(user()), opened("short", 1, 24 * HOUR).ban(ban(3))];
    // Nothing listens here.
    let settings = RedisLimiter::builder("redis://127.0.0.1:1").on_store_failure(OnStoreFailure::Local);
    let gate = Gate::on_redis(rule_set(rules), settings).await.unwrap();
    assert!(check(&gate, "/", "eve").await.is_allowed());
    for _ in 0..3 {
        assert_eq!(check(&gate, "/", "eve").await.limit(), Some("long"));
    }
    let banned = gate.check_by_name("short", &[b"eve"], 0).unwrap().outcome().await;
    assert!(is_banned(&banned), "{banned:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_fails_is_no_strike() {
    let rules = [rule("one", 100).key(user()).ban(ban(1)), rule("other", 100).key(user())];
    let settings = RedisLimiter::builder("redis://127.0.0.1:1").on_store_failure(OnStoreFailure::Deny);
    let gate = Gate::on_redis(rule_set(rules), settings).await.unwrap();
    for _ in 0..3 {
        assert_eq!(check(&gate, "/", "eve").await.refusal(), Some(&Refusal::StoreUnavailable));
    }
}

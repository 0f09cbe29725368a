//! Bans of rules count the same strikes on Redis as in memory, whichever part of this process denies.

use tokio::time::Instant;
use tollgate::{MINUTE, ManualClock, Source, Timestamp};
use tollgate_rules::{Checks, JointCheck, Listing};

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

/// Waits until Redis announces resets to this gate, so that it caches denials. The first limit denies `warm` then.
async fn until_cached(gate: &Gate) {
    for _ in 0..100_000 {
        if check(gate, "/", "warm").await.decision().unwrap().source() == Source::DenialCache {
            return;
        }
    }
    panic!("no denial came from the cache");
}

/// Tries with one user after another. A denial is in the cache for a second, which a busy machine may miss.
async fn with_some_user(attempt: impl AsyncFn(&str) -> bool) {
    for number in 0..1_000 {
        if attempt(&format!("user-{number}")).await {
            return;
        }
    }
    panic!("no attempt succeeded");
}

/// Returns the number of requests that this gate has sent to Redis.
fn sent(gate: &Gate) -> u64 {
    gate.redis().unwrap().stats().requests
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
    let at_once = Rule::in_flight("at-once", 1).unwrap().key(user());
    let gate = gate(&server, [at_once, opened("per-minute", 1, HOUR).ban(ban(1))]).await;
    with_some_user(async |user| {
        let mut held = check(&gate, "/", user).await;
        let _permit = held.take_permit().unwrap();
        let denied = check(&gate, "/", user).await;
        if is_banned(&denied) {
            assert_eq!(denied.limit(), Some("per-minute"));
        }
        is_banned(&denied)
    })
    .await;
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
async fn a_refused_check_counts_the_strikes_of_the_others() {
    let server = RedisServer::start();
    let closed = || rule("closed", 9).key(user()).blocked(Listing::none().key(&["ann"]));
    let rules = || vec![opened("per-minute", 1, HOUR).ban(ban(1)), closed()];
    for gate in [Gate::in_memory(rule_set(rules())).unwrap(), gate(&server, rules()).await] {
        with_some_user(async |user| {
            assert!(gate.check_by_name("per-minute", &[user.as_bytes()], 1).unwrap().outcome().await.is_allowed());
            let named = |rule, key| JointCheck::Named { rule, key, cost: 1 };
            let (key, blocked): ([&[u8]; 1], [&[u8]; 1]) = ([user.as_bytes()], [b"ann"]);
            let checks = gate.check_together(&[named("per-minute", &key), named("closed", &blocked)]).unwrap();
            let outcomes = checks.outcomes().await;
            assert_eq!(outcomes[1].refusal(), Some(&Refusal::Blocked));
            is_banned(&outcomes[0])
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_on_requests_in_flight_keep_no_joint_check_from_counting_its_strikes() {
    let server = RedisServer::start();
    let rules = || {
        let at_once = Rule::in_flight("at-once", 1).unwrap();
        vec![opened("per-minute", 1, MINUTE).ban(ban(2)), at_once, opened("other", 9, HOUR)]
    };
    for (gate, _) in both(&server, rules).await {
        let mut held = check(&gate, "/", "eve").await;
        let _permit = held.take_permit().unwrap();
        let headers: HeaderMap =
            [(HeaderName::from_static("x-user-id"), HeaderValue::from_static("eve"))].into_iter().collect();
        let facts = Facts::new("GET", "/").headers(&headers);
        for turn in 0..2 {
            let other = JointCheck::Named { rule: "other", key: &[b"ann"], cost: 1 };
            let outcomes = gate.check_together(&[JointCheck::Request(&facts), other]).unwrap().outcomes().await;
            assert_eq!((outcomes[0].limit(), is_banned(&outcomes[0])), (Some("per-minute"), turn > 0), "{turn}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exhausted_limit_counts_its_strike_although_the_denial_is_cached() {
    let server = RedisServer::start();
    let gate = gate(&server, [rule("long", 1).key(user()), opened("short", 1, 24 * HOUR).ban(ban(300))]).await;
    until_cached(&gate).await;
    assert!(check(&gate, "/", "eve").await.is_allowed());
    let mut cached = 0;
    for _ in 0..299 {
        let denied = check(&gate, "/", "eve").await;
        cached += u64::from(denied.decision().unwrap().source() == Source::DenialCache);
        // The window of the other limit is longer than the ban, so its denial is reported.
        assert_eq!(denied.limit(), Some("long"));
    }
    assert!(cached > 0, "no denial came from the cache");
    let not_yet = gate.check_by_name("short", &[b"eve"], 0).unwrap().outcome().await;
    assert!(!is_banned(&not_yet), "{not_yet:?}");
    // One of these may be denied at the moment when the cached denial of the other limit expires.
    for _ in 0..5 {
        let _ = check(&gate, "/", "eve").await;
    }
    let banned = gate.check_by_name("short", &[b"eve"], 0).unwrap().outcome().await;
    assert!(is_banned(&banned), "{banned:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_on_an_exhausted_key_asks_redis_nothing_about_limits_with_bans() {
    let server = RedisServer::start();
    let gate = gate(&server, [rule("long", 1).key(user()), opened("short", 100, HOUR).ban(ban(1))]).await;
    until_cached(&gate).await;
    assert!(check(&gate, "/", "eve").await.is_allowed());
    let (before, began) = (sent(&gate), Instant::now());
    for _ in 0..300 {
        assert_eq!(check(&gate, "/", "eve").await.limit(), Some("long"));
    }
    // A cached denial expires after a second.
    let (requests, seconds) = (sent(&gate) - before, began.elapsed().as_secs());
    assert!(requests <= 2 + 2 * seconds, "{requests} requests in {seconds} s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shedding_load_asks_redis_nothing_about_limits_with_bans() {
    let server = RedisServer::start();
    let rules = || vec![Rule::in_flight("at-once", 1).unwrap(), opened("per-minute", 100, MINUTE).ban(ban(1))];
    let [_, (gate, _)] = both(&server, rules).await;
    let mut held = check(&gate, "/", "eve").await;
    let _permit = held.take_permit().unwrap();
    let before = sent(&gate);
    for _ in 0..100 {
        let denied = check(&gate, "/", "eve").await;
        assert_eq!((denied.limit(), denied.refusal()), (Some("at-once"), Some(&Refusal::Limited)));
    }
    assert_eq!(sent(&gate), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_limits_count_their_strikes_although_another_store_denies() {
    let server = RedisServer::start();
    // With an injected clock every denial is by the store, otherwise nearly all are cached.
    for (name, clock) in [("by-store", Some(ManualClock::at(START))), ("cached", None)] {
        let short = Limit::new("short", FixedWindow::new(1, 24 * HOUR).from_first_request()).unwrap();
        let short = Rule::new(short.with_store("gone")).key(user()).ban(ban(3));
        // Nothing listens there.
        let settings = RedisLimiter::builder(server.url()).store("gone", "redis://127.0.0.1:1");
        let settings = settings.on_store_failure(OnStoreFailure::Local).store_timeout(Duration::from_secs(5));
        let settings = match &clock {
            Some(clock) => settings.clock(clock.clone()),
            None => settings,
        };
        let gate = Gate::on_redis(rule_set([opened(name, 1, 96 * HOUR), short]), settings).await.unwrap();
        if clock.is_none() {
            until_cached(&gate).await;
        }
        assert!(check(&gate, "/", "eve").await.is_allowed());
        for turn in 0..3 {
            let not_yet = gate.check_by_name("short", &[b"eve"], 0).unwrap().outcome().await;
            assert!(!is_banned(&not_yet), "{name} {turn}: {not_yet:?}");
            assert_eq!(check(&gate, "/", "eve").await.limit(), Some(name));
        }
        let banned = gate.check_by_name("short", &[b"eve"], 0).unwrap().outcome().await;
        assert!(is_banned(&banned), "{name}: {banned:?}");
    }
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

//! Refunds of requests whose limits took their units from different places: each unit is returned to where it came
//! from.

use std::time::Duration;

use testkit::redis::RedisServer;
use tollgate::redis::RedisLimiter;
use tollgate::{
    Ban, Consistency, FixedWindow, HOUR, Hit, Limit, ManualClock, OnStoreFailure, Rate, Settlement, Source, Timestamp,
    TokenBucket,
};
use tollgate_rules::{Cost, Facts, Gate, KeyPart, Rule, RuleSet};

/// A whole hour.
const START: Timestamp = Timestamp::from_micros(1_700_000_000_000_000 - 1_700_000_000_000_000 % 3_600_000_000);

/// Requests that make a key busy enough for a lease.
const WARM_UP: usize = 50;

/// A rule whose key is the path, which is always the same here.
fn exact(limit: Limit) -> Rule {
    Rule::new(limit).key(KeyPart::path())
}

fn leased(limit: Limit) -> Rule {
    exact(limit.with_consistency(Consistency::Leased))
}

fn window(name: &str, quota: u64) -> Limit {
    Limit::new(name, FixedWindow::new(quota, HOUR)).unwrap()
}

/// A gate with a manual clock, also at the store: leases last until the test moves the clock.
async fn gate(server: &RedisServer, clock: &ManualClock, rules: impl IntoIterator<Item = Rule>) -> Gate {
    let settings = RedisLimiter::builder(server.url())
        .store_timeout(Duration::from_secs(5))
        .on_store_failure(OnStoreFailure::Local)
        .clock(clock.clone());
    let rules = rules.into_iter().fold(RuleSet::builder(), |builder, rule| builder.rule(rule)).build().unwrap();
    Gate::on_redis(rules, settings).await.unwrap()
}

async fn check(gate: &Gate) -> tollgate_rules::Outcome {
    let outcome = gate.decide(&Facts::new("GET", "/")).await;
    assert!(outcome.is_allowed(), "{outcome:?}");
    outcome
}

/// Makes the leased limit busy, and returns how many requests that took.
async fn warm_up(gate: &Gate) -> u64 {
    for _ in 0..WARM_UP {
        _ = check(gate).await;
    }
    assert!(leased_hits(gate) > 0, "the key is busy, and never leased");
    WARM_UP as u64
}

fn leased_hits(gate: &Gate) -> u64 {
    gate.redis().unwrap().stats().leased
}

/// The units that the store has left of a limit.
async fn left(limiter: &RedisLimiter, name: &str) -> u64 {
    let decision = limiter.decide(&[Hit::new(limiter.id(name).unwrap(), "/").cost(0)]).await;
    assert_eq!(decision.source(), Source::Store, "{decision:?}");
    decision.remaining()
}

/// `global` is leased and `user` is exact. Both are refunded, whichever of them the decision reports.
async fn both_are_refunded(global: u64, user: u64, foremost: Source) {
    let server = RedisServer::start();
    let clock = ManualClock::at(START);
    let gate = gate(&server, &clock, [leased(window("global", global)), exact(window("user", user))]).await;
    let spent = warm_up(&gate).await;
    let before = leased_hits(&gate);
    for _ in 0..20 {
        let outcome = check(&gate).await;
        assert_eq!(outcome.decision().unwrap().source(), foremost);
        assert_eq!(outcome.refund().await, Settlement::Settled);
        assert_eq!(outcome.refund().await, Settlement::AlreadySettled);
    }
    assert_eq!(leased_hits(&gate) - before, 20);
    let limiter = gate.redis().unwrap();
    limiter.return_leases().await;
    assert_eq!((left(&limiter, "global").await, left(&limiter, "user").await), (global - spent, user - spent));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exact_limit_is_refunded_if_a_leased_limit_is_reported() {
    both_are_refunded(1_000, 1_000_000, Source::Lease).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_refunded_if_an_exact_limit_is_reported() {
    both_are_refunded(1_000_000, 1_000, Source::Store).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unit_of_a_lease_is_not_refunded_at_the_store() {
    let server = RedisServer::start();
    let clock = ManualClock::at(START);
    let bucket = Limit::new("global", TokenBucket::new(1_000, Rate::per_second(1_000))).unwrap();
    let rules = || [leased(bucket.clone()), exact(window("user", 200))];
    let gate = gate(&server, &clock, rules()).await;
    _ = warm_up(&gate).await;
    // The store has refilled all charged units by now, and the lease lasts for 100 ms.
    clock.advance(Duration::from_millis(90));
    let limiter = gate.redis().unwrap();
    let other = self::gate(&server, &clock, [exact(bucket.clone()).cost(Cost::constant(500))]).await;
    _ = check(&other).await;
    let before = leased_hits(&gate);
    let outcome = check(&gate).await;
    assert_eq!((leased_hits(&gate) - before, outcome.decision().unwrap().source()), (1, Source::Store));
    let left_before = left(&limiter, "global").await;
    assert_eq!(outcome.refund().await, Settlement::Settled);
    assert_eq!(left(&limiter, "global").await, left_before, "the unit was charged and refilled long before");
    // The same once the lease has expired.
    let outcome = check(&gate).await;
    clock.advance(Duration::from_millis(20));
    limiter.return_leases().await;
    let left_before = left(&limiter, "global").await;
    assert_eq!(outcome.refund().await, Settlement::Settled);
    assert_eq!(left(&limiter, "global").await, left_before, "the unit was charged and refilled long before");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unit_of_an_expired_lease_goes_back_to_the_store() {
    let server = RedisServer::start();
    let clock = ManualClock::at(START);
    let gate = gate(&server, &clock, [leased(window("global", 1_000)), exact(window("user", 1_000))]).await;
    let spent = warm_up(&gate).await;
    let before = leased_hits(&gate);
    let outcomes = [check(&gate).await, check(&gate).await];
    assert_eq!(leased_hits(&gate) - before, 2);
    clock.advance(Duration::from_secs(1));
    let limiter = gate.redis().unwrap();
    limiter.return_leases().await;
    assert_eq!(left(&limiter, "global").await, 1_000 - spent - 2);
    for outcome in outcomes {
        assert_eq!(outcome.refund().await, Settlement::Settled);
    }
    assert_eq!((left(&limiter, "global").await, left(&limiter, "user").await), (1_000 - spent, 1_000 - spent));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_is_refunded_while_the_store_fails() {
    let mut server = RedisServer::start();
    let clock = ManualClock::at(START);
    let gate = gate(&server, &clock, [leased(window("global", 1_000_000)), exact(window("user", 1_000))]).await;
    _ = warm_up(&gate).await;
    server.kill();
    let before = leased_hits(&gate);
    for _ in 0..200 {
        let outcome = check(&gate).await;
        assert_eq!(outcome.decision().unwrap().source(), Source::Local);
        assert_eq!(outcome.refund().await, Settlement::Settled);
    }
    assert_eq!(leased_hits(&gate) - before, 200, "the lease is as large as before");
    assert_eq!(check(&gate).await.decision().unwrap().remaining(), 999, "and so is the local count of this process");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_rule_with_a_ban_is_refunded() {
    let server = RedisServer::start();
    let clock = ManualClock::at(START);
    let ban = Ban { after: 3, within: HOUR, for_: 2 * HOUR };
    let gate = gate(&server, &clock, [leased(window("login", 1_000)).ban(ban)]).await;
    for _ in 0..WARM_UP {
        assert_eq!(check(&gate).await.refund().await, Settlement::Settled);
    }
    let limiter = gate.redis().unwrap();
    limiter.return_leases().await;
    assert_eq!(left(&limiter, "login").await, 1_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_rule_alone_is_refunded() {
    let server = RedisServer::start();
    let clock = ManualClock::at(START);
    let gate = gate(&server, &clock, [leased(window("global", 1_000))]).await;
    let spent = warm_up(&gate).await;
    for _ in 0..20 {
        let outcome = check(&gate).await;
        assert_eq!(outcome.decision().unwrap().source(), Source::Lease);
        assert_eq!(outcome.refund().await, Settlement::Settled);
    }
    let limiter = gate.redis().unwrap();
    limiter.return_leases().await;
    assert_eq!(left(&limiter, "global").await, 1_000 - spent);
}

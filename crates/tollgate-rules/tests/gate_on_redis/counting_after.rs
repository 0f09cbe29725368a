//! Limits that count a request only after its response, shared by two gates.

use std::time::Duration;

use http::{HeaderMap, StatusCode};
use testkit::redis::RedisServer;
use tollgate::Settlement;
use tollgate_rules::{Gate, Mode, Outcome, Rule, StatusSet};

use super::{check, gate, remaining, rule, user};

fn logins(limit: u64) -> Rule {
    rule("logins", limit).key(user()).count_after(StatusSet::none().status(StatusCode::UNAUTHORIZED))
}

async fn left(gate: &Gate, limit: &str, key: &[&[u8]]) -> u64 {
    remaining(&gate.check_by_name(limit, key, 0).unwrap().outcome().await)
}

/// Waits until the user has this quota left: a task charges a request without a response.
async fn await_left(gate: &Gate, expected: u64) {
    let charged = async {
        while left(gate, "logins", &[b"ann"]).await != expected {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), charged).await.expect("the request is charged");
}

async fn respond(outcome: &Outcome, status: u16) {
    outcome.settle_response(StatusCode::from_u16(status).unwrap(), &HeaderMap::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_pass_together_and_responses_that_count_deny_later_ones() {
    let server = RedisServer::start();
    let gates =
        [gate(&server, [logins(5), rule("all", 100)]).await, gate(&server, [logins(5), rule("all", 100)]).await];
    let mut asked = Vec::new();
    for turn in 0..8 {
        asked.push(check(&gates[turn % 2], "/login", "ann").await);
    }
    assert!(asked.iter().all(Outcome::is_allowed));
    for outcome in &asked {
        respond(outcome, 200).await;
    }
    drop(asked);
    assert_eq!(left(&gates[0], "logins", &[b"ann"]).await, 5);
    for turn in 0..5 {
        let outcome = check(&gates[turn % 2], "/login", "ann").await;
        assert!(outcome.is_allowed());
        respond(&outcome, 401).await;
    }
    for gate in &gates {
        // The second one is answered from the denial cache.
        for _ in 0..2 {
            let denied = check(gate, "/login", "ann").await;
            assert_eq!((denied.is_allowed(), denied.limit()), (false, Some("logins")));
        }
    }
    assert_eq!(left(&gates[0], "all", &[]).await, 87, "a denied request takes nothing from other limits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_another_limit_denies_is_not_counted() {
    let server = RedisServer::start();
    let gate = gate(&server, [logins(5), rule("all", 1)]).await;
    respond(&check(&gate, "/login", "ann").await, 200).await;
    let denied = check(&gate, "/login", "ann").await;
    assert_eq!((denied.is_allowed(), denied.limit()), (false, Some("all")));
    drop(denied);
    assert_eq!(left(&gate, "logins", &[b"ann"]).await, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_without_a_response_is_charged_unless_it_is_refunded() {
    let server = RedisServer::start();
    let gate = gate(&server, [logins(5)]).await;
    let unserved = check(&gate, "/login", "ann").await;
    unserved.refund().await;
    drop(unserved);
    drop(check(&gate, "/login", "ann").await);
    await_left(&gate, 4).await;
    // A response that is being settled when its client leaves is charged.
    let outcome = check(&gate, "/login", "ann").await;
    let settling = Box::pin(respond(&outcome, 401));
    _ = futures_util::future::poll_immediate(settling).await;
    drop(outcome);
    await_left(&gate, 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_in_shadow_mode_counts_after_the_response_too() {
    let server = RedisServer::start();
    let gate = gate(&server, [logins(1).mode(Mode::Shadow), rule("all", 9)]).await;
    let asked = [check(&gate, "/", "ann").await, check(&gate, "/", "ann").await];
    let is_shadow_allowed = |outcome: &Outcome| outcome.shadow_decisions().all(|(_, decision)| decision.is_allowed());
    assert!(asked.iter().all(is_shadow_allowed));
    respond(&asked[0], 401).await;
    respond(&asked[1], 200).await;
    drop(asked);
    let third = check(&gate, "/", "ann").await;
    assert!(third.is_allowed() && !is_shadow_allowed(&third));
    respond(&third, 401).await;
    assert_eq!(left(&gate, "all", &[]).await, 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_of_requests_that_passed_together_are_owed() {
    let server = RedisServer::start();
    let gate = gate(&server, [logins(5)]).await;
    let mut asked = Vec::new();
    for _ in 0..8 {
        asked.push(check(&gate, "/login", "ann").await);
    }
    let mut settled = Vec::new();
    for outcome in &asked {
        settled.push(outcome.settle_response(StatusCode::UNAUTHORIZED, &HeaderMap::new()).await);
    }
    assert_eq!(settled[..5], [Settlement::Settled; 5]);
    assert_eq!(settled[5..], [Settlement::Owed { units: 1 }; 3]);
}

//! Leases end with the charge on Redis that they came from: after a reset or a lost connection, nothing is given back.

use std::time::Duration;

use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tokio::time::Instant;
use tollgate::redis::RedisLimiter;
use tollgate::{FixedWindow, Source};

use super::node;
use crate::load::{RECOVERY, until};

const QUOTA: u64 = 1_000;
/// More than a lease may have, so that the store decides.
const LARGE: u64 = QUOTA / 2;

fn window() -> FixedWindow {
    FixedWindow::new(QUOTA, LONG_WINDOW)
}

/// Uses the key until this process holds a lease that is larger than the units it used.
async fn hold_a_lease(node: &RedisLimiter, key: &str) {
    let _ = until(node, key, RECOVERY, |decision| decision.source() == Source::Lease).await;
    for _ in 0..40 {
        let _ = node.check(key).await;
    }
}

async fn left(node: &RedisLimiter, key: &str) -> u64 {
    node.peek(key).await.expect("the store answers").remaining()
}

fn subscribers(server: &RedisServer) -> u64 {
    let reply: (String, u64) = redis::cmd("PUBSUB")
        .arg("NUMSUB")
        .arg("rate_limit:changed")
        .query(&mut server.connection())
        .expect("the server answers");
    reply.1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_by_another_process_drops_leases_without_giving_them_back() {
    let server = RedisServer::start();
    let (here, there) = (node(&server, window()).await, node(&server, window()).await);
    for round in 0..10 {
        let (key, marker) = (format!("key {round}"), format!("marker {round}"));
        assert!(here.check_n(&marker, QUOTA).await.is_allowed());
        while here.check_n(&marker, QUOTA).await.source() != Source::DenialCache {}
        hold_a_lease(&here, &key).await;
        there.reset(&key).await.expect("reset");
        assert!(there.check_n(&key, LARGE).await.is_allowed());
        // Messages arrive in order: once this reset has arrived, so has the other.
        there.reset(&marker).await.expect("reset");
        while !here.check_n(&marker, QUOTA).await.is_allowed() {}
        here.return_leases().await;
        assert_eq!(left(&there, &key).await, QUOTA - LARGE, "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_from_before_a_lost_subscription_are_not_given_back() {
    let server = RedisServer::start();
    let (here, there) = (node(&server, window()).await, node(&server, window()).await);
    for round in 0..5 {
        let key = format!("key {round}");
        hold_a_lease(&here, &key).await;
        let _: u64 = redis::cmd("CLIENT")
            .arg("KILL")
            .arg("TYPE")
            .arg("pubsub")
            .query(&mut server.connection())
            .expect("connections are closed");
        // This process does not receive the message.
        there.reset(&key).await.expect("reset");
        assert!(there.check_n(&key, LARGE).await.is_allowed());
        let began = Instant::now();
        while subscribers(&server) < 2 {
            assert!(began.elapsed() < RECOVERY, "both subscribe again");
        }
        here.return_leases().await;
        // A lease that was requested while the connection was lost stays charged.
        let left = left(&there, &key).await;
        assert!(left <= QUOTA - LARGE, "round {round}: {left} left");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_of_a_lost_connection_are_not_given_back() {
    let server = RedisServer::start();
    let (here, there) = (node(&server, window()).await, node(&server, window()).await);
    for round in 0..5 {
        let key = format!("key {round}");
        hold_a_lease(&here, &key).await;
        let mut connection = server.connection();
        let _: u64 = redis::cmd("CLIENT")
            .arg("KILL")
            .arg("TYPE")
            .arg("normal")
            .query(&mut connection)
            .expect("connections are closed");
        // As after a failover that lost the charge.
        let () = redis::cmd("FLUSHALL").query(&mut connection).expect("flushed");
        while !there.is_store_available() || left_or_none(&there, &key).await.is_none() {}
        assert!(there.check_n(&key, LARGE).await.is_allowed());
        here.return_leases().await;
        // A lease that was requested while the connection was lost stays charged.
        let left = left(&there, &key).await;
        assert!(left <= QUOTA - LARGE, "round {round}: {left} left");
    }
}

async fn left_or_none(node: &RedisLimiter, key: &str) -> Option<u64> {
    node.peek(key).await.ok().map(|decision| decision.remaining())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn costs_too_large_for_a_lease_cause_no_leases() {
    let server = RedisServer::start();
    let node = node(&server, window()).await;
    for round in 0..10 {
        let key = format!("key {round}");
        assert!(node.check_n(&key, LARGE).await.is_allowed());
        for _ in 0..2 {
            assert_eq!(node.check(&key).await.source(), Source::Store, "round {round}: the key is quiet");
        }
    }
    assert_eq!(node.stats().leased, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exhausted_window_is_called_again_after_the_pause_of_its_lease() {
    let server = RedisServer::start();
    let node = node(&server, window()).await;
    while node.check("key").await.is_allowed() {}
    let (before, began) = (node.stats().requests, Instant::now());
    let sent = || node.stats().requests - before;
    while sent() < 8 && began.elapsed() < Duration::from_secs(6) {
        let _ = node.check("key").await;
        tokio::task::yield_now().await;
    }
    // A pause is at most 160 ms. With a cached denial there would be one request per second.
    assert!(sent() >= 8, "sent {} requests", sent());
}

//! Other data under the keys that nodes share: it is refused before it is read.

use std::time::Duration;

use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tollgate::redis::{RedisLimiter, RuleSets};
use tollgate::{FixedWindow, Limit, OnStoreFailure, Source};

use super::limiter;

const HOUR: Duration = Duration::from_secs(3600);

async fn limiter_at(server: &RedisServer) -> RedisLimiter {
    limiter(&server.url(), Limit::new("user", FixedWindow::new(10, LONG_WINDOW)).expect("valid")).await
}

fn run(server: &RedisServer, words: &[&[u8]]) {
    let mut command = redis::Cmd::new();
    words.iter().for_each(|word| _ = command.arg(*word));
    let _: redis::Value = command.query(&mut server.connection()).expect("it is allowed");
}

fn text(megabytes: usize) -> Vec<u8> {
    vec![b'x'; megabytes << 20]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn published_rules_that_nobody_can_have_published_are_refused() {
    let server = RedisServer::start();
    let rule_sets = RuleSets::connect(server.url()).expect("the URL is valid");
    assert_eq!(rule_sets.publish(&text(4), None).await, Ok(1));
    let newest = rule_sets.newest().await.expect("Redis replies").expect("published");
    assert_eq!(newest.rules.as_deref(), Some(&*text(4)), "the largest rule set is read");
    run(&server, &[b"HSET", b"rate_limit:{rules}", b"version", b"2", b"id", b"2-x", b"rules", &text(20)]);
    let why = rule_sets.newest().await.expect_err("too large");
    assert!(why.is_foreign_data(), "{why}");
    assert_eq!(why.detail(), "the published rules have 20971520 bytes, more than the maximum of 4194304");
    let mut problem = rule_sets.problem();
    assert_eq!(*problem.wait_for(Option::is_some).await.expect("it follows"), Some(why));
    let long = text(1);
    run(&server, &[b"HSET", b"rate_limit:{rules}", b"rules", b"short", b"predecessors", &long]);
    let newest = rule_sets.newest().await.expect("Redis replies").expect("published");
    assert_eq!(newest.rules.as_deref(), Some(&b"short"[..]));
    problem.wait_for(Option::is_none).await.expect("it follows");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_state_is_read_in_parts_up_to_its_bound() {
    let server = RedisServer::start();
    let limiter = limiter_at(&server).await;
    let state: Vec<u8> = (0..3_500_000_u32).map(|nth| (nth % 251) as u8).collect();
    assert_eq!(limiter.store_bans(0, &state, HOUR).await, Ok(true));
    let stored = limiter.load_bans().await.expect("Redis replies");
    assert_eq!((stored.version, stored.state == state), (1, true), "{} bytes", stored.state.len());
    run(&server, &[b"HSET", b"rate_limit:{bans}", b"version", b"2", b"state", &text(33)]);
    let why = limiter.load_bans().await.expect_err("too large");
    assert!(why.is_foreign_data(), "{why}");
    assert_eq!(why.detail(), "the state that nodes share has 34603008 bytes, more than the maximum of 33554432");
    run(&server, &[b"HSET", b"rate_limit:{bans}", b"version", &text(20)]);
    assert!(limiter.bans_version().await.is_err(), "that is no version");
    assert_eq!(limiter.store_learning("user", 0, &state, HOUR).await, Ok(true));
    let why = limiter.load_learning("user").await.expect_err("too large");
    assert_eq!(why.detail(), "the state that nodes share has 3500000 bytes, more than the maximum of 1048576");
    assert_eq!(limiter.check("ann").await.source(), Source::Store, "the connection is still in use");
    assert_eq!(limiter.stats().breaker_opened, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_reports_of_the_latest_nodes_up_to_a_size_are_read() {
    let server = RedisServer::start();
    let limiter = limiter_at(&server).await;
    limiter.write_node_report("real", b"report", HOUR).await.expect("written");
    // Each forged node is older than the real one.
    for nth in 0..1_000 {
        run(&server, &[b"ZADD", b"rate_limit:{reports}", b"1000", format!("forged {nth}").as_bytes()]);
    }
    let long = text(1);
    run(&server, &[b"ZADD", b"rate_limit:{reports}", b"99999999999999", &long]);
    run(&server, &[b"ZADD", b"rate_limit:{reports}", b"99999999999999", b"large"]);
    run(&server, &[b"SET", b"rate_limit:{reports}:large", &text(20)]);
    run(&server, &[b"SET", b"rate_limit:{reports}:forged 999", b"forged"]);
    run(&server, &[b"SET", b"rate_limit:{reports}:forged 0", b"beyond the bound"]);
    let reports = limiter.node_reports().await.expect("Redis replies");
    let expected = [("forged 999".to_owned(), b"forged".to_vec()), ("real".to_owned(), b"report".to_vec())];
    assert_eq!(reports, expected);
    assert!(limiter.stats().bytes_received < 1 << 20, "{}", limiter.stats().bytes_received);
}

/// The share of a limit in an outage shrinks then, and no further than to a ten-thousandth.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_do_not_exist_are_counted_up_to_a_bound() {
    let server = RedisServer::start();
    let limit = Limit::new("user", FixedWindow::new(10, LONG_WINDOW)).expect("valid");
    let limiter = RedisLimiter::builder(server.url()).limit(limit).store_timeout(super::PATIENCE);
    let limiter = limiter.on_store_failure(OnStoreFailure::Local).connect().await.expect("the settings are valid");
    let (mut forged, now) = (redis::cmd("ZADD"), now(&server));
    forged.arg("rate_limit:{nodes}");
    for nth in 0..12_000 {
        forged.arg(&now).arg(format!("forged {nth}"));
    }
    let _: redis::Value = forged.query(&mut server.connection()).expect("it is allowed");
    while limiter.fleet_nodes() == 1 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(limiter.fleet_nodes(), 10_000);
    assert!(limiter.stats().bytes_received < 1 << 20, "{}", limiter.stats().bytes_received);
}

/// Returns the time of Redis in milliseconds.
fn now(server: &RedisServer) -> String {
    let (secs, micros): (u64, u64) = redis::cmd("TIME").query(&mut server.connection()).expect("it replies");
    (secs * 1000 + micros / 1000).to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_data_under_the_keys_of_probes_and_layouts_does_not_affect_decisions() {
    let server = RedisServer::start();
    run(&server, &[b"SET", b"rate_limit:{probe}", &text(20)]);
    let limiter = limiter_at(&server).await;
    assert_eq!(limiter.check("ann").await.source(), Source::Store);
    let now = now(&server);
    for nth in 0..20 {
        run(&server, &[b"ZADD", b"rate_limit:{nodes}:layouts", now.as_bytes(), &[text(1), vec![nth]].concat()]);
    }
    let registrations = || {
        let stats: String = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).expect("it replies");
        let calls = stats.lines().find_map(|line| line.strip_prefix("cmdstat_zrange:calls="));
        calls.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0_u64)
    };
    let before = registrations();
    while registrations() < before + 2 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(limiter.check("ann").await.source(), Source::Store);
    assert!(limiter.stats().bytes_received < 1 << 20, "{}", limiter.stats().bytes_received);
    assert_eq!(limiter.stats().breaker_opened, 0);
}

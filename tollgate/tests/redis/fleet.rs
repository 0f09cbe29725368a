//! Nodes without Redis: each uses its share of every limit, and together they admit little more than the limit.

use std::time::Duration;

use testkit::redis::{Cluster, RedisServer};
use tokio::time::{sleep, timeout};
use tollgate::redis::{Layout, RedisLimiter, RedisLimiterBuilder, RedisSettings, StoreWarning};
use tollgate::{
    Algorithm, FixedWindow, HOUR, Hit, LeakyBucket, Limit, LimitId, MINUTE, ManualClock, OnStoreFailure, Rate, SECOND,
    SlidingWindowCounter, SlidingWindowLog, Source, Timestamp, TokenBucket,
};

use crate::load::{until_back, until_gone};

const QUOTA: u64 = 10;
/// Nodes register every few seconds. On a busy machine it takes longer until all have seen each other.
const SEEN_WITHIN: Duration = Duration::from_secs(30);

fn limit(name: &str, algorithm: impl Into<Algorithm>) -> Limit {
    Limit::new(name, algorithm).expect("the numbers are within the bounds")
}

fn builder(url: String, clock: &ManualClock) -> RedisLimiterBuilder {
    // A long timeout, so that a busy machine does not look like a failing store.
    RedisLimiter::builder(url).clock(clock.clone()).store_timeout(SECOND)
}

fn clock() -> ManualClock {
    // The start of an hour, so that no window ends soon.
    ManualClock::at(Timestamp::from_micros(1_699_999_200_000_000))
}

/// Waits until the node divides its limits by that number.
async fn sees(node: &RedisLimiter, nodes: u32) {
    let seen = async {
        while node.fleet_nodes() != nodes {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let seen = timeout(SEEN_WITHIN, seen).await;
    assert!(seen.is_ok(), "{} nodes are seen, not {nodes}", node.fleet_nodes());
}

/// Requests more than the whole limit on every node, and returns how much all of them admitted.
async fn exhaust(nodes: &[RedisLimiter], id: LimitId, key: &str) -> u64 {
    let mut admitted = 0;
    for node in nodes {
        for _ in 0..2 * QUOTA {
            let decision = node.decide(&[Hit::new(id, key)]).await;
            assert_eq!(decision.source(), Source::Local, "{decision:?}");
            assert_eq!(decision.quota(), QUOTA, "clients see the limit, not the share");
            admitted += u64::from(decision.is_allowed());
        }
    }
    admitted
}

/// The algorithms, with the units that each admits in the five seconds after its quota is spent.
fn algorithms() -> Vec<(&'static str, Algorithm, u64)> {
    let second = Rate::per_second(1);
    vec![
        ("token", TokenBucket::new(QUOTA, second).into(), 5),
        ("interval", TokenBucket::new(QUOTA, Rate::new(4, 5 * SECOND)).interval().into(), 4),
        ("leaky", LeakyBucket::new(QUOTA, second).into(), 5),
        ("queue", LeakyBucket::new(QUOTA, second).queue(HOUR).into(), 5),
        ("clock", FixedWindow::new(QUOTA, MINUTE).into(), 0),
        ("opened", FixedWindow::new(QUOTA, MINUTE).from_first_request().into(), 0),
        ("log", SlidingWindowLog::new(QUOTA, MINUTE).into(), 0),
        ("strict log", SlidingWindowLog::new(QUOTA, MINUTE).count_denied().into(), 0),
        ("counter", SlidingWindowCounter::new(QUOTA, MINUTE).into(), 0),
        ("segments", SlidingWindowCounter::new(QUOTA, MINUTE).segments(6).into(), 0),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_nodes_without_redis_admit_the_limit_and_at_most_a_unit_more_for_each() {
    let (mut server, clock) = (RedisServer::start(), clock());
    let mut nodes = Vec::new();
    for _ in 0..3 {
        let limits: Vec<Limit> = algorithms().into_iter().map(|(name, algorithm, _)| limit(name, algorithm)).collect();
        nodes.push(builder(server.url(), &clock).limits(limits).connect().await.expect("the settings are valid"));
    }
    for node in &nodes {
        sees(node, 3).await;
        assert_eq!(node.check("before").await.source(), Source::Store);
    }
    server.kill();
    for node in &nodes {
        until_gone(node, "probe").await;
    }
    let ids: Vec<LimitId> =
        algorithms().iter().map(|(name, ..)| nodes[0].id(name).expect("a limit of the nodes")).collect();
    let bound = QUOTA + 3;
    let mut admitted = Vec::new();
    for ((name, ..), id) in algorithms().iter().zip(&ids) {
        let at_once = exhaust(&nodes, *id, "key").await;
        assert!((QUOTA..=bound).contains(&at_once), "{name}: {at_once}");
        admitted.push(at_once);
    }
    clock.advance(5 * SECOND);
    for (((name, _, more), id), at_once) in algorithms().iter().zip(&ids).zip(admitted) {
        let in_all = at_once + exhaust(&nodes, *id, "key").await;
        // Whole portions of an interval are rounded up too.
        let surplus = if *name == "interval" { 3 } else { 0 };
        assert!(in_all <= bound + more + surplus, "{name}: {in_all}");
        assert!(in_all >= QUOTA + more.saturating_sub(3), "{name}: {in_all}");
    }
    server.restart();
    for node in &nodes {
        until_back(node, "probe").await;
        assert_eq!(node.decide(&[Hit::new(ids[0], "key")]).await.source(), Source::Store);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_leaves_and_is_replaced_is_not_counted_twice() {
    let (server, clock) = (RedisServer::start(), clock());
    let connect = || builder(server.url(), &clock).limit(limit("window", FixedWindow::new(QUOTA, HOUR))).connect();
    let [stays, leaves] = [connect().await.expect("connects"), connect().await.expect("connects")];
    for node in [&stays, &leaves] {
        sees(node, 2).await;
    }
    leaves.leave().await;
    drop(leaves);
    let joins = connect().await.expect("connects");
    sees(&joins, 2).await;
    let mut connection = server.connection();
    let mut registered = || -> Vec<String> {
        redis::cmd("ZRANGE").arg("rate_limit:{nodes}").arg(0).arg(-1).query(&mut connection).expect("answered")
    };
    let joined = async {
        while registered().len() != 2 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SEEN_WITHIN, joined).await.expect("the new node registers");
    assert_eq!((stays.fleet_nodes(), joins.fleet_nodes()), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_joins_between_two_outages_adds_no_quota() {
    let (mut server, clock) = (RedisServer::start(), clock());
    let connect = || builder(server.url(), &clock).limit(limit("window", FixedWindow::new(QUOTA, HOUR))).connect();
    let mut nodes = [connect().await.expect("connects"), connect().await.expect("connects")].to_vec();
    for node in &nodes {
        sees(node, 2).await;
    }
    let id = nodes[0].id("window").expect("a limit");
    server.kill();
    for node in &nodes {
        until_gone(node, "probe").await;
    }
    assert_eq!(exhaust(&nodes, id, "key").await, QUOTA);
    server.restart();
    nodes.push(
        builder(server.url(), &clock).limit(limit("window", FixedWindow::new(QUOTA, HOUR))).connect().await.unwrap(),
    );
    for node in &nodes {
        until_back(node, "probe").await;
        sees(node, 3).await;
    }
    server.kill();
    for node in &nodes {
        until_gone(node, "another probe").await;
    }
    // The nodes that had half of the limit have spent more than a third.
    assert_eq!(exhaust(&nodes[..2], id, "key").await, 0);
    assert_eq!(exhaust(&nodes[2..], id, "key").await, 4);
    assert_eq!(exhaust(&nodes, id, "fresh").await, 12);
}

/// On one thread, the registration is sent before the second decision after the recovery.
#[tokio::test]
async fn a_node_registers_as_soon_as_redis_is_back() {
    let (mut server, clock) = (RedisServer::start(), clock());
    let node = builder(server.url(), &clock).limit(limit("window", FixedWindow::new(QUOTA, HOUR))).connect();
    let node = node.await.expect("the settings are valid");
    let registered = |server: &RedisServer| -> u64 {
        redis::cmd("ZCARD").arg("rate_limit:{nodes}").query(&mut server.connection()).expect("a set, or nothing")
    };
    let joined = async {
        while registered(&server) == 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SEEN_WITHIN, joined).await.expect("it registers");
    for _ in 0..3 {
        server.kill();
        until_gone(&node, "probe").await;
        // It has lost the registration.
        server.restart();
        until_back(&node, "probe").await;
        assert_eq!(node.check("after").await.source(), Source::Store);
        assert_eq!(registered(&server), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cost_above_the_share_is_denied_until_redis_is_back() {
    let (mut server, clock) = (RedisServer::start(), clock());
    server.kill();
    let limits = builder(server.url(), &clock).limit(limit("window", FixedWindow::new(QUOTA, HOUR)));
    let node = limits.expected_nodes(3).connect().await.expect("Redis need not be there");
    assert_eq!(node.fleet_nodes(), 3, "it has seen no other node, but knows how many to expect");
    let above_share = node.check_n("key", 5).await;
    assert_eq!((above_share.is_allowed(), above_share.retry_after()), (false, Some(SECOND)));
    let above_limit = node.check_n("key", QUOTA + 1).await;
    assert_eq!((above_limit.is_allowed(), above_limit.retry_after()), (false, None));
    let share = node.check_n("key", 4).await;
    assert_eq!((share.is_allowed(), share.source(), share.remaining()), (true, Source::Local, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_that_change_during_an_outage_keep_the_spent_units_of_the_share() {
    let (mut server, clock) = (RedisServer::start(), clock());
    server.kill();
    let limits = builder(server.url(), &clock).limit(limit("window", FixedWindow::new(QUOTA, HOUR)));
    let before = limits.expected_nodes(2).connect().await.expect("Redis need not be there");
    assert_eq!(before.check_n("key", 3).await.remaining(), 2);
    let after = before.with_limits(vec![limit("window", FixedWindow::new(2 * QUOTA, HOUR))]).expect("valid limits");
    assert_eq!(after.check("key").await.remaining(), 6, "4 of 10 are spent");
    assert!(!before.check_n("key", 2).await.is_allowed(), "they count together");
    let reservation = after.reserve("key", 6, HOUR).await.expect("6 are left");
    assert!(after.refund(reservation).await.is_ok());
    assert_eq!(after.check("key").await.remaining(), 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_without_local_limits_are_not_counted() {
    let server = RedisServer::start();
    let window = || limit("window", FixedWindow::new(QUOTA, HOUR));
    let denying = RedisLimiter::builder(server.url()).limit(window()).on_store_failure(OnStoreFailure::Deny);
    let denying = denying.connect().await.expect("the settings are valid");
    let local = RedisLimiter::builder(server.url()).limit(window()).connect().await.expect("the settings are valid");
    let registered = || -> u64 {
        redis::cmd("ZCARD").arg("rate_limit:{nodes}").query(&mut server.connection()).expect("a set, or nothing")
    };
    let joined = async {
        while registered() == 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(SEEN_WITHIN, joined).await.expect("the other registers");
    assert_eq!((registered(), local.fleet_nodes(), denying.fleet_nodes()), (1, 1, 1));
    // It counts once one of its limits falls back to memory.
    let window = window().with_on_store_failure(OnStoreFailure::Local);
    let _changed = denying.with_limits(vec![window]).expect("valid limits");
    sees(&local, 2).await;
    let expires_in: i64 =
        redis::cmd("PTTL").arg("rate_limit:{nodes}").query(&mut server.connection()).expect("a time to live");
    assert!((1..=10_000).contains(&expires_in), "{expires_in}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_on_a_cluster_see_each_other() {
    let cluster = Cluster::start();
    let mut nodes = Vec::new();
    for _ in 0..2 {
        let limits = RedisLimiter::builder(cluster.url()).limit(limit("window", FixedWindow::new(QUOTA, HOUR)));
        nodes.push(limits.store_timeout(SECOND).connect().await.expect("the settings are valid"));
    }
    for node in &nodes {
        sees(node, 2).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_data_under_the_key_of_the_layouts_does_not_affect_the_number_of_nodes() {
    let (server, clock) = (RedisServer::start(), clock());
    let key = "rate_limit:{nodes}:layouts";
    let _: () = redis::cmd("SET").arg(key).arg("foreign").query(&mut server.connection()).expect("set");
    let mut nodes = Vec::new();
    for _ in 0..2 {
        let limits = builder(server.url(), &clock).limit(limit("window", FixedWindow::new(QUOTA, HOUR)));
        nodes.push(limits.connect().await.expect("the settings are valid"));
    }
    for node in &nodes {
        sees(node, 2).await;
    }
    let (kept, expires_in): (String, i64) =
        redis::pipe().get(key).pttl(key).query(&mut server.connection()).expect("still a string");
    assert_eq!((&*kept, expires_in), ("foreign", -1));
}

/// Waits until a node has warnings about these other layouts, and no others.
async fn warns_of(node: &RedisLimiter, own: &str, others: &[&str]) {
    let warning = |other: &&str| StoreWarning::OtherLayout { own: own.to_owned(), other: (*other).to_owned() };
    let expected: Vec<StoreWarning> = others.iter().map(warning).collect();
    let warnings = || {
        let mut warnings = node.stores().remove(0).warnings;
        warnings.sort();
        warnings
    };
    let warned = async {
        while warnings() != expected {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let warned = timeout(SEEN_WITHIN, warned).await;
    assert!(warned.is_ok(), "{own}: {:?}, not {expected:?}", warnings());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_different_layouts_warn_as_long_as_there_are_such() {
    let server = RedisServer::start();
    let connect = async |settings: RedisSettings| {
        let builder = RedisLimiter::builder(settings).limit(limit("window", FixedWindow::new(QUOTA, HOUR)));
        builder.store_timeout(SECOND).connect().await.expect("the settings are valid")
    };
    let plain = || RedisSettings::new(server.url());
    let compact = |keys| plain().layout(Layout::Compact).expected_keys(keys);
    let (one, same) = (connect(plain()).await, connect(plain()).await);
    let elsewhere = connect(compact(64).prefix("other")).await;
    sees(&one, 2).await;
    for node in [&one, &same, &elsewhere] {
        assert_eq!(node.stores()[0].warnings, [], "the same layout, or another prefix");
    }
    let other = connect(compact(64)).await;
    warns_of(&one, "plain", &["compact (1 hash)"]).await;
    warns_of(&other, "compact (1 hash)", &["plain"]).await;
    let third = connect(compact(128)).await;
    warns_of(&third, "compact (2 hashes)", &["compact (1 hash)", "plain"]).await;
    assert!(one.check("key").await.is_allowed() && other.check("key").await.is_allowed());
    drop((other, third));
    warns_of(&one, "plain", &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_local_limits_warns_of_a_compact_layout() {
    let server = RedisServer::start();
    let connect = async |settings: RedisSettings| {
        let builder = RedisLimiter::builder(settings).limit(limit("window", FixedWindow::new(QUOTA, HOUR)));
        builder.store_timeout(SECOND).on_store_failure(OnStoreFailure::Deny).connect().await.expect("valid settings")
    };
    let plain = connect(RedisSettings::new(server.url())).await;
    let _compact = connect(RedisSettings::new(server.url()).layout(Layout::Compact)).await;
    warns_of(&plain, "plain", &["compact (15625 hashes)"]).await;
}

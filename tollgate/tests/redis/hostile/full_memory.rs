//! A Redis whose memory is full cannot write decisions: it does not count as available until there is memory again.

use std::time::Duration;

use futures_util::future::join_all;
use redis::Connection;
use testkit::redis::{Cluster, RedisServer};
use testkit::window::LONG_WINDOW;
use tollgate::Source;
use tollgate::redis::RedisLimiter;

use super::{PATIENCE, limiter};
use crate::load::{RECOVERY, until_available, until_back};
use crate::variants::variants;

fn allow_memory(connection: &mut Connection, bytes: u64) {
    let _: () = redis::cmd("CONFIG").arg("SET").arg("maxmemory").arg(bytes).query(connection).expect("set");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_is_full_the_policy_decides_and_counts_are_kept() {
    let server = RedisServer::with(&["--maxmemory-policy", "noeviction"]);
    let mut connection = server.connection();
    let _: () = redis::cmd("SET").arg("theirs").arg(vec![b'x'; 4 << 20]).query(&mut connection).expect("set");
    for variant in variants(10, LONG_WINDOW) {
        let limiter = limiter(&server.url(), variant.limit()).await;
        let taken = limiter.check_n("old", 4).await;
        assert_eq!((taken.is_allowed(), taken.source()), (true, Source::Store), "{}", variant.name);

        allow_memory(&mut connection, 1 << 20);
        for key in ["old", "new"] {
            let decision = limiter.check(key).await;
            assert_eq!((decision.is_allowed(), decision.source()), (false, Source::Policy), "{} {key}", variant.name);
            assert!(decision.retry_after().is_some(), "{} {key}", variant.name);
        }
        let why = limiter.why_unavailable().unwrap_or_else(|| panic!("{}: it is of no use", variant.name));
        assert!(
            why.is_refused() && why.to_string().ends_with(": raise its maxmemory, or move other data elsewhere"),
            "{why}"
        );
        assert!(limiter.servers().iter().all(|server| !server.available), "{}", variant.name);
        assert_eq!(limiter.stats().breaker_opened, 1, "{}: one failure, however many decisions", variant.name);
        assert_eq!(limiter.peek("old").await.expect("a peek needs no memory").remaining(), 6, "{}", variant.name);

        allow_memory(&mut connection, 0);
        until_back(&limiter, "new").await;
        until_available(&limiter).await;
        assert_eq!(limiter.stats().breaker_closed, 1, "{}", variant.name);
        let left = limiter.peek("old").await.expect("Redis answers").remaining();
        assert_eq!(left, 6, "{}: what was refused took nothing", variant.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_node_of_a_cluster_is_reported_and_the_others_decide() {
    let mut cluster = Cluster::with(&["--maxmemory-policy", "noeviction"]);
    let variant = variants(10, LONG_WINDOW)[0];
    let builder = RedisLimiter::builder(cluster.url()).limit(variant.limit()).store_timeout(Duration::from_secs(5));
    let limiter = builder.connect().await.expect("the settings are good");
    // Nodes of a cluster need some memory for themselves.
    let mut connection = cluster.node(0).connection();
    allow_memory(&mut connection, 1);
    let port = cluster.node(0).port();
    let mut by_store = 0;
    for key in 0..100 {
        by_store += u32::from(limiter.check(format!("{key}").as_str()).await.source() == Source::Store);
    }
    assert!((1..100).contains(&by_store), "{by_store}");
    let failed: Vec<String> =
        limiter.servers().into_iter().filter(|server| !server.available).map(|server| server.address).collect();
    assert_eq!(failed, [format!("127.0.0.1:{port}")]);
    assert!(limiter.why_unavailable().expect("one is full").detail().contains("OOM"));
    allow_memory(&mut connection, 0);
    until_available(&limiter).await;
}

/// Keys of limits expire, so `volatile-*` policies evict them as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_evicts_keys_is_reported() {
    let variant = variants(10, LONG_WINDOW)[0];
    for (policy, maximum, evicts) in [
        ("allkeys-lru", "100mb", true),
        ("volatile-ttl", "100mb", true),
        ("allkeys-lru", "0", false),
        ("noeviction", "100mb", false),
    ] {
        let server = RedisServer::with(&["--maxmemory-policy", policy, "--maxmemory", maximum]);
        let limiter = limiter(&server.url(), variant.limit()).await;
        let memory = async || loop {
            if let Some(memory) = limiter.servers().into_iter().find_map(|server| server.memory) {
                break memory;
            }
            tokio::task::yield_now().await;
        };
        let memory = tokio::time::timeout(RECOVERY, memory()).await.expect("it is read soon after the connection");
        assert_eq!((memory.eviction_policy.as_str(), memory.evicts()), (policy, evicts), "{memory:?}");
        assert!(memory.used > 0 && memory.evicted_keys == 0, "{memory:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_evicts_keys_decides_every_request_and_evicted_keys_start_anew() {
    let server = RedisServer::with(&["--maxmemory-policy", "allkeys-lru"]);
    let mut connection = server.connection();
    let limiter = limiter(&server.url(), variants(10, LONG_WINDOW)[0].limit()).await;
    assert!(limiter.check_n("first", 4).await.is_allowed());
    let info = |connection: &mut Connection, field: &str| -> u64 {
        let info: redis::InfoDict = redis::cmd("INFO").query(connection).expect("answered");
        info.get(field).expect("INFO has this field")
    };
    let used = info(&mut connection, "used_memory");
    // Some for the buffers of the connections.
    allow_memory(&mut connection, used + (1 << 20));
    let evicted = async {
        for batch in 0.. {
            let keys: Vec<String> = (0..256).map(|key| format!("{batch} {key}")).collect();
            for decision in join_all(keys.iter().map(|key| limiter.check(key))).await {
                assert_eq!((decision.is_allowed(), decision.source()), (true, Source::Store));
            }
            let is_there: bool =
                redis::cmd("EXISTS").arg("rate_limit:{tokens|first}").query(&mut connection).expect("answered");
            if !is_there {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, evicted).await.expect("the oldest key is evicted");
    assert!(info(&mut connection, "evicted_keys") > 0);
    assert_eq!(limiter.check("first").await.remaining(), 9);
    assert!(limiter.is_store_available() && limiter.stats().breaker_opened == 0);
}

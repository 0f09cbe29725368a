//! Servers that reply but cannot decide: replicas, servers without replicas, servers that load their data or cannot save
//! it, servers that are busy with a script, servers without a command, and nodes of a cluster that are used as single
//! servers. None of them counts as available.

use std::time::Duration;

use testkit::redis::{Cluster, RedisServer};
use testkit::window::LONG_WINDOW;
use tollgate::redis::{RedisLimiter, StoreError};
use tollgate::{FixedWindow, Limit, OnStoreFailure, Source};

use crate::load::{RECOVERY, until_available, until_back, until_gone};

async fn limiter(server: &RedisServer) -> RedisLimiter {
    limiter_at(server.url()).await
}

async fn limiter_at(url: String) -> RedisLimiter {
    let limit = Limit::new("user", FixedWindow::new(1_000_000, LONG_WINDOW)).expect("valid");
    let builder = RedisLimiter::builder(url).limit(limit).store_timeout(Duration::from_millis(500));
    builder.on_store_failure(OnStoreFailure::Deny).connect().await.expect("the settings are good")
}

/// Uses the store until it is unavailable, and returns the reason.
async fn why_unavailable_now(limiter: &RedisLimiter) -> StoreError {
    until_gone(limiter, "ann").await;
    let why = limiter.why_unavailable().expect("the store is unavailable");
    assert!(why.is_unavailable(), "{why}");
    assert!(limiter.servers().iter().all(|server| !server.available));
    assert_eq!(limiter.stats().breaker_opened, 1, "{why}");
    why
}

async fn is_used_again(limiter: &RedisLimiter) {
    until_back(limiter, "ann").await;
    until_available(limiter).await;
}

fn run(connection: &mut redis::Connection, words: &[&str]) {
    let mut command = redis::cmd(words[0]);
    let _: redis::Value =
        command.arg(&words[1..]).query(connection).unwrap_or_else(|error| panic!("{words:?}: {error}"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replica_is_unavailable_until_it_is_a_master() {
    let (master, server) = (RedisServer::start(), RedisServer::start());
    let limiter = limiter(&server).await;
    assert_eq!(limiter.check("ann").await.source(), Source::Store);
    let mut connection = server.connection();
    run(&mut connection, &["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    let why = why_unavailable_now(&limiter).await;
    assert!(why.detail().contains("READONLY") || why.detail().to_lowercase().contains("read only"), "{why}");
    assert!(why.fix().contains("URL of the master"), "{why}");
    run(&mut connection, &["REPLICAOF", "NO", "ONE"]);
    is_used_again(&limiter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_cannot_save_its_data_is_unavailable_until_it_can() {
    let server = RedisServer::with(&["--enable-protected-configs", "yes", "--save", "3600 1"]);
    let limiter = limiter(&server).await;
    assert_eq!(limiter.check("ann").await.source(), Source::Store);
    let mut connection = server.connection();
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let path = folder.path().join("gone");
    let path_text = path.display().to_string();
    std::fs::create_dir(&path).expect("created");
    run(&mut connection, &["CONFIG", "SET", "dir", &path_text]);
    std::fs::remove_dir(&path).expect("removed");
    run(&mut connection, &["BGSAVE"]);
    let why = why_unavailable_now(&limiter).await;
    assert!(why.detail().contains("MISCONF"), "{why}");
    assert!(why.fix().contains("check its disk"), "{why}");
    std::fs::create_dir(&path).expect("created");
    run(&mut connection, &["CONFIG", "SET", "dir", &path_text]);
    run(&mut connection, &["BGSAVE"]);
    is_used_again(&limiter).await;
}

/// A master that a partition has cut off from its replicas, and from the sentinels that have promoted one of them, must not
/// be used any longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_without_the_replicas_that_it_needs_is_unavailable_until_it_has_them() {
    let server = RedisServer::start();
    let limiter = limiter(&server).await;
    assert_eq!(limiter.check("ann").await.source(), Source::Store);
    let mut connection = server.connection();
    run(&mut connection, &["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let why = why_unavailable_now(&limiter).await;
    assert!(why.detail().contains("NOREPLICAS"), "{why}");
    assert!(why.fix().contains("min-replicas-to-write"), "{why}");
    run(&mut connection, &["CONFIG", "SET", "min-replicas-to-write", "0"]);
    is_used_again(&limiter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_loads_its_data_is_unavailable_until_it_is_loaded() {
    let server = RedisServer::with(&[
        "--enable-debug-command",
        "yes",
        "--loading-process-events-interval-bytes",
        "1024",
        // In microseconds, for each of the keys below.
        "--key-load-delay",
        "300",
    ]);
    let limiter = limiter(&server).await;
    assert_eq!(limiter.check("ann").await.source(), Source::Store);
    let mut connection = server.connection();
    run(&mut connection, &["DEBUG", "POPULATE", "10000"]);
    // Loading takes seconds, and longer than a reply may take elsewhere on a busy machine.
    connection.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout can be set");
    let loading = std::thread::spawn(move || run(&mut connection, &["DEBUG", "RELOAD"]));
    let why = why_unavailable_now(&limiter).await;
    assert!(why.to_string().to_lowercase().contains("loading"), "{why}");
    loading.join().expect("it has loaded");
    is_used_again(&limiter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_is_busy_with_a_script_is_unavailable_until_it_ends() {
    let server = RedisServer::with(&["--busy-reply-threshold", "50"]);
    let limiter = limiter(&server).await;
    assert_eq!(limiter.check("ann").await.source(), Source::Store);
    let mut connection = server.connection();
    let busy = std::thread::spawn(move || {
        let _: redis::RedisResult<()> = redis::cmd("EVAL").arg("while true do end").arg(0).query(&mut connection);
    });
    let why = why_unavailable_now(&limiter).await;
    // Until Redis notices that the script is slow, it does not reply at all.
    assert!(why.detail().contains("BUSY") || why.detail() == "no answer in time", "{why}");
    run(&mut server.connection(), &["SCRIPT", "KILL"]);
    busy.join().expect("it was ended");
    is_used_again(&limiter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_without_a_command_that_decisions_need_is_unavailable() {
    for command in ["EVALSHA", "MGET", "SET"] {
        let server = RedisServer::with(&["--rename-command", command, ""]);
        let limiter = limiter(&server).await;
        for _ in 0..3 {
            let decision = limiter.check("ann").await;
            assert_eq!((decision.is_allowed(), decision.source()), (false, Source::Policy), "{command}");
        }
        let why = limiter.why_unavailable().unwrap_or_else(|| panic!("without {command} it is of no use"));
        assert!(why.is_refused() && why.detail().to_lowercase().contains("unknown"), "{command}: {why}");
        assert!(why.fix().contains("commands that docs/redis.md lists"), "{why}");
        assert!(limiter.servers().iter().all(|server| !server.available), "{command}");
        assert_eq!(limiter.stats().breaker_opened, 1, "{command}: one failure, however many decisions");
    }
}

/// Such a node decides for its own keys, and replies that the others have moved.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_a_cluster_is_unavailable_as_a_single_server() {
    let mut cluster = Cluster::start();
    for node in 0..3 {
        let limiter = limiter_at(cluster.node(node).url()).await;
        let refused = async {
            for key in 0.. {
                let _ = limiter.check(format!("key {key}").as_str()).await;
                if let Some(why) = limiter.why_unavailable() {
                    return why;
                }
            }
            unreachable!("there are enough keys")
        };
        let why = tokio::time::timeout(RECOVERY, refused).await.expect("it lacks most keys");
        assert!(why.is_refused() && why.fix().contains("redis+cluster://"), "node {node}: {why}");
        assert_eq!(limiter.stats().breaker_opened, 1, "node {node}: {why}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_accepts_no_more_clients_is_unavailable_until_it_does() {
    for args in [&[][..], &["--requirepass", "s3cret"]] {
        let server = RedisServer::with(args);
        let mut connection = server.connection();
        run(&mut connection, &["CONFIG", "SET", "maxclients", "1"]);
        let limiter = limiter(&server).await;
        let why = why_unavailable_now(&limiter).await;
        assert!(why.detail().contains("max number of clients reached"), "{args:?}: {why}");
        assert!(why.fix().contains("maxclients"), "{args:?}: {why}");
        run(&mut connection, &["CONFIG", "SET", "maxclients", "100"]);
        is_used_again(&limiter).await;
    }
}

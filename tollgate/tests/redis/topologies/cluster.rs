//! A cluster: keys on every node, requests across slots, and the loss of a node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use testkit::redis::{Cluster, RedisServer};
use tokio::time::sleep;
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder};
use tollgate::{DAY, FixedWindow, Hit, Limit, OnStoreFailure, Rate, SlidingWindowLog, Source, TokenBucket};

use crate::load::{Load, RECOVERY, until, until_available, until_back, until_gone};

const QUOTA: u64 = 1_000_000;

/// The lag of a replica: about a millisecond, and less than this on a busy machine.
const REPLICATION_LAG: Duration = Duration::from_millis(500);

fn builder(cluster: &Cluster, timeout: Duration) -> RedisLimiterBuilder {
    // So that only the store admits requests.
    RedisLimiter::builder(cluster.url()).store_timeout(timeout).on_store_failure(OnStoreFailure::Deny)
}

fn wide() -> Limit {
    Limit::new("wide", FixedWindow::new(QUOTA, DAY).from_first_request()).expect("the numbers are within the bounds")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_on_every_node_and_each_is_counted_once() {
    let mut cluster = Cluster::start();
    let limit = || Limit::new("ten", SlidingWindowLog::new(10, DAY)).unwrap();
    let limiters = [
        builder(&cluster, Duration::from_secs(20)).limit(limit()).connect().await.unwrap(),
        builder(&cluster, Duration::from_secs(20)).limit(limit()).connect().await.unwrap(),
    ];
    let keys: Vec<String> = (0..60).map(|key| format!("key {key}")).collect();
    let requests = (0..15).flat_map(|_| &keys).enumerate();
    let decisions = join_all(requests.map(|(turn, key)| limiters[turn % 2].check(key))).await;
    assert!(decisions.iter().all(|decision| matches!(decision.source(), Source::Store | Source::DenialCache)));
    let admitted = decisions.iter().filter(|decision| decision.is_allowed()).count();
    assert_eq!(admitted, 60 * 10);
    let mut in_all = 0;
    for master in 0..3 {
        let on_node: usize = redis::cmd("DBSIZE").query(&mut cluster.node(master).connection()).expect("counted");
        assert!(on_node > 0, "node {master}");
        in_all += on_node;
    }
    assert_eq!(in_all, 60);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_across_slots_is_all_or_nothing() {
    let cluster = Cluster::start();
    let limiter = builder(&cluster, Duration::from_secs(20))
        .limit(Limit::new("tight", SlidingWindowLog::new(5, DAY)).unwrap())
        .limit(Limit::new("counted", FixedWindow::new(1_000, DAY).from_first_request()).unwrap())
        .limit(Limit::new("logged", SlidingWindowLog::new(1_000, DAY)).unwrap())
        .connect()
        .await
        .unwrap();
    until_available(&limiter).await;
    let ids = ["tight", "counted", "logged"].map(|name| limiter.id(name).expect("a limit"));
    // Some of these share a slot and some do not.
    for key in 0..20 {
        let keys = ["tight", "counted", "logged"].map(|name| format!("{name} {key}"));
        let hits: Vec<Hit<'_>> = ids.iter().zip(&keys).map(|(id, key)| Hit::new(*id, key)).collect();
        let left = async |index: usize| limiter.decide(&[Hit::new(ids[index], &keys[index]).cost(0)]).await.remaining();
        for nth in 1..=8 {
            let decision = limiter.decide(&hits).await;
            assert_eq!(decision.is_allowed(), nth <= 5, "{nth}: {decision:?}");
            assert_eq!(decision.limit(), Some(ids[0]), "{nth}: the tightest is spoken of");
        }
        assert_eq!((left(0).await, left(1).await, left(2).await), (0, 995, 995), "key {key}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_requests_across_slots_never_admit_too_many() {
    let cluster = Cluster::start();
    let build = || {
        builder(&cluster, Duration::from_secs(20))
            .limit(Limit::new("loose", SlidingWindowLog::new(400, DAY)).unwrap())
            .limit(Limit::new("tight", TokenBucket::new(150, Rate::new(1, DAY))).unwrap())
            .limit(Limit::new("wide", FixedWindow::new(2_000, DAY).from_first_request()).unwrap())
            .connect()
    };
    let limiters = [build().await.unwrap(), build().await.unwrap()];
    let ids = ["loose", "tight", "wide"].map(|name| limiters[0].id(name).expect("a limit"));
    let tasks = (0..32).map(|task| {
        let limiter = limiters[task % 2].clone();
        tokio::spawn(async move {
            let mut admitted = 0;
            for _ in 0..15 {
                let hits = ids.map(|id| Hit::new(id, "key"));
                admitted += u64::from(limiter.decide(&hits).await.is_allowed());
            }
            admitted
        })
    });
    let admitted: u64 = join_all(tasks).await.into_iter().map(|task| task.expect("no task panics")).sum();
    assert_eq!(admitted, 150, "of 480 requests");
    let left = async |id| limiters[0].decide(&[Hit::new(id, "key").cost(0)]).await.remaining();
    let left = (left(ids[0]).await, left(ids[1]).await, left(ids[2]).await);
    assert_eq!(left, (250, 0, 1_850), "what the denied took for a moment is given back");
}

/// Sends requests until the store decides, and returns how many were admitted.
async fn admitted_by_the_store(limiter: &RedisLimiter, key: &str) -> u64 {
    let answered = until(limiter, key, RECOVERY, |decision| decision.source() == Source::Store).await;
    u64::from(answered.is_allowed())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_node_is_replaced_under_load() {
    const TIMEOUT: Duration = Duration::from_millis(300);
    const TASKS: usize = 30;
    let mut cluster = Cluster::start();
    let limiter = builder(&cluster, TIMEOUT).limit(wide()).connect().await.unwrap();
    // Thirty keys: some on every node.
    let load = Load::begin(&limiter, TASKS, |task| format!("key {task}"));
    let mut admitted_here = 0;
    for task in 0..TASKS {
        admitted_here += admitted_by_the_store(&limiter, &format!("key {task}")).await;
    }
    sleep(REPLICATION_LAG).await;
    let surely_replicated = load.admitted();
    sleep(REPLICATION_LAG).await;
    let when_lost = load.admitted();
    cluster.failover(0);
    for task in 0..TASKS {
        admitted_here += admitted_by_the_store(&limiter, &format!("key {task}")).await;
    }
    sleep(Duration::from_millis(300)).await;
    let tally = load.end().await;
    assert_eq!(tally.without_retry, 0, "{tally:?}");
    let mut left = 0;
    for task in 0..TASKS {
        left += limiter.peek(&format!("key {task}")).await.expect("the cluster answers").remaining();
    }
    // The bound: at most the units that had not reached the replica are admitted again.
    let (in_all, quota) = (tally.admitted + admitted_here + left, TASKS as u64 * QUOTA);
    let not_replicated = when_lost - surely_replicated;
    assert!(in_all <= quota + not_replicated, "{in_all} of {quota}, {not_replicated} in the lag");
}

/// A request takes from two nodes. While one of them is lost and replaced, the other keeps exactly what was admitted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_during_requests_across_slots_leaves_nothing_taken() {
    const TASKS: usize = 16;
    let mut cluster = Cluster::with(&["--cluster-require-full-coverage", "no"]);
    let limit = |name| Limit::new(name, FixedWindow::new(QUOTA, DAY).from_first_request()).unwrap();
    let limiter = builder(&cluster, Duration::from_secs(2)).limit(limit("lost")).limit(limit("kept"));
    let limiter = limiter.connect().await.unwrap();
    until_available(&limiter).await;
    let (lost, kept) = (limiter.id("lost").unwrap(), limiter.id("kept").unwrap());
    let key_of = |limit: &str, master: usize| {
        let keys = (0..).map(|nth| format!("key {nth}"));
        let slot = |key: &str| crc16::State::<crc16::XMODEM>::calculate(format!("{limit}|{key}").as_bytes()) % 16_384;
        keys.into_iter().find(|key| cluster.owner(slot(key)) == Some(master)).expect("one of them is there")
    };
    let (lost_key, kept_key) = (key_of("lost", 0), key_of("kept", 1));
    let ended = Arc::new(AtomicBool::new(false));
    let task = || {
        let (limiter, ended, lost_key, kept_key) = (limiter.clone(), ended.clone(), lost_key.clone(), kept_key.clone());
        tokio::spawn(async move {
            let (mut admitted, mut by_policy) = (0_u64, 0_u64);
            while !ended.load(Ordering::SeqCst) {
                let decision = limiter.decide(&[Hit::new(lost, &lost_key), Hit::new(kept, &kept_key)]).await;
                admitted += u64::from(decision.is_allowed());
                by_policy += u64::from(decision.source() == Source::Policy);
                sleep(Duration::from_millis(1)).await;
            }
            (admitted, by_policy)
        })
    };
    let tasks: Vec<_> = (0..TASKS).map(|_| task()).collect();
    sleep(REPLICATION_LAG).await;
    cluster.failover(0);
    sleep(REPLICATION_LAG).await;
    ended.store(true, Ordering::SeqCst);
    let tallies: Vec<_> = join_all(tasks).await.into_iter().map(|tally| tally.expect("no task panics")).collect();
    let (admitted, by_policy) = tallies.iter().fold((0, 0), |sum, tally| (sum.0 + tally.0, sum.1 + tally.1));
    assert!(admitted > 0 && by_policy > 0, "{admitted} admitted, {by_policy} by policy");
    // Separate tasks give back the units of the last denied requests.
    let spent = async || QUOTA - limiter.decide(&[Hit::new(kept, &kept_key).cost(0)]).await.remaining();
    let begin = tokio::time::Instant::now();
    while spent().await != admitted {
        assert!(begin.elapsed() < RECOVERY, "{} are taken for {admitted} admitted", spent().await);
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_is_down_becomes_unavailable_once_and_recovers() {
    let server = RedisServer::with(&["--cluster-enabled", "yes"]);
    let slots = |change: &str, first: u16, last: u16| {
        let mut command = redis::cmd("CLUSTER");
        let () = command.arg(change).arg(first).arg(last).query(&mut server.connection()).expect("slots are changed");
    };
    slots("ADDSLOTSRANGE", 0, 16_383);
    let url = format!("redis+cluster://127.0.0.1:{}", server.port());
    let limits = RedisLimiter::builder(url).limit(wide()).store_timeout(Duration::from_secs(1));
    let limiter = limits.on_store_failure(OnStoreFailure::Deny).connect().await.unwrap();
    until_back(&limiter, "key").await;
    // Not all slots are covered: it answers `PING`, and `CLUSTERDOWN` to every command with a key.
    slots("DELSLOTSRANGE", 0, 0);
    until_gone(&limiter, "key").await;
    let opened = limiter.stats().breaker_opened;
    let load = Load::begin(&limiter, 8, |task| format!("key {task}"));
    // Long enough for many probes.
    sleep(Duration::from_secs(2)).await;
    let tally = load.end().await;
    assert_eq!((limiter.stats().breaker_opened, tally.by_store), (opened, 0), "it does not flap");
    slots("ADDSLOTSRANGE", 0, 0);
    until_back(&limiter, "key").await;
}

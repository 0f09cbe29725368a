//! A server that hangs or loses power: it affects only its own keys, and is replaced.

use std::time::Duration;

use testkit::redis::{Cluster, RedisServer, Sentinels, Traffic};
use tokio::time::{Instant, sleep};
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder};
use tollgate::{DAY, FixedWindow, Limit, OnStoreFailure, Source};

use crate::load::{Load, RECOVERY, until_back, until_gone};

/// Longer than any pause of a busy machine, so that a decision by policy means that a healthy node was not called.
const PATIENT: Duration = Duration::from_secs(2);

/// Short, so that a node that hangs becomes unavailable soon.
const TIMEOUT: Duration = Duration::from_millis(200);

fn builder(url: String, timeout: Duration) -> RedisLimiterBuilder {
    let limit = Limit::new("wide", FixedWindow::new(1 << 30, DAY).from_first_request()).expect("within the bounds");
    RedisLimiter::builder(url).limit(limit).store_timeout(timeout).on_store_failure(OnStoreFailure::Deny)
}

/// How a server stops replying.
#[derive(Clone, Copy, Debug)]
enum Silence {
    /// Connections are still accepted.
    Hang,
    /// Packets are dropped.
    PowerCut,
}

impl Silence {
    fn fall(self, cluster: &mut Cluster, node: usize) {
        if matches!(self, Self::PowerCut) {
            cluster.link(node).set(Traffic::PoweredOff);
        }
        cluster.node(node).stop();
    }
}

/// A cluster whose nodes serve their own slots even if others are down, as recommended for limiters.
fn cluster() -> Cluster {
    Cluster::behind_links(&["--cluster-require-full-coverage", "no"])
}

/// Returns keys of the limit, by master.
pub(super) fn keys_by_master(cluster: &Cluster, count: usize) -> [Vec<String>; 3] {
    let mut by_master = [vec![], vec![], vec![]];
    for key in (0..).map(|nth| format!("key {nth}")) {
        let slot = crc16::State::<crc16::XMODEM>::calculate(format!("wide|{key}").as_bytes()) % 16_384;
        let owner = cluster.owner(slot).expect("the nodes agree");
        if by_master[owner].len() < count {
            by_master[owner].push(key);
        }
        if by_master.iter().all(|keys| keys.len() == count) {
            break;
        }
    }
    by_master
}

/// Waits for a condition, without sending requests.
#[track_caller]
fn wait_for(what: &'static str, holds: impl Fn() -> bool) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let begin = Instant::now();
        while !holds() {
            assert!(begin.elapsed() < RECOVERY, "{caller}: not so after {RECOVERY:?}: {what}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn affects_only_its_own_keys(silence: Silence) {
    // A busy machine must not look like a second failure.
    let mut cluster =
        Cluster::behind_links(&["--cluster-require-full-coverage", "no", "--cluster-node-timeout", "5000"]);
    let [hung, mut healthy, more] = keys_by_master(&cluster, 4);
    healthy.extend(more);
    let limiter = builder(cluster.url(), PATIENT).connect().await.expect("the settings are valid");
    for key in healthy.iter().chain(&hung) {
        until_back(&limiter, key).await;
    }
    let slot = cluster.slot_of(0);
    let load = Load::begin(&limiter, healthy.len(), |task| healthy[task].clone());
    silence.fall(&mut cluster, 0);
    cluster.successor(0, slot);
    until_back(&limiter, &hung[0]).await;
    wait_for("all servers are available", || limiter.is_store_available()).await;
    let tally = load.end().await;
    assert_eq!((tally.by_policy, tally.by_local), (0, 0), "{silence:?}: {tally:?}");
    assert!(tally.by_store > 0, "{silence:?}: {tally:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_master_of_a_cluster_affects_only_its_own_keys() {
    affects_only_its_own_keys(Silence::Hang).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_of_a_cluster_without_power_affects_only_its_own_keys() {
    affects_only_its_own_keys(Silence::PowerCut).await;
}

async fn keys_come_back_after_the_promotion(silence: Silence) {
    let mut cluster = cluster();
    let [hung, ..] = keys_by_master(&cluster, 4);
    let limiter = builder(cluster.url(), TIMEOUT).connect().await.expect("the settings are valid");
    until_back(&limiter, &hung[0]).await;
    let slot = cluster.slot_of(0);
    let load = Load::begin(&limiter, hung.len(), |task| hung[task].clone());
    let port = cluster.link(0).port().to_string();
    silence.fall(&mut cluster, 0);
    until_gone(&limiter, &hung[0]).await;
    let failed = || limiter.servers().into_iter().filter(|server| !server.available).collect::<Vec<_>>();
    wait_for("only the hung server is unavailable", || matches!(&*failed(), [only] if only.address.ends_with(&port)))
        .await;
    if let Some(why) = limiter.why_unavailable() {
        assert!(why.detail().ends_with(&format!(":{port}: no answer in time")), "{silence:?}: {why}");
        assert!(why.fix().contains("check its load and the network"), "{silence:?}: {why}");
    }
    load.until_all_answered().await;
    cluster.successor(0, slot);
    until_back(&limiter, &hung[0]).await;
    let tally = load.end().await;
    assert!(tally.by_policy > 0 && tally.without_retry == 0, "{silence:?}: {tally:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_keys_of_a_hung_master_come_back_after_the_promotion() {
    keys_come_back_after_the_promotion(Silence::Hang).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_keys_of_a_master_without_power_come_back_after_the_promotion() {
    keys_come_back_after_the_promotion(Silence::PowerCut).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn seeds_that_hang_do_not_prevent_the_start() {
    let mut cluster = cluster();
    let [hung, healthy, _] = keys_by_master(&cluster, 1);
    let slot = cluster.slot_of(0);
    // A replica fails in the other way.
    Silence::Hang.fall(&mut cluster, 0);
    Silence::PowerCut.fall(&mut cluster, 4);
    let limiter = builder(cluster.url(), TIMEOUT).connect().await.unwrap();
    until_back(&limiter, &healthy[0]).await;
    cluster.successor(0, slot);
    until_back(&limiter, &hung[0]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_limiter_notices_that_a_server_is_gone_and_back() {
    let mut server = RedisServer::start();
    let limiter = builder(server.url(), TIMEOUT).connect().await.unwrap();
    until_back(&limiter, "key").await;
    let requests = limiter.stats().requests;
    server.kill();
    wait_for("the crash is noticed", || !limiter.is_store_available()).await;
    server.restart();
    wait_for("the restart is noticed", || limiter.is_store_available()).await;
    server.stop();
    wait_for("the hang is noticed", || !limiter.is_store_available()).await;
    server.cont();
    wait_for("the end of the hang is noticed", || limiter.is_store_available()).await;
    assert_eq!(limiter.stats().requests, requests, "no request was sent");
    until_back(&limiter, "key").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_request_after_a_restart_is_decided_by_the_store() {
    let mut server = RedisServer::start();
    let limiter = builder(server.url(), PATIENT).connect().await.unwrap();
    for _ in 0..5 {
        assert_eq!(limiter.check("key").await.source(), Source::Store);
        server.restart();
        // The connection was closed while it was idle: the next request waits for a new one.
        let clients =
            || -> String { redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).expect("listed") };
        wait_for("the limiter is connected again", || clients().lines().count() > 1).await;
        wait_for("the limiter knows", || limiter.is_store_available()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_limiter_follows_the_sentinels_from_a_hung_master() {
    let mut sentinels = Sentinels::start();
    let limiter = builder(sentinels.url(), TIMEOUT).connect().await.unwrap();
    until_back(&limiter, "key").await;
    sentinels.master().stop();
    let port = sentinels.wait_for_failover();
    let is_there =
        || limiter.servers().iter().all(|server| server.available && server.address.ends_with(&port.to_string()));
    wait_for("the new master is connected to", is_there).await;
    until_back(&limiter, "key").await;
}

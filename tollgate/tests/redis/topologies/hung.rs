//! A server that hangs or loses power: nothing is answered. It concerns nobody but its own keys, and is replaced.

use std::time::Duration;

use tokio::time::{Instant, sleep};
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder};
use tollgate::{DAY, FixedWindow, Limit, OnStoreFailure, Source};

use crate::load::{Load, RECOVERY, until_back, until_gone};
use crate::servers::{Cluster, RedisServer, Sentinels, Traffic};

/// Longer than any pause of a busy machine, so that an answer by policy means that a healthy node was not asked.
const PATIENT: Duration = Duration::from_secs(2);

/// Short, so that a node that hangs is given up soon.
const TIMEOUT: Duration = Duration::from_millis(200);

fn builder(url: String, timeout: Duration) -> RedisLimiterBuilder {
    let limit = Limit::new("wide", FixedWindow::new(1 << 30, DAY).from_first_request()).expect("within the bounds");
    RedisLimiter::builder(url).limit(limit).store_timeout(timeout).on_store_failure(OnStoreFailure::Deny)
}

/// How a server falls silent.
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

/// A cluster whose nodes serve their own slots whatever happens to others, as clusters of limiters should.
fn cluster() -> Cluster {
    Cluster::behind_links(&["--cluster-require-full-coverage", "no"])
}

/// Keys of the limit by the master that has them.
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

/// Waits until something is so, without asking the limiter for anything.
#[track_caller]
fn until_so(what: &'static str, is_so: impl Fn() -> bool) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let begin = Instant::now();
        while !is_so() {
            assert!(begin.elapsed() < RECOVERY, "{caller}: not so after {RECOVERY:?}: {what}");
            sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn concerns_its_own_keys_alone(silence: Silence) {
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
    until_so("all servers are available", || limiter.is_store_available()).await;
    let tally = load.end().await;
    assert_eq!((tally.by_policy, tally.by_local), (0, 0), "{silence:?}: {tally:?}");
    assert!(tally.by_store > 0, "{silence:?}: {tally:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_master_of_a_cluster_concerns_its_own_keys_alone() {
    concerns_its_own_keys_alone(Silence::Hang).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_of_a_cluster_without_power_concerns_its_own_keys_alone() {
    concerns_its_own_keys_alone(Silence::PowerCut).await;
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
    until_so("the hung server alone is given up", || matches!(&*failed(), [only] if only.address.ends_with(&port)))
        .await;
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
async fn silent_seeds_stop_nobody_from_starting() {
    let mut cluster = cluster();
    let [hung, healthy, _] = keys_by_master(&cluster, 1);
    let slot = cluster.slot_of(0);
    // A replica is silent in the other way.
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
    let questions = limiter.stats().requests;
    server.kill();
    until_so("the crash is noticed", || !limiter.is_store_available()).await;
    server.restart();
    until_so("the restart is noticed", || limiter.is_store_available()).await;
    server.stop();
    until_so("the hang is noticed", || !limiter.is_store_available()).await;
    server.cont();
    until_so("the end of the hang is noticed", || limiter.is_store_available()).await;
    assert_eq!(limiter.stats().requests, questions, "it was not asked for anything");
    until_back(&limiter, "key").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_request_after_a_restart_is_decided_by_the_store() {
    let mut server = RedisServer::start();
    let limiter = builder(server.url(), PATIENT).connect().await.unwrap();
    for _ in 0..5 {
        assert_eq!(limiter.check("key").await.source(), Source::Store);
        server.restart();
        // The connection was closed while nobody used it: the next request waits for a new one.
        let clients =
            || -> String { redis::cmd("CLIENT").arg("LIST").query(&mut server.connection()).expect("listed") };
        until_so("the limiter is connected again", || clients().lines().count() > 1).await;
        until_so("the limiter knows", || limiter.is_store_available()).await;
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
    until_so("the new master is connected to", is_there).await;
    until_back(&limiter, "key").await;
}

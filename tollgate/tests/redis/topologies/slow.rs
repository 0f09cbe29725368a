//! A slow server: it decides as long as it replies within the timeout, and requests to others do not wait for it.

use std::time::Duration;

use testkit::redis::{Cluster, Link, RedisServer, Traffic};
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder};
use tollgate::{DAY, FixedWindow, Limit, OnStoreFailure};

use super::hung::keys_by_master;
use crate::load::{Load, until_back, until_gone};

const FAR: Duration = Duration::from_millis(20);
const VERY_FAR: Duration = Duration::from_millis(200);

/// Longer than any pause of a busy machine.
const PATIENT: Duration = Duration::from_secs(5);

fn builder(url: String, timeout: Duration) -> RedisLimiterBuilder {
    let limit = Limit::new("wide", FixedWindow::new(1 << 30, DAY).from_first_request()).expect("within the bounds");
    RedisLimiter::builder(url).limit(limit).store_timeout(timeout).on_store_failure(OnStoreFailure::Deny)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_distant_server_decides_every_request() {
    for delay in [FAR, VERY_FAR] {
        let server = RedisServer::start();
        let link = Link::to(&server);
        link.set(Traffic::Slow(delay));
        let limiter = builder(link.url(), PATIENT).connect().await.unwrap();
        until_back(&limiter, "key").await;
        let load = Load::begin(&limiter, 8, |task| format!("key {task}"));
        for _ in 0..5 {
            load.until_all_answered().await;
        }
        let tally = load.end().await;
        assert_eq!((tally.by_policy, tally.by_local), (0, 0), "{delay:?}: {tally:?}");
        assert!(limiter.is_store_available(), "{delay:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_slower_than_the_timeout_is_unavailable_until_it_is_fast_again() {
    let server = RedisServer::start();
    let link = Link::to(&server);
    let limiter = builder(link.url(), VERY_FAR / 2).connect().await.unwrap();
    for _ in 0..2 {
        until_back(&limiter, "key").await;
        link.set(Traffic::Slow(VERY_FAR));
        until_gone(&limiter, "key").await;
        link.set(Traffic::Passes);
    }
    until_back(&limiter, "key").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn others_do_not_wait_for_a_slow_node_of_a_cluster() {
    let cluster = Cluster::behind_links(&["--cluster-node-timeout", "60000"]);
    let [slow, mut quick, more] = keys_by_master(&cluster, 4);
    quick.extend(more);
    let limiter = builder(cluster.url(), PATIENT).connect().await.unwrap();
    for key in slow.iter().chain(&quick) {
        until_back(&limiter, key).await;
    }
    cluster.link(0).set(Traffic::Slow(VERY_FAR));
    let slow = Load::begin(&limiter, slow.len(), |task| slow[task].clone());
    let quick = Load::begin(&limiter, quick.len(), |task| quick[task].clone());
    for _ in 0..3 {
        slow.until_all_answered().await;
    }
    let (slow, quick) = (slow.end().await, quick.end().await);
    assert_eq!((slow.by_policy, quick.by_policy), (0, 0), "slow: {slow:?}, quick: {quick:?}");
    // A slow round trip takes 200 ms, a fast one with its pause about 3 ms.
    assert!(quick.by_store > 5 * slow.by_store, "slow: {slow:?}, quick: {quick:?}");
}

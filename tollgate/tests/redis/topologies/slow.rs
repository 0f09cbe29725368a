//! A slow server: it decides as long as it replies within the timeout, and requests to others do not wait for it.

use std::time::Duration;

use futures_util::future::join_all;
use testkit::redis::{Cluster, Link, RedisServer, Sentinels, Traffic};
use tokio::time::{Instant, sleep, timeout};
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder};
use tollgate::{DAY, FixedWindow, Hit, Limit, OnStoreFailure, Source};

use super::hung::keys_by_master;
use crate::load::{Load, RECOVERY, until_back, until_gone};

const FAR: Duration = Duration::from_millis(20);
const VERY_FAR: Duration = Duration::from_millis(200);

/// Longer than any pause of a busy machine.
const PATIENT: Duration = Duration::from_secs(5);

/// The units of each key.
const QUOTA: u64 = 1 << 30;

fn builder(url: String, timeout: Duration) -> RedisLimiterBuilder {
    let limit = Limit::new("wide", FixedWindow::new(QUOTA, DAY).from_first_request()).expect("within the bounds");
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

/// A connection takes several round trips, and with sentinels a lookup comes first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_distant_server_is_connected_to_with_a_login_and_behind_sentinels() {
    let timeout = Duration::from_secs(1);
    let server = RedisServer::with(&["--requirepass", "s3cret"]);
    let link = Link::to(&server);
    link.set(Traffic::Slow(timeout / 2));
    let url = format!("redis://:s3cret@127.0.0.1:{}/1", link.port());
    let limiter = builder(url, timeout).connect().await.unwrap();
    until_back(&limiter, "key").await;

    let mut sentinels = Sentinels::start();
    let sentinel = Link::to(sentinels.sentinel(0));
    sentinel.set(Traffic::Slow(timeout * 3 / 5));
    // The other sentinels use this link too, and must not regard the master as down.
    sentinels.link().set(Traffic::Slow(VERY_FAR));
    let url = format!("redis+sentinel://127.0.0.1:{}/mymaster", sentinel.port());
    let limiter = builder(url, timeout).connect().await.unwrap();
    until_back(&limiter, "key").await;
}

/// Waits until that many units of the keys are taken.
async fn until_taken(limiter: &RedisLimiter, keys: &[String], expected: u64) {
    let begin = Instant::now();
    loop {
        let mut taken = Some(0);
        for key in keys {
            let left = limiter.peek(key).await.ok().map(|decision| decision.remaining());
            taken = taken.zip(left).map(|(taken, left)| taken + QUOTA - left);
        }
        if taken == Some(expected) {
            return;
        }
        assert!(begin.elapsed() < RECOVERY, "{taken:?} units are taken instead of {expected}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// A round trip that is longer than any pause of a busy machine.
const SLOWEST: Duration = Duration::from_secs(2);

/// Waits for replies on the connection, so that earlier replies, and what follows from them, have been handled.
async fn until_handled(limiter: &RedisLimiter) {
    for _ in 0..3 {
        until_back(limiter, "another").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_go_away_leave_nothing_taken() {
    let server = RedisServer::start();
    let link = Link::to(&server);
    let limiter = builder(link.url(), PATIENT).connect().await.unwrap();
    let keys: Vec<String> = (0..50).map(|caller| format!("key {}", caller % 5)).collect();
    until_back(&limiter, "another").await;
    let before = limiter.stats().requests;
    link.set(Traffic::Slow(SLOWEST));
    let calls = keys.iter().map(|key| timeout(FAR, limiter.check(key)));
    let decided = join_all(calls).await.into_iter().filter(Result::is_ok).count();
    let sent = limiter.stats().requests - before;
    link.set(Traffic::Passes);
    assert_eq!(decided, 0, "the replies arrive later");
    assert!(sent > 0, "some requests were sent at once");
    until_taken(&limiter, &keys[..5], 0).await;
}

/// The units are spent, whether or not the caller learns that they are counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_of_a_settlement_stay_taken_if_its_caller_goes_away() {
    let server = RedisServer::start();
    let link = Link::to(&server);
    let limiter = builder(link.url(), PATIENT).connect().await.unwrap();
    until_back(&limiter, "another").await;
    let Ok(reservation) = limiter.reserve("key", 10, DAY).await else { panic!("10 units fit") };
    let before = limiter.stats().calls;
    link.set(Traffic::Slow(SLOWEST));
    let mut settling = Box::pin(limiter.settle(reservation, 100));
    while limiter.stats().calls == before {
        let ended = timeout(Duration::from_millis(1), &mut settling).await;
        assert!(ended.is_err(), "the call takes a round trip");
    }
    drop(settling);
    link.set(Traffic::Passes);
    until_handled(&limiter).await;
    until_taken(&limiter, &["key".to_owned()], 100).await;
}

/// Requests of which some have late replies.
struct LateRequests {
    limiter: RedisLimiter,
    /// The first key of each request.
    by_store: Vec<String>,
    by_policy: Vec<String>,
    /// The requests that were sent to the store.
    sent: u64,
    _server: (RedisServer, Link),
}

impl LateRequests {
    /// Sends requests that have too many keys to share a call. Calls of one batch follow one another, so the
    /// third is sent before the deadline, and its reply is late.
    async fn send(policy: OnStoreFailure) -> Self {
        let server = RedisServer::start();
        let link = Link::to(&server);
        let round_trip = SLOWEST / 4;
        let builder = builder(link.url(), round_trip * 5 / 2).on_store_failure(policy);
        let limiter = builder.connect().await.expect("the settings are valid");
        until_back(&limiter, "another").await;
        let (limit, before) = (limiter.id("wide").expect("a limit"), limiter.stats());
        link.set(Traffic::Slow(round_trip));
        let request = async |request: usize| {
            let keys: Vec<String> = (0..200).map(|key| format!("{request} {key}")).collect();
            let hits: Vec<Hit<'_>> = keys.iter().map(|key| Hit::new(limit, key.as_str())).collect();
            let decision = limiter.decide(&hits).await;
            (format!("{request} 0"), decision.source())
        };
        let decided = join_all((0..8).map(request)).await;
        let after = limiter.stats();
        link.set(Traffic::Passes);
        let (by_store, by_policy): (Vec<_>, Vec<_>) =
            decided.into_iter().partition(|(_, source)| *source == Source::Store);
        let keys = |decided: Vec<(String, Source)>| decided.into_iter().map(|(key, _)| key).collect::<Vec<_>>();
        let (by_store, by_policy) = (keys(by_store), keys(by_policy));
        assert_eq!(after.timeouts - before.timeouts, by_policy.len() as u64);
        let sent = after.requests - before.requests;
        assert!(!by_store.is_empty() && sent > by_store.len() as u64, "{sent} sent, {by_store:?}, {by_policy:?}");
        Self { limiter, by_store, by_policy, sent, _server: (server, link) }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_request_that_the_policy_denies_leaves_nothing_taken() {
    let LateRequests { limiter, by_store, by_policy, .. } = &LateRequests::send(OnStoreFailure::Deny).await;
    until_taken(limiter, by_policy, 0).await;
    until_taken(limiter, by_store, by_store.len() as u64).await;
}

/// Otherwise the store would admit the same units once more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_request_that_the_policy_admits_stays_charged() {
    for policy in [OnStoreFailure::Local, OnStoreFailure::Allow] {
        let LateRequests { limiter, by_store, by_policy, sent, .. } = &LateRequests::send(policy).await;
        until_handled(limiter).await;
        let keys: Vec<String> = by_store.iter().chain(by_policy).cloned().collect();
        until_taken(limiter, &keys, *sent).await;
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
    let keys: Vec<String> = slow.iter().chain(&quick).cloned().collect();
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

    // All of them may be far away.
    for master in 0..3 {
        cluster.link(master).set(Traffic::Slow(FAR));
    }
    let load = Load::begin(&limiter, keys.len(), |task| keys[task].clone());
    for _ in 0..5 {
        load.until_all_answered().await;
    }
    let tally = load.end().await;
    assert_eq!((tally.by_policy, tally.by_local), (0, 0), "{tally:?}");
    assert!(limiter.is_store_available());
}

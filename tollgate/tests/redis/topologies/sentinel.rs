//! A master and a replica behind sentinels, and the loss of the master.

use std::time::Duration;

use testkit::redis::{RedisServer, Sentinels, Traffic};
use testkit::wait::poll;
use tokio::time::sleep;
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder, RedisSettings};
use tollgate::{DAY, FixedWindow, HOUR, Limit, OnStoreFailure, Source};

use crate::load::{Load, Tally, until, until_back};

const TIMEOUT: Duration = Duration::from_millis(200);
const TASKS: usize = 32;
const QUOTA: u64 = 1_000_000;

/// The lag of a replica: about a millisecond, and less than this on a busy machine.
const REPLICATION_LAG: Duration = Duration::from_millis(500);

/// The longest that a subscriber takes to notice a dead connection and to subscribe elsewhere.
const DEAF_FOR: Duration = Duration::from_secs(10);

/// Files are read again twice a minute, at most 45 seconds apart.
const FILES_READ_WITHIN: Duration = Duration::from_secs(60);

fn builder(sentinels: &Sentinels, limit: Limit) -> RedisLimiterBuilder {
    let builder = RedisLimiter::builder(sentinels.url()).limit(limit).store_timeout(TIMEOUT);
    // So that only the store admits requests.
    builder.on_store_failure(OnStoreFailure::Deny)
}

fn wide() -> Limit {
    Limit::new("wide", FixedWindow::new(QUOTA, DAY).from_first_request()).expect("the numbers are within the bounds")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_have_their_own_login() {
    let mut sentinels = Sentinels::start();
    for index in 0..3 {
        let mut connection = sentinels.sentinel(index).connection();
        let rights = ["reset", "on", ">s3cret", "+sentinel|get-master-addr-by-name"];
        let _: () = redis::cmd("ACL").arg("SETUSER").arg("ann").arg(&rights).query(&mut connection).expect("set");
        let _: () = redis::cmd("ACL").arg("SETUSER").arg("default").arg("off").query(&mut connection).expect("set");
    }
    let settings = RedisSettings::new(sentinels.url()).sentinel_username("ann").sentinel_password("s3cret");
    let with = |settings: RedisSettings| RedisLimiter::builder(settings).limit(wide()).store_timeout(TIMEOUT);
    let limiter = with(settings.clone()).connect().await.unwrap();
    assert_eq!(limiter.check("key").await.source(), Source::Store);
    let limiter = with(settings.sentinel_password("wr0ng")).connect().await.unwrap();
    assert_eq!(limiter.check("key").await.source(), Source::Local);
    let why = limiter.why_unavailable().expect("no sentinel reports a master").to_string();
    assert!(why.contains("authentication failed") && !why.contains("wr0ng"), "{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_password_file_of_sentinels_is_checked_while_the_master_is_connected() {
    let (mut sentinels, folder) = (Sentinels::start(), tempfile::tempdir().expect("a folder"));
    for index in 0..3 {
        sentinels.sentinel(index).command(&["ACL", "SETUSER", "ann", "reset", "on", ">s3cret", "+sentinel"]);
    }
    let path = folder.path().join("password");
    std::fs::write(&path, "s3cret").expect("written");
    let settings = RedisSettings::new(sentinels.url()).sentinel_username("ann").sentinel_password_file(&path);
    let limiter = RedisLimiter::builder(settings).limit(wide()).connect().await.expect("the settings are valid");
    until_back(&limiter, "key").await;
    std::fs::write(&path, "").expect("written");
    let warnings = || -> Vec<String> { limiter.stores()[0].warnings.iter().map(ToString::to_string).collect() };
    let warned = poll(FILES_READ_WITHIN, || warnings().iter().any(|one| one.contains("is empty")).then_some(()));
    assert!(warned.is_some() && warnings().len() == 1, "{:?}", warnings());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_master_is_found_and_used() {
    let mut sentinels = Sentinels::start();
    let limiter = builder(&sentinels, wide()).connect().await.unwrap();
    assert_eq!(limiter.check("key").await.source(), Source::Store);
    let keys: usize = redis::cmd("DBSIZE").query(&mut sentinels.master().connection()).expect("counted");
    assert_eq!(keys, 1);
}

/// How a master is lost.
#[derive(Clone, Copy, Debug)]
enum Loss {
    Crash,
    Hang,
    PowerCut,
}

async fn survives(loss: Loss) {
    let mut sentinels = Sentinels::start();
    let limiter = builder(&sentinels, wide()).connect().await.expect("the settings are valid");
    let load = Load::begin(&limiter, TASKS, |_| "key".to_owned());
    until_back(&limiter, "probe").await;
    sleep(REPLICATION_LAG).await;
    let surely_replicated = load.admitted();
    sleep(REPLICATION_LAG).await;
    match loss {
        Loss::Crash => sentinels.master().kill(),
        Loss::Hang => sentinels.master().stop(),
        Loss::PowerCut => sentinels.link().set(Traffic::PoweredOff),
    }
    if !matches!(loss, Loss::Crash) {
        load.until_all_answered().await;
    }
    sentinels.wait_for_failover();
    let when_lost = load.admitted();
    until_back(&limiter, "probe").await;
    sleep(Duration::from_millis(300)).await;
    let tally: Tally = load.end().await;
    assert!(tally.by_policy > 0 && tally.by_store > 0 && tally.without_retry == 0, "{loss:?}: {tally:?}");
    let left = limiter.peek("key").await.expect("the new master answers").remaining();
    // The bound: at most what was admitted and had not reached the replica is admitted again. And at least all but
    // the answers that were lost, one per task and loss of a connection.
    let in_all = tally.admitted + left;
    let not_replicated = when_lost - surely_replicated;
    assert!(in_all <= QUOTA + not_replicated, "{loss:?}: {in_all} of {QUOTA}, {not_replicated} in the lag");
    assert!(in_all + 10 * TASKS as u64 >= QUOTA, "{loss:?}: {in_all} of {QUOTA}");
    let keys: usize = redis::cmd("DBSIZE").query(&mut sentinels.master().connection()).expect("counted");
    assert_eq!(keys, 2, "{loss:?}: both keys are on the new master");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_crashes_under_load_is_replaced() {
    survives(Loss::Crash).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_hangs_under_load_is_replaced() {
    survives(Loss::Hang).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_that_loses_power_under_load_is_replaced() {
    survives(Loss::PowerCut).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_hangs_prevents_neither_start_nor_failover() {
    let mut sentinels = Sentinels::start();
    let before = builder(&sentinels, wide()).connect().await.unwrap();
    until_back(&before, "key").await;
    sentinels.sentinel(0).stop();
    let after = builder(&sentinels, wide()).connect().await.unwrap();
    until_back(&after, "key").await;
    sentinels.master().kill();
    sentinels.wait_for_failover();
    until_back(&before, "key").await;
    until_back(&after, "key").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_reports_another_master_is_outvoted() {
    let mut sentinels = Sentinels::start();
    let other = RedisServer::start();
    sentinels.mislead(0, other.port());
    let mut misled = 0;
    for _ in 0..5 {
        let limiter = builder(&sentinels, wide()).connect().await.unwrap();
        until_back(&limiter, "key").await;
        // The connection is lost, and the sentinels are queried again.
        let kill = ["KILL", "TYPE", "normal"];
        let _: u64 = redis::cmd("CLIENT").arg(&kill).query(&mut sentinels.master().connection()).expect("closed");
        until_back(&limiter, "key").await;
        let keys: usize = redis::cmd("DBSIZE").query(&mut other.connection()).expect("counted");
        misled += usize::from(keys > 0);
        let _: () = redis::cmd("FLUSHALL").query(&mut other.connection()).expect("emptied");
    }
    // On a busy machine the other sentinels may all answer too late for one of the votes.
    assert!(misled <= 1, "{misled} of 5 limiters decided there");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_hung_master_is_replaced_resets_by_other_processes_still_arrive() {
    let mut sentinels = Sentinels::start();
    let one = || Limit::new("one", FixedWindow::new(1, HOUR).from_first_request()).unwrap();
    let here = builder(&sentinels, one()).connect().await.unwrap();
    let _ = until(&here, "key", Duration::from_secs(5), |decision| decision.source() == Source::DenialCache).await;
    // The subscriber receives nothing any more, and notices that only by a ping.
    sentinels.master().stop();
    sentinels.wait_for_failover();
    until_back(&here, "another").await;
    let there = builder(&sentinels, one()).connect().await.unwrap();
    until_back(&there, "yet another").await;
    // Denied by the new master.
    let _ = until(&here, "fresh", Duration::from_secs(5), |decision| !decision.is_allowed()).await;
    sleep(Duration::from_millis(100)).await;
    assert!(!here.check("fresh").await.is_allowed());
    there.reset("fresh").await.expect("reset");
    let _ = until(&here, "fresh", DEAF_FOR, |decision| decision.is_allowed()).await;
}

/// Returns the number of subscriptions to resets.
fn subscriptions(server: &RedisServer) -> u64 {
    let mut command = redis::cmd("PUBSUB");
    let counted = command.arg("NUMSUB").arg("rate_limit:changed").query(&mut server.connection());
    let (_, count): (String, u64) = counted.expect("counted");
    count
}

async fn until_subscribed(server: &RedisServer, expected: u64) {
    let mut counted = u64::MAX;
    let subscribed = async {
        while counted != expected {
            sleep(Duration::from_millis(20)).await;
            counted = subscriptions(server);
        }
    };
    let subscribed = tokio::time::timeout(DEAF_FOR, subscribed).await;
    assert!(subscribed.is_ok(), "{counted} subscriptions, not {expected}");
}

/// As after a partition: the sentinels name another master, and nobody closes the subscription at the old one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_subscription_follows_the_master_although_the_old_one_still_answers() {
    let (mut sentinels, other) = (Sentinels::start(), RedisServer::start());
    let limiter = builder(&sentinels, wide()).connect().await.unwrap();
    until_back(&limiter, "key").await;
    until_subscribed(sentinels.master(), 1).await;
    for index in 0..3 {
        sentinels.mislead(index, other.port());
    }
    sentinels.master().command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]);
    until_subscribed(&other, 1).await;
    until_subscribed(sentinels.master(), 0).await;
    until_back(&limiter, "key").await;
    assert_eq!(limiter.servers()[0].address, format!("127.0.0.1:{}", other.port()));
}

//! While the server fails, no request waits for it, each is decided by the failure policy, and the limiter returns to
//! the store on its own.

use std::time::Duration;

use redis::Connection;
use testkit::redis::{Link, RedisServer, Traffic};
use testkit::window::LONG_WINDOW;
use tokio::time::{Instant, sleep, timeout};
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder};
use tollgate::{Decision, FixedWindow, HOUR, Limit, MINUTE, OnStoreFailure, Source};

use crate::load::{Load, RECOVERY, until, until_back, until_gone};

const TIMEOUT: Duration = Duration::from_millis(100);
const TASKS: usize = 64;

/// The time under load before, during and after an outage.
const WHILE: Duration = Duration::from_millis(300);

/// Times that a busy machine itself may be late. Each outage fails hundreds of requests, so they cannot hide counts of
/// single requests.
const LATE: u64 = 3;

fn builder(server: &RedisServer, policy: OnStoreFailure) -> RedisLimiterBuilder {
    builder_for(server.url(), policy)
}

fn builder_for(url: String, policy: OnStoreFailure) -> RedisLimiterBuilder {
    let wide = Limit::new("wide", FixedWindow::new(1 << 32, LONG_WINDOW)).expect("the numbers are within the bounds");
    RedisLimiter::builder(url).limit(wide).store_timeout(TIMEOUT).on_store_failure(policy)
}

fn follows(policy: OnStoreFailure, decision: &Decision) -> bool {
    match policy {
        OnStoreFailure::Local => decision.source() == Source::Local && decision.is_allowed(),
        OnStoreFailure::Allow => decision.source() == Source::Policy && decision.is_allowed(),
        OnStoreFailure::Deny => {
            decision.source() == Source::Policy && !decision.is_allowed() && decision.retry_after().is_some()
        }
        other => panic!("a policy that this suite does not know: {other:?}"),
    }
}

#[derive(Clone, Copy, Debug)]
enum Outage {
    Crash,
    Hang,
    Partition,
    PowerOff,
}

impl Outage {
    fn url(self, server: &RedisServer, link: &Link) -> String {
        match self {
            Self::Crash | Self::Hang => server.url(),
            Self::Partition | Self::PowerOff => link.url(),
        }
    }

    fn begin(self, server: &mut RedisServer, link: &Link) {
        match self {
            Self::Crash => server.kill(),
            Self::Hang => server.stop(),
            Self::Partition => link.set(Traffic::Partitioned),
            Self::PowerOff => link.set(Traffic::PoweredOff),
        }
    }

    fn end(self, server: &mut RedisServer, link: &Link) {
        match self {
            Self::Crash => server.restart(),
            Self::Hang => server.cont(),
            Self::Partition | Self::PowerOff => link.set(Traffic::Passes),
        }
    }
}

/// Tests two outages of one kind under load: the policy decides during each.
async fn survives_outages(outage: Outage, policy: OnStoreFailure) {
    let mut server = RedisServer::start();
    let link = Link::to(&server);
    let url = outage.url(&server, &link);
    let limiter = builder_for(url, policy).connect().await.expect("the settings are valid");
    let load = Load::begin(&limiter, TASKS, |task| format!("user {task}"));
    for nth in 1..=2 {
        until_back(&limiter, "probe").await;
        sleep(WHILE).await;
        outage.begin(&mut server, &link);
        until_gone(&limiter, "probe").await;
        load.until_all_answered().await;
        let during = Instant::now();
        while during.elapsed() < WHILE {
            let decision = limiter.check("probe").await;
            assert!(follows(policy, &decision), "{outage:?} {policy:?}: {decision:?}");
            sleep(Duration::from_millis(5)).await;
        }
        outage.end(&mut server, &link);
        until_back(&limiter, "probe").await;
        let stats = limiter.stats();
        let counted = nth..=nth + LATE;
        assert!(counted.contains(&stats.breaker_opened), "{outage:?}: an outage is counted once: {stats:?}");
        assert!(counted.contains(&stats.breaker_closed), "{outage:?}: an outage is counted once: {stats:?}");
    }
    sleep(WHILE).await;
    assert!(limiter.is_store_available());
    let tally = load.end().await;
    assert_eq!(tally.without_retry, 0, "{outage:?} {policy:?}");
    let (expected, other) = match policy {
        OnStoreFailure::Local => (tally.by_local, tally.by_policy),
        _ => (tally.by_policy, tally.by_local),
    };
    assert!(expected > 0 && other == 0 && tally.by_store > 0, "{outage:?} {policy:?}: {tally:?}");
    assert!(limiter.stats().by_policy >= expected, "{:?}", limiter.stats());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_is_bridged_by_local_limits() {
    survives_outages(Outage::Crash, OnStoreFailure::Local).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_is_bridged_by_allowing() {
    survives_outages(Outage::Crash, OnStoreFailure::Allow).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_is_bridged_by_denying() {
    survives_outages(Outage::Crash, OnStoreFailure::Deny).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hang_is_bridged_by_local_limits() {
    survives_outages(Outage::Hang, OnStoreFailure::Local).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hang_is_bridged_by_allowing() {
    survives_outages(Outage::Hang, OnStoreFailure::Allow).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hang_is_bridged_by_denying() {
    survives_outages(Outage::Hang, OnStoreFailure::Deny).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_is_bridged_by_local_limits() {
    survives_outages(Outage::Partition, OnStoreFailure::Local).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_power_cut_is_bridged_by_denying() {
    survives_outages(Outage::PowerOff, OnStoreFailure::Deny).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quick_restart_under_load_is_survived() {
    let mut server = RedisServer::start();
    let limiter = builder(&server, OnStoreFailure::Local).connect().await.unwrap();
    let load = Load::begin(&limiter, TASKS, |task| format!("user {task}"));
    for _ in 0..5 {
        until_back(&limiter, "probe").await;
        server.restart();
    }
    until_back(&limiter, "probe").await;
    let tally = load.end().await;
    assert_eq!(tally.by_policy, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_limits_admit_the_limit_and_no_more() {
    let mut server = RedisServer::start();
    let limit = Limit::new("five", FixedWindow::new(5, HOUR).from_first_request()).unwrap();
    let limiter = RedisLimiter::builder(server.url()).limit(limit).store_timeout(TIMEOUT).connect().await.unwrap();
    assert!(limiter.check("key").await.is_allowed());
    server.kill();
    until_gone(&limiter, "another").await;
    let mut allowed = 0;
    for _ in 0..20 {
        let decision = limiter.check("key").await;
        assert_eq!(decision.source(), Source::Local);
        allowed += u64::from(decision.is_allowed());
    }
    assert_eq!(allowed, 5, "a node that is alone knows only what it let through itself");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_of_local_limits_can_be_refunded() {
    let mut server = RedisServer::start();
    let limit = Limit::new("five", FixedWindow::new(5, HOUR).from_first_request()).unwrap();
    let limiter = RedisLimiter::builder(server.url()).limit(limit).store_timeout(TIMEOUT).connect().await.unwrap();
    server.kill();
    until_gone(&limiter, "another").await;
    for _ in 0..20 {
        let Ok(reservation) = limiter.reserve("key", 5, MINUTE).await else { panic!("5 of 5 fit") };
        assert_eq!(reservation.decision().source(), Source::Local);
        limiter.refund(reservation).await.expect("it is in this process");
    }
    assert!(limiter.check_n("key", 5).await.is_allowed());
    let _ = limiter.reset("key").await;
    assert!(limiter.check_n("key", 5).await.is_allowed(), "the local count was reset");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_can_have_its_own_policy() {
    let mut server = RedisServer::start();
    let limit =
        |name, policy| Limit::new(name, FixedWindow::new(10, LONG_WINDOW)).unwrap().with_on_store_failure(policy);
    let limiter = RedisLimiter::builder(server.url())
        .limit(limit("allow", OnStoreFailure::Allow))
        .limit(limit("deny", OnStoreFailure::Deny))
        .limit(limit("local", OnStoreFailure::Local))
        .store_timeout(TIMEOUT)
        .connect()
        .await
        .unwrap();
    server.kill();
    let _ = until(&limiter, "key", RECOVERY, |_| !limiter.is_store_available()).await;
    let check = async |names: &[&str]| {
        let hits: Vec<_> =
            names.iter().map(|name| tollgate::Hit::new(limiter.id(name).expect("a limit"), "key")).collect();
        let decision = limiter.decide(&hits).await;
        (decision.is_allowed(), decision.source())
    };
    assert_eq!(check(&["allow"]).await, (true, Source::Policy));
    assert_eq!(check(&["deny"]).await, (false, Source::Policy));
    assert_eq!(check(&["local"]).await, (true, Source::Local));
    assert_eq!(check(&["allow", "local"]).await, (true, Source::Local));
    assert_eq!(check(&["allow", "local", "deny"]).await, (false, Source::Policy), "the strictest prevails");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limiter_can_be_created_while_redis_is_down_or_hangs() {
    for outage in [Outage::Crash, Outage::Hang, Outage::PowerOff] {
        let mut server = RedisServer::start();
        let link = Link::to(&server);
        outage.begin(&mut server, &link);
        let connect = builder_for(outage.url(&server, &link), OnStoreFailure::Allow).connect();
        let limiter = timeout(RECOVERY, connect).await.expect("the server is not waited for").unwrap();
        let decision = timeout(RECOVERY, limiter.check("key")).await.expect("the server is not waited for");
        assert_eq!((decision.is_allowed(), decision.source()), (true, Source::Policy), "{outage:?}");
        assert!(limiter.peek("key").await.unwrap_err().is_unavailable(), "{outage:?}");
        outage.end(&mut server, &link);
        until_back(&limiter, "key").await;
        assert_eq!(limiter.peek("key").await.unwrap().remaining(), (1 << 32) - 1, "{outage:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_operation_ends_within_the_timeout() {
    let mut server = RedisServer::start();
    let limiter = builder(&server, OnStoreFailure::Deny).connect().await.unwrap();
    // A busy machine may answer one later than the timeout.
    let reserve = async |cost| {
        let reserved = async {
            loop {
                if let Ok(reservation) = limiter.reserve("key", cost, MINUTE).await {
                    return reservation;
                }
            }
        };
        timeout(RECOVERY, reserved).await.expect("the units fit")
    };
    let (allowed, first, second) = (reserve(1).await, reserve(5).await, reserve(5).await);
    server.stop();
    let all = async {
        tokio::join!(
            limiter.peek("key"),
            limiter.reset("key"),
            limiter.refund(allowed),
            limiter.settle(first, 1),
            limiter.settle(second, 9),
        )
    };
    let (peek, reset, refund, less, more) = timeout(RECOVERY, all).await.expect("the server is not waited for");
    let errors = [peek.err(), reset.err(), refund.err(), less.err(), more.err()];
    assert!(errors.iter().all(|error| error.as_ref().is_some_and(|error| error.is_unavailable())), "{errors:?}");
}

/// Returns the number of connections to the server, including that of the test.
fn connections(connection: &mut Connection) -> usize {
    let list: String = redis::cmd("CLIENT").arg("LIST").query(connection).expect("Redis lists its clients");
    list.lines().count()
}

async fn until_connections(connection: &mut Connection, is_expected: impl Fn(usize) -> bool) {
    let begin = Instant::now();
    while !is_expected(connections(connection)) {
        assert!(begin.elapsed() < RECOVERY, "still {} connections", connections(connection));
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_the_limiter_ends_its_connections() {
    let mut server = RedisServer::start();
    let mut connection = server.connection();
    let before = connections(&mut connection);
    let limiter = builder(&server, OnStoreFailure::Local).connect().await.unwrap();
    let clone = limiter.clone();
    // One for commands and one for the subscription.
    until_connections(&mut connection, |count| count == before + 2).await;
    drop(limiter);
    assert_eq!(clone.check("key").await.source(), Source::Store, "a clone goes on");
    drop(clone);
    until_connections(&mut connection, |count| count == before).await;

    // Dropped during an outage, with decisions in flight.
    let limiter = builder(&server, OnStoreFailure::Local).connect().await.unwrap();
    let load = Load::begin(&limiter, TASKS, |task| format!("user {task}"));
    until_back(&limiter, "probe").await;
    server.stop();
    until_gone(&limiter, "probe").await;
    load.end().await;
    drop(limiter);
    server.cont();
    until_connections(&mut connection, |count| count == before).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outages_leave_no_connections_behind() {
    let mut server = RedisServer::start();
    let mut connection = server.connection();
    let before = connections(&mut connection);
    let limiter = builder(&server, OnStoreFailure::Local).connect().await.unwrap();
    for _ in 0..3 {
        until_back(&limiter, "probe").await;
        server.stop();
        until_gone(&limiter, "probe").await;
        sleep(WHILE).await;
        server.cont();
    }
    until_back(&limiter, "probe").await;
    until_connections(&mut connection, |count| count == before + 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_reason_for_an_outage_is_reported_until_redis_is_back() {
    let mut server = RedisServer::start();
    let limiter = builder(&server, OnStoreFailure::Deny).connect().await.unwrap();
    assert_eq!(limiter.why_unavailable(), None);
    assert_eq!(limiter.on_store_failure(), OnStoreFailure::Deny);
    assert_eq!(Some(limiter.address()), server.url().strip_prefix("redis://"));
    server.kill();
    let _ = until(&limiter, "key", RECOVERY, |_| !limiter.is_store_available()).await;
    let why = limiter.why_unavailable().expect("the store is unavailable");
    assert!(why.is_unavailable(), "{why}");
    let message = why.to_string();
    assert!(message.contains("Connection refused") && message.contains(why.detail()), "{message}");
    assert!(message.ends_with(&format!(": {}", why.fix())), "{message}");
    server.restart();
    until_back(&limiter, "key").await;
    assert_eq!(limiter.why_unavailable(), None);
}

//! Limits on several stores: a request takes from all of them or from none, and a store that fails affects only its own
//! limits.

mod failing;
mod settings;

use std::time::Duration;

use futures_util::future::join_all;
use testkit::redis::{Cluster, RedisServer};
use tokio::time::{Instant, sleep};
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder};
use tollgate::{
    Consistency, DAY, Decision, FixedWindow, HOUR, Hit, Limit, LimitId, LimitSet, Rate, SECOND, Settlement,
    SlidingWindowLog, Source, TokenBucket,
};

/// The longest wait, even on a busy machine.
const MAX_WAIT: Duration = Duration::from_secs(20);

fn window(name: &str, quota: u64) -> Limit {
    Limit::new(name, FixedWindow::new(quota, DAY).from_first_request()).expect("the numbers are within the bounds")
}

/// A limiter with a default store and a store `sessions`.
fn builder(default: String, sessions: String) -> RedisLimiterBuilder {
    // A long timeout, so that a busy machine does not look like a failing store.
    RedisLimiter::builder(default).store("sessions", sessions).store_timeout(5 * SECOND)
}

fn id(limiter: &RedisLimiter, name: &str) -> LimitId {
    limiter.id(name).expect("a limit of that name")
}

async fn left(limiter: &RedisLimiter, limit: &str, key: &str) -> u64 {
    let decision = limiter.decide(&[Hit::new(id(limiter, limit), key).cost(0)]).await;
    assert_eq!(decision.source(), Source::Store, "{decision:?}");
    decision.remaining()
}

fn keys(server: &RedisServer) -> Vec<String> {
    let mut keys: Vec<String> =
        redis::cmd("KEYS").arg("*").query(&mut server.connection()).expect("the server answers");
    keys.retain(|key| !key.contains("{nodes}"));
    keys.sort_unstable();
    keys
}

/// Waits for a condition, with a bound.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    while !holds().await {
        assert!(begin.elapsed() < MAX_WAIT, "after {MAX_WAIT:?} it does not hold that {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_keys_of_a_limit_are_on_its_store() {
    let (default, sessions) = (RedisServer::start(), RedisServer::start());
    let limiter = builder(default.url(), sessions.url())
        .limit(window("global", 10))
        .limit(window("per-session", 5).with_store("sessions"))
        .limit(window("per-user", 7).with_store("default"))
        .connect()
        .await
        .expect("connects");
    for nth in 1..=5 {
        let decision = limiter.check("ann").await;
        assert!(decision.is_allowed() && decision.source() == Source::Store, "{nth}: {decision:?}");
        assert_eq!((decision.remaining(), decision.limit()), (5 - nth, Some(id(&limiter, "per-session"))));
    }
    assert_eq!(keys(&default), ["rate_limit:{global|ann}", "rate_limit:{per-user|ann}"]);
    assert_eq!(keys(&sessions), ["rate_limit:{per-session|ann}"]);
    let peeked = limiter.peek("ann").await.expect("both answer");
    assert_eq!((peeked.remaining(), peeked.limit()), (0, Some(id(&limiter, "per-session"))));
    assert_eq!(limiter.stats().breaker_opened, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_denial_on_any_store_takes_nothing_from_the_others() {
    let (default, sessions) = (RedisServer::start(), RedisServer::start());
    let quotas = [("a", 1_000), ("b", 1_000), ("c", 1_000), ("d", 1_000)];
    for tight in 0..quotas.len() {
        let mut limits = LimitSet::new();
        for (index, (name, quota)) in quotas.into_iter().enumerate() {
            let limit = window(&format!("{name} {tight}"), if index == tight { 3 } else { quota });
            // Two on each store: those on one store are decided together.
            limits = limits.limit(if index % 2 == 0 { limit } else { limit.with_store("sessions") });
        }
        for cached in [true, false] {
            let builder = builder(default.url(), sessions.url()).limits(limits.clone());
            let builder = if cached { builder } else { builder.without_denial_cache() };
            let limiter = builder.connect().await.expect("connects");
            let key = format!("{cached}");
            for nth in 1..=8 {
                let decision = limiter.check(&key).await;
                assert_eq!(decision.is_allowed(), nth <= 3, "{tight} {nth}: {decision:?}");
                assert_eq!(
                    decision.limit().and_then(|id| limiter.limit(id)).map(Limit::quota),
                    Some(3),
                    "the tightest is reported"
                );
            }
            for (index, (name, quota)) in quotas.into_iter().enumerate() {
                let expected = if index == tight { 0 } else { quota - 3 };
                assert_eq!(left(&limiter, &format!("{name} {tight}"), &key).await, expected, "{tight} {name}");
            }
        }
    }
}

async fn never_admits_too_many(default: String, sessions: String) {
    let build = || {
        builder(default.clone(), sessions.clone())
            .limit(
                Limit::new("loose", SlidingWindowLog::new(400, DAY))
                    .expect("the numbers are within the bounds")
                    .with_store("sessions"),
            )
            .limit(
                Limit::new("tight", TokenBucket::new(150, Rate::new(1, DAY)))
                    .expect("the numbers are within the bounds")
                    .with_store("sessions"),
            )
            .limit(window("wide", 2_000))
            .limit(window("narrow", 160))
            .connect()
    };
    let limiters = [build().await.expect("connects"), build().await.expect("connects")];
    let tasks = (0..32).map(|task| {
        let limiter = limiters[task % 2].clone();
        tokio::spawn(async move {
            let mut admitted = 0;
            for _ in 0..15 {
                let decision = limiter.check("key").await;
                assert!(matches!(decision.source(), Source::Store | Source::DenialCache), "{decision:?}");
                admitted += u64::from(decision.is_allowed());
            }
            admitted
        })
    });
    let mut admitted: u64 = join_all(tasks).await.into_iter().map(|task| task.expect("no task panics")).sum();
    // A denied request holds units for a moment before it gives them back, so others may be denied too early.
    let limiter = &limiters[0];
    until("the whole quota is admitted", async || {
        admitted += u64::from(limiter.check("key").await.is_allowed());
        left(limiter, "tight", "key").await == 0
    })
    .await;
    assert_eq!(admitted, 150);
    let left = ["loose", "wide", "narrow"].map(|limit| left(limiter, limit, "key"));
    assert_eq!(join_all(left).await, [250, 1_850, 10], "units of denied requests are given back");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_never_admit_too_many_at_once() {
    let (default, sessions) = (RedisServer::start(), RedisServer::start());
    never_admits_too_many(default.url(), sessions.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_and_a_cluster_never_admit_too_many_at_once() {
    let (server, cluster) = (RedisServer::start(), Cluster::start());
    never_admits_too_many(server.url(), cluster.url()).await;
    let _: () = redis::cmd("FLUSHALL").query(&mut server.connection()).expect("flushed");
    let cluster = Cluster::start();
    never_admits_too_many(cluster.url(), server.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_reaches_every_store_and_every_process() {
    let (default, sessions) = (RedisServer::start(), RedisServer::start());
    let build = || {
        builder(default.url(), sessions.url())
            .limit(window("global", 2))
            .limit(window("per-session", 2).with_store("sessions"))
            .connect()
    };
    let (here, there) = (build().await.expect("connects"), build().await.expect("connects"));
    for name in ["global", "per-session"] {
        let hit = || [Hit::new(id(&here, name), "ann")];
        while here.decide(&hit()).await.is_allowed() {}
        until("the denial is cached", async || here.decide(&hit()).await.source() == Source::DenialCache).await;
    }
    assert_eq!((keys(&default).len(), keys(&sessions).len()), (1, 1));
    there.reset("ann").await.expect("both stores answer");
    assert_eq!((keys(&default).len(), keys(&sessions).len()), (0, 0));
    until("the other process has noticed it", async || here.check("ann").await.is_allowed()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refunds_and_settlements_reach_the_store_of_their_limit() {
    let (default, cluster) = (RedisServer::start(), Cluster::start());
    let limiter = builder(default.url(), cluster.url())
        .limit(window("global", 100))
        .limit(window("per-session", 50).with_store("sessions"))
        .connect()
        .await
        .expect("connects");
    let reserved = limiter.reserve("ann", 20, HOUR).await.expect("both have units");
    assert_eq!((left(&limiter, "global", "ann").await, left(&limiter, "per-session", "ann").await), (80, 30));
    assert_eq!(limiter.settle(reserved, 5).await, Ok(Settlement::Settled));
    assert_eq!((left(&limiter, "global", "ann").await, left(&limiter, "per-session", "ann").await), (95, 45));
    let reserved = limiter.reserve("ann", 10, HOUR).await.expect("both have units");
    assert_eq!(limiter.settle(reserved, 40).await, Ok(Settlement::Settled));
    assert_eq!((left(&limiter, "global", "ann").await, left(&limiter, "per-session", "ann").await), (55, 5));
    let reserved = limiter.reserve("ann", 5, HOUR).await.expect("both have units");
    assert_eq!(limiter.refund(reserved).await, Ok(Settlement::Settled));
    assert_eq!((left(&limiter, "global", "ann").await, left(&limiter, "per-session", "ann").await), (55, 5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_taken_from_the_store_of_their_limit() {
    const QUOTA: u64 = 1_000;
    let (default, sessions) = (RedisServer::start(), RedisServer::start());
    let leased = |name: &str| window(name, QUOTA).with_consistency(Consistency::Leased).with_store("sessions");
    let limiter = builder(default.url(), sessions.url())
        .limit(window("per-user", 300))
        .limit(leased("global"))
        .connect()
        .await
        .expect("connects");
    until("requests are decided from a lease", async || {
        let _ = limiter.decide(&[Hit::new(id(&limiter, "global"), "all")]).await;
        limiter.stats().leased > 0
    })
    .await;
    let mut admitted = 0;
    for _ in 0..400 {
        let hits = [Hit::new(id(&limiter, "per-user"), "ann"), Hit::new(id(&limiter, "global"), "other")];
        admitted += u64::from(limiter.decide(&hits).await.is_allowed());
    }
    assert_eq!(admitted, 300);
    limiter.return_leases().await;
    assert_eq!(left(&limiter, "per-user", "ann").await, 0);
    let exact = async || {
        // More than a lease may have, so that the store decides.
        let hit = Hit::new(id(&limiter, "global"), "other").cost(QUOTA - 300);
        limiter.decide(&[hit]).await
    };
    let decision: Decision = exact().await;
    assert!(decision.is_allowed(), "only admitted units are charged: {decision:?}");
    assert!(!exact().await.is_allowed());
    assert_eq!(keys(&default), ["rate_limit:{per-user|ann}"]);
    assert_eq!(keys(&sessions), ["rate_limit:{global|all}", "rate_limit:{global|other}"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_that_moves_to_another_store_counts_there() {
    let (default, sessions) = (RedisServer::start(), RedisServer::start());
    let before = builder(default.url(), sessions.url()).limit(window("per-user", 3)).connect().await.expect("connects");
    while before.check("ann").await.is_allowed() {}
    let after = before.with_limits(vec![window("per-user", 3).with_store("sessions")]).expect("the store exists");
    for nth in 1..=5 {
        let decision = after.check("ann").await;
        assert_eq!(decision.is_allowed(), nth <= 3, "{nth}: {decision:?}");
    }
    assert!(!before.check("ann").await.is_allowed(), "the former limiter still counts on the default store");
    assert_eq!((keys(&default).len(), keys(&sessions).len()), (1, 1));
    let unknown = after.with_limits(vec![window("per-user", 3).with_store("sesions")]).expect_err("a typing error");
    assert_eq!(
        unknown.to_string(),
        "limit `per-user`: there is no store `sesions`: use one of `default`, `sessions`, or add a store of that name"
    );
}

//! A store that hangs or crashes: its own limits follow their failure policy, the others count, and it recovers.

use tollgate::OnStoreFailure;

use super::*;

/// How a server fails.
#[derive(Clone, Copy, Debug)]
enum Failure {
    Hang,
    Kill,
}

impl Failure {
    fn begin(self, server: &mut RedisServer) {
        match self {
            Self::Hang => server.stop(),
            Self::Kill => server.kill(),
        }
    }

    fn end(self, server: &mut RedisServer) {
        match self {
            Self::Hang => server.cont(),
            Self::Kill => server.restart(),
        }
    }
}

const FAILURES: [Failure; 2] = [Failure::Hang, Failure::Kill];

async fn limiter(default: &RedisServer, sessions: &RedisServer, policy: OnStoreFailure) -> RedisLimiter {
    let limiter = builder(default.url(), sessions.url()).store_timeout(SECOND);
    let limiter = limiter.limit(window("global", 1_000)).limit(window("healthy", 1_000));
    let failing = window("failing", 5).with_store("sessions").with_on_store_failure(policy);
    limiter.limit(failing).connect().await.expect("connects")
}

/// Waits until the store `sessions` is unavailable.
async fn until_unavailable(limiter: &RedisLimiter) {
    until("the store is unavailable", async || {
        let _ = limiter.decide(&[Hit::new(id(limiter, "failing"), "probe")]).await;
        !limiter.is_store_available()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_fails_affects_only_its_own_limits_and_recovers() {
    for failure in FAILURES {
        let (default, mut sessions) = (RedisServer::start(), RedisServer::start());
        let limiter = limiter(&default, &sessions, OnStoreFailure::Deny).await;
        assert!(limiter.check("ann").await.is_allowed());
        failure.begin(&mut sessions);
        until_unavailable(&limiter).await;
        for _ in 0..20 {
            let healthy = limiter.decide(&[Hit::new(id(&limiter, "healthy"), "bob")]).await;
            assert!(healthy.is_allowed() && healthy.source() == Source::Store, "{failure:?}: {healthy:?}");
            let denied = limiter.check("bob").await;
            assert!(!denied.is_allowed(), "{failure:?}: {denied:?}");
            assert_eq!((denied.source(), denied.limit()), (Source::Policy, Some(id(&limiter, "failing"))));
        }
        assert_eq!(left(&limiter, "global", "bob").await, 1_000, "{failure:?}: denied requests take nothing");
        assert_eq!(left(&limiter, "healthy", "bob").await, 980, "{failure:?}");
        let status = limiter.stores();
        let failed: Vec<&str> =
            status.iter().filter(|store| store.why_unavailable.is_some()).map(|store| &*store.name).collect();
        assert_eq!(failed, ["sessions"], "{failure:?}");
        let why = limiter.why_unavailable().expect("it has failed").to_string();
        assert!(why.contains("store sessions: "), "{failure:?}: {why}");
        failure.end(&mut sessions);
        until("the store is back", async || limiter.is_store_available()).await;
        let decision = limiter.check("carol").await;
        assert!(decision.is_allowed() && decision.source() == Source::Store, "{failure:?}: {decision:?}");
        assert_eq!(left(&limiter, "failing", "carol").await, 4, "{failure:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_default_store_does_not_affect_named_stores() {
    for failure in FAILURES {
        let (mut default, sessions) = (RedisServer::start(), RedisServer::start());
        let limiter = builder(default.url(), sessions.url())
            .store_timeout(SECOND)
            .limit(window("failing", 5).with_on_store_failure(OnStoreFailure::Allow))
            .limit(window("healthy", 10).with_store("sessions"))
            .connect()
            .await
            .expect("connects");
        failure.begin(&mut default);
        until_unavailable(&limiter).await;
        let mut admitted = 0;
        for _ in 0..30 {
            let decision = limiter.check("ann").await;
            admitted += u64::from(decision.is_allowed());
            assert_eq!(decision.limit(), Some(id(&limiter, "healthy")), "{failure:?}: {decision:?}");
            assert!(matches!(decision.source(), Source::Store | Source::DenialCache), "{failure:?}: {decision:?}");
        }
        assert_eq!(admitted, 10, "{failure:?}");
        failure.end(&mut default);
        until("the store is back", async || limiter.is_store_available()).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_share_replaces_the_limits_of_a_failed_store() {
    let (default, mut sessions) = (RedisServer::start(), RedisServer::start());
    let limiter = limiter(&default, &sessions, OnStoreFailure::Local).await;
    sessions.kill();
    until_unavailable(&limiter).await;
    let mut admitted = 0;
    for _ in 0..20 {
        let decision = limiter.check("ann").await;
        admitted += u64::from(decision.is_allowed());
        assert_eq!((decision.limit(), decision.source()), (Some(id(&limiter, "failing")), Source::Local));
    }
    assert_eq!(admitted, 5);
    assert_eq!(left(&limiter, "global", "ann").await, 995);
    // More often than the local share allows without refunds.
    for _ in 0..10 {
        let reserved = limiter.reserve("bob", 1, HOUR).await.expect("all have units");
        assert_eq!(limiter.refund(reserved).await, Ok(Settlement::Settled));
    }
    assert_eq!(left(&limiter, "global", "bob").await, 1_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_local_share_is_divided_by_the_nodes_of_its_own_store() {
    let (mut defaults, mut sessions) = ([RedisServer::start(), RedisServer::start()], RedisServer::start());
    let mut nodes = Vec::new();
    for default in &defaults {
        let limiter = builder(default.url(), sessions.url()).store_timeout(SECOND);
        let limiter = limiter.limit(window("alone", 10)).limit(window("shared", 10).with_store("sessions"));
        nodes.push(limiter.connect().await.expect("connects"));
    }
    for node in &nodes {
        until("both nodes are seen on the shared store", async || node.fleet_nodes() == 2).await;
    }
    defaults.iter_mut().for_each(RedisServer::kill);
    sessions.kill();
    for node in &nodes {
        let count = async |name: &str| {
            let hit = || [Hit::new(id(node, name), "ann")];
            until("the store is unavailable", async || {
                node.decide(&[Hit::new(id(node, name), "probe")]).await.source() == Source::Local
            })
            .await;
            let mut admitted = 0;
            while node.decide(&hit()).await.is_allowed() {
                admitted += 1;
            }
            admitted
        };
        assert_eq!((count("alone").await, count("shared").await), (10, 5));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_subscription_on_one_store_keeps_the_denials_of_the_other() {
    let (default, mut sessions) = (RedisServer::start(), RedisServer::start());
    // Exhausted for a day, so a denial is cached for the maximum time.
    let limiter = builder(default.url(), sessions.url()).store_timeout(SECOND);
    let limiter = limiter.limit(window("global", 1)).limit(window("per-session", 1).with_store("sessions"));
    let limiter = limiter.connect().await.expect("connects");
    let denied = async |name: &str| limiter.decide(&[Hit::new(id(&limiter, name), "ann")]).await.source();
    for name in ["global", "per-session"] {
        let _ = denied(name).await;
        until("the denial is cached", async || denied(name).await == Source::DenialCache).await;
    }
    sessions.kill();
    until("no denial of the lost store is certain", async || denied("per-session").await == Source::Local).await;
    until("the other store's still are", async || denied("global").await == Source::DenialCache).await;
}

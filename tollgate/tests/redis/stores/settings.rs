//! Settings of named stores: logins and prefixes apply to one store, and mistakes are reported with their fix.

use tollgate::redis::RedisSettings;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_store_has_its_own_login_and_prefix() {
    let (default, sessions) = (RedisServer::start(), RedisServer::with(&["--requirepass", "hunter2"]));
    let at = format!("redis://127.0.0.1:{}", sessions.port());
    let settings = RedisSettings::new(at).prefix("shop").password("hunter2");
    let limiter = RedisLimiter::builder(default.url())
        .store("sessions", settings)
        .store_timeout(5 * SECOND)
        .limit(window("global", 2))
        .limit(window("per-session", 1).with_store("sessions"))
        .connect()
        .await
        .expect("connects");
    assert!(limiter.check("ann").await.is_allowed());
    assert_eq!(keys(&default), ["rate_limit:{global|ann}"]);
    assert_eq!(keys(&sessions), ["shop:rate_limit:{per-session|ann}"]);
    until("the denial is cached", async || limiter.check("ann").await.source() == Source::DenialCache).await;
    limiter.reset("ann").await.expect("both answer");
    assert!(limiter.check("ann").await.is_allowed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_and_stores_are_listed_with_their_names() {
    let (default, cluster) = (RedisServer::start(), Cluster::start());
    let limiter = builder(default.url(), cluster.url()).limit(window("global", 1)).connect().await.expect("connects");
    until("all servers are connected", async || limiter.servers().len() == 4 && limiter.is_store_available()).await;
    let servers = limiter.servers();
    let names: Vec<&str> = servers.iter().map(|server| &*server.store).collect();
    assert_eq!(names, ["default", "sessions", "sessions", "sessions"]);
    assert_eq!(servers[0].address, format!("127.0.0.1:{}", default.port()));
    let stores = limiter.stores();
    let names: Vec<&str> = stores.iter().map(|store| &*store.name).collect();
    assert_eq!(names, ["default", "sessions"]);
    assert_eq!((stores[0].address.as_str(), stores[0].why_unavailable.as_ref()), (limiter.address(), None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mistakes_are_reported_with_their_fix() {
    // No server listens there: mistakes are found before a connection is made.
    let at = || RedisLimiter::builder("redis://127.0.0.1:1").limit(window("global", 1));
    let url = "redis://127.0.0.1:1";
    let plan = |store: Option<&str>| {
        let limit = window("per-user", 5);
        store.map_or(limit.clone(), |store| limit.clone().with_store(store))
    };
    let cases = [
        (
            at().limit(plan(Some("sessions"))),
            "limit `per-user`: there is no store `sessions`: use one of `default`, or add a store of that name",
        ),
        (at().store("memory", url), "the name `memory` of a store is reserved: choose another name"),
        (at().store("default", url), "the name `default` of a store is reserved: choose another name"),
        (at().store("a", url).store("a", url), "two stores are named `a`: give each store its own name"),
        (at().store("a b", url), "`a b` is not a name of a store: use letters, digits and _ - ., 64 at most"),
        (
            at().store("a", RedisSettings::new(url).username("ann")),
            "store `a`: there is a user without a password: set password_file, or remove the user",
        ),
        (
            at().store("a", url).limit(plan(Some("a"))).variant("gold", plan(None)),
            "limit `per-user`: a variant is on another store than its limit: give both the same store: a variant counts \
             the keys of its limit",
        ),
    ];
    for (builder, expected) in cases {
        assert_eq!(builder.connect().await.expect_err("a mistake").to_string(), expected);
    }
}

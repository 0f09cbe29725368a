//! The same mishaps on every topology: lost scripts, lost keys, a missing permission, full memory.

use std::time::Duration;

use redis::Connection;
use testkit::redis::{Cluster, RedisServer, Sentinels};
use tollgate::redis::{RedisLimiter, StoreError};
use tollgate::{DAY, FixedWindow, Limit, OnStoreFailure, Source};

use crate::load::{until_available, until_back};

/// Longer than any pause of a busy machine.
const PATIENT: Duration = Duration::from_secs(5);
const QUOTA: u64 = 1_000_000;

/// A limiter with keys on all masters.
struct Fixture {
    limiter: RedisLimiter,
    keys: Vec<String>,
}

impl Fixture {
    async fn new(url: String) -> Self {
        let limit = Limit::new("wide", FixedWindow::new(QUOTA, DAY).from_first_request()).expect("within the bounds");
        let builder = RedisLimiter::builder(url).limit(limit).store_timeout(PATIENT);
        let limiter = builder.on_store_failure(OnStoreFailure::Deny).connect().await.expect("the settings are valid");
        let keys: Vec<String> = (0..30).map(|key| format!("key {key}")).collect();
        for key in &keys {
            until_back(&limiter, key).await;
        }
        let fixture = Self { limiter, keys };
        fixture.reset().await;
        fixture
    }

    async fn reset(&self) {
        for key in &self.keys {
            self.limiter.reset(key).await.expect("reset");
        }
    }

    /// Takes a unit of every key, and checks the number of units that each had before.
    async fn take_of(&self, before: u64) {
        for key in &self.keys {
            let decision = self.limiter.check(key).await;
            assert_eq!((decision.source(), decision.remaining()), (Source::Store, before - 1), "{key}");
        }
    }

    /// Checks that the policy decides for every key, and returns the reason.
    async fn refused(&self) -> StoreError {
        for key in &self.keys {
            let decision = self.limiter.check(key).await;
            assert_eq!((decision.source(), decision.is_allowed()), (Source::Policy, false), "{key}");
        }
        assert!(self.limiter.servers().iter().all(|server| !server.available), "{:?}", self.limiter.servers());
        let why = self.limiter.why_unavailable().expect("it is of no use");
        assert!(why.is_refused(), "{why}");
        why
    }

    async fn is_used_again(&self) {
        for key in &self.keys {
            until_back(&self.limiter, key).await;
        }
        until_available(&self.limiter).await;
    }
}

async fn survives_mishaps(url: String, mut masters: Vec<Connection>) {
    let mut all = |words: &[&str]| {
        for master in &mut masters {
            let mut command = redis::cmd(words[0]);
            let _: redis::Value = command.arg(&words[1..]).query(master).expect("the server runs it");
        }
    };
    let fixture = Fixture::new(url).await;
    fixture.take_of(QUOTA).await;

    all(&["SCRIPT", "FLUSH"]);
    fixture.take_of(QUOTA - 1).await;

    all(&["FLUSHALL"]);
    fixture.take_of(QUOTA).await;
    assert_eq!(fixture.limiter.stats().breaker_opened, 0, "none of that is a failure");

    all(&["ACL", "SETUSER", "default", "-mget"]);
    let why = fixture.refused().await;
    assert!(why.fix().contains("ACL SETUSER"), "{why}");
    all(&["ACL", "SETUSER", "default", "+@all"]);
    fixture.is_used_again().await;

    fixture.reset().await;
    fixture.take_of(QUOTA).await;
    all(&["CONFIG", "SET", "maxmemory", "1"]);
    let why = fixture.refused().await;
    assert!(why.fix().contains("maxmemory"), "{why}");
    for key in &fixture.keys {
        let left = fixture.limiter.peek(key).await.expect("a peek needs no memory").remaining();
        assert_eq!(left, QUOTA - 1, "{key}");
    }
    all(&["CONFIG", "SET", "maxmemory", "0"]);
    fixture.is_used_again().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_server_survives_mishaps() {
    let server = RedisServer::start();
    survives_mishaps(server.url(), vec![server.connection()]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_master_behind_sentinels_survives_mishaps() {
    let mut sentinels = Sentinels::start();
    let master = sentinels.master().connection();
    survives_mishaps(sentinels.url(), vec![master]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_survives_mishaps() {
    let mut cluster = Cluster::with(&["--cluster-node-timeout", "60000"]);
    let masters = cluster.masters().into_iter().map(|master| cluster.node(master).connection()).collect();
    survives_mishaps(cluster.url(), masters).await;
}

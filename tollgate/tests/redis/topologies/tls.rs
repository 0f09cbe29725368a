//! TLS to sentinels and clusters, with a private certificate authority and client certificates.

use std::path::PathBuf;
use std::time::Duration;

use testkit::redis::{Cluster, RedisServer, Sentinels};
use tollgate::redis::{RedisLimiter, RedisSettings};
use tollgate::{HOUR, Limit, OnStoreFailure, SlidingWindowLog, Source};

use crate::load::until_back;

/// Keys of all masters of a cluster.
const KEYS: [&str; 6] = ["ann", "bob", "carol", "dave", "eve", "frank"];

fn read(path: PathBuf) -> Vec<u8> {
    std::fs::read(path).expect("a file of the server's directory")
}

async fn limiter(settings: RedisSettings) -> RedisLimiter {
    let limit = Limit::new("log", SlidingWindowLog::new(10, HOUR)).expect("the numbers are within the bounds");
    let builder = RedisLimiter::builder(settings).limit(limit).store_timeout(Duration::from_secs(5));
    builder.on_store_failure(OnStoreFailure::Allow).connect().await.expect("the settings are valid")
}

/// Settings that trust the authority of `server`, without and with a client certificate of it.
fn trusting(url: String, server: &RedisServer) -> [RedisSettings; 2] {
    let without = RedisSettings::new(url).tls_ca(read(server.ca_path()));
    let (certificate, key) = server.client_files();
    let with = without.clone().client_cert(read(certificate)).client_key(read(key));
    [without, with]
}

/// Returns a limiter with the certificates of `server`, which decides, and checks that one with the certificates of another
/// authority and one without a client certificate do not reach the store.
async fn only_the_right_certificates_work(url: String, server: &RedisServer) -> RedisLimiter {
    let stranger = RedisServer::start_tls_with_clients();
    let [without, with] = trusting(url.clone(), server);
    let [_, strange] = trusting(url.clone(), &stranger);
    let (certificate, key) = stranger.client_files();
    // Trusts the servers, but they do not trust its certificate.
    let not_trusted = without.clone().client_cert(read(certificate)).client_key(read(key));
    for (refused, why) in
        [(strange, "another authority"), (without, "no client certificate"), (not_trusted, "not trusted")]
    {
        let refused = limiter(refused).await;
        for key in KEYS {
            assert_eq!(refused.check(key).await.source(), Source::Policy, "{why}");
        }
        assert!(refused.why_unavailable().is_some(), "{why}");
        assert!(refused.peek("ann").await.is_err_and(|error| error.is_unavailable()), "{why}");
    }
    let limiter = limiter(with).await;
    for key in KEYS {
        let decision = limiter.check_n(key, 3).await;
        assert_eq!((decision.source(), decision.remaining()), (Source::Store, 7), "nobody else has counted {key}");
    }
    limiter
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_with_tls_need_the_right_certificates_and_so_does_the_promoted_master() {
    let mut sentinels = Sentinels::start_tls();
    let url = sentinels.url();
    let limiter = only_the_right_certificates_work(url, sentinels.master()).await;
    sentinels.master().kill();
    sentinels.wait_for_failover();
    until_back(&limiter, "after the failover").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_with_tls_needs_the_right_certificates_and_so_does_a_promoted_replica() {
    let mut cluster = Cluster::start_tls();
    let url = cluster.url();
    let limiter = only_the_right_certificates_work(url, cluster.node(0)).await;
    cluster.failover(0);
    for key in KEYS {
        until_back(&limiter, key).await;
    }
}

//! One server: passwords, users, databases and TLS.

use std::time::Duration;

use testkit::redis::RedisServer;
use testkit::wait::poll;
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder, RedisSettings};
use tollgate::{Decision, HOUR, Limit, OnStoreFailure, SlidingWindowLog, Source};

use crate::load::{RECOVERY, until, until_back};

fn builder(settings: impl Into<RedisSettings>) -> RedisLimiterBuilder {
    let limit = Limit::new("log", SlidingWindowLog::new(10, HOUR)).expect("the numbers are within the bounds");
    let builder = RedisLimiter::builder(settings).limit(limit).store_timeout(Duration::from_secs(5));
    builder.on_store_failure(OnStoreFailure::Allow)
}

async fn works(limiter: &RedisLimiter) {
    let Ok(reservation) = limiter.reserve("key", 3, HOUR).await else { panic!("3 of 10 fit") };
    assert_eq!(reservation.decision().source(), Source::Store);
    assert_eq!(limiter.peek("key").await.expect("Redis answers").remaining(), 7);
    limiter.refund(reservation).await.expect("Redis answers");
    limiter.reset("key").await.expect("Redis answers");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_is_sent() {
    let server = RedisServer::with(&["--requirepass", "s3cret"]);
    works(&builder(server.url()).connect().await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_file_is_read_again_when_the_password_has_changed() {
    let mut server = RedisServer::with(&["--requirepass", "s3cret"]);
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let path = folder.path().join("password");
    std::fs::write(&path, "outdated\n").expect("written");
    let url = format!("redis://127.0.0.1:{}", server.port());
    let limiter = builder(RedisSettings::new(url).password_file(&path)).connect().await.unwrap();
    assert_eq!(limiter.check("key").await.source(), Source::Policy);
    let why = limiter.why_unavailable().expect("it cannot log in").to_string();
    assert!(!why.contains("outdated") && !why.contains("s3cret"), "{why}");
    std::fs::write(&path, "s3cret\n").expect("written");
    until_back(&limiter, "key").await;
    server.restart();
    until_back(&limiter, "key").await;
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_file_that_hangs_leaves_the_last_password_in_use() {
    let mut server = RedisServer::with(&["--requirepass", "s3cret"]);
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let path = folder.path().join("password");
    std::fs::write(&path, "s3cret\n").expect("written");
    let url = format!("redis://127.0.0.1:{}", server.port());
    let limiter = builder(RedisSettings::new(url).password_file(&path)).connect().await.unwrap();
    assert_eq!(limiter.check("key").await.source(), Source::Store);
    // Nothing writes to the pipe, so a thread that opens it waits.
    std::fs::remove_file(&path).expect("removed");
    assert!(std::process::Command::new("mkfifo").arg(&path).status().expect("it runs").success());
    for _ in 0..3 {
        server.restart();
        until_back(&limiter, "key").await;
    }
    let warnings = || -> Vec<String> { limiter.stores()[0].warnings.iter().map(ToString::to_string).collect() };
    assert!(matches!(&*warnings(), [one] if one.contains("password could not be read in time")), "{:?}", warnings());
    // The read that hangs ends with this content.
    std::thread::spawn(move || std::fs::write(&path, "s3cret\n"));
    assert!(poll(RECOVERY, || warnings().is_empty().then_some(())).is_some(), "{:?}", warnings());
    assert_eq!(limiter.check("key").await.source(), Source::Store);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_unix_socket_works_like_a_port() {
    let mut server = RedisServer::start();
    let url = format!("unix://{}?db=2", server.socket().display());
    let limiter = builder(url.as_str()).connect().await.unwrap();
    works(&limiter).await;
    assert_eq!(limiter.address(), server.socket().display().to_string());
    assert_eq!(limiter.check("key").await.source(), Source::Store);
    let mut connection = server.connection();
    let _: () = redis::cmd("SELECT").arg(2).query(&mut connection).expect("selected");
    let keys: usize = redis::cmd("DBSIZE").query(&mut connection).expect("counted");
    assert_eq!(keys, 1);
    server.restart();
    until_back(&limiter, "key").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limiters_with_different_prefixes_share_nothing() {
    let server = RedisServer::start();
    let with = |prefix: &str| builder(RedisSettings::new(server.url()).prefix(prefix));
    let (one, other) = (with("shop").connect().await.unwrap(), with("shop:rate_limit:eu").connect().await.unwrap());
    let plain = builder(server.url()).connect().await.unwrap();
    for limiter in [&one, &other, &plain] {
        assert_eq!(limiter.check_n("key", 10).await.remaining(), 0);
        assert!(!limiter.check("key").await.is_allowed());
    }
    let mut keys: Vec<String> = redis::cmd("KEYS").arg("*").query(&mut server.connection()).expect("listed");
    keys.sort_unstable();
    assert_eq!(keys, ["rate_limit:{log|key}", "shop:rate_limit:eu:rate_limit:{log|key}", "shop:rate_limit:{log|key}"]);
    // A reset reaches only processes with the same prefix.
    for prefix in ["shop", "shop:rate_limit:eu"] {
        let another = with(prefix).connect().await.unwrap();
        another.reset("key").await.expect("Redis answers");
    }
    for limiter in [&one, &other] {
        let _ = until(limiter, "key", RECOVERY, Decision::is_allowed).await;
    }
    assert!(!plain.check("key").await.is_allowed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_user_with_the_minimum_permissions_is_enough() {
    let server = RedisServer::start();
    let rules = ["reset", "on", ">s3cret", "~rate_limit:*", "&rate_limit:changed"];
    let rights = ["+@read", "+@write", "+@scripting", "+@pubsub", "+@connection", "+time"];
    let mut set_user = redis::cmd("ACL");
    set_user.arg("SETUSER").arg("ann").arg(&rules).arg(&rights);
    let _: () = set_user.query(&mut server.connection()).expect("set");
    let url = format!("redis://ann:s3cret@127.0.0.1:{}", server.port());
    let limiter = builder(url).connect().await.unwrap();
    works(&limiter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_is_kept_if_the_user_may_not_write_hashes() {
    let server = RedisServer::start();
    let mut set_user = redis::cmd("ACL");
    set_user.arg("SETUSER").arg("ann").arg(&["reset", "on", ">s3cret", "~*", "&*", "+@all", "-hset"]);
    let _: () = set_user.query(&mut server.connection()).expect("set");
    let limit = Limit::new("long", SlidingWindowLog::new(1_000, HOUR)).expect("the numbers are within the bounds");
    let url = format!("redis://ann:s3cret@127.0.0.1:{}", server.port());
    let limiter = RedisLimiter::builder(url).limit(limit).on_store_failure(OnStoreFailure::Deny);
    let limiter = limiter.store_timeout(Duration::from_secs(5)).connect().await.unwrap();
    let mut admitted = 0;
    // A long log is a hash.
    for _ in 0..300 {
        admitted += u64::from(limiter.check("key").await.is_allowed());
    }
    assert!(admitted < 300, "no request needed the hash");
    assert_eq!(limiter.peek("key").await.expect("Redis answers").remaining(), 1_000 - admitted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_policy_decides_if_the_user_may_not_access_the_keys() {
    let server = RedisServer::start();
    let mut set_user = redis::cmd("ACL");
    set_user.arg("SETUSER").arg("bob").arg(&["reset", "on", ">s3cret", "~theirs:*", "+@all"]);
    let mut connection = server.connection();
    let _: () = set_user.query(&mut connection).expect("set");
    let url = format!("redis://bob:s3cret@127.0.0.1:{}", server.port());
    let limiter = builder(url).connect().await.unwrap();
    assert_eq!(limiter.check("key").await.source(), Source::Policy);
    let error = limiter.peek("key").await.unwrap_err();
    assert!(error.is_refused(), "{error}");
    let _: () = redis::cmd("ACL").arg("SETUSER").arg("bob").arg("~rate_limit:*").query(&mut connection).expect("set");
    until_back(&limiter, "key").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_password_is_an_outage_until_it_is_corrected() {
    let server = RedisServer::with(&["--requirepass", "right"]);
    let mut connection = server.connection();
    let limiter = builder(format!("redis://:wrong@127.0.0.1:{}", server.port())).connect().await.unwrap();
    let decision = limiter.check("key").await;
    assert_eq!((decision.is_allowed(), decision.source()), (true, Source::Policy));
    let error = limiter.peek("key").await.unwrap_err().to_string();
    assert!(!error.contains("wrong@") && !error.contains(":wrong"), "{error}");
    let _: () = redis::cmd("CONFIG").arg("SET").arg("requirepass").arg("wrong").query(&mut connection).expect("set");
    until_back(&limiter, "key").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_is_chosen() {
    let server = RedisServer::start();
    let limiter = builder(format!("{}/3", server.url())).connect().await.unwrap();
    assert_eq!(limiter.check("key").await.source(), Source::Store);
    let mut connection = server.connection();
    let mut size = |database: u8| -> usize {
        let _: () = redis::cmd("SELECT").arg(database).query(&mut connection).expect("selected");
        redis::cmd("DBSIZE").query(&mut connection).expect("counted")
    };
    assert_eq!((size(0), size(3)), (0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_works_with_a_certificate_of_the_configured_authority() {
    let server = RedisServer::start_tls();
    let ca = std::fs::read(server.ca_path()).expect("the authority is a file");
    works(&builder(RedisSettings::new(server.url()).tls_ca(ca)).connect().await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_of_another_authority_is_rejected() {
    let (server, other) = (RedisServer::start_tls(), RedisServer::start_tls());
    let ca = std::fs::read(other.ca_path()).expect("the authority is a file");
    for builder in [builder(RedisSettings::new(server.url()).tls_ca(ca)), builder(server.url())] {
        let limiter = builder.connect().await.unwrap();
        let decision = limiter.check("key").await;
        assert_eq!((decision.is_allowed(), decision.source()), (true, Source::Policy));
        assert!(limiter.peek("key").await.unwrap_err().is_unavailable());
    }
    let keys: usize = redis::cmd("DBSIZE").query(&mut server.connection()).expect("counted");
    assert_eq!(keys, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_is_sent_to_a_server_that_requires_one() {
    let server = RedisServer::start_tls_with_clients();
    let read = |path: std::path::PathBuf| std::fs::read(path).expect("a file of the server's directory");
    let without = RedisSettings::new(server.url()).tls_ca(read(server.ca_path()));
    let (certificate, key) = server.client_files();
    let with = without.clone().client_cert(read(certificate)).client_key(read(key));
    works(&builder(with).connect().await.unwrap()).await;
    let refused = builder(without).connect().await.unwrap();
    assert_eq!(refused.check("key").await.source(), Source::Policy);
    assert!(refused.why_unavailable().is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_invalid_certificate_file_is_rejected_at_once() {
    let server = RedisServer::start_tls();
    let settings = RedisSettings::new(server.url()).tls_ca("not a certificate");
    let error = builder(settings).connect().await.unwrap_err().to_string();
    assert_eq!(error, "ca has no certificate in it: give it one in PEM");
}

//! The compact layout: many keys of a limit in one hash. That it decides as the plain layout does is tested by the
//! conformance suite and by random traces.

use std::time::Duration;

use futures_util::future::join_all;
use redis::{Connection, FromRedisValue};
use testkit::redis::{Cluster, RedisServer, Sentinels};
use testkit::window::LONG_WINDOW;
use tollgate::redis::{Layout, RedisLimiter, RedisLimiterBuilder, RedisSettings};
use tollgate::{
    Ban, Consistency, FixedWindow, HOUR, Hit, Limit, LimitSet, ManualClock, OnStoreFailure, Rate, SlidingWindowCounter,
    SlidingWindowLog, Source, Timestamp, TokenBucket,
};

use crate::load::{RECOVERY, until};
use crate::variants::variants;

const START: u64 = 1_700_000_000_000_000;

/// All keys of a limit share the hash [`hash`].
fn one_hash(url: String) -> RedisSettings {
    RedisSettings::new(url).layout(Layout::Compact).expected_keys(1)
}

/// Only Redis admits requests.
fn builder(settings: RedisSettings) -> RedisLimiterBuilder {
    RedisLimiter::builder(settings).store_timeout(Duration::from_secs(20)).on_store_failure(OnStoreFailure::Deny)
}

async fn limiter(settings: RedisSettings, limits: Vec<Limit>) -> RedisLimiter {
    builder(settings).limits(limits).connect().await.expect("the settings are good")
}

fn limit(name: &str, algorithm: impl Into<tollgate::Algorithm>) -> Limit {
    Limit::new(name, algorithm).expect("the numbers are within the bounds")
}

fn hash(limit: &str) -> String {
    format!("rate_limit:{{{limit}|%~0}}")
}

fn run<T: FromRedisValue>(connection: &mut Connection, words: &[&str]) -> T {
    redis::cmd(words[0]).arg(&words[1..]).query(connection).expect("Redis answers")
}

/// Returns the names of all keys, except those with which nodes register.
fn names(connection: &mut Connection) -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = run(connection, &["KEYS", "*"]);
    names.retain(|name| !name.starts_with(b"rate_limit:{nodes}"));
    names
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_takes_40_bytes_at_most_and_hashes_stay_listpacks() {
    const KEYS: usize = 20_000;
    // As in the configuration file of Redis 7.0.
    let server = RedisServer::with(&["--hash-max-listpack-entries", "128"]);
    let mut connection = server.connection();
    let settings = RedisSettings::new(server.url()).layout(Layout::Compact).expected_keys(KEYS as u64);
    let algorithms: [(tollgate::Algorithm, f64); 4] = [
        (TokenBucket::new(100, Rate::new(1, HOUR)).into(), 40.0),
        // Not a whole number of microseconds, so that the remainder is stored too.
        (TokenBucket::new(100, Rate::new(7, HOUR)).into(), 46.0),
        (FixedWindow::new(100, HOUR).from_first_request().into(), 40.0),
        (SlidingWindowCounter::new(100, HOUR).into(), 42.0),
    ];
    for (algorithm, most) in algorithms {
        let () = run(&mut connection, &["FLUSHALL"]);
        let limiter = limiter(settings.clone(), vec![limit("l", algorithm)]).await;
        assert!(limiter.check("first").await.is_allowed());
        for keys in (0..KEYS).map(|key| format!("user:{key}")).collect::<Vec<_>>().chunks(512) {
            let all = join_all(keys.iter().map(|key| limiter.check(key))).await;
            assert!(all.iter().all(|decision| decision.is_allowed() && decision.source() == Source::Store));
        }
        let (mut bytes, names) = (0, names(&mut connection));
        for name in &names {
            let memory = redis::cmd("MEMORY").arg("USAGE").arg(&name[..]).query::<usize>(&mut connection);
            bytes += memory.expect("Redis answers");
            let encoding = redis::cmd("OBJECT").arg("ENCODING").arg(&name[..]).query::<String>(&mut connection);
            assert_eq!(encoding.expect("Redis answers"), "listpack");
        }
        let each = bytes as f64 / KEYS as f64;
        assert!(names.len() > 300 && names.len() <= 313, "{} hashes", names.len());
        assert!(each <= most, "{each} bytes per key: {algorithm:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expired_keys_make_room_for_others() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    // Each state lasts a millisecond or less.
    let algorithms: [(&str, tollgate::Algorithm); 4] = [
        ("bucket", TokenBucket::new(1, Rate::per_second(1000)).into()),
        ("window", FixedWindow::new(1, Duration::from_millis(1)).into()),
        ("counter", SlidingWindowCounter::new(1, Duration::from_millis(1)).into()),
        ("interval", TokenBucket::new(1, Rate::new(1, Duration::from_millis(1))).interval().into()),
    ];
    for (name, algorithm) in algorithms {
        let limiter = limiter(one_hash(server.url()), vec![limit(name, algorithm)]).await;
        for key in 0..2_000_u32 {
            let decision = limiter.check(&key.to_string()).await;
            assert_eq!((decision.is_allowed(), decision.source()), (true, Source::Store), "{name}");
        }
        let fields: usize = run(&mut connection, &["HLEN", &hash(name)]);
        assert!(fields <= 200, "{name}: {fields} of 2000 keys are still there");
        let ttl: i64 = run(&mut connection, &["PTTL", &hash(name)]);
        assert!(ttl > 0 && ttl <= 11_000, "{name}: the hash expires after its last key: {ttl} ms");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hash_lasts_as_long_as_its_longest_state() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let limiter = limiter(one_hash(server.url()), vec![limit("l", TokenBucket::new(100, Rate::new(1, HOUR)))]).await;
    let ttl = |connection: &mut Connection| -> u64 { run(connection, &["PTTL", &hash("l")]) };
    let hours = |count: u64| count * 3_600_000;
    assert!(limiter.check("short").await.is_allowed());
    assert!((hours(1)..hours(3)).contains(&ttl(&mut connection)));
    assert!(limiter.check_n("long", 50).await.is_allowed());
    assert!((hours(50) - 60_000..=hours(101)).contains(&ttl(&mut connection)));
    let before = ttl(&mut connection);
    assert!(limiter.check("short").await.is_allowed());
    let after = ttl(&mut connection);
    assert!(after <= before && after > hours(49), "a shorter state leaves the expiry alone");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn states_of_changed_limits_are_converted_and_then_stored_in_few_bytes_again() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let clock = ManualClock::at(Timestamp::from_micros(START));
    let bucket = |per_hour| limit("l", TokenBucket::new(100, Rate::new(per_hour, HOUR)));
    let old = builder(one_hash(server.url())).limit(bucket(100)).clock(clock.clone()).connect().await.expect("good");
    let keys: Vec<String> = (0..50).map(|key| format!("user:{key}")).collect();
    for key in &keys {
        assert!(old.check_n(key, 60).await.is_allowed());
    }
    let lengths = |connection: &mut Connection| -> Vec<usize> {
        let values: Vec<Vec<u8>> = run(connection, &["HVALS", &hash("l")]);
        values.iter().map(Vec::len).filter(|length| *length != 14).collect()
    };
    assert_eq!(lengths(&mut connection), [13; 50]);
    let new = old.with_limits(vec![bucket(50)]).expect("valid");
    for key in &keys {
        assert_eq!(new.check_n(key, 1).await.remaining(), 39, "what was spent stays spent");
    }
    assert_eq!(lengths(&mut connection), [19; 50], "each state has its own signature");
    clock.set(Timestamp::from_micros(START + 4 * 86_400_000_000));
    for _ in 0..2 {
        for key in &keys {
            assert!(new.check_n(key, 1).await.is_allowed());
        }
    }
    assert_eq!(lengths(&mut connection), [13; 50], "the hash has the new signature");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_takes_from_keys_of_both_layouts_or_from_none() {
    let server = RedisServer::start();
    let limits = vec![
        limit("log", SlidingWindowLog::new(3, HOUR)),
        limit("window", FixedWindow::new(10, HOUR).from_first_request()),
        limit("fine", SlidingWindowCounter::new(10, LONG_WINDOW).segments(60)),
        limit("coarse", SlidingWindowCounter::new(10, LONG_WINDOW).segments(6)),
    ];
    let limiter = limiter(one_hash(server.url()), limits).await;
    let ids = ["log", "window", "fine", "coarse"].map(|name| limiter.id(name).expect("a limit"));
    let hits = ids.map(|id| Hit::new(id, "ann"));
    for nth in 1..=5 {
        assert_eq!(limiter.decide(&hits).await.is_allowed(), nth <= 3, "{nth}");
    }
    let mut left = Vec::new();
    for id in ids {
        left.push(limiter.decide(&[Hit::new(id, "ann").cost(0)]).await.remaining());
    }
    assert_eq!(left, [0, 7, 7, 7]);
    let mut names = names(&mut server.connection());
    names.sort();
    let expected = ["{coarse|%~0}", "{fine|ann}", "{log|ann}", "{window|%~0}"];
    let expected: Vec<Vec<u8>> = expected.iter().map(|name| format!("rate_limit:{name}").into_bytes()).collect();
    assert!(names.iter().all(|name| expected.contains(name)), "{names:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hash_with_foreign_data_is_not_changed() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let foreign: [&[&str]; 4] = [&["SET", "x"], &["HSET", "field", "x"], &["RPUSH", "x"], &["HSET", "", "x"]];
    for (index, words) in foreign.into_iter().enumerate() {
        for variant in variants(10, LONG_WINDOW).into_iter().filter(|variant| !variant.name.starts_with("log")) {
            let name = format!("{} {index}", variant.name);
            let limiter = limiter(one_hash(server.url()), vec![limit(&name, variant.algorithm)]).await;
            let hash = hash(&name);
            let _: redis::Value =
                redis::cmd(words[0]).arg(&hash).arg(&words[1..]).query(&mut connection).expect("written");
            let before: Vec<u8> = run(&mut connection, &["DUMP", &hash]);
            let decision = limiter.check("ann").await;
            assert_eq!((decision.is_allowed(), decision.source()), (false, Source::Policy), "{name} {words:?}");
            let error = limiter.peek("ann").await.expect_err("foreign data").to_string();
            assert!(error.contains("holds something else"), "{error}");
            assert!(limiter.reset("ann").await.is_err());
            assert_eq!(run::<Vec<u8>>(&mut connection, &["DUMP", &hash]), before, "{name} {words:?}");
            assert!(limiter.is_store_available(), "that is no outage");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_ends_denials_and_leases_in_other_processes() {
    let server = RedisServer::start();
    let exact = || limit("exact", FixedWindow::new(5, HOUR).from_first_request());
    let leased = || {
        let bucket = TokenBucket::new(1_000_000, Rate::per_second(1_000_000));
        limit("leased", bucket).with_consistency(Consistency::Leased)
    };
    let node = async || limiter(one_hash(server.url()), vec![exact(), leased()]).await;
    let (here, there) = (node().await, node().await);
    let id = here.id("exact").expect("a limit");
    for round in 0..5 {
        let key = format!("key {round}");
        let hits = [Hit::new(id, &key)];
        let denied = async {
            loop {
                let decision = here.decide(&hits).await;
                if decision.source() == Source::DenialCache {
                    return decision;
                }
            }
        };
        let denied = tokio::time::timeout(RECOVERY, denied).await.expect("the denial is cached");
        assert!(!denied.is_allowed());
        there.reset(&key).await.expect("reset");
        let allowed = async { while !here.decide(&hits).await.is_allowed() {} };
        tokio::time::timeout(RECOVERY, allowed).await.expect("the reset arrives");
    }
    let id = here.id("leased").expect("a limit");
    let from_a_lease = async { while here.decide(&[Hit::new(id, "all")]).await.source() != Source::Lease {} };
    tokio::time::timeout(RECOVERY, from_a_lease).await.expect("slices are taken");
    here.return_leases().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_together_admit_the_limit() {
    let server = RedisServer::start();
    let node = async || limiter(one_hash(server.url()), vec![limit("l", FixedWindow::new(100, LONG_WINDOW))]).await;
    let nodes = [node().await, node().await, node().await];
    let keys: Vec<String> = (0..10).map(|key| format!("key {key}")).collect();
    let requests = (0..150).flat_map(|_| &keys).enumerate();
    let decisions = join_all(requests.map(|(turn, key)| nodes[turn % 3].check(key))).await;
    assert_eq!(decisions.iter().filter(|decision| decision.is_allowed()).count(), 1_000);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn variants_of_a_limit_share_its_keys() {
    let server = RedisServer::start();
    let counter = |quota, segments| limit("l", SlidingWindowCounter::new(quota, LONG_WINDOW).segments(segments));
    for segments in [3, 60] {
        let () = run(&mut server.connection(), &["FLUSHALL"]);
        let builder = builder(one_hash(server.url())).limit(counter(10, 1)).variant("gold", counter(100, segments));
        let limiter = builder.connect().await.expect("the settings are good");
        let (free, gold) = (limiter.id("l").expect("a limit"), limiter.variant("l", "gold").expect("a variant"));
        assert!(limiter.decide(&[Hit::new(free, "ann").cost(10)]).await.is_allowed());
        assert_eq!(limiter.decide(&[Hit::new(gold, "ann").cost(5)]).await.remaining(), 85, "{segments}");
        assert!(!limiter.decide(&[Hit::new(free, "ann")]).await.is_allowed(), "{segments}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_has_hashes_on_every_node_and_counts_each_key_once() {
    let mut cluster = Cluster::start();
    let settings = RedisSettings::new(cluster.url()).layout(Layout::Compact).expected_keys(64 * 40);
    let limits = || {
        let user = limit("user", FixedWindow::new(10, HOUR).from_first_request());
        LimitSet::new().limit(user).ban("user", Ban { after: 3, within: HOUR, for_: HOUR })
    };
    let node = async || builder(settings.clone()).limits(limits()).connect().await.expect("the settings are good");
    let nodes = [node().await, node().await];
    let (user, ban) = (nodes[0].id("user").expect("a limit"), nodes[0].ban("user").expect("a ban"));
    let keys: Vec<String> = (0..200).map(|key| format!("key {key}")).collect();
    let turns = (0..12).flat_map(|_| &keys).enumerate();
    let decisions = join_all(
        turns.map(async |(turn, key)| nodes[turn % 2].decide(&[Hit::new(user, key), Hit::new(ban, key).cost(0)]).await),
    )
    .await;
    assert!(decisions.iter().all(|decision| matches!(decision.source(), Source::Store | Source::DenialCache)));
    assert_eq!(decisions.iter().filter(|decision| decision.is_allowed()).count(), 2_000);
    let mut hashes = 0;
    for master in 0..3 {
        let names = names(&mut cluster.node(master).connection());
        let on_node = names.iter().filter(|name| name.starts_with(b"rate_limit:{user|%~")).count();
        assert!(on_node > 0, "node {master}");
        hashes += on_node;
    }
    assert!(hashes <= 40, "{hashes}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_by_sentinels_keeps_the_hashes() {
    let mut sentinels = Sentinels::start();
    let limits = vec![limit("l", FixedWindow::new(1_000_000, HOUR).from_first_request())];
    let limiter = limiter(one_hash(sentinels.url()), limits).await;
    let before = until(&limiter, "ann", RECOVERY, |decision| decision.source() == Source::Store).await;
    assert!(before.is_allowed());
    let replicated = async {
        let mut replica = sentinels.replica().connection();
        while run::<usize>(&mut replica, &["HLEN", &hash("l")]) < 2 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(RECOVERY, replicated).await.expect("the hash is on the replica");
    sentinels.master().kill();
    let after = until(&limiter, "ann", RECOVERY, |decision| decision.source() == Source::Store).await;
    assert!(after.is_allowed() && after.remaining() < 999_999, "{after:?}");
}

//! A key with foreign data is not changed, and the failure policy decides only requests for that key.

use futures_util::future::join_all;
use redis::{Cmd, Connection};
use testkit::redis::RedisServer;
use testkit::window::LONG_WINDOW;
use tollgate::redis::{Layout, RedisLimiter, RedisSettings, StoreWarning};
use tollgate::{Decision, OnStoreFailure, Source};

use super::{PATIENCE, limiter};
use crate::variants::{Variant, variants};

const TYPES: [&str; 6] = ["hash", "list", "set", "zset", "string", "stream"];

fn put(connection: &mut Connection, name: &str, kind: &str) -> Vec<u8> {
    let command = |verb: &str, args: &[&str]| {
        let mut command = redis::cmd(verb);
        command.arg(name).arg(args);
        command
    };
    let command: Cmd = match kind {
        "hash" => command("HSET", &["field", "value"]),
        "list" => command("RPUSH", &["a", "b", "c"]),
        "set" => command("SADD", &["a", "b"]),
        "zset" => command("ZADD", &["1", "a"]),
        "string" => command("SET", &["hello"]),
        _ => command("XADD", &["*", "field", "value"]),
    };
    let _: redis::Value = command.query(connection).expect("written");
    dump(connection, name)
}

/// Returns the value, and whether it expires.
fn dump(connection: &mut Connection, name: &str) -> Vec<u8> {
    let mut dump: Vec<u8> = redis::cmd("DUMP").arg(name).query(connection).expect("it is there");
    let ttl: i64 = redis::cmd("PTTL").arg(name).query(connection).expect("Redis answers");
    dump.extend(ttl.to_be_bytes());
    dump
}

/// A key of every variant for every foreign type.
fn cases() -> impl Iterator<Item = (Variant, &'static str)> {
    variants(10, LONG_WINDOW).into_iter().flat_map(|variant| TYPES.map(|kind| (variant, kind)))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_does_not_change_it_and_other_keys_are_decided() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    for (variant, kind) in cases() {
        let limiter = limiter(&server.url(), variant.limit()).await;
        let name = variant.name_of(kind);
        let theirs = put(&mut connection, &name, kind);
        let keys = [&format!("{kind} before"), kind, &format!("{kind} after"), kind];
        let decisions = join_all(keys.iter().map(|key| limiter.check(*key))).await;
        for (key, decision) in keys.iter().zip(&decisions) {
            let expected = if *key == kind { (false, Source::Policy) } else { (true, Source::Store) };
            assert_eq!((decision.is_allowed(), decision.source()), expected, "{} {kind} {key}", variant.name);
        }
        assert_eq!(dump(&mut connection, &name), theirs, "{} {kind}", variant.name);
        assert!(limiter.is_store_available(), "{} {kind}: that is no outage", variant.name);
    }
}

/// The script that decides a batch: a peek in it needs the large one.
#[derive(Clone, Copy, Debug)]
enum Script {
    Small,
    Large,
}

/// Sends checks of all keys at the same time, with peeks between them if the large script is to decide.
async fn check_together(limiter: &RedisLimiter, keys: &[String], script: Script) -> Vec<Decision> {
    let peeks = match script {
        Script::Small => 0,
        Script::Large => 20,
    };
    let peeked: Vec<String> = (0..peeks).map(|key| format!("peek {key}")).collect();
    let peeks = join_all(peeked.iter().map(|key| limiter.peek(key)));
    let (decisions, peeks) = tokio::join!(join_all(keys.iter().map(|key| limiter.check(key))), peeks);
    assert!(peeks.iter().all(Result::is_ok), "{peeks:?}");
    decisions
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_such_key_of_a_batch_gets_the_policy_of_its_limit_and_the_store_has_a_warning() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    // Many hashes, so that other keys are in other ones.
    let compact = RedisSettings::new(server.url()).layout(Layout::Compact).expected_keys(64_000_000);
    for (layout, settings) in [("plain", RedisSettings::new(server.url())), ("compact", compact)] {
        for (variant, kind) in cases().filter(|(_, kind)| ["list", "string", "hash"].contains(kind)) {
            let is_compact = layout == "compact" && !variant.name.starts_with("log");
            for script in [Script::Small, Script::Large] {
                let context = format!("{layout} {} {kind} {script:?}", variant.name);
                let _: () = redis::cmd("FLUSHALL").query(&mut connection).expect("flushed");
                let limit = variant.limit().with_on_store_failure(OnStoreFailure::Allow);
                let limiter = RedisLimiter::builder(settings.clone()).limit(limit).store_timeout(PATIENCE);
                let limiter = limiter.on_store_failure(OnStoreFailure::Deny).connect().await.expect("valid settings");
                let name =
                    if is_compact { name_of_hash(&limiter, &mut connection).await } else { variant.name_of("bad") };
                let theirs = put(&mut connection, &name, kind);
                let mut keys: Vec<String> = (0..30).map(|key| format!("good {key}")).collect();
                keys.insert(15, "bad".to_owned());
                for (key, decision) in keys.iter().zip(check_together(&limiter, &keys, script).await) {
                    let expected = if key == "bad" { Source::Policy } else { Source::Store };
                    assert_eq!((decision.is_allowed(), decision.source()), (true, expected), "{context} {key}");
                }
                let stats = limiter.stats();
                assert!(stats.calls < stats.requests, "{context}: requests share calls");
                let warning = StoreWarning::ForeignData { limit: variant.name.to_owned() };
                assert_eq!(limiter.stores()[0].warnings, [warning], "{context}");
                assert_eq!(dump(&mut connection, &name), theirs, "{context}");
                assert!(limiter.is_store_available(), "{context}: that is no outage");
            }
        }
    }
}

/// Returns the name of the hash that has the key `bad` in the compact layout, after removing it.
async fn name_of_hash(limiter: &RedisLimiter, connection: &mut Connection) -> String {
    assert!(limiter.check("bad").await.is_allowed());
    let mut names: Vec<String> = redis::cmd("KEYS").arg("*|*").query(connection).expect("listed");
    let name = names.pop().expect("one hash");
    let _: () = redis::cmd("DEL").arg(&name).query(connection).expect("deleted");
    name
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peek_reports_it() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    for (variant, kind) in cases() {
        let limiter = limiter(&server.url(), variant.limit()).await;
        let name = variant.name_of(kind);
        let theirs = put(&mut connection, &name, kind);
        let peeked = limiter.peek(kind).await;
        assert!(peeked.as_ref().is_err_and(|error| error.is_foreign_data()), "{} {kind}: {peeked:?}", variant.name);
        assert_eq!(dump(&mut connection, &name), theirs, "{} {kind}", variant.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reset_does_not_change_it_and_reports_it() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    for (variant, kind) in cases() {
        let limiter = limiter(&server.url(), variant.limit()).await;
        let name = variant.name_of(kind);
        let theirs = put(&mut connection, &name, kind);
        let reset = limiter.reset(kind).await;
        let exists: bool = redis::cmd("EXISTS").arg(&name).query(&mut connection).expect("Redis answers");
        assert!(exists, "{} {kind}: someone else's data is gone", variant.name);
        assert_eq!(dump(&mut connection, &name), theirs, "{} {kind}", variant.name);
        assert!(reset.as_ref().is_err_and(|error| error.is_foreign_data()), "{} {kind}: {reset:?}", variant.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_does_not_change_it() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    for (variant, kind) in cases() {
        let limiter = limiter(&server.url(), variant.limit()).await;
        let name = variant.name_of(kind);
        let Ok(taken) = limiter.reserve(kind, 5, tollgate::MINUTE).await else { panic!("{} {kind}", variant.name) };
        let _: () = redis::cmd("DEL").arg(&name).query(&mut connection).expect("deleted");
        let theirs = put(&mut connection, &name, kind);
        let _ = limiter.refund(taken).await;
        assert_eq!(dump(&mut connection, &name), theirs, "{} {kind}", variant.name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_limits_take_nothing_if_one_key_has_foreign_data() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    for bad in variants(10, LONG_WINDOW) {
        let _: () = redis::cmd("FLUSHALL").query(&mut connection).expect("flushed");
        put(&mut connection, &bad.name_of("key"), "hash");
        let builder = tollgate::redis::RedisLimiter::builder(server.url()).store_timeout(super::PATIENCE);
        let builder = variants(10, LONG_WINDOW).iter().fold(builder, |builder, variant| builder.limit(variant.limit()));
        let limiter = builder.connect().await.expect("the settings are valid");
        assert_eq!(limiter.check_n("key", 3).await.source(), Source::Local, "{}", bad.name);
        for variant in variants(10, LONG_WINDOW).iter().filter(|variant| variant.name != bad.name) {
            let id = limiter.id(variant.name).expect("it has that name");
            let left = limiter.decide(&[tollgate::Hit::new(id, "key").cost(0)]).await.remaining();
            assert_eq!(left, 10, "{} is charged for a request that the key of {} spoilt", variant.name, bad.name);
        }
    }
}

/// Earlier releases stored logs as lists, and then with code 5.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logs_of_earlier_formats_are_refused_until_they_are_deleted() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let window = u64::try_from(LONG_WINDOW.as_micros()).expect("it fits");
    for variant in variants(10, LONG_WINDOW).into_iter().filter(|variant| variant.name.starts_with("log")) {
        let limiter = limiter(&server.url(), variant.limit()).await;
        let mut text = vec![5];
        text.extend(&window.to_be_bytes()[2..]);
        text.extend([0; 12]);
        let [list, coded] = ["list", "coded"].map(|key| variant.name_of(key));
        let _: () = redis::cmd("RPUSH").arg(&list).arg("1700000000000000 1").query(&mut connection).expect("written");
        let _: () = redis::cmd("SET").arg(&coded).arg(text).query(&mut connection).expect("written");
        for (key, name) in [("list", list), ("coded", coded)] {
            let before = dump(&mut connection, &name);
            let decision = limiter.check(key).await;
            assert_eq!((decision.is_allowed(), decision.source()), (false, Source::Policy), "{name}");
            assert!(limiter.peek(key).await.is_err_and(|error| error.is_foreign_data()), "{name}");
            assert!(limiter.reset(key).await.is_err_and(|error| error.is_foreign_data()), "{name}");
            assert_eq!(dump(&mut connection, &name), before, "{name}");
            assert!(limiter.is_store_available(), "{name}: that is no outage");
            let _: () = redis::cmd("DEL").arg(&name).query(&mut connection).expect("deleted");
            assert_eq!(limiter.check(key).await.remaining(), 9, "{name}");
        }
    }
}

//! Any bytes can be a key. Keys are distinct, have names as in the specification, and expire.

use std::collections::HashSet;

use redis::Connection;
use testkit::redis::{Cluster, RedisServer};
use testkit::window::LONG_WINDOW;
use tollgate::redis::RedisLimiter;
use tollgate::{FixedWindow, HOUR, Limit, MINUTE, SECOND, SlidingWindowLog, Source};

use super::limiter;
use crate::variants::variants;

fn hostile_keys() -> Vec<Vec<u8>> {
    let mut keys: Vec<Vec<u8>> = [
        "", " ", "  ", "a b", "\n", "\r\n", "a\nb", "\0", "a\0", "\0a", "{", "}", "{}", "}{", "{a}", "a}{b", "%",
        "%25", "%7B", "%#", "|", "||", "a|b", "limit|a", "*", "?", "[a]", "\\", "\"", "'", "ключ", "鍵", "\u{feff}",
        "0", "-1",
    ]
    .map(|text| text.as_bytes().to_vec())
    .to_vec();
    keys.extend([vec![0xff, 0xfe], vec![0xff], vec![0x80, 0], vec![0xc3, 0x28]]);
    keys.extend([vec![b'x'; 64 << 10], vec![b'x'; (64 << 10) + 1], vec![b'{'; 64 << 10], vec![0; 64 << 10]]);
    keys.extend((126..=130).map(|length| vec![b'y'; length]));
    keys
}

/// Checks that each key has its own unit, whichever was used before.
async fn are_distinct(limiter: &RedisLimiter, keys: &[Vec<u8>]) {
    for round in 0..2 {
        for key in keys {
            let decision = limiter.check(key.as_slice()).await;
            let what = String::from_utf8_lossy(&key[..key.len().min(40)]).into_owned();
            assert!(matches!(decision.source(), Source::Store | Source::DenialCache), "{what:?}: {decision:?}");
            assert_eq!(decision.is_allowed(), round == 0, "{what:?}, round {round}");
        }
    }
}

fn all_names(connection: &mut Connection) -> HashSet<Vec<u8>> {
    let names: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(connection).expect("Redis lists its keys");
    names.into_iter().collect()
}

/// `rate_limit:{<limit>|<key>}` with no other brace in it.
fn is_well_formed(name: &[u8], prefix: &str) -> bool {
    let Some(rest) = name.strip_prefix(prefix.as_bytes()) else { return false };
    let Some(key) = rest.strip_suffix(b"}") else { return false };
    !key.iter().any(|byte| matches!(byte, b'{' | b'}')) && name.len() < 256
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_keys_are_counted_separately_on_one_server() {
    let server = RedisServer::start();
    let limit = Limit::new("li}m{it|%", FixedWindow::new(1, HOUR).from_first_request()).unwrap();
    let keys = hostile_keys();
    are_distinct(&limiter(&server.url(), limit).await, &keys).await;
    let names = all_names(&mut server.connection());
    assert_eq!(names.len(), keys.len());
    for name in names {
        let shown = String::from_utf8_lossy(&name).into_owned();
        assert!(is_well_formed(&name, "rate_limit:{li%7Dm%7Bit%7C%25|"), "{shown:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_keys_are_counted_separately_on_a_cluster() {
    let mut cluster = Cluster::start();
    let keys = hostile_keys();
    let limits = [
        Limit::new("window}", FixedWindow::new(1, HOUR).from_first_request()).unwrap(),
        Limit::new("{log}", SlidingWindowLog::new(1, HOUR)).unwrap(),
    ];
    let url = cluster.url();
    for limit in limits {
        are_distinct(&limiter(&url, limit).await, &keys).await;
    }
    let names = (0..3).map(|master| all_names(&mut cluster.node(master).connection()).len());
    assert_eq!(names.sum::<usize>(), 2 * keys.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_name_of_a_limit_cannot_reach_the_keys_of_another() {
    let server = RedisServer::start();
    let limit = |name| Limit::new(name, FixedWindow::new(1, HOUR).from_first_request()).unwrap();
    let (one, other) = (limiter(&server.url(), limit("a")).await, limiter(&server.url(), limit("a|b")).await);
    assert!(one.check("b|c").await.is_allowed());
    assert!(other.check("c").await.is_allowed());
    let parts = tollgate::Key::parts(&["b", "c"]);
    assert!(one.check(parts).await.is_allowed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_key_expires_once_it_no_longer_matters() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    for variant in variants(12, LONG_WINDOW) {
        let limiter = limiter(&server.url(), variant.limit()).await;
        let Ok(reservation) = limiter.reserve("key", 7, MINUTE).await else { panic!("7 of 12 fit") };
        let taken = *reservation.decision();
        let mut states = vec![("taken", taken.reset_after())];
        let ttl_of = |connection: &mut Connection| -> i64 {
            redis::cmd("PTTL").arg(variant.name_of("key")).query(connection).expect("Redis answers")
        };
        let mut ttls = vec![ttl_of(&mut connection)];
        let again = limiter.check("key").await;
        assert!(again.is_allowed(), "8 of 12 fit");
        states.push(("taken again", again.reset_after()));
        ttls.push(ttl_of(&mut connection));
        let denied = limiter.check_n("key", 7).await;
        states.push(("denied", denied.reset_after().max(again.reset_after())));
        ttls.push(ttl_of(&mut connection));
        limiter.refund(reservation).await.expect("given back");
        states.push(("given back", again.reset_after().max(denied.reset_after())));
        ttls.push(ttl_of(&mut connection));
        for ((state, reset_after), ttl) in states.into_iter().zip(ttls) {
            let matters = match variant.name {
                // Whole segments are kept: the last one until it has left the window, and one more.
                "counter" => LONG_WINDOW + LONG_WINDOW / 3 * 2,
                // The expiry of a log is not changed with every request.
                name if name.starts_with("log") => reset_after + LONG_WINDOW / 8,
                _ => reset_after,
            };
            let longest = (matters + SECOND * 2).as_millis() as i64;
            // A full bucket is idle: gone, or in its last millisecond.
            let at_rest = state == "given back" && matches!(ttl, -2 | 0);
            assert!(at_rest || (ttl > 0 && ttl <= longest), "{} {state}: {ttl} ms of {longest}", variant.name);
        }
    }
    for name in all_names(&mut connection) {
        let ttl: i64 = redis::cmd("PTTL").arg(&name).query(&mut connection).expect("Redis answers");
        // It may have expired just now.
        assert_ne!(ttl, -1, "{:?} would stay for ever", String::from_utf8_lossy(&name));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_follow_the_specification_and_a_reset_deletes_them() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    for variant in variants(10, LONG_WINDOW) {
        let limiter = limiter(&server.url(), variant.limit()).await;
        assert!(limiter.check("ann").await.is_allowed());
        let expected = HashSet::from([variant.name_of("ann").into_bytes()]);
        assert_eq!(all_names(&mut connection), expected, "one key per bucket, and nothing beside it");
        limiter.reset("ann").await.expect("reset");
        assert_eq!(all_names(&mut connection), HashSet::new(), "{}", variant.name);
    }
}

//! Replies that would take memory without end, or processor time: each ends its connection, and the failure policy decides.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use testkit::redis::{Impostor, Reply, cluster_slots};
use testkit::window::LONG_WINDOW;
use tollgate::redis::{RedisLimiter, RuleSets, StoreWarning};
use tollgate::{FixedWindow, Limit, OnStoreFailure, Source};

use crate::load::RECOVERY;

/// Waits for a warning of that kind.
async fn warned(limiter: &RedisLimiter, kind: &str) -> String {
    let warning = || {
        let warnings = limiter.stores().into_iter().flat_map(|store| store.warnings);
        warnings.into_iter().find(|warning: &StoreWarning| warning.kind() == kind)
    };
    let begin = tokio::time::Instant::now();
    loop {
        if let Some(warning) = warning() {
            return warning.to_string();
        }
        assert!(begin.elapsed() < RECOVERY, "no warning of {kind}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn limiter(url: String) -> RedisLimiter {
    let limit = Limit::new("user", FixedWindow::new(10, LONG_WINDOW)).expect("valid");
    let builder = RedisLimiter::builder(url).limit(limit).on_store_failure(OnStoreFailure::Deny);
    // Only the bounds end a connection here, not a decision that takes long on a busy machine.
    builder.store_timeout(Duration::from_secs(2)).connect().await.expect("the settings are valid")
}

/// A server that replies to decisions with that.
fn deciding(reply: impl Fn() -> Reply + Send + Sync + 'static) -> Impostor {
    Impostor::start(move |command| if command[0] == "EVALSHA" { reply() } else { Reply::Usual })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_to_a_decision_that_exceeds_a_bound_ends_its_connection() {
    let chunk = || vec![b'x'; 64 << 10];
    let megabyte = || [b"$1048576\r\n".to_vec(), vec![b'x'; 1 << 20], b"\r\n".to_vec()].concat();
    type Attack = (&'static str, Box<dyn Fn() -> Reply + Send + Sync>, u64);
    let attacks: [Attack; 6] = [
        (
            "announced a string of 9000000000 bytes in a reply of at most 16777216 bytes",
            Box::new(move || Reply::Endless(b"$9000000000\r\n".to_vec(), chunk())),
            1 << 20,
        ),
        (
            "sent a reply of more than 131072 values",
            Box::new(|| Reply::Endless(b"*1000000000\r\n".to_vec(), b":1\r\n".repeat(10_000))),
            1 << 20,
        ),
        (
            "sent a reply with arrays nested more than 8 deep",
            Box::new(|| Reply::Endless(Vec::new(), b"*1\r\n".repeat(10_000))),
            1 << 20,
        ),
        ("sent a line of more than 16384 bytes", Box::new(move || Reply::Endless(b"-ERR ".to_vec(), chunk())), 1 << 20),
        (
            "announced a string of 1048576 bytes in a reply of at most 16777216 bytes",
            Box::new(move || Reply::Endless(b"*1000\r\n".to_vec(), megabyte())),
            20 << 20,
        ),
        (
            "does not speak the protocol of Redis (RESP2)",
            Box::new(|| Reply::Bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec())),
            1 << 20,
        ),
    ];
    for (problem, reply, most_bytes) in attacks {
        let server = deciding(reply);
        let limiter = limiter(server.url()).await;
        let decision = limiter.check("ann").await;
        assert_eq!((decision.is_allowed(), decision.source()), (false, Source::Policy), "{problem}");
        let warning = warned(&limiter, "invalid_reply").await;
        let address =
            format!("the connection to 127.0.0.1:{} was closed because the server {problem}: ", server.port());
        assert!(warning.starts_with(&address), "{warning}");
        let received = limiter.stats().bytes_received;
        assert!(received < most_bytes, "{problem}: {received} bytes were received");
        let why = limiter.peek("ann").await.expect_err("there is no other reply");
        assert!(why.is_unavailable() && why.detail().contains(problem), "{why}");
    }
}

/// The probes of such a server succeed, and each decision ends its connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_replies_exceed_a_bound_is_warned_of_once() {
    let server = deciding(|| Reply::Bytes(b"$9000000000\r\n".to_vec()));
    let limiter = limiter(server.url()).await;
    for _ in 0..5 {
        assert_eq!(limiter.check("ann").await.source(), Source::Policy);
    }
    let warnings = limiter.stores().into_iter().flat_map(|store| store.warnings);
    let warnings: Vec<String> =
        warnings.filter(|one| one.kind() == "invalid_reply").map(|one| one.to_string()).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(limiter.stats().by_policy >= 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_exceeds_a_bound_ends_its_subscription() {
    let server = Impostor::start(|command| match &*command[0] {
        "SUBSCRIBE" => Reply::Bytes(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$100000\r\n".to_vec()),
        _ => Reply::Usual,
    });
    let limiter = limiter(server.url()).await;
    let warning = warned(&limiter, "invalid_reply").await;
    assert!(warning.contains("announced a string of 100000 bytes in a reply of at most 16384 bytes"), "{warning}");
}

/// The client's library remembers the names of all channels that a server confirms.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn confirmations_of_subscriptions_that_nobody_requested_end_their_connection() {
    let server = Impostor::start(|command| match &*command[0] {
        "SUBSCRIBE" => {
            let channel = "c".repeat(10_000);
            let confirmation = format!("*3\r\n$9\r\nsubscribe\r\n$10000\r\n{channel}\r\n:1\r\n");
            Reply::Endless(Vec::new(), confirmation.into_bytes())
        }
        _ => Reply::Usual,
    });
    let limiter = limiter(server.url()).await;
    let warning = warned(&limiter, "invalid_reply").await;
    assert!(warning.contains("sent more than 4194304 bytes of messages faster than they are handled"), "{warning}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn published_rules_that_exceed_a_bound_end_their_connection() {
    let server = Impostor::start(|command| match &*command[0] {
        "EVAL" if command[1].contains("rules") => {
            Reply::Endless(b"*5\r\n$1\r\n1\r\n$-1\r\n$-1\r\n$-1\r\n$450000000\r\n".to_vec(), vec![b'x'; 64 << 10])
        }
        _ => Reply::Usual,
    });
    let rule_sets = RuleSets::connect(server.url()).expect("the URL is valid");
    let why = rule_sets.newest().await.expect_err("there are no such rules");
    let expected = "the server announced a string of 450000000 bytes in a reply of at most 5242880 bytes";
    assert_eq!(why.detail(), expected);
}

/// The limiter reports such a server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_not_redis_is_no_problem_of_the_published_rules() {
    let server = Impostor::start(|_| Reply::Bytes(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()));
    let rule_sets = RuleSets::connect(server.url()).expect("the URL is valid");
    let why = rule_sets.newest().await.expect_err("it is not a Redis");
    assert!(why.to_string().contains("make sure that a Redis or Valkey is at its address"), "{why}");
    // Rules are looked for after each attempt to subscribe.
    let begin = tokio::time::Instant::now();
    while server.connections() < 20 {
        assert!(begin.elapsed() < 2 * RECOVERY, "{} connections", server.connections());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(*rule_sets.problem().borrow(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_whose_reply_exceeds_a_bound_names_no_master() {
    let server = Impostor::start(|command| match &*command[0] {
        "SENTINEL" => Reply::Endless(b"*2\r\n$70000\r\n".to_vec(), vec![b'x'; 64 << 10]),
        _ => Reply::Usual,
    });
    let limiter = limiter(format!("redis+sentinel://127.0.0.1:{}/mymaster", server.port())).await;
    let why = limiter.why_unavailable().expect("there is no master");
    assert_eq!(why.detail(), "the server announced a string of 70000 bytes in a reply of at most 65536 bytes");
    assert!(why.fix().contains("make sure that a Redis or Valkey is at its address"), "{why}");
}

/// A node of a cluster that replies to `CLUSTER SLOTS` with the ranges, and to decisions with the reply.
fn node(
    slots: impl Fn(u16) -> Vec<u8> + Send + Sync + 'static,
    decision: impl Fn(u16) -> String + Send + Sync + 'static,
) -> Impostor {
    let port = Arc::new(AtomicU16::new(0));
    let own = port.clone();
    let server = Impostor::start(move |command| {
        let own = own.load(Ordering::Relaxed);
        match &*command[0] {
            "CLUSTER" => Reply::Bytes(slots(own)),
            "EVALSHA" => Reply::Bytes(decision(own).into_bytes()),
            _ => Reply::Usual,
        }
    });
    port.store(server.port(), Ordering::Relaxed);
    server
}

fn cluster_url(server: &Impostor) -> String {
    format!("redis+cluster://127.0.0.1:{}", server.port())
}

fn whole(own: u16) -> Vec<u8> {
    cluster_slots(&[(0, 16_383, "127.0.0.1", own)])
}

/// All of these nodes are at one address, so that connections to them would be counted there.
fn many_nodes(own: u16) -> Vec<u8> {
    let ranges: Vec<_> = (0..4_000).map(|nth| (nth, nth, format!("127.1.{}.{}", nth / 250, nth % 250 + 1))).collect();
    cluster_slots(&ranges.iter().map(|(first, last, host)| (*first, *last, &**host, own)).collect::<Vec<_>>())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_of_too_many_nodes_is_refused() {
    let server = node(many_nodes, |_| "+OK\r\n".to_owned());
    let limiter = limiter(cluster_url(&server)).await;
    assert_eq!(limiter.check("ann").await.source(), Source::Policy);
    let warning = warned(&limiter, "invalid_reply").await;
    assert!(warning.contains("the reply to CLUSTER SLOTS names more than 1000 nodes"), "{warning}");
    let why = limiter.why_unavailable().expect("there is no map");
    assert_eq!(why.detail(), "the reply to CLUSTER SLOTS names more than 1000 nodes");
    assert!(limiter.servers().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_map_of_slots_stays_if_a_later_one_has_too_many_nodes() {
    let is_hostile = Arc::new(AtomicBool::new(false));
    let hostile = is_hostile.clone();
    let slots = move |own| if hostile.load(Ordering::Relaxed) { many_nodes(own) } else { whole(own) };
    // A redirect makes the limiter request the map.
    let server = node(slots, |own| format!("-MOVED 1 127.0.0.1:{own}\r\n"));
    let limiter = limiter(cluster_url(&server)).await;
    let servers = || limiter.servers().into_iter().map(|server| server.address).collect::<Vec<_>>();
    let before = servers();
    assert_eq!(before, [format!("127.0.0.1:{}", server.port())]);
    is_hostile.store(true, Ordering::Relaxed);
    let _ = limiter.check("ann").await;
    warned(&limiter, "invalid_reply").await;
    assert_eq!(servers(), before);
    assert_eq!(limiter.why_unavailable(), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_keeps_redirecting_is_warned_of() {
    for redirect in ["MOVED", "ASK"] {
        let server = node(whole, move |own| format!("-{redirect} 1 127.0.0.1:{own}\r\n"));
        let limiter = limiter(cluster_url(&server)).await;
        let decision = limiter.check("ann").await;
        assert_eq!((decision.is_allowed(), decision.source()), (false, Source::Policy), "{redirect}");
        let warning = warned(&limiter, "redirects").await;
        let expected = format!(
            "nodes of the cluster redirected a request more than 6 times, the last time 127.0.0.1:{}: check `CLUSTER NODES`",
            server.port()
        );
        assert!(warning.starts_with(&expected), "{redirect}: {warning}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirects_to_ever_other_nodes_connect_to_few_of_them() {
    let next = AtomicU16::new(1);
    let server = node(whole, move |_| format!("-MOVED 1 127.2.0.1:{}\r\n", next.fetch_add(1, Ordering::Relaxed)));
    let limiter = limiter(cluster_url(&server)).await;
    let begin = tokio::time::Instant::now();
    let is_warned = || limiter.stores().iter().any(|store| store.warnings.iter().any(|one| one.kind() == "redirects"));
    while !is_warned() {
        assert!(begin.elapsed() < RECOVERY, "no warning");
        let keys: Vec<String> = (0..500).map(|nth| format!("key {nth}")).collect();
        join_all(keys.iter().map(|key| limiter.check(key.as_str()))).await;
        assert!(limiter.servers().len() <= 65, "{} servers", limiter.servers().len());
    }
    let warning = warned(&limiter, "redirects").await;
    assert!(warning.contains("redirected requests to too many nodes that are not in the map of slots"), "{warning}");
}

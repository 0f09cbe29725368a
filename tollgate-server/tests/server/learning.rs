//! Limits that learn: what was learned survives a restart, and is shared through Redis.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use testkit::folder::{folder, folder_with};
use testkit::redis::RedisServer;
use testkit::service::{Server, served};
use testkit::tollgate::{RULES, run_in, transcript};
use testkit::wait::wait_until;
use tollgate::internal::demand::{Learning, LearningLimit, TICK};
use tollgate::redis::RedisLimiter;
use tollgate::rules::file::RuleFile;
use tollgate::{FixedWindow, Gate, Limit, Limiter, ManualClock, Timestamp};

const LIMIT: &str = "limits: [{ name: per-user, key: header:x-user-id, window: 1m, \
                     limit: { learn: { from: 50, to: 400, over: 7h } } }]\n";

/// Returns what the limit has learned after three hours in which each of its clients needed 80: three moves, to 66. The
/// other number identifies what is measured.
fn learned() -> (Vec<u8>, u64) {
    let file = RuleFile::parse("tollgate.yaml", LIMIT).expect("the rules are valid");
    let rule = &file.limits[0];
    let mut learning = Learning::new(
        rule.learn().expect("the limit learns").settings().expect("valid settings"),
        rule.measure().expect("a measure"),
        7,
    );
    let limit = LearningLimit { quota: learning.value(), observer: Arc::clone(learning.observer()) };
    let file = file.clone().with_learning(Arc::new([("per-user".to_owned(), limit)].into()));
    let start = Timestamp::from_secs(1_700_000_100);
    let clock = ManualClock::at(start);
    let gate = Gate::with_limiter(file.compile().expect("the rules compile"), Limiter::builder().clock(clock.clone()))
        .expect("a gate in memory");
    for tick in 0..=36 {
        clock.set(start.saturating_add(TICK * tick));
        for client in 0..1100 {
            let client = format!("client-{client}");
            drop(gate.check_by_name("per-user", &[client.as_bytes()], 80));
        }
        learning.evaluate(clock.now());
    }
    assert_eq!(learning.value(), 66);
    (learning.encode().expect("a state to keep"), learning.measure_id())
}

/// Returns the number in force, as a new client sees it.
fn number(server: &Server, client: &str) -> u64 {
    let check = json!({"limit": "per-user", "key": client, "cost": 1});
    server.connect().check(&check)["remaining"].as_u64().expect("a number") + 1
}

/// Waits until a number is in force. Each check is of another client, because it takes a unit.
fn await_number(server: &Server, client: &str, expected: u64) -> Option<u64> {
    let mut checks = 0;
    wait_until(|| {
        checks += 1;
        Some(number(server, &format!("{client}-{checks}"))).filter(|number| *number == expected)
    })
}

#[test]
fn what_was_learned_survives_a_restart() {
    let folder = folder();
    let state = folder.path().join("state");
    let (bytes, _) = learned();
    let parts = [&b"per-user"[..], &bytes].map(|part| [&(part.len() as u64).to_le_bytes(), part].concat());
    std::fs::write(folder.path().join("state.learned"), [&b"tollgate learned 1\n"[..], &parts.concat()].concat())
        .unwrap();
    let start = |limit: &str| {
        let rules = folder_with(&[(RULES, &format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", served(limit)))]);
        Server::run(rules, &["serve", "--config", RULES, "--state", state.to_str().unwrap()])
    };
    let server = start(LIMIT);
    assert_eq!(number(&server, "ann"), 66);
    let metrics = server.address_of("admin");
    let mut admin = testkit::http1::Connection::to(metrics);
    admin.send("GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let page = admin.receive();
    let page = page.text();
    assert!(page.contains("tollgate_learned_value{limit=\"per-user\"} 66"), "{page}");
    assert!(page.contains("tollgate_learned_target{limit=\"per-user\"} 80"), "{page}");

    // Other bounds are in force at once, and what was learned stays.
    server.save_rules(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", LIMIT.replace("to: 400", "to: 60")));
    assert_eq!(await_number(&server, "bob", 60), Some(60));
    server.signal("TERM");
    assert!(server.wait().success());

    let server = start(LIMIT);
    assert_eq!(number(&server, "eve"), 60, "it was written when the server stopped");

    let rules = folder_with(&[(RULES, LIMIT)]);
    let state = ["--state", state.to_str().unwrap()];
    let output = run_in(
        rules.path(),
        &[&["explain", "--config", RULES, "GET", "/", "-H", "x-user-id: ann"][..], &state].concat(),
    );
    let output = transcript(&output);
    let why = "limit learns between 50 and 400: now 60; 99.9 % of 1,100 clients over 7h need 80 or less";
    assert!(output.contains(why), "{output}");
}

#[test]
fn nodes_follow_what_is_learned_on_redis() {
    let redis = RedisServer::start();
    let rules = format!("store: {}\nstore_timeout: 5s\n{LIMIT}", redis.url());
    let nodes = [(); 2].map(|()| Server::with_rules(&rules));
    for (index, node) in nodes.iter().enumerate() {
        assert_eq!(number(node, &format!("ann-{index}")), 50);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let ((state, id), hour) = (learned(), Duration::from_secs(3600));
    let name = format!("per-user:{id:016x}");
    let any = Limit::new("any", FixedWindow::default()).unwrap();
    let write = |expected| {
        runtime.block_on(async {
            let limiter = RedisLimiter::builder(redis.url()).limit(any.clone()).connect().await.unwrap();
            limiter.store_learning(&name, expected, &state, hour).await.unwrap()
        })
    };
    assert!(write(0));
    assert!(!write(0), "another node has written since");
    for (index, node) in nodes.iter().enumerate() {
        assert_eq!(await_number(node, &format!("bob-{index}"), 66), Some(66));
    }
    // A node that starts later has the number too.
    assert_eq!(await_number(&Server::with_rules(&rules), "eve", 66), Some(66));

    let folder = folder_with(&[(RULES, &rules)]);
    let output = run_in(folder.path(), &["explain", "--config", RULES, "GET", "/", "-H", "x-user-id: ann", "--json"]);
    let output = transcript(&output);
    assert!(output.contains("\"in_force\": 66") && output.contains("\"phase\": \"following\""), "{output}");
}

//! Limits that learn: what was learned survives a restart, and is shared through Redis.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::json;
use testkit::folder::{folder, folder_with};
use testkit::redis::RedisServer;
use testkit::service::{Server, served};
use testkit::tollgate::{RULES, run_in, transcript};
use testkit::wait::wait_until;
use tollgate::redis::RedisLimiter;
use tollgate::{FixedWindow, Limit, Limiter, ManualClock, Timestamp};
use tollgate_config::RuleFile;
use tollgate_rules::Gate;
use tollgate_rules::internal::demand::{Learning, LearningLimit, TICK};

const LIMIT: &str = "limits: [{ name: per-user, key: header:x-user-id, window: 1m, \
                     limit: { learn: { from: 50, to: 400, over: 7h } } }]\n";

#[expect(clippy::disallowed_methods, reason = "the server under test forgets what was learned long ago")]
fn seconds_since_epoch() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs()
}

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
    let tick = TICK.as_secs();
    let start = Timestamp::from_secs(seconds_since_epoch() / tick * tick + tick / 3).saturating_sub(TICK * 37);
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
fn learned_numbers_survive_a_restart() {
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
    let why = "limit learns between 50 and 400: now 60; 99.9 % of 1,1";
    assert!(output.contains(why) && output.contains(" clients over 7h need 80 or less"), "{output}");
}

/// Starts a server in its own folder, with a state file in another.
fn with_state(state: &Path) -> Server {
    let rules = folder_with(&[(RULES, &served(LIMIT))]);
    Server::run(rules, &["serve", "--config", RULES, "--state", state.to_str().expect("UTF-8")])
}

/// Explains a request of a new client by the rules and a state file.
fn explained(state: &Path) -> String {
    let folder = folder_with(&[(RULES, LIMIT)]);
    let state = state.to_str().expect("UTF-8");
    let arguments = ["explain", "--config", RULES, "GET", "/", "-H", "x-user-id: ann", "--state", state];
    transcript(&run_in(folder.path(), &arguments)).replace(state, "STATE")
}

#[test]
fn a_server_that_stops_before_the_first_evaluation_keeps_what_it_saw() {
    let folder = folder();
    let state = folder.path().join("state");
    let server = with_state(&state);
    for client in 0..60 {
        number(&server, &format!("client-{client}"));
    }
    server.signal("TERM");
    assert!(server.wait().success());
    let output = explained(&state);
    assert!(output.contains("50 is in force until 1,000 clients have returned after 1h; 0 of 60 so far"), "{output}");
}

#[test]
fn a_damaged_file_is_kept_and_reported_with_the_fix() {
    let folder = folder();
    let state = folder.path().join("state");
    std::fs::write(folder.path().join("state.learned"), "damaged").unwrap();
    let output = explained(&state);
    assert!(
        output.contains("warning: STATE.learned is damaged, so the numbers that limits have learned are unknown: ")
    );
    let server = with_state(&state);
    assert_eq!(number(&server, "ann"), 50);
    let said = server.said();
    let warning = format!(
        "{0}.learned is damaged and not used, so limits that learn start with their smallest numbers: it is \
                           kept as {0}.learned.rejected; restore",
        state.display()
    );
    assert!(said.contains(&warning), "{said}");
    assert_eq!(std::fs::read(folder.path().join("state.learned.rejected")).unwrap(), b"damaged");
    server.signal("TERM");
    assert!(server.wait().success());
    assert!(folder.path().join("state.learned").exists());
}

#[test]
fn a_file_that_cannot_be_read_keeps_the_server_from_starting() {
    let folder = folder_with(&[(RULES, &served(LIMIT))]);
    std::fs::create_dir(folder.path().join("state.learned")).unwrap();
    let output = transcript(&run_in(folder.path(), &["serve", "--config", RULES, "--state", "state"]));
    let problem = "cannot read the state file state.learned: ";
    assert!(output.contains(problem) && output.ends_with("exit code 2"), "{output}");
}

#[test]
fn explain_says_why_it_does_not_know_the_numbers() {
    let folder = folder();
    let output = explained(&folder.path().join("state"));
    let hint = "warning: there is no STATE.learned, so the numbers that limits have learned are unknown: name the --state \
                file of the server";
    assert!(output.contains(hint) && output.ends_with("exit code 0"), "{output}");
    let rules = [
        ("redis.yaml", format!("store: redis://127.0.0.1:1\n{LIMIT}"), "--state is only for the in-memory store"),
        ("fixed.yaml", "limits: [{ name: a, key: ip, limit: 5, window: 1m }]\n".to_owned(), "--state has no effect"),
    ];
    for (name, text, message) in rules {
        let folder = folder_with(&[(name, &text)]);
        let output = transcript(&run_in(folder.path(), &["explain", "--config", name, "GET", "/", "--state", "state"]));
        assert!(output.contains(message), "{output}");
    }
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

//! Reservations of the decision service whose server is reloaded, restarted or killed, or whose Redis fails over.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Mutex, mpsc};

use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::folder::{folder, folder_with};
use testkit::gateway::site;
use testkit::http1::{Connection, Response};
use testkit::redis::Sentinels;
use testkit::service::{Server, served};
use testkit::tollgate::RULES;
use testkit::upstream::Raw;
use testkit::wait::wait_until;

const LIMITS: &str =
    "limits: [{ name: user, key: 'header:x-user-id', algorithm: sliding_window_log, limit: 10, window: 1h }]\n";

fn call(connection: &mut Connection, path: &str, body: &Value) -> Response {
    let body = body.to_string();
    let length = body.len();
    connection.ask(format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    ))
}

/// Reserves units of a key for a time, and returns the token.
#[track_caller]
fn reserve(connection: &mut Connection, cost: u64, seconds: u64) -> Value {
    let question = json!({"limit": "user", "key": "ann", "cost": cost, "expires_after": seconds});
    let reserved = call(connection, "/v1/reserve", &question).json();
    assert_eq!(reserved["allowed"], true, "{reserved}");
    reserved["reservation"].clone()
}

/// Settles a token, and returns the status with the code of the error.
fn settle(connection: &mut Connection, token: &Value, actual: u64) -> (u16, String) {
    let settled = call(connection, "/v1/settle", &json!({"reservation": token, "actual": actual}));
    let code = settled.json()["error"].as_str().unwrap_or_default().to_owned();
    (settled.status, code)
}

fn left(connection: &mut Connection) -> Value {
    call(connection, "/v1/peek", &json!({"limit": "user", "key": "ann"})).json()["remaining"].clone()
}

fn is(status: u16, code: &str) -> (u16, String) {
    (status, code.to_owned())
}

/// Starts a server whose control socket and state file are in `shared`.
fn start(shared: &TempDir, others: &[&str]) -> Server {
    let control = shared.path().join("control");
    let control = control.to_str().expect("the path is UTF-8");
    let arguments = [&["serve", "--config", RULES, "--control", control], others].concat();
    Server::run(folder_with(&[(RULES, &served(LIMITS))]), &arguments)
}

fn take_over(shared: &TempDir, others: &[&str]) {
    let old = start(shared, others);
    let mut kept = old.connect();
    let [used, given_back, other] = [5, 1, 2].map(|cost| reserve(&mut kept, cost, 60));
    assert_eq!(settle(&mut kept, &given_back, 0), is(200, ""));
    let new = start(shared, others);
    new.await_said("took over from process", 1);
    assert_eq!(new.address, old.address);
    let mut connection = new.connect();
    assert_eq!(left(&mut connection), 3);
    assert_eq!(settle(&mut connection, &used, 1), is(200, ""));
    assert_eq!(settle(&mut connection, &used, 1), is(409, "already_settled"));
    assert_eq!(settle(&mut connection, &given_back, 0), is(404, "unknown_reservation"));
    assert_eq!(left(&mut connection), 7);
    assert_eq!(settle(&mut kept, &other, 0), is(503, "reservation_handed_over"));
    assert!(kept.is_closed(), "the next connection is to the new process");
    assert_eq!(settle(&mut connection, &other, 0), is(200, ""));
    assert_eq!(left(&mut connection), 9);
    assert_eq!(old.wait().code(), Some(0));
}

#[test]
fn a_new_process_settles_the_reservations_of_the_one_before() {
    take_over(&folder(), &[]);
}

#[test]
fn a_new_process_with_the_same_state_file_settles_them_too() {
    let shared = folder();
    let state = shared.path().join("state");
    take_over(&shared, &["--state", state.to_str().expect("the path is UTF-8"), "--state-interval", "1"]);
}

/// The old process settles its requests under way in its own memory. In the new one, the estimate stays taken.
#[test]
fn requests_under_way_keep_their_estimate_in_the_new_process() {
    let (answer, may_answer) = mpsc::channel::<()>();
    let (arrived, has_arrived) = mpsc::channel::<()>();
    let may_answer = Mutex::new(may_answer);
    let upstream = Raw::start(move |conversation| {
        _ = conversation.request();
        arrived.send(()).expect("the test waits");
        may_answer.lock().expect("one thread").recv().expect("the test says when");
        conversation.send("HTTP/1.1 200 OK\r\nx-cost: 1\r\ncontent-length: 0\r\n\r\n");
    });
    let limits = "{ name: user, key: 'header:x-user-id', limit: 10, window: 10220d, cost: 8, settle: 'header:x-cost' }";
    let rules = site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits);
    let rules = format!("{rules}service: {{ http: '127.0.0.1:0' }}\n");
    let shared = folder();
    let control = shared.path().join("control");
    let control = control.to_str().expect("the path is UTF-8");
    let start = || Server::run(folder_with(&[(RULES, &rules)]), &["serve", "--config", RULES, "--control", control]);
    let old = start();
    let mut client = Connection::to(old.address_of("gateway"));
    client.send("GET / HTTP/1.1\r\nhost: h\r\nx-user-id: ann\r\n\r\n");
    has_arrived.recv().expect("the upstream gets the request");
    let new = start();
    new.await_said("took over from process", 1);
    assert_eq!(left(&mut new.connect()), 2);
    answer.send(()).expect("the upstream waits");
    assert_eq!(client.receive().status, 200);
    assert_eq!(old.wait().code(), Some(0));
    assert_eq!(left(&mut new.connect()), 2);
}

fn start_with(state: &Path) -> Server {
    let state = state.to_str().expect("the path is UTF-8");
    let arguments = ["serve", "--config", RULES, "--state", state, "--state-interval", "1"];
    Server::run(folder_with(&[(RULES, &served(LIMITS))]), &arguments)
}

#[test]
fn the_state_file_of_the_end_has_the_open_reservations() {
    let folder = folder();
    let state = folder.path().join("state");
    let server = start_with(&state);
    let tokens = [3, 3].map(|cost| reserve(&mut server.connect(), cost, 60));
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
    // It contains the secret that signs reservations.
    assert_eq!(std::fs::metadata(&state).expect("it is there").permissions().mode() & 0o777, 0o600);

    let server = start_with(&state);
    assert_eq!(left(&mut server.connect()), 4);
    assert_eq!(settle(&mut server.connect(), &tokens[0], 1), is(200, ""));
    assert_eq!(settle(&mut server.connect(), &tokens[0], 1), is(409, "already_settled"));
    assert_eq!(left(&mut server.connect()), 6);
    // The file of the start contains no reservations any more: this one could have been settled.
    server.signal("KILL");
    _ = server.wait();
    let server = start_with(&state);
    for token in &tokens {
        assert_eq!(settle(&mut server.connect(), token, 0), is(404, "unknown_reservation"));
    }
    let left = left(&mut server.connect());
    assert!(left == 4 || left == 6, "{left}");
}

#[test]
fn a_process_that_is_killed_leaves_its_reservations_spent() {
    let folder = folder();
    let state = folder.path().join("state");
    let server = start_with(&state);
    let token = reserve(&mut server.connect(), 8, 60);
    // The writer may have started the next file before this request. It starts the one after that later.
    for _ in 0..2 {
        let before = std::fs::read(&state).expect("it is there from the start");
        wait_until(|| Some(std::fs::read(&state).ok()?).filter(|now| *now != before)).expect("it is written again");
    }
    server.signal("KILL");
    _ = server.wait();
    let server = start_with(&state);
    assert_eq!(settle(&mut server.connect(), &token, 0), is(404, "unknown_reservation"));
    assert_eq!(left(&mut server.connect()), 2);
}

#[test]
fn a_reload_keeps_reservations_and_names_a_limit_that_is_gone() {
    let server = Server::with_rules(LIMITS);
    let mut connection = server.connect();
    let tokens = [2, 2, 2].map(|cost| reserve(&mut connection, cost, 60));
    let [expired, settled] = [1, 1].map(|cost| reserve(&mut connection, cost, 1));
    assert_eq!(settle(&mut connection, &settled, 0), is(200, ""));
    server.save_rules(
        &LIMITS.replace("sliding_window_log, limit", "token_bucket, refill: 1/h, capacity").replace(", window: 1h", ""),
    );
    server.await_said("is in force: user: ", 1);
    assert_eq!(left(&mut connection), 3);
    assert_eq!(settle(&mut connection, &tokens[0], 0), is(200, ""));
    assert_eq!(left(&mut connection), 5);
    server.save_rules(&LIMITS.replace("name: user", "name: person"));
    server.await_said("is in force: ", 2);
    assert_eq!(settle(&mut connection, &tokens[1], 0), is(404, "limit_removed"));
    server.save_rules(LIMITS);
    server.await_said("is in force: ", 3);
    assert_eq!(settle(&mut connection, &tokens[1], 0), is(200, ""));
    let has_expired = wait_until(|| (settle(&mut connection, &settled, 0).0 == 410).then_some(()));
    assert!(has_expired.is_some(), "it was made after the other one, for a second");
    assert_eq!(settle(&mut connection, &expired, 0), is(410, "reservation_expired"));
    assert_eq!(settle(&mut connection, &tokens[1], 0), is(409, "already_settled"));
    let forged = tokens[2].as_str().expect("text").replace(['A', 'B', 'C'], "D");
    assert_eq!(settle(&mut connection, &json!(forged), 0).0 / 100, 4);
    assert_eq!(settle(&mut connection, &tokens[2], 0), is(200, ""), "it is still open");
}

#[test]
fn reservations_survive_a_failover_of_redis() {
    let mut sentinels = Sentinels::start();
    let settings = format!("store: '{}'\nstore_timeout: 5s\non_store_failure: deny\n{LIMITS}", sentinels.url());
    let nodes = [(); 2].map(|()| Server::with_rules(&settings));
    let tokens = [4, 4].map(|cost| reserve(&mut nodes[0].connect(), cost, 600));
    assert_eq!(settle(&mut nodes[1].connect(), &tokens[0], 1), is(200, ""));
    // Everything written before this command is replicated before it.
    let mut master = sentinels.master().connection();
    let (replicas,): (usize,) =
        redis::pipe().cmd("SET").arg("last").arg(1).ignore().cmd("WAIT").arg(1).arg(5000).query(&mut master).unwrap();
    assert_eq!(replicas, 1);
    sentinels.master().kill();
    sentinels.wait_for_failover();
    for node in &nodes {
        let probe = json!({"limit": "user", "key": "probe"});
        let back = wait_until(|| (node.connect().check(&probe)["source"] == "store").then_some(()));
        assert!(back.is_some(), "a node does not find the new master; it said: {}", node.said());
    }
    // This node reads the secret from the new master.
    let third = Server::with_rules(&settings);
    assert_eq!(settle(&mut third.connect(), &tokens[1], 2), is(200, ""));
    for node in nodes.iter().chain([&third]) {
        for token in &tokens {
            assert_eq!(settle(&mut node.connect(), token, 0), is(409, "already_settled"));
        }
        assert_eq!(left(&mut node.connect()), 7);
    }
}

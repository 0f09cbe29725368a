//! A new process that takes over from the running one: listeners, counts and open connections.

use std::io::Read;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::json;
use tempfile::TempDir;
use testkit::folder::{folder, folder_with};
use testkit::gateway::{per_user, site};
use testkit::http1::Connection;
use testkit::skip::skipped;
use testkit::tollgate::{Process, RULES, binary, run_in, transcript};
use testkit::upstream::{Conversation, Raw};
use testkit::wait::until;

use crate::successor::Successor;

const HANDSHAKE: &str = "GET /chat HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
    Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

fn rules(settings: &str, limits: &str) -> String {
    let gateway = site(settings, &["{ path: /**, upstream: echo }"], limits);
    format!(
        "{gateway}service: {{ http: '127.0.0.1:0', grpc: '127.0.0.1:0', resp: '127.0.0.1:0' }}\n\
         admin: {{ listen: '127.0.0.1:0' }}\n"
    )
}

/// Starts a server in a folder of its own, with a control socket in `shared`.
fn start(shared: &TempDir, rules: &str, others: &[&str]) -> Process {
    let control = shared.path().join("control");
    let control = control.to_str().expect("the path is UTF-8");
    let arguments = [&["serve", "--config", RULES, "--control", control], others].concat();
    Process::start(folder_with(&[(RULES, rules)]), &arguments)
}

fn command(shared: &TempDir, name: &str) -> Output {
    run_in(shared.path(), &[name, "--control", "control"])
}

fn statuses(server: &Process, user: &str, count: usize) -> Vec<u16> {
    let address = server.address_of("gateway");
    (0..count).map(|_| Connection::to(address).get_as(user, "/").status).collect()
}

#[test]
fn a_new_process_takes_over_every_listener_and_the_counts() {
    let shared = folder();
    let rules = rules("", &per_user(3));
    let mut old = start(&shared, &rules, &[]);
    assert_eq!(statuses(&old, "ann", 2), [200, 200]);
    let control = shared.path().join("control");
    let mode = std::fs::metadata(&control).expect("there is a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let mut new = start(&shared, &rules, &[]);
    assert_eq!(new.first_line, old.first_line, "all listeners have the addresses that they had");
    new.await_said("took over 1 key from the process before", 1);
    new.await_said(&format!("took over from process {}, which finishes its requests", old.id()), 1);
    assert_eq!(old.wait().code(), Some(0));
    old.await_said("another process has taken over: this one finishes its requests", 1);
    assert_eq!(statuses(&new, "ann", 2), [200, 429]);
    let mut service = Connection::to(new.address_of("decisions POST"));
    assert_eq!(service.check(&json!({"limit": "user", "key": "bob"}))["allowed"], true);
    assert_eq!(Connection::to(new.address_of("admin")).get("/readyz").status, 200);

    new.signal("TERM");
    assert_eq!(new.wait().code(), Some(0));
    assert!(!control.exists(), "a server that stops removes its socket");
    assert_eq!(std::fs::read_dir(shared.path()).expect("the folder is there").count(), 0);
}

#[test]
fn one_process_at_a_time_writes_the_state_file() {
    let shared = folder();
    let state = shared.path().join("state");
    let state = ["--state", state.to_str().expect("the path is UTF-8"), "--state-interval", "1"];
    let rules = rules("", &per_user(4));
    let mut old = start(&shared, &rules, &state);
    assert_eq!(statuses(&old, "ann", 1), [200]);
    let mut new = start(&shared, &rules, &state);
    assert_eq!(old.wait().code(), Some(0));
    assert_eq!(statuses(&new, "ann", 2), [200, 200]);
    new.signal("TERM");
    assert_eq!(new.wait().code(), Some(0));
    let last = start(&shared, &rules, &state);
    last.await_said("restored 1 key from the state file", 1);
    assert_eq!(statuses(&last, "ann", 2), [200, 429]);
}

#[test]
fn listeners_that_the_new_process_does_not_use_are_closed() {
    let shared = folder();
    let mut old = start(&shared, &rules("", ""), &[]);
    let (gateway, redis) = (old.address_of("gateway"), old.address_of("redis"));
    let without_resp = rules("", "").replace(", resp: '127.0.0.1:0'", "");
    let new = start(&shared, &without_resp, &[]);
    assert_eq!(old.wait().code(), Some(0));
    assert_eq!(new.address_of("gateway"), gateway);
    assert!(std::net::TcpStream::connect(redis).is_err());
}

#[test]
fn another_number_of_workers_uses_all_sockets() {
    let shared = folder();
    for workers in [2, 5, 1, 3] {
        let rules = rules(&format!("workers: {workers}"), "");
        let mut server = start(&shared, &rules, &[]);
        let first = server.address_of("gateway");
        let next = start(&shared, &rules.replace(&format!("workers: {workers}"), "workers: 4"), &[]);
        assert_eq!(server.wait().code(), Some(0));
        assert_eq!(next.address_of("gateway"), first);
        // A socket without a worker would keep its clients waiting.
        for _ in 0..50 {
            assert_eq!(Connection::to(first).get("/").status, 200);
        }
    }
}

#[test]
fn a_new_process_that_cannot_start_changes_nothing() {
    let shared = folder();
    let old = start(&shared, &rules("", ""), &[]);
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = taken.local_addr().expect("it is bound").to_string();
    let failing = folder_with(&[(RULES, &rules("", "").replacen("127.0.0.1:0", &address, 1))]);
    let control = shared.path().join("control");
    let control = control.to_str().expect("the path is UTF-8");
    let output = run_in(failing.path(), &["serve", "--config", RULES, "--control", control]);
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    old.await_said("ended before it could take over: this one continues", 1);
    assert_eq!(statuses(&old, "ann", 1), [200]);
    assert_eq!(command(&shared, "reload").status.code(), Some(0));
    assert_eq!(std::fs::read_dir(shared.path()).expect("the folder is there").count(), 1, "only the socket is left");
}

#[test]
fn restart_reports_a_new_process_that_cannot_start() {
    let shared = folder();
    let old = start(&shared, &rules("", ""), &[]);
    // Only a start reads this: a reload refuses the file too.
    std::fs::write(old.path(RULES), "limits: [{ name: a, limit: 0 }]\n").expect("the folder is writable");
    let output = command(&shared, "restart");
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("ended before it was ready (exit status: 2): its log has the reason"), "{said}");
    old.await_said("the restart failed, and this process continues: process", 1);
    assert_eq!(statuses(&old, "ann", 1), [200]);
}

#[test]
fn restart_starts_the_same_command_again() {
    let shared = folder();
    let mut old = start(&shared, &rules("", &per_user(2)), &[]);
    assert_eq!(statuses(&old, "ann", 1), [200]);
    let successor = Successor::from(&command(&shared, "restart"));
    assert_eq!(successor.before, old.id());
    assert_eq!(old.wait().code(), Some(0));
    assert_eq!(statuses(&old, "ann", 2), [200, 429]);
}

/// Answers a handshake, and sends back what the client sends.
pub(crate) fn echo_upgraded(conversation: &mut Conversation) {
    conversation.send(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n",
    );
    let mut buffer = [0; 64];
    while let Ok(read @ 1..) = conversation.stream.read(&mut buffer) {
        conversation.send(&buffer[..read]);
    }
}

#[test]
fn a_websocket_stays_open_until_the_end_of_the_drain() {
    let upstream = Raw::start(|conversation| {
        _ = conversation.request();
        echo_upgraded(conversation);
    });
    let shared = folder();
    let rules = site("timeouts: { drain: 2s }", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], "");
    let mut old = start(&shared, &rules, &[]);
    let mut socket = Connection::to(old.address_of("gateway"));
    assert_eq!(socket.ask(HANDSHAKE).status, 101);
    let new = start(&shared, &rules, &[]);
    new.await_said("took over from process", 1);
    socket.send("still here");
    assert_eq!(socket.bytes(10), b"still here");
    assert!(socket.is_closed());
    assert_eq!(old.wait().code(), Some(0));
    old.await_said("1 connection with requests in flight cut off at the end of gateway.timeouts.drain", 1);
    assert_eq!(Connection::to(new.address_of("gateway")).ask(HANDSHAKE).status, 101);
}

#[test]
fn idle_clients_are_asked_to_reconnect_by_a_response() {
    let shared = folder();
    let mut old = start(&shared, &rules("", ""), &[]);
    let mut clients = [old.address_of("gateway"), old.address_of("admin")].map(Connection::to);
    for client in &mut clients {
        assert_eq!(client.get("/healthz").header("connection"), None);
    }
    let new = start(&shared, &rules("", ""), &[]);
    new.await_said("took over from process", 1);
    for client in &mut clients {
        // The old process begins to close its connections just after the new one has said that it took over.
        until("a response that closes the connection", || client.get("/healthz").header("connection") == Some("close"));
        assert!(client.is_closed());
    }
    assert_eq!(old.wait().code(), Some(0));
}

#[test]
fn reload_prints_the_changes_or_the_problems() {
    let shared = folder();
    let server = start(&shared, &rules("", &per_user(3)), &[]);
    let save = |text: &str| std::fs::write(server.path(RULES), text).expect("the folder is writable");
    let reload = || transcript(&command(&shared, "reload"));
    assert!(reload().starts_with("tollgate.yaml is in force: "), "{}", reload());

    save("limits: [{ name: user, limit: 0 }]\n");
    insta::assert_snapshot!(reload());
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = taken.local_addr().expect("it is bound").to_string();
    save(&rules("", "").replace("admin: { listen: '127.0.0.1:0' }", &format!("admin: {{ listen: '{address}' }}")));
    let output = reload();
    assert!(
        output.contains("tollgate.yaml is rejected, and the previous rules stay in force: admin.listen"),
        "{output}"
    );
    assert!(output.ends_with("exit code 1"), "{output}");
    assert_eq!(statuses(&server, "ann", 4), [200, 200, 200, 429], "the previous rules are in force");

    save(&rules("", &per_user(4)));
    until("the new limit", || {
        reload().starts_with("tollgate.yaml is in force: ") && statuses(&server, "ann", 1) == [200]
    });
}

#[test]
fn commands_without_a_server_end_with_2_and_the_fix() {
    let shared = folder();
    let absent = transcript(&command(&shared, "reload"));
    insta::assert_snapshot!(absent);
    // A server that was killed leaves its socket.
    let mut server = start(&shared, &rules("", ""), &[]);
    server.signal("KILL");
    _ = server.wait();
    let output = command(&shared, "restart");
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("Connection refused"), "{output:?}");
    let next = start(&shared, &rules("", ""), &[]);
    assert_eq!(command(&shared, "reload").status.code(), Some(0));
    drop(next);

    let output = run_in(Path::new("."), &["serve", "--control", "no/such/folder/control"]);
    insta::assert_snapshot!(transcript(&output));
}

#[test]
fn reload_without_a_rule_file_fails() {
    let shared = folder();
    let control = shared.path().join("control");
    let control = control.to_str().expect("the path is UTF-8");
    let free = "127.0.0.1:0";
    let _server = Process::start(folder(), &["serve", "--listen", free, "--admin", free, "--control", control]);
    insta::assert_snapshot!(transcript(&command(&shared, "reload")));
}

/// A user that owns nothing.
const NOBODY: u32 = 65534;

/// A user with write access to the folder of the socket could put another server there.
#[test]
fn root_takes_over_from_root_alone_and_commands_every_user() {
    if !rustix::process::geteuid().is_root() {
        return skipped("only root can start a server of another user");
    }
    let shared = folder();
    let all = |path: &Path| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).expect("the folder is ours");
    };
    all(shared.path());
    let control = shared.path().join("control");
    let control = control.to_str().expect("the path is UTF-8");
    let own = folder_with(&[(RULES, &rules("", ""))]);
    all(own.path());
    let mut server = Command::new(binary());
    server.args(["serve", "--config", RULES, "--control", control]).current_dir(own.path()).uid(NOBODY).gid(NOBODY);
    let server = Process::start_command(own, server);

    let refused = run_in(folder_with(&[(RULES, &rules("", ""))]).path(), &["serve", "--control", control]);
    assert_eq!(refused.status.code(), Some(2));
    let expected = format!(
        "error: the server on the control socket {control} belongs to user {NOBODY}: run both as the same user, or name \
         another socket with --control\n"
    );
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.ends_with(&expected), "{said}");
    assert_eq!(statuses(&server, "ann", 1), [200], "it goes on");
    assert_eq!(command(&shared, "reload").status.code(), Some(0));
}

#[test]
fn a_file_that_is_not_a_socket_is_not_replaced() {
    let shared = folder_with(&[("control", "precious"), (RULES, &rules("", ""))]);
    let output = run_in(shared.path(), &["serve", "--config", RULES, "--control", "control"]);
    assert_eq!(output.status.code(), Some(2));
    let expected =
        "error: control is not a socket, and is not replaced: name another path with --control, or remove it\n";
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.ends_with(expected), "{said}");
    assert_eq!(std::fs::read_to_string(shared.path().join("control")).expect("it is there"), "precious");
}

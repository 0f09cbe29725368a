//! `serve --state FILE`: counts survive a restart.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;
use testkit::folder::{folder, folder_with};
use testkit::http1::Connection;
use testkit::service::Server;
use testkit::tollgate::{RULES, run_in, without_times};
use testkit::wait::wait_until;

const LIMIT: &str =
    "limits: [{ name: per-user, key: header:x-user-id, algorithm: token_bucket, capacity: 3, refill: 1/h }]\n";

fn rules(limits: &str) -> TempDir {
    let listeners = "gateway: { listen: '127.0.0.1:0', routes: [{ path: /**, upstream: echo }] }\nservice: { http: '127.0.0.1:0' }\n";
    folder_with(&[(RULES, &format!("{listeners}{limits}"))])
}

fn start(limits: &str, state: &Path) -> Server {
    let state = state.to_str().expect("UTF-8");
    Server::run(rules(limits), &["serve", "--config", RULES, "--state", state, "--state-interval", "1"])
}

/// Returns the statuses of a number of requests of a user through the gateway.
fn statuses(server: &Server, user: &str, requests: usize) -> Vec<u16> {
    let mut client = Connection::to(server.address_of("gateway"));
    let request = format!("GET / HTTP/1.1\r\nhost: shop.example\r\nx-user-id: {user}\r\n\r\n");
    let status = |_| {
        client.send(&request);
        client.receive().status
    };
    (0..requests).map(status).collect()
}

#[test]
fn a_key_that_was_spent_is_denied_after_a_restart() {
    let folder = folder();
    let state = folder.path().join("state");
    let server = start(LIMIT, &state);
    assert_eq!(statuses(&server, "ann", 4), [200, 200, 200, 429]);
    assert_eq!(statuses(&server, "bob", 1), [200]);
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
    assert_eq!(std::fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o600);

    let server = start(LIMIT, &state);
    server.await_said("restored 2 keys from the state file", 1);
    assert_eq!(statuses(&server, "ann", 1), [429]);
    assert_eq!(statuses(&server, "bob", 3), [200, 200, 429]);
    assert_eq!(statuses(&server, "eve", 1), [200]);
}

#[test]
fn a_server_that_is_killed_loses_at_most_what_came_after_the_last_writing() {
    let folder = folder();
    let state = folder.path().join("state");
    let server = start(LIMIT, &state);
    assert_eq!(statuses(&server, "ann", 3), [200; 3]);
    // The writer may have started the next file before these requests. It starts the one after that later.
    for _ in 0..2 {
        let before = std::fs::read(&state).expect("it is there from the start");
        wait_until(|| Some(std::fs::read(&state).ok()?).filter(|now| *now != before)).expect("it is written again");
    }
    server.signal("KILL");
    let _ = server.wait();

    let server = start(LIMIT, &state);
    assert_eq!(statuses(&server, "ann", 1), [429]);
}

#[test]
fn spent_units_stay_spent_under_the_limits_of_the_next_run() {
    let folder = folder();
    let state = folder.path().join("state");
    let server = start(LIMIT, &state);
    assert_eq!(statuses(&server, "ann", 3), [200; 3]);
    server.signal("TERM");
    assert!(server.wait().success());

    let changed =
        "limits: [{ name: per-user, key: header:x-user-id, algorithm: sliding_window_log, limit: 4, window: 1h }]\n";
    let server = start(changed, &state);
    assert_eq!(statuses(&server, "ann", 2), [200, 429]);
}

#[test]
fn a_damaged_state_file_is_kept_aside_and_the_server_starts_without_it() {
    let folder = folder();
    let state = folder.path().join("state");
    std::fs::write(&state, "tollgate\u{1}damaged").unwrap();
    let server = start(LIMIT, &state);
    let said = server.said().replace(folder.path().to_str().unwrap(), "DIR");
    insta::assert_snapshot!(said.trim_end(), @"tollgate: warning: the state file DIR/state is not used: the snapshot is truncated: restore a copy, or start without it; it is kept as DIR/state.rejected, and every key starts with its full quota");
    assert_eq!(statuses(&server, "ann", 1), [200]);
    assert!(folder.path().join("state.rejected").exists());
}

#[test]
fn a_state_file_that_cannot_work_ends_with_2_and_the_fix() {
    let start = |limits: &str, state: &str| {
        let folder = rules(limits);
        let output = run_in(folder.path(), &["serve", "--config", RULES, "--state", state]);
        assert_eq!(output.status.code(), Some(2));
        without_times(&String::from_utf8(output.stderr).expect("UTF-8")).trim_end().to_owned()
    };
    insta::assert_snapshot!(start(LIMIT, "no/such/folder/state"), @"tollgate: cannot write the state file no/such/folder/state: No such file or directory (os error 2): make its folder writable for the user of this process, or name another with --state");
    insta::assert_snapshot!(start(LIMIT, "."), @"tollgate: cannot read the state file .: Is a directory (os error 21): make it readable for the user of this process, or name another with --state");
    insta::assert_snapshot!(start(&format!("store: redis://127.0.0.1:1\n{LIMIT}"), "state"), @"tollgate: --state is only for the in-memory store, because Redis keeps its own keys: remove it, or use `store: memory`");
}

//! Slow clients and many clients. Unit tests check the exact deadlines on a paused clock.

use serde_json::json;

use crate::client::{Connection, head};
use crate::process::Server;

/// The most connections that the server accepts.
const MAX_CONNECTIONS: usize = 512;

#[test]
fn slow_clients_are_cut_off_and_others_are_served_meanwhile() {
    let server = Server::start();
    let mut silent = server.connect();
    let mut half_head = server.connect();
    half_head.send("POST /v1/check HTTP/1.1\r\nhost: toll");
    let mut half_body = server.connect();
    half_body.send(head(100));
    half_body.send(r#"{"limit":"per-user""#);

    assert_eq!(server.connect().check(&json!({"limit": "per-user", "key": "1"}))["allowed"], true);

    assert!(silent.is_closed_by_server());
    assert!(half_head.is_closed_by_server());
    let response = half_body.receive();
    assert_eq!((response.status, &response.json()["error"]), (408, &json!("body_timeout")));
    assert!(half_body.is_closed_by_server());
}

#[test]
fn client_that_leaves_in_the_middle_disturbs_nobody() {
    let server = Server::start();
    for sent in ["", "POST", &head(100), &format!("{}{{", head(100))] {
        server.connect().send(sent);
    }
    assert_eq!(server.connect().check(&json!({"limit": "per-user", "key": "1"}))["allowed"], true);
}

#[test]
fn nonsense_instead_of_http_is_refused() {
    let server = Server::start();
    let mut connection = server.connect();
    connection.send("\u{16}\u{3}\u{1}nonsense\r\n\r\n");
    assert_eq!(connection.receive().status, 400);
    assert!(connection.is_closed_by_server());
}

#[test]
fn head_that_is_too_long_is_refused() {
    let server = Server::start();
    let mut connection = server.connect();
    connection.send(format!("GET / HTTP/1.1\r\nx-long: {}", "x".repeat(64 * 1024)));
    assert_eq!(connection.receive().status, 431);
}

#[test]
fn one_connection_more_than_the_bound_waits_for_a_place() {
    let server = Server::start();
    let mut held = (0..MAX_CONNECTIONS).map(|_| server.connect()).collect::<Vec<Connection>>();
    let question = r#"{"limit":"per-user","key":"1"}"#;
    // Connections are accepted in order, so all are accepted once the last one gets a response.
    assert_eq!(held[MAX_CONNECTIONS - 1].post(question).status, 200);

    let mut waiting = server.connect();
    waiting.send(head(question.len()));
    waiting.send(question);
    assert!(!waiting.has_answer_within_a_moment());

    drop(held.pop());
    assert_eq!(waiting.receive().status, 200);
}

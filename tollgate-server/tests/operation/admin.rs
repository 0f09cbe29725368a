//! Health and readiness.

use std::io::Write;
use std::time::Duration;

use crate::process::{Gateway, HELLO, connect, read_answer, slow_upstream, wait_until};

const RULES: &str = "gateway: { routes: [{ path: /**, respond: { status: 204 } }] }\nlimits: []\n";

#[test]
fn a_gateway_that_runs_is_alive_and_ready() {
    let gateway = Gateway::start(RULES);
    assert_eq!((gateway.ask_admin("/healthz").status, gateway.ask_admin("/readyz").status), (200, 200));
}

#[test]
fn a_gateway_that_stops_is_alive_but_not_ready_and_finishes_what_is_under_way() {
    let slow = slow_upstream(HELLO, Duration::from_secs(2));
    let rules = format!("gateway: {{ routes: [{{ name: all, path: /**, upstream: 'http://{slow}' }}] }}\nlimits: []\n");
    let mut gateway = Gateway::start(&rules);
    let mut client = connect(gateway.address);
    client.write_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n").unwrap();
    gateway.await_metric(r#"tollgate_requests_in_flight{route="all"}"#, 1.0);
    gateway.signal("TERM");
    let stopping = wait_until(|| Some(gateway.ask_admin("/readyz")).filter(|answer| answer.status == 503));
    assert_eq!(stopping.expect("it is not ready").text, "stopping\n");
    assert_eq!(gateway.ask_admin("/healthz").status, 200);
    let answer = read_answer(client);
    assert_eq!((answer.status, answer.text.as_str()), (200, "hello"));
    assert_eq!(gateway.wait().code(), Some(0));
}

/// The address that the server logs at its start ends in a slash.
#[test]
fn the_first_page_names_the_others() {
    let gateway = Gateway::start(RULES);
    let rest = gateway.first_line.split_once("admin http://").expect("it is announced").1;
    let (_, path) = rest.split_once(';').expect("the limits follow").0.split_once('/').expect("a path");
    let answer = gateway.ask_admin(&format!("/{path}"));
    assert_eq!(answer.status, 200);
    let pages: Vec<&str> = answer.text.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(pages, ["/healthz", "/readyz", "/metrics"]);
    for page in pages {
        assert_eq!(gateway.ask_admin(page).status, 200, "{page}");
    }
}

#[test]
fn what_is_not_there_is_reported_in_json() {
    let gateway = Gateway::start(RULES);
    let answer = gateway.ask_admin("/absent");
    let problem: serde_json::Value = serde_json::from_str(&answer.text).expect("JSON");
    assert_eq!((answer.status, &problem["error"]), (404, &serde_json::json!("not_found")));
    let posted = "POST /metrics HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let mut stream = connect(gateway.admin);
    stream.write_all(posted.as_bytes()).unwrap();
    let answer = read_answer(stream);
    assert_eq!(answer.status, 405);
    assert!(answer.head.to_lowercase().contains("allow: get"));
}

//! Health and readiness.

use std::time::Duration;

use testkit::gateway::Gateway;
use testkit::http1::Connection;
use testkit::upstream::{HELLO, slow_upstream};
use testkit::wait::wait_until;

const RULES: &str = "gateway: { routes: [{ path: /**, respond: { status: 204 } }] }\nlimits: []\n";

#[test]
fn a_gateway_that_runs_is_alive_and_ready() {
    let gateway = Gateway::with_admin(RULES);
    assert_eq!((gateway.get_admin("/healthz").status, gateway.get_admin("/readyz").status), (200, 200));
}

#[test]
fn a_gateway_that_stops_is_alive_but_not_ready_and_finishes_what_is_under_way() {
    let slow = slow_upstream(HELLO, Duration::from_secs(2));
    let rules = format!("gateway: {{ routes: [{{ name: all, path: /**, upstream: 'http://{slow}' }}] }}\nlimits: []\n");
    let gateway = Gateway::with_admin(&rules);
    let mut client = gateway.connect();
    client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n");
    gateway.await_metric(r#"tollgate_requests_in_flight{route="all"}"#, 1);
    gateway.signal("TERM");
    let stopping = wait_until(|| Some(gateway.get_admin("/readyz")).filter(|answer| answer.status == 503));
    assert_eq!(stopping.expect("it is not ready").text(), "stopping\n");
    assert_eq!(gateway.get_admin("/healthz").status, 200);
    let answer = client.receive();
    assert_eq!((answer.status, answer.text()), (200, "hello"));
    assert_eq!(gateway.wait().code(), Some(0));
}

/// The address that the server logs at its start ends in a slash.
#[test]
fn the_first_page_names_the_others() {
    let gateway = Gateway::with_admin(RULES);
    let rest = gateway.first_line.split_once("admin http://").expect("it is announced").1;
    let (_, path) = rest.split_once(';').expect("the limits follow").0.split_once('/').expect("a path");
    let answer = gateway.get_admin(&format!("/{path}"));
    assert_eq!(answer.status, 200);
    let pages: Vec<&str> = answer.text().lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(pages[..3], ["/healthz", "/readyz", "/metrics"]);
    assert!(pages.contains(&"/v1/status"));
    for page in pages {
        // The state of a key needs a key.
        let target = if page == "/v1/keys" { "/v1/keys?key=ann" } else { page };
        assert_eq!(gateway.get_admin(target).status, 200, "{page}");
    }
}

#[test]
fn unknown_paths_get_a_json_error() {
    let gateway = Gateway::with_admin(RULES);
    let answer = gateway.get_admin("/absent");
    let problem: serde_json::Value = serde_json::from_str(answer.text()).expect("JSON");
    assert_eq!((answer.status, &problem["error"]), (404, &serde_json::json!("not_found")));
    let posted = "POST /metrics HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let mut stream = Connection::to(gateway.admin());
    let answer = stream.ask(posted);
    assert_eq!(answer.status, 405);
    assert!(answer.header("allow").is_some_and(|methods| methods.starts_with("GET")));
}

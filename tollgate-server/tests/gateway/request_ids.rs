//! Every response of the gateway has a request ID, and the access log has the same one.

use serde_json::Value;
use testkit::client::each_protocol;
use testkit::folder::folder_with;
use testkit::gateway::Gateway;
use testkit::http1::Response;
use testkit::tollgate::RULES;
use testkit::upstream::Raw;

/// Names a header that is not there, so that it has no effect.
const OPTION: &str = "Connection: x-absent\r\n";

fn rules(settings: &str, upstream: &str) -> String {
    format!(
        "gateway:
  listen: 127.0.0.1:0
  workers: 1
  max_body: 1KiB
  {settings}
  routes:
    - {{ name: up, path: /up, upstream: '{upstream}' }}
    - {{ name: dead, path: /dead, upstream: 'http://127.0.0.1:1' }}
    - {{ name: moved, path: /moved, respond: {{ status: 301, headers: {{ location: /up, x-request-id: own }} }} }}
    - {{ name: limited, path: /limited, respond: {{ body: ok }} }}
limits:
  - {{ name: limited, algorithm: token_bucket, capacity: 1, refill: 1/h, match: {{ path: /limited }} }}
"
    )
}

/// Requests and the status of their responses. The first one uses up the limit.
const REQUESTS: [(&str, &str, u16); 11] = [
    ("GET /limited", "", 200),
    ("GET /limited", "", 429),
    ("GET /limited", "", 429),
    ("HEAD /limited", "", 429),
    ("GET /up", "", 200),
    ("GET /moved", "", 301),
    ("GET /none", "", 404),
    ("GET /dead", "", 502),
    ("POST /up", "Content-Length: 5000\r\n", 413),
    ("GET /a%00b", "", 400),
    ("GET /up", "Host: other\r\n", 400),
];

fn exchange(gateway: &Gateway, (line, headers): (&str, &str), more: &str) -> Response {
    let mut connection = gateway.client();
    connection.send(format!("{line} HTTP/1.1\r\nHost: h\r\n{more}{headers}\r\n"));
    if line.starts_with("HEAD") { connection.receive_head().unwrap() } else { connection.receive() }
}

fn ids(response: &Response) -> Vec<&str> {
    let ids = response.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("x-request-id"));
    ids.map(|(_, value)| value.as_str()).collect()
}

/// Returns the IDs of the responses, which differ and have one form.
fn check(gateway: &Gateway, road: &str) -> Vec<String> {
    let mut made: Vec<String> = Vec::new();
    for (line, headers, status) in REQUESTS {
        let response = exchange(gateway, (line, headers), road);
        assert_eq!(response.status, status, "{line}");
        let [id] = ids(&response)[..] else { panic!("{line} {road}: {:?}", response.headers) };
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{line}: {id}");
        assert!(!made.iter().any(|other| other == id), "{line}: {id} was made before");
        made.push(id.to_owned());
        let given = exchange(gateway, (line, headers), &format!("{road}X-Request-Id: mine-1\r\n"));
        assert_eq!(ids(&given), ["mine-1"], "{line} {road}");
        let several = exchange(gateway, (line, headers), &format!("{road}X-Request-Id: a\r\nX-Request-Id: b\r\n"));
        assert_eq!(ids(&several).len(), 1, "{line} {road}");
        assert!(!["a", "b"].contains(&ids(&several)[0]), "{line} {road}");
    }
    made
}

#[test]
fn every_response_has_an_id() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        for road in ["", OPTION] {
            check(&protocol.start(&rules("", &upstream.url())), road);
        }
    });
}

#[test]
fn the_access_log_has_the_same_id() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        for road in ["", OPTION] {
            let rules = rules("access_log: { file: access.log }", &upstream.url());
            let gateway = protocol.start_in(folder_with(&[(RULES, &rules)]));
            let made = check(&gateway, road);
            let lines = gateway.await_lines(&gateway.path("access.log"), 3 * REQUESTS.len());
            let lines: Vec<Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
            for (id, (line, _, status)) in made.iter().zip(REQUESTS) {
                let logged = lines.iter().find(|logged| logged["request_id"] == id.as_str());
                let logged = logged.unwrap_or_else(|| panic!("{line} {road}: {id} is not in the log"));
                assert_eq!(logged["status"], status, "{logged}");
                let answered_by = if line == "GET /up" && status == 200 { "upstream" } else { "tollgate" };
                assert_eq!(logged["answered_by"], answered_by, "{logged}");
                let source = if line.ends_with("/limited") { Value::from("store") } else { Value::Null };
                assert_eq!(logged["source"], source, "{logged}");
            }
        }
    });
}

#[test]
fn ids_can_be_turned_off() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        for road in ["", OPTION] {
            let gateway = protocol.start(&rules("tell_upstreams: []", &upstream.url()));
            for (line, headers, status) in REQUESTS {
                let response = exchange(&gateway, (line, headers), road);
                let own: &[&str] = if status == 301 { &["own"] } else { &[] };
                assert_eq!((response.status, &ids(&response)[..]), (status, own), "{line} {road}");
            }
        }
    });
}

/// A gateway in front of other services is part of their traces, and does not change them.
#[test]
fn trace_context_is_passed_on_unchanged_and_logged() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
        let parent = format!("00-{trace}-00f067aa0ba902b7-01");
        for road in ["", OPTION] {
            let rules = rules("access_log: { file: access.log }", &upstream.url());
            let gateway = protocol.start_in(folder_with(&[(RULES, &rules)]));
            for (number, (parent, logged)) in
                [(&*parent, Value::from(trace)), ("00-invalid", Value::Null)].into_iter().enumerate()
            {
                let before = upstream.seen().concat().len();
                let headers = format!("Traceparent: {parent}\r\nTracestate: vendor=1\r\nTracestate: other=2\r\n");
                assert_eq!(exchange(&gateway, ("GET /up", &headers), road).status, 200);
                let seen = upstream.seen().concat()[before..].to_ascii_lowercase();
                for line in [
                    format!("traceparent: {parent}"),
                    "tracestate: vendor=1".to_owned(),
                    "tracestate: other=2".to_owned(),
                ] {
                    assert_eq!(seen.matches(&format!("\r\n{line}\r\n")).count(), 1, "{line} {road}: {seen}");
                }
                let lines = gateway.await_lines(&gateway.path("access.log"), number + 1);
                let line: Value = serde_json::from_str(&lines[number]).unwrap();
                assert_eq!(line["trace_id"], logged, "{line}");
            }
        }
    });
}

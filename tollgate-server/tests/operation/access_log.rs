//! The access log: one line for every request.

use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use testkit::folder::folder_with;
use testkit::gateway::Gateway;
use testkit::http1::ask;
use testkit::tollgate::{RULES, run_in};
use testkit::upstream::{HELLO, slow_upstream, upstream};

fn rules(log: &str, upstream: impl std::fmt::Display) -> String {
    format!(
        "gateway:
  workers: 2
  access_log: {log}
  trusted_proxies: [127.0.0.0/8]
  routes:
    - {{ name: shop, path: /shop/**, upstream: 'http://{upstream}' }}
    - {{ name: greeting, path: /hello, respond: {{ status: 200, body: hello }} }}
limits:
  - {{ name: per-client, key: ip, limit: 1, window: 10220d, match: {{ path: /shop/** }} }}
"
    )
}

const FILE: &str = "{ format: json, file: access.log }";

fn parsed(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

#[test]
fn a_line_in_json_tells_what_became_of_a_request() {
    let upstream = upstream(HELLO);
    let gateway = Gateway::with_admin(&rules("json", upstream));
    let request = "GET /shop/1?color=red HTTP/1.1\r\nhost: shop.example\r\nuser-agent: curl/8.5\r\n\
        referer: http://shop.example/\r\nx-request-id: abc-123\r\nx-forwarded-for: 192.0.2.7\r\nconnection: close\r\n\r\n";
    assert_eq!((gateway.send(request).status, gateway.send(request).status), (200, 429));
    let lines = gateway.await_lines(&gateway.stdout(), 2);
    let mut lines: Vec<Value> = lines.iter().map(|line| parsed(line)).collect();
    lines.sort_by_key(|line| line["status"].as_u64());
    let [allowed, denied] = &lines[..] else { panic!("{lines:?}") };
    for (field, value) in [
        ("client", json!("192.0.2.7")),
        ("method", json!("GET")),
        ("target", json!("/shop/1?color=red")),
        ("protocol", json!("HTTP/1.1")),
        ("host", json!("shop.example")),
        ("status", json!(200)),
        ("sent_bytes", json!(5)),
        ("route", json!("shop")),
        ("upstream", json!(upstream.to_string())),
        ("limit", json!("per-client")),
        ("decision", json!("allowed")),
        ("source", json!("store")),
        ("answered_by", json!("upstream")),
        ("request_id", json!("abc-123")),
        ("user_agent", json!("curl/8.5")),
        ("referer", json!("http://shop.example/")),
    ] {
        assert_eq!(allowed[field], value, "{field}");
    }
    let time = allowed["time"].as_str().unwrap();
    assert!(time.len() == 24 && time.ends_with('Z') && time.starts_with("20"), "{time}");
    assert!(allowed["duration_ms"].as_f64().unwrap() > 0.0);
    assert_eq!(allowed.get("delay_ms"), None);
    assert_eq!((&denied["status"], &denied["decision"]), (&json!(429), &json!("denied")));
    assert_eq!((denied.get("upstream"), &denied["limit"]), (None, &json!("per-client")));
    assert_eq!((&denied["source"], &denied["answered_by"]), (&json!("store"), &json!("tollgate")));
    assert_eq!(denied["request_id"], json!("abc-123"));
}

#[test]
fn an_answer_that_its_upstream_broke_off_is_reported() {
    let cut_off: [&'static [u8]; 2] = [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\nconnection: close\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n5\r\nhello\r\n",
    ];
    // A plain request, and one that is not.
    let bodies = ["content-length: 0\r\n\r\n", "transfer-encoding: chunked\r\n\r\n0\r\n\r\n"];
    for (answer, body) in cut_off.iter().flat_map(|answer| bodies.map(|body| (*answer, body))) {
        let rules = rules(FILE, upstream(answer)).replace("limit: 1,", "limit: 9,");
        let gateway = Gateway::with_admin(&rules);
        let head = "POST /shop/1 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n";
        let mut client = gateway.connect();
        client.send(format!("{head}{body}"));
        assert_eq!(client.receive_head().unwrap().status, 200);
        assert!(client.rest() > 0);
        let line = parsed(&gateway.await_lines(&gateway.path("access.log"), 1)[0]);
        assert_eq!((&line["status"], &line["sent_bytes"]), (&json!(200), &json!(5)), "{line}");
        assert_eq!(line["broken"], json!(true), "{body:?} {line}");
        assert_eq!(
            line["upstream_error"],
            json!("it closed the connection before the end of its response"),
            "{body:?} {line}"
        );
    }
    let gateway = Gateway::with_admin(&rules(FILE, upstream(HELLO)));
    gateway.get("/shop/1");
    assert_eq!(parsed(&gateway.await_lines(&gateway.path("access.log"), 1)[0]).get("broken"), None);
}

/// An operator who sees hundreds of 502s needs those with the same reason.
#[test]
fn why_the_gateway_answered_in_place_of_an_upstream_is_reported() {
    // Bound but not listening, so that no other process gets the port.
    let gone = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    gone.bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let gone = (gone.local_addr().unwrap().as_socket().unwrap(), gone);
    let unclear = upstream(b"nonsense\r\n\r\n");
    let down = upstream(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    let slow = slow_upstream(HELLO, Duration::from_secs(60));
    let cases = [
        (gone.0, 502, Some("Connection refused (os error 111)")),
        (upstream(b""), 502, Some("it closed the connection before the end of its response")),
        (unclear, 502, Some("its response is invalid")),
        (slow, 504, Some("no response within the route's timeout")),
        // A status that the upstream sends itself is not an upstream error.
        (down, 503, None),
        (upstream(HELLO), 200, None),
    ];
    // A plain request, and one that is not.
    let bodies = ["content-length: 0\r\n\r\n", "transfer-encoding: chunked\r\n\r\n0\r\n\r\n"];
    for ((address, status, error), body) in cases.iter().flat_map(|case| bodies.map(|body| (case, body))) {
        // Only the slow upstream meets its timeout, however busy the machine is.
        let timeout = if *status == 504 { "100ms" } else { "30s" };
        let route = format!("/shop/**, timeout: {timeout}, upstream");
        let gateway = Gateway::with_admin(&rules(FILE, address).replace("/shop/**, upstream", &route));
        let head = "POST /shop/1 HTTP/1.1\r\nhost: a\r\nconnection: close\r\n";
        assert_eq!(gateway.send(format!("{head}{body}")).status, *status, "{error:?}");
        let line = parsed(&gateway.await_lines(&gateway.path("access.log"), 1)[0]);
        assert_eq!(line.get("upstream_error"), error.map(|error| json!(error)).as_ref(), "{body:?} {line}");
        assert_eq!(line["upstream"], json!(address.to_string()));
    }
}

#[test]
fn a_request_that_nobody_can_read_has_a_line_and_is_counted() {
    let [longer, longest] = [70_000, 140_000].map(|length| "x".repeat(length));
    let refused = [
        ("GET /hello HTTP/1.1\nhost: a\r\n\r\n".to_owned(), 400, Some("bare_lf")),
        ("GET /hello HTTP/9.9\r\nhost: a\r\n\r\n".to_owned(), 400, Some("malformed")),
        ("nonsense\r\n\r\n".to_owned(), 400, Some("malformed")),
        (format!("GET /hello HTTP/1.1\r\nhost: a\r\n{}\r\n", "x: y\r\n".repeat(200)), 431, None),
        (format!("GET /{longer} HTTP/1.1\r\nhost: a\r\n\r\n"), 414, None),
    ];
    let rules_of_long_heads = rules(FILE, upstream(HELLO)).replace("workers: 2", "workers: 2\n  max_head: 128KiB");
    let gateway = Gateway::with_admin(&rules_of_long_heads);
    for (number, (request, status, reason)) in refused.iter().enumerate() {
        assert_eq!(gateway.send(request).status, *status, "{request:?}");
        let lines = gateway.await_lines(&gateway.path("access.log"), number + 1);
        let mut wanted = json!({ "client": "127.0.0.1", "status": status, "sent_bytes": 0, "duration_ms": 0.0, "decision": "none", "answered_by": "tollgate" });
        if let Some(reason) = reason {
            wanted["reason"] = json!(reason);
        }
        // Workers write in turn, so lines may be in another order.
        let is_it = |line: &String| {
            let mut line = parsed(line);
            _ = line.as_object_mut().expect("an object").remove("time");
            line == wanted
        };
        assert!(lines.iter().any(is_it), "{wanted} is not in {lines:?}");
        assert_eq!(lines.len(), number + 1, "{lines:?}");
    }
    gateway.await_metric(r#"tollgate_requests_total{route="",status="4xx"}"#, 5);
    // The duration of these requests is unknown.
    gateway.await_metric(r#"tollgate_request_duration_seconds_count{route=""}"#, 0);
    gateway.await_metric(r#"tollgate_requests_in_flight{route=""}"#, 0);
    // A head that is too long has one line, however it is refused.
    let before = gateway.await_lines(&gateway.path("access.log"), 5).len();
    let status = gateway.send(format!("GET /{longest} HTTP/1.1\r\nhost: a\r\n\r\n")).status;
    let lines = gateway.await_lines(&gateway.path("access.log"), before + 1);
    assert_eq!(lines.len(), before + 1);
    assert!(lines.iter().any(|line| parsed(line)["status"] == json!(status)), "{status} {lines:?}");

    let combined = Gateway::with_admin(&rules("combined", upstream(HELLO)));
    combined.send("nonsense\r\n\r\n");
    let line = &combined.await_lines(&combined.stdout(), 1)[0];
    assert!(line.ends_with(r#" +0000] "-" 400 0 "-" "-" - none 0.000000 - tollgate -"#), "{line}");
}

/// The reason in the log is the one that the client and the metrics get.
#[test]
fn reason_of_a_400_is_logged() {
    let shared = "limits:\n  - { name: by-header, key: 'header:x-user', limit: 9, window: 1h }\n";
    let rules = rules(FILE, upstream(HELLO)).replace("limits:\n", shared);
    let gateway = Gateway::with_admin(&rules.replace("workers: 2", "workers: 1\n  underscore_headers: refuse"));
    let cases = [
        ("GET /shop/%2e%2e/x HTTP/1.1\r\nhost: a\r\n", "dot_segment"),
        ("post /shop/x HTTP/1.1\r\nhost: a\r\n", "method_case"),
        ("GET /shop/x HTTP/1.1\r\nhost: a b\r\n", "invalid_host"),
        ("GET /shop/x HTTP/1.1\r\n", "no_host"),
        ("GET /shop/x HTTP/1.1\r\nhost: a\r\nhost: b\r\n", "several_hosts"),
        ("GET /shop/x HTTP/1.1\r\nhost: a\r\nx_user: 1\r\n", "underscore_header"),
        ("GET /shop/x HTTP/1.1\r\nhost: a\r\nx-user: 1\r\nx-user: 2\r\n", "duplicate_header"),
    ];
    for (number, (head, reason)) in cases.iter().enumerate() {
        let answer = gateway.send(format!("{head}connection: close\r\n\r\n"));
        assert_eq!(answer.status, 400, "{head}");
        assert_eq!(parsed(answer.text())["reason"], json!(reason), "{}", answer.text());
        let lines = gateway.await_lines(&gateway.path("access.log"), number + 1);
        let line = parsed(&lines[number]);
        assert_eq!((&line["status"], &line["reason"]), (&json!(400), &json!(reason)), "{line}");
    }
    let chunked = "POST /shop/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n";
    assert_eq!(gateway.send(chunked).status, 400);
    let lines = gateway.await_lines(&gateway.path("access.log"), cases.len() + 1);
    assert_eq!(parsed(&lines[cases.len()])["reason"], json!("bad_chunk"));
    assert_eq!(gateway.get("/hello").status, 200);
    let lines = gateway.await_lines(&gateway.path("access.log"), cases.len() + 2);
    assert_eq!(parsed(&lines[cases.len() + 1]).get("reason"), None);
}

#[test]
fn a_client_of_ipv4_is_reported_as_that_at_a_listener_of_both() {
    if std::net::TcpListener::bind("[::]:0").is_err() {
        return;
    }
    let gateway = Gateway::with_admin_at("[::]:0", &rules(FILE, upstream(HELLO)));
    let address = (std::net::Ipv4Addr::LOCALHOST, gateway.address.port()).into();
    for (number, request) in
        ["GET /hello HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", "nonsense\r\n\r\n"].into_iter().enumerate()
    {
        ask(address, request);
        let lines = gateway.await_lines(&gateway.path("access.log"), number + 1);
        assert!(lines.iter().all(|line| parsed(line)["client"] == json!("127.0.0.1")), "{lines:?}");
    }
}

#[test]
fn a_line_in_the_combined_format_is_as_nginx_writes_it_with_the_decision_at_its_end() {
    let gateway = Gateway::with_admin(&rules("combined", upstream(HELLO)));
    gateway.send("GET /shop/1 HTTP/1.1\r\nhost: a\r\nuser-agent: x\"y\r\nconnection: close\r\n\r\n");
    gateway.get("/hello");
    let lines = gateway.await_lines(&gateway.stdout(), 2);
    let about = |part: &str| lines.iter().find(|line| line.contains(part)).expect("a line about it");
    let shop = about("/shop/1");
    assert!(shop.starts_with("127.0.0.1 - - ["), "{shop}");
    assert!(shop.contains(r#" +0000] "GET /shop/1 HTTP/1.1" 200 5 "-" "x\x22y" per-client allowed 0."#), "{shop}");
    let ends = |line: &str, words: &str| {
        line.rsplit_once(' ').is_some_and(|(rest, id)| rest.ends_with(words) && id.len() == 32)
    };
    assert!(ends(shop, " store upstream"), "{shop}");
    assert!(about("/hello").contains(r#""GET /hello HTTP/1.1" 200 5 "-" "-" - none 0."#), "{lines:?}");
    assert!(ends(about("/hello"), " - tollgate"), "{lines:?}");
}

#[test]
fn whatever_clients_send_a_line_is_one_line_of_json() {
    let gateway = Gateway::with_admin(&rules(FILE, upstream(HELLO)));
    let mut hostile =
        b"GET /hello/\"\\{} HTTP/1.1\r\nhost: a\r\nconnection: close\r\nuser-agent: \"},\\\t\x80\xff".to_vec();
    // Some parsers end a line at either of these.
    hostile.extend_from_slice("\u{85}\u{2028}\r\nreferer: ".as_bytes());
    hostile.extend_from_slice(&[b'"'; 5000]);
    hostile.extend_from_slice(b"\r\n\r\n");
    gateway.send(&hostile);
    gateway.get("/hello");
    let lines = gateway.await_lines(&gateway.path("access.log"), 2);
    assert_eq!(lines.len(), 2);
    let lines: Vec<Value> = lines.iter().map(|line| parsed(line)).collect();
    let longest = lines.iter().filter_map(|line| line["referer"].as_str()).map(str::len).max();
    assert!(longest.is_some_and(|longest| (100..5000).contains(&longest)), "{longest:?}");
}

#[test]
fn a_client_that_leaves_is_reported_with_499() {
    let gateway = Gateway::with_admin(&rules(FILE, slow_upstream(HELLO, Duration::from_secs(60))));
    let mut client = gateway.connect();
    client.send(b"GET /shop/1 HTTP/1.1\r\nhost: a\r\n\r\n");
    gateway.await_metric(r#"tollgate_requests_in_flight{route="shop"}"#, 1);
    drop(client);
    let lines = gateway.await_lines(&gateway.path("access.log"), 1);
    assert_eq!(parsed(&lines[0])["status"], 499);
}

#[test]
fn a_log_that_was_renamed_away_is_opened_again() {
    let gateway = Gateway::with_admin(&rules(FILE, upstream(HELLO)));
    let (log, rotated) = (gateway.path("access.log"), gateway.path("access.log.1"));
    gateway.get("/hello");
    gateway.await_lines(&log, 1);
    std::fs::rename(&log, &rotated).unwrap();
    testkit::wait::wait_until(|| log.exists().then_some(())).expect("another is opened");
    gateway.get("/hello");
    assert_eq!((gateway.await_lines(&log, 1).len(), gateway.await_lines(&rotated, 1).len()), (1, 1));
    std::fs::rename(&log, &rotated).unwrap();
    gateway.signal("HUP");
    testkit::wait::wait_until(|| log.exists().then_some(())).expect("another is opened");
    assert_eq!(gateway.metric("tollgate_access_log_lost_total"), Some(0.0));
}

#[cfg(target_os = "linux")]
#[test]
fn a_log_that_was_removed_with_its_folder_is_reported_once_and_its_lines_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (log, logs) = (folder.path().join("logs/access.log"), folder.path().join("logs"));
    std::fs::create_dir(&logs).unwrap();
    let rules = rules(&format!("{{ file: {} }}", log.display()), upstream(HELLO));
    let gateway = Gateway::with_admin(&rules);
    gateway.get("/hello");
    gateway.await_lines(&log, 1);
    // The folder goes at once, so that the file is not opened again in between.
    std::fs::rename(&logs, folder.path().join("gone")).unwrap();
    std::fs::remove_dir_all(folder.path().join("gone")).unwrap();
    gateway.await_said("cannot be opened again", 1);
    // The file is checked for every line, and the error is the same each time.
    for lost in 1..=3 {
        gateway.get("/hello");
        gateway.await_metric("tollgate_access_log_lost_total", lost);
    }
    let said = gateway.said();
    assert_eq!(said.matches("cannot be opened again").count(), 1, "{said}");
    assert!(said.contains(log.to_str().unwrap()), "{said}");
    std::fs::create_dir(&logs).unwrap();
    testkit::wait::wait_until(|| log.exists().then_some(())).expect("another is opened");
    gateway.get("/hello");
    gateway.await_lines(&log, 1);
    assert_eq!(gateway.metric("tollgate_access_log_lost_total"), Some(3.0));
}

#[test]
fn another_log_is_written_after_a_reload() {
    let upstream = upstream(HELLO);
    let gateway = Gateway::with_admin(&rules(FILE, upstream));
    gateway.get("/hello");
    gateway.save(&rules("{ format: combined, file: other.log }", upstream));
    gateway.await_said("is in force", 1);
    gateway.get("/hello");
    assert!(gateway.await_lines(&gateway.path("other.log"), 1)[0].contains("\"GET /hello HTTP/1.1\" 200 5"));
    assert_eq!(gateway.await_lines(&gateway.path("access.log"), 1).len(), 1);
    gateway.save(&rules("{ file: no/such/folder.log }", upstream));
    gateway.await_said("gateway.access_log.file", 1);
    gateway.get("/hello");
    gateway.await_lines(&gateway.path("other.log"), 2);
}

#[test]
fn the_last_lines_are_written_before_the_end() {
    let gateway = Gateway::with_admin(&rules(FILE, upstream(HELLO)));
    for _ in 0..50 {
        gateway.get("/hello");
    }
    gateway.signal("TERM");
    let gateway = gateway.ended();
    let text = std::fs::read_to_string(gateway.path("access.log")).unwrap();
    assert_eq!(text.lines().count(), 50);
}

#[test]
fn a_log_that_cannot_be_opened_ends_the_start() {
    let folder = folder_with(&[(RULES, &rules("{ file: no/such/folder.log }", "127.0.0.1:1"))]);
    let output = run_in(folder.path(), &["serve", "--config", "tollgate.yaml", "--listen", "127.0.0.1:0"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("gateway.access_log.file") && said.contains(": name a writable file"), "{said}");
}

#[test]
fn a_request_that_a_queue_held_is_reported_with_its_delay() {
    let gateway = Gateway::with_admin(
        "gateway:
  access_log: { file: access.log }
  routes: [{ path: /**, respond: { status: 204 } }]
limits:
  - { name: paced, algorithm: leaky_bucket, capacity: 5, leak: 5/s, overflow: queue, max_wait: 10s }
",
    );
    assert_eq!([(); 2].map(|()| gateway.get("/").status), [204, 204]);
    let lines = gateway.await_lines(&gateway.path("access.log"), 2);
    let delays: Vec<f64> = lines.iter().filter_map(|line| parsed(line)["delay_ms"].as_f64()).collect();
    assert!(matches!(delays[..], [delay] if delay > 0.0 && delay <= 200.0), "{lines:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn lines_that_a_full_disk_does_not_take_are_counted_and_hold_up_nobody() {
    let gateway = Gateway::with_admin(&rules("{ file: /dev/full }", upstream(HELLO)));
    assert_eq!([(); 3].map(|()| gateway.get("/hello").status), [200; 3]);
    gateway.await_metric("tollgate_access_log_lost_total", 3);
    gateway.await_said("the access log /dev/full cannot be written", 1);
    gateway.signal("TERM");
    assert_eq!(gateway.wait().code(), Some(0));
}

/// For requests of HTTP/1.1, HTTP/1.0 and HTTP/2.
#[test]
fn the_key_of_a_request_is_logged_if_the_file_says_so() {
    let upstream = upstream(HELLO);
    // printf 'per-client\0127.0.0.1' | sha256sum
    for (setting, key) in
        [("", Value::Null), (", key: hash", json!("e7d947bec383004a")), (", key: plain", json!("127.0.0.1"))]
    {
        let gateway = Gateway::with_admin(&rules(&format!("{{ format: json, file: access.log{setting} }}"), upstream));
        for version in ["1.1", "1.1", "1.0"] {
            gateway.send(format!("GET /shop/1 HTTP/{version}\r\nhost: a\r\nconnection: close\r\n\r\n"));
        }
        let url = format!("http://{}/shop/2", gateway.address);
        let curl = Command::new("curl").args(["--silent", "--http2-prior-knowledge", &url]).output();
        assert!(curl.expect("curl is installed").status.success());
        gateway.get("/hello");
        let lines = gateway.await_lines(&gateway.path("access.log"), 5);
        let lines: Vec<Value> = lines.iter().map(|line| parsed(line)).collect();
        for line in &lines {
            let expected = if line["limit"].is_null() { &Value::Null } else { &key };
            assert_eq!(line["key"], *expected, "{setting} {line}");
        }
        assert_eq!(lines.iter().filter(|line| line["limit"] == "per-client").count(), 4, "{lines:?}");
        assert!(lines.iter().any(|line| line["protocol"] == "HTTP/2.0" && line["limit"] == "per-client"), "{lines:?}");
    }
}

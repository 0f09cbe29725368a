//! Invalid checks: each error names the problem and the fix, and nothing is counted.

use std::io::{Read, Write};

use serde_json::{Value, json};
use testkit::folder::folder_with;
use testkit::http1::{Connection, head};
use testkit::service::Server;
use testkit::tollgate::{RULES, run_in, without_times};

/// Returns the `error` and the `message` of a body that is refused with 400.
fn refused(body: &str) -> (String, String) {
    let server = Server::start();
    let response = server.connect().post(body);
    assert_eq!(response.status, 400, "{body}: {}", response.text());
    error_of(&response.json())
}

fn error_of(json: &Value) -> (String, String) {
    (json["error"].as_str().expect("a string").to_owned(), json["message"].as_str().expect("a string").to_owned())
}

#[test]
fn body_that_is_not_json() {
    for body in ["", "   ", "hello", "{", r#"{"limit":"per-user","key":"1"}}"#, r#"{"limit":"per-user""#, "\u{0}"] {
        let (error, message) = refused(body);
        assert_eq!(error, "invalid_json", "{body:?}");
        assert!(message.starts_with("the body is not JSON: "), "{message}");
        assert!(message.ends_with(r#": send JSON such as {"limit":"per-user","key":"42"}"#), "{message}");
    }
}

#[test]
fn body_that_is_not_utf8() {
    let server = Server::start();
    let response = server.connect().post(b"{\"limit\":\"per-user\",\"key\":\"\xff\"}");
    assert_eq!((response.status, error_of(&response.json()).0.as_str()), (400, "invalid_json"));
}

#[test]
fn invalid_checks_are_refused_with_the_field_and_the_fix() {
    let server = Server::start();
    let bodies = [
        "42",
        r#"[["per-user","42",null,1]]"#,
        r#"{"request":["GET","/","h","::1",{}]}"#,
        r#"{"limit":"per-user","key":"1","costs":2}"#,
        r#"{"request":{"user":"1"}}"#,
        r#"{"limit":"per-user","key":"1","key":"2"}"#,
        r#"{"limit":"per-user","key":"1","request":{}}"#,
        r#"{"limit":"per-user","request":{}}"#,
        r#"{"key":"1","request":{}}"#,
        "{}",
        r#"{"cost":1}"#,
        r#"{"limit":"per-user"}"#,
        r#"{"key":"1"}"#,
        r#"{"limit":"per-user","key":42}"#,
        r#"{"request":{"ip":"localhost"}}"#,
        r#"{"request":{"headers":{"x user":"1"}}}"#,
        r#"{"request":{"headers":{"x-user-id":"a\nb"}}}"#,
        r#"{"request":{"headers":{"x-user-id":1}}}"#,
        r#"{"request":{"headers":{"x-user-id":"a","X-User-Id":"b"}}}"#,
        r#"{"request":{"method":"post"}}"#,
        r#"[{"request":{"method":"purge"}},{"request":{"method":"Delete"}}]"#,
        r#"{"request":{"method":"GET","path":"*"}}"#,
    ];
    let mut connection = server.connect();
    let refusals = bodies.map(|body| {
        let response = connection.post(body);
        assert_eq!(response.status, 400, "{body}: {}", response.text());
        let (error, message) = error_of(&response.json());
        assert_eq!(error, "invalid_request", "{body}");
        format!("{body}\n  {message}\n")
    });
    insta::assert_snapshot!(refusals.concat());
}

#[test]
fn two_differing_hosts_are_refused_if_a_limit_reads_the_host() {
    let server = Server::with_rules("limits: [{ name: per-host, key: host, limit: 5 }]");
    let mut connection = server.connect();
    let check = |header: &str| format!(r#"{{"request":{{"host":"api.example","headers":{{"host":"{header}"}}}}}}"#);
    let response = connection.post(check("other.example"));
    assert_eq!(response.status, 400, "{}", response.text());
    let (error, message) = error_of(&response.json());
    assert!(error == "invalid_request" && message.starts_with("The request names more than one host: "), "{message}");
    let response = connection.post(check("API.example.:8080"));
    assert_eq!((response.status, &response.json()["remaining"]), (200, &json!(4)));
    let batch = connection.post(format!("[{}]", check("other.example"))).json();
    assert_eq!((&batch[0]["allowed"], &batch[0]["reason"]), (&json!(false), &json!("several_hosts")));
}

#[test]
fn cost_that_is_no_whole_number() {
    for (cost, found) in [
        ("-1", "the number -1"),
        ("1.5", "the number 1.5"),
        ("1.0", "the number 1.0"),
        ("18446744073709551616", "the number 1.8446744073709552e+19"),
        (r#""1""#, "the string \"1\""),
        ("[]", "a list"),
        ("{}", "an object"),
        ("true", "`true`"),
    ] {
        let (error, message) = refused(&format!(r#"{{"limit":"per-user","key":"1","cost":{cost}}}"#));
        assert_eq!(error, "invalid_request");
        assert!(message.starts_with(&format!("`cost`: found {found} at line 1 column ")), "{message}");
        assert!(message.ends_with(": send a whole number from 0 to 18446744073709551615"), "{message}");
    }
}

#[test]
fn unknown_limit() {
    let unknown = |message: &str| ("unknown_limit".to_owned(), message.to_owned());
    assert_eq!(refused(r#"{"limit":"x","key":"1"}"#), unknown("no limit is named `x`: use one of: per-user"),);
    assert_eq!(
        refused(r#"[{"limit":"per-user","key":"1"},{"limit":"x","key":"1"}]"#),
        unknown("`[1].limit`: no limit is named `x`: use one of: per-user"),
    );
    let long = "x".repeat(100_000);
    assert_eq!(
        refused(&json!({"limit": long, "key": "1"}).to_string()),
        unknown(&format!("no limit is named `{}…`: use one of: per-user", &long[..80])),
    );
}

const PER_ADDRESS: &str = "limits:
  - { name: per-ip, key: ip, limit: 5, window: 10220d }
  - { name: pair, key: [ip, header:x-user-id], limit: 5, window: 10220d }
";

/// Asks a question of a path by POST.
fn ask(server: &Server, path: &str, body: &Value) -> testkit::http1::Response {
    let body = body.to_string();
    let length = body.len();
    server.connect().ask(format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    ))
}

#[test]
fn value_that_no_request_can_have() {
    let server = Server::with_rules(PER_ADDRESS);
    for path in ["/v1/check", "/v1/peek", "/v1/refund", "/v1/reset", "/v1/reserve"] {
        let response = ask(&server, path, &json!({"limit": "per-ip", "key": "not-an-ip"}));
        let (error, message) = error_of(&response.json());
        assert_eq!((response.status, &*error), (400, "invalid_request"), "{path}: {message}");
        assert_eq!(message, "`key`: `not-an-ip` is not an IP address: write one such as 192.0.2.7 or 2001:db8::7");
        let response = ask(&server, path, &json!({"limit": "pair", "key": ["2001:db8::/48", "zoe"]}));
        let (_, message) = error_of(&response.json());
        assert!(message.starts_with("`key[0]`: `2001:db8::/48` is a network, and the limit counts"), "{message}");
    }
    let batch = json!([{"limit": "per-ip", "key": "192.0.2.1"}, {"limit": "per-ip", "key": "x"}]);
    let (_, message) = error_of(&ask(&server, "/v1/check", &batch).json());
    assert!(message.starts_with("`[1].key`: `x` is not an IP address"), "{message}");
    let left = ask(&server, "/v1/peek", &json!({"limit": "per-ip", "key": "192.0.2.1"})).json();
    assert_eq!(left["remaining"], 5, "a refused batch takes nothing");
}

#[test]
fn spellings_of_an_address_are_one_key() {
    let server = Server::with_rules(PER_ADDRESS);
    let reserved = (1..=8).filter(|number| {
        let key = json!([format!("2001:db8::{number}"), "zoe"]);
        ask(&server, "/v1/reserve", &json!({"limit": "pair", "key": key})).json()["allowed"] == true
    });
    assert_eq!(reserved.count(), 5);
    for (key, left) in [("203.0.113.1", 4), ("::ffff:203.0.113.1", 3), ("203.0.113.1/32", 2)] {
        let checked = ask(&server, "/v1/check", &json!({"limit": "per-ip", "key": key})).json();
        assert_eq!(checked["remaining"], left, "{key}");
    }
}

#[test]
fn too_many_headers() {
    let headers = (0..101).map(|index| (format!("x-{index}"), json!("1"))).collect::<serde_json::Map<_, _>>();
    let (error, message) = refused(&json!({"request": {"headers": headers}}).to_string());
    assert_eq!(error, "invalid_request");
    assert!(message.contains("a request has at most 100 headers"), "{message}");
}

#[test]
fn batch_of_more_than_a_thousand() {
    let batch = vec![json!({"limit": "per-user", "key": "1"}); 1001];
    let (error, message) = refused(&json!(batch).to_string());
    assert_eq!(error, "invalid_request");
    assert!(message.contains("a batch holds at most 1000 checks: send the rest in another request"), "{message}");
}

#[test]
fn batch_with_one_bad_question_is_refused_whole_and_spends_nothing() {
    let server = Server::start();
    let mut connection = server.connect();
    let good = json!({"limit": "per-user", "key": "a", "cost": 10});
    for (bad, message) in [
        (json!({"limit": "per-user"}), "`[1].key` is missing: send it with `limit`"),
        (json!({"limit": "x", "key": "1"}), "`[1].limit`: no limit is named `x`: use one of: per-user"),
        (json!({"limit": "per-user", "key": "1", "cost": -1}), "`[1].cost`: found the number -1 at line 1"),
    ] {
        let response = connection.post(json!([good, bad]).to_string());
        assert_eq!(response.status, 400);
        assert!(error_of(&response.json()).1.starts_with(message), "{}", response.text());
    }
    assert_eq!(connection.check(&good)["allowed"], true);
}

#[test]
fn deeply_nested_body() {
    let (error, _) = refused(&"[".repeat(100_000));
    assert!(error == "invalid_json" || error == "invalid_request");
}

#[test]
fn body_announced_as_too_long_is_refused_before_it_is_sent() {
    let server = Server::start();
    let mut connection = server.connect();
    connection.send(head(1024 * 1024 + 1));
    let response = connection.receive();
    assert_eq!(response.status, 413);
    assert_eq!(
        error_of(&response.json()),
        ("body_too_large".to_owned(), "the body is longer than 1048576 bytes: send smaller batches".to_owned()),
    );
}

#[test]
fn body_without_a_length_is_refused_once_it_is_too_long() {
    let server = Server::start();
    let mut connection = server.connect();
    connection.send("POST /v1/check HTTP/1.1\r\nhost: tollgate\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n");
    for _ in 0..=16 {
        connection.send(format!("10000\r\n{}\r\n", " ".repeat(65536)));
    }
    let response = connection.receive();
    assert_eq!((response.status, error_of(&response.json()).0.as_str()), (413, "body_too_large"));
}

#[test]
fn body_of_exactly_the_greatest_length_is_read() {
    let server = Server::start();
    let question = r#"{"limit":"per-user","key":"1"}"#;
    let padding = " ".repeat(1024 * 1024 - question.len());
    assert_eq!(server.connect().post(padding + question).status, 200);
}

#[test]
fn wrong_method() {
    let server = Server::start();
    for method in ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"] {
        let mut connection = server.connect();
        connection.send(format!("{method} /v1/check HTTP/1.1\r\nhost: tollgate\r\n\r\n"));
        let response = connection.receive();
        assert_eq!(response.status, 405);
        assert_eq!(response.header("allow"), Some("POST"));
        let message = format!("`/v1/check` does not support `{method}`: use POST");
        assert_eq!(error_of(&response.json()), ("method_not_allowed".to_owned(), message));
    }
}

#[test]
fn wrong_path() {
    let server = Server::start();
    for path in ["/", "/v1/check/", "/v1/Check", "/v2/check"] {
        let mut connection = server.connect();
        connection.send(format!("POST {path} HTTP/1.1\r\nhost: tollgate\r\ncontent-length: 0\r\n\r\n"));
        let response = connection.receive();
        assert_eq!(response.status, 404);
        let message = format!(
            "no page is at `{path}`: use POST /v1/check, /v1/peek, /v1/refund, /v1/reset, /v1/reserve or /v1/settle"
        );
        assert_eq!(error_of(&response.json()), ("not_found".to_owned(), message));
    }
}

#[test]
fn connection_serves_on_after_a_refusal() {
    let server = Server::start();
    let mut connection = server.connect();
    assert_eq!(connection.post("nonsense").status, 400);
    assert_eq!(connection.check(&json!({"limit": "per-user", "key": "1"}))["allowed"], true);
}

/// Sends a check with these headers, as a browser would. Returns the status, the error and the message.
fn asked_by_browser(server: &Server, headers: &str) -> (u16, String, String) {
    let question = r#"{"limit":"per-user","key":"1"}"#;
    let mut connection = server.connect();
    connection
        .send(format!("POST /v1/check HTTP/1.1\r\n{headers}content-length: {}\r\n\r\n{question}", question.len()));
    let response = connection.receive();
    let body = response.json();
    let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
    (response.status, text("error"), text("message"))
}

#[test]
fn a_page_of_another_site_cannot_ask_through_the_browser_of_its_visitor() {
    let server = Server::with_rules(
        "limits: [{ name: per-user, key: header:x-user-id, algorithm: fixed_window, limit: 1, window: 10220d }]\n",
    );
    let json = "content-type: application/json\r\n";
    let own = format!("host: {}\r\n", server.address);
    for (headers, status, error) in [
        (format!("{own}{json}origin: https://evil.example\r\n"), 403, "cross_site"),
        (format!("{own}{json}origin: null\r\n"), 403, "cross_site"),
        (format!("{own}{json}sec-fetch-site: cross-site\r\n"), 403, "cross_site"),
        (format!("{own}{json}sec-fetch-site: same-site\r\n"), 403, "cross_site"),
        (format!("{own}content-type: text/plain\r\n"), 415, "unsupported_media_type"),
        (format!("{own}content-type: application/x-www-form-urlencoded\r\n"), 415, "unsupported_media_type"),
        (own.clone(), 415, "unsupported_media_type"),
        // DNS rebinding: to the browser, this is the page's own site.
        (format!("host: evil.example:8090\r\n{json}sec-fetch-site: same-origin\r\n"), 421, "unknown_host"),
    ] {
        let (found, name, message) = asked_by_browser(&server, &headers);
        assert_eq!((found, name.as_str()), (status, error), "{headers}");
        assert!(message.contains(": "), "it has a fix: {message}");
    }
    // None of these was counted.
    let (status, ..) = asked_by_browser(&server, &format!("{own}{json}"));
    assert_eq!(status, 200);
    assert_eq!(server.connect().check(&json!({"limit": "per-user", "key": "1"}))["allowed"], false);
}

#[test]
fn hosts_that_the_file_lists_are_served() {
    let listed = "service: { http: { listen: '127.0.0.1:0', hosts: [limits.example.com, '*.internal.example.com'] } }\n\
                  admin: { listen: '127.0.0.1:0', hosts: [metrics.example.com] }\n\
                  limits: [{ name: per-user, key: header:x-user-id, algorithm: fixed_window, limit: 100 }]\n";
    let server = Server::in_folder(folder_with(&[(RULES, listed)]));
    for (host, status) in [
        ("limits.example.com", 200),
        ("a.internal.example.com:8090", 200),
        ("metrics.example.com", 421),
        ("evil.example", 421),
    ] {
        let headers = format!("host: {host}\r\ncontent-type: application/json\r\n");
        assert_eq!(asked_by_browser(&server, &headers).0, status, "{host}");
    }
    for (headers, status) in [
        ("host: metrics.example.com\r\n", 200),
        ("host: localhost\r\n", 200),
        ("host: limits.example.com\r\n", 421),
        ("host: localhost\r\norigin: https://evil.example\r\n", 403),
    ] {
        let mut connection = Connection::to(server.address_of("admin"));
        connection.send(format!("GET /metrics HTTP/1.1\r\n{headers}\r\n"));
        assert_eq!(connection.receive().status, status, "{headers}");
    }
}

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn a_listener_with_tokens_refuses_requests_without_one() {
    let rules =
        "service: { http: { listen: '127.0.0.1:0', tokens_file: tokens } }\nlimits: [{ name: user, limit: 5 }]\n";
    let server = Server::in_folder(folder_with(&[(RULES, rules), ("tokens", TOKEN)]));
    let address = server.address;
    let check = |headers: &str| {
        let body = r#"{"limit":"user"}"#;
        let request = format!(
            "POST /v1/check HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n{headers}\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    };
    for (headers, error) in [
        (String::new(), "token_missing"),
        ("authorization: Basic YTpi\r\n".to_owned(), "token_missing"),
        ("authorization: Bearer wrong-wrong-wrong-wrong\r\n".to_owned(), "token_invalid"),
        (format!("authorization: Bearer {TOKEN}\r\nauthorization: Bearer {TOKEN}\r\n"), "token_missing"),
    ] {
        let response = check(&headers);
        assert!(response.starts_with("HTTP/1.1 401 "), "{headers}: {response}");
        assert!(response.contains("www-authenticate: Bearer\r\n") && response.contains(error), "{headers}: {response}");
    }
    let response = check(&format!("authorization: bearer {TOKEN}\r\n"));
    assert!(response.starts_with("HTTP/1.1 200 ") && response.contains("\"remaining\":4"), "{response}");
}

#[test]
fn a_listener_for_other_machines_needs_tokens() {
    let run = |arguments: &[&str], rules: &str| {
        let folder = folder_with(&[(RULES, rules)]);
        let output = run_in(folder.path(), arguments);
        assert_eq!(output.status.code(), Some(2));
        without_times(&String::from_utf8(output.stderr).unwrap())
    };
    let limits = "limits: [{ name: user, limit: 5 }]\n";
    let by_file = run(&["serve", "--config", RULES], &format!("service: {{ http: '0.0.0.0:0' }}\n{limits}"));
    let by_flag = run(&["serve", "--config", RULES, "--http", "0.0.0.0:0"], limits);
    assert_eq!(by_file, by_flag);
    let folder = folder_with(&[(RULES, &format!("service: {{ http: '0.0.0.0:0' }}\n{limits}"))]);
    let output = run_in(folder.path(), &["validate", RULES]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8(output.stdout).unwrap().contains("without authentication: set `service.http.tokens_file`")
    );
    insta::assert_snapshot!(by_file);
    let open = format!("service: {{ http: {{ listen: '0.0.0.0:0', open: true }} }}\n{limits}");
    drop(Server::in_folder(folder_with(&[(RULES, &open)])));
}

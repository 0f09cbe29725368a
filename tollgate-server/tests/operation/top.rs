//! `GET /v1/top`: the keys that limits deny most, from every way into the server.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use testkit::folder::folder_with;
use testkit::http1::{Connection, ask};
use testkit::redis::RedisServer;
use testkit::tollgate::{Process, binary, run, transcript};
use testkit::wait::wait_until;

const LIMITS: &str = "limits:
  - { name: per-user, key: header:x-user-id, window: 10220d, limit: 2 }
  - { name: watched, key: header:x-user-id, window: 10220d, limit: 1, shadow: true }
";

fn rules(admin: &str) -> String {
    format!(
        "gateway: {{ listen: 127.0.0.1:0, routes: [{{ path: /**, respond: {{ status: 204 }} }}] }}\n\
         service: {{ http: 127.0.0.1:0, resp: 127.0.0.1:0 }}\nadmin: {{ listen: 127.0.0.1:0{admin} }}\n{LIMITS}"
    )
}

fn start(rules: &str) -> Process {
    Process::start(folder_with(&[("tollgate.yaml", rules)]), &["serve", "--config", "tollgate.yaml"])
}

fn top(server: &Process, query: &str) -> Value {
    let request = format!("GET /v1/top?{query} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    ask(server.address_of("admin"), request).json()
}

fn counts(answer: &Value) -> Vec<(&str, &str, u64)> {
    let keys = answer["keys"].as_array().expect("a list");
    let text = |key: &'_ Value, field: &str| key[field].as_str().expect("a text").to_owned().leak() as &str;
    keys.iter().map(|key| (text(key, "limit"), text(key, "key"), key["count"].as_u64().expect("a number"))).collect()
}

#[test]
fn denials_of_every_listener_are_counted() {
    let server = start(&rules(", show_keys: true"));
    let gateway = server.address_of("gateway");
    let request = |version: &str| format!("GET / HTTP/{version}\r\nhost: a\r\nx-user-id: ann\r\n\r\n");
    let mut client = Connection::to(gateway);
    // Two are allowed. The same refusal is sent again from a buffer.
    let statuses: Vec<u16> = (0..5).map(|_| client.ask(request("1.1")).status).collect();
    assert_eq!(statuses, [204, 204, 429, 429, 429]);
    assert_eq!(ask(gateway, request("1.0")).status, 429);
    let mut service = Connection::to(server.address_of("decisions"));
    let checks = [
        json!({ "limit": "per-user", "key": "ann" }),
        json!([{ "limit": "per-user", "key": "ann" }, { "limit": "per-user", "key": "ann" }]),
        json!({ "request": { "method": "GET", "path": "/", "headers": { "x-user-id": "ann" } } }),
    ];
    for check in checks {
        let answer = service.post(check.to_string());
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let resp = server.first_line.split("redis://").nth(1).expect("it is announced");
    let resp = resp.split([',', ';', ' ']).next().expect("an address");
    let mut resp = TcpStream::connect(resp).expect("it listens");
    resp.write_all(b"TOLLGATE.CHECK per-user ann\r\n").expect("it reads");
    assert!(resp.read(&mut [0; 100]).expect("it answers") > 0);
    // Four of the gateway, four of the decision service, and one over the Redis protocol.
    let denied = 9;
    let answer = top(&server, "kind=denied&limit=per-user");
    assert_eq!(counts(&answer), [("per-user", "ann", denied)], "{answer}");
    assert_eq!((&answer["total"], &answer["keys"][0]["error"]), (&json!(denied), &json!(0)));
    assert_eq!(answer["keys"][0]["parts"], json!(["ann"]));
    // Six requests of the gateway and one of the service, less the allowed one.
    let answer = top(&server, "kind=shadow_denied&over=1h");
    assert_eq!(counts(&answer), [("watched", "ann", 6)], "{answer}");
    let answer = top(&server, "kind=near_limit");
    assert_eq!(counts(&answer), [("per-user", "ann", 1)], "{answer}");
}

#[test]
fn keys_are_hashed_unless_the_file_shows_them() {
    let server = start(&rules(""));
    let mut client = Connection::to(server.address_of("gateway"));
    for _ in 0..3 {
        client.get_as("ann", "/");
    }
    let answer = top(&server, "");
    // printf 'per-user\0ann' | sha256sum
    assert_eq!(counts(&answer), [("per-user", "9ea16ba994ebd253", 1)], "{answer}");
    assert_eq!((&answer["keys"][0]["is_hashed"], &answer["keys"][0]["parts"]), (&json!(true), &Value::Null));
    assert!(!answer.to_string().contains("ann\""), "{answer}");
}

#[test]
fn hostile_keys_cannot_leave_the_text() {
    let server = start(&rules(", show_keys: true"));
    let mut service = Connection::to(server.address_of("decisions"));
    let keys = ["\u{1b}[2J\u{7}", "\u{202e}cod.exe", "<img src=x onerror=alert(1)>", &"한".repeat(1000)];
    for key in keys.iter().flat_map(|key| [key; 3]) {
        service.post(json!({ "limit": "per-user", "key": key }).to_string());
    }
    let answer = top(&server, "count=10");
    let texts: Vec<&str> = counts(&answer).iter().map(|(_, key, _)| *key).collect();
    assert_eq!(texts.len(), 4, "{answer}");
    assert!(texts.iter().all(|text| text.chars().all(|char| !char.is_control() && char != '\u{202e}')), "{texts:?}");
    assert!(texts.iter().all(|text| text.len() <= 140), "{texts:?}");
    assert!(texts.iter().any(|text| text.ends_with("한…")), "{texts:?}");
}

#[test]
fn wrong_parameters_are_refused_with_the_fix() {
    let server = start(&rules(""));
    for (query, message) in [
        ("over=2m", "over is `2m`: use 1m or 1h"),
        ("kind=x", "kind is `x`: use denied, shadow_denied or near_limit"),
        ("scope=all", "scope is `all`: use node or fleet"),
        ("count=0", "count is 0: use 1 to 1000"),
        ("limit=x", "no limit is named `x`: use one of: per-user, watched"),
    ] {
        assert_eq!(top(&server, query)["message"], message);
    }
    let answer = top(&server, "scope=fleet");
    assert_eq!((&answer["scope"], &answer["nodes"]), (&json!("node"), &json!(1)));
    assert!(answer["note"].as_str().is_some_and(|note| note.contains("the store is in memory")), "{answer}");
}

#[test]
fn a_fleet_on_redis_is_listed_by_any_node() {
    let redis = RedisServer::start();
    let rules = format!("store: {}\nstore_timeout: 5s\n{}", redis.url(), rules(", show_keys: true"));
    let nodes = [start(&rules), start(&rules)];
    for node in &nodes {
        let mut client = Connection::to(node.address_of("gateway"));
        for _ in 0..3 {
            client.get_as("ann", "/");
        }
    }
    // A node reports every ten seconds.
    let answer = wait_until(|| {
        let answer = top(&nodes[0], "scope=fleet");
        (counts(&answer) == [("per-user", "ann", 4)]).then_some(answer)
    });
    let answer = answer.expect("both nodes are listed");
    assert_eq!((&answer["scope"], &answer["nodes"], &answer["total"]), (&json!("fleet"), &json!(2), &json!(4)));
}

/// Returns a server whose limits have denied some requests, and the URL of its admin listener.
fn watched(admin: &str) -> (Process, String) {
    let server = start(&rules(admin));
    let mut service = Connection::to(server.address_of("decisions"));
    for key in ["ann", "ann", "ann", "ann", "\u{1b}[2J", "\u{1b}[2J", "\u{1b}[2J"] {
        service.post(json!({ "limit": "per-user", "key": key }).to_string());
    }
    let url = format!("http://{}", server.address_of("admin"));
    (server, url)
}

#[test]
fn top_prints_the_tables_once_without_a_terminal() {
    let (_server, url) = watched(", show_keys: true");
    for arguments in [&["top", &*url][..], &["top", &url, "--once", "--limit", "per-user", "--over", "1h"]] {
        let output = run(arguments);
        let text = transcript(&output);
        assert!(output.status.success(), "{text}");
        let has = |words: &[&str]| {
            text.lines().any(|line| line.split_whitespace().take(words.len()).eq(words.iter().copied()))
        };
        assert!(has(&["per-user", "ann", "2"]) && has(&["per-user", "\\u{1b}[2J", "1"]), "{text}");
        assert!(has(&["store", "memory:"]) && has(&["all", "limits"]), "{text}");
        assert!(text.chars().all(|char| char == '\n' || !char.is_control()), "{text:?}");
    }
    let output = run(&["top", &url, "--json", "--kind", "near-limit"]);
    let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&answer["top"]["kind"], &answer["top"]["total"]), (&json!("near_limit"), &json!(2)), "{answer}");
    assert_eq!((&answer["status"]["store"]["kind"], &answer["live"]["limits_total"]), (&json!("memory"), &json!(2)));
}

#[test]
fn top_says_what_is_wrong_and_the_fix() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    let token = "0123456789abcdef0123456789abcdef";
    let folder = folder_with(&[("tollgate.yaml", &rules(", tokens_file: tokens")), ("tokens", token)]);
    let tokens = folder_with(&[("wrong", "x"), ("right", token)]);
    let files = ["wrong", "right"].map(|name| tokens.path().join(name).display().to_string());
    let server = Process::start(folder, &["serve", "--config", "tollgate.yaml"]);
    let url = format!("http://{}", server.address_of("admin"));
    for (arguments, problem) in [
        (vec!["top", &*format!("http://{free}"), "--once"], "start the server with an admin listener"),
        (vec!["top", &url, "--once"], "use --token-file"),
        (vec!["top", &url, "--once", "--token-file", &files[0]], "check the token in the file"),
        (vec!["top", "ftp://a", "--once"], "has neither http nor https: use one such as"),
        (
            vec!["top", &url.replace("http", "https"), "--once"],
            &format!("does not speak TLS: use {url}, or set admin.tls"),
        ),
        (vec!["top", &url, "--once", "--interval", "5s"], "cannot be used with"),
        (vec!["top", &url, "--json", "--interval", "5s"], "cannot be used with"),
        (vec!["top", &url, "--once", "--token-file", &files[1], "--limit", "x"], "no limit is named `x`"),
    ] {
        let output = run(&arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?} {}", transcript(&output));
        assert!(String::from_utf8_lossy(&output.stderr).contains(problem), "{problem}: {}", transcript(&output));
    }
    let output = run(&["top", &url, "--once", "--token-file", &files[1]]);
    assert!(output.status.success(), "{}", transcript(&output));
}

#[test]
fn top_says_how_to_see_keys_that_are_hashed() {
    let hint = "set `admin: { show_keys: true }` in the rule file to see keys";
    for (admin, is_hashed) in [("", true), (", show_keys: true", false)] {
        let (_server, url) = watched(admin);
        let text = transcript(&run(&["top", &url, "--once"]));
        assert_eq!(text.contains(hint), is_hashed, "{text}");
    }
}

/// `script` gives the command a terminal.
#[test]
fn top_is_live_in_a_terminal_and_leaves_it_clean() {
    let (server, url) = watched(", show_keys: true");
    let mut script = Command::new("script");
    let command = format!("stty cols 100 rows 30; exec {} top {url} --interval 200ms", binary());
    script.args(["-qfec", &command, "/dev/null"]).env("TERM", "xterm");
    let mut child = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("script is installed");
    let mut output = child.stdout.take().expect("it is piped");
    let mut text = String::new();
    let mut read_until = |wanted: &str| {
        let mut bytes = [0; 4096];
        while !text.contains(wanted) {
            let read = output.read(&mut bytes).expect("it is readable");
            assert!(read > 0, "it ended before {wanted:?}: {text:?}");
            text.push_str(&String::from_utf8_lossy(&bytes[..read]));
        }
        std::mem::take(&mut text)
    };
    let first = read_until("ann");
    assert!(first.contains("\u{1b}[?1049h"), "{first:?}");
    let mut keyboard = child.stdin.take().expect("it is piped");
    keyboard.write_all(b"\x1b[C\x1b[C").expect("it reads");
    read_until("near limit requests");
    drop(server);
    read_until("no answer since");
    keyboard.write_all(b"q").expect("it reads");
    let last = read_until("\u{1b}[?1049l");
    assert!(!last.contains("\u{1b}[2J\u{1b}"), "{last:?}");
    assert!(child.wait().expect("it ends").success());
}

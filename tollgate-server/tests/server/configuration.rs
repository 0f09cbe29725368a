//! Starting with a rule file: what is served and logged, and what cannot start.

use std::io::ErrorKind;
use std::net::TcpListener;

use serde_json::json;
use testkit::folder::folder_with;
use testkit::service::Server;
use testkit::tollgate::{RULES, run_in, transcript};

fn serve(rules: &str) -> String {
    transcript(&run_in(folder_with(&[(RULES, rules)]).path(), &["serve", "--config", RULES]))
}

#[test]
fn the_first_lines_list_every_listener_and_every_limit() {
    let rules = "\
service: { http: '127.0.0.1:0', grpc: '127.0.0.1:0', resp: '127.0.0.1:0' }
limits:
  - { name: global, limit: 10000 }
  - { name: user, key: 'header:x-user-id', algorithm: token_bucket, capacity: 100, refill: 10/s }
  - { name: trial, key: [ip, path], algorithm: leaky_bucket, shadow: true }
";
    let folder = folder_with(&[(RULES, rules)]);
    let server = Server::in_folder(folder);
    let listeners = server.first_line.split([' ', ',']).filter(|word| word.contains("://")).count();
    assert!(listeners == 3 && server.first_line.ends_with("; 3 limits:\n"), "{}", server.first_line);
    assert_eq!(
        server.rest_of_stdout(3),
        "  limit global: 10000 per 60 s (sliding_window_counter)\n  \
         limit user: 100, then 10/s (token_bucket), key header:x-user-id\n  \
         limit trial: 10, then 1/s (leaky_bucket), key ip + path, shadow: never denies\n"
    );
    assert_eq!(server.said(), "");
}

#[test]
fn a_file_that_names_nothing_to_serve_ends_with_2_and_the_fix() {
    insta::assert_snapshot!(serve("limits: [{ name: user }]\n"));
}

#[test]
fn a_bad_file_ends_with_2_and_every_problem() {
    let output = serve("limits:\n  - { name: user, limit: 0 }\n  - { name: user }\n");
    let message = "on stderr:\n\
        tollgate.yaml:2:26: limit 0 admits nothing: use 1 or more, or `blocked` to refuse every request\n\
        tollgate.yaml:3:13: duplicate limit name `user`, first at 2:13: give each limit its own name\nexit code 2";
    assert_eq!(output, message);
}

#[test]
fn an_absent_file_ends_with_2() {
    let folder = folder_with(&[]);
    let output = transcript(&run_in(folder.path(), &["serve", "--config", "absent.yaml"]));
    assert!(
        output.starts_with("on stderr:\ntollgate: cannot read absent.yaml: ") && output.ends_with("exit code 2"),
        "{output}"
    );
}

#[test]
fn a_port_in_use_and_a_bad_store_end_with_2() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let text = serve(&format!("service: {{ http: '{address}' }}\nlimits: [{{ name: user }}]\n"));
    assert!(
        text.contains(&format!("tollgate: service.http: cannot listen on {address}: Address already in use")),
        "{text}"
    );
    assert!(text.ends_with("exit code 2"), "{text}");
    let text =
        serve("store: 'redis://127.0.0.1:6379/nonsense'\nlimits: [{ name: user }]\nservice: { http: '127.0.0.1:0' }\n");
    assert!(text.contains("tollgate.yaml:1:8: the store's URL has a database that is not a number: "), "{text}");
    assert!(text.ends_with("exit code 2"), "{text}");
}

#[test]
fn publishing_needs_a_redis() {
    let folder = folder_with(&[(RULES, "limits: [{ name: user }]\n")]);
    let output = transcript(&run_in(folder.path(), &["publish", "--config", RULES]));
    assert!(
        output.contains("tollgate: the store is in memory, and other nodes cannot see it")
            && output.ends_with("exit code 2"),
        "{output}"
    );
}

#[test]
fn a_listener_behind_a_balancer_wants_the_header_and_then_answers() {
    let rules = "service: { http: { listen: '127.0.0.1:0', proxy_protocol: { from: 127.0.0.1 } } }\nlimits: [{ name: user, key: ip }]\n";
    let server = Server::in_folder(folder_with(&[(RULES, rules)]));
    let mut direct = server.connect();
    direct.send(testkit::http1::head(2));
    // The request is not read, so the close may look like a reset.
    let closed = direct.try_receive().expect_err("there is no answer").kind();
    assert!(matches!(closed, ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset), "{closed}");
    let mut balanced = server.connect();
    balanced.send("PROXY TCP4 203.0.113.9 10.0.0.1 4321 80\r\n");
    assert_eq!(balanced.check(&json!({"limit": "user", "key": "192.0.2.7"}))["allowed"], true);
}

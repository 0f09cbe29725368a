//! The command line, and the start and stop of the process.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use serde_json::json;
use testkit::folder::{folder, folder_with};
use testkit::http1::{Connection, head};
use testkit::service::Server;
use testkit::tollgate::{run, run_in, without_times};

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

#[test]
fn first_line_says_what_listens_where_and_which_limit_is_in_force() {
    let server = Server::start();
    let expected = format!(
        "tollgate {}: gateway http://{}, decisions POST http://{}/v1/check, admin http://{}/; \
         limit per-user: 10 per 60 s (sliding_window_counter), key header:x-user-id\n",
        env!("CARGO_PKG_VERSION"),
        server.address_of("gateway"),
        server.address,
        server.address_of("admin"),
    );
    assert_eq!(server.first_line, expected);
}

#[test]
fn version_is_that_of_the_package() {
    let output = run(&["--version"]);
    assert!(output.status.success());
    assert_eq!(text(&output.stdout), format!("tollgate {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn no_command_shows_the_usage() {
    let output = run(&[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("Usage: tollgate <COMMAND>"), "{}", text(&output.stderr));
}

/// To update the snapshot: `INSTA_UPDATE=always cargo test -p tollgate-server --test server help`.
#[test]
fn help_of_every_command() {
    for command in [
        "tollgate",
        "serve",
        "reload",
        "restart",
        "validate",
        "explain",
        "publish",
        "replay",
        "init",
        "schema",
        "completions",
        "man",
        "simulate",
        "top",
    ] {
        let arguments: &[&str] = if command == "tollgate" { &["--help"] } else { &[command, "--help"] };
        let output = run(arguments);
        assert!(output.status.success());
        insta::assert_snapshot!(format!("help_of_{command}"), text(&output.stdout));
    }
}

#[test]
fn port_in_use_ends_with_2_and_the_fix() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = run(&["serve", "--listen", &address, "--admin", "127.0.0.1:0"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(text(&output.stdout), "");
    let message = without_times(text(&output.stderr));
    let expected = format!(
        "tollgate: --listen or TOLLGATE_LISTEN: cannot listen on {address}: Address already in use (os error 98): stop the process that uses it, or choose another port\n"
    );
    assert_eq!(message, expected);
}

#[test]
fn a_port_in_use_is_reported_with_the_setting_that_names_it() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let of_gateway = |settings: &str| {
        format!("gateway: {{ {settings}, routes: [{{ path: /**, upstream: echo }}] }}\nlimits: [{{ name: a }}]\n")
    };
    for (rules, arguments, setting, fix) in [
        (of_gateway(&format!("listen: '{address}'")), vec![], "gateway.listen", " in the rule file or with --listen"),
        (
            format!("admin: {{ listen: '{address}' }}\n{}", of_gateway("listen: '127.0.0.1:0'")),
            vec![],
            "admin.listen",
            " in the rule file or with --admin",
        ),
        (of_gateway("listen: '127.0.0.1:0'"), vec!["--admin", &*address], "--admin or TOLLGATE_ADMIN", ""),
        (
            format!("service: {{ http: '{address}' }}\nlimits: [{{ name: a }}]\n"),
            vec![],
            "service.http",
            " in the rule file or with --http",
        ),
    ] {
        let folder = folder_with(&[("tollgate.yaml", &rules)]);
        let output = run_in(folder.path(), &[&["serve", "--config", "tollgate.yaml"], &*arguments].concat());
        let expected = format!(
            "tollgate: {setting}: cannot listen on {address}: Address already in use (os error 98): stop the process that uses it, or choose another port{fix}\n"
        );
        assert_eq!((without_times(text(&output.stderr)), output.status.code()), (expected, Some(2)));
    }
}

#[test]
fn address_of_another_machine_ends_with_2_and_the_fix() {
    let output = run(&["serve", "--listen", "192.0.2.1:8090", "--admin", "127.0.0.1:0"]);
    assert_eq!(output.status.code(), Some(2));
    let message = text(&output.stderr);
    assert!(message.contains("cannot listen on 192.0.2.1:8090: "), "{message}");
    assert!(message.contains(": use an address of this host"), "{message}");
}

#[test]
fn bad_address_ends_with_2_and_the_fix_of_the_rule_file() {
    for (address, fix) in [
        ("8090", "add a port from 0 to 65535, such as 127.0.0.1:8080"),
        ("127.0.0.1", "add a port"),
        ("127.0.0.1:65536", "add a port"),
        ("", "add a port"),
        (":8090", "write 0.0.0.0:8090 for all addresses, or 127.0.0.1:8090"),
        ("::1:8090", "put an IPv6 address in brackets: [::1]:8090"),
    ] {
        for flag in ["--listen", "--http", "--admin"] {
            let output = run(&["serve", flag, address]);
            assert_eq!(output.status.code(), Some(2), "{address}");
            let message = text(&output.stderr);
            assert!(
                message.contains(&format!("'{flag} <ADDR>': `{address}` is not an address and port: {fix}")),
                "{message}"
            );
        }
    }
}

#[test]
fn a_host_name_is_an_address_on_the_command_line_as_in_the_file() {
    let free = "localhost:0";
    let server = Server::run(folder(), &["serve", "--listen", free, "--admin", free, "--http", free]);
    assert!(server.address_of("gateway").ip().is_loopback() && server.address_of("admin").ip().is_loopback());
    assert_eq!(server.connect().check(&json!({"limit": "per-user", "key": "1"}))["allowed"], true);
    let rules = "gateway: { listen: 'localhost:0', routes: [{ path: /**, upstream: echo }] }\nlimits: []\n";
    assert!(Server::with_rules(rules).address_of("gateway").ip().is_loopback());
}

#[test]
fn either_signal_ends_an_idle_server_with_0() {
    for signal in ["TERM", "INT"] {
        let server = Server::start();
        let mut idle = server.connect();
        assert_eq!(idle.check(&json!({"limit": "per-user", "key": "1"}))["allowed"], true);
        server.signal(signal);
        assert_eq!(server.wait().code(), Some(0), "{signal}");
        assert!(idle.is_closed_cleanly());
    }
}

#[test]
fn question_under_way_is_answered_before_the_end() {
    let server = Server::start();
    let (start, rest) = (r#"{"limit":"per-"#, r#"user","key":"1"}"#);
    let mut under_way = server.connect();
    under_way.send(head(start.len() + rest.len()));
    under_way.send(start);
    // Connections are accepted in order, so this response means that the one above is being served.
    server.connect().check(&json!({"limit": "per-user", "key": "2"}));

    server.signal("TERM");
    while TcpStream::connect(server.address).is_ok() {
        std::thread::yield_now();
    }

    under_way.send(rest);
    let response = under_way.receive();
    assert_eq!((response.status, &response.json()["allowed"]), (200, &json!(true)));
    assert_eq!(response.header("connection"), Some("close"));
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn question_that_never_ends_does_not_hold_up_the_end() {
    let server = Server::start();
    let mut stuck = server.connect();
    stuck.send(head(100));
    server.connect().check(&json!({"limit": "per-user", "key": "1"}));
    server.signal("TERM");
    assert_eq!(server.wait().code(), Some(0));
    assert!(stuck.is_closed_cleanly());
}

/// Clients that keep their connections and send one request after another lose none when the server stops.
#[test]
fn clients_with_open_connections_lose_no_request_at_a_stop() {
    let rules = "service: { http: '127.0.0.1:0', resp: '127.0.0.1:0' }\nlimits: [{ name: per-user, limit: 1000000 }]\n";
    let server = Server::in_folder(folder_with(&[("tollgate.yaml", rules)]));
    let (http, resp) = (server.address, server.address_of("redis"));
    let (started, is_started) = std::sync::mpsc::channel();
    let clients: Vec<_> = (0..8)
        .map(|_| {
            let started = started.clone();
            std::thread::spawn(move || {
                let mut answered = 0_u32;
                // Until the port is closed, which the client of a new connection may notice only when it sends.
                while let Ok(mut connection) = Connection::try_to(http) {
                    for number in 0.. {
                        let response = match connection.try_post(r#"{"limit":"per-user"}"#) {
                            Err(_) if number == 0 && answered > 10 => return answered,
                            response => response.expect("a request on an open connection is answered"),
                        };
                        assert_eq!(response.status, 200);
                        answered += 1;
                        if answered == 10 {
                            started.send(()).expect("the test waits");
                        }
                        if response.header("connection") == Some("close") {
                            break;
                        }
                    }
                }
                answered
            })
        })
        .collect();
    // Silent over HTTP, and idle over the Redis protocol: both end with the server.
    let _silent = server.connect();
    let mut idle = TcpStream::connect(resp).unwrap();
    idle.write_all(b"PING\r\n").unwrap();
    for _ in 0..8 {
        is_started.recv().expect("all clients start");
    }
    server.signal("TERM");
    for client in clients {
        assert!(client.join().expect("no request fails") > 10);
    }
    assert!(server.wait().success());
    let mut replies = String::new();
    idle.read_to_string(&mut replies).expect("the connection ends in order");
    assert_eq!(replies, "+PONG\r\n");
}

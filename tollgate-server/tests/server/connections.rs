//! Slow clients and many clients. Unit tests check the exact deadlines on a paused clock.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::Command;

use serde_json::json;
use testkit::folder::folder_with;
use testkit::http1::{Connection, Response, head};
use testkit::service::Server;
use testkit::tollgate::{Process, RULES};
use testkit::wait::wait_until;

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

    assert!(silent.is_closed_cleanly());
    assert!(half_head.is_closed_cleanly());
    let response = half_body.receive();
    assert_eq!((response.status, &response.json()["error"]), (408, &json!("body_timeout")));
    assert!(half_body.is_closed_cleanly());
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
    assert!(connection.is_closed_cleanly());
}

#[test]
fn head_that_is_too_long_is_refused() {
    let server = Server::start();
    let mut connection = server.connect();
    connection.send(format!("GET / HTTP/1.1\r\nx-long: {}", "x".repeat(64 * 1024)));
    assert_eq!(connection.receive().status, 431);
}

/// Returns rules with bounds of three connections and one.
fn bounded() -> String {
    let service =
        "{ http: { listen: '127.0.0.1:0', max_connections: 3 }, resp: { listen: '127.0.0.1:0', max_connections: 1 } }";
    format!("service: {service}\nadmin: {{ listen: '127.0.0.1:0' }}\nlimits: [{{ name: per-user, limit: 1000 }}]\n")
}

/// Returns three connections with a request in flight, which are never closed for others.
fn busy(server: &Server) -> Vec<Connection> {
    let begin = |_| {
        let mut connection = server.connect();
        connection.send(head(100));
        connection.send("{");
        connection
    };
    (0..3).map(begin).collect()
}

#[test]
fn connections_beyond_the_bound_get_a_defined_answer_a_log_line_and_a_metric() {
    let server = Server::in_folder(folder_with(&[(RULES, &bounded())]));
    let question = r#"{"limit":"per-user"}"#;
    let mut held = busy(&server);
    for _ in 0..2 {
        let mut refused = server.connect();
        let response = refused.post(question);
        assert_eq!((response.status, &response.json()["error"]), (503, &json!("too_many_connections")));
        assert_eq!((response.header("retry-after"), response.header("connection")), (Some("1"), Some("close")));
        assert!(refused.is_closed_cleanly());
    }
    server.await_said("service.http has 3 connections and refuses further ones: raise service.http.max_connections", 1);

    let resp = server.address_of("redis");
    let mut first = TcpStream::connect(resp).expect("the server accepts");
    assert_eq!(reply(&mut first, "PING\r\n"), "+PONG\r\n");
    let mut second = TcpStream::connect(resp).expect("the server accepts");
    let mut refusal = String::new();
    second.read_to_string(&mut refusal).expect("the server closes");
    assert_eq!(refusal, "-ERR max number of clients reached\r\n");

    let metrics = metrics(&server);
    for line in [
        r#"tollgate_service_connections{surface="http"} 3"#,
        r#"tollgate_service_connections_refused_total{surface="http"} 2"#,
        r#"tollgate_service_connections_refused_total{surface="resp"} 1"#,
    ] {
        assert!(metrics.lines().any(|found| found == line), "no {line} in {metrics}");
    }
    drop(held.pop());
    let answered = wait_until(|| Some(server.connect().post(question)).filter(|response| response.status == 200));
    assert!(answered.is_some(), "a free slot is used again");
    assert_eq!(
        server.said().matches("refuses further ones").count(),
        2,
        "one line for each listener: {}",
        server.said()
    );
}

#[test]
fn connections_beyond_the_bound_get_503_over_http2() {
    let server = Server::in_folder(folder_with(&[(RULES, &bounded())]));
    let _held = busy(&server);
    let url = format!("http://{}/v1/check", server.address);
    let arguments = ["--silent", "--http2-prior-knowledge", "--json", r#"{"limit":"per-user"}"#, "--write-out"];
    let output = Command::new("curl").args(arguments).args([" %{http_code} %{http_version}", &url]).output();
    let output = String::from_utf8(output.expect("curl is installed").stdout).expect("UTF-8");
    assert!(output.contains("too_many_connections") && output.ends_with(" 503 2"), "{output}");
}

/// Clients that send nothing or half a request hold all connections, and new clients get theirs.
#[test]
fn idle_connections_are_closed_for_new_clients() {
    let rules = "service: { http: { listen: '127.0.0.1:0', max_connections: 12 } }\nadmin: { listen: '127.0.0.1:0' }\n\
                 limits: [{ name: per-user, limit: 1000 }]\n";
    let server = Server::in_folder(folder_with(&[(RULES, rules)]));
    let beginnings = ["", "GET /healthz HTT", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"];
    let mut idle = Vec::new();
    for beginning in beginnings.iter().cycle().take(12) {
        let mut connection = server.connect();
        connection.send(beginning);
        idle.push(connection);
    }
    // They are closed after a second at the earliest, and refused until then.
    let healthy = || {
        let mut connection = server.connect();
        (get(&mut connection, "/healthz").status == 200).then_some(connection)
    };
    let await_healthy = || wait_until(healthy).expect("an idle connection is closed");
    let kept: Vec<Connection> = (0..12).map(|_| await_healthy()).collect();
    idle.iter_mut().for_each(|connection| _ = connection.rest());
    server.await_said("service.http has 12 connections and closes idle ones for new clients: raise", 1);
    let closed = "tollgate_service_connections_closed_total{surface=\"http\",reason=\"idle\"} ";
    let metrics = metrics(&server);
    let closed = metrics.lines().find_map(|line| line.strip_prefix(closed)).expect("a metric");
    assert_ne!(closed, "0");
    // All connections have had a request now, and the one that is idle for longest is closed.
    await_healthy();
    drop(kept);
}

/// Silent clients of the admin listener hold all of its connections, and health checks are answered nevertheless.
#[test]
fn health_checks_are_answered_while_silent_clients_hold_all_connections() {
    let rules = "service: { http: '127.0.0.1:0' }\nadmin: { listen: '127.0.0.1:0' }\nlimits: []\n";
    let arguments = ["serve", "--config", RULES];
    let server = Process::start_with_open_files(folder_with(&[(RULES, rules)]), 256, &arguments);
    let admin = server.address_of("admin");
    let mut silent = (0..60).map(|_| Connection::to(admin)).collect::<Vec<_>>();
    for _ in 0..5 {
        // More than the listener refuses at a time.
        silent.extend((0..70).map(|_| Connection::to(admin)));
        let response = get(&mut Connection::to(admin), "/healthz");
        assert_eq!((response.status, response.text()), (200, "ok\n"));
    }
}

/// Returns the metrics of a server.
pub(crate) fn metrics(server: &Server) -> String {
    get(&mut Connection::to(server.address_of("admin")), "/metrics").text().to_owned()
}

fn get(connection: &mut Connection, path: &str) -> Response {
    connection.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n"));
    connection.receive()
}

/// Sends a command of the Redis protocol and returns the first line of the reply.
fn reply(stream: &mut TcpStream, command: &str) -> String {
    stream.write_all(command.as_bytes()).expect("the server reads");
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).expect("the server replies");
    reply
}

/// Frames that cost a client nothing end its connection, and others are served.
#[test]
fn a_flood_of_frames_without_effect_ends_its_connection() {
    let rules = "service: { http: '127.0.0.1:0', grpc: '127.0.0.1:0' }\nadmin: { listen: '127.0.0.1:0' }\n\
                 limits: [{ name: per-user, limit: 1000 }]\n";
    let server = Server::in_folder(folder_with(&[(RULES, rules)]));
    const GOAWAY: u8 = 7;
    const ENHANCE_YOUR_CALM: u8 = 11;
    let frame = |kind: u8, stream: u8, payload: &[u8]| {
        let length = u8::try_from(payload.len()).expect("a short frame");
        [&[0, 0, length, kind, 0, 0, 0, 0, stream][..], payload].concat()
    };
    let floods = [
        ("window updates", frame(8, 0, &[0, 0, 0, 1])),
        ("priorities", frame(2, 3, &[0, 0, 0, 0, 7])),
        ("settings", frame(4, 0, &[])),
        ("pings", frame(6, 0, &[7; 8])),
    ];
    for (surface, address) in [("http", server.address), ("grpc", server.address_of("decisions grpc"))] {
        for (name, flood) in &floods {
            let mut stream = TcpStream::connect(address).expect("the server accepts");
            stream.set_read_timeout(Some(testkit::wait::PATIENCE)).expect("a timeout can be set");
            let bytes = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(4, 0, &[]), &flood.repeat(4_000)].concat();
            let mut writer = stream.try_clone().expect("a socket");
            // The server may end the connection before it has read everything.
            let sending = std::thread::spawn(move || writer.write_all(&bytes));
            let mut received = Vec::new();
            _ = stream.read_to_end(&mut received);
            _ = sending.join().expect("the client ends");
            let (mut rest, mut code) = (&received[..], None);
            while let [high, middle, low, kind, _, _, _, _, _, payload @ ..] = rest {
                let length = usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low);
                code = (*kind == GOAWAY).then(|| payload.get(7).copied()).flatten().or(code);
                rest = payload.get(length..).unwrap_or_default();
            }
            assert_eq!(code, Some(ENHANCE_YOUR_CALM), "{surface}: {name}");
        }
        let closed = format!(
            "tollgate_service_connections_closed_total{{surface=\"{surface}\",reason=\"control_frame_flood\"}} 4"
        );
        assert!(metrics(&server).contains(&closed), "{}", metrics(&server));
    }
    server.await_said("warning: HTTP/2 connection of 127.0.0.1 closed: it sent too many frames", 1);
    assert_eq!(server.connect().check(&json!({"limit": "per-user"}))["allowed"], true);
}

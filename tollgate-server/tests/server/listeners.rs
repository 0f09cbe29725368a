//! Listeners that are added, removed, moved and changed while the server runs.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;
use testkit::certificates::Authority;
use testkit::folder::folder_with;
use testkit::http1::{Connection, head};
use testkit::service::Server;
use testkit::tollgate::RULES;
use testkit::wait::{SetOnDrop, wait_until};

const OLD: &str = "0123456789abcdef-old";
const NEW: &str = "0123456789abcdef-new";
const QUESTION: &str = r#"{"limit":"user"}"#;

fn rules(listeners: &str) -> String {
    with_limit(listeners, 1000)
}

fn with_limit(listeners: &str, limit: u64) -> String {
    format!("{listeners}\nlimits: [{{ name: user, algorithm: fixed_window, limit: {limit}, window: 10220d }}]\n")
}

fn start(listeners: &str) -> Server {
    Server::in_folder(folder_with(&[(RULES, &rules(listeners)), ("old", OLD), ("new", NEW), ("short", "x")]))
}

fn save(server: &Server, rules: &str) {
    std::fs::write(server.path(RULES), rules).expect("the folder is writable");
}

/// Returns the address of a listener that was started by a reload.
fn address_in(said: &str, surface: &str) -> SocketAddr {
    let line = said.lines().rev().find(|line| line.contains(&format!("{surface} listens on")));
    let address = line.and_then(|line| line.rsplit_once("//")).map(|(_, address)| address);
    address.and_then(|address| address.parse().ok()).unwrap_or_else(|| panic!("no address of {surface} in {said}"))
}

/// Returns an address that nothing listens on.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port is free")
}

fn await_refused(address: SocketAddr) {
    let refused = wait_until(|| TcpStream::connect(address).err());
    assert!(refused.is_some(), "{address} is still open");
}

/// Sends a command of the Redis protocol and returns the first line of the reply. It is empty if the server closed the
/// connection.
fn reply(stream: &mut TcpStream, command: &str) -> String {
    stream.write_all(command.as_bytes()).expect("the server reads");
    let mut reply = String::new();
    BufReader::new(stream).read_line(&mut reply).expect("the server replies");
    reply
}

/// Sends a check with a token, and returns the status.
fn status_with(address: SocketAddr, token: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address)?;
    write!(
        stream,
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         authorization: Bearer {token}\r\ncontent-length: {}\r\n\r\n{QUESTION}",
        QUESTION.len()
    )?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    Ok(response.split(' ').nth(1).unwrap_or_default().to_owned())
}

#[test]
fn listeners_are_added_and_removed() {
    let http = "http: '127.0.0.1:0'";
    let server = start(&format!("service: {{ {http} }}"));
    let mut kept = server.connect();
    assert_eq!(kept.post(QUESTION).status, 200);

    let all =
        format!("service: {{ {http}, resp: '127.0.0.1:0', grpc: '127.0.0.1:0' }}\nadmin: {{ listen: '127.0.0.1:0' }}");
    save(&server, &rules(&all));
    let said = server.await_said("tollgate.yaml is in force: no changes", 1);
    let [resp, grpc, admin] = ["service.resp", "service.grpc", "admin"].map(|surface| address_in(&said, surface));
    let mut client = TcpStream::connect(resp).expect("it listens");
    assert_eq!(reply(&mut client, "PING\r\n"), "+PONG\r\n");
    let mut silent = TcpStream::connect(grpc).expect("it listens");
    let mut probe = Connection::to(admin);
    probe.send("GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n");
    assert_eq!(probe.receive().text(), "ready\n");

    save(&server, &rules(&format!("service: {{ {http} }}")));
    let said = server.await_said("tollgate.yaml is in force: no changes", 2);
    for url in [
        format!("service.resp no longer listens on redis://{resp}"),
        format!("admin no longer listens on http://{admin}"),
    ] {
        assert!(said.contains(&url), "no {url} in {said}");
    }
    for address in [resp, grpc, admin] {
        await_refused(address);
    }
    // Clients see the end, not a reset connection.
    let mut rest = String::new();
    client.read_to_string(&mut rest).expect("the connection is closed in order");
    silent.read_to_end(&mut Vec::new()).expect("the connection is closed in order");
    assert_eq!(rest, "");
    // Nothing has changed for clients of other listeners.
    assert_eq!(kept.post(QUESTION).json()["remaining"], 998);
    assert!(!said.contains("service.http"), "{said}");
}

#[test]
fn requests_in_flight_on_a_removed_listener_are_answered() {
    let server = start("service: { http: '127.0.0.1:0', resp: '127.0.0.1:0' }");
    let mut busy = server.connect();
    busy.send(head(QUESTION.len()));
    busy.send(&QUESTION[..4]);
    save(&server, &rules("service: { resp: '127.0.0.1:0' }"));
    server.await_said("service.http no longer listens on", 1);
    await_refused(server.address);
    busy.send(&QUESTION[4..]);
    let response = busy.receive();
    assert_eq!((response.status, response.header("connection")), (200, Some("close")));
    assert!(busy.is_closed_cleanly());
    let mut client = TcpStream::connect(server.address_of("redis")).expect("it listens");
    assert_eq!(reply(&mut client, "PING\r\n"), "+PONG\r\n");
}

#[test]
fn listeners_are_moved_and_exchange_their_addresses() {
    let server = start("service: { http: '127.0.0.1:0' }\nadmin: { listen: '127.0.0.1:0' }");
    assert_eq!(server.connect().check(&json!({"limit": "user"}))["remaining"], 999);
    let [one, other, admin] = [(); 3].map(|()| free_address());
    let listeners =
        |http, resp| format!("service: {{ http: '{http}', resp: '{resp}' }}\nadmin: {{ listen: '{admin}' }}");
    save(&server, &rules(&listeners(one, other)));
    let said = server.await_said("is in force", 1);
    assert!(said.contains(&format!("service.http no longer listens on http://{}\n", server.address)), "{said}");
    assert_eq!(Connection::to(one).check(&json!({"limit": "user"}))["remaining"], 998);
    await_refused(server.address);
    await_refused(server.address_of("admin"));
    let mut probe = Connection::to(admin);
    probe.send("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n");
    assert_eq!(probe.receive().text(), "ok\n");

    save(&server, &rules(&listeners(other, one)));
    server.await_said("is in force", 2);
    assert_eq!(Connection::to(other).check(&json!({"limit": "user"}))["remaining"], 997);
    assert_eq!(reply(&mut TcpStream::connect(one).expect("it listens"), "PING\r\n"), "+PONG\r\n");
    // A later stop closes the sockets that were handed over.
    server.signal("TERM");
    assert!(server.wait().success());
    await_refused(one);
}

/// While tokens change to another file, no client is refused: the socket stays open.
#[test]
fn settings_change_on_the_same_address_without_a_refused_connection() {
    let listeners = |tokens: &str| {
        let listener = format!("{{ listen: '127.0.0.1:0', tokens_file: {tokens} }}");
        format!("service: {{ http: {listener}, resp: {listener} }}")
    };
    let server = start(&listeners("old"));
    let (http, resp) = (server.address, server.address_of("redis"));
    let mut authenticated = TcpStream::connect(resp).expect("it listens");
    assert_eq!(reply(&mut authenticated, &format!("AUTH {OLD}\r\n")), "+OK\r\n");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let set_done = SetOnDrop(&done);
        let clients = [OLD, NEW].map(|token| {
            let done = &done;
            scope.spawn(move || {
                let mut statuses = Vec::new();
                while !done.load(Ordering::Relaxed) {
                    let status = status_with(http, token).expect("no connection is refused or reset");
                    if statuses.last() != Some(&status) {
                        statuses.push(status);
                    }
                }
                statuses
            })
        });
        for (turn, tokens) in ["new", "old", "new"].into_iter().enumerate() {
            save(&server, &rules(&listeners(tokens)));
            server.await_said("is in force", turn + 1);
            let (valid, invalid) = if tokens == "new" { (NEW, OLD) } else { (OLD, NEW) };
            assert_eq!(status_with(http, valid).expect("it answers"), "200");
            assert_eq!(status_with(http, invalid).expect("it answers"), "401");
        }
        drop(set_done);
        for client in clients {
            let statuses = client.join().expect("no connection failed");
            assert!(statuses.iter().all(|status| status == "200" || status == "401"), "{statuses:?}");
        }
    });
    // A client that authenticated with an old token has to do so again.
    authenticated.read_to_end(&mut Vec::new()).expect("the connection is closed in order");
    let mut next = TcpStream::connect(resp).expect("it listens");
    assert!(reply(&mut next, &format!("AUTH {OLD}\r\n")).starts_with("-WRONGPASS"));
    assert_eq!(reply(&mut next, &format!("AUTH {NEW}\r\n")), "+OK\r\n");
    assert!(server.said().contains("service.http has new settings, and its clients reconnect\n"), "{}", server.said());
}

#[test]
fn bounds_hosts_and_tls_change() {
    let server = start("service: { http: { listen: '127.0.0.1:0', max_connections: 1 } }");
    let mut held = server.connect();
    assert_eq!(held.post(QUESTION).status, 200);
    assert_eq!(server.connect().post(QUESTION).status, 503);
    let listener = "listen: '127.0.0.1:0', max_connections: 2";
    save(&server, &rules(&format!("service: {{ http: {{ {listener}, hosts: [limits.test] }} }}")));
    server.await_said("is in force", 1);
    let (mut one, mut other) = (server.connect(), server.connect());
    one.send(format!("{}{QUESTION}", head(QUESTION.len()).replace("host: tollgate", "host: limits.test")));
    assert_eq!(one.receive().status, 200);
    assert_eq!(other.post(QUESTION).status, 200);

    let authority = Authority::new();
    let signed = authority.sign(&["localhost"]);
    for (name, text) in [("ca.pem", &authority.pem()), ("server.pem", &signed.cert), ("server.key", &signed.key)] {
        std::fs::write(server.path(name), text).expect("the folder is writable");
    }
    let tls = "tls: { certificates: { cert: server.pem, key: server.key } }";
    save(&server, &rules(&format!("service: {{ http: {{ {listener}, {tls} }} }}")));
    server.await_said(&format!("service.http listens on https://{}\n", server.address), 1);
    let url = format!("https://localhost:{}/v1/check", server.address.port());
    let ca = server.path("ca.pem");
    let output = Command::new("curl").args(["--silent", "--json", QUESTION, "--cacert"]).arg(ca).arg(url).output();
    let output = String::from_utf8(output.expect("curl is installed").stdout).expect("UTF-8");
    assert!(output.contains("\"allowed\":true"), "{output}");
}

/// A reload whose listeners cannot be used changes nothing: neither rules nor other listeners.
#[test]
fn a_listener_that_cannot_be_used_refuses_the_whole_file() {
    let server = start("service: { http: '127.0.0.1:0' }");
    let mut connection = server.connect();
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = taken.local_addr().expect("it is bound");
    let refused = |resp: &str| with_limit(&format!("service: {{ grpc: '127.0.0.1:0', resp: {resp} }}"), 5);
    let tls = "{ listen: '127.0.0.1:0', tls: { certificates: { cert: no.pem, key: no.key } } }";
    let own = format!("'{}'", server.address);
    let refusals = [
        (
            refused(&format!("'{address}'")),
            format!(
                "tollgate.yaml is rejected, and the previous rules stay in force: service.resp: cannot listen on \
                 {address}: Address already in use (os error 98); all listeners stay unchanged: stop the process that \
                 uses it, or choose another port, and send SIGHUP or change the file\n"
            ),
        ),
        (refused("'0.0.0.0:0'"), "service.resp listens on 0.0.0.0:0, where other machines reach it".to_owned()),
        (
            refused("{ listen: '127.0.0.1:0', tokens_file: short }"),
            "the previous rules stay in force: service.resp: tokens_file short: line 1: a token has".to_owned(),
        ),
        (refused("{ listen: '127.0.0.1:0', tokens_file: missing }"), "tokens_file missing: No such file".to_owned()),
        (refused(tls), "no.pem".to_owned()),
        (with_limit("", 5), "stay in force: it configures nothing to serve: add a listener".to_owned()),
        (
            with_limit(&format!("service: {{ http: '127.0.0.1:0', resp: {own} }}"), 5),
            format!("cannot listen on {} while service.http of this server listens on", server.address),
        ),
    ];
    for (turn, (file, problem)) in refusals.iter().enumerate() {
        save(&server, file);
        server.await_said("is rejected, and the previous rules stay in force", turn + 1);
        server.await_said(problem, 1);
        assert_eq!(connection.check(&json!({"limit": "user"}))["quota"], 1000);
    }
    let said = server.said();
    assert!(!said.contains("listens on grpc") && !said.contains("is in force"), "{said}");

    save(&server, &refusals[0].0);
    server.await_said("is rejected, and the previous rules stay in force", refusals.len() + 1);
    drop(taken);
    server.signal("HUP");
    let said = server.await_said("tollgate.yaml is in force: user: ", 1);
    assert_eq!(address_in(&said, "service.resp"), address);
    assert_eq!(reply(&mut TcpStream::connect(address).expect("it listens"), "PING\r\n"), "+PONG\r\n");
}

/// Addresses of the command line stay, and the other settings of the file change.
#[test]
fn addresses_of_the_command_line_have_precedence() {
    let folder = folder_with(&[(RULES, &rules("")), ("new", NEW)]);
    let server = Server::run(folder, &["serve", "--config", RULES, "--http", "127.0.0.1:0", "--admin", "127.0.0.1:0"]);
    let elsewhere = "service: { http: { listen: '127.0.0.1:1', tokens_file: new } }\nadmin: { listen: '127.0.0.1:2' }";
    save(&server, &rules(elsewhere));
    let said = server.await_said("is in force", 1);
    assert!(!said.contains("admin"), "{said}");
    assert_eq!(status_with(server.address, NEW).expect("it answers"), "200");
    assert_eq!(status_with(server.address, OLD).expect("it answers"), "401");
    save(&server, &rules(""));
    server.await_said("is in force", 2);
    assert_eq!(status_with(server.address, OLD).expect("it answers"), "200");
}

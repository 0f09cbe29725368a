//! How long connections to upstreams are reused, and that no request is lost with a closed one.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use testkit::client::{Client, Protocol, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::upstream::{Raw, Served, Speaks, full};
use testkit::wait::until;

/// A POST of known length.
const PLAIN_POST: &str = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello";

/// A POST of unknown length.
const CHUNKED_POST: &str = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n";

fn answering(headers: &'static str) -> Raw {
    Raw::answering(format!("HTTP/1.1 200 OK\r\n{headers}Content-Length: 2\r\n\r\nok"))
}

fn gateway(protocol: Protocol, upstream: &str, connections: &str) -> Gateway {
    let route = format!("{{ path: /**, upstream: {upstream}, retries: 0, upstream_connections: {{ {connections} }} }}");
    protocol.start(&site("workers: 1", &[route], ""))
}

fn post(connection: &mut Client, request: &str) {
    assert_eq!(connection.ask(request).status, 200);
}

#[test]
fn idle_connection_is_not_reused_after_the_time_of_the_route() {
    each_protocol(|protocol| {
        for request in [PLAIN_POST, CHUNKED_POST] {
            let upstream = answering("");
            let gateway = gateway(protocol, &upstream.url(), "idle: 300ms");
            let mut connection = gateway.client();
            for opened in 1..=3 {
                post(&mut connection, request);
                assert_eq!(upstream.accepted(), opened);
                std::thread::sleep(Duration::from_millis(700));
            }
        }
    });
}

#[test]
fn idle_connection_is_not_reused_after_the_time_that_the_upstream_announces() {
    each_protocol(|protocol| {
        for request in [PLAIN_POST, CHUNKED_POST] {
            let upstream = answering("Keep-Alive: timeout=1, max=100\r\n");
            let gateway = gateway(protocol, &upstream.url(), "idle: 1m");
            let mut connection = gateway.client();
            for opened in 1..=3 {
                post(&mut connection, request);
                assert_eq!(upstream.accepted(), opened);
                std::thread::sleep(Duration::from_millis(700));
            }
        }
    });
}

#[test]
fn connection_takes_no_more_than_max_requests() {
    each_protocol(|protocol| {
        for request in [PLAIN_POST, CHUNKED_POST] {
            let upstream = answering("");
            let gateway = gateway(protocol, &upstream.url(), "idle: 1m, max_requests: 2");
            let mut connection = gateway.client();
            (0..5).for_each(|_| post(&mut connection, request));
            assert_eq!(upstream.accepted(), 3, "{request}");
        }
        let upstream = Served::start(Speaks::Http2, |_request| async { http::Response::new(full("ok")) });
        let gateway = gateway(protocol, &format!("h2c://{}", upstream.address), "max_requests: 2");
        let mut connection = gateway.client();
        (0..5).for_each(|_| post(&mut connection, PLAIN_POST));
        assert_eq!(upstream.accepted(), 3);
    });
}

#[test]
fn connection_takes_no_requests_after_max_age() {
    each_protocol(|protocol| {
        for request in [PLAIN_POST, CHUNKED_POST] {
            let upstream = answering("");
            let gateway = gateway(protocol, &upstream.url(), "idle: 1m, max_age: 3s");
            let mut connection = gateway.client();
            post(&mut connection, request);
            std::thread::sleep(Duration::from_secs(4));
            post(&mut connection, request);
            assert_eq!(upstream.accepted(), 2, "{request}");
        }
        let upstream = Served::start(Speaks::Http2, |_request| async { http::Response::new(full("ok")) });
        let gateway = gateway(protocol, &format!("h2c://{}", upstream.address), "max_age: 3s");
        let mut connection = gateway.client();
        post(&mut connection, PLAIN_POST);
        std::thread::sleep(Duration::from_secs(4));
        post(&mut connection, PLAIN_POST);
        assert_eq!(upstream.accepted(), 2);
    });
}

/// Whether a connection to that port has been closed by the other side, and not yet by this one.
#[cfg(target_os = "linux")]
fn is_closed_to(port: u16) -> bool {
    const CLOSE_WAIT: &str = "08";
    let connections = std::fs::read_to_string("/proc/net/tcp").unwrap();
    connections.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(2);
        let (remote, state) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        remote.ends_with(&format!(":{port:04X}")) && state == CLOSE_WAIT
    })
}

/// The request reaches the gateway before the close does, but both are there when the gateway checks.
#[cfg(target_os = "linux")]
#[test]
fn post_is_not_sent_on_a_connection_that_the_upstream_has_closed() {
    each_protocol(|protocol| {
        for request in [PLAIN_POST, CHUNKED_POST] {
            let (close, closes) = mpsc::channel::<()>();
            let (closed, is_closed) = mpsc::channel::<()>();
            let (closes, closed) = (std::sync::Mutex::new(closes), std::sync::Mutex::new(closed));
            let upstream = Raw::start(move |conversation| {
                if conversation.number > 0 {
                    while conversation.request().is_some() {
                        conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
                    }
                    return;
                }
                conversation.request();
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
                _ = closes.lock().unwrap().recv();
                _ = conversation.stream.shutdown(std::net::Shutdown::Both);
                _ = closed.lock().unwrap().send(());
            });
            let gateway = gateway(protocol, &upstream.url(), "idle: 1m");
            let mut connection = gateway.client();
            post(&mut connection, request);
            gateway.signal("STOP");
            until("the stop", || {
                std::fs::read_to_string(format!("/proc/{}/stat", gateway.id())).unwrap().contains(") T ")
            });
            connection.send(request);
            close.send(()).unwrap();
            is_closed.recv().unwrap();
            until("the arrival of the close", || is_closed_to(upstream.address.port()));
            gateway.signal("CONT");
            assert_eq!(connection.receive().status, 200, "{request}");
            assert_eq!(upstream.accepted(), 2);
        }
    });
}

/// A server in another language, which prints its port and is stopped when the test ends.
struct Foreign(Child, SocketAddr);

impl Foreign {
    /// Starts a server. Returns `None` if the program is not installed, which only CI requires.
    fn start(program: &str, arguments: &[&str]) -> Option<Self> {
        let started = Command::new(program).args(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut child = match started {
            Ok(child) => child,
            Err(error) => {
                assert!(
                    std::env::var_os("CI").is_none(),
                    "{program} does not start: {error}: install it for this test"
                );
                return None;
            }
        };
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().parse().expect("it prints its port");
        Some(Self(child, SocketAddr::from(([127, 0, 0, 1], port))))
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}

const NODE: &str = "const server = require('http').createServer((request, response) => {
    request.resume();
    request.on('end', () => response.end('ok'));
});
server.keepAliveTimeout = 4000;
server.listen(0, '127.0.0.1', () => console.log(server.address().port));";

const PYTHON: &str = "
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    timeout = 4
    def do_POST(self):
        self.rfile.read(int(self.headers['Content-Length']))
        self.send_response(200)
        self.send_header('Content-Length', '2')
        self.end_headers()
        self.wfile.write(b'ok')
# All clients connect at once, and connections beyond the queue would be delayed.
http.server.ThreadingHTTPServer.request_queue_size = 128
server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
server.daemon_threads = True
print(server.server_address[1], flush=True)
server.serve_forever()
";

/// Each client pauses for about as long as the server keeps idle connections. Node announces that time; Python does
/// not, and the route sets it.
#[test]
fn no_post_is_lost_to_servers_that_close_idle_connections() {
    each_protocol(|protocol| {
        let servers = [
            (Foreign::start("node", &["-e", NODE]), "idle: 1m"),
            (Foreign::start("python3", &["-c", PYTHON]), "idle: 2s"),
        ];
        for (server, connections) in servers {
            let Some(server) = server else { continue };
            let gateway = gateway(protocol, &format!("http://{}", server.1), connections);
            let failed: Vec<String> = std::thread::scope(|scope| {
                let clients: Vec<_> = (0..32u64)
                    .map(|number| {
                        let mut connection = gateway.client();
                        scope.spawn(move || {
                            let mut failed = Vec::new();
                            for round in 0..3 {
                                let answer = connection.ask(PLAIN_POST);
                                if answer.status != 200 {
                                    failed.push(format!("request {round}: {} {}", answer.status, answer.text()));
                                }
                                std::thread::sleep(Duration::from_millis(3984 + number));
                            }
                            failed
                        })
                    })
                    .collect();
                clients.into_iter().flat_map(|client| client.join().unwrap()).collect()
            });
            assert!(failed.is_empty(), "{connections}: {failed:?}");
        }
    });
}

/// An upstream that never reads a body after GET and the like, as some frameworks do not: the bytes are its next
/// request.
fn ignoring_bodies() -> Raw {
    Raw::start(|conversation| {
        while let Some(asked) = conversation.head() {
            let path = asked.head.split(' ').nth(1).unwrap_or_default().to_owned();
            let close = asked.values("connection").contains(&"close");
            conversation.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{path}", path.len()));
            if close {
                return conversation.await_end();
            }
        }
    })
}

#[test]
fn body_that_an_upstream_ignores_is_not_answered_to_the_next_client() {
    each_protocol(|protocol| {
        let smuggled = "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n";
        let (length, size) = (smuggled.len(), format!("{:x}", smuggled.len()));
        for method in ["GET", "OPTIONS", "DELETE", "PROPFIND", "Fetch"] {
            for request in [
                format!("{method} /a HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n{smuggled}"),
                format!(
                    "{method} /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n{size}\r\n{smuggled}\r\n0\r\n\r\n"
                ),
            ] {
                let upstream = ignoring_bodies();
                let gateway = gateway(protocol, &upstream.url(), "idle: 1m");
                let mut connection = gateway.client();
                let first = connection.ask(&request);
                assert_eq!((first.status, first.text()), (200, "/a"), "{request}");
                for _ in 0..3 {
                    let next = gateway.get("/b");
                    assert_eq!((next.status, next.text()), (200, "/b"), "{request}");
                }
            }
        }
    });
}

#[test]
fn connection_is_reused_after_a_body_that_upstreams_read() {
    each_protocol(|protocol| {
        for request in [PLAIN_POST, CHUNKED_POST] {
            let upstream = answering("");
            let gateway = gateway(protocol, &upstream.url(), "idle: 1m");
            let mut connection = gateway.client();
            (0..3).for_each(|_| post(&mut connection, request));
            assert_eq!(upstream.accepted(), 1, "{request}");
        }
    });
}

#[test]
fn connection_to_a_removed_upstream_is_closed_while_another_response_goes_on() {
    each_protocol(|protocol| {
        let closed = Arc::new(AtomicBool::new(false));
        let (is_closed, sees_end) = (Arc::clone(&closed), closed);
        let removed = Raw::start(move |conversation| {
            while conversation.request().is_some() {
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
            sees_end.store(true, Relaxed);
        });
        let endless = Raw::start(|conversation| {
            while conversation.request().is_some() {
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegun");
            }
        });
        let kept = format!("{{ path: /endless, upstream: {} }}", endless.url());
        let route = format!("{{ path: /removed, upstream: {}, upstream_connections: {{ idle: 1h }} }}", removed.url());
        let gateway = protocol.start(&site("", &[kept.clone(), route], ""));
        assert_eq!(gateway.get("/removed").text(), "ok");
        let mut client = gateway.client();
        client.send("GET /endless HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(client.receive_head().expect("the gateway answers").status, 200);
        assert_eq!(client.body_bytes(5).expect("the gateway answers"), b"begun");
        assert!(!is_closed.load(Relaxed), "connections are kept for further requests");
        gateway.save(&site("", &[kept], ""));
        gateway.await_said("is in force", 1);
        until("the connection is closed", || is_closed.load(Relaxed));
    });
}

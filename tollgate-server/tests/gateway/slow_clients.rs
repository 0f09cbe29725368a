//! Slow clients, and clients that send or open too much.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use testkit::client::{Protocol, each_http1, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::upstream::Raw;
use testkit::wait::{PATIENCE, until};

fn gateway(protocol: Protocol, settings: &str, upstream: &Raw) -> Gateway {
    protocol.start(&site(settings, &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""))
}

/// Sends a piece now and then until the gateway closes the connection.
fn trickle(gateway: &Gateway, begins: &str, piece: &str) {
    let mut connection = gateway.client();
    connection.send(begins);
    until("the end of the connection", || {
        std::thread::sleep(Duration::from_millis(100));
        connection.try_send(piece).is_err()
    });
}

#[test]
fn a_head_that_trickles_in_is_cut_off() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "timeouts: { head: 1s }", &upstream);
        trickle(&gateway, "GET / HTTP/1.1\r\n", "X-A: b\r\n");
        trickle(&gateway, "", "G");
        assert_eq!(upstream.accepted(), 0);
    });
}

#[test]
fn a_body_that_does_not_come_is_given_up() {
    each_protocol(|protocol| {
        let (sender, given_up) = mpsc::channel();
        let upstream = Raw::start(move |conversation| {
            if conversation.request().is_none() {
                _ = sender.send(());
            }
        });
        let gateway = gateway(protocol, "timeouts: { body: 1s }", &upstream);
        for rest in ["Content-Length: 100\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n5\r\nhel"] {
            let mut connection = gateway.client();
            connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\n{rest}"));
            assert_eq!(connection.receive().status, 408, "{rest:?}");
            given_up.recv_timeout(PATIENCE).expect("the upstream does not wait for the rest");
        }
    });
}

#[test]
fn a_body_that_comes_slowly_but_steadily_is_taken() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let route = format!("{{ path: /**, timeout: 4s, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("timeouts: { head: 4s, body: 4s, idle: 4s }", &[route], ""));
        let mut connection = gateway.client();
        connection.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\n\r\n");
        for _ in 0..12 {
            std::thread::sleep(Duration::from_millis(500));
            connection.send("x");
        }
        assert_eq!(connection.receive().status, 200, "six seconds, but never four without a byte");
    });
}

/// The rest of an unwanted body is not the head of the next request.
#[test]
fn the_rest_of_a_refused_body_may_take_longer_than_a_head() {
    each_http1(|protocol| {
        let limits = "{ name: none, key: ip, algorithm: fixed_window, align: first_request, limit: 1, window: 1h }";
        let settings = "timeouts: { head: 1s, body: 5s }";
        let gateway = protocol.start(&site(settings, &["{ path: /**, respond: { body: ok } }"], limits));
        let mut connection = gateway.client();
        assert_eq!(connection.get("/").status, 200);
        connection.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 12\r\n\r\n");
        assert_eq!(connection.receive().status, 429);
        for _ in 0..12 {
            std::thread::sleep(Duration::from_millis(250));
            connection.send("x");
        }
        assert_eq!(connection.get("/").status, 429, "the connection goes on");
        // The timeout of the next head begins.
        connection.send("GET / HTTP/1.1\r\n");
        assert!(connection.is_closed());
    });
}

/// A client that was refused for longer than the head timeout is not late with the next head.
#[test]
fn after_many_refusals_a_head_in_many_pieces_has_its_whole_time() {
    each_http1(|protocol| {
        let limits = "{ name: none, key: ip, algorithm: fixed_window, align: first_request, limit: 1, window: 1h }";
        let settings = "timeouts: { head: 4s, idle: 20s }";
        let gateway = protocol.start(&site(settings, &["{ path: /**, respond: { body: ok } }"], limits));
        let mut connection = gateway.client();
        assert_eq!(connection.get("/").status, 200);
        for _ in 0..9 {
            std::thread::sleep(Duration::from_millis(500));
            assert_eq!(connection.get("/").status, 429);
        }
        // In enough pieces that it is parsed only once it is complete.
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n");
        for number in 0..20 {
            std::thread::sleep(Duration::from_millis(20));
            connection.send(format!("X-{number}: y\r\n"));
        }
        connection.send("\r\n");
        assert_eq!(connection.receive().status, 429);
        assert_eq!(connection.get("/").status, 429, "the connection goes on");
    });
}

#[test]
fn an_idle_connection_is_closed() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "timeouts: { idle: 2s }", &upstream);
        let mut used = gateway.client();
        assert_eq!(used.get("/").status, 200);
        let mut fresh = gateway.client();
        assert!(fresh.is_closed() && used.is_closed());
    });
}

#[test]
fn a_client_that_does_not_read_is_cut_off() {
    each_protocol(|protocol| {
        let is_cut_off = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&is_cut_off);
        let upstream = Raw::start(move |conversation| {
            _ = conversation.request();
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n");
            while conversation.send([0; 64 << 10]) {}
            ended.store(true, Relaxed);
        });
        let gateway = gateway(protocol, "timeouts: { write: 1s }", &upstream);
        let mut connection = gateway.client();
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        until("the end of the response", || is_cut_off.load(Relaxed));
        connection.receive_head().unwrap();
        let read = (0..).take_while(|_| connection.body_bytes(1 << 16).is_ok()).count() << 16;
        assert!(read < 100_000_000, "it was cut off long before the end");
    });
}

#[test]
fn a_client_that_reads_slowly_but_steadily_gets_everything() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.request();
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 8388608\r\n\r\n");
            conversation.send(vec![7; 8 << 20]);
        });
        let route = format!("{{ path: /**, timeout: 4s, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("timeouts: { idle: 4s, write: 4s }", &[route], ""));
        let mut connection = gateway.client();
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        let head = connection.receive_head().unwrap();
        assert_eq!(head.header("content-length"), Some("8388608"));
        for _ in 0..16 {
            assert!(connection.body_bytes(512 << 10).unwrap().iter().all(|byte| *byte == 7));
            std::thread::sleep(Duration::from_millis(400));
        }
    });
}

#[test]
fn a_head_that_is_too_long_is_refused() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "max_head: 16KiB", &upstream);
        let fits = format!("GET / HTTP/1.1\r\nHost: h\r\nX: {}\r\n\r\n", "x".repeat(15 << 10));
        assert_eq!(gateway.client().ask(fits).status, 200);
        for long in [
            format!("GET / HTTP/1.1\r\nHost: h\r\nX: {}\r\n\r\n", "x".repeat(17 << 10)),
            format!("GET /{} HTTP/1.1\r\nHost: h\r\n\r\n", "x".repeat(17 << 10)),
            format!("GET / HTTP/1.1\r\nHost: h\r\n{}\r\n", "X: y\r\n".repeat(4000)),
            "x".repeat(17 << 10),
        ] {
            let mut connection = gateway.client();
            let answer = connection.ask(&long);
            assert_eq!(answer.status, 431, "{}", answer.text());
            assert!(connection.is_closed());
        }
        assert_eq!(upstream.requests(), 1);
    });
}

#[test]
fn head_that_is_longer_than_a_read_is_served() {
    each_protocol(|protocol| {
        let upstream = Raw::answering("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        let gateway = gateway(protocol, "max_head: 1MiB", &upstream);
        let fields: String = (0..90).map(|number| format!("X-{number}: {}\r\n", "x".repeat(5000))).collect();
        let request = format!("POST / HTTP/1.1\r\nHost: h\r\n{fields}Content-Length: 5\r\n\r\nhello");
        let mut connection = gateway.client();
        // The next request is behind it, in the same read.
        connection.send(format!("{request}GET /next HTTP/1.1\r\nHost: h\r\n\r\n"));
        assert_eq!([connection.receive().status, connection.receive().status], [200, 200]);
        for piece in request.as_bytes().chunks(1000) {
            connection.send(piece);
        }
        assert_eq!(connection.receive().status, 200);
        let seen = upstream.seen().concat();
        assert_eq!((seen.matches(&"x".repeat(5000)).count(), seen.matches("hello").count()), (180, 2));
    });
}

#[test]
fn a_body_that_is_too_long_is_413() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let gateway = gateway(protocol, "max_body: 10KiB", &upstream);
        let fits = "x".repeat(10 << 10);
        let answer =
            gateway.client().ask(format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{fits}", fits.len()));
        assert_eq!(answer.status, 200);
        let answer = gateway.client().ask("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10241\r\n\r\n");
        assert_eq!(answer.status, 413, "before a byte of it came");
        let before = upstream.seen().len();
        let mut connection = gateway.client();
        connection.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
        for _ in 0..3 {
            _ = connection.try_send(format!("1000\r\n{}\r\n", "x".repeat(4096)));
        }
        assert_eq!(connection.receive().status, 413);
        assert!(upstream.seen().iter().skip(before).all(|seen| !seen.ends_with("0\r\n\r\n")));
        assert_eq!(gateway.get("/").status, 200, "nobody else is to blame");
    });
}

#[test]
fn connections_beyond_the_maximum_get_503() {
    let upstream = Raw::named("one");
    let gateway =
        gateway(Protocol::Http1, "workers: 1\n  max_connections: 2\n  max_connections_per_address: 2", &upstream);
    let mut held: Vec<_> = (0..2).map(|_| gateway.connect()).collect();
    for connection in &mut held {
        assert_eq!(connection.get("/").status, 200);
    }
    let mut third = gateway.connect();
    third.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    let answer = third.receive();
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert!(answer.text().contains("too_many_connections") && answer.text().ends_with('}'), "{}", answer.text());
    assert!(third.is_closed());
    held.pop();
    until("a free place", || {
        let mut connection = gateway.connect();
        connection.tcp().write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").is_ok()
            && connection.try_receive().is_ok_and(|answer| answer.status == 200)
    });
}

/// A response in clear text would look to them like another protocol.
#[test]
fn tls_connections_beyond_the_maximum_are_closed() {
    let upstream = Raw::named("one");
    let settings = "workers: 1\n  max_connections: 2\n  max_connections_per_address: 2";
    let gateway = gateway(Protocol::Http1Tls, settings, &upstream);
    let mut held: Vec<_> = (0..2).map(|_| gateway.connect()).collect();
    for connection in &mut held {
        assert_eq!(connection.get("/").status, 200);
    }
    let mut third = TcpStream::connect(gateway.address).unwrap();
    let mut received = Vec::new();
    // Closing may reset the connection.
    _ = third.read_to_end(&mut received);
    assert_eq!(received, b"");
}

/// The kernel distributes connections over workers as it likes.
#[test]
fn the_bound_of_connections_is_of_all_workers_together() {
    let upstream = Raw::named("one");
    let gateway =
        gateway(Protocol::Http1, "workers: 4\n  max_connections: 6\n  max_connections_per_address: 6", &upstream);
    let mut held: Vec<_> = (0..6).map(|_| gateway.connect()).collect();
    for connection in &mut held {
        assert_eq!(connection.get("/").status, 200);
    }
    assert_eq!(gateway.connect().receive().status, 503);
}

/// Many clients that send nothing must not block others.
#[test]
fn clients_that_only_connect_hold_up_nobody() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        // Nothing closes the silent connections, so the others cannot be served after them.
        let settings = "workers: 1\n  timeouts: { head: 1h, idle: 1h }\n  max_connections_per_address: 1000";
        let gateway = gateway(protocol, settings, &upstream);
        let mut held: Vec<_> = (0..300).map(|_| TcpStream::connect(gateway.address).unwrap()).collect();
        for _ in 0..20 {
            assert_eq!(gateway.get("/").status, 200);
        }
        for silent in &mut held {
            silent.set_nonblocking(true).unwrap();
            let read = silent.read(&mut [0]).map_err(|error| error.kind());
            assert_eq!(read, Err(io::ErrorKind::WouldBlock), "a silent connection was closed");
        }
    });
}

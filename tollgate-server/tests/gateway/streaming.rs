//! Bodies of any length pass in constant memory, and each side is read as fast as the other is written.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use testkit::client::{Client, each_http1, each_protocol};
use testkit::gateway::site;
use testkit::upstream::Raw;
use testkit::wait::until;

const BODY_BYTES: u64 = 200 << 20;
/// Buffers of both sides, and what the allocator keeps.
const MAX_GROWTH_KIB: u64 = 40 << 10;
/// More than the kernel's buffers of both connections together.
const FAR: u64 = 64 << 20;

fn pour(stream: &mut TcpStream, bytes: u64, poured: &AtomicU64) -> std::io::Result<()> {
    let piece = vec![7; 64 << 10];
    let mut left = bytes;
    while left > 0 {
        let now = left.min(piece.len() as u64) as usize;
        stream.write_all(&piece[..now])?;
        left -= now as u64;
        poured.fetch_add(now as u64, Relaxed);
    }
    Ok(())
}

fn drink(stream: &mut TcpStream, bytes: u64, pause: Duration) -> u64 {
    let mut piece = vec![0; 64 << 10];
    let mut drunk = 0;
    while drunk < bytes {
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => break,
            Ok(read) => drunk += read as u64,
        }
        std::thread::sleep(pause);
    }
    drunk
}

/// Sends a part of a body.
fn upload(client: &mut Client, bytes: u64, poured: &AtomicU64) -> std::io::Result<()> {
    let piece = vec![7; 64 << 10];
    (0..bytes / piece.len() as u64).try_for_each(|_| {
        client.try_send(&piece)?;
        poured.fetch_add(piece.len() as u64, Relaxed);
        Ok(())
    })
}

/// Reads a part of a body.
fn download(client: &mut Client, bytes: u64) {
    for _ in 0..bytes >> 16 {
        client.body_bytes(1 << 16).unwrap();
    }
}

/// Returns an upstream that sends a long body, or reads one and returns its length.
fn upstream() -> Raw {
    Raw::start(|conversation| {
        while let Some(asked) = conversation.head() {
            if asked.head.starts_with("GET ") {
                conversation.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY_BYTES}\r\n\r\n"));
                if pour(&mut conversation.stream, BODY_BYTES, &AtomicU64::new(0)).is_err() {
                    return;
                }
            } else {
                let early = conversation.unread().len() as u64;
                let drunk = early + drink(&mut conversation.stream, BODY_BYTES - early, Duration::ZERO);
                let expected = drunk.to_string();
                conversation.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{expected}", expected.len()));
                return;
            }
        }
    })
}

#[test]
fn long_bodies_pass_both_ways_in_constant_memory() {
    each_protocol(|protocol| {
        let upstream = upstream();
        let gateway = protocol.start_before(&upstream.url());
        let mut client = gateway.client();
        client.send(format!("PUT /warm HTTP/1.1\r\nHost: h\r\nContent-Length: {BODY_BYTES}\r\n\r\n"));
        let before = gateway.peak_memory_kib();
        upload(&mut client, BODY_BYTES, &AtomicU64::new(0)).unwrap();
        assert_eq!(client.receive().text(), BODY_BYTES.to_string());
        let up = gateway.peak_memory_kib();
        let mut client = gateway.client();
        client.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        let head = client.receive_head().unwrap();
        assert_eq!(head.header("content-length"), Some(BODY_BYTES.to_string().as_str()));
        download(&mut client, BODY_BYTES);
        let down = gateway.peak_memory_kib();
        assert!(
            down.saturating_sub(before) < MAX_GROWTH_KIB,
            "KiB before {before}, after the upload {up}, after the download {down}"
        );
    });
}

#[test]
fn an_upstream_is_read_no_faster_than_the_client_reads() {
    each_protocol(|protocol| {
        let poured = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&poured);
        let upstream = Raw::start(move |conversation| {
            _ = conversation.request();
            conversation.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY_BYTES}\r\n\r\n"));
            _ = pour(&mut conversation.stream, BODY_BYTES, &counted);
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.client();
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        connection.receive_head().unwrap();
        let before = gateway.peak_memory_kib();
        std::thread::sleep(Duration::from_secs(1));
        let far = poured.load(Relaxed);
        assert!(far < FAR, "{far} bytes were taken from the upstream for a client that reads nothing");
        download(&mut connection, BODY_BYTES);
        assert!(gateway.peak_memory_kib().saturating_sub(before) < MAX_GROWTH_KIB);
    });
}

#[test]
fn a_client_is_read_no_faster_than_the_upstream_reads() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.head();
            std::thread::sleep(Duration::from_secs(2));
            let early = conversation.unread().len() as u64;
            drink(&mut conversation.stream, BODY_BYTES / 2 - early, Duration::ZERO);
            conversation.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok");
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut client = gateway.client();
        let poured = AtomicU64::new(0);
        client.send(format!("PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", BODY_BYTES / 2));
        std::thread::scope(|scope| {
            let uploading = scope.spawn(|| {
                upload(&mut client, BODY_BYTES / 2, &poured).unwrap();
                client.receive()
            });
            until("a request at the upstream", || upstream.accepted() == 1);
            std::thread::sleep(Duration::from_secs(1));
            let far = poured.load(Relaxed);
            assert!(far < FAR, "{far} bytes were taken from the client for an upstream that reads nothing");
            assert_eq!(uploading.join().unwrap().text(), "ok");
        });
    });
}

#[test]
fn parts_of_an_answer_are_passed_on_as_they_come() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.request();
            conversation
                .send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
            conversation.send("b\r\ndata: one\n\n\r\n");
            // The next part is sent only when the client has the first.
            while let Some(asked) = conversation.request() {
                assert!(asked.head.is_empty());
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.client();
        connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
        connection.receive_head().unwrap();
        assert_eq!(connection.body_bytes(11).unwrap(), b"data: one\n\n");
    });
}

/// Returns a body that differs at each place and for each name, so that missing, repeated and foreign bytes are found.
fn distinct_body(name: &str, bytes: usize) -> Vec<u8> {
    let line = |number: usize| format!("{name} {number:08}\n").into_bytes();
    (0..).flat_map(line).take(bytes).collect()
}

/// Returns an upstream that answers `/NAME/BYTES` with [`distinct_body`]. It sends only `cut` bytes of `/NAME/BYTES/cut`
/// and closes the connection.
fn distinct_upstream(cut: usize) -> Raw {
    Raw::start(move |conversation| {
        while let Some(asked) = conversation.request() {
            let mut parts = asked.head.split(['/', ' ']).filter(|part| !part.is_empty()).skip(1);
            let (Some(name), Some(Ok(bytes))) = (parts.next(), parts.next().map(str::parse)) else { return };
            let body = distinct_body(name, bytes);
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {bytes}\r\n\r\n");
            if parts.next() == Some("cut") {
                conversation.send([head.as_bytes(), &body[..cut]].concat());
                return;
            }
            if !conversation.send([head.as_bytes(), &body].concat()) {
                return;
            }
        }
    })
}

#[test]
fn long_bodies_arrive_unchanged() {
    const KIB: usize = 1 << 10;
    each_protocol(|protocol| {
        let upstream = distinct_upstream(0);
        let gateway = protocol.start_before(&upstream.url());
        let mut client = gateway.client();
        for bytes in [32 * KIB, 3000 * KIB, 100 * KIB + 1, 10, 64 * KIB, 36 * KIB - 1, 900 * KIB, 0, 40 * KIB] {
            let response = client.get(&format!("/a/{bytes}"));
            assert!(response.body == distinct_body("a", bytes), "{bytes} bytes over {}", protocol.name());
        }
    });
}

#[test]
fn a_long_body_for_a_client_that_reads_late_arrives_unchanged() {
    each_protocol(|protocol| {
        let upstream = distinct_upstream(0);
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut late = gateway.client();
        late.send("GET /late/3000000 HTTP/1.1\r\nHost: h\r\n\r\n");
        // Meanwhile the worker sends as much as the client's socket takes.
        let mut other = gateway.client();
        for _ in 0..20 {
            assert!(other.get("/other/50000").body == distinct_body("other", 50_000), "over {}", protocol.name());
        }
        assert!(late.receive().body == distinct_body("late", 3_000_000), "over {}", protocol.name());
    });
}

/// Long bodies of all clients of a worker pass the same pipe. Nothing of one client may reach another.
#[test]
fn bytes_for_a_client_that_has_left_reach_no_other() {
    each_http1(|protocol| {
        let has_left = Arc::new(AtomicBool::new(false));
        let is_over = Arc::new(AtomicBool::new(false));
        let (left, over) = (Arc::clone(&has_left), Arc::clone(&is_over));
        let upstream = Raw::start(move |conversation| {
            let Some(asked) = conversation.request() else { return };
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 500000\r\n\r\n");
            if asked.head.contains("/staying") {
                conversation.send(distinct_body("staying", 500_000));
                return;
            }
            let body = distinct_body("leaving", 500_000);
            conversation.send(&body[..100_000]);
            until("the end of the client", || left.load(Relaxed));
            conversation.send(&body[100_000..]);
            conversation.await_end();
            over.store(true, Relaxed);
        });
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut leaving = gateway.client();
        // The gateway does not see the end of a client that has sent more than it reads.
        leaving.send("GET /leaving HTTP/1.1\r\nHost: h\r\n\r\nGET /next HTTP/1.1\r\n");
        assert_eq!(leaving.receive_head().expect("a response").status, 200);
        leaving.body_bytes(50_000).expect("a part of the body");
        drop(leaving);
        has_left.store(true, Relaxed);
        until("the end of its request", || is_over.load(Relaxed));
        let response = gateway.client().get("/staying");
        assert!(response.body == distinct_body("staying", 500_000), "over {}", protocol.name());
    });
}

#[test]
fn a_long_body_that_ends_too_early_is_cut() {
    each_protocol(|protocol| {
        let upstream = distinct_upstream(200_000);
        let gateway = protocol.start_before(&upstream.url());
        let mut client = gateway.client();
        client.send("GET /a/400000/cut HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(client.receive_head().expect("a response").status, 200);
        assert!(client.body_bytes(400_000).is_err());
        assert_eq!(gateway.client().get("/a/100000").body.len(), 100_000);
    });
}

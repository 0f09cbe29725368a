//! Request bodies that arrive in pieces, break off, or meet an upstream that does not read them.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{iter, poll_fn, repeat};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use testkit::client::{each_http1, each_http2, each_protocol};
use testkit::gateway::{Gateway, per_user, site};
use testkit::upstream::{Raw, Served, Speaks, full};
use testkit::wait::{PATIENCE, until};

/// The lengths of bodies are announced, or the bodies are chunked.
const FRAMINGS: [&str; 2] = ["Content-Length: 12\r\n\r\nhello, world", CHUNKED];
const CHUNKED: &str =
    "Transfer-Encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n7\r\n, world\r\n0\r\nX-Check: 7\r\nX-Sum: 1\r\n\r\n";

/// Returns an upstream that responds with the body it got.
fn echoing() -> Raw {
    Raw::start(|conversation| {
        while let Some(asked) = conversation.request() {
            conversation.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", asked.body.len()));
            conversation.send(&asked.body);
        }
    })
}

#[test]
fn body_in_any_pieces_is_forwarded_and_the_next_request_follows() {
    each_protocol(|protocol| {
        let upstream = echoing();
        let gateway = protocol.start_before(&upstream.url());
        for framing in FRAMINGS {
            let request = format!("POST / HTTP/1.1\r\nHost: h\r\n{framing}");
            let sent = request.repeat(2);
            for cut in (1..sent.len()).step_by(3) {
                let mut connection = gateway.client();
                connection.send(&sent[..cut]);
                std::thread::sleep(Duration::from_millis(2));
                connection.send(&sent[cut..]);
                for _ in 0..2 {
                    assert_eq!(connection.receive().text(), "hello, world", "{framing} cut at {cut}");
                }
            }
            let mut connection = gateway.client();
            for byte in sent.as_bytes() {
                connection.send([*byte]);
            }
            for _ in 0..2 {
                assert_eq!(connection.receive().text(), "hello, world", "{framing} byte by byte");
            }
        }
        let seen = upstream.seen().concat().to_ascii_lowercase();
        assert!(!seen.contains("a=b") && !seen.contains("x-check"), "extensions and trailers do not pass: {seen}");
    });
}

/// The answer begins before the body has ended, and each part of it depends on the next part of the body.
#[test]
fn both_directions_move_at_once() {
    each_protocol(|protocol| {
        const FRAME: &[u8] = b"5\r\nhello\r\n";
        for (head, part) in [("Content-Length: 1000", &b"hello"[..]), ("Transfer-Encoding: chunked", FRAME)] {
            let upstream = Raw::start(move |conversation| {
                _ = conversation.head();
                conversation.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
                let mut received = conversation.unread().to_vec();
                let mut read = vec![0; part.len()];
                loop {
                    while received.len() >= part.len() {
                        assert_eq!(received.drain(..part.len()).collect::<Vec<_>>(), part);
                        conversation.send(FRAME);
                    }
                    match conversation.stream.read(&mut read) {
                        Ok(0) | Err(_) => return,
                        Ok(count) => received.extend_from_slice(&read[..count]),
                    }
                }
            });
            let gateway = protocol.start_before(&upstream.url());
            let mut connection = gateway.client();
            connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\n{head}\r\n\r\n"));
            assert_eq!(connection.receive_head().unwrap().status, 200, "before a byte of the body");
            for _ in 0..100 {
                connection.send(part);
                assert_eq!(connection.body_bytes(5).unwrap(), b"hello");
            }
        }
    });
}

#[test]
fn upload_goes_on_while_the_client_does_not_read_the_response() {
    const BYTES: usize = 4 << 20;
    each_protocol(|protocol| {
        for speaks in [Speaks::Http1, Speaks::Http2] {
            let (sender, received) = channel();
            let upstream = Served::start(speaks, move |request: http::Request<hyper::body::Incoming>| {
                let sender = sender.clone();
                tokio::spawn(async move {
                    let body = request.into_body().collect().await.map(|body| body.to_bytes().len());
                    _ = sender.send(body.unwrap_or(0));
                });
                let endless = repeat(()).map(|()| Ok(Frame::data(Bytes::from_static(&[7; 64 << 10]))));
                async { http::Response::new(BodyExt::boxed(StreamBody::new(endless))) }
            });
            let scheme = match speaks {
                Speaks::Http1 => "http",
                Speaks::Http2 => "h2c",
            };
            let gateway = protocol.start_before(&format!("{scheme}://{}", upstream.address));
            let mut connection = gateway.client();
            connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {BYTES}\r\n\r\n"));
            connection.send(vec![7; BYTES]);
            assert_eq!(received.recv_timeout(PATIENCE), Ok(BYTES), "{scheme}");
        }
    });
}

/// An upstream of HTTP/2 that does not read a body works on the request until its stream is reset. A client of HTTP/1 is
/// not read while the upstream does not read, so its end is not seen.
#[test]
fn client_that_leaves_ends_a_request_whose_body_nobody_reads() {
    /// More than the upstream's window, and less than the gateway buffers in addition.
    const BYTES: usize = (1 << 20) + (64 << 10);
    struct Work(Sender<()>);
    impl Drop for Work {
        fn drop(&mut self) {
            _ = self.0.send(());
        }
    }
    each_http2(|protocol| {
        let (sender, ended) = channel();
        let upstream = Served::start(Speaks::Http2, move |request: http::Request<hyper::body::Incoming>| {
            let held = Mutex::new((Work(sender.clone()), request.into_body()));
            let first = iter([Ok(Frame::data(Bytes::from_static(b"early")))]);
            let rest = poll_fn(move |_| {
                _ = &held;
                Poll::Pending
            });
            async { http::Response::new(BodyExt::boxed(StreamBody::new(first.chain(rest)))) }
        });
        let route = format!("{{ path: /**, timeout: 1h, upstream: 'h2c://{}' }}", upstream.address);
        let gateway = protocol.start(&site("", &[route], ""));
        let mut connection = gateway.client();
        connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n", 2 * BYTES));
        connection.send(vec![7; BYTES]);
        assert_eq!(connection.receive_head().unwrap().status, 200);
        connection.abandon();
        assert_eq!(ended.recv_timeout(PATIENCE), Ok(()));
    });
}

/// Returns an upstream that answers before it has read a body, and reads it no further.
fn answering_early() -> Raw {
    Raw::start(|conversation| {
        if conversation.head().is_some() {
            conversation.send("HTTP/1.1 413 Enough\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno");
            _ = conversation.stream.shutdown(Shutdown::Write);
            conversation.await_end();
        }
    })
}

#[test]
fn after_an_early_answer_the_rest_of_a_short_body_is_not_the_next_request() {
    each_http1(|protocol| {
        let upstream = answering_early();
        let routes = [
            "{ path: /next, respond: { body: next } }".to_owned(),
            format!("{{ path: /**, upstream: {} }}", upstream.url()),
        ];
        let gateway = protocol.start(&site("", &routes, ""));
        let hidden = "GET /hidden HTTP/1.1\r\nHost: h\r\n\r\n".repeat(1000);
        let size = hidden.len();
        for (head, rest) in [
            (format!("Content-Length: {size}"), hidden.clone()),
            ("Transfer-Encoding: chunked".to_owned(), format!("{size:x}\r\n{hidden}\r\n0\r\n\r\n")),
        ] {
            let mut connection = gateway.client();
            connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\n{head}\r\n\r\n"));
            let answer = connection.receive();
            assert_eq!((answer.status, answer.text()), (413, "no"), "{head}");
            connection.send(rest);
            assert_eq!(connection.get("/next").text(), "next", "{head}");
        }
        assert_eq!(upstream.requests(), 2);
    });
}

#[test]
fn after_an_early_answer_a_long_body_closes_the_connection() {
    each_http1(|protocol| {
        let upstream = answering_early();
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.client();
        connection.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000000\r\n\r\n");
        assert_eq!(connection.receive().status, 413);
        assert!(connection.is_closed());
    });
}

/// Sends bodies in pieces after the whole response has arrived. Each arrives before the next request.
fn upload_after_the_answer(gateway: &Gateway, bodies: &Receiver<String>) {
    let assert_received = |body| assert_eq!(bodies.recv_timeout(PATIENCE).as_deref(), Ok(body));
    let mut connection = gateway.client();
    connection.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 20\r\n\r\n");
    let answer = connection.receive();
    assert_eq!((answer.status, answer.text()), (200, "early"));
    for piece in ["hello", ", wor", "ld, t", "he end"] {
        connection.send(&piece[..5]);
    }
    assert_received("hello, world, the en");
    connection.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
    assert_eq!(connection.receive().text(), "early", "the connection goes on");
    connection.send("5\r\nhello\r\n");
    connection.send("0\r\n\r\n");
    assert_received("hello");
    assert_eq!(connection.ask("GET / HTTP/1.1\r\nHost: h\r\n\r\n").text(), "early");
    assert_received("");
}

#[test]
fn upload_goes_on_after_the_end_of_the_response() {
    each_protocol(|protocol| {
        let (received, bodies) = std::sync::mpsc::channel();
        let received = std::sync::Mutex::new(received);
        let upstream = Raw::start(move |conversation| {
            while let Some(mut asked) = conversation.head() {
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly");
                if conversation.body_of(&mut asked).is_some() {
                    _ = received.lock().unwrap().send(String::from_utf8_lossy(&asked.body).into_owned());
                }
            }
        });
        let gateway =
            protocol.start(&site("workers: 1", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""));
        upload_after_the_answer(&gateway, &bodies);
        assert_eq!(upstream.accepted(), 1, "the connection to the upstream is used again");
    });
}

#[test]
fn upload_to_http_2_goes_on_after_the_end_of_the_response() {
    each_protocol(|protocol| {
        let (received, bodies) = std::sync::mpsc::channel();
        let upstream = Served::start(Speaks::Http2, move |request: http::Request<hyper::body::Incoming>| {
            let received = received.clone();
            async move {
                tokio::spawn(async move {
                    if let Ok(body) = http_body_util::BodyExt::collect(request.into_body()).await {
                        _ = received.send(String::from_utf8_lossy(&body.to_bytes()).into_owned());
                    }
                });
                http::Response::new(full("early"))
            }
        });
        let gateway = protocol.start_before(&format!("h2c://{}", upstream.address));
        upload_after_the_answer(&gateway, &bodies);
    });
}

/// The response has arrived, so the client loses only its connection.
#[test]
fn upload_that_nobody_reads_after_the_response_ends_with_the_timeout_of_the_route() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.head();
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly");
            std::thread::sleep(Duration::from_secs(3600));
        });
        let careless = Served::start(Speaks::Http2, |request: http::Request<hyper::body::Incoming>| async {
            tokio::spawn(async move {
                let _unread = request;
                std::future::pending::<()>().await;
            });
            http::Response::new(full("early"))
        });
        // A connection of HTTP/2 loses only the stream.
        for (upstream, connections) in [(upstream.url(), 0), (format!("h2c://{}", careless.address), 1)] {
            let route = format!("{{ path: /**, timeout: 1s, upstream: '{upstream}' }}");
            let rules = format!("admin: {{ listen: 127.0.0.1:0 }}\n{}", site("", &[route], ""));
            let gateway = protocol.start(&rules);
            let mut connection = gateway.client();
            connection.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000000\r\n\r\n");
            assert_eq!(connection.receive().text(), "early", "{upstream}");
            // The gateway closes the connection, or resets the stream.
            let pouring = std::thread::spawn(move || while connection.try_send([7; 64 << 10]).is_ok() {});
            until(&format!("the gateway reads no more for {upstream}"), || pouring.is_finished());
            pouring.join().unwrap();
            gateway.await_metric("tollgate_buffered_bytes", 0);
            gateway.await_metric("tollgate_upstream_connections", connections);
        }
    });
}

/// A client that has sent a part of its body does not wait for `100 Continue`, whose bytes would become a part of the
/// response.
#[test]
fn continue_is_not_sent_once_the_body_has_begun_or_the_response_has() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(mut asked) = conversation.head() {
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nearly");
                _ = conversation.body_of(&mut asked);
                conversation.send("later");
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.client();
        connection.send("POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 10\r\n\r\nhello");
        let head = connection.receive_head().unwrap();
        assert_eq!((head.status, connection.body_bytes(5).unwrap()), (200, b"early".to_vec()));
        connection.send("world");
        assert_eq!(connection.body_bytes(5).unwrap(), b"later");
        assert_eq!(connection.get("/").text(), "earlylater");
    });
}

#[test]
fn body_that_breaks_off_is_400_and_has_no_end_at_the_upstream() {
    each_http1(|protocol| {
        let upstream = echoing();
        let gateway = protocol.start_before(&upstream.url());
        for framing in FRAMINGS {
            let mut connection = gateway.connect();
            connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\n{}", &framing[..framing.len() - 5]));
            connection.end_sending();
            let answer = connection.receive();
            assert_eq!((answer.status, answer.header("connection")), (400, Some("close")), "{framing}");
            assert!(answer.text().contains("broken_body"), "{}", answer.text());
            assert!(connection.is_closed());
        }
        assert!(!upstream.seen().concat().contains("\r\n0\r\n"));
        assert_eq!(gateway.get("/").status, 200, "the upstream is not to blame");
    });
}

#[test]
fn upstream_that_stops_reading_a_body_is_late() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.head();
            std::thread::sleep(Duration::from_secs(3600));
        });
        let route = format!("{{ path: /**, timeout: 1s, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], ""));
        for (head, chunk) in [("Content-Length: 1000000000", ""), ("Transfer-Encoding: chunked", "3b9aca00\r\n")] {
            let mut connection = gateway.client();
            connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\n{head}\r\n\r\n{chunk}"));
            while connection.try_send([7; 64 << 10]).is_ok() {}
            assert_eq!(connection.receive().status, 504, "{head}");
        }
    });
}

#[test]
fn client_that_waits_for_continue_gets_it_once_its_body_is_wanted() {
    each_http1(|protocol| {
        let upstream = echoing();
        let gateway =
            protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], &per_user(2)));
        for framing in FRAMINGS {
            let (head, body) = framing.split_once("\r\n\r\n").unwrap();
            let head =
                format!("POST / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\nExpect: 100-Continue\r\n{head}\r\n\r\n");
            let mut connection = gateway.client();
            assert_eq!(connection.ask(&head).status, 100, "{framing}");
            connection.send(body);
            assert_eq!(connection.receive().text(), "hello, world", "{framing}");
            assert_eq!(connection.get("/").status, 200, "the connection goes on");
        }
        let seen = upstream.seen().concat().to_ascii_lowercase();
        assert!(!seen.contains("expect:"), "{seen}");
        let mut connection = gateway.client();
        for expect in ["100-continue\r\nExpect: other", "other\r\nExpect: 100-continue", "other, 100-continue"] {
            let head = format!("POST / HTTP/1.1\r\nHost: h\r\nX-User-Id: bob{expect:.3}\r\nExpect: {expect}\r\n");
            let mut connection = gateway.client();
            assert_eq!(connection.ask(head + "Content-Length: 5\r\n\r\n").status, 100, "{expect}");
            connection.send("hello");
            assert_eq!(connection.receive().text(), "hello", "{expect}");
        }
        let refused = connection
            .ask("POST / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n");
        assert_eq!((refused.status, refused.header("connection")), (429, Some("close")), "the body may come or not");
        assert!(connection.is_closed());
    });
}

#[test]
fn slow_uploads_hold_no_buffers() {
    const UPLOADS: usize = 300;
    let upstream = Raw::start(|conversation| {
        _ = conversation.head();
        conversation.await_end();
    });
    let settings = "max_connections_per_address: 1000\n  timeouts: { body: 1h }";
    let route = format!("{{ path: /**, timeout: 1h, upstream: {} }}", upstream.url());
    let gateway = Gateway::start(&site(settings, &[route], ""));
    let head = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n";
    let hold = |uploads: usize| -> Vec<_> {
        let before = upstream.accepted();
        let begin = |number| {
            let mut connection = gateway.connect();
            connection.send(head.to_owned() + &"x".repeat(60_000));
            until("it is at the upstream", || upstream.accepted() > before + number);
            connection
        };
        (0..uploads).map(begin).collect()
    };
    // The allocator keeps some of what the first ones used.
    let _first = hold(UPLOADS / 2);
    let before = gateway.memory_kib();
    let _held = hold(UPLOADS);
    let grown = gateway.memory_kib().saturating_sub(before);
    assert!(grown < UPLOADS as u64 * 16, "{grown} KiB for {UPLOADS} uploads");
}

/// A generator of numbers that are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

/// Returns a request, and the body that its answer has to have, if the request reaches the upstream.
fn random_request(numbers: &mut Numbers) -> (Vec<u8>, Option<Vec<u8>>) {
    let is_forwarded = numbers.below(4) > 0;
    let length = numbers.below(if is_forwarded { 100_000 } else { 10_000 });
    let letter = b'a' + numbers.below(26) as u8;
    let mut body = vec![letter; length];
    let path = if is_forwarded { "/upstream" } else { "/nowhere" };
    let head = format!("PUT {path} HTTP/1.1\r\nHost: h\r\n");
    let bytes = match numbers.below(3) {
        0 => {
            body.clear();
            format!("{head}\r\n").into_bytes()
        }
        1 => [format!("{head}Content-Length: {length}\r\n\r\n").as_bytes(), &body].concat(),
        _ => {
            let mut bytes = format!("{head}Transfer-Encoding: chunked\r\n\r\n").into_bytes();
            let mut rest = &body[..];
            while !rest.is_empty() {
                let size = (1 + numbers.below(20_000)).min(rest.len());
                bytes.extend_from_slice(format!("{size:X};x={size}\r\n").as_bytes());
                bytes.extend_from_slice(&rest[..size]);
                bytes.extend_from_slice(b"\r\n");
                rest = &rest[size..];
            }
            bytes.extend_from_slice(b"0\r\nX-Sum: 1\r\n\r\n");
            bytes
        }
    };
    (bytes, is_forwarded.then_some(body))
}

#[test]
fn pipelined_requests_with_bodies_in_any_pieces_are_answered_in_order() {
    let upstream = echoing();
    let gateway = Gateway::start(&site("", &[format!("{{ path: /upstream, upstream: {} }}", upstream.url())], ""));
    for seed in 1..=20u64 {
        let mut numbers = Numbers(seed << 32 | 0x9e37_79b9);
        let requests: Vec<_> = (0..20).map(|_| random_request(&mut numbers)).collect();
        let bytes: Vec<u8> = requests.iter().flat_map(|(bytes, _)| bytes.iter().copied()).collect();
        let mut connection = gateway.connect();
        let mut tcp = connection.tcp();
        let writing = std::thread::spawn(move || {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let most = if numbers.below(3) == 0 { 100_000 } else { 100 };
                let size = (1 + numbers.below(most)).min(rest.len());
                tcp.write_all(&rest[..size]).unwrap();
                rest = &rest[size..];
            }
        });
        for (number, (_, wanted)) in requests.iter().enumerate() {
            let answer = connection.receive();
            match wanted {
                Some(body) => {
                    assert_eq!((answer.status, answer.body.len()), (200, body.len()), "seed {seed}, request {number}");
                    assert!(answer.body == *body, "seed {seed}, request {number}");
                }
                None => assert_eq!(answer.status, 404, "seed {seed}, request {number}"),
            }
        }
        writing.join().unwrap();
    }
}

#[test]
fn an_echoed_body_may_not_be_longer_than_the_maximum() {
    each_protocol(|protocol| {
        let gateway = protocol.start(&site("max_body: 10B", &["{ path: /**, upstream: echo }"], ""));
        let body = "x".repeat(1000);
        let chunked = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n";
        for (pieces, status) in [
            ([chunked.to_owned(), "5\r\nhello\r\n0\r\n\r\n".to_owned()], 200),
            ([chunked.to_owned(), format!("3e8\r\n{body}\r\n0\r\n\r\n")], 413),
            ([format!("{chunked}3e8\r\n{body}\r\n0\r\n\r\n"), String::new()], 413),
            ([chunked.to_owned(), "zz\r\n".to_owned()], 400),
        ] {
            // An invalid chunk, which only HTTP/1 has.
            if protocol.is_http2() && status == 400 {
                continue;
            }
            let mut connection = gateway.client();
            for piece in &pieces {
                // It may have responded, and read no more.
                _ = connection.try_send(piece);
            }
            assert_eq!(connection.receive().status, status, "{pieces:?}");
        }
        // The part that is too long for `max_body` is too long for an echo, too.
        let gateway = protocol.start(&site("max_body: 10KiB", &["{ path: /**, upstream: echo }"], ""));
        let mut connection = gateway.client();
        _ = connection.try_send(format!("{chunked}2000\r\n{}\r\n", "x".repeat(0x2000)));
        _ = connection.try_send(format!("f000\r\n{}\r\n0\r\n\r\n", "x".repeat(0xf000)));
        assert_eq!(connection.receive().status, 413);
    });
}

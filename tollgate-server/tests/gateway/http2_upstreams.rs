//! Upstreams with HTTP/2 that close connections, stop responding, or end responses late.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use testkit::client::{each_http1, each_protocol};
use testkit::gateway::{Gateway, site};
use testkit::upstream::{Conversation, Raw, full, runtime};
use testkit::wait::{PATIENCE, until, within};

use crate::http2::{connect, get};
use crate::http2_deadlines::Frames;

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// `:status: 200`
const OK: &[u8] = &[0x88];

/// A frame from the gateway.
pub(crate) struct Frame {
    pub(crate) kind: u8,
    flags: u8,
    stream: u32,
}

/// Reads the preface of the gateway, and sends the settings of the upstream.
fn begin(conversation: &mut Conversation) -> Option<()> {
    conversation.stream.read_exact(&mut [0; 24]).ok()?;
    send(conversation, SETTINGS, 0, 0, &[])
}

fn send(conversation: &mut Conversation, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Option<()> {
    conversation.stream.write_all(&Frames::frame(stream, kind, flags, payload)).ok()
}

/// Reads a frame. Pings are answered.
pub(crate) fn next(conversation: &mut Conversation) -> Option<Frame> {
    loop {
        let mut head = [0; 9];
        conversation.stream.read_exact(&mut head).ok()?;
        let [a, b, c, kind, flags, d, e, f, g] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        conversation.stream.read_exact(&mut payload).ok()?;
        if (kind, flags) == (PING, 0) {
            send(conversation, PING, ACK, 0, &payload)?;
            continue;
        }
        return Some(Frame { kind, flags, stream: u32::from_be_bytes([d, e, f, g]) });
    }
}

/// Responds to every request.
fn respond_to_all(conversation: &mut Conversation) -> Option<()> {
    loop {
        let frame = next(conversation)?;
        if frame.kind == HEADERS {
            send(conversation, HEADERS, END_HEADERS | END_STREAM, frame.stream, OK)?;
        }
    }
}

#[test]
fn a_connection_that_an_upstream_of_http_2_lost_is_made_anew() {
    each_protocol(|protocol| {
        let (sender, closed) = mpsc::channel();
        // It ends each connection after one response, without GOAWAY.
        let upstream = Raw::start(move |conversation| {
            _ = begin(conversation);
            while let Some(frame) = next(conversation) {
                if frame.kind == HEADERS {
                    _ = send(conversation, HEADERS, END_HEADERS | END_STREAM, frame.stream, OK);
                    break;
                }
            }
            _ = conversation.stream.shutdown(Shutdown::Write);
            while next(conversation).is_some() {}
            _ = sender.send(());
        });
        let route = format!("{{ path: /**, retries: 0, upstream: 'h2c://{}' }}", upstream.address);
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        for number in 1..=3 {
            assert_eq!((gateway.get("/").status, upstream.accepted()), (200, number));
            // Otherwise the next request could be sent on this connection.
            closed.recv_timeout(PATIENCE).expect("the gateway closes the connection, too");
        }
    });
}

/// nginx closes a connection after 1,000 requests, and those that are on their way then were not processed.
#[test]
fn requests_that_meet_a_goaway_are_sent_again_and_are_no_failures_of_the_upstream() {
    const REQUESTS: usize = 20;
    for method in ["GET", "POST"] {
        let upstream = Raw::start(|conversation| {
            let mut requests = 0;
            _ = begin(conversation);
            while conversation.number == 0 && requests < REQUESTS {
                let Some(frame) = next(conversation) else { return };
                requests += usize::from(frame.kind == HEADERS);
            }
            if requests > 0 {
                // Nothing was processed, and the reason is NO_ERROR.
                _ = send(conversation, GOAWAY, 0, 0, &[0; 8]);
                while next(conversation).is_some() {}
            }
            _ = respond_to_all(conversation);
        });
        let route = format!(
            "{{ name: all, path: /**, upstream: 'h2c://{}', eject: {{ after: 2, for: 1h }} }}",
            upstream.address
        );
        let gateway = Gateway::with_admin(&site("workers: 1", &[route], ""));
        runtime().block_on(async {
            let sender = connect(gateway.address).await;
            let asked = (0..REQUESTS).map(|_| {
                let (mut sender, mut request) = (sender.clone(), get(&gateway, "/").body(full("")).unwrap());
                *request.method_mut() = method.parse().unwrap();
                async move { sender.send_request(request).await.unwrap().status().as_u16() }
            });
            let statuses = futures_util::future::join_all(asked).await;
            assert_eq!(statuses, [200; REQUESTS], "{method}");
        });
        let failures = |kind: &str| format!("tollgate_upstream_failures_total{{route=\"all\",kind=\"{kind}\"}}");
        gateway.await_metric(&failures("not_processed"), REQUESTS as u64);
        gateway.await_metric(&failures("disconnected"), 0);
        assert_eq!(gateway.metric("tollgate_route_upstreams_up{route=\"all\"}"), Some(1.0), "it is not ejected");
    }
}

/// Each request is over before a ping is due that would follow its start.
#[test]
fn connection_that_is_dead_is_given_up_although_requests_are_short_and_rare() {
    let upstream = Raw::start(|conversation| {
        _ = begin(conversation);
        if conversation.number > 0 {
            _ = respond_to_all(conversation);
            return;
        }
        while let Some(frame) = next(conversation) {
            if frame.kind == HEADERS {
                _ = send(conversation, HEADERS, END_HEADERS | END_STREAM, frame.stream, OK);
                // From now on nothing is read, as if the network dropped it.
                std::thread::sleep(Duration::from_secs(3600));
            }
        }
    });
    let route = format!("{{ path: /**, timeout: 2s, retries: 0, upstream: 'h2c://{}' }}", upstream.address);
    let gateway = Gateway::start(&site("workers: 1", &[route], ""));
    assert_eq!(gateway.get("/").status, 200);
    within(Duration::from_secs(90), "another connection", || gateway.get("/").status == 200);
    assert_eq!(upstream.accepted(), 2);
}

/// The upstream responds early, and says nothing more until it has the whole body. Meanwhile it waits for the client.
#[test]
fn upload_after_the_response_began_may_take_longer_than_the_timeout() {
    each_protocol(|protocol| {
        for is_http2 in [true, false] {
            let upstream = Raw::start(move |conversation| {
                if !is_http2 {
                    _ = conversation.head();
                    conversation.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
                    while !conversation.unread().ends_with(b"0\r\n\r\n") && conversation.more() {}
                    conversation.send("2\r\nok\r\n0\r\n\r\n");
                    return conversation.await_end();
                }
                _ = begin(conversation);
                while let Some(frame) = next(conversation) {
                    let is_over = matches!(frame.kind, DATA | HEADERS) && frame.flags & END_STREAM != 0;
                    if frame.kind == HEADERS {
                        _ = send(conversation, HEADERS, END_HEADERS, frame.stream, OK);
                    }
                    if is_over {
                        _ = send(conversation, DATA, END_STREAM, frame.stream, b"ok");
                    }
                }
            });
            let scheme = if is_http2 { "h2c" } else { "http" };
            let route = format!("{{ path: /**, timeout: 2s, upstream: '{scheme}://{}' }}", upstream.address);
            let gateway = protocol.start(&site("", &[route], ""));
            let mut client = gateway.client();
            client.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
            for _ in 0..10 {
                client.send("1\r\nx\r\n");
                std::thread::sleep(Duration::from_millis(500));
            }
            client.send("0\r\n\r\n");
            assert_eq!(client.receive().text(), "ok", "{scheme}");
        }
    });
}

/// The client has the whole response before the upstream ends its stream. A reset could stop a handler that still works.
#[test]
fn response_that_ends_late_is_complete_and_its_stream_is_not_reset() {
    each_http1(|protocol| {
        for (method, length) in [("GET", "5"), ("HEAD", "5"), ("GET", "0")] {
            let resets = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&resets);
            let upstream = Raw::start(move |conversation| {
                _ = begin(conversation);
                while let Some(frame) = next(conversation) {
                    if frame.kind == RST_STREAM {
                        counted.fetch_add(1, Relaxed);
                    }
                    if frame.kind != HEADERS {
                        continue;
                    }
                    // content-length, without the index of the table
                    let head = [OK, &[0x0f, 0x0d, 1], length.as_bytes()].concat();
                    _ = send(conversation, HEADERS, END_HEADERS, frame.stream, &head);
                    if (method, length) == ("GET", "5") {
                        _ = send(conversation, DATA, 0, frame.stream, b"hello");
                    }
                    std::thread::sleep(Duration::from_millis(500));
                    _ = send(conversation, DATA, END_STREAM, frame.stream, b"");
                }
            });
            let route = format!("{{ path: /**, upstream: 'h2c://{}' }}", upstream.address);
            let gateway = protocol.start(&site("workers: 1", &[route], ""));
            // The last request comes after what was sent for the others.
            for _ in 0..3 {
                let mut client = gateway.client();
                client.send(format!("{method} / HTTP/1.1\r\nHost: h\r\n\r\n"));
                let answer = if method == "HEAD" { client.receive_head().unwrap() } else { client.receive() };
                assert_eq!((answer.status, answer.header("content-length")), (200, Some(length)), "{method}");
            }
            assert_eq!((resets.load(Relaxed), upstream.accepted()), (0, 1), "{method} {length}");
        }
    });
}

#[test]
fn one_of_equal_lengths_of_an_http_2_upstream_is_forwarded() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = begin(conversation);
            while let Some(frame) = next(conversation) {
                if frame.kind == HEADERS {
                    let length = [0x0f, 0x0d, 1, b'2'];
                    let head = [OK, &length, &length].concat();
                    _ = send(conversation, HEADERS, END_HEADERS, frame.stream, &head);
                    _ = send(conversation, DATA, END_STREAM, frame.stream, b"ok");
                }
            }
        });
        let gateway = protocol.start_before(&format!("h2c://{}", upstream.address));
        let answer = gateway.get("/");
        let lengths = answer.headers.iter().filter(|(name, _)| name.eq_ignore_ascii_case("content-length")).count();
        assert_eq!((answer.text(), lengths), ("ok", 1));
    });
}

/// An upstream may close a connection on which it gets many short frames, with the requests of other clients.
#[test]
fn short_frames_of_uploads_are_joined() {
    const FRAMES: usize = 3000;
    let received = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&received);
    let upstream = Raw::start(move |conversation| {
        _ = begin(conversation);
        while let Some(frame) = next(conversation) {
            counted.fetch_add(usize::from(frame.kind == DATA), Relaxed);
            if frame.kind == DATA && frame.flags & END_STREAM != 0 {
                _ = send(conversation, HEADERS, END_HEADERS | END_STREAM, frame.stream, OK);
            }
        }
    });
    let gateway = Gateway::before(&format!("h2c://{}", upstream.address));
    let mut frames = Frames::to(&gateway);
    // POST http://h/.
    let mut sent = Frames::frame(1, HEADERS, END_HEADERS, &[0x83, 0x86, 0x84, 0x41, 1, b'h']);
    for number in 1..=FRAMES {
        sent.extend(Frames::frame(1, DATA, u8::from(number == FRAMES), b"x"));
    }
    frames.send_bytes(&sent).unwrap();
    until("the end of the upload", || upstream.accepted() == 1 && received.load(Relaxed) > 0);
    until("the response", || frames.next().is_some_and(|(kind, ..)| kind == HEADERS));
    assert!(received.load(Relaxed) < FRAMES / 4, "{}", received.load(Relaxed));
}

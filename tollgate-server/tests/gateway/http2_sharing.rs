//! Many requests on one connection: none may block the others.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testkit::gateway::{Gateway, site};
use testkit::upstream::{AnyBody, Raw, Served, Speaks, accepting, full, runtime};
use testkit::wait::{PATIENCE, until, wait_until};
use tokio::time::timeout;

use crate::http2::{connect, get};
use crate::http2_deadlines::Frames;
use crate::http2_upstreams::{self, DATA, HEADERS};

/// Returns an endless body.
pub(crate) fn endless() -> AnyBody {
    repeated(&[7; 16 << 10], &Arc::default())
}

/// Returns an endless body of frames, and counts those that were taken.
fn repeated(frame: &'static [u8], taken: &Arc<AtomicUsize>) -> AnyBody {
    let taken = Arc::clone(taken);
    let piece = move || {
        taken.fetch_add(1, Relaxed);
        Ok(Frame::data(Bytes::from_static(frame)))
    };
    BodyExt::boxed(StreamBody::new(futures_util::stream::repeat_with(piece)))
}

/// Waits until the gateway takes no more of endless bodies that nobody reads. It must hold little of them, although it has
/// taken at least `least` frames.
#[track_caller]
fn assert_holds_little(gateway: &Gateway, before_kib: u64, (taken, least): (&AtomicUsize, usize), most_kib: u64) {
    let mut last = (0, 0);
    until("the end of what the gateway takes", || {
        let held = gateway.memory_kib().saturating_sub(before_kib);
        assert!(held < most_kib, "{held} KiB");
        let now = taken.load(Relaxed);
        last = if now == last.0 { (now, last.1 + 1) } else { (now, 0) };
        // One look takes five milliseconds.
        now >= least && last.1 >= 200
    });
}

#[test]
fn clients_that_do_not_read_hold_up_nobody_at_an_upstream_of_http_2() {
    let upstream = Served::start(Speaks::Http2, |request| async move {
        Response::new(if request.uri().path() == "/endless" { endless() } else { full(vec![7; 100_000]) })
    });
    let route = format!("{{ path: /**, upstream: 'h2c://{}' }}", upstream.address);
    let gateway = Gateway::start(&site("workers: 1", &[route], ""));
    let mut stuck: Vec<_> = (0..20).map(|_| gateway.connect()).collect();
    for connection in &mut stuck {
        connection.send("GET /endless HTTP/1.1\r\nHost: h\r\n\r\n");
        assert_eq!(connection.receive_head().unwrap().status, 200);
    }
    // Until all buffers between client and upstream are full.
    std::thread::sleep(Duration::from_secs(2));
    for _ in 0..5 {
        assert_eq!(gateway.get("/short").body.len(), 100_000);
    }
    assert_eq!(upstream.accepted(), 1, "on the same connection");
}

#[test]
fn uploads_that_an_upstream_does_not_read_hold_up_no_others_of_the_client() {
    // It never reads the body, beyond the system's buffers.
    let upstream = Raw::start(|conversation| {
        let Some(asked) = conversation.head() else { return };
        if asked.head.contains("/stuck") {
            std::thread::sleep(Duration::from_secs(3600));
            return;
        }
        let length = asked.values("content-length")[0].parse().unwrap();
        while conversation.unread().len() < length && conversation.more() {}
        conversation.send("HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
    });
    // Nothing ends the uploads before the test is over.
    let route = format!("{{ path: /**, timeout: 1h, upstream: {} }}", upstream.url());
    let gateway = Gateway::start(&site("timeouts: { body: 1h }", &[route], ""));
    runtime().block_on(async {
        let sender = connect(gateway.address).await;
        for _ in 0..20 {
            let mut sender = sender.clone();
            let request = Request::put(format!("http://{}/stuck", gateway.address)).body(endless()).unwrap();
            tokio::spawn(async move { sender.send_request(request).await });
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        for _ in 0..5 {
            let uri = format!("http://{}/free", gateway.address);
            let request = Request::put(uri).body(full(vec![7; 100_000])).unwrap();
            let answered = timeout(PATIENCE, sender.clone().send_request(request)).await;
            assert_eq!(answered.expect("in time").unwrap().status(), 200);
        }
    });
}

/// The host is the client's, whatever the protocol of the first attempt was.
#[test]
fn a_second_try_asks_for_the_same_host() {
    let broken = Raw::start(|conversation| {
        // Sends its settings, and disconnects on a request: on anything longer than the gateway's settings.
        conversation.send([0, 0, 0, 4, 0, 0, 0, 0, 0]);
        while conversation.unread().len() < 160 && conversation.more() {}
    });
    let good = Raw::named("good");
    let route = format!(
        "{{ path: /**, balance: round_robin, upstream: ['h2c://{}', '{}'], eject: {{ after: 1000, for: 1s }} }}",
        broken.address,
        good.url()
    );
    let gateway = Gateway::start(&site("workers: 1", &[route], ""));
    for _ in 0..4 {
        let answer = gateway.connect().ask("GET /a HTTP/1.1\r\nHost: shop.example.com\r\n\r\n");
        assert_eq!(answer.status, 200);
        let seen = answer.text().to_ascii_lowercase();
        assert!(seen.starts_with("get /a http/1.1\r\n"), "{seen}");
        assert!(seen.contains("\r\nhost: shop.example.com\r\n"), "{seen}");
    }
    assert!(broken.accepted() > 0, "it was tried");
}

/// Returns an HTTP/2 upstream that accepts this many concurrent requests on a connection.
fn narrow(streams: u32, takes: Duration) -> (std::net::SocketAddr, Arc<AtomicUsize>) {
    accepting(move |stream| async move {
        let service = hyper::service::service_fn(move |_| async move {
            tokio::time::sleep(takes).await;
            Ok::<_, std::convert::Infallible>(Response::new(full("ok")))
        });
        let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        builder.max_concurrent_streams(streams);
        _ = builder.serve_connection(TokioIo::new(stream), service).await;
    })
}

#[test]
fn more_requests_than_a_connection_takes_go_over_another() {
    let (address, accepted) = narrow(10, Duration::from_secs(2));
    let route = format!("{{ path: /**, timeout: 30s, retries: 0, upstream: 'h2c://{address}' }}");
    let gateway = Gateway::start(&site("workers: 1", &[route], ""));
    runtime().block_on(async {
        let sender = connect(gateway.address).await;
        let asked = (0..50).map(|_| {
            let (mut sender, request) = (sender.clone(), get(&gateway, "/").body(full("")).unwrap());
            async move { sender.send_request(request).await.unwrap().status().as_u16() }
        });
        let statuses = futures_util::future::join_all(asked).await;
        assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    });
    assert!((2..=10).contains(&accepted.load(Relaxed)), "{accepted:?}");
    assert_eq!(gateway.get("/").status, 200);
}

/// Returns an HTTP/2 upstream that accepts one request at a time on a connection, does not read uploads, and responds
/// with the number of connections before this one.
fn careless() -> (std::net::SocketAddr, Arc<AtomicUsize>) {
    let connections = Arc::new(AtomicUsize::new(0));
    accepting(move |stream| {
        let number = connections.fetch_add(1, Relaxed);
        async move {
            let service = hyper::service::service_fn(move |request: Request<hyper::body::Incoming>| async move {
                if request.method() == http::Method::POST {
                    tokio::spawn(async move {
                        let _unread = request;
                        std::future::pending::<()>().await;
                    });
                }
                Ok::<_, std::convert::Infallible>(Response::new(full(number.to_string())))
            });
            let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            builder.max_concurrent_streams(1);
            _ = builder.serve_connection(TokioIo::new(stream), service).await;
        }
    })
}

/// Its stream is open until the timeout of the route, so another request needs another connection. Then the stream is
/// reset, and the first connection has room again.
#[test]
fn upload_that_nobody_reads_after_the_response_loses_its_stream() {
    for has_http2_client in [false, true] {
        let (address, accepted) = careless();
        let route =
            format!("{{ path: /**, timeout: 10s, connect_timeout: 30s, retries: 0, upstream: 'h2c://{address}' }}");
        let gateway = Gateway::with_admin(&site("workers: 1", &[route], ""));
        let mut connection = gateway.connect();
        if has_http2_client {
            runtime().block_on(async {
                let request = Request::post(format!("http://{}/", gateway.address)).body(endless()).unwrap();
                let answered = timeout(PATIENCE, connect(gateway.address).await.send_request(request)).await;
                let body = answered.expect("in time").unwrap().into_body();
                assert_eq!(timeout(PATIENCE, body.collect()).await.expect("in time").unwrap().to_bytes(), "0");
            });
        } else {
            connection.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000000\r\n\r\n");
            assert_eq!(connection.receive().text(), "0");
            let mut tcp = connection.tcp();
            std::thread::spawn(move || while tcp.write_all(&[7; 64 << 10]).is_ok() {});
        }
        assert_eq!(gateway.get("/").text(), "1");
        wait_until(|| (gateway.get("/").text() == "0").then_some(())).expect("the first connection is used again");
        assert_eq!(accepted.load(Relaxed), 2);
    }
}

#[test]
fn a_head_of_some_length_passes_from_an_upstream_of_http_2() {
    let upstream = Served::start(Speaks::Http2, |_| async {
        let mut response = Response::new(full("ok"));
        response.headers_mut().insert("x-long", "x".repeat(40 << 10).parse().unwrap());
        response
    });
    let gateway = Gateway::before(&format!("h2c://{}", upstream.address));
    let answer = gateway.get("/");
    assert_eq!((answer.status, answer.header("x-long").map(str::len)), (200, Some(40 << 10)));
}

/// A client that accepts everything at once and reads nothing.
#[test]
fn one_connection_cannot_hold_much() {
    let [headers, settings, window_update] = [1, 4, 8];
    let taken = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&taken);
    let upstream =
        Served::start(Speaks::Http1, move |_| std::future::ready(Response::new(repeated(&[7; 16 << 10], &counted))));
    let route = format!("{{ path: /**, upstream: 'http://{}' }}", upstream.address);
    let gateway = Gateway::start(&site("workers: 1", &[route], ""));
    let before = gateway.memory_kib();
    let mut frames = Frames::to(&gateway);
    frames.send_on(0, settings, 0, &[0, 4, 0x7f, 0xff, 0xff, 0xff]).unwrap();
    frames.send_on(0, window_update, 0, &[0x7f, 0, 0, 0]).unwrap();
    for number in 0..250 {
        // GET http://h/.
        frames.send_on(2 * number + 1, headers, 0x5, &[0x82, 0x86, 0x84, 0x41, 1, b'h']).unwrap();
    }
    until("responses of many upstream connections", || upstream.accepted() >= 50);
    // Much more than the heads of all responses.
    until("bodies at the client", || frames.has_arrived(32 << 10));
    assert_holds_little(&gateway, before, (&taken, 50 * 4), 40 << 10);
}

/// The same the other way round: an upstream that accepts everything at once, and reads nothing once it has all heads and
/// a part of the bodies.
#[test]
fn uploads_that_an_upstream_of_http_2_does_not_read_hold_little() {
    const UPLOADS: usize = 100;
    const PARTS: usize = 200;
    let (requests, parts) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (counted, counted_parts) = (Arc::clone(&requests), Arc::clone(&parts));
    let upstream = Raw::start(move |conversation| {
        // Maximum windows, for streams and for the connection.
        conversation.send([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0x7f, 0xff, 0xff, 0xff]);
        conversation.send([0, 0, 4, 8, 0, 0, 0, 0, 0, 0x7f, 0, 0, 0]);
        // It reads the preface, and frames until every request is there.
        _ = conversation.stream.read_exact(&mut [0; 24]);
        while counted.load(Relaxed) < UPLOADS || counted_parts.load(Relaxed) < PARTS {
            let Some(frame) = http2_upstreams::next(conversation) else { return };
            counted.fetch_add(usize::from(frame.kind == HEADERS), Relaxed);
            counted_parts.fetch_add(usize::from(frame.kind == DATA), Relaxed);
        }
        std::thread::sleep(Duration::from_secs(3600));
    });
    let route = format!("{{ path: /**, upstream: 'h2c://{}' }}", upstream.address);
    let gateway = Gateway::start(&site("workers: 1", &[route], ""));
    let before = gateway.memory_kib();
    let taken = Arc::new(AtomicUsize::new(0));
    runtime().block_on(async {
        let sender = connect(gateway.address).await;
        for _ in 0..UPLOADS {
            let mut sender = sender.clone();
            let body = repeated(&[7; 16 << 10], &taken);
            let request = Request::put(format!("http://{}/", gateway.address)).body(body).unwrap();
            tokio::spawn(async move { sender.send_request(request).await });
        }
    });
    until("all requests and a part of their bodies at the upstream", || {
        requests.load(Relaxed) == UPLOADS && parts.load(Relaxed) >= PARTS
    });
    assert_holds_little(&gateway, before, (&taken, UPLOADS), 56 << 10);
}

/// A library needs memory for each frame, however short it is.
#[test]
fn short_frames_of_responses_that_nobody_reads_hold_little() {
    const REQUESTS: u32 = 30;
    let [headers, settings] = [1, 4];
    let (requests, taken) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicUsize::new(0)));
    let (counted, counted_frames) = (Arc::clone(&requests), Arc::clone(&taken));
    let upstream = Served::start(Speaks::Http2, move |_| {
        counted.fetch_add(1, Relaxed);
        std::future::ready(Response::new(repeated(&[7; 16], &counted_frames)))
    });
    let route = format!("{{ path: /**, upstream: 'h2c://{}' }}", upstream.address);
    let gateway = Gateway::start(&site("workers: 1", &[route], ""));
    let before = gateway.memory_kib();
    let mut frames = Frames::to(&gateway);
    // Each stream has a window of one byte.
    frames.send_on(0, settings, 0, &[0, 4, 0, 0, 0, 1]).unwrap();
    for number in 0..REQUESTS {
        // GET http://h/.
        frames.send_on(2 * number + 1, headers, 0x5, &[0x82, 0x86, 0x84, 0x41, 1, b'h']).unwrap();
    }
    until("all requests at the upstream", || requests.load(Relaxed) == REQUESTS);
    // The windows of all streams, which the gateway announces, hold this many.
    assert_holds_little(&gateway, before, (&taken, REQUESTS as usize * 1000), 40 << 10);
}

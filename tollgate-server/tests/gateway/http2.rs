//! HTTP/2 without TLS, on either side and on both.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testkit::client::{Protocol, each_http2, each_protocol};
use testkit::gateway::{Gateway, per_user, site};
use testkit::upstream::{AnyBody, Raw, Served, Speaks, full, runtime};
use tokio::io::{AsyncRead, AsyncWrite};

pub(crate) type Sender = SendRequest<AnyBody>;

pub(crate) async fn connect(address: SocketAddr) -> Sender {
    connect_over(Protocol::Http2, address).await
}

/// Connects with HTTP/2 over this protocol, with or without TLS.
pub(crate) async fn connect_over(protocol: Protocol, address: SocketAddr) -> Sender {
    speak(protocol.open(address).await.unwrap()).await
}

/// Speaks HTTP/2 over an open connection.
pub(crate) async fn speak(stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static) -> Sender {
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

pub(crate) fn get(gateway: &Gateway, path: &str) -> http::request::Builder {
    Request::get(format!("{}://{}{path}", gateway.protocol.scheme(), gateway.address))
}

/// Returns the status, the body and the trailers of a response.
pub(crate) async fn whole(response: Response<Incoming>) -> (u16, Bytes, HeaderMap) {
    let status = response.status().as_u16();
    let collected = response.into_body().collect().await.unwrap();
    let trailers = collected.trailers().cloned().unwrap_or_default();
    (status, collected.to_bytes(), trailers)
}

/// Returns a body of data and trailers.
pub(crate) fn with_trailers(data: Bytes, trailers: &[(&'static str, &'static str)]) -> AnyBody {
    let trailers: HeaderMap = trailers
        .iter()
        .map(|(name, value)| (http::HeaderName::from_static(name), HeaderValue::from_static(value)))
        .collect();
    let frames = [Ok(Frame::data(data)), Ok(Frame::trailers(trailers))];
    BodyExt::boxed(StreamBody::new(futures_util::stream::iter(frames)))
}

/// Responds as a gRPC server: with the request body, and a status in the trailers.
async fn grpc(request: Request<Incoming>) -> Response<AnyBody> {
    assert_eq!(request.version(), http::Version::HTTP_2);
    assert_eq!(request.headers()["te"], "trailers");
    let collected = request.into_body().collect().await.unwrap();
    let asked = collected.trailers().map(|trailers| trailers["x-asked"].clone());
    let mut response =
        Response::new(with_trailers(collected.to_bytes(), &[("grpc-status", "0"), ("grpc-message", "fine")]));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    if let Some(asked) = asked {
        response.headers_mut().insert("x-asked", asked);
    }
    response
}

#[test]
fn a_call_with_trailers_passes_from_http_2_to_http_2() {
    let upstream = Served::start(Speaks::Http2, grpc);
    let gateway = Gateway::start(&site(
        "workers: 1",
        &[format!("{{ path: /**, upstream: 'h2c://{}' }}", upstream.address)],
        &per_user(3),
    ));
    runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        for number in 0..4 {
            let request = Request::post(format!("http://{}/pkg.Service/Call", gateway.address))
                .header("content-type", "application/grpc")
                .header("te", "trailers")
                .header("x-user-id", "ann")
                .body(with_trailers(Bytes::from_static(b"\0\0\0\0\x05hello"), &[("x-asked", "yes")]))
                .unwrap();
            let response = sender.send_request(request).await.unwrap();
            if number == 3 {
                // gRPC over HTTP/2: a call always ends with 200 and a status.
                assert_eq!(
                    (response.status().as_u16(), &response.headers()["grpc-status"]),
                    (200, &"8".parse().unwrap())
                );
                continue;
            }
            assert_eq!(response.headers()["x-asked"], "yes");
            let (status, body, trailers) = whole(response).await;
            assert_eq!((status, &body[..]), (200, &b"\0\0\0\0\x05hello"[..]));
            assert_eq!(
                (&trailers["grpc-status"], &trailers["grpc-message"]),
                (&"0".parse().unwrap(), &"fine".parse().unwrap())
            );
        }
    });
    assert_eq!(upstream.accepted(), 1, "calls share a connection");
}

#[test]
fn a_client_of_http_2_reaches_an_upstream_of_http_1() {
    each_http2(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        let mut client = gateway.client();
        let answer = client.ask("GET /a?b=c HTTP/1.1\r\nHost: shop.example\r\nCookie: a=1\r\nCookie: b=2\r\n\r\n");
        let seen = answer.text().to_ascii_lowercase();
        assert_eq!(answer.status, 200);
        assert!(seen.starts_with("get /a?b=c http/1.1\r\n"), "{seen}");
        assert!(seen.contains("\r\nhost: shop.example\r\n"), "{seen}");
        assert!(seen.contains("\r\ncookie: a=1; b=2\r\n"), "{seen}");
        assert!(!seen.contains("transfer-encoding") && !seen.contains("content-length"), "{seen}");

        let body = "x".repeat(300_000);
        let answer = client.ask(format!("PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 300000\r\n\r\n{body}"));
        assert_eq!(answer.status, 200);
        assert!(answer.text().contains("content-length: 300000"));
    });
}

#[test]
fn clients_of_every_protocol_reach_an_upstream_of_http_2() {
    each_protocol(|protocol| {
        let upstream = Served::start(Speaks::Http2, |request| async move {
            let expected = format!("{} {:?} {}", request.method(), request.version(), request.uri());
            Response::new(full(expected))
        });
        let gateway = protocol.start_before(&format!("h2c://{}", upstream.address));
        let mut client = gateway.client();
        let version = if protocol.is_http2() { "HTTP/2" } else { "HTTP/1.1" };
        for _ in 0..3 {
            let answer = client.ask("GET /a?b HTTP/1.1\r\nHost: shop.example.com\r\n\r\n");
            assert_eq!((answer.status, answer.text()), (200, "GET HTTP/2.0 http://shop.example.com/a?b"));
            assert_eq!(answer.version, version);
        }
    });
}

#[test]
fn a_client_of_http_2_shares_connections_to_an_upstream_of_http_1() {
    let upstream = Served::start(Speaks::Http1, |request| async move {
        Response::new(full(format!("{:?} {}", request.version(), request.uri())))
    });
    let gateway =
        Gateway::start(&site("workers: 1", &[format!("{{ path: /**, upstream: 'http://{}' }}", upstream.address)], ""));
    runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        for number in 0..20 {
            let request = get(&gateway, &format!("/{number}")).body(full("")).unwrap();
            let (status, body, _) = whole(sender.send_request(request).await.unwrap()).await;
            assert_eq!((status, body), (200, Bytes::from(format!("HTTP/1.1 /{number}"))));
        }
    });
    assert_eq!(upstream.accepted(), 1);
}

#[test]
fn many_requests_share_one_connection_on_both_sides() {
    // Ten requests have to arrive before any of them gets a response.
    let ten = Arc::new(tokio::sync::Barrier::new(10));
    let upstream = Served::start(Speaks::Http2, move |request| {
        let ten = ten.clone();
        async move {
            ten.wait().await;
            Response::new(full(request.uri().path().to_owned()))
        }
    });
    let gateway =
        Gateway::start(&site("workers: 1", &[format!("{{ path: /**, upstream: 'h2c://{}' }}", upstream.address)], ""));
    runtime().block_on(async {
        let sender = connect(gateway.address).await;
        let requests = (0..100).map(|number| {
            let mut sender = sender.clone();
            let request = get(&gateway, &format!("/{number}")).body(full("")).unwrap();
            async move {
                let (status, body, _) = whole(sender.send_request(request).await.unwrap()).await;
                assert_eq!((status, body), (200, Bytes::from(format!("/{number}"))));
            }
        });
        futures_util::future::join_all(requests).await;
    });
    assert!(upstream.accepted() <= 2, "{}", upstream.accepted());
}

#[test]
fn long_bodies_pass_through_http_2_whole() {
    const LENGTH: usize = 20 << 20;
    let upstream = Served::start(Speaks::Http2, |request| async move {
        Response::new(request.into_body().map_err(std::io::Error::other).boxed())
    });
    let gateway = Gateway::before(&format!("h2c://{}", upstream.address));
    runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        let request = Request::put(format!("http://{}/", gateway.address)).body(full(vec![7; LENGTH])).unwrap();
        let (status, body, _) = whole(sender.send_request(request).await.unwrap()).await;
        assert_eq!((status, body.len()), (200, LENGTH));
        assert!(body.iter().all(|byte| *byte == 7));
    });
}

#[test]
fn an_upstream_of_http_2_that_hangs_is_given_up() {
    each_protocol(|protocol| {
        let upstream = Served::start(Speaks::Http2, |request| async move {
            if request.uri().path() == "/head" {
                std::future::pending::<()>().await;
            }
            let begins = futures_util::stream::iter([Ok(Frame::data(Bytes::from_static(b"hello")))]);
            Response::new(BodyExt::boxed(StreamBody::new(futures_util::StreamExt::chain(
                begins,
                futures_util::stream::pending(),
            ))))
        });
        let route = format!("{{ path: /**, timeout: 1s, upstream: 'h2c://{}' }}", upstream.address);
        let gateway = protocol.start(&site("", &[route], ""));
        assert_eq!(gateway.get("/head").status, 504);
        let mut connection = gateway.client();
        connection.send("GET /body HTTP/1.1\r\nHost: h\r\n\r\n");
        assert!(connection.try_receive().is_err(), "the client must see that the response is incomplete");
    });
}

#[test]
fn an_upload_to_http_2_may_take_longer_than_an_answer() {
    each_protocol(|protocol| {
        let upstream = Served::start(Speaks::Http2, |request| async move {
            let length = request.into_body().collect().await.map_or(0, |body| body.to_bytes().len());
            Response::new(full(length.to_string()))
        });
        let route = format!("{{ path: /**, timeout: 1s, upstream: 'h2c://{}' }}", upstream.address);
        let gateway = protocol.start(&site("", &[route], ""));
        let mut connection = gateway.client();
        connection.send("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\n");
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(300));
            connection.send("x");
        }
        assert_eq!(connection.receive().text(), "10");
    });
}

#[test]
fn an_upstream_that_refuses_connections_or_http_2_is_502() {
    each_protocol(|protocol| {
        let refuses = protocol.start_before(&format!("h2c://{}", testkit::port::unused_address()));
        assert_eq!(refuses.get("/").status, 502);
        let only_http1 = Raw::named("one");
        let mistaken = protocol.start_before(&format!("h2c://{}", only_http1.address));
        assert_eq!(mistaken.get("/").status, 502);
    });
}

/// Bodies that differ from their length are another way to smuggle a request.
#[test]
fn a_body_of_http_2_is_as_long_as_it_says() {
    let upstream = Raw::named("one");
    let gateway = Gateway::before(&upstream.url());
    runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        let body = StreamBody::new(futures_util::stream::iter([Ok(Frame::data(Bytes::from_static(b"hello, world")))]));
        let request = Request::put(format!("http://{}/", gateway.address))
            .header("content-length", "5")
            .body(BodyExt::boxed(body))
            .unwrap();
        let answered = sender.send_request(request).await;
        assert!(answered.is_err() || answered.is_ok_and(|answer| answer.status().is_client_error()));
    });
    assert!(!upstream.seen().concat().contains("world"));
}

#[test]
fn a_body_that_does_not_come_is_late_by_itself() {
    let upstream = Raw::named("one");
    let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
    let gateway = Gateway::start(&site("timeouts: { body: 1s }", &[route], ""));
    runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        let mut other = sender.clone();
        let body = StreamBody::new(futures_util::stream::pending::<std::io::Result<Frame<Bytes>>>());
        let request = Request::put(format!("http://{}/", gateway.address)).body(BodyExt::boxed(body)).unwrap();
        let stuck = tokio::spawn(async move { sender.send_request(request).await.map(|answer| answer.status()) });
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(300)).await;
            let request = get(&gateway, "/").body(full("")).unwrap();
            assert_eq!(other.send_request(request).await.unwrap().status().as_u16(), 200, "others are not to blame");
        }
        assert_eq!(stuck.await.unwrap().unwrap().as_u16(), 408);
    });
}

/// A GET may have a body, and an HTTP/2 body needs no length.
#[test]
fn a_body_of_unknown_length_passes_whatever_the_method() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                let length = asked.body.len();
                conversation.send(format!("HTTP/1.1 200 OK\r\nX-Length: {length}\r\nContent-Length: 0\r\n\r\n"));
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        for method in ["GET", "HEAD", "DELETE", "POST"] {
            let mut client = gateway.client();
            client.send(format!(
                "{method} / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
            ));
            let head = client.receive_head().unwrap();
            assert_eq!((head.status, head.header("x-length")), (200, Some("5")), "{method}");
        }
    });
}

/// A request that is retried after an upstream with HTTP/2 is framed anew: its body has been received, and is empty.
#[test]
fn an_empty_chunked_body_ends_after_a_retry_over_http_1() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                let length = asked.body.len();
                conversation.send(format!("HTTP/1.1 200 OK\r\nX-Length: {length}\r\nContent-Length: 0\r\n\r\n"));
            }
        });
        let dead = testkit::port::unused_address();
        let route = format!("{{ path: /**, retries: 1, upstream: ['h2c://{dead}', '{}'] }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], ""));
        let mut connection = gateway.client();
        // Either upstream may come first.
        for body in ["", "5\r\nhello\r\n", "", ""] {
            connection.send(format!("PUT / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n{body}0\r\n\r\n"));
            let head = connection.receive_head().unwrap();
            assert_eq!((head.status, head.header("x-length")), (200, Some(if body.is_empty() { "0" } else { "5" })));
        }
    });
}

/// In HTTP/2, the absence of a body is only shown by not sending one.
#[test]
fn response_to_head_has_no_body() {
    each_protocol(|protocol| {
        let routes = [
            "{ path: /written, respond: { body: hello } }".to_owned(),
            "{ path: /nothing, respond: { status: 204, body: hello } }".to_owned(),
            "{ path: /echo, upstream: echo }".to_owned(),
            format!("{{ path: /fails, retries: 0, upstream: 'http://{}' }}", testkit::port::unused_address()),
        ];
        let gateway = protocol.start(&site("", &routes, ""));
        let mut client = gateway.client();
        for (path, wanted) in [("/written", 200), ("/nothing", 204), ("/echo", 200), ("/fails", 502), ("/none", 404)] {
            client.send(format!("HEAD {path} HTTP/1.1\r\nHost: h\r\nTE: trailers\r\n\r\n"));
            let head = client.receive_head().unwrap();
            assert_eq!(head.status, wanted, "{path}");
            if protocol.is_http2() {
                let body = client.body_bytes(1).map_err(|error| error.kind());
                assert_eq!(body, Err(io::ErrorKind::UnexpectedEof), "{path}");
            }
            match path {
                "/written" => assert_eq!(head.header("content-length"), Some("5")),
                "/nothing" => assert_eq!(head.header("content-length"), None),
                _ => assert!(head.header("content-length").is_some_and(|length| length != "0"), "{path}"),
            }
        }
        let nothing = client.get("/nothing");
        assert_eq!((nothing.status, nothing.body.len()), (204, 0));
        assert_eq!(client.get("/written").text(), "hello", "nothing stands between two answers");
    });
}

#[test]
fn requests_of_http_2_that_have_two_readings_are_refused() {
    let upstream = Raw::named("one");
    let gateway = Gateway::before(&upstream.url());
    runtime().block_on(async {
        for lengths in [&["5", "5"][..], &["5", "6"], &[""], &["0", "0"]] {
            let mut sender = connect(gateway.address).await;
            let mut request = Request::post(format!("http://{}/", gateway.address));
            for length in lengths {
                request = request.header("content-length", *length);
            }
            let body = if lengths[0] == "5" { "hello" } else { "" };
            let body = with_trailers(Bytes::from_static(body.as_bytes()), &[]);
            let answered = sender.send_request(request.body(body).unwrap()).await;
            // Requests that the library refuses itself do not reach the gateway.
            assert!(answered.is_err() || answered.is_ok_and(|answer| answer.status() == 400), "{lengths:?}");
        }
        let mut sender = connect(gateway.address).await;
        let request = Request::get(format!("http://ann@{}/", gateway.address)).body(full("")).unwrap();
        assert_eq!(sender.send_request(request).await.unwrap().status(), 400);
    });
    assert_eq!(gateway.connect().ask("GET http://ann@h/ HTTP/1.1\r\nHost: h\r\n\r\n").status, 400);
    assert_eq!(gateway.connect().ask("GET http://h/ HTTP/1.1\r\nHost: h\r\n\r\n").status, 200);
    assert_eq!(upstream.requests(), 1);
}

#[test]
fn via_names_the_version_of_the_other_side() {
    let one = Raw::named("one");
    let two = Served::start(Speaks::Http2, |_| async { Response::new(full("ok")) });
    let routes = [
        format!("{{ path: /two, upstream: 'h2c://{}' }}", two.address),
        format!("{{ path: /**, upstream: {} }}", one.url()),
    ];
    let gateway = Gateway::start(&site("", &routes, ""));
    runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        let request = get(&gateway, "/").header("te", "trailers").body(full("")).unwrap();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(response.headers()["via"], "1.1 tollgate");
        let (_, body, _) = whole(response).await;
        let seen = String::from_utf8_lossy(&body).to_ascii_lowercase();
        assert!(seen.contains("\r\nvia: 2 tollgate-"), "{seen}");
        // A hop-by-hop header has to be named in `Connection`.
        assert!(seen.contains("\r\nte: trailers\r\n") && seen.contains("\r\nconnection: te\r\n"), "{seen}");
        let request = get(&gateway, "/two").body(full("")).unwrap();
        assert_eq!(sender.send_request(request).await.unwrap().headers()["via"], "2 tollgate");
    });
    let old = gateway.connect().ask("GET / HTTP/1.0\r\nHost: h\r\n\r\n");
    assert!(old.text().to_ascii_lowercase().contains("\r\nvia: 1.0 tollgate-"), "{}", old.text());
    let refused = gateway.connect().ask("CONNECT h:443 HTTP/1.1\r\nHost: h:443\r\n\r\n");
    assert_eq!(refused.status, 405);
    assert!(refused.header("allow").is_some_and(|allow| allow.contains("GET") && !allow.contains("CONNECT")));
}

#[test]
fn every_answer_lists_the_policies_that_matched() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let limit = |name: &str, most: u32, key: &str| {
            format!(
                "{{ name: {name}, key: '{key}', algorithm: fixed_window, align: first_request, limit: {most}, window: 1h }}"
            )
        };
        let limits = format!("{}, {}", limit("per-user", 2, "header:x-user-id"), limit("everyone", 3, "const:all"));
        let routes = [
            "{ path: /own, respond: { body: ok } }".to_owned(),
            format!("{{ path: /**, upstream: {} }}", upstream.url()),
        ];
        let listed = r#""per-user";q=2;w=3600, "everyone";q=3;w=3600"#;
        for path in ["/", "/own"] {
            let gateway = protocol.start(&site("", &routes, &limits));
            let mut connection = gateway.client();
            let expected = [("ann", 200), ("ann", 200), ("ann", 429), ("bob", 200), ("bob", 429)];
            for (number, (user, status)) in expected.into_iter().enumerate() {
                let answer = connection.get_as(user, path);
                assert_eq!(answer.header("ratelimit-policy"), Some(listed));
                assert_eq!(answer.status, status, "request {number} to {path}: {}", answer.text());
            }
        }
    });
}

#[test]
fn trailers_of_a_response_carry_nothing_that_only_the_gateway_may_send() {
    let trailers = [("x-sum", "1"), ("ratelimit", "forged"), ("x-request-id", "forged"), ("set-cookie", "a=b")];
    let lines: String = trailers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let head =
        "HTTP/1.1 200 OK\r\nTrailer: x-sum, ratelimit, x-request-id, set-cookie\r\nTransfer-Encoding: chunked\r\n\r\n";
    let by_http1 = Raw::answering(format!("{head}1\r\nx\r\n0\r\n{lines}\r\n"));
    let answer =
        move |_: Request<Incoming>| async move { Response::new(with_trailers(Bytes::from_static(b"x"), &trailers)) };
    let by_http2 = Served::start(Speaks::Http2, answer);
    for upstream in [by_http1.url(), format!("'h2c://{}'", by_http2.address)] {
        let gateway = Gateway::before(&upstream);
        let arrived = runtime().block_on(async {
            let mut sender = connect(gateway.address).await;
            let request = get(&gateway, "/").header("te", "trailers").body(full("")).unwrap();
            whole(sender.send_request(request).await.unwrap()).await.2
        });
        assert_eq!(arrived.keys().map(http::HeaderName::as_str).collect::<Vec<_>>(), ["x-sum"], "{upstream}");
    }
}

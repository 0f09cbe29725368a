//! HTTP/1 upstreams, with and without TLS, of clients that speak HTTP/1 or HTTP/2: one client serves them all.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testkit::certificates::Authority;
use testkit::client::{Client, Protocol, each_http1, each_http2};
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, site};
use testkit::upstream::{Raw, Speaks, accepting, full};
use testkit::wait::until;
use tokio_rustls::TlsAcceptor;

use crate::upstream_tls::server;

/// Starts a gateway with one worker in front of a TLS upstream that responds with the body of the request. Returns the
/// number of connections that the upstream has accepted.
fn before_tls_echo(protocol: Protocol, speaks: Speaks) -> (Gateway, Arc<AtomicUsize>) {
    let authority = Authority::new();
    let mut config = server(&authority.sign(&["api.internal"]));
    config.alpn_protocols = vec![match speaks {
        Speaks::Http1 => b"http/1.1".to_vec(),
        Speaks::Http2 => b"h2".to_vec(),
    }];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let (address, accepted) = accepting(move |tcp| {
        let acceptor = acceptor.clone();
        let service = service_fn(|request: Request<Incoming>| async {
            let body = request.into_body().collect().await.map_or_else(|_| Bytes::new(), |body| body.to_bytes());
            Ok::<_, Infallible>(Response::new(full(body)))
        });
        async move {
            let Ok(tls) = acceptor.accept(tcp).await else { return };
            let io = TokioIo::new(tls);
            _ = match speaks {
                Speaks::Http1 => http1::Builder::new().serve_connection(io, service).await,
                Speaks::Http2 => http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await,
            };
        }
    });
    let route = format!(
        "{{ path: /**, upstream: 'https://{address}', upstream_tls: {{ ca: ca.pem, server_name: api.internal }} }}"
    );
    let rules = site("workers: 1", &[route], "");
    let gateway = protocol.start_in(folder_with(&[("tollgate.yaml", &rules), ("ca.pem", &authority.pem())]));
    (gateway, accepted)
}

/// Returns clients of both versions, with TLS if the gateway has it.
fn clients(gateway: &Gateway) -> [Client; 2] {
    let protocols = match gateway.protocol {
        Protocol::Http1 | Protocol::Http2 => [Protocol::Http1, Protocol::Http2],
        Protocol::Http1Tls | Protocol::Http2Tls => [Protocol::Http1Tls, Protocol::Http2Tls],
    };
    protocols.map(|protocol| Client::to(gateway.address, protocol))
}

/// Sends requests of both versions, with and without a body.
fn send_all(gateway: &Gateway) {
    let chunked = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";
    for client in &mut clients(gateway) {
        for _ in 0..3 {
            assert_eq!(client.get("/").text(), "");
            let long = "x".repeat(300_000);
            let request = format!("PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{long}", long.len());
            assert_eq!(client.ask(&request).text(), long);
            client.send(chunked);
            assert_eq!(client.ask("0\r\n\r\n").text(), "hello");
        }
    }
}

#[test]
fn clients_of_both_versions_share_the_connections_to_a_tls_upstream() {
    each_http1(|protocol| {
        let (gateway, accepted) = before_tls_echo(protocol, Speaks::Http1);
        send_all(&gateway);
        assert_eq!(accepted.load(SeqCst), 1);
    });
}

/// The gateway learns in the handshake of the first request that the upstream uses HTTP/2.
#[test]
fn first_request_reaches_an_upstream_that_negotiates_http_2() {
    each_http1(|protocol| {
        let (gateway, accepted) = before_tls_echo(protocol, Speaks::Http2);
        send_all(&gateway);
        assert_eq!(accepted.load(SeqCst), 1);
    });
}

#[test]
fn clients_of_both_versions_share_the_connections_to_a_plain_upstream() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway =
            protocol.start(&site("workers: 1", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""));
        for client in clients(&gateway).iter_mut().chain([&mut gateway.client()]) {
            assert_eq!(client.get("/").status, 200);
        }
        assert_eq!(upstream.accepted(), 1);
    });
}

#[test]
fn response_of_http_1_has_its_trailers_in_http_2_and_no_interim_response() {
    each_http2(|protocol| {
        let upstream = Raw::answering(
            "HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n\
             HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 42\r\nSet-Cookie: a=b\r\n\r\n",
        );
        let gateway =
            protocol.start(&site("workers: 1", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""));
        let mut client = gateway.client();
        for _ in 0..3 {
            let answer = client.get("/");
            assert_eq!((answer.status, answer.text(), answer.header("link")), (200, "hello", None));
            assert_eq!(answer.trailers, [("x-sum".to_owned(), "42".to_owned())]);
        }
        assert_eq!(upstream.accepted(), 1, "the end of the response was found");
    });
}

/// A client may send all of its body before it reads the response.
#[test]
fn upload_goes_on_while_the_client_of_http_2_does_not_read() {
    each_http2(|protocol| {
        const LONG: usize = 1 << 20;
        let received = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&received);
        let upstream = Raw::start(move |conversation| {
            _ = conversation.head();
            conversation.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {LONG}\r\n\r\n"));
            let mut writer = conversation.stream.try_clone().unwrap();
            std::thread::spawn(move || std::io::Write::write_all(&mut writer, &vec![b'x'; LONG]));
            loop {
                counted.store(conversation.unread().len(), SeqCst);
                if !conversation.more() {
                    return;
                }
            }
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut client = gateway.client();
        client.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
        assert_eq!(client.receive_head().unwrap().status, 200);
        client.send(format!("{LONG:x}\r\n{}\r\n", "y".repeat(LONG)));
        until("the upstream has the whole body", || received.load(SeqCst) >= LONG);
        client.send("0\r\n\r\n");
        assert!(client.body_bytes(LONG).unwrap().iter().all(|byte| *byte == b'x'));
    });
}

/// Returns an upstream that responds before it reads a request, and the bodies that it got.
fn responding_early() -> (Raw, Arc<Mutex<Vec<String>>>) {
    let bodies = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&bodies);
    let upstream = Raw::start(move |conversation| {
        loop {
            while conversation.unread().is_empty() {
                if !conversation.more() {
                    return;
                }
            }
            conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nearly");
            let Some(request) = conversation.request() else { return };
            seen.lock().unwrap().push(String::from_utf8(request.body).unwrap());
        }
    });
    (upstream, bodies)
}

/// The upstream gets the rest of a body that it did not wait for.
#[test]
fn body_that_ends_after_the_response_reaches_the_upstream_from_http_2() {
    each_http2(|protocol| {
        let (upstream, bodies) = responding_early();
        let gateway =
            protocol.start(&site("workers: 1", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""));
        let mut client = gateway.client();
        for number in 0..3 {
            client.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none \r\n");
            assert_eq!(client.receive().text(), "early");
            client.send("3\r\ntwo\r\n0\r\n\r\n");
            until("the body has arrived", || bodies.lock().unwrap().len() > number);
        }
        assert_eq!(*bodies.lock().unwrap(), ["one two"; 3]);
    });
}

#[test]
fn connection_of_http_2_is_not_idle_while_a_body_goes_on_after_the_response() {
    each_http2(|protocol| {
        let (upstream, bodies) = responding_early();
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("timeouts: { idle: 2s }", &[route], ""));
        let mut client = gateway.client();
        client.send("POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n4\r\none \r\n");
        assert_eq!(client.receive().text(), "early");
        // Longer than an idle connection lasts.
        std::thread::sleep(Duration::from_secs(5));
        client.send("3\r\ntwo\r\n0\r\n\r\n");
        until("the body has arrived", || *bodies.lock().unwrap() == ["one two"]);
    });
}

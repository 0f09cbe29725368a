//! Upgraded connections, such as WebSocket.

use std::convert::Infallible;
use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testkit::certificates::Authority;
use testkit::client::{Protocol, each_http1};
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, per_user, site};
use testkit::http1::Connection;
use testkit::port::unused_address;
use testkit::upstream::{Conversation, Raw, Served, Speaks, accepting, full};
use tokio_rustls::TlsAcceptor;

use crate::upstream_tls::server;

pub(crate) const HANDSHAKE: &str = "GET /chat HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\nConnection: keep-alive, Upgrade\r\n\
    Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
pub(crate) const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
    Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

/// Accepts the upgrade, and then echoes every byte.
fn chat(conversation: &mut Conversation) {
    let Some(asked) = conversation.request() else { return };
    assert_eq!(asked.values("upgrade"), ["websocket"]);
    assert!(asked.values("connection")[0].eq_ignore_ascii_case("upgrade"));
    assert_eq!(asked.values("sec-websocket-key"), ["dGhlIHNhbXBsZSBub25jZQ=="]);
    conversation.send(SWITCH);
    let mut buffer = [0; 4096];
    while let Ok(read @ 1..) = conversation.stream.read(&mut buffer) {
        conversation.send(&buffer[..read]);
    }
}

#[test]
fn a_websocket_carries_anything_both_ways_until_either_side_ends() {
    each_http1(|protocol| {
        let upstream = Raw::start(chat);
        let rules = site(
            "timeouts: { head: 1s, body: 1s, idle: 1s, write: 1s }",
            &[format!("{{ path: /**, timeout: 1s, upstream: {} }}", upstream.url())],
            "",
        );
        let gateway = protocol.start(&rules);
        let mut connection = gateway.connect();
        let answer = connection.ask(HANDSHAKE);
        assert_eq!(answer.status, 101);
        assert_eq!(answer.header("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
        assert!(answer.header("upgrade").is_some_and(|protocol| protocol == "websocket"));
        // Frames, and bytes that are invalid in requests.
        for message in
            [&b"\x81\x85\x37\xfa\x21\x3d\x7f\x9f\x4d\x51\x58"[..], b"\0\n\n\r\0", b"GET / HTTP/1.1\nHost : h\n\n"]
        {
            connection.send(message);
            assert_eq!(connection.bytes(message.len()), message);
        }
        std::thread::sleep(Duration::from_secs(2));
        connection.send("after a pause that is longer than all timeouts of requests");
        assert_eq!(connection.bytes(5), b"after");
        connection.bytes(53);
        connection.tcp().shutdown(std::net::Shutdown::Write).unwrap();
        assert!(connection.is_closed());
    });
}

#[test]
fn a_server_that_does_not_agree_is_heard_and_the_connection_goes_on() {
    each_http1(|protocol| {
        let upstream = Raw::answering("HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno");
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        for _ in 0..2 {
            let answer = connection.ask(HANDSHAKE);
            assert_eq!((answer.status, answer.text()), (400, "no"));
        }
        // The framing is still checked.
        assert_eq!(connection.ask("GET / HTTP/1.1\nHost: h\r\n\r\n").status, 400);
        assert!(connection.is_closed());
    });
}

#[test]
fn limits_apply_to_handshakes() {
    each_http1(|protocol| {
        let upstream = Raw::start(chat);
        let gateway =
            protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], &per_user(1)));
        let mut first = gateway.connect();
        assert_eq!(first.ask(HANDSHAKE).status, 101);
        assert_eq!(gateway.connect().ask(HANDSHAKE).status, 429);
        first.send("still here");
        assert_eq!(first.bytes(10), b"still here");
    });
}

#[test]
fn an_upstream_that_ends_the_conversation_ends_it_for_the_client() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.request();
            conversation.send(SWITCH);
            conversation.send("bye");
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        assert_eq!(connection.ask(HANDSHAKE).status, 101);
        assert_eq!(connection.bytes(3), b"bye");
        connection.tcp().shutdown(std::net::Shutdown::Write).unwrap();
        assert!(connection.is_closed());
    });
}

#[test]
fn conversations_count_among_connections_and_may_end_before_the_gateway_does() {
    each_http1(|protocol| {
        let upstream = Raw::start(chat);
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("workers: 1\n  max_connections: 1", &[route], ""));
        let mut chatting = gateway.connect();
        assert_eq!(chatting.ask(HANDSHAKE).status, 101);
        chatting.send("one");
        assert_eq!(chatting.bytes(3), b"one");
        let mut refused = Connection::to(gateway.address);
        if protocol.scheme() == "https" {
            assert!(refused.is_closed(), "it is refused before TLS");
        } else {
            assert_eq!(refused.get("/").status, 503);
        }
        gateway.signal("TERM");
        std::thread::sleep(Duration::from_secs(1));
        chatting.send("two");
        assert_eq!(chatting.bytes(3), b"two");
        drop(chatting);
        assert_eq!(gateway.wait().code(), Some(0));
    });
}

/// A handshake is a response like any other.
#[test]
fn handshake_is_counted_and_logged_like_other_responses() {
    each_http1(|protocol| {
        let upstream = Raw::start(chat);
        let limits =
            "{ name: logins, key: 'header:x-user-id', algorithm: fixed_window, limit: 1, window: 1h, count: [401] }";
        let route =
            format!("{{ path: /**, upstream: {}, response_headers: {{ set: {{ x-set: here }} }} }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], limits));
        for _ in 0..3 {
            let mut connection = gateway.connect();
            let answer = connection.ask(HANDSHAKE);
            assert_eq!(answer.status, 101, "a handshake is no 401, and spends nothing");
            assert_eq!((answer.header("x-set"), answer.header("via")), (Some("here"), Some("1.1 tollgate")));
            assert!(answer.header("x-request-id").is_some_and(|id| !id.is_empty()));
            assert_eq!(answer.header("upgrade"), Some("websocket"));
            assert!(answer.header("connection").is_some_and(|value| value.eq_ignore_ascii_case("upgrade")));
            connection.send("hello");
            assert_eq!(connection.bytes(5), b"hello");
        }
    });
}

/// The upstream has the request, and the response is the gateway's own.
#[test]
fn unrequested_upgrade_keeps_what_the_request_took() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.request();
            conversation.send(SWITCH);
            conversation.await_end();
        });
        let limits = "{ name: good, key: 'header:x-user-id', algorithm: fixed_window, limit: 1, window: 1h, \
                  count: [200, 101] }";
        let route = format!(
            "{{ path: /**, retries: 0, upstream: {}, eject: {{ after: 100, for: 1s }}, \
         response_headers: {{ set: {{ x-set: here }} }} }}",
            upstream.url()
        );
        let gateway = protocol.start(&site("", &[route], limits));
        let answer = gateway.connect().get_as("ann", "/");
        assert_eq!((answer.status, answer.header("x-set")), (502, Some("here")));
        assert_eq!(gateway.connect().get_as("ann", "/").status, 429);
    });
}

#[test]
fn unrequested_upgrade_ejects_the_upstream() {
    each_http1(|protocol| {
        let bad = Raw::start(|conversation| {
            _ = conversation.request();
            conversation.send(SWITCH);
            conversation.await_end();
        });
        let good = Raw::named("good");
        let limits = "{ name: all, key: 'header:x-user-id', limit: 1000, window: 1h, count: [200] }";
        let route = format!(
            "{{ path: /**, retries: 0, balance: round_robin, upstream: [{}, {}], eject: {{ after: 1, for: 1h }} }}",
            bad.url(),
            good.url()
        );
        let gateway = protocol.start(&site("workers: 1", &[route], limits));
        let statuses: Vec<u16> = (0..6).map(|_| gateway.connect().get_as("ann", "/").status).collect();
        assert_eq!(statuses.iter().filter(|status| **status == 502).count(), 1, "{statuses:?}");
    });
}

#[test]
fn upgrades_eject_no_upstream_of_http_2() {
    each_http1(|protocol| {
        let without_tls = Served::start(Speaks::Http2, |_| async { Response::new(full("two")) });
        let (dead, healthy) = (unused_address(), without_tls.address);
        let route = format!("{{ name: all, path: /**, upstream: ['http://{dead}', 'h2c://{healthy}'] }}");
        let gateway = protocol.start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", site("", &[route], "")));
        for _ in 0..10 {
            assert_eq!(gateway.connect().ask(HANDSHAKE).status, 502);
        }
        assert_eq!(gateway.metric(&format!("tollgate_upstream_up{{upstream=\"{healthy}\"}}")), Some(1.0));
        assert_eq!(without_tls.accepted(), 0);
        assert_eq!(gateway.get("/").text(), "two");
    });
}

/// Returns the address of an upstream that speaks HTTP/2 alone, over TLS.
fn http2_alone(authority: &Authority) -> SocketAddr {
    let mut config = server(&authority.sign(&["api.internal"]));
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let (address, _) = accepting(move |tcp| {
        let acceptor = acceptor.clone();
        let service = service_fn(|request: Request<Incoming>| async move {
            let text = format!("{} {:?}", request.uri().path(), request.headers().get("upgrade"));
            Ok::<_, Infallible>(Response::new(full(text)))
        });
        async move {
            let Ok(tls) = acceptor.accept(tcp).await else { return };
            _ = http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(tls), service).await;
        }
    });
    address
}

/// Starts a gateway in front of upstreams, the first of which speaks HTTP/2 alone.
fn before_http2_alone(protocol: Protocol, others: &str) -> Gateway {
    let authority = Authority::new();
    let address = http2_alone(&authority);
    let tls = "upstream_tls: { ca: ca.pem, server_name: api.internal }, eject: { after: 1 }";
    let route = format!("{{ path: /**, upstream: ['https://{address}'{others}], {tls} }}");
    let (rules, ca) = (site("", &[route], ""), authority.pem());
    protocol.start_in(folder_with(&[("tollgate.yaml", &rules), ("ca.pem", &ca)]))
}

#[test]
fn upstream_with_http_2_alone_gets_requests_without_their_upgrade() {
    each_http1(|protocol| {
        let gateway = before_http2_alone(protocol, "");
        for _ in 0..3 {
            let response = gateway.connect().ask(HANDSHAKE);
            assert_eq!((response.status, response.text()), (200, "/chat None"));
        }
        assert!(!gateway.log().contains("ejected"), "{}", gateway.log());
    });
}

#[test]
fn upgrades_go_to_an_upstream_that_can_upgrade() {
    each_http1(|protocol| {
        let upstream = Raw::start(chat);
        let gateway = before_http2_alone(protocol, &format!(", {}", upstream.url()));
        for _ in 0..4 {
            assert_eq!(gateway.connect().ask(HANDSHAKE).status, 101);
        }
        assert!(!gateway.log().contains("ejected"), "{}", gateway.log());
    });
}

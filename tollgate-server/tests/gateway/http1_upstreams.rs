//! HTTP/1 upstreams, with and without TLS, of clients that speak HTTP/1 or HTTP/2: one client serves them all.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use testkit::certificates::Authority;
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, site};
use testkit::upstream::{AnyBody, Raw, Speaks, accepting, full, runtime};
use testkit::wait::until;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;

use crate::http2::{connect, get, whole};
use crate::upstream_tls::server;

/// Starts a gateway with one worker in front of a TLS upstream that responds with the body of the request. Returns the
/// number of connections that the upstream has accepted.
fn before_tls_echo(speaks: Speaks) -> (Gateway, Arc<AtomicUsize>) {
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
    let gateway = Gateway::in_folder(folder_with(&[("tollgate.yaml", &rules), ("ca.pem", &authority.pem())]));
    (gateway, accepted)
}

/// Sends requests of both versions, with and without a body.
fn send_all(gateway: &Gateway) {
    let mut connection = gateway.connect();
    let chunked = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n";
    for _ in 0..3 {
        assert_eq!(connection.ask("GET / HTTP/1.1\r\nHost: h\r\n\r\n").text(), "");
        let long = "x".repeat(300_000);
        let request = format!("PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{long}", long.len());
        assert_eq!(connection.ask(&request).text(), long);
        connection.send(chunked);
        assert_eq!(connection.ask("0\r\n\r\n").text(), "hello");
    }
    runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        for body in ["", "hello"] {
            let request = Request::post(format!("http://{}/", gateway.address)).body(full(body)).unwrap();
            let (status, echoed, _) = whole(sender.send_request(request).await.unwrap()).await;
            assert_eq!((status, &echoed[..]), (200, body.as_bytes()));
        }
    });
}

#[test]
fn clients_of_both_versions_share_the_connections_to_a_tls_upstream() {
    let (gateway, accepted) = before_tls_echo(Speaks::Http1);
    send_all(&gateway);
    assert_eq!(accepted.load(SeqCst), 1);
}

/// The gateway learns in the handshake of the first request that the upstream uses HTTP/2.
#[test]
fn first_request_reaches_an_upstream_that_negotiates_http_2() {
    let (gateway, accepted) = before_tls_echo(Speaks::Http2);
    send_all(&gateway);
    assert_eq!(accepted.load(SeqCst), 1);
}

#[test]
fn clients_of_both_versions_share_the_connections_to_a_plain_upstream() {
    let upstream = Raw::named("one");
    let gateway = Gateway::start(&site("workers: 1", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""));
    assert_eq!(gateway.get("/").status, 200);
    runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        let response = sender.send_request(get(&gateway, "/").body(full("")).unwrap()).await.unwrap();
        assert_eq!(whole(response).await.0, 200);
    });
    assert_eq!(gateway.get("/").status, 200);
    assert_eq!(upstream.accepted(), 1);
}

#[test]
fn response_of_http_1_has_its_trailers_in_http_2_and_no_interim_response() {
    let upstream = Raw::answering(
        "HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n\
         HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Sum: 42\r\nSet-Cookie: a=b\r\n\r\n",
    );
    let gateway = Gateway::start(&site("workers: 1", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""));
    runtime().block_on(async {
        let mut sender = connect(gateway.address).await;
        for _ in 0..3 {
            let response = sender.send_request(get(&gateway, "/").body(full("")).unwrap()).await.unwrap();
            assert!(!response.headers().contains_key("link"));
            let (status, body, trailers) = whole(response).await;
            assert_eq!((status, &body[..]), (200, &b"hello"[..]));
            assert_eq!(trailers.get("x-sum").map(|sum| sum.as_bytes()), Some(&b"42"[..]));
            assert!(!trailers.contains_key("set-cookie"), "{trailers:?}");
        }
    });
    assert_eq!(upstream.accepted(), 1, "the end of the response was found");
}

/// Returns a body of the parts that are sent to it.
fn parts() -> (mpsc::UnboundedSender<Bytes>, AnyBody) {
    let (sender, receiver) = mpsc::unbounded_channel::<Bytes>();
    let stream = futures_util::stream::unfold(receiver, |mut receiver| async {
        let part = receiver.recv().await?;
        Some((Ok(Frame::data(part)), receiver))
    });
    (sender, BodyExt::boxed(StreamBody::new(stream)))
}

/// A client may send all of its body before it reads the response.
#[test]
fn upload_goes_on_while_the_client_of_http_2_does_not_read() {
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
    let gateway = Gateway::before(&upstream.url());
    let (sender, body) = parts();
    let response = runtime().block_on(async {
        let mut connection = connect(gateway.address).await;
        let request = Request::post(format!("http://{}/", gateway.address)).body(body).unwrap();
        connection.send_request(request).await.unwrap()
    });
    for _ in 0..64 {
        sender.send(Bytes::from(vec![b'y'; LONG / 64])).unwrap();
    }
    until("the upstream has the whole body", || received.load(SeqCst) >= LONG);
    drop(sender);
    let (status, body, _) = runtime().block_on(whole(response));
    assert_eq!((status, body.len()), (200, LONG));
}

/// The upstream gets the rest of a body that it did not wait for.
#[test]
fn body_that_ends_after_the_response_reaches_the_upstream_from_http_2() {
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
    let gateway = Gateway::start(&site("workers: 1", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], ""));
    runtime().block_on(async {
        let mut connection = connect(gateway.address).await;
        for number in 0..3 {
            let (sender, body) = parts();
            let request = Request::post(format!("http://{}/", gateway.address)).body(body).unwrap();
            sender.send(Bytes::from_static(b"one ")).unwrap();
            let response = connection.send_request(request).await.unwrap();
            assert_eq!(whole(response).await.1, "early");
            sender.send(Bytes::from_static(b"two")).unwrap();
            drop(sender);
            tokio::task::block_in_place(|| until("the body has arrived", || bodies.lock().unwrap().len() > number));
        }
    });
    assert_eq!(*bodies.lock().unwrap(), ["one two"; 3]);
}

//! Requests whose target names another host than their `Host` header.

use http::{Method, Request, Version};
use http_body_util::Empty;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tollgate_rules::{Match, Rule};

use super::server::{Server, TestResponse, http2};
use super::{gate, per_minute};

fn on_host() -> Rule {
    per_minute("api", 1).matching(Match::everything().host("api.example"))
}

/// Sends the bytes of a head unchanged. Returns the response as text.
async fn raw(server: &Server, head: &str) -> String {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(format!("{head}\r\nConnection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).await.unwrap();
    response
}

#[tokio::test]
async fn an_absolute_target_with_another_host_is_refused() {
    let (gate, _) = gate([on_host()]);
    let server = Server::with(&gate).await;
    for (target, host) in [
        ("http://other.example/", "api.example"),
        ("http://api.example/", "other.example"),
        ("http://api.example/", "api.example:81"),
        ("http://api.example:81/", "api.example"),
        ("http://api.example/", "api.example:443"),
        ("http://user@api.example/", "api.example"),
    ] {
        let response = raw(&server, &format!("GET {target} HTTP/1.1\r\nHost: {host}")).await;
        assert!(response.starts_with("HTTP/1.1 400 "), "{target} {host}: {response}");
        assert!(response.contains(r#""error":"bad_request""#), "{target} {host}: {response}");
    }
    assert_eq!(server.calls(), 0);
    for (target, host, status) in [
        ("http://API.example:80/", "api.example.", "200"),
        ("/", "api.example:80", "429"),
        ("http://other.example/", "other.example:80", "200"),
    ] {
        let response = raw(&server, &format!("GET {target} HTTP/1.1\r\nHost: {host}")).await;
        assert!(response.starts_with(&format!("HTTP/1.1 {status} ")), "{target} {host}: {response}");
    }
}

#[tokio::test]
async fn an_authority_of_http2_with_another_host_is_refused() {
    let (gate, _) = gate([on_host()]);
    let server = Server::with(&gate).await;
    let port = server.address.port();
    // (Host, status)
    for (host, status) in [
        ("api.example".to_owned(), 400),
        ("127.0.0.1".to_owned(), 400),
        (format!("127.0.0.1:{port}"), 200),
        (format!("127.0.0.1.:{port}"), 200),
    ] {
        let mut request = Request::new(Empty::new());
        *request.method_mut() = Method::GET;
        *request.uri_mut() = format!("http://127.0.0.1:{port}/").parse().unwrap();
        request.headers_mut().insert("host", host.parse().unwrap());
        let response = TestResponse::of(http2().request(request).await.unwrap()).await;
        assert_eq!((response.status, response.version), (status, Version::HTTP_2), "{host}: {}", response.body);
    }
}

//! A server on its own port that ends with the test, and a client for it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::extract::ConnectInfo;
use axum::routing::any;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, Version};
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tollgate_rules::Gate;
use tollgate_tower::RateLimitLayer;

/// A server that responds `hello` to every request, and counts its calls.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    calls: Arc<AtomicUsize>,
    serving: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

impl Server {
    /// Starts the server behind the rules of a gate.
    pub(crate) async fn with(gate: &Gate) -> Self {
        let calls = Arc::new(AtomicUsize::new(0));
        let counted = calls.clone();
        let hello = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            async { "hello" }
        };
        let app = Router::new().fallback(any(hello)).layer(layer(gate));
        Self::counting(app, calls).await
    }

    /// Starts a server for an application.
    pub(crate) async fn serving(app: Router) -> Self {
        Self::counting(app, Arc::default()).await
    }

    async fn counting(app: Router, calls: Arc<AtomicUsize>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let app = app.into_make_service_with_connect_info::<SocketAddr>();
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, calls, serving }
    }

    /// Starts a server for an application that does not learn the addresses of its clients.
    pub(crate) async fn without_connect_info(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, calls: Arc::default(), serving }
    }

    /// Returns the number of requests that reached the inner service.
    pub(crate) fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    pub(crate) async fn get(&self, path: &str, headers: &[(&str, &str)]) -> TestResponse {
        self.send(&http1(), Method::GET, path, headers).await
    }

    pub(crate) async fn send(
        &self,
        client: &HttpClient,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
    ) -> TestResponse {
        let mut request = Request::new(Empty::new());
        *request.method_mut() = method;
        *request.uri_mut() = format!("http://{}{path}", self.address).parse().unwrap();
        for (name, value) in headers {
            request.headers_mut().append(name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap());
        }
        TestResponse::of(client.request(request).await.unwrap()).await
    }
}

/// Returns a gate's layer that finds the peer address of this server.
pub(crate) fn layer(gate: &Gate) -> RateLimitLayer {
    RateLimitLayer::new(gate.clone())
        .peer_address(|extensions| extensions.get::<ConnectInfo<SocketAddr>>().map(|connected| connected.0.ip()))
}

pub(crate) type HttpClient = Client<HttpConnector, Empty<Bytes>>;

pub(crate) fn http1() -> HttpClient {
    Client::builder(TokioExecutor::new()).build_http()
}

pub(crate) fn http2() -> HttpClient {
    Client::builder(TokioExecutor::new()).http2_only(true).build_http()
}

/// Returns a client at another loopback address.
pub(crate) fn http1_from(address: &str) -> HttpClient {
    let mut connector = HttpConnector::new();
    connector.set_local_address(Some(address.parse::<IpAddr>().unwrap()));
    Client::builder(TokioExecutor::new()).build(connector)
}

/// A response.
#[derive(Debug)]
pub(crate) struct TestResponse {
    pub(crate) status: u16,
    pub(crate) version: Version,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl TestResponse {
    pub(crate) async fn of<B>(response: Response<B>) -> Self
    where
        B: http_body::Body,
        B::Error: std::fmt::Debug,
    {
        let (head, body) = response.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Self {
            status: head.status.as_u16(),
            version: head.version,
            headers: head.headers,
            body: String::from_utf8(body.to_vec()).unwrap(),
        }
    }

    /// Returns a header that occurs at most once.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).into_iter();
        let value = values.next().map(|value| value.to_str().unwrap());
        assert!(values.next().is_none(), "{name} is there twice");
        value
    }

    /// Returns the values of these headers.
    pub(crate) fn all<const N: usize>(&self, names: [&str; N]) -> [Option<&str>; N] {
        names.map(|name| self.header(name))
    }

    /// Returns the `ratelimit` header.
    pub(crate) fn left(&self) -> Option<&str> {
        self.header("ratelimit")
    }
}

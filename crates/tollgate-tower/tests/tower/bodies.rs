//! Responses of the inner service pass through unchanged: streams, trailers, lengths, upgrades.

use std::convert::Infallible;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::routing::get;
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body::{Body as _, Frame};
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tollgate_tower::RateLimitLayer;
use tower::{Layer, Service, ServiceExt, service_fn};

use super::server::{Server, http1, http2, layer};
use super::{gate, per_minute};

/// Two chunks and a trailer.
fn streamed() -> impl http_body::Body<Data = Bytes, Error = Infallible> + Send + 'static {
    let trailers = HeaderMap::from_iter([(http::HeaderName::from_static("x-sum"), HeaderValue::from_static("2"))]);
    let frames = [Frame::data(Bytes::from("one ")), Frame::data(Bytes::from("two")), Frame::trailers(trailers)];
    StreamBody::new(stream::iter(frames.map(Ok)))
}

#[tokio::test]
async fn streams_and_trailers_pass_through() {
    let (gate, _) = gate([per_minute("all", 100)]);
    let app = Router::new().route("/", get(async || http::Response::new(Body::new(streamed())))).layer(layer(&gate));
    let server = Server::serving(app).await;
    for client in [http1(), http2()] {
        let mut request = http::Request::new(Empty::new());
        *request.uri_mut() = format!("http://{}/", server.address).parse().unwrap();
        request.headers_mut().insert("te", HeaderValue::from_static("trailers"));
        let response = client.request(request).await.unwrap();
        assert_eq!(response.headers().get("content-length"), None);
        assert!(response.headers().contains_key("ratelimit"));
        let is_http2 = response.version() == http::Version::HTTP_2;
        let collected = response.into_body().collect().await.unwrap();
        // HTTP/1.1 sends only trailers that were announced.
        let sum = collected.trailers().and_then(|trailers| trailers.get("x-sum")).map(HeaderValue::as_bytes);
        assert_eq!(sum, is_http2.then_some(&b"2"[..]));
        assert_eq!(collected.to_bytes(), "one two");
    }
}

/// Returns the body of a response of the service, and of a refusal.
async fn bodies<B>(body: fn() -> B) -> [tollgate_tower::ResponseBody<B>; 2]
where
    B: http_body::Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let (gate, _) = gate([per_minute("all", 1)]);
    let inner =
        service_fn(move |_: http::Request<()>| std::future::ready(Ok::<_, Infallible>(http::Response::new(body()))));
    let mut service = RateLimitLayer::new(gate).layer(inner);
    let mut answers = Vec::new();
    for _ in 0..2 {
        answers.push(service.ready().await.unwrap().call(http::Request::new(())).await.unwrap().into_body());
    }
    answers.try_into().ok().unwrap()
}

#[tokio::test]
async fn body_lengths_are_preserved() {
    let [whole, refusal] = bodies(|| Full::new(Bytes::from("hello"))).await;
    assert_eq!((whole.size_hint().exact(), whole.is_end_stream()), (Some(5), false));
    let length = refusal.size_hint().exact().unwrap();
    assert!(!refusal.is_end_stream());
    assert_eq!(refusal.collect().await.unwrap().to_bytes().len() as u64, length);

    let [empty, _] = bodies(|| Full::new(Bytes::new())).await;
    assert_eq!((empty.size_hint().exact(), empty.is_end_stream()), (Some(0), true));
    let [unknown, _] = bodies(streamed_box).await;
    assert_eq!((unknown.size_hint().exact(), unknown.is_end_stream()), (None, false));
}

fn streamed_box() -> http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible> {
    streamed().boxed_unsync()
}

#[tokio::test]
async fn a_connection_can_be_upgraded_through_the_layer() {
    let (gate, _) = gate([per_minute("all", 1)]);
    let echo = async |request: Request| {
        tokio::spawn(async move {
            let mut upgraded = TokioIo::new(hyper::upgrade::on(request).await.unwrap());
            let mut word = [0; 4];
            upgraded.read_exact(&mut word).await.unwrap();
            upgraded.write_all(&word).await.unwrap();
            upgraded.shutdown().await.unwrap();
        });
        (StatusCode::SWITCHING_PROTOCOLS, [("connection", "upgrade"), ("upgrade", "echo")])
    };
    let server = Server::serving(Router::new().route("/", get(echo)).layer(layer(&gate))).await;
    let send = || {
        let request = http::Request::builder().method(Method::GET).uri(format!("http://{}/", server.address));
        let request = request.header("connection", "upgrade").header("upgrade", "echo");
        http1().request(request.body(Empty::new()).unwrap())
    };
    let response = send().await.unwrap();
    assert_eq!(response.status(), 101);
    assert_eq!(response.headers()["ratelimit"], r#""all";r=0;t=20"#);
    let mut upgraded = TokioIo::new(hyper::upgrade::on(response).await.unwrap());
    upgraded.write_all(b"ping").await.unwrap();
    let mut echoed = Vec::new();
    upgraded.read_to_end(&mut echoed).await.unwrap();
    assert_eq!(echoed, b"ping");
    assert_eq!(send().await.unwrap().status(), 429);
}

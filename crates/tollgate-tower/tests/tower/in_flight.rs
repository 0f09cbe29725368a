//! Limits on requests in flight in the inner service.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use bytes::Bytes;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use tokio::sync::mpsc;
use tollgate_rules::{Gate, Rule};
use tower::{Layer, Service, ServiceExt};

use super::gate;
use super::server::layer;

type Chunk = Result<Frame<Bytes>, Infallible>;

fn two_at_once() -> Gate {
    gate([Rule::in_flight("at-once", 2).unwrap()]).0
}

/// A service whose response bodies last until their senders are dropped.
fn streaming(gate: &Gate) -> (axum::routing::RouterIntoService<Body>, mpsc::UnboundedReceiver<mpsc::Sender<Chunk>>) {
    let (opened, senders) = mpsc::unbounded_channel();
    let opened = Arc::new(opened);
    let handler = move || {
        let opened = opened.clone();
        async move {
            let (sender, mut chunks) = mpsc::channel::<Chunk>(1);
            opened.send(sender).unwrap();
            Body::new(StreamBody::new(futures_util::stream::poll_fn(move |context| chunks.poll_recv(context))))
        }
    };
    (Router::new().route("/", get(handler)).layer(layer(gate)).into_service(), senders)
}

fn request() -> http::Request<Body> {
    http::Request::new(Body::empty())
}

#[tokio::test]
async fn a_permit_is_held_until_the_body_ends_or_is_dropped() {
    let (mut service, mut senders) = streaming(&two_at_once());
    let mut status = async || service.ready().await.unwrap().call(request()).await.unwrap();
    let (mut first, second) = (status().await, status().await);
    assert_eq!(
        [first.status(), second.status(), status().await.status()].map(|status| status.as_u16()),
        [200, 200, 429]
    );

    let sender = senders.recv().await.unwrap();
    sender.send(Ok(Frame::data(Bytes::from_static(b"part")))).await.unwrap();
    assert!(first.body_mut().frame().await.is_some());
    assert_eq!(status().await.status(), 429, "there is more to come");
    drop(sender);
    assert!(first.body_mut().frame().await.is_none());
    let third = status().await;
    assert_eq!(third.status(), 200, "the body has ended, but was not dropped");
    assert_eq!(status().await.status(), 429);

    drop(second);
    assert_eq!(status().await.status(), 200);
}

#[tokio::test]
async fn failed_services_and_disconnected_clients_return_their_permits() {
    let failing = tower::service_fn(|_: http::Request<Body>| async {
        tokio::task::yield_now().await;
        Err::<http::Response<Body>, _>(std::io::Error::other("no"))
    });
    let mut service = layer(&two_at_once()).layer(failing);
    for _ in 0..5 {
        assert!(service.ready().await.unwrap().call(request()).await.is_err());
        drop(service.ready().await.unwrap().call(request()));
    }
}

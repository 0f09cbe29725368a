//! The layer calls a service only when it was ready, and never with a request that is denied.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use tollgate::rules::Rule;
use tollgate::tower::{RateLimit, RateLimitLayer};
use tollgate::{LeakyBucket, Limit, Rate};
use tower::{Layer, Service, ServiceExt};

use super::{gate, per_minute};

/// A service of which every clone has to be made ready before it is called, as the contract of tower says.
#[derive(Default)]
struct Strict {
    is_ready: bool,
    calls: Arc<AtomicUsize>,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { is_ready: false, calls: self.calls.clone() }
    }
}

impl Service<Request<()>> for Strict {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called without being ready");
        self.calls.fetch_add(1, Ordering::Relaxed);
        std::future::ready(Ok(Response::default()))
    }
}

async fn ask<S>(service: &mut RateLimit<S>) -> u16
where
    RateLimit<S>: Service<Request<()>, Response = Response<tollgate::tower::ResponseBody<Full<Bytes>>>>,
    <RateLimit<S> as Service<Request<()>>>::Error: std::fmt::Debug,
{
    service.ready().await.unwrap().call(Request::new(())).await.unwrap().status().as_u16()
}

#[tokio::test]
async fn the_service_that_was_ready_is_the_one_that_is_called() {
    let strict = Strict::default();
    let (gate, _) = gate([per_minute("all", 3)]);
    let mut service = RateLimitLayer::new(gate).layer(strict.clone());
    for expected in [200, 200, 200, 429, 429] {
        assert_eq!(ask(&mut service).await, expected);
    }
    assert_eq!(strict.calls.load(Ordering::Relaxed), 3);
}

#[tokio::test(start_paused = true)]
async fn it_is_so_for_a_request_that_is_held_too() {
    let strict = Strict::default();
    let queue = LeakyBucket::new(3, Rate::per_second(1)).queue(Duration::from_secs(10));
    let (gate, _) = gate([Rule::new(Limit::new("queue", queue).unwrap())]);
    let mut service = RateLimitLayer::new(gate).layer(strict.clone());
    for expected in [200, 200, 200, 429] {
        assert_eq!(ask(&mut service).await, expected);
    }
    assert_eq!(strict.calls.load(Ordering::Relaxed), 3);
}

/// A service that has no room until it is told.
#[derive(Clone)]
struct Busy(Arc<tokio::sync::Semaphore>);

impl Service<Request<()>> for Busy {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.0.available_permits() == 0 { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        std::future::ready(Ok(Response::default()))
    }
}

#[tokio::test]
async fn a_service_without_room_is_waited_for_and_nothing_is_spent_meanwhile() {
    let room = Arc::new(tokio::sync::Semaphore::new(0));
    let (gate, _) = gate([per_minute("all", 1)]);
    let mut service = RateLimitLayer::new(gate.clone()).layer(Busy(room.clone()));
    let waiting = futures_util::future::poll_immediate(service.ready()).await;
    assert!(waiting.is_none());
    room.add_permits(1);
    assert_eq!(ask(&mut service).await, 200);
    assert_eq!(ask(&mut service).await, 429);
}

/// A service that is broken.
#[derive(Clone)]
struct Broken;

#[derive(Debug, PartialEq)]
struct OutOfOrder;

impl Service<Request<()>> for Broken {
    type Response = Response<Full<Bytes>>;
    type Error = OutOfOrder;
    type Future = std::future::Ready<Result<Self::Response, OutOfOrder>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), OutOfOrder>> {
        Poll::Ready(Err(OutOfOrder))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        std::future::ready(Err(OutOfOrder))
    }
}

#[tokio::test]
async fn errors_of_the_service_are_its_own() {
    let (gate, _) = gate([per_minute("all", 1)]);
    let mut service = RateLimitLayer::new(gate).layer(Broken);
    assert_eq!(service.ready().await.err(), Some(OutOfOrder));
    assert_eq!(service.call(Request::new(())).await.err(), Some(OutOfOrder));
}

//! The layer calls a service only when it is ready, and a denied request does not wait for that.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::poll_immediate;
use http::{Request, Response};
use http_body_util::Full;
use tollgate::{LeakyBucket, Limit, Rate};
use tollgate_rules::{KeyPart, Rule};
use tollgate_tower::{RateLimit, RateLimitLayer};
use tower::layer::layer_fn;
use tower::{Layer, Service, ServiceExt};

use super::server::{Server, layer};
use super::{gate, per_minute};

/// A service of which every clone must be polled before it is called, as tower requires.
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

async fn send<S>(service: &mut RateLimit<S>) -> u16
where
    RateLimit<S>: Service<Request<()>, Response = Response<tollgate_tower::ResponseBody<Full<Bytes>>>>,
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
        assert_eq!(send(&mut service).await, expected);
    }
    assert_eq!(strict.calls.load(Ordering::Relaxed), 3);
}

#[tokio::test(start_paused = true)]
async fn a_delayed_request_calls_the_service_that_was_ready_too() {
    let strict = Strict::default();
    let queue = LeakyBucket::new(3, Rate::per_second(1)).queue(Duration::from_secs(10));
    let (gate, _) = gate([Rule::new(Limit::new("queue", queue).unwrap())]);
    let mut service = RateLimitLayer::new(gate).layer(strict.clone());
    for expected in [200, 200, 200, 429] {
        assert_eq!(send(&mut service).await, expected);
    }
    assert_eq!(strict.calls.load(Ordering::Relaxed), 3);
}

/// Capacity for a number of calls, and the tasks that wait for more.
#[derive(Clone, Default)]
struct Room(Arc<Mutex<(usize, Vec<Waker>)>>);

impl Room {
    fn add(&self, calls: usize) {
        let mut room = self.0.lock().unwrap();
        room.0 += calls;
        room.1.drain(..).for_each(Waker::wake);
    }

    fn poll_take(&self, context: &mut Context<'_>) -> Poll<()> {
        let mut room = self.0.lock().unwrap();
        match room.0.checked_sub(1) {
            Some(left) => {
                room.0 = left;
                Poll::Ready(())
            }
            None => {
                room.1.push(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// A service that is ready only while there is capacity for another call.
#[derive(Default)]
struct Busy<S = Strict> {
    room: Room,
    has_room: bool,
    inner: S,
}

impl<S: Clone> Clone for Busy<S> {
    fn clone(&self) -> Self {
        Self { room: self.room.clone(), has_room: false, inner: self.inner.clone() }
    }
}

impl<S: Service<Request<Q>>, Q> Service<Request<Q>> for Busy<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        if !self.has_room {
            ready!(self.room.poll_take(context));
            self.has_room = true;
        }
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> S::Future {
        assert!(std::mem::take(&mut self.has_room), "called without being ready");
        self.inner.call(request)
    }
}

#[tokio::test]
async fn a_denied_request_does_not_wait_for_a_busy_service() {
    let busy = Busy::<Strict>::default();
    let (gate, _) = gate([per_minute("all", 1)]);
    let mut service = RateLimitLayer::new(gate).layer(busy.clone());
    let admitted = tokio::spawn(service.ready().await.unwrap().call(Request::new(())));
    assert_eq!(send(&mut service).await, 429);
    assert!(!admitted.is_finished());
    busy.room.add(1);
    assert_eq!(admitted.await.unwrap().unwrap().status(), 200);
    assert_eq!(send(&mut service).await, 429);
}

#[tokio::test]
async fn a_request_that_never_reaches_the_service_is_refunded() {
    let by_address = per_minute("all", 1).key(KeyPart::ip());
    let at_once = Rule::in_flight("at-once", 1).unwrap();
    for rules in [vec![per_minute("all", 1)], vec![by_address], vec![per_minute("all", 2), at_once]] {
        let busy = Busy::<Strict>::default();
        let (gate, _) = gate(rules);
        let address = |_: &http::Extensions| Some([192, 0, 2, 7].into());
        let mut service = RateLimitLayer::new(gate).peer_address(address).layer(busy.clone());
        for _ in 0..3 {
            let mut waiting = service.ready().await.unwrap().call(Request::new(()));
            assert!(poll_immediate(&mut waiting).await.is_none());
            assert_eq!(send(&mut service).await, 429);
        }
        busy.room.add(1);
        assert_eq!(send(&mut service).await, 200);
    }
}

#[tokio::test]
async fn a_request_is_refunded_if_the_service_fails_before_the_call() {
    let (gate, _) = gate([per_minute("all", 1)]);
    let busy = Busy { room: Room::default(), has_room: false, inner: Broken };
    let mut service = RateLimitLayer::new(gate.clone()).layer(busy.clone());
    let waiting = service.ready().await.unwrap().call(Request::new(()));
    busy.room.add(1);
    assert_eq!(waiting.await.err(), Some(OutOfOrder));
    let mut service = RateLimitLayer::new(gate).layer(Strict::default());
    assert_eq!(send(&mut service).await, 200);
}

/// The same in an axum server, which waits until its layers are ready before each request.
#[tokio::test]
async fn a_denied_client_gets_its_response_while_an_allowed_one_waits() {
    let (gate, _) = gate([per_minute("all", 1)]);
    let (decided, mut decisions) = tokio::sync::mpsc::unbounded_channel();
    let limits = layer(&gate).on_decision(move |outcome, _| decided.send(outcome.is_allowed()).unwrap());
    let room = Room::default();
    let inside = room.clone();
    let busy = layer_fn(move |inner| Busy { room: inside.clone(), has_room: false, inner });
    let app = axum::Router::new().route("/", axum::routing::get(async || "hello")).layer((limits, busy));
    let server = Arc::new(Server::serving(app).await);
    let admitted = {
        let server = server.clone();
        tokio::spawn(async move { server.get("/", &[]).await.status })
    };
    assert_eq!(decisions.recv().await, Some(true));
    let denied = tokio::time::timeout(Duration::from_secs(30), server.get("/", &[])).await.unwrap();
    assert_eq!(denied.status, 429);
    room.add(1);
    assert_eq!(admitted.await.unwrap(), 200);
}

/// A service that always fails.
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
async fn errors_of_the_service_are_passed_on() {
    let (gate, _) = gate([per_minute("all", 1)]);
    let mut service = RateLimitLayer::new(gate).layer(Broken);
    assert_eq!(service.ready().await.err(), Some(OutOfOrder));
    assert_eq!(service.call(Request::new(())).await.err(), Some(OutOfOrder));
}

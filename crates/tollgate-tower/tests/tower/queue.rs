//! A queue delays requests.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response};
use http_body_util::Full;
use tokio::time::Instant;
use tollgate::{LeakyBucket, Limit, Rate};
use tollgate_rules::{Gate, Rule};
use tollgate_tower::RateLimitLayer;
use tower::{Layer, Service, ServiceExt, service_fn};

use super::gate;
use super::server::Server;

fn queue_of(requests: u64, max_wait: Duration) -> Rule {
    let queue = LeakyBucket::new(requests, Rate::per_second(1)).queue(max_wait);
    Rule::new(Limit::new("queue", queue).unwrap())
}

/// The requests that the service got, with their times in whole seconds.
type Seen = Arc<Mutex<Vec<(u32, u64)>>>;

fn service(
    gate: Gate,
    seen: Seen,
) -> impl Service<Request<u32>, Response = Response<impl Sized>, Error = std::convert::Infallible, Future: Send> + Clone
{
    let start = Instant::now();
    let inner = service_fn(move |request: Request<u32>| {
        seen.lock().unwrap().push((request.into_body(), start.elapsed().as_secs()));
        std::future::ready(Ok(Response::new(Full::<Bytes>::default())))
    });
    RateLimitLayer::new(gate).layer(inner)
}

#[tokio::test(start_paused = true)]
async fn requests_leave_one_by_one_in_their_order() {
    let (gate, _) = gate([queue_of(4, Duration::from_secs(60))]);
    let seen = Seen::default();
    let service = service(gate, seen.clone());
    let answers = join_all((0..6).map(|number| service.clone().oneshot(Request::new(number)))).await;
    let statuses: Vec<u16> = answers.into_iter().map(|answer| answer.unwrap().status().as_u16()).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 429, 429]);
    assert_eq!(*seen.lock().unwrap(), [(0, 0), (1, 1), (2, 2), (3, 3)]);
}

#[tokio::test(start_paused = true)]
async fn no_request_is_delayed_beyond_the_maximum_wait() {
    let (gate, _) = gate([queue_of(100, Duration::from_secs(2))]);
    let seen = Seen::default();
    let service = service(gate, seen.clone());
    let answers = join_all((0..5).map(|number| service.clone().oneshot(Request::new(number)))).await;
    let statuses: Vec<u16> = answers.into_iter().map(|answer| answer.unwrap().status().as_u16()).collect();
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    assert_eq!(*seen.lock().unwrap(), [(0, 0), (1, 1), (2, 2)]);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_disconnects_while_delayed_never_reaches_the_service() {
    let (gate, _) = gate([queue_of(4, Duration::from_secs(60))]);
    let seen = Seen::default();
    let service = service(gate, seen.clone());
    assert!(service.clone().oneshot(Request::new(0)).await.is_ok());
    let impatient = tokio::time::timeout(Duration::from_millis(500), service.clone().oneshot(Request::new(1))).await;
    assert!(impatient.is_err());
    assert!(service.clone().oneshot(Request::new(2)).await.is_ok());
    // The slot of an abandoned request is not reused: other clients may have been given later slots already.
    assert_eq!(*seen.lock().unwrap(), [(0, 0), (2, 2)]);
}

#[tokio::test]
async fn over_a_socket_every_delayed_request_gets_its_response() {
    let queue = LeakyBucket::new(5, Rate::per_second(100)).queue(Duration::from_secs(1));
    let rules = tollgate_rules::RuleSet::builder().rule(Rule::new(Limit::new("queue", queue).unwrap()));
    let gate = Gate::in_memory(rules.build().unwrap()).unwrap();
    let server = Server::with(&gate).await;
    let answers = join_all((0..5).map(|_| server.get("/", &[]))).await;
    assert!(answers.iter().all(|answer| answer.status == 200 && answer.body == "hello"), "{answers:?}");
    assert_eq!(server.calls(), 5);
}

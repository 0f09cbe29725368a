//! A gRPC server behind the layer, and a gRPC client, both from tonic.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::stream::{self, BoxStream};
use http::StatusCode;
use tokio::net::TcpListener;
use tollgate::SECOND;
use tollgate_rules::{Gate, KeyPart, StatusSet};
use tollgate_tower::RateLimitLayer;
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_types::StatusExt;

use super::{gate, per_minute, user};

/// A service that counts its calls.
struct Counting(Arc<AtomicUsize>);

#[tonic::async_trait]
impl Health for Counting {
    type WatchStream = BoxStream<'static, Result<HealthCheckResponse, Status>>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        self.0.fetch_add(1, Ordering::Relaxed);
        if request.get_ref().service == "locked" {
            return Err(Status::unauthenticated("the service is locked"));
        }
        Ok(Response::new(HealthCheckResponse { status: ServingStatus::Serving.into() }))
    }

    async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        self.0.fetch_add(1, Ordering::Relaxed);
        let answers = [ServingStatus::NotServing, ServingStatus::Serving]
            .map(|status| Ok(HealthCheckResponse { status: status.into() }));
        Ok(Response::new(Box::pin(stream::iter(answers))))
    }
}

/// Starts a server behind the rules of a gate. Returns its address and the number of its calls.
async fn serve(gate: &Gate) -> (SocketAddr, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let service = HealthServer::new(Counting(calls.clone()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let layer = RateLimitLayer::new(gate.clone()).peer_address(|extensions| {
        extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr).map(|address| address.ip())
    });
    let server = Server::builder().layer(layer).add_service(service);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    (address, calls)
}

async fn client(address: SocketAddr) -> HealthClient<Channel> {
    HealthClient::new(Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap())
}

fn request_of(user: &'static str) -> Request<HealthCheckRequest> {
    let mut request = Request::new(HealthCheckRequest::default());
    request.metadata_mut().insert("x-user-id", user.parse().unwrap());
    request
}

#[tokio::test]
async fn a_denied_call_is_resource_exhausted_with_the_exact_wait() {
    let (gate, clock) = gate([per_minute("per-user", 1).key(user())]);
    let (address, calls) = serve(&gate).await;
    let mut client = client(address).await;
    clock.advance(SECOND / 4);

    let allowed = client.check(request_of("ann")).await.unwrap();
    assert_eq!(allowed.metadata().get("ratelimit").unwrap(), r#""per-user";r=0;t=20"#);
    assert_eq!(allowed.get_ref().status(), ServingStatus::Serving);

    let denied = client.check(request_of("ann")).await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    assert_eq!(denied.message(), "Too many requests. Please retry after 20 seconds.");
    assert_eq!(denied.get_details_retry_info().unwrap().retry_delay, Some(Duration::from_millis(19_750)));
    assert_eq!(denied.metadata().get("retry-after").unwrap(), "20");
    assert_eq!(calls.load(Ordering::Relaxed), 1);

    assert!(client.check(request_of("bob")).await.is_ok());
    clock.advance(SECOND * 20);
    assert!(client.check(request_of("ann")).await.is_ok());
    assert_eq!(calls.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn server_streams_are_limited_when_they_begin() {
    let (gate, _) = gate([per_minute("per-ip", 1).key(KeyPart::ip())]);
    let (address, calls) = serve(&gate).await;
    let mut client = client(address).await;
    let mut answers = client.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    let mut seen = Vec::new();
    while let Some(answer) = answers.message().await.unwrap() {
        seen.push(answer.status());
    }
    assert_eq!(seen, [ServingStatus::NotServing, ServingStatus::Serving]);
    let denied = client.watch(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn errors_count_as_the_statuses_that_correspond_to_them() {
    let (gate, _) = gate([per_minute("failed-logins", 2).count(StatusSet::none().status(StatusCode::UNAUTHORIZED))]);
    let (address, calls) = serve(&gate).await;
    let mut client = client(address).await;
    for _ in 0..3 {
        assert!(client.check(HealthCheckRequest::default()).await.is_ok());
    }
    let mut codes = Vec::new();
    for _ in 0..3 {
        codes.push(client.check(HealthCheckRequest { service: "locked".into() }).await.unwrap_err().code());
    }
    assert_eq!(codes, [Code::Unauthenticated, Code::Unauthenticated, Code::ResourceExhausted]);
    assert_eq!(calls.load(Ordering::Relaxed), 5);
}

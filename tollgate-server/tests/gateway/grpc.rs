//! gRPC through the gateway, with and without TLS on either side. The client and the server are tonic's.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream};
use http::Uri;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use testkit::certificates::Authority;
use testkit::client::{AsyncStream, Protocol, each_http2};
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, per_user, site};
use testkit::upstream::{accepting, runtime};
use testkit::wait::PATIENCE;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::upstream_tls::server;

type Answer = Result<HealthCheckResponse, Status>;

/// The health service: a call is answered by the requested name, and the stream sends what the test says.
struct Service {
    calls: Arc<AtomicUsize>,
    pending: Mutex<Option<mpsc::Receiver<Answer>>>,
}

impl Service {
    /// Returns it with the sender of the stream's messages and the number of calls.
    fn new() -> (Self, mpsc::Sender<Answer>, Arc<AtomicUsize>) {
        let (calls, (updates, pending)) = (Arc::default(), mpsc::channel(1));
        (Self { calls: Arc::clone(&calls), pending: Mutex::new(Some(pending)) }, updates, calls)
    }
}

#[tonic::async_trait]
impl Health for Service {
    type WatchStream = BoxStream<'static, Answer>;

    async fn check(&self, request: Request<HealthCheckRequest>) -> Result<Response<HealthCheckResponse>, Status> {
        self.calls.fetch_add(1, Relaxed);
        let seen = request.metadata().get("x-asked").cloned();
        match request.get_ref().service.as_str() {
            "nobody" => Err(Status::not_found("nobody is called so: 100 % sure, früh & spät")),
            _ => {
                let mut response = Response::new(health(ServingStatus::Serving));
                if let Some(seen) = seen {
                    response.metadata_mut().insert("x-seen", seen);
                }
                Ok(response)
            }
        }
    }

    async fn watch(&self, _: Request<HealthCheckRequest>) -> Result<Response<Self::WatchStream>, Status> {
        self.calls.fetch_add(1, Relaxed);
        let mut pending = self.pending.lock().unwrap().take().ok_or_else(|| Status::unavailable("watched already"))?;
        Ok(Response::new(Box::pin(stream::poll_fn(move |context| pending.poll_recv(context)))))
    }
}

fn health(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

/// A server behind a gateway that allows each user a number of calls, and a client.
struct Stage {
    client: HealthClient<Channel>,
    /// The messages for the stream.
    updates: mpsc::Sender<Answer>,
    calls: Arc<AtomicUsize>,
    _gateway: Gateway,
}

impl Stage {
    async fn set(protocol: Protocol, calls_per_user: u64) -> Self {
        let (service, updates, calls) = Service::new();
        let route = format!("upstream: 'h2c://{}'", serve(service).await);
        let gateway = protocol.start(&rules(&route, calls_per_user));
        Self { client: connect(&gateway).await, updates, calls, _gateway: gateway }
    }

    /// The connection to the server has TLS, too.
    async fn with_tls_upstream(protocol: Protocol) -> Self {
        let (service, updates, calls) = Service::new();
        let authority = Authority::new();
        let mut config = server(&authority.sign(&["api.internal"]));
        config.alpn_protocols = vec![b"h2".to_vec()];
        let address = serve_tls(service, config);
        let tls = "upstream_tls: { ca: ca.pem, server_name: api.internal }";
        let rules = rules(&format!("upstream: 'https://{address}', {tls}"), 10);
        let gateway = protocol.start_in(folder_with(&[("tollgate.yaml", &rules), ("ca.pem", &authority.pem())]));
        Self { client: connect(&gateway).await, updates, calls, _gateway: gateway }
    }
}

fn rules(route: &str, calls_per_user: u64) -> String {
    site("", &[format!("{{ path: /grpc.health.v1.Health/*, {route} }}")], &per_user(calls_per_user))
}

async fn serve(service: Service) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = Server::builder().add_service(HealthServer::new(service));
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    address
}

/// Serves tonic's service with hyper, because tonic has its own TLS or none.
fn serve_tls(service: Service, config: ServerConfig) -> SocketAddr {
    let (service, acceptor) = (HealthServer::new(service), TlsAcceptor::from(Arc::new(config)));
    let (address, _) = accepting(move |tcp| {
        let (service, acceptor) = (TowerToHyperService::new(service.clone()), acceptor.clone());
        async move {
            let Ok(tls) = acceptor.accept(tcp).await else { return };
            _ = http2::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(tls), service).await;
        }
    });
    address
}

/// Connects tonic's client to a gateway.
async fn connect(gateway: &Gateway) -> HealthClient<Channel> {
    let Gateway { address, protocol, .. } = *gateway;
    // An endpoint of `https` would have tonic's own TLS.
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap().timeout(PATIENCE);
    let origin = format!("{}://{address}", protocol.scheme()).parse().unwrap();
    let channel = endpoint.origin(origin).connect_with_connector(Connector { address, protocol }).await;
    HealthClient::new(channel.unwrap())
}

/// Opens connections to a gateway for tonic's client.
struct Connector {
    address: SocketAddr,
    protocol: Protocol,
}

impl tonic::codegen::Service<Uri> for Connector {
    type Response = TokioIo<AsyncStream>;
    type Error = std::io::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { address, protocol } = *self;
        Box::pin(async move { protocol.open(address).await.map(TokioIo::new) })
    }
}

fn ann_asks(service: &str) -> Request<HealthCheckRequest> {
    let mut request = Request::new(HealthCheckRequest { service: service.to_owned() });
    request.metadata_mut().insert("x-user-id", "ann".parse().unwrap());
    request.metadata_mut().insert("x-asked", "yes".parse().unwrap());
    request
}

#[test]
fn a_call_its_metadata_and_its_error_pass() {
    each_http2(|protocol| {
        runtime().block_on(async {
            let mut stage = Stage::set(protocol, 10).await;
            let answer = stage.client.check(ann_asks("shop")).await.unwrap();
            assert_eq!(answer.get_ref().status(), ServingStatus::Serving);
            assert_eq!(answer.metadata().get("x-seen").unwrap(), "yes");
            assert_eq!(answer.metadata().get("x-ratelimit-remaining").unwrap(), "9");
            let error = stage.client.check(ann_asks("nobody")).await.unwrap_err();
            assert_eq!(
                (error.code(), error.message()),
                (Code::NotFound, "nobody is called so: 100 % sure, früh & spät")
            );
            assert_eq!(stage.calls.load(Relaxed), 2);
        });
    });
}

#[test]
fn a_stream_passes_message_by_message_and_ends_with_the_status_in_its_trailers() {
    each_http2(|protocol| {
        runtime().block_on(async {
            let mut stage = Stage::set(protocol, 10).await;
            let mut answers = stage.client.watch(ann_asks("shop")).await.unwrap().into_inner();
            for said in [ServingStatus::NotServing, ServingStatus::Serving, ServingStatus::Unknown] {
                // The next message is not sent before this one arrives.
                stage.updates.send(Ok(health(said))).await.unwrap();
                assert_eq!(answers.message().await.unwrap().unwrap().status(), said);
            }
            stage.updates.send(Err(Status::data_loss("the rest is lost"))).await.unwrap();
            let error = answers.message().await.unwrap_err();
            assert_eq!((error.code(), error.message()), (Code::DataLoss, "the rest is lost"));
        });
    });
}

#[test]
fn calls_and_streams_pass_to_an_upstream_with_tls() {
    each_http2(|protocol| {
        runtime().block_on(async {
            let mut stage = Stage::with_tls_upstream(protocol).await;
            let answer = stage.client.check(ann_asks("shop")).await.unwrap();
            assert_eq!(answer.metadata().get("x-seen").unwrap(), "yes");
            let error = stage.client.check(ann_asks("nobody")).await.unwrap_err();
            assert_eq!(error.code(), Code::NotFound);
            let mut answers = stage.client.watch(ann_asks("shop")).await.unwrap().into_inner();
            stage.updates.send(Ok(health(ServingStatus::Serving))).await.unwrap();
            assert_eq!(answers.message().await.unwrap().unwrap().status(), ServingStatus::Serving);
            stage.updates.send(Err(Status::data_loss("the rest is lost"))).await.unwrap();
            let error = answers.message().await.unwrap_err();
            assert_eq!((error.code(), error.message()), (Code::DataLoss, "the rest is lost"));
            assert_eq!(stage.calls.load(Relaxed), 3);
        });
    });
}

#[test]
fn a_client_that_leaves_a_stream_ends_it_at_the_server() {
    each_http2(|protocol| {
        runtime().block_on(async {
            let mut stage = Stage::set(protocol, 10).await;
            stage.updates.send(Ok(health(ServingStatus::Serving))).await.unwrap();
            let mut answers = stage.client.watch(ann_asks("shop")).await.unwrap().into_inner();
            assert!(answers.message().await.unwrap().is_some());
            drop(answers);
            timeout(PATIENCE, stage.updates.closed()).await.expect("the server hears of it");
        });
    });
}

#[test]
fn a_denied_call_is_resource_exhausted_and_does_not_reach_the_server() {
    each_http2(|protocol| {
        runtime().block_on(async {
            let mut stage = Stage::set(protocol, 1).await;
            assert!(stage.client.check(ann_asks("shop")).await.is_ok());
            let denials = [
                stage.client.check(ann_asks("shop")).await.unwrap_err(),
                stage.client.watch(ann_asks("shop")).await.map(|_| ()).unwrap_err(),
            ];
            for denied in denials {
                assert_eq!(denied.code(), Code::ResourceExhausted);
                assert!(denied.message().starts_with("Too many requests."), "{}", denied.message());
                assert!(denied.metadata().contains_key("retry-after"), "{:?}", denied.metadata());
            }
            assert_eq!(stage.calls.load(Relaxed), 1);
            // The connection still works.
            let mut request = ann_asks("shop");
            request.metadata_mut().insert("x-user-id", "bob".parse().unwrap());
            assert!(stage.client.check(request).await.is_ok());
        });
    });
}

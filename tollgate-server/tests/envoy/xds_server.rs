//! An xDS server for tests: sends the responses that a test sets, and records all requests.

use std::net::{SocketAddr, TcpListener as StdListener};
use std::pin::Pin;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use futures_util::{Stream, StreamExt, stream};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use prost::Message;
use testkit::wait::PATIENCE;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use crate::proto::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use crate::proto::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::proto::ratelimit::config::ratelimit::v3::RateLimitConfig;

pub(crate) const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

pub(crate) struct XdsServer {
    pub(crate) address: SocketAddr,
    current: watch::Sender<Option<DiscoveryResponse>>,
    requests: Receiver<DiscoveryRequest>,
    /// Ends all connections when it is dropped.
    _runtime: Runtime,
}

#[derive(Clone)]
struct Service {
    current: watch::Receiver<Option<DiscoveryResponse>>,
    requests: Arc<Mutex<Sender<DiscoveryRequest>>>,
}

type Responses = Pin<Box<dyn Stream<Item = Result<DiscoveryResponse, Status>> + Send>>;

#[tonic::async_trait]
impl AggregatedDiscoveryService for Service {
    type StreamAggregatedResourcesStream = Responses;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Responses>, Status> {
        let (mut incoming, requests) = (request.into_inner(), Arc::clone(&self.requests));
        tokio::spawn(async move {
            while let Some(Ok(request)) = incoming.next().await {
                _ = requests.lock().expect("no test panics here").send(request);
            }
        });
        let mut current = self.current.clone();
        current.mark_changed();
        let responses = stream::unfold(current, async |mut current| {
            loop {
                current.changed().await.ok()?;
                let response = current.borrow_and_update().clone();
                if let Some(response) = response {
                    return Some((Ok(response), current));
                }
            }
        });
        Ok(Response::new(Box::pin(responses)))
    }
}

impl XdsServer {
    /// Starts a server without configuration.
    pub(crate) fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().expect("an address"), None)
    }

    pub(crate) fn start_at(address: SocketAddr, tls: Option<TlsAcceptor>) -> Self {
        let listener = StdListener::bind(address).expect("the port is free");
        listener.set_nonblocking(true).expect("a socket");
        let address = listener.local_addr().expect("it listens");
        let (current, receiver) = watch::channel(None);
        let (sender, requests) = channel();
        let service = Service { current: receiver, requests: Arc::new(Mutex::new(sender)) };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime starts");
        runtime.spawn(accept(listener, service, tls));
        Self { address, current, requests, _runtime: runtime }
    }

    /// Sends a configuration to all clients, now and when they connect.
    pub(crate) fn send(&self, version: &str, configs: &[RateLimitConfig]) {
        let any = |config: &RateLimitConfig| prost_types::Any {
            type_url: TYPE_URL.to_owned(),
            value: config.encode_to_vec(),
        };
        self.current.send_replace(Some(DiscoveryResponse {
            version_info: version.to_owned(),
            resources: configs.iter().map(any).collect(),
            type_url: TYPE_URL.to_owned(),
            nonce: format!("nonce-{version}"),
            ..Default::default()
        }));
    }

    /// Waits for the next request.
    pub(crate) fn request(&self) -> DiscoveryRequest {
        self.requests.recv_timeout(PATIENCE).expect("the client sends a request")
    }
}

async fn accept(listener: StdListener, service: Service, tls: Option<TlsAcceptor>) {
    let listener = TcpListener::from_std(listener).expect("a socket");
    while let Ok((stream, _)) = listener.accept().await {
        let routes = Routes::new(AggregatedDiscoveryServiceServer::new(service.clone())).prepare();
        let (service, tls) = (TowerToHyperService::new(routes), tls.clone());
        tokio::spawn(async move {
            let builder = Builder::new(TokioExecutor::new()).http2_only();
            match tls {
                None => _ = builder.serve_connection(TokioIo::new(stream), service).await,
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        _ = builder.serve_connection(TokioIo::new(stream), service).await;
                    }
                }
            }
        });
    }
}

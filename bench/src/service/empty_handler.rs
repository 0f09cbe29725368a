//! A tonic server that answers every request of Envoy's rate limit service with OK: the lower bound of a server that is
//! made with tonic.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::task::{Context, Poll};

use tonic::body::Body;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

use super::envoy::{OK, RateLimitRequest, RateLimitResponse, SERVICE};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long)]
    port: u16,
}

/// Serves until the process is killed, on as many threads as there are processors for it.
pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let address = SocketAddr::from(([127, 0, 0, 1], args.port));
    let server = tonic::transport::Server::builder().tcp_nodelay(true).add_service(EmptyHandler);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    Ok(runtime.block_on(server.serve(address))?)
}

#[derive(Clone)]
struct EmptyHandler;

impl NamedService for EmptyHandler {
    const NAME: &'static str = SERVICE;
}

impl Service<http::Request<Body>> for EmptyHandler {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move { Ok(Grpc::new(ProstCodec::default()).unary(AlwaysOk, request).await) })
    }
}

struct AlwaysOk;

impl UnaryService<RateLimitRequest> for AlwaysOk {
    type Response = RateLimitResponse;
    type Future = Ready<Result<Response<RateLimitResponse>, Status>>;

    fn call(&mut self, _: Request<RateLimitRequest>) -> Self::Future {
        ready(Ok(Response::new(RateLimitResponse { overall_code: OK })))
    }
}

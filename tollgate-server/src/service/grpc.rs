//! Envoy's rate limit service over gRPC, with health checks and reflection.
//!
//! Every descriptor is a set of facts. Limits of envoyproxy/ratelimit's configuration are looked up first, then the
//! limits of the rule file that match. All descriptors of a request are decided together, all or nothing.

mod request;
mod response;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::Request as HttpRequest;
use axum::http::{HeaderMap, header};
use axum::middleware::{Next, from_fn};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tollgate::{Gate, Outcome};
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use self::request::{Denials, Descriptors, Overridden};
use super::connections::{self, Options, Stop};
use super::http::authenticate;
use super::proto::DESCRIPTORS;
use super::proto::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use super::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::throttle::Throttles;
use super::tokens::Tokens;
use crate::decisions::Decisions;

/// The longest request. A request with the most descriptors and entries of ordinary length is much shorter.
const MAX_MESSAGE_BYTES: usize = 256 * 1024;

/// The longest request for health or reflection, which need no more than the name of a service.
const MAX_SMALL_MESSAGE_BYTES: usize = 4 * 1024;

/// The longest time from the head of a request to its response. A client that has the whole request sends it at once,
/// and decisions take at most the timeout of the store.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);

/// The time for which clients that watch the health of the server can read that it stops.
const HEALTH_NOTICE: Duration = Duration::from_secs(1);

/// The state that requests share.
#[derive(Clone)]
pub(crate) struct GrpcState {
    pub(crate) gate: Gate,
    /// Counts of decisions.
    pub(crate) decisions: Arc<Decisions>,
    /// Limits whose numbers are sent with a descriptor.
    pub(crate) throttles: Arc<Throttles>,
    /// The tokens that clients send. Without them no client needs one.
    pub(crate) tokens: Option<Arc<Tokens>>,
}

/// Serves until `shutdown` resolves, then finishes pending requests.
pub(crate) async fn run(
    listener: Arc<TcpListener>,
    state: GrpcState,
    options: Options,
    shutdown: impl Future<Output = Stop>,
) {
    let health = HealthReporter::new();
    set_health(&health, ServingStatus::Serving).await;
    let router = router(state, &health);
    let stop = async {
        let stop = shutdown.await;
        if stop == Stop::Close {
            set_health(&health, ServingStatus::NotServing).await;
        }
        let health = health.clone();
        tokio::spawn(async move {
            sleep(HEALTH_NOTICE).await;
            // Ends the streams of clients that watch.
            for service in SERVICES {
                health.clone().clear_service_status(service).await;
            }
        });
        stop
    };
    connections::serve(listener, router, options, stop).await;
}

/// The names under which clients ask for the health of the server. The empty one is the server as a whole.
const SERVICES: [&str; 2] = ["", RateLimitServiceServer::<GrpcState>::NAME];

async fn set_health(health: &HealthReporter, status: ServingStatus) {
    for service in SERVICES {
        health.set_service_status(service, status).await;
    }
}

fn router(state: GrpcState, health: &HealthReporter) -> axum::Router {
    let tokens = state.tokens.clone();
    let limits = RateLimitServiceServer::new(state).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let health = tonic_health::pb::health_server::HealthServer::new(
        tonic_health::server::HealthService::from_health_reporter(health.clone()),
    )
    .max_decoding_message_size(MAX_SMALL_MESSAGE_BYTES);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(RateLimitServiceServer::<GrpcState>::NAME)
            .with_service_name("grpc.health.v1.Health")
    };
    let mut routes = Routes::new(limits).add_service(health);
    if let Ok(v1) = reflection().build_v1() {
        routes = routes.add_service(v1.max_decoding_message_size(MAX_SMALL_MESSAGE_BYTES));
    }
    if let Ok(v1alpha) = reflection().build_v1alpha() {
        routes = routes.add_service(v1alpha.max_decoding_message_size(MAX_SMALL_MESSAGE_BYTES));
    }
    routes.into_axum_router().layer(from_fn(move |request: HttpRequest, next: Next| {
        let refusal = refuse(&request, tokens.as_deref());
        async move {
            match refusal {
                Some(status) => status.into_http(),
                None => match timeout(REQUEST_DEADLINE, next.run(request)).await {
                    Ok(response) => response,
                    Err(_) => Status::deadline_exceeded(format!(
                        "the request took longer than {} s: send it at once",
                        REQUEST_DEADLINE.as_secs()
                    ))
                    .into_http(),
                },
            }
        }
    }))
}

/// Returns why a request is refused: it comes from a web page, or has no valid token. Health checks need none, because
/// the probes of orchestrators cannot send one.
fn refuse(request: &HttpRequest, tokens: Option<&Tokens>) -> Option<Status> {
    if request.headers().contains_key(header::ORIGIN) {
        return Some(Status::permission_denied("the request has an Origin: call this service from a program"));
    }
    let is_health = request.uri().path().starts_with("/grpc.health.v1.Health/");
    let tokens = tokens.filter(|_| !is_health)?;
    let error = authenticate(request.headers(), tokens).err()?;
    Some(Status::unauthenticated(error.message))
}

#[tonic::async_trait]
impl RateLimitService for GrpcState {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let time_left = time_left(request.metadata().as_ref());
        let request = request.into_inner();
        if self.gate.redis().is_none() {
            // Decided at once.
            return self.decide(&request).await.map(Response::new);
        }
        // The decision continues if the client stops waiting for it. Otherwise units that were taken for a request that
        // is denied in the end would not be given back.
        let state = self.clone();
        let decided = tokio::spawn(async move { state.decide(&request).await });
        let decided = match time_left {
            Some(time_left) => timeout(time_left, decided).await.map_err(|_| {
                Status::deadline_exceeded("the store did not reply within the deadline of the request: allow more time")
            })?,
            None => decided.await,
        };
        decided
            .map_err(|_| Status::internal("the decision failed: report this with the log of the server"))?
            .map(Response::new)
    }
}

impl GrpcState {
    pub(crate) async fn decide(&self, request: &RateLimitRequest) -> Result<RateLimitResponse, Status> {
        // One set of rules for the whole request, even if a reload happens meanwhile.
        let gate = self.gate.pinned();
        let rules = gate.rules();
        let descriptors = Descriptors::read(&rules, request)?;
        descriptors.refund(&gate).await?;
        let mut denials = Denials::default();
        let mut outcomes = descriptors.check(&gate, &denials)?.outcomes().await;
        while denials.add_quota_denials(&descriptors, &mut outcomes) {
            outcomes = descriptors.check(&gate, &denials)?.outcomes().await;
        }
        let overrides = descriptors.check_overrides(&self.throttles, outcomes.iter().all(Outcome::is_allowed)).await?;
        if !overrides.iter().all(Overridden::is_allowed) {
            for outcome in &outcomes {
                _ = outcome.refund().await;
            }
        }
        self.decisions.record(descriptors.counted(&denials, &outcomes));
        Ok(response::build(&descriptors, &denials, &outcomes, &overrides))
    }
}

/// Returns the time that the client waits, from the header `grpc-timeout`: digits and a unit.
fn time_left(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let number: u64 = digits.parse().ok().filter(|_| digits.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_read() {
        let read = |text: &'static str| {
            time_left(&HeaderMap::from_iter([(header::HeaderName::from_static("grpc-timeout"), text.parse().unwrap())]))
        };
        assert_eq!(read("50m"), Some(Duration::from_millis(50)));
        assert_eq!(read("2S"), Some(Duration::from_secs(2)));
        for invalid in ["", "m", "5", "-1S", "123456789S", "5x", "5é"] {
            assert_eq!(read(invalid), None, "{invalid}");
        }
    }
}

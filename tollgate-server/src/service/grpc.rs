//! Envoy's rate limit service over gRPC, with health checks and reflection.
//!
//! Every descriptor is a set of facts. Limits of envoyproxy/ratelimit's configuration are looked up first, then the
//! limits of the rule file that match. All descriptors of a request are decided together, all or nothing.

mod handler;
mod message;
mod request;
mod response;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tollgate_net::listening::Stop;
use tollgate_rules::RuleSet;
use tollgate_rules::{Checks, Gate, Outcome};
use tollgate_telemetry::decisions::Decisions;
use tollgate_telemetry::unknown::Unknown;
use tonic::Status;
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use self::handler::GrpcHandler;
use self::request::{Denials, Descriptors, Overridden};
use super::connections::{self, Options};
use super::proto::DESCRIPTORS;
use super::proto::envoy::service::ratelimit::v3::rate_limit_service_server::SERVICE_NAME;
use super::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::throttle::Throttles;
use super::tokens::Tokens;
use crate::readiness::Readiness;

/// The longest request for health or reflection, which need no more than the name of a service.
const MAX_SMALL_MESSAGE_BYTES: usize = 4 * 1024;

/// The pause between two looks at the readiness of a server that is not ready.
const READINESS_PAUSE: Duration = Duration::from_millis(200);

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
    (options, readiness): (Options, Arc<Readiness>),
    shutdown: impl Future<Output = Stop>,
) {
    let health = HealthReporter::new();
    set_health(&health, readiness.check_ready().is_ok()).await;
    let following = tokio::spawn(follow(readiness, health.clone()));
    let handler = GrpcHandler::new(state, other_services(&health));
    let stop = async {
        let stop = shutdown.await;
        following.abort();
        if stop == Stop::Close {
            set_health(&health, false).await;
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
    connections::serve(listener, handler, options, stop).await;
}

/// The names under which clients ask for the health of the server. The empty one is the server as a whole.
const SERVICES: [&str; 2] = ["", SERVICE_NAME];

/// Reports the readiness of the server as the health of its services, so that gRPC clients read the same as `/readyz`.
async fn follow(readiness: Arc<Readiness>, health: HealthReporter) -> Infallible {
    let mut changes = readiness.changes();
    loop {
        let is_ready = readiness.check_ready().is_ok();
        set_health(&health, is_ready).await;
        // The wait for an xDS server ends without a change.
        let wait = if is_ready { Duration::MAX } else { READINESS_PAUSE };
        _ = timeout(wait, changes.changed()).await;
    }
}

async fn set_health(health: &HealthReporter, is_ready: bool) {
    let status = if is_ready { ServingStatus::Serving } else { ServingStatus::NotServing };
    for service in SERVICES {
        health.set_service_status(service, status).await;
    }
}

/// Returns health checks and reflection.
fn other_services(health: &HealthReporter) -> axum::Router {
    let health = tonic_health::pb::health_server::HealthServer::new(
        tonic_health::server::HealthService::from_health_reporter(health.clone()),
    )
    .max_decoding_message_size(MAX_SMALL_MESSAGE_BYTES);
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .with_service_name(SERVICE_NAME)
            .with_service_name("grpc.health.v1.Health")
    };
    let mut routes = Routes::new(health);
    if let Ok(v1) = reflection().build_v1() {
        routes = routes.add_service(v1.max_decoding_message_size(MAX_SMALL_MESSAGE_BYTES));
    }
    if let Ok(v1alpha) = reflection().build_v1alpha() {
        routes = routes.add_service(v1alpha.max_decoding_message_size(MAX_SMALL_MESSAGE_BYTES));
    }
    routes.into_axum_router()
}

impl GrpcState {
    /// Decides a request, by one set of rules even if a reload happens meanwhile.
    pub(crate) async fn decide(&self, request: &RateLimitRequest) -> Result<RateLimitResponse, Status> {
        let gate = self.gate.pinned();
        let rules = gate.rules();
        let descriptors = Descriptors::read(&rules, request)?;
        if rules.denies_unknown() {
            let unknown: Vec<(usize, Unknown)> = descriptors.unknown(&rules, |_| false).collect();
            if !unknown.is_empty() {
                self.count_unknown(&descriptors, &unknown);
                return Ok(response::of_unknown(&descriptors, &unknown));
            }
        }
        let mut checks = None;
        if descriptors.are_plain(&rules) {
            match descriptors.check(&gate, &Denials::default())? {
                Checks::Ready(outcomes) => {
                    descriptors.check_readable(&Denials::default(), &outcomes)?;
                    return Ok(self.respond(&rules, &descriptors, (&Denials::default(), &outcomes, &[])));
                }
                pending @ Checks::Pending(_) => checks = Some(pending),
            }
        }
        // Boxed, because the future of every request would be as large otherwise.
        Box::pin(self.decide_in_steps(&gate, &descriptors, checks)).await
    }

    /// Decides a request that needs a remote store or several calls. `checks` are those that were started already.
    async fn decide_in_steps(
        &self,
        gate: &Gate,
        descriptors: &Descriptors<'_>,
        checks: Option<Checks>,
    ) -> Result<RateLimitResponse, Status> {
        descriptors.refund(gate).await?;
        let mut denials = Denials::default();
        let checks = checks.map_or_else(|| descriptors.check(gate, &denials), Ok)?;
        let mut outcomes = checks.outcomes().await;
        descriptors.check_readable(&denials, &outcomes)?;
        while denials.add_quota_denials(descriptors, &mut outcomes) {
            outcomes = descriptors.check(gate, &denials)?.outcomes().await;
        }
        let overrides = descriptors.check_overrides(&self.throttles, outcomes.iter().all(Outcome::is_allowed)).await?;
        let is_allowed = overrides.iter().all(Overridden::is_allowed);
        if !is_allowed {
            for outcome in &outcomes {
                _ = outcome.refund().await;
            }
        }
        let is_allowed = is_allowed && outcomes.iter().all(Outcome::is_allowed);
        let charged = descriptors.charge(gate, &denials, is_allowed).await?;
        let mut response = self.respond(&gate.rules(), descriptors, (&denials, &outcomes, &overrides));
        descriptors.show_charged(&charged, &mut response);
        Ok(response)
    }

    /// Counts descriptors that no limit applies to, and unknown plans.
    fn count_unknown(&self, descriptors: &Descriptors<'_>, unknown: &[(usize, Unknown)]) {
        for (index, unknown) in unknown {
            self.decisions.unknown.count(unknown, descriptors.each[*index].names());
        }
    }

    /// Counts the decisions and builds the response.
    fn respond(
        &self,
        rules: &RuleSet,
        descriptors: &Descriptors<'_>,
        (denials, outcomes, overrides): (&Denials, &[Outcome], &[Overridden]),
    ) -> RateLimitResponse {
        self.decisions.record(descriptors.counted(denials, outcomes));
        if rules.have_plans() || outcomes.iter().any(|outcome| outcome.decision().is_none()) {
            let checked: Vec<usize> = descriptors.checked(denials).collect();
            let is_counted = |index: usize| {
                let outcome = checked.iter().position(|checked| *checked == index).and_then(|at| outcomes.get(at));
                outcome.is_none_or(|outcome| {
                    outcome.decision().is_some() || !outcome.is_allowed() || outcome.shadow_decisions().next().is_some()
                })
            };
            let unknown: Vec<(usize, Unknown)> = descriptors.unknown(rules, is_counted).collect();
            self.count_unknown(descriptors, &unknown);
        }
        response::build(descriptors, denials, outcomes, overrides)
    }
}

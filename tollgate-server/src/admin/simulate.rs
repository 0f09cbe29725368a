//! `POST /v1/simulate`: limits on generated traffic, for the playground of the dashboard.
//!
//! It runs the production algorithms on a thread for blocking work, so that requests of other clients are answered
//! meanwhile. One simulation runs at a time, and each is bounded, so it takes at most a fraction of one processor.

use std::time::Duration;

use axum::Json;
use axum::extract::Request;
use axum::http::StatusCode;
use schemars::JsonSchema;
use serde::Deserialize;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tollgate_config::internal::{AlgorithmName, DurationText, Overflow as OverflowRule, RateText};
use tollgate_tools::simulate::limits::{ALGORITHMS, Overflow, Quota, SimulatedLimit};
use tollgate_tools::simulate::numbers::{Kind, TrafficNumbers};
use tollgate_tools::simulate::report::Report;
use tollgate_tools::simulate::simulate_up_to;

use crate::service::error_body::{ErrorBody, field_error};
use crate::service::http::read_json;

/// A tenth of a second of work for all five algorithms.
const MAX_REQUESTS: usize = 100_000;
/// The longest wait for the simulation of another client, and for the own one.
const DEADLINE: Duration = Duration::from_secs(5);

static RUNNING: Semaphore = Semaphore::const_new(1);

/// A simulation. The numbers are those of `tollgate simulate`, with the same defaults.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct SimulateRequest {
    limits: LimitNumbers,
    traffic: TrafficRequest,
    /// The seed of random traffic: 1 by default.
    seed: Option<u64>,
}

/// The numbers that all algorithms share.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct LimitNumbers {
    /// All five by default.
    algorithms: Vec<AlgorithmName>,
    /// Units per window.
    limit: u64,
    /// One minute by default.
    window: Option<DurationText>,
    /// Units in a full bucket: the limit by default.
    capacity: Option<u64>,
    /// The rate of both buckets: the limit per window by default.
    refill: Option<RateText>,
    /// Segments of the sliding window counter.
    segments: u32,
    /// What a leaky bucket does with requests that do not fit: `queue` by default.
    overflow: Option<OverflowRule>,
}

/// Generated traffic.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct TrafficRequest {
    kind: Kind,
    /// The rate of requests: 1.5 times the limit by default.
    rate: Option<RateText>,
    /// The length of the traffic: five windows by default.
    #[serde(rename = "for")]
    span: Option<DurationText>,
    /// Requests of a burst, or on each side of a boundary.
    burst: Option<u64>,
    /// The time from one burst to the next: the window by default.
    every: Option<DurationText>,
    /// The cost of a request: 1 by default.
    cost: Option<u32>,
}

impl Default for LimitNumbers {
    fn default() -> Self {
        let algorithms = ALGORITHMS.to_vec();
        Self { algorithms, limit: 100, window: None, capacity: None, refill: None, segments: 1, overflow: None }
    }
}

impl LimitNumbers {
    fn build(&self) -> Result<Vec<SimulatedLimit>, ErrorBody> {
        let quota = Quota {
            limit: self.limit,
            window: self.window.map_or(tollgate::MINUTE, DurationText::duration),
            capacity: self.capacity,
            refill: self.refill.map(RateText::rate),
            segments: self.segments,
            overflow: match self.overflow {
                Some(OverflowRule::Reject) => Overflow::Reject,
                _ => Overflow::Queue,
            },
        };
        let limits: Result<Vec<_>, _> = self.algorithms.iter().map(|algorithm| quota.with(*algorithm)).collect();
        limits.map_err(|error| ErrorBody::invalid(format!("limits: {error}")))
    }
}

pub(super) async fn simulate(request: Request) -> Result<Json<Report>, ErrorBody> {
    let body = read_json(request).await?;
    let mut json = serde_json::Deserializer::from_slice(&body);
    let request: SimulateRequest = serde_path_to_error::deserialize(&mut json)
        .map_err(|error| ErrorBody::invalid(field_error(&error.path().to_string(), error.inner())))?;
    let permit = match timeout(DEADLINE, RUNNING.acquire()).await {
        Ok(Ok(permit)) => permit,
        Ok(Err(_)) | Err(_) => return Err(unavailable("another simulation is running: try again")),
    };
    let running = tokio::task::spawn_blocking(move || {
        // Held until the work ends, also if the client has left.
        let _permit = permit;
        run(&request)
    });
    match timeout(DEADLINE, running).await {
        Ok(Ok(report)) => report.map(Json),
        Ok(Err(_)) | Err(_) => Err(unavailable("the simulation took too long: use a lower rate or a smaller limit")),
    }
}

fn run(request: &SimulateRequest) -> Result<Report, ErrorBody> {
    let limits = request.limits.build()?;
    let TrafficRequest { kind, rate, span, burst, every, cost } = &request.traffic;
    let duration = |text: &Option<DurationText>| text.map(DurationText::duration);
    let numbers = TrafficNumbers {
        kind: *kind,
        rate: rate.map(RateText::rate),
        span: duration(span),
        burst: *burst,
        every: duration(every),
        cost: *cost,
        seed: request.seed,
    };
    let traffic = numbers.traffic(&limits).map_err(|error| ErrorBody::invalid(format!("traffic.{error}")))?;
    simulate_up_to(MAX_REQUESTS, &limits, &traffic).map_err(|error| ErrorBody::invalid(error.to_string()))
}

fn unavailable(message: &str) -> ErrorBody {
    ErrorBody { status: StatusCode::SERVICE_UNAVAILABLE, error: "busy", message: message.to_owned() }
}

//! Requests of gRPC clients: bounds, authentication and deadlines, then the method.
//!
//! `ShouldRateLimit` is answered here. Health checks and reflection are services of tonic in an axum router, which alone
//! takes longer than the decision (`bench tower`).

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, Response, StatusCode, header};
use hyper::Request;
use prost::Message;
use tokio::time::timeout;
use tollgate_telemetry::traces::{self, DecisionNote, RequestSpan, SpanEnd};
use tonic::Status;

use super::GrpcState;
use super::message::{self, GrpcBody};
use crate::service::connections::{CountedBody, Handler};
use crate::service::http::authenticate;
use crate::service::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use crate::service::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use crate::service::tokens::Tokens;

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// The longest time from the head of a request to its response. A client that has the whole request sends it at once,
/// and decisions take at most the timeout of the store.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);

/// Answers requests.
#[derive(Clone)]
pub(super) struct GrpcHandler(Arc<Services>);

struct Services {
    limits: GrpcState,
    /// Health checks and reflection.
    others: Router,
}

impl GrpcHandler {
    pub(super) fn new(limits: GrpcState, others: Router) -> Self {
        Self(Arc::new(Services { limits, others }))
    }
}

impl Handler for GrpcHandler {
    type Body = GrpcBody;

    // Other gRPC servers send none either, and each would take a clock read.
    const SENDS_DATE: bool = false;

    async fn handle(self, request: Request<CountedBody>, peer: SocketAddr) -> Response<GrpcBody> {
        let Services { limits, others } = &*self.0;
        let answered = within(REQUEST_DEADLINE, async {
            if let Some(status) = refuse(&request, limits.tokens.as_deref()) {
                return Err(status);
            }
            if request.uri().path() == SHOULD_RATE_LIMIT {
                if traces::is_on() {
                    return message::response(&Box::pin(limits.traced(request)).await?);
                }
                return message::response(&limits.should_rate_limit(request).await?);
            }
            // Boxed, because the future of every request would be as large otherwise.
            let response = Box::pin(others.clone().handle(request, peer)).await;
            Ok(response.map(GrpcBody::Tonic))
        });
        let too_late = || {
            let seconds = REQUEST_DEADLINE.as_secs();
            Err(Status::deadline_exceeded(format!("the request took longer than {seconds} s: send it at once")))
        };
        answered.await.unwrap_or_else(too_late).unwrap_or_else(Status::into_http)
    }
}

impl GrpcState {
    /// Decides as `should_rate_limit` does, and records a span.
    async fn traced(&self, request: Request<CountedBody>) -> Result<super::RateLimitResponse, Status> {
        let mut span = RequestSpan::start("POST", request.uri().path(), request.headers().into());
        let answer = self.should_rate_limit(request).await;
        let status = match &answer {
            Ok(response) => {
                span.note_decision(&note_of(response));
                StatusCode::OK
            }
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        span.end(SpanEnd { status: Some(status), route: Some("service.grpc ShouldRateLimit"), id: None });
        answer
    }

    async fn should_rate_limit(&self, request: Request<CountedBody>) -> Result<super::RateLimitResponse, Status> {
        let time_left = read_head(request.headers())?;
        let message = message::read(request.into_body()).await?;
        let request = RateLimitRequest::decode(message)
            .map_err(|error| Status::invalid_argument(format!("the message is not a RateLimitRequest: {error}")))?;
        if self.gate.redis().is_none() {
            // Decided at once.
            return self.decide(&request).await;
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
        decided.map_err(|_| Status::internal("the decision failed: report this with the log of the server"))?
    }
}

/// Returns the decision in a response: that of the first descriptor that is over its limit, or of the first one.
fn note_of(response: &super::RateLimitResponse) -> DecisionNote {
    let over = Code::OverLimit as i32;
    let statuses = &response.statuses;
    let status = statuses.iter().find(|status| status.code == over).or(statuses.first());
    let is_allowed = response.overall_code != over;
    DecisionNote {
        is_allowed,
        limit: status.and_then(|status| Some(status.current_limit.as_ref()?.name.clone())),
        decision: if is_allowed { "allowed" } else { "denied" },
        remaining: status.map(|status| status.limit_remaining.into()),
        source: None,
    }
}

/// Waits for a future for at most `limit`, or returns `None`. No timer is set for a future that is ready at once.
async fn within<F: Future>(limit: Duration, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    match poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await {
        Poll::Ready(output) => Some(output),
        Poll::Pending => timeout(limit, future).await.ok(),
    }
}

/// Returns why a request is refused: it comes from a web page, or has no valid token. Health checks need none, because
/// the probes of orchestrators cannot send one.
fn refuse(request: &Request<CountedBody>, tokens: Option<&Tokens>) -> Option<Status> {
    if request.headers().contains_key(header::ORIGIN) {
        return Some(Status::permission_denied("the request has an Origin: call this service from a program"));
    }
    let is_health = request.uri().path().starts_with("/grpc.health.v1.Health/");
    let tokens = tokens.filter(|_| !is_health)?;
    let error = authenticate(request.headers(), tokens).err()?;
    Some(Status::unauthenticated(error.message))
}

/// Returns the time that the client waits. Refuses compressed messages.
fn read_head(headers: &HeaderMap) -> Result<Option<Duration>, Status> {
    if headers.get("grpc-encoding").is_some_and(|encoding| encoding != "identity") {
        let mut status = Status::unimplemented("the message is compressed: send it without compression");
        status.metadata_mut().insert("grpc-accept-encoding", tonic::metadata::MetadataValue::from_static("identity"));
        return Err(status);
    }
    Ok(time_left(headers))
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
    use std::convert::Infallible;

    use bytes::Bytes;
    use http_body_util::StreamBody;
    use hyper::body::Frame;
    use hyper::client::conn::http2;
    use hyper_util::rt::{TokioExecutor, TokioIo};
    use tokio::sync::watch;
    use tokio::time::Instant;
    use tollgate_rules::{Gate, RuleSet};

    use super::*;
    use crate::service::connections::{Begun, Requests, Stage, serve_http};
    use crate::service::surfaces::Surface;
    use crate::service::throttle::Throttles;

    /// Sends the head of a request and never its body.
    #[tokio::test(start_paused = true)]
    async fn a_request_without_an_end_is_answered_at_its_deadline() {
        let gate = Gate::in_memory(RuleSet::builder().build().unwrap()).unwrap();
        let throttles = Arc::new(Throttles::new(&gate));
        let limits = GrpcState { gate, decisions: Arc::default(), throttles, tokens: None };
        let (client, server) = tokio::io::duplex(8192);
        let (_serving, stage) = watch::channel(Stage::Serving);
        let begun = Begun::new(SocketAddr::from(([127, 0, 0, 1], 1)), Arc::default());
        let requests = Requests { surface: Surface::Grpc, surfaces: Arc::default() };
        tokio::spawn(serve_http(server, begun, (GrpcHandler::new(limits, Router::new()), requests), stage));
        let (mut sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(client)).await.unwrap();
        tokio::spawn(connection);
        let body = StreamBody::new(futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>());
        let request = Request::post(format!("http://localhost{SHOULD_RATE_LIMIT}")).body(body).unwrap();
        let start = Instant::now();
        let response = sender.send_request(request).await.unwrap();
        assert_eq!(response.headers()["grpc-status"], "4");
        assert_eq!(start.elapsed().as_secs(), REQUEST_DEADLINE.as_secs());
    }

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

//! The parsers of HTTP/1, and the parsers and handlers of the decision service, for the fuzzer. The latter run on a gate in
//! memory whose clock stands still, so that the same input gets the same output.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use axum::body::{Body, to_bytes};
use axum::http::{Request, header};
use futures_util::FutureExt as _;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use prost::Message as _;
use tokio::runtime::{Builder, Runtime};
use tollgate::{Limiter, ManualClock, Timestamp};
use tollgate_config::RuleFile;
use tollgate_config::internal::DomainConfig;
use tollgate_rules::{Gate, RuleSet};

pub use crate::gateway::http1_fuzzing::{Http1End, Http1Request, read_requests};
use crate::service::grpc::GrpcState;
use crate::service::http::{ServiceState, answer_simple_check, routes};
use crate::service::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use crate::service::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use crate::service::resp::{self, Engine};
use crate::service::throttle::Throttles;
use crate::service::tokens::Tokens;

/// The limits of every service.
pub const RULES: &str = "
limits:
  - { name: per-user, key: 'header:x-user-id', algorithm: token_bucket, capacity: 3, refill: 1/h }
  - { name: per-page, key: ['header:x-user-id', path], limit: 5, window: 1h }
  - { name: global, limit: 100, window: 1h }
  - { name: per-descriptor, key: 'descriptor:user', match: { domain: native }, limit: 3, window: 1h }
";

const DOMAIN: &str = "
domain: edge
descriptors:
  - { key: user, rate_limit: { unit: hour, requests_per_unit: 3 } }
  - { key: user, value: ann, rate_limit: { unlimited: true } }
  - key: path
    rate_limit: { unit: day, requests_per_unit: 2 }
    descriptors:
      - { key: method, value: 'P*', rate_limit: { unit: minute, requests_per_unit: 1 } }
  - { key: watched, shadow_mode: true, rate_limit: { unit: minute, requests_per_unit: 1 } }
";

static COMPILED: LazyLock<RuleSet> = LazyLock::new(|| {
    let file = RuleFile::parse("tollgate.yaml", RULES).expect("the rules are valid");
    let (domain, _) = DomainConfig::parse("edge.yaml", DOMAIN.as_bytes()).expect("the domain is valid");
    let file = file.with_domains(vec![domain]).expect("there is one domain");
    file.compile().expect("the rules are valid")
});

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_multi_thread().worker_threads(1).enable_time().build().expect("threads start"));

/// A decision service with its own state.
pub struct Service(Gate);

/// Reads a line of an access log in every format.
pub fn read_log_line(line: &[u8]) {
    tollgate_tools::access_log::read_in_every_format(line);
}

/// The end of a connection of the Redis protocol.
#[derive(Debug, PartialEq, Eq)]
pub struct RespConversation {
    pub replies: Vec<u8>,
    /// Whether the server closes the connection.
    pub is_closed: bool,
}

/// A request of Envoy's rate limit service.
#[derive(Clone, Debug, PartialEq)]
pub struct Descriptors(RateLimitRequest);

/// The response to such a request.
#[derive(Debug)]
pub struct Limited {
    pub is_allowed: bool,
    /// Whether each descriptor is allowed, and its remaining hits.
    pub statuses: Vec<(bool, u32)>,
}

impl Default for Service {
    fn default() -> Self {
        let clock = ManualClock::at(Timestamp::from_secs(1_700_000_000));
        Self(Gate::with_limiter(COMPILED.clone(), Limiter::builder().clock(clock)).expect("the limits fit the memory"))
    }
}

impl Service {
    /// Sends pieces of input on a connection of the Redis protocol.
    pub fn resp<'p>(&self, tokens_file: Option<&Path>, pieces: impl IntoIterator<Item = &'p [u8]>) -> RespConversation {
        let engine = Engine {
            gate: self.0.clone(),
            throttles: Arc::new(Throttles::new(&self.0)),
            decisions: Arc::default(),
            tokens: tokens_file.map(|path| Arc::new(Tokens::open(path).expect("the file has a token"))),
        };
        let ended = resp::execute_pieces(Arc::new(engine), pieces).expect("memory never waits");
        RespConversation { replies: ended.replies, is_closed: ended.is_closed }
    }

    /// Posts a body of JSON. Returns the status and the body of the response.
    pub fn post(&self, path: &str, body: &[u8]) -> (u16, Vec<u8>) {
        let request = Request::post(path).header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(body.to_vec())).expect("the path is valid");
        RUNTIME.block_on(async {
            let response = TowerToHyperService::new(routes(self.http_state())).call(request).await;
            let response = response.unwrap_or_else(|never| match never {});
            let status = response.status().as_u16();
            (status, to_bytes(response.into_body(), usize::MAX).await.expect("it is in memory").to_vec())
        })
    }

    /// Sends a whole request to the fast path of simple checks. Returns the response, or `None` if the request is left
    /// to the other path.
    pub fn simple_check(&self, request: &[u8]) -> Option<Vec<u8>> {
        RUNTIME.block_on(answer_simple_check(self.http_state(), request))
    }

    /// Decides a request of Envoy's rate limit service. Returns the code and the message of an error.
    pub fn rate_limit(&self, Descriptors(request): &Descriptors) -> Result<Limited, (i32, String)> {
        let state = GrpcState {
            gate: self.0.clone(),
            decisions: Arc::default(),
            throttles: Arc::new(Throttles::new(&self.0)),
            tokens: None,
        };
        let decided = state.decide(request).now_or_never().expect("memory never waits");
        let response = decided.map_err(|status| (status.code().into(), status.message().to_owned()))?;
        let statuses = response.statuses.iter();
        Ok(Limited {
            is_allowed: response.overall_code() == Code::Ok,
            statuses: statuses.map(|status| (status.code() == Code::Ok, status.limit_remaining)).collect(),
        })
    }

    fn http_state(&self) -> ServiceState {
        ServiceState { gate: self.0.clone(), decisions: Arc::default(), tokens: None }
    }
}

impl Descriptors {
    /// Decodes a message.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        RateLimitRequest::decode(bytes).ok().map(Self)
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        self.0.encode_to_vec()
    }

    /// Returns the number of descriptors.
    pub fn count(&self) -> usize {
        self.0.descriptors.len()
    }

    /// Returns whether a descriptor gives hits back.
    pub fn has_refund(&self) -> bool {
        self.0.descriptors.iter().any(|descriptor| descriptor.is_negative_hits)
    }

    /// Returns the request with no hits, which takes nothing.
    pub fn peek(&self) -> Self {
        let mut request = self.0.clone();
        for descriptor in &mut request.descriptors {
            (descriptor.hits_addend, descriptor.is_negative_hits) = (Some(0), false);
        }
        Self(request)
    }
}

/// Parses requests of the Redis protocol. Returns the words of each, and whether the rest is malformed.
pub fn parse_resp(input: &[u8]) -> (Vec<Vec<Vec<u8>>>, bool) {
    resp::parse_requests(input)
}

//! Traces: a span for each request of the gateway and each call of the decision service, sent to a collector with OTLP.
//!
//! Only with the feature `otlp`, and only if `OTEL_EXPORTER_OTLP_ENDPOINT` is set. Without the feature, the types here are
//! empty and the functions do nothing. Deliberately not here: keys of users, and queries of URLs.

mod context;
#[cfg(not(feature = "otlp"))]
mod off;
#[cfg(feature = "otlp")]
mod otlp;
#[cfg(feature = "otlp")]
mod queue;

pub use self::context::{TRACEPARENT, TRACESTATE, TraceParent};
use tollgate::Decision;
use tollgate_rules::Outcome;

#[cfg(not(feature = "otlp"))]
pub use self::off::{RequestSpan, is_on, start, write_metrics};
#[cfg(feature = "otlp")]
pub use self::otlp::{RequestSpan, is_on, start, write_metrics};
use crate::decisions::{DecisionLabel, source_name};

/// A decision, for the span of its request.
#[derive(Clone, Debug)]
pub struct DecisionNote {
    /// Whether the request passed.
    pub is_allowed: bool,
    /// The limit that decided.
    pub limit: Option<String>,
    /// The label of the decision, as in metrics.
    pub decision: &'static str,
    /// The units that the key has left.
    pub remaining: Option<u64>,
    /// What decided, such as the store or a lease.
    pub source: Option<&'static str>,
}

impl DecisionNote {
    /// Returns the decision on a request.
    pub fn of(outcome: &Outcome) -> Self {
        let decision = outcome.decision();
        Self {
            is_allowed: outcome.is_allowed(),
            limit: outcome.limit().map(str::to_owned),
            decision: if outcome.limit().is_some() { DecisionLabel::of(outcome).as_str() } else { "none" },
            remaining: decision.map(Decision::remaining),
            source: decision.map(|decision| source_name(decision.source())),
        }
    }
}

/// The end of a request, for its span.
#[derive(Clone, Copy, Default)]
pub struct SpanEnd<'a> {
    /// `None` if the client left before the response.
    pub status: Option<http::StatusCode>,
    /// The route of the gateway.
    pub route: Option<&'a str>,
    /// The ID of the request.
    pub id: Option<&'a http::HeaderValue>,
}

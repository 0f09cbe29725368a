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

use tollgate::Decision;
use tollgate_rules::Outcome;

pub(crate) use self::context::{TRACEPARENT, TRACESTATE, TraceParent};

#[cfg(not(feature = "otlp"))]
pub(crate) use self::off::{RequestSpan, is_on, start, write_metrics};
#[cfg(feature = "otlp")]
pub(crate) use self::otlp::{RequestSpan, is_on, start, write_metrics};
use crate::decisions::{DecisionLabel, source_name};

/// A decision, for the span of its request.
#[derive(Clone, Debug)]
#[cfg_attr(not(feature = "otlp"), expect(dead_code, reason = "only spans read it"))]
pub(crate) struct DecisionNote {
    pub(crate) is_allowed: bool,
    /// The limit that decided.
    pub(crate) limit: Option<String>,
    pub(crate) decision: &'static str,
    pub(crate) remaining: Option<u64>,
    pub(crate) source: Option<&'static str>,
}

impl DecisionNote {
    pub(crate) fn of(outcome: &Outcome) -> Self {
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
#[cfg_attr(not(feature = "otlp"), expect(dead_code, reason = "only spans read it"))]
pub(crate) struct SpanEnd<'a> {
    /// `None` if the client left before the response.
    pub(crate) status: Option<http::StatusCode>,
    pub(crate) route: Option<&'a str>,
    pub(crate) id: Option<&'a http::HeaderValue>,
}

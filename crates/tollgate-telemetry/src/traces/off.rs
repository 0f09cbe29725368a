//! No traces: the server was built without the feature `otlp`.

use std::fmt;

use tollgate_http::Headers;
use tollgate_rules::Outcome;

use super::{DecisionNote, SpanEnd};
use crate::notice;
use crate::page::Page;

/// The span of a request, which is not recorded.
#[derive(Default)]
pub struct RequestSpan(());

/// The export of spans, which does not exist.
pub enum Exporting {}

/// Returns whether requests have spans.
#[inline]
pub const fn is_on() -> bool {
    false
}

/// Warns if the environment asks for traces.
#[inline]
pub fn start() -> Result<Option<Exporting>, String> {
    if std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT").is_some() {
        notice::warn(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and this program was built without traces: build it with --features otlp, or unset the variable",
        );
    }
    Ok(None)
}

/// Writes nothing.
pub fn write_metrics(_page: &mut Page<'_>) -> fmt::Result {
    Ok(())
}

impl Exporting {
    /// Sends the last spans, and ends.
    pub async fn end(self) {
        match self {}
    }
}

impl RequestSpan {
    /// Starts a span.
    #[inline]
    pub fn start(_method: &str, _path: &str, _headers: Headers<'_>) -> Self {
        Self(())
    }

    /// Returns the `traceparent` for the upstream.
    #[inline]
    pub fn traceparent(&self) -> Option<String> {
        None
    }

    /// Returns whether the client's trace goes on.
    #[inline]
    pub fn continues_trace(&self) -> bool {
        true
    }

    /// Returns the trace that the span belongs to.
    #[inline]
    pub fn trace_id(&self) -> Option<String> {
        None
    }

    /// Adds the decision on the request.
    #[inline]
    pub fn note_outcome(&mut self, _outcome: &Outcome) {}

    /// Adds the decision on the request.
    #[inline]
    pub fn note_decision(&mut self, _note: &DecisionNote) {}

    /// Ends the span.
    #[inline]
    pub fn end(&mut self, _end: SpanEnd<'_>) {}
}

//! No traces: the server was built without the feature `otlp`.

use std::fmt;

use tollgate_http::Headers;
use tollgate_rules::Outcome;

use super::{DecisionNote, SpanEnd};
use crate::metrics::page::Page;
use crate::notice;

/// The span of a request, which is not recorded.
#[derive(Default)]
pub(crate) struct RequestSpan(());

/// The export of spans, which does not exist.
pub(crate) enum Exporting {}

pub(crate) const fn is_on() -> bool {
    false
}

/// Warns if the environment asks for traces.
pub(crate) fn start() -> Result<Option<Exporting>, String> {
    if std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT").is_some() {
        notice::warn(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, and this program was built without traces: build it with --features otlp, or unset the variable",
        );
    }
    Ok(None)
}

pub(crate) fn write_metrics(_page: &mut Page<'_>) -> fmt::Result {
    Ok(())
}

impl Exporting {
    pub(crate) async fn end(self) {
        match self {}
    }
}

impl RequestSpan {
    pub(crate) fn start(_method: &str, _path: &str, _headers: Headers<'_>) -> Self {
        Self(())
    }

    pub(crate) fn traceparent(&self) -> Option<String> {
        None
    }

    pub(crate) fn continues_trace(&self) -> bool {
        true
    }

    pub(crate) fn trace_id(&self) -> Option<String> {
        None
    }

    pub(crate) fn note_outcome(&mut self, _outcome: &Outcome) {}

    pub(crate) fn note_decision(&mut self, _note: &DecisionNote) {}

    pub(crate) fn end(&mut self, _end: SpanEnd<'_>) {}
}

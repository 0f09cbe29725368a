//! Spans with OTLP over gRPC. The collector and the sampling are set by the standard variables of OpenTelemetry.

use std::fmt;
use std::str::FromStr as _;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags, TraceId, TraceState,
    Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span, SpanExporter as _};
use tollgate_http::Headers;
use tollgate_rules::Outcome;

use super::queue::{DROPPED, EXPORTED, Exporting, FAILED, Queue};
use super::{DecisionNote, SpanEnd, TRACEPARENT, TRACESTATE, TraceParent};
use crate::page::Page;

/// The maximum length of a path in a span.
const MAX_PATH_CHARS: usize = 1024;

static TRACER: OnceLock<SdkTracer> = OnceLock::new();

/// Returns whether requests have spans.
#[inline]
pub fn is_on() -> bool {
    TRACER.get().is_some()
}

/// Starts to export spans, if the environment names a collector.
pub fn start() -> Result<Option<Exporting>, String> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let of_traces = |name: &str| {
        variable(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}"))
            .or_else(|| variable(&format!("OTEL_EXPORTER_OTLP_{name}")))
    };
    let is_off = variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
        || variable("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
    let Some(endpoint) = of_traces("ENDPOINT").filter(|_| !is_off) else { return Ok(None) };
    if let Some(protocol) = of_traces("PROTOCOL").filter(|protocol| protocol != "grpc") {
        return Err(format!(
            "OTEL_EXPORTER_OTLP_PROTOCOL is `{protocol}`, and traces are sent with gRPC: set it to `grpc`, and the endpoint to the gRPC port of the collector, usually 4317"
        ));
    }
    if !endpoint.starts_with("http://") {
        return Err(format!(
            "OTEL_EXPORTER_OTLP_ENDPOINT is `{endpoint}`: use a URL such as http://127.0.0.1:4317; for TLS, run a collector on this host that forwards the spans"
        ));
    }
    let mut exporter = SpanExporter::builder().with_tonic().build().map_err(|error| {
        format!("traces cannot be sent to {endpoint}: {error}: check the variables OTEL_EXPORTER_OTLP_*")
    })?;
    let resource = resource(variable("OTEL_SERVICE_NAME").is_some());
    exporter.set_resource(&resource);
    let (queue, exporting) = Queue::start(exporter);
    let provider = SdkTracerProvider::builder().with_span_processor(queue).with_resource(resource).build();
    // The provider lives as long as its tracer.
    _ = TRACER.set(provider.tracer("tollgate"));
    Ok(Some(exporting))
}

/// Returns the description of this process. `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` have precedence.
fn resource(is_named: bool) -> Resource {
    let attributes = std::env::var("OTEL_RESOURCE_ATTRIBUTES").unwrap_or_default();
    let is_named = is_named || attributes.split(',').any(|pair| pair.trim_start().starts_with("service.name="));
    let resource = Resource::builder().with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    if is_named { resource.build() } else { resource.with_service_name("tollgate").build() }
}

/// Writes how many spans were exported, dropped and lost.
pub fn write_metrics(page: &mut Page<'_>) -> fmt::Result {
    if !is_on() {
        return Ok(());
    }
    let counts = [("exported", &EXPORTED), ("dropped", &DROPPED), ("failed", &FAILED)];
    let counts = counts.into_iter().map(|(result, count)| ([("result", result)], count.load(Relaxed)));
    let help = "Spans of traces: exported to the collector, dropped because the queue was full, or lost because the collector failed";
    page.counters("tollgate_trace_spans", help, counts)
}

/// The span of a request.
#[derive(Default)]
pub struct RequestSpan(Option<Box<Started>>);

struct Started {
    span: Span,
    method: String,
    /// Whether the client's trace goes on.
    continues_trace: bool,
}

impl RequestSpan {
    /// Starts a span, in the client's trace if the request has a valid `traceparent`. The sampling honours its flag.
    pub fn start(method: &str, path: &str, headers: Headers<'_>) -> Self {
        let Some(tracer) = TRACER.get() else { return Self(None) };
        let parent = parent(headers);
        let continues_trace = parent.is_some();
        let context = match parent {
            Some(parent) => Context::new().with_remote_span_context(parent),
            None => Context::new(),
        };
        let path: String = path.split('?').next().unwrap_or(path).chars().take(MAX_PATH_CHARS).collect();
        let builder = tracer.span_builder(method.to_owned()).with_kind(SpanKind::Server).with_attributes([
            KeyValue::new("http.request.method", method.to_owned()),
            KeyValue::new("url.path", path),
        ]);
        let span = tracer.build_with_context(builder, &context);
        Self(Some(Box::new(Started { span, method: method.to_owned(), continues_trace })))
    }

    /// Returns the `traceparent` for the upstream, whose parent is this span.
    #[inline]
    pub fn traceparent(&self) -> Option<String> {
        let context = self.0.as_ref()?.span.span_context();
        let flags = context.trace_flags() & TraceFlags::SAMPLED;
        Some(format!("00-{}-{}-{:02x}", context.trace_id(), context.span_id(), flags.to_u8()))
    }

    /// Returns whether the client's trace goes on, so that its `tracestate` is still true.
    #[inline]
    pub fn continues_trace(&self) -> bool {
        self.0.as_ref().is_none_or(|started| started.continues_trace)
    }

    /// Returns the trace that the span belongs to.
    #[inline]
    pub fn trace_id(&self) -> Option<String> {
        Some(self.0.as_ref()?.span.span_context().trace_id().to_string())
    }

    /// Adds the decision on the request.
    #[inline]
    pub fn note_outcome(&mut self, outcome: &Outcome) {
        if self.0.as_ref().is_some_and(|started| started.span.is_recording()) {
            self.note_decision(&DecisionNote::of(outcome));
        }
    }

    /// Adds the decision on the request.
    pub fn note_decision(&mut self, note: &DecisionNote) {
        let Some(started) = &mut self.0 else { return };
        let span = &mut started.span;
        span.set_attribute(KeyValue::new("tollgate.allowed", note.is_allowed));
        span.set_attribute(KeyValue::new("tollgate.decision", note.decision));
        if let Some(limit) = &note.limit {
            span.set_attribute(KeyValue::new("tollgate.limit", limit.clone()));
        }
        if let Some(remaining) = note.remaining {
            span.set_attribute(KeyValue::new("tollgate.remaining", i64::try_from(remaining).unwrap_or(i64::MAX)));
        }
        if let Some(source) = note.source {
            span.set_attribute(KeyValue::new("tollgate.source", source));
        }
    }

    /// Ends the span.
    #[inline]
    pub fn end(&mut self, end: SpanEnd<'_>) {
        let Some(mut started) = self.0.take() else { return };
        let Started { span, method, .. } = &mut *started;
        if span.is_recording() {
            if let Some(route) = end.route {
                span.update_name(format!("{method} {route}"));
                span.set_attribute(KeyValue::new("tollgate.route", route.to_owned()));
            }
            if let Some(id) = end.id.and_then(|id| id.to_str().ok()) {
                span.set_attribute(KeyValue::new("tollgate.request_id", id.to_owned()));
            }
            match end.status {
                Some(status) => {
                    span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
                    if status.is_server_error() {
                        span.set_status(Status::error(""));
                    }
                }
                None => span.set_status(Status::error("the client left before the response")),
            }
        }
        span.end();
    }
}

/// Returns the span that the request names as its parent. Of several headers, none is used.
fn parent(headers: Headers<'_>) -> Option<SpanContext> {
    let (traceparent, tracestate) = (TRACEPARENT, TRACESTATE);
    let mut values = headers.get_all(&traceparent);
    let (Some(only), None) = (values.next(), values.next()) else { return None };
    let parent = TraceParent::read(only)?;
    let (trace, span) = (TraceId::from_hex(parent.trace_id).ok()?, SpanId::from_hex(parent.span_id).ok()?);
    let states: Vec<&str> = headers.get_all(&tracestate).filter_map(|value| std::str::from_utf8(value).ok()).collect();
    let state = TraceState::from_str(&states.join(",")).unwrap_or_default();
    Some(SpanContext::new(trace, span, TraceFlags::new(parent.flags), true, state))
}

//! Traces: the gateway and the decision service send their spans to a collector with OTLP.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use testkit::folder::folder_with;
use testkit::http1::{Connection, Response as Answer};
use testkit::tollgate::{Process, RULES, run_in};
use testkit::upstream::{AnyBody, Raw, Served, Speaks};
use testkit::wait::wait_until;

/// Names no header, so the only effect is that hyper serves the request.
const BY_HYPER: &str = "Connection: x-absent\r\n";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// A collector that keeps the spans it gets.
struct Collector {
    address: SocketAddr,
    received: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
}

impl Collector {
    fn start() -> Self {
        let received: Arc<Mutex<Vec<ExportTraceServiceRequest>>> = Arc::default();
        let kept = Arc::clone(&received);
        let served = Served::start(Speaks::Http2, move |request: Request<Incoming>| {
            let kept = Arc::clone(&kept);
            async move {
                assert_eq!(request.uri().path(), "/opentelemetry.proto.collector.trace.v1.TraceService/Export");
                let body = request.into_body().collect().await.expect("a whole message").to_bytes();
                // A flag and the length come before the message.
                let message = ExportTraceServiceRequest::decode(&body[5..]).expect("a message of OTLP");
                kept.lock().expect("no test panicked").push(message);
                grpc(&ExportTraceServiceResponse::default())
            }
        });
        Self { address: served.address, received }
    }

    /// Waits until this many spans were received.
    #[track_caller]
    fn await_spans(&self, count: usize) -> Vec<Span> {
        let spans = || -> Vec<Span> {
            let received = self.received.lock().expect("no test panicked");
            let scopes = received.iter().flat_map(|message| &message.resource_spans).flat_map(|one| &one.scope_spans);
            scopes.flat_map(|scope| scope.spans.clone()).collect()
        };
        wait_until(|| Some(spans()).filter(|spans| spans.len() >= count))
            .unwrap_or_else(|| panic!("there are not {count} spans, but: {:?}", spans()))
    }

    fn services(&self) -> Vec<String> {
        let received = self.received.lock().expect("no test panicked");
        let resources =
            received.iter().flat_map(|message| &message.resource_spans).filter_map(|one| one.resource.clone());
        resources.filter_map(|resource| attributes(&resource.attributes).remove("service.name")).collect()
    }
}

fn grpc(message: &impl Message) -> Response<AnyBody> {
    let message = message.encode_to_vec();
    let length = u32::try_from(message.len()).expect("a short message").to_be_bytes();
    let data = [&[0], &length[..], &message].concat();
    let trailers =
        HeaderMap::from_iter([(http::HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))]);
    let frames = [Ok(Frame::data(Bytes::from(data))), Ok(Frame::trailers(trailers))];
    let mut response = Response::new(BodyExt::boxed(StreamBody::new(futures_util::stream::iter(frames))));
    response.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
    response
}

fn attributes(of: &[opentelemetry_proto::tonic::common::v1::KeyValue]) -> BTreeMap<String, String> {
    let text = |value: Value| match value {
        Value::StringValue(text) => text,
        Value::IntValue(number) => number.to_string(),
        Value::BoolValue(value) => value.to_string(),
        other => format!("{other:?}"),
    };
    let pair = |one: &opentelemetry_proto::tonic::common::v1::KeyValue| {
        Some((one.key.clone(), text(one.value.clone()?.value?)))
    };
    of.iter().filter_map(pair).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn rules(upstream: &str) -> String {
    format!(
        "gateway:
  listen: 127.0.0.1:0
  workers: 1
  access_log: {{ file: access.log }}
  routes:
    - {{ name: up, path: /up/**, upstream: '{upstream}' }}
service: {{ http: '127.0.0.1:0' }}
admin: {{ listen: '127.0.0.1:0' }}
limits:
  - {{ name: two, algorithm: token_bucket, capacity: 2, refill: 1/h, key: 'header:x-user', match: {{ path: /up/** }} }}
"
    )
}

fn start(upstream: &str, collector: SocketAddr, more: &[(&str, &str)]) -> Process {
    let endpoint = format!("http://{collector}");
    let variables = [&[("OTEL_EXPORTER_OTLP_ENDPOINT", &*endpoint), ("OTEL_BSP_SCHEDULE_DELAY", "100")], more].concat();
    Process::start_with_variables(folder_with(&[(RULES, &rules(upstream))]), &variables, &["serve", "--config", RULES])
}

fn get(server: &Process, headers: &str) -> Answer {
    let mut connection = Connection::to(server.address_of("gateway"));
    connection.ask(format!("GET /up/1?secret=2 HTTP/1.1\r\nHost: h\r\n{headers}\r\n"))
}

/// Returns the values of a header in the last request that an upstream got.
fn seen(upstream: &Raw, name: &str) -> Vec<String> {
    let seen = upstream.seen().concat();
    let last = seen.rsplit("GET ").next().expect("a request").to_ascii_lowercase();
    let lines = last.lines().filter_map(|line| line.strip_prefix(&format!("{name}: ")));
    lines.map(str::to_owned).collect()
}

#[test]
fn spans_continue_the_trace_of_the_client_and_upstreams_continue_ours() {
    let collector = Collector::start();
    for (round, road) in ["", BY_HYPER].into_iter().enumerate() {
        let upstream = Raw::named("one");
        let server = start(&upstream.url(), collector.address, &[]);
        let headers = format!("{road}X-User: ann\r\nTraceparent: 00-{TRACE}-{PARENT}-01\r\nTracestate: vendor=1\r\n");
        let id = get(&server, &headers).header("x-request-id").expect("an ID").to_owned();
        let span = collector.await_spans(3 * round + 1).pop().expect("a span");
        assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
        assert_eq!((&*span.name, span.kind), ("GET up", 2));
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
        let found = attributes(&span.attributes);
        for (name, value) in [
            ("http.request.method", "GET"),
            ("url.path", "/up/1"),
            ("http.response.status_code", "200"),
            ("tollgate.route", "up"),
            ("tollgate.limit", "two"),
            ("tollgate.decision", "allowed"),
            ("tollgate.remaining", "1"),
            ("tollgate.source", "store"),
            ("tollgate.request_id", &id),
        ] {
            assert_eq!(found.get(name).map(String::as_str), Some(value), "{name} {road}: {found:?}");
        }
        assert!(!found.values().any(|value| value.contains("secret") || value.contains("ann")), "{found:?}");
        assert_eq!(seen(&upstream, "traceparent"), [format!("00-{TRACE}-{}-01", hex(&span.span_id))]);
        assert_eq!(seen(&upstream, "tracestate"), ["vendor=1"]);

        // A parent that is not sampled: nothing is exported, and the upstream learns of it.
        get(&server, &format!("{road}X-User: bob\r\nTraceparent: 00-{TRACE}-{PARENT}-00\r\n"));
        let [parent] = &seen(&upstream, "traceparent")[..] else { panic!("no traceparent") };
        assert!(parent.starts_with(&format!("00-{TRACE}-")) && parent.ends_with("-00"), "{parent}");
        assert!(!parent.contains(PARENT), "{parent}");

        // No valid parent: a new trace, without the state of the old one.
        get(
            &server,
            &format!("{road}X-User: ann\r\nTraceparent: 00-{TRACE}-{PARENT}-01-x\r\nTracestate: vendor=1\r\n"),
        );
        let span = collector.await_spans(3 * round + 2).pop().expect("a span");
        assert!(hex(&span.trace_id) != TRACE && span.parent_span_id.is_empty(), "{span:?}");
        let expected = format!("00-{}-{}-01", hex(&span.trace_id), hex(&span.span_id));
        assert_eq!(seen(&upstream, "traceparent"), [expected]);
        assert_eq!(seen(&upstream, "tracestate"), [""; 0]);

        // A request that is denied has a span too, and the log has its trace.
        assert_eq!(get(&server, &format!("{road}X-User: ann\r\n")).status, 429);
        let span = collector.await_spans(3 * round + 3).pop().expect("a span");
        let found = attributes(&span.attributes);
        assert_eq!((&*found["tollgate.decision"], &*found["tollgate.remaining"]), ("denied", "0"), "{found:?}");
        assert_eq!(found["http.response.status_code"], "429");
        let trace = hex(&span.trace_id);
        let log = || std::fs::read_to_string(server.path("access.log")).unwrap_or_default();
        let is_logged = wait_until(|| log().contains(&format!("\"trace_id\":\"{trace}\"")).then_some(()));
        assert!(is_logged.is_some(), "{trace} is not in {}", log());
    }
    assert!(collector.services().iter().all(|name| name == "tollgate"), "{:?}", collector.services());
}

#[test]
fn calls_of_the_decision_service_have_spans() {
    let collector = Collector::start();
    let server = start("http://127.0.0.1:1", collector.address, &[("OTEL_SERVICE_NAME", "limits")]);
    let mut connection = Connection::to(server.address_of("decisions POST"));
    for (number, decision) in ["allowed", "allowed", "denied"].into_iter().enumerate() {
        let body = r#"{"limit":"two","key":"ann"}"#;
        let answer = connection.ask(format!(
            "POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTraceparent: 00-{TRACE}-{PARENT}-01\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        assert_eq!(answer.status, 200);
        let span = collector.await_spans(number + 1).pop().expect("a span");
        assert_eq!((hex(&span.trace_id), hex(&span.parent_span_id)), (TRACE.to_owned(), PARENT.to_owned()));
        let found = attributes(&span.attributes);
        assert_eq!((&*found["tollgate.limit"], &*found["tollgate.decision"]), ("two", decision), "{found:?}");
        assert_eq!((&*found["url.path"], &*found["tollgate.source"]), ("/v1/check", "store"), "{found:?}");
    }
    assert_eq!(collector.services()[0], "limits");
}

/// Requests are served as before, and lost spans are counted.
#[test]
fn a_collector_that_is_gone_or_slow_delays_nothing() {
    let upstream = Raw::named("one");
    let gone = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free").local_addr().expect("it is bound");
    let server =
        start(&upstream.url(), gone, &[("OTEL_BSP_MAX_QUEUE_SIZE", "1"), ("OTEL_EXPORTER_OTLP_TIMEOUT", "500")]);
    for number in 0..50 {
        assert_eq!(get(&server, &format!("X-User: {number}\r\n")).status, 200);
    }
    server.await_said("spans were lost, because the collector did not take them", 1);
    let lost = || {
        let mut admin = Connection::to(server.address_of("admin"));
        let page = admin.ask("GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let rows =
            page.text().lines().filter(|line| line.starts_with("tollgate_trace_spans_total{")).map(str::to_owned);
        rows.collect::<Vec<String>>()
    };
    let is_counted = wait_until(|| {
        let rows = lost();
        let failed = rows.iter().any(|row| row.contains("failed") && !row.ends_with(" 0"));
        (failed && rows.len() == 3).then_some(())
    });
    assert!(is_counted.is_some(), "{:?}", lost());
}

#[test]
fn settings_that_cannot_work_end_with_2_and_the_fix() {
    let folder = folder_with(&[(RULES, &rules("http://127.0.0.1:1"))]);
    for (name, value, fix) in [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf", "set it to `grpc`"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector:4317", "run a collector on this host"),
    ] {
        let variables = [("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1"), (name, value)];
        let mut command = std::process::Command::new(testkit::tollgate::binary());
        command.args(["serve", "--config", RULES]).current_dir(folder.path()).envs(variables);
        let output = command.output().expect("the built binary starts");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && text.contains(fix), "{text}");
    }
    // Other commands have no traces.
    assert!(run_in(folder.path(), &["validate", RULES]).status.success());
}

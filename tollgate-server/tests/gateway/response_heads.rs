//! Response heads that are too long or invalid, and how they are reported.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use bytes::Bytes;
use h2::Reason;
use h2::server::SendResponse;
use http::Response;
use testkit::client::{Protocol, each_protocol};
use testkit::gateway::site;
use testkit::http1::Connection;
use testkit::upstream::{Raw, Served, Speaks, accepting, full};

const GET: &str = "GET / HTTP/1.1\r\nHost: h\r\n\r\n";
const POST: &str = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n";

/// The reason why there is no response: for the client, in the log, and in the metrics.
struct Reasons {
    answer: &'static str,
    line: &'static str,
    kind: &'static str,
}

const LONG: Reasons = Reasons {
    answer: "The upstream's response has more than 100 headers, or more than 64 KiB of headers.",
    line: "its response has more than 100 headers, or more than 64 KiB of headers",
    kind: "response_head_too_long",
};
const REFUSED: Reasons = Reasons {
    answer: "The upstream's response has more than 64 KiB of headers, or headers that HTTP/2 forbids.",
    line: "its response has more than 64 KiB of headers, or headers that HTTP/2 forbids",
    kind: "response_head_refused",
};
const HUNG_UP: Reasons = Reasons {
    answer: "The upstream closed the connection before the end of its response.",
    line: "it closed the connection before the end of its response",
    kind: "disconnected",
};

/// Asserts that the reason of a 502 is reported in all three places, and that the upstream got the request this many
/// times.
fn assert_reported(protocol: Protocol, reasons: &Reasons, upstream: &str, request: &str, times: usize) {
    let route =
        format!("{{ name: all, path: /**, upstream: '{upstream}', connect_timeout: 20s, eject: {{ after: 1 }} }}");
    let gateway = protocol.start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", site("", &[route], "")));
    let answer = gateway.client().ask(request);
    assert_eq!((answer.status, answer.text()), (502, &*body(reasons)), "{request}");
    gateway.await_said(&format!(" of route all failed: {}; ", reasons.line), 1);
    let metrics = Connection::to(gateway.address_of("admin")).get("/metrics");
    let counted = format!("tollgate_upstream_failures_total{{route=\"all\",kind=\"{}\"}} {times}\n", reasons.kind);
    assert!(metrics.text().contains(&counted), "{}", metrics.text());
}

fn body(reasons: &Reasons) -> String {
    format!(r#"{{"error":"bad_gateway","message":"{}"}}"#, reasons.answer)
}

/// Returns an HTTP/2 upstream that responds with a header of this many bytes.
fn long(bytes: usize) -> String {
    let upstream = Served::start(Speaks::Http2, move |_| async move {
        let mut response = Response::new(full(""));
        response.headers_mut().insert("x-long", "x".repeat(bytes).parse().unwrap());
        response
    });
    format!("h2c://{}", upstream.address)
}

/// Returns an HTTP/2 upstream that sends what hyper would not.
fn careless(answer: impl Fn(SendResponse<Bytes>) + Clone + Send + 'static) -> String {
    let (address, _) = accepting(move |stream| {
        let answer = answer.clone();
        async move {
            let Ok(mut connection) = h2::server::handshake(stream).await else { return };
            while let Some(Ok((_, respond))) = connection.accept().await {
                answer(respond);
            }
        }
    });
    format!("h2c://{address}")
}

fn with_an_invalid_length(mut respond: SendResponse<Bytes>) {
    let response = Response::builder().header("content-length", "nonsense").body(()).unwrap();
    respond.send_response(response, false).unwrap().send_data(Bytes::new(), true).unwrap();
}

#[test]
fn too_many_or_too_long_headers_are_reported() {
    each_protocol(|protocol| {
        let many = "X-Many: 1\r\n".repeat(101);
        let long = format!("X-Long: {}\r\n", "x".repeat(200_000));
        // Without a body, and with one.
        let bodies = ["\r\n", "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"];
        for (headers, body) in [&many, &long].into_iter().flat_map(|headers| bodies.map(|body| (headers, body))) {
            let upstream = Raw::answering(format!("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n{headers}\r\n"));
            assert_reported(protocol, &LONG, &upstream.url(), &format!("POST / HTTP/1.1\r\nHost: h\r\n{body}"), 1);
        }
    });
}

#[test]
fn too_long_http_2_headers_are_reported_and_not_retried() {
    each_protocol(|protocol| {
        for request in [GET, POST] {
            assert_reported(protocol, &REFUSED, &long(80 << 10), request, 1);
        }
    });
}

/// Returns an HTTP/2 upstream whose response has few bytes on the wire, and 900 KB of headers.
fn compressed() -> String {
    let upstream = Served::start(Speaks::Http2, |_| async {
        let mut response = Response::new(full(""));
        for _ in 0..300 {
            response.headers_mut().append("x-long", "x".repeat(2900).parse().unwrap());
        }
        response
    });
    format!("h2c://{}", upstream.address)
}

/// The upstream's connection ends, and only the text of the error shows why.
#[test]
fn oversized_http_2_head_is_reported() {
    each_protocol(|protocol| {
        for request in [GET, POST] {
            assert_reported(protocol, &LONG, &long(200 << 10), request, 1);
            assert_reported(protocol, &LONG, &compressed(), request, 1);
        }
    });
}

/// The upstream's connection ends, with other requests on it that are not at fault.
#[test]
fn oversized_head_is_retried_at_another_upstream() {
    each_protocol(|protocol| {
        let good = Served::start(Speaks::Http2, |_| async { Response::new(full("good")) });
        let upstreams = format!("['{}', 'h2c://{}']", long(200 << 10), good.address);
        let eject = "eject: { after: 1000000 }";
        let route = format!("{{ path: /**, balance: round_robin, upstream: {upstreams}, {eject} }}");
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut connection = gateway.client();
        for _ in 0..4 {
            assert_eq!(connection.get("/").text(), "good");
        }
        let failed = (0..4).filter(|_| connection.ask(POST).status == 502).count();
        assert_eq!(failed, 2, "a POST is not sent again");
    });
}

#[test]
fn header_that_http_2_forbids_is_reported() {
    each_protocol(|protocol| {
        let upstream = careless(with_an_invalid_length);
        for request in [GET, POST] {
            assert_reported(protocol, &REFUSED, &upstream, request, 1);
        }
    });
}

/// The upstream reports it for the request; the gateway would report it for the response.
#[test]
fn reset_by_the_upstream_is_not_an_invalid_response() {
    each_protocol(|protocol| {
        assert_reported(
            protocol,
            &HUNG_UP,
            &careless(|mut respond| respond.send_reset(Reason::PROTOCOL_ERROR)),
            POST,
            1,
        );
    });
}

/// Returns an HTTP/2 upstream that counts requests, answers the first ones of each connection, and calls `end` with the
/// next. If that returns false, it closes the connection.
fn counting(answered: usize, end: impl Fn(SendResponse<Bytes>) -> bool + Clone + Send + 'static) -> (String, Counter) {
    let counter = Counter::default();
    let counted = Arc::clone(&counter);
    let (address, _) = accepting(move |stream| {
        let (end, counted) = (end.clone(), Arc::clone(&counted));
        async move {
            let Ok(mut connection) = h2::server::handshake(stream).await else { return };
            let mut number = 0;
            while let Some(Ok((_, mut respond))) = connection.accept().await {
                counted.fetch_add(1, Relaxed);
                number += 1;
                if number <= answered {
                    respond.send_response(Response::new(()), true).unwrap();
                } else if !end(respond) {
                    return;
                }
            }
        }
    });
    (format!("h2c://{address}"), counter)
}

type Counter = Arc<AtomicUsize>;

/// Sends requests. Returns the statuses, and the number of requests that arrived.
fn statuses(protocol: Protocol, (url, counter): (String, Counter), requests: usize) -> (Vec<u16>, usize) {
    let gateway = protocol.start(&site("workers: 1", &[format!("{{ path: /**, upstream: '{url}' }}")], ""));
    let mut connection = gateway.client();
    let statuses = (0..requests).map(|_| connection.get("/").status).collect();
    (statuses, counter.load(Relaxed))
}

#[test]
fn request_that_the_only_upstream_resets_is_not_sent_again() {
    each_protocol(|protocol| {
        let failing = |mut respond: SendResponse<Bytes>| {
            respond.send_reset(Reason::INTERNAL_ERROR);
            true
        };
        assert_eq!(statuses(protocol, counting(0, failing), 1), (vec![502], 1));
        assert_eq!(statuses(protocol, counting(1, failing), 2), (vec![200, 502], 2), "a used connection");
        let refusing = |mut respond: SendResponse<Bytes>| {
            respond.send_reset(Reason::REFUSED_STREAM);
            true
        };
        assert_eq!(statuses(protocol, counting(0, refusing), 1), (vec![502], 2), "it was not processed");
    });
}

/// The upstream may have closed a connection that it had used before the request arrived. A request that ends a new
/// connection may be the cause.
#[test]
fn request_that_is_lost_with_a_used_connection_is_sent_again() {
    each_protocol(|protocol| {
        let closing = |_: SendResponse<Bytes>| false;
        assert_eq!(statuses(protocol, counting(0, closing), 1), (vec![502], 1));
        assert_eq!(statuses(protocol, counting(1, closing), 2), (vec![200, 200], 3));
    });
}

/// Others may use the connection at the same time.
#[test]
fn connection_with_many_invalid_responses_is_kept() {
    each_protocol(|protocol| {
        let upstream = careless(with_an_invalid_length);
        let gateway = protocol.start(&site("workers: 1", &[format!("{{ path: /**, upstream: '{upstream}' }}")], ""));
        let mut connection = gateway.client();
        for _ in 0..1100 {
            assert_eq!(connection.ask(POST).text(), body(&REFUSED));
        }
    });
}

//! Heads of answers that are too long or not allowed, and what is told of them.

use bytes::Bytes;
use h2::Reason;
use h2::server::SendResponse;
use http::Response;

use crate::client::Connection;
use crate::process::{Gateway, site};
use crate::upstream::{Raw, Served, Speaks, accepting, full};

const GET: &str = "GET / HTTP/1.1\r\nHost: h\r\n\r\n";
const POST: &str = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n";

/// Why there is no answer: to the client, on the standard error, and in the metrics.
struct Reasons {
    answer: &'static str,
    line: &'static str,
    kind: &'static str,
}

const LONG: Reasons = Reasons {
    answer: "The upstream's answer has more than 100 headers, or more than 64 KiB of them.",
    line: "its answer has more than 100 headers, or more than 64 KiB of them",
    kind: "long_answer_head",
};
const REFUSED: Reasons = Reasons {
    answer: "The upstream's answer has more than 64 KiB of headers, or some that HTTP/2 does not allow.",
    line: "its answer has more than 64 KiB of headers, or some that HTTP/2 does not allow",
    kind: "refused_answer_head",
};
const HUNG_UP: Reasons =
    Reasons { answer: "The upstream hung up.", line: "it hung up before the end of its answer", kind: "disconnected" };

/// Whoever looks for the reason of such a 502 finds it at all three places, and the upstream was asked so often.
fn is_told(reasons: &Reasons, upstream: &str, request: &str, times: usize) {
    let route = format!("{{ name: all, path: /**, upstream: '{upstream}', eject: {{ after: 1 }} }}");
    let gateway = Gateway::start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", site("", &[route], "")));
    let answer = gateway.connect().ask(request);
    assert_eq!((answer.status, answer.text()), (502, &*body(reasons)), "{request}");
    gateway.await_said(&format!(" of route all failed: {}; ", reasons.line), 1);
    let metrics = Connection::to(gateway.address_of("admin")).get("/metrics");
    let counted = format!("tollgate_upstream_failures_total{{route=\"all\",kind=\"{}\"}} {times}\n", reasons.kind);
    assert!(metrics.text().contains(&counted), "{}", metrics.text());
}

fn body(reasons: &Reasons) -> String {
    format!(r#"{{"error":"bad_gateway","message":"{}"}}"#, reasons.answer)
}

/// An upstream of HTTP/2 that answers with a header of so many bytes.
fn long(bytes: usize) -> String {
    let upstream = Served::start(Speaks::Http2, move |_| async move {
        let mut response = Response::new(full(""));
        response.headers_mut().insert("x-long", "x".repeat(bytes).parse().unwrap());
        response
    });
    format!("h2c://{}", upstream.address)
}

/// An upstream of HTTP/2 that sends what hyper would not.
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

fn with_a_length_that_is_none(mut respond: SendResponse<Bytes>) {
    let response = Response::builder().header("content-length", "nonsense").body(()).unwrap();
    respond.send_response(response, false).unwrap().send_data(Bytes::new(), true).unwrap();
}

#[test]
fn too_many_headers_or_too_long_ones_are_told_as_that() {
    let many = "X-Many: 1\r\n".repeat(101);
    let long = format!("X-Long: {}\r\n", "x".repeat(200_000));
    // Plain, and not.
    let bodies = ["\r\n", "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"];
    for (headers, body) in [&many, &long].into_iter().flat_map(|headers| bodies.map(|body| (headers, body))) {
        let upstream = Raw::answering(format!("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n{headers}\r\n"));
        is_told(&LONG, &upstream.url(), &format!("POST / HTTP/1.1\r\nHost: h\r\n{body}"), 1);
    }
}

#[test]
fn too_long_headers_of_http_2_are_told_as_that_and_not_asked_for_again() {
    for request in [GET, POST] {
        is_told(&REFUSED, &long(80 << 10), request, 1);
    }
}

/// It ends its connection, and nothing tells whose answer it was: one that may be repeated is, once.
#[test]
fn far_too_long_a_head_of_http_2_is_told_as_that() {
    is_told(&LONG, &long(200 << 10), GET, 2);
    is_told(&LONG, &long(200 << 10), POST, 1);
}

/// It ends its connection, with requests on it that are not to blame.
#[test]
fn far_too_long_a_head_is_asked_for_at_another_upstream() {
    let good = Served::start(Speaks::Http2, |_| async { Response::new(full("good")) });
    let upstreams = format!("['{}', 'h2c://{}']", long(200 << 10), good.address);
    let eject = "eject: { after: 1000000 }";
    let route = format!("{{ path: /**, balance: round_robin, upstream: {upstreams}, {eject} }}");
    let gateway = Gateway::start(&site("workers: 1", &[route], ""));
    let mut connection = gateway.connect();
    for _ in 0..4 {
        assert_eq!(connection.get("/").text(), "good");
    }
    let failed = (0..4).filter(|_| connection.ask(POST).status == 502).count();
    assert_eq!(failed, 2, "a POST is not sent again");
}

#[test]
fn a_header_that_http_2_does_not_allow_is_told_as_that() {
    let upstream = careless(with_a_length_that_is_none);
    for request in [GET, POST] {
        is_told(&REFUSED, &upstream, request, 1);
    }
}

/// The upstream says that of the request, and we would say it of the answer.
#[test]
fn a_reset_by_the_upstream_says_nothing_of_its_answer() {
    is_told(&HUNG_UP, &careless(|mut respond| respond.send_reset(Reason::PROTOCOL_ERROR)), POST, 1);
}

/// A connection that has had very many of them is given up, with a reason that far too long a head has, too.
#[test]
fn a_connection_that_is_given_up_for_many_bad_answers_is_not_told_as_a_long_head() {
    let upstream = careless(with_a_length_that_is_none);
    let gateway = Gateway::start(&site("workers: 1", &[format!("{{ path: /**, upstream: '{upstream}' }}")], ""));
    let mut connection = gateway.connect();
    let answers = (0..1100).map(|_| connection.ask(POST).text().to_owned()).filter(|text| *text != body(&REFUSED));
    assert_eq!(answers.collect::<Vec<_>>(), [body(&HUNG_UP)]);
}

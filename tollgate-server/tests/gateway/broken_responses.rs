//! Truncated responses: the log distinguishes upstreams that stalled from those that disconnected.

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{iter, pending};
use http::Response;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};
use testkit::client::{Protocol, each_protocol};
use testkit::gateway::site;
use testkit::upstream::{Raw, Served, Speaks};
use testkit::wait::wait_until;

/// The description of an error, and its kind in the metrics.
type Expected = (&'static str, &'static str);

const STALLED: Expected = ("no more of its response within the route's timeout", "timeout");
const BROKE_OFF: Expected = ("it closed the connection before the end of its response", "disconnected");

/// Asserts that the error is in the log line about the upstream, in the metrics, and in the access log.
#[track_caller]
fn assert_reported(protocol: Protocol, upstream: &str, (fault, kind): Expected) {
    let route = format!("{{ name: all, path: /**, timeout: 3s, upstream: '{upstream}', eject: {{ after: 1 }} }}");
    let rules = site("access_log: { format: json, file: access.log }", &[route], "");
    let gateway = protocol.start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{rules}"));
    let mut connection = gateway.client();
    connection.send("GET / HTTP/1.1\r\nHost: h\r\n\r\n");
    let cut = connection.try_receive();
    assert!(cut.is_err(), "{fault}: {cut:?}");
    gateway.await_said(&format!(" of route all failed: {fault}; "), 1);
    gateway.await_metric(&format!("tollgate_upstream_failures_total{{route=\"all\",kind=\"{kind}\"}}"), 1);
    let log = || std::fs::read_to_string(gateway.path("access.log")).ok().filter(|log| log.ends_with('\n'));
    let line: Value = serde_json::from_str(&wait_until(log).expect("a line")).unwrap();
    let expected = (&line["status"], &line["sent_bytes"], &line["broken"], &line["upstream_error"]);
    assert_eq!(expected, (&json!(200), &json!(5), &json!(true), &json!(fault)), "{line}");
}

#[test]
fn stalled_and_broken_responses_are_reported_differently() {
    each_protocol(|protocol| {
        let answers = [
            "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        ];
        for (answer, expected) in
            answers.into_iter().flat_map(|answer| [STALLED, BROKE_OFF].map(|expected| (answer, expected)))
        {
            let upstream = Raw::start(move |conversation| {
                _ = conversation.request();
                conversation.send(answer);
                if expected == STALLED {
                    conversation.await_end();
                }
            });
            assert_reported(protocol, &upstream.url(), expected);
        }
    });
}

#[test]
fn stalled_http_2_response_is_reported() {
    each_protocol(|protocol| {
        let upstream = Served::start(Speaks::Http2, |_| async {
            let half = iter([Ok(Frame::data(Bytes::from_static(b"hello")))]);
            Response::new(BodyExt::boxed(StreamBody::new(half.chain(pending()))))
        });
        assert_reported(protocol, &format!("h2c://{}", upstream.address), STALLED);
    });
}

#[test]
fn a_response_that_breaks_with_its_first_bytes_is_not_the_upstreams() {
    each_protocol(|protocol| {
        let upstream = Raw::answering("HTTP/1.1 503 Service Unavailable\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n");
        let eject = "eject: { after: 2, statuses: [503] }";
        let route = format!("{{ name: all, path: /**, retries: 0, upstream: '{}', {eject} }}", upstream.url());
        let gateway = protocol.start(&site("access_log: { format: json, file: access.log }", &[route], ""));
        assert_eq!(gateway.get("/").status, 502);
        let line: Value = serde_json::from_str(&gateway.await_lines(&gateway.path("access.log"), 1)[0]).unwrap();
        assert_eq!((&line["status"], &line["answered_by"]), (&json!(502), &json!("tollgate")), "{line}");
        // One failure, not two: the second request makes it two.
        assert_eq!(gateway.get("/").status, 502);
        let said = gateway.await_said(" of route all failed 2 times in a row: ", 1);
        assert_eq!((upstream.requests(), said.matches("in a row").count()), (2, 1), "{said}");
    });
}

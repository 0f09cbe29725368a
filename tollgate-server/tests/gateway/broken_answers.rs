//! Answers that have no end: which of their upstreams stalled and which broke off, whoever runs the gateway is told.

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{iter, pending};
use http::Response;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};

use crate::process::{Gateway, site, wait_until};
use crate::upstream::{Raw, Served, Speaks};

/// What is told of an upstream, and what its failure is called in the metrics.
type Told = (&'static str, &'static str);

const STALLED: Told = ("no more of its answer within the timeout of the route", "timeout");
const BROKE_OFF: Told = ("it hung up before the end of its answer", "disconnected");

/// In the line about the upstream, in the metrics, and in the access log.
#[track_caller]
fn is_told(upstream: &str, way: &str, (fault, kind): Told) {
    let route = format!("{{ name: all, path: /**, timeout: 3s, upstream: '{upstream}', eject: {{ after: 1 }} }}");
    let rules = site("access_log: { format: json, file: access.log }", &[route], "");
    let gateway = Gateway::start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{rules}"));
    let mut connection = gateway.connect();
    connection.send(format!("GET / HTTP/1.1\r\nHost: h\r\n{way}\r\n"));
    let cut = connection.try_receive();
    assert!(cut.is_err(), "{way:?} {fault}: {cut:?}");
    gateway.await_said(&format!(" of route all failed: {fault}; "), 1);
    gateway.await_metric(&format!("tollgate_upstream_failures_total{{route=\"all\",kind=\"{kind}\"}}"), 1);
    let log = || std::fs::read_to_string(gateway.path("access.log")).ok().filter(|log| log.ends_with('\n'));
    let line: Value = serde_json::from_str(&wait_until(log).expect("a line")).unwrap();
    let told = (&line["status"], &line["sent_bytes"], &line["broken"], &line["upstream_error"]);
    assert_eq!(told, (&json!(200), &json!(5), &json!(true), &json!(fault)), "{way:?} {line}");
}

#[test]
fn an_upstream_that_stalls_is_told_from_one_that_breaks_off() {
    let answers = [
        "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhello",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ];
    for (answer, told) in answers.into_iter().flat_map(|answer| [STALLED, BROKE_OFF].map(|told| (answer, told))) {
        let upstream = Raw::start(move |conversation| {
            _ = conversation.request();
            conversation.send(answer);
            if told == STALLED {
                conversation.await_end();
            }
        });
        // In the lane, and by hyper.
        for way in ["", "Connection: x-absent\r\n"] {
            is_told(&upstream.url(), way, told);
        }
    }
}

#[test]
fn an_upstream_of_http_2_that_stalls_is_told_as_that() {
    let upstream = Served::start(Speaks::Http2, |_| async {
        let half = iter([Ok(Frame::data(Bytes::from_static(b"hello")))]);
        Response::new(BodyExt::boxed(StreamBody::new(half.chain(pending()))))
    });
    is_told(&format!("h2c://{}", upstream.address), "", STALLED);
}

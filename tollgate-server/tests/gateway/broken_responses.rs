//! Truncated responses: the log distinguishes upstreams that stalled from those that disconnected.

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::{iter, pending};
use h2::Reason;
use http::Response;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};
use testkit::client::{Protocol, each_http1, each_protocol};
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

/// Returns a frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Returns whether the frames after the preface of a client contain the head of a request.
fn has_head(received: &[u8]) -> bool {
    let mut frames = received.get(24..).unwrap_or_default();
    while let [high, middle, low, kind, _, _, _, _, _, rest @ ..] = frames {
        if *kind == 1 {
            return true;
        }
        frames = rest.get(u32::from_be_bytes([0, *high, *middle, *low]) as usize..).unwrap_or_default();
    }
    false
}

/// The flag that ends a stream.
const END_STREAM: u8 = 1;

/// Returns the URL of an HTTP/2 upstream that responds with a head, sends `hello` with these flags and resets the stream.
/// The frames are sent at once: a library would drop the bytes when it resets.
fn resetting(head: &'static [u8], flags: u8, reason: Reason) -> String {
    let reset = frame(3, 0, 1, &u32::from(reason).to_be_bytes());
    answering([frame(1, 4, 1, head), frame(0, flags, 1, b"hello"), reset].concat())
}

/// Returns the URL of an HTTP/2 upstream that answers the first request with these frames.
fn answering(frames: Vec<u8>) -> String {
    let upstream = Raw::start(move |conversation| {
        conversation.send(frame(4, 0, 0, &[]));
        while !has_head(conversation.unread()) {
            if !conversation.more() {
                return;
            }
        }
        conversation.send(&frames);
        conversation.await_end();
    });
    format!("h2c://{}", upstream.address)
}

/// The compressed head `:status: 200`.
const OK: &[u8] = &[0x88];

/// The same with `content-length: 10`.
const OK_OF_TEN_BYTES: &[u8] = &[0x88, 0x0f, 0x0d, 2, b'1', b'0'];

#[test]
fn response_that_an_upstream_resets_is_not_complete() {
    each_protocol(|protocol| {
        for (head, reason) in [
            (OK, Reason::CANCEL),
            (OK, Reason::NO_ERROR),
            (OK_OF_TEN_BYTES, Reason::CANCEL),
            (OK_OF_TEN_BYTES, Reason::NO_ERROR),
        ] {
            assert_reported(protocol, &resetting(head, 0, reason), BROKE_OFF);
        }
    });
}

/// Upstreams reset a stream this way if they do not want the rest of the request (RFC 9113, section 8.1).
#[test]
fn response_is_complete_if_the_upstream_resets_the_stream_after_its_end() {
    each_protocol(|protocol| {
        let gateway = protocol.start_before(&resetting(OK, END_STREAM, Reason::NO_ERROR));
        assert_eq!(gateway.get("/").text(), "hello");
    });
}

/// The announced length is that of another response (RFC 9110, section 15.4.5).
#[test]
fn not_modified_of_an_http_2_upstream_may_announce_a_length() {
    each_protocol(|protocol| {
        let head = [0x8b, 0x0f, 0x0d, 3, b'1', b'0', b'0'];
        let gateway = protocol.start_before(&answering([frame(1, 4, 1, &head), frame(0, END_STREAM, 1, b"")].concat()));
        let response = gateway.get("/");
        assert_eq!((response.status, response.header("content-length")), (304, Some("100")));
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

#[test]
fn broken_response_does_not_look_complete_to_a_client_of_1_0() {
    each_http1(|protocol| {
        let upstream = Raw::start(|conversation| {
            _ = conversation.request();
            conversation.send("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n");
        });
        let gateway = protocol.start_before(&upstream.url());
        let mut connection = gateway.connect();
        connection.send("GET / HTTP/1.0\r\nHost: h\r\n\r\n");
        assert_eq!(connection.receive_head().unwrap().status, 200);
        assert_eq!(connection.bytes(5), b"hello");
        // Its regular end would be the end of the body.
        assert!(!connection.is_closed_cleanly());
    });
}

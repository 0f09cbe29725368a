//! Requests with more than one interpretation: none reaches an upstream in more than one.

use testkit::client::each_http1;
use testkit::upstream::Raw;
use testkit::wait::until;

/// Bytes to send, and their description.
struct Case {
    what: &'static str,
    sent: &'static str,
}

/// Both get 400 and are closed. An upstream may get the start of the second kind, but never an end.
const REFUSED_BY_THEIR_HEAD: &[Case] = &[
    case(
        "both lengths",
        "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX",
    ),
    case(
        "both lengths, the other way round",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\nX",
    ),
    case("two lengths", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhelloX"),
    case("the same length twice", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello"),
    case("two lengths in one line", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5, 6\r\n\r\nhelloX"),
    case("a length with a sign", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: +5\r\n\r\nhello"),
    case("a negative length", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: -5\r\n\r\nhello"),
    case("a length in hexadecimal", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0x5\r\n\r\nhello"),
    case("an empty length", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: \r\n\r\n"),
    case("a length beyond numbers", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 99999999999999999999\r\n\r\nhello"),
    case("a length with a space within", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1 5\r\n\r\nhello"),
    case(
        "a coding that is almost chunked",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    ),
    case("another coding", "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: identity\r\n\r\n"),
    case("two codings", "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
    case(
        "chunked that is not last",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    ),
    case(
        "chunked twice",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ),
    case(
        "chunked and another line",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: cow\r\n\r\n0\r\n\r\n",
    ),
    case("chunked in quotes", "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: \"chunked\"\r\n\r\n0\r\n\r\n"),
    case(
        "chunked behind a vertical tab",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    ),
    case("chunked in HTTP/1.0", "POST / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
    case("a space before the colon", "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n"),
    case("a tab before the colon", "POST / HTTP/1.1\r\nHost: h\r\nContent-Length\t: 5\r\n\r\nhello"),
    case("a name with a space", "POST / HTTP/1.1\r\nHost: h\r\nTransfer Encoding: chunked\r\n\r\n0\r\n\r\n"),
    case("a name behind a space", "GET / HTTP/1.1\r\n Host: h\r\n\r\n"),
    case("a line without a colon", "GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding\r\n\r\n"),
    case("a name of nothing", "GET / HTTP/1.1\r\nHost: h\r\n: x\r\n\r\n"),
    case("a folded header", "POST / HTTP/1.1\r\nHost: h\r\nX: y\r\n Transfer-Encoding: chunked\r\n\r\n"),
    case("a folded coding", "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n"),
    case("a bare LF behind the request line", "GET / HTTP/1.1\nHost: h\r\n\r\n"),
    case("a bare LF behind a header", "GET / HTTP/1.1\r\nHost: h\nX: y\r\n\r\n"),
    case("a bare LF at the end of the head", "GET / HTTP/1.1\r\nHost: h\r\n\n"),
    case("a bare CR in a header", "GET / HTTP/1.1\r\nHost: h\r\nX: y\rContent-Length: 5\r\n\r\n"),
    case("a NUL in a header", "GET / HTTP/1.1\r\nHost: h\r\nX: y\0z\r\n\r\n"),
    case("a NUL in the target", "GET /\0 HTTP/1.1\r\nHost: h\r\n\r\n"),
    case("two hosts", "GET / HTTP/1.1\r\nHost: h\r\nHost: other\r\n\r\n"),
    case("a host with a path", "GET / HTTP/1.1\r\nHost: h/x\r\n\r\n"),
    case("a host with a user", "GET / HTTP/1.1\r\nHost: a@h\r\n\r\n"),
    case("no host", "GET / HTTP/1.1\r\n\r\n"),
    case("a version of the future", "GET / HTTP/3.0\r\nHost: h\r\n\r\n"),
    case("no version", "GET /\r\nHost: h\r\n\r\n"),
    case("two spaces in the request line", "GET  / HTTP/1.1\r\nHost: h\r\n\r\n"),
    case("a header in the request line", "GET / HTTP/1.1 Host: h\r\nHost: h\r\n\r\n"),
    case("bytes that are no request", "\x01\x03\x01\x02\r\n\r\n\r\n"),
];

const REFUSED_IN_THEIR_BODY: &[Case] = &[
    case(
        "a chunk that is longer than it says",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhelloX\r\n0\r\n\r\n",
    ),
    case(
        "a chunk with a bare LF",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
    ),
    case(
        "a size with a sign",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
    ),
    case(
        "a size in other words",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
    ),
    case(
        "a size behind a space",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n 5\r\nhello\r\n0\r\n\r\n",
    ),
    case(
        "a size before a space",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5 \r\nhello\r\n0\r\n\r\n",
    ),
    case("no size", "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n\r\nhello\r\n0\r\n\r\n"),
    case(
        "a size beyond numbers",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
    ),
    case(
        "a bare LF in an extension",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5;a\nb\r\nhello\r\n0\r\n\r\n",
    ),
    case(
        "a bare LF behind the last chunk",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\n",
    ),
    case(
        "a bare LF in a trailer",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX: y\n\r\n",
    ),
];

const fn case(what: &'static str, sent: &'static str) -> Case {
    Case { what, sent }
}

/// The request that a smuggler would hide behind or in another one.
const HIDDEN: &str = "GET /hidden HTTP/1.1\r\nHost: h\r\n\r\n";

#[test]
fn a_head_with_two_readings_is_refused_and_nothing_of_it_is_passed_on() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        for Case { what, sent } in REFUSED_BY_THEIR_HEAD {
            let mut connection = gateway.connect();
            connection.send(format!("{sent}{HIDDEN}"));
            let answer = connection.receive();
            assert_eq!(answer.status, 400, "{what}");
            assert_eq!(answer.json()["error"], "bad_request", "{what}");
            assert_eq!(connection.rest(), 0, "{what}: one answer, and the end");
            assert_eq!(upstream.seen().concat(), "", "{what}");
        }
        assert!(gateway.get("/probe").text().starts_with("GET /probe "));
    });
}

#[test]
fn a_head_with_two_readings_is_refused_behind_a_good_request_too() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        for (number, Case { what, sent }) in REFUSED_BY_THEIR_HEAD.iter().enumerate() {
            let mut connection = gateway.connect();
            connection.send(format!("GET /good HTTP/1.1\r\nHost: h\r\n\r\n{sent}{HIDDEN}"));
            assert_eq!(connection.receive().status, 200, "{what}");
            assert_eq!(connection.receive().status, 400, "{what}");
            assert_eq!(connection.rest(), 0, "{what}");
            assert_eq!(upstream.requests(), number + 1, "{what}");
        }
        assert!(!upstream.seen().concat().contains("hidden"));
    });
}

/// In two pieces, wherever it is cut: the interpretation must not depend on how the bytes arrive.
#[test]
fn how_the_bytes_come_changes_nothing() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        let sent = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nX";
        let head = sent.find("\r\n\r\n").unwrap();
        for cut in (1..head).step_by(5) {
            let mut connection = gateway.connect();
            connection.send(&sent[..cut]);
            std::thread::sleep(std::time::Duration::from_millis(5));
            // The first piece may have been refused.
            _ = connection.try_send(&sent[cut..]);
            assert_eq!(connection.receive().status, 400, "cut at {cut}");
        }
        assert_eq!(upstream.accepted(), 0);
    });
}

#[test]
fn a_body_with_two_readings_never_ends_at_the_upstream() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        for Case { what, sent } in REFUSED_IN_THEIR_BODY {
            let mut connection = gateway.connect();
            connection.send(format!("{sent}{HIDDEN}"));
            let answer = connection.receive();
            assert_eq!(answer.status, 400, "{what}: {}", answer.text());
            assert_eq!(connection.rest(), 0, "{what}: one answer, and the end");
            assert!(gateway.get("/probe").text().starts_with("GET /probe "), "{what}");
            for seen in upstream.seen() {
                assert!(!seen.contains("\r\n0\r\n") && !seen.contains("hidden"), "{what}: {seen}");
                // Half a request is not continued with another.
                let half = seen.split_once("chunked").map_or("", |(_, half)| half);
                assert!(!half.contains(" HTTP/1.1"), "{what}: {seen}");
            }
        }
    });
}

#[test]
fn a_path_cannot_hide_where_it_leads() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        for target in ["/x/..%2fapi", "/x/%2E%2e%5Capi?q", "/x/..\\api"] {
            let mut connection = gateway.connect();
            let answer = connection.get(target);
            assert_eq!(answer.status, 400, "{target}: {}", answer.text());
            assert!(connection.is_closed());
        }
        assert_eq!(upstream.requests(), 0);
        assert_eq!(gateway.get("/files/a%2Fb?x=..%2f").status, 200);
    });
}

#[test]
fn a_request_inside_a_body_stays_there() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        let length = HIDDEN.len();
        for sent in [
            format!("POST /outer HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n{HIDDEN}"),
            format!(
                "POST /outer HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n{length:x}\r\n{HIDDEN}\r\n0\r\n\r\n"
            ),
            // RFC 9110, section 9.3.1: a GET may have a body, and a server that ignores it takes it for the next request.
            format!("GET /outer HTTP/1.1\r\nHost: h\r\nContent-Length: {length}\r\n\r\n{HIDDEN}"),
        ] {
            let mut connection = gateway.connect();
            let answer = connection.ask(&sent);
            assert!(answer.text().contains("/outer"), "{sent}");
            assert!(connection.get("/next").text().starts_with("GET /next "), "{sent}");
        }
    });
}

#[test]
fn a_body_that_a_route_does_not_want_is_not_the_next_request() {
    each_http1(|protocol| {
        let gateway = protocol.start(&testkit::gateway::site(
            "",
            &["{ path: /a, respond: { body: a } }", "{ path: /hidden, respond: { body: hidden } }"],
            &testkit::gateway::per_user(1),
        ));
        let length = HIDDEN.len();
        for path in ["/a", "/nowhere"] {
            let mut connection = gateway.connect();
            for _ in 0..2 {
                let head = format!("POST {path} HTTP/1.1\r\nHost: h\r\nX-User-Id: {path}\r\n");
                connection.send(format!("{head}Content-Length: {length}\r\n\r\n{HIDDEN}"));
                assert_ne!(connection.receive().text(), "hidden");
            }
            assert_eq!(connection.get_as(&format!("{path}-other"), "/a").text(), "a");
        }
    });
}

/// An upstream that agrees to speak HTTP/2 on the connection would get requests that no limit has checked.
#[test]
fn a_client_cannot_have_the_upstream_speak_http_2() {
    each_http1(|protocol| {
        let upstream = Raw::named("one");
        let gateway = protocol.start_before(&upstream.url());
        for offered in ["h2c", "H2C", "websocket, h2c"] {
            let answer = gateway.client().ask(format!(
                "GET / HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {offered}\r\n\
                 HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"
            ));
            let seen = answer.text().to_ascii_lowercase();
            assert!(!seen.contains("h2c") && !seen.contains("http2-settings"), "{offered}: {seen}");
        }
        until("an answer", || upstream.requests() == 3);
    });
}

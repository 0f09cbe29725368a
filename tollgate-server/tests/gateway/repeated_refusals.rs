//! Clients that are refused again and again. The gateway answers them with a reused response, which must not be
//! noticeable.

use testkit::client::{each_http1, each_protocol};
use testkit::gateway::{per_user, site};
use testkit::http1::Response;
use testkit::upstream::Raw;

/// Returns what does not change from one second to the next.
fn shape(answer: &Response) -> (u16, Vec<String>, String) {
    let mut names: Vec<String> = answer.names().map(str::to_owned).collect();
    names.sort_unstable();
    let expected: serde_json::Value = serde_json::from_str(answer.text()).unwrap();
    (answer.status, names, expected["error"].to_string())
}

#[test]
fn tenth_refusal_equals_the_first() {
    each_protocol(|protocol| {
        let gateway = protocol.start(&site("", &["{ path: /**, respond: { body: ok } }"], &per_user(1)));
        let mut connection = gateway.client();
        assert_eq!(connection.get_as("ann", "/").status, 200);
        let first = connection.get_as("ann", "/");
        assert_eq!(first.status, 429);
        for _ in 0..10 {
            assert_eq!(shape(&connection.get_as("ann", "/")), shape(&first));
        }
    });
}

#[test]
fn a_request_that_may_pass_again_is_counted_and_forwarded_once() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let limits = "{ name: per-user, key: 'header:x-user-id', limit: 3, window: 10220d }";
        let gateway = protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
        let mut connection = gateway.client();
        (0..3).for_each(|_| assert_eq!(connection.get_as("ann", "/").status, 200));
        (0..3).for_each(|_| assert_eq!(connection.get_as("ann", "/").status, 429));
        for left in ["2", "1", "0"] {
            let answer = connection.get_as("bob", "/");
            assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some(left)));
        }
        assert_eq!(connection.get_as("bob", "/").status, 429);
        assert_eq!(upstream.requests(), 6);
    });
}

#[test]
fn requests_that_are_not_plain_are_refused_too() {
    each_protocol(|protocol| {
        let gateway = protocol.start(&site("", &["{ path: /**, respond: { body: ok } }"], &per_user(1)));
        let mut connection = gateway.client();
        assert_eq!(connection.get_as("ann", "/").status, 200);
        assert_eq!(connection.get_as("ann", "/").status, 429);
        let start = "HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n";
        for (request, answers) in [
            (format!("POST / {start}Content-Length: 5\r\n\r\nhello"), 1),
            (format!("POST / {start}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), 1),
            (format!("GET / {start}\r\nGET / {start}\r\nGET / {start}\r\n"), 3),
            (format!("GET / {start}Accept: application/problem+json\r\n\r\n"), 1),
            (format!("GET / {start}Expect: 100-continue\r\nContent-Length: 0\r\n\r\n"), 1),
            (format!("GET / {start}\r\n"), 1),
        ] {
            connection.send(&request);
            for _ in 0..answers {
                assert_eq!(connection.receive().status, 429, "{request:?}");
            }
        }
        let (head, tail) = (format!("GET / {start}"), "\r\n");
        connection.send(head);
        std::thread::sleep(std::time::Duration::from_millis(50));
        connection.send(tail);
        assert_eq!(connection.receive().status, 429);
    });
}

#[test]
fn ambiguous_requests_are_refused_after_denied_ones_too() {
    each_http1(|protocol| {
        for request in ["GET / HTTP/1.1\nHost: h\r\n\r\n", "GET / HTTP/1.1\r\nHost: h\r\nHost: i\r\n\r\n"] {
            let gateway = protocol.start(&site("", &["{ path: /**, respond: { body: ok } }"], &per_user(1)));
            let mut connection = gateway.client();
            assert_eq!(connection.get_as("ann", "/").status, 200);
            (0..3).for_each(|_| assert_eq!(connection.get_as("ann", "/").status, 429));
            assert_eq!(connection.ask(request).status, 400, "{request:?}");
        }
    });
}

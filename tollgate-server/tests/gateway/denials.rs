//! Refused requests with bodies, and requests that wait in the queue of a limit.

use std::io::Write;
use std::time::Duration;

use testkit::client::each_protocol;
use testkit::gateway::{Gateway, per_user, site};
use testkit::upstream::Raw;
use testkit::wait::until;
use testkit::window::within_one_minute;

#[test]
fn without_a_file_the_eleventh_call_of_a_user_is_429() {
    each_protocol(|protocol| {
        let limits = "{ name: per-user, key: 'header:x-user-id' }";
        let gateway = protocol.start(&site("", &["{ path: /**, upstream: echo }"], limits));
        let mut connection = gateway.client();
        let answers = within_one_minute(|attempt| {
            let user = format!("user{attempt}");
            (0..11).map(|_| connection.get_as(&user, "/api/test")).collect::<Vec<_>>()
        });
        let (denied, allowed) = answers.split_last().unwrap();
        for (answer, left) in allowed.iter().zip((0..10).rev()) {
            assert_eq!((answer.status, answer.header("x-ratelimit-limit")), (200, Some("10")));
            assert_eq!(answer.header("x-ratelimit-remaining"), Some(left.to_string().as_str()));
        }
        assert_eq!((denied.status, denied.header("x-ratelimit-remaining")), (429, Some("0")));
        let seconds: u64 = denied.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=60).contains(&seconds), "{seconds}");
        let expected: serde_json::Value = serde_json::from_str(denied.text()).unwrap();
        let unit = if seconds == 1 { "second" } else { "seconds" };
        let message = format!("Too many requests. Please retry after {seconds} {unit}.");
        assert_eq!(
            expected,
            serde_json::json!({"error": "rate_limit_exceeded", "message": message, "retry_after": seconds})
        );
        assert_eq!(connection.get_as("other", "/api/test").status, 200);
    });
}

#[test]
fn a_denied_request_never_reaches_the_upstream_and_the_connection_goes_on() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let gateway =
            protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], &per_user(1)));
        let mut connection = gateway.client();
        let body = "x".repeat(10_000);
        for (number, rest) in [
            "Content-Length: 5\r\n\r\nhello".to_owned(),
            "Content-Length: 5\r\n\r\nhello".to_owned(),
            "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n".to_owned(),
            format!("Content-Length: {}\r\n\r\n{body}", body.len()),
            "Content-Length: 0\r\n\r\n".to_owned(),
        ]
        .into_iter()
        .enumerate()
        {
            let answer = connection.ask(format!("POST /{number} HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n{rest}"));
            assert_eq!(answer.status, if number == 0 { 200 } else { 429 }, "{number}");
        }
        assert_eq!(connection.get_as("bob", "/").status, 200);
        assert_eq!(upstream.requests(), 2);
    });
}

/// Refusals of HTTP/1 reuse the last one, which must not be that of another origin.
#[test]
fn scripts_of_listed_origins_may_read_refusals() {
    each_protocol(|protocol| {
        let rules = site("workers: 1", &["{ path: /**, respond: { body: ok } }"], &per_user(1));
        let gateway =
            protocol.start(&format!("cors: {{ origins: ['https://a.example', 'https://b.example'] }}\n{rules}"));
        let mut connection = gateway.client();
        assert_eq!(connection.get_as("ann", "/").status, 200);
        let origins = [Some("https://a.example"), Some("https://b.example"), Some("https://c.example"), None];
        for (origin, number) in origins.into_iter().flat_map(|origin| [(origin, 1), (origin, 2)]) {
            let allowed = origin.filter(|origin| *origin != "https://c.example");
            let line = origin.map_or_else(String::new, |origin| format!("Origin: {origin}\r\n"));
            let denied = connection.ask(format!("GET / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n{line}\r\n"));
            let headers = [
                denied.header("access-control-allow-origin"),
                denied.header("access-control-allow-credentials"),
                denied.header("access-control-expose-headers").map(|exposed| &exposed[..11]),
            ];
            let expected = [allowed, allowed.map(|_| "true"), allowed.map(|_| "retry-after")];
            assert_eq!((denied.status, headers), (429, expected), "{origin:?}, request {number}");
        }
    });
}

/// The last refusal is kept for reuse, so this alternates between everything that can differ.
#[test]
fn refusals_that_follow_each_other_are_each_their_own() {
    each_protocol(|protocol| {
        let limit = |name: &str, path: &str, window: &str| {
            format!(
                "{{ name: {name}, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, limit: 1, window: {window}, match: {{ path: {path} }} }}"
            )
        };
        let limits = format!("{}, {}", limit("first", "/a", "1h"), limit("second", "/b", "2h"));
        let gateway = protocol.start(&site("workers: 1", &["{ path: /**, respond: { body: ok } }"], &limits));
        let mut connections = [(); 2].map(|()| gateway.client());
        for (user, path) in [("ann", "/a"), ("bob", "/a"), ("ann", "/b")] {
            assert_eq!(connections[0].get_as(user, path).status, 200);
        }
        let turns = [("ann", "/a"), ("bob", "/a"), ("ann", "/b"), ("ann", "/b"), ("bob", "/a")];
        for (number, (user, path)) in turns.into_iter().cycle().take(40).enumerate() {
            let connection = &mut connections[number % 2];
            let method = if number % 3 == 1 { "HEAD" } else { "GET" };
            let accept = if number % 7 < 5 { "*/*" } else { "application/problem+json" };
            let head = format!("{method} {path} HTTP/1.1\r\nHost: h\r\nX-User-Id: {user}\r\nAccept: {accept}\r\n\r\n");
            connection.send(head);
            let answer = if method == "HEAD" { connection.receive_head().unwrap() } else { connection.receive() };
            let (name, window) = if path == "/a" { ("first", 3600) } else { ("second", 7200) };
            let wait: u64 = answer.header("retry-after").unwrap().parse().unwrap();
            assert_eq!(answer.status, 429, "{number}");
            assert!((window - 60..=window).contains(&wait), "{number}: {wait}");
            assert_eq!(answer.header("ratelimit-policy").unwrap(), format!("\"{name}\";q=1;w={window}"), "{number}");
            assert_eq!(answer.header("ratelimit").unwrap(), format!("\"{name}\";r=0;t={wait}"), "{number}");
            if method == "GET" && accept == "*/*" {
                let expected: serde_json::Value = serde_json::from_str(answer.text()).unwrap();
                assert_eq!(expected["retry_after"], wait, "{number}");
            }
            let is_problem = answer.header("content-type") == Some("application/problem+json");
            assert_eq!(is_problem, accept != "*/*", "{number}");
        }
    });
}

#[test]
fn a_denial_arrives_before_the_end_of_the_body() {
    each_protocol(|protocol| {
        let gateway = protocol.start(&site("", &["{ path: /**, respond: { body: ok } }"], &per_user(1)));
        assert_eq!(gateway.client().get_as("ann", "/").status, 200);
        for rest in ["Content-Length: 1000000\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"] {
            let answer = gateway.send(format!("POST / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n{rest}"));
            assert_eq!(answer.status, 429, "{rest}");
        }
    });
}

/// A client of HTTP/1 may write without a pause, and read at the same time.
#[test]
fn a_denial_arrives_while_the_client_is_still_sending() {
    const BODY_BYTES: usize = 10 << 20;
    let gateway = Gateway::start(&site("", &["{ path: /**, respond: { body: ok } }"], &per_user(1)));
    assert_eq!(gateway.connect().get_as("ann", "/").status, 200);
    for rest in [format!("Content-Length: {BODY_BYTES}\r\n\r\n"), "Transfer-Encoding: chunked\r\n\r\n".to_owned()] {
        let mut connection = gateway.connect();
        let mut tcp = connection.tcp();
        let is_chunked = rest.contains("chunked");
        connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n{rest}"));
        let sending = std::thread::spawn(move || {
            let piece = vec![7; 64 << 10];
            let chunk = [b"10000\r\n", &piece[..], b"\r\n"].concat();
            // The gateway may close the connection on unwanted bytes, but only after its response.
            _ = (0..BODY_BYTES / piece.len()).try_for_each(|_| {
                std::thread::sleep(Duration::from_millis(1));
                tcp.write_all(if is_chunked { &chunk } else { &piece })
            });
        });
        assert_eq!(connection.receive().status, 429, "chunked: {is_chunked}");
        sending.join().unwrap();
    }
}

#[test]
fn a_denial_arrives_before_the_body_is_complete() {
    each_protocol(|protocol| {
        let gateway = protocol.start(&site("", &["{ path: /**, respond: { body: ok } }"], &per_user(1)));
        assert_eq!(gateway.client().get_as("ann", "/").status, 200);
        for (rest, part) in
            [("Content-Length: 15\r\n\r\n", "hello"), ("Transfer-Encoding: chunked\r\n\r\n", "5\r\nhello\r\n")]
        {
            let mut connection = gateway.client();
            connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n{rest}{part}"));
            assert_eq!(connection.receive().status, 429, "{rest}");
        }
    });
}

/// As most client libraries do: the whole request first, then the response.
#[test]
fn a_client_that_sends_everything_first_still_reads_its_denial() {
    each_protocol(|protocol| {
        let gateway = protocol.start(&site("", &["{ path: /**, respond: { body: ok } }"], &per_user(1)));
        assert_eq!(gateway.client().get_as("ann", "/").status, 200);
        for size in [1, 100_000, 1_000_000, 10_000_000] {
            let mut connection = gateway.client();
            let head = format!("POST / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\nContent-Length: {size}\r\n\r\n");
            connection.send(head);
            _ = connection.try_send(vec![7; size]);
            let answer = connection.try_receive();
            assert_eq!(answer.map(|answer| answer.status).ok(), Some(429), "{size} bytes");
        }
    });
}

fn queue(max_wait: &str) -> String {
    format!(
        "{{ name: queue, key: 'header:x-user-id', algorithm: leaky_bucket, capacity: 4, leak: 4/s, overflow: queue, \
         max_wait: {max_wait} }}"
    )
}

#[test]
fn a_queue_holds_requests_back_until_their_turn() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        // The next turn comes after an hour.
        let limit = queue("5h").replace("leak: 4/s", "leak: 1/h");
        let gateway = protocol.start(&site("", &[route], &limit));
        assert_eq!(gateway.client().get_as("ann", "/").status, 200);
        let mut held: Vec<_> = (0..3).map(|_| gateway.client()).collect();
        for client in &mut held {
            client.send("GET / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n\r\n");
            assert!(!client.has_answer_within_a_moment(), "it is not its turn");
        }
        assert_eq!(gateway.client().get_as("ann", "/").status, 429, "the others wait in the queue");
        assert_eq!(upstream.requests(), 1);
    });
}

#[test]
fn requests_in_a_queue_are_served_at_their_turn() {
    each_protocol(|protocol| {
        let upstream = Raw::named("one");
        let route = format!("{{ path: /**, upstream: {} }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], &queue("10s")));
        let mut clients: Vec<_> = (0..4).map(|_| gateway.client()).collect();
        for client in &mut clients {
            client.send("GET / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n\r\n");
        }
        for client in &mut clients {
            assert_eq!(client.receive().status, 200);
        }
        assert_eq!(upstream.requests(), 4);
    });
}

#[test]
fn requests_beyond_the_queues_of_the_gateway_are_503_and_spend_nothing() {
    each_protocol(|protocol| {
        let limit = queue("1m").replace("leak: 4/s", "leak: 1/m").replace("capacity: 4", "capacity: 100");
        let limit = limit.replace("max_wait: 1m", "max_wait: 2h");
        let route = "{ path: /**, respond: { body: ok }, response_headers: { set: { x-route: all } } }";
        let gateway = protocol.start(&site("max_queued: 2", &[route], &limit));
        assert_eq!(gateway.client().get_as("ann", "/").status, 200);
        let mut held: Vec<_> = (0..2).map(|_| gateway.client()).collect();
        for connection in &mut held {
            connection.send("GET / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n\r\n");
        }
        // Two wait as soon as a third does not. Each attempt has its own key, whose bucket is empty. One that waits is kept:
        // it may have taken the place of a request above, which is then refused.
        let mut attempts = 0;
        until("a full queue", || {
            attempts += 1;
            let mut connection = gateway.client();
            for _ in 0..2 {
                connection.send(format!("GET / HTTP/1.1\r\nHost: h\r\nX-User-Id: bob-{attempts}\r\n\r\n"));
                if !connection.has_answer_within_a_moment() {
                    held.push(connection);
                    return false;
                }
                let answer = connection.receive();
                if answer.status != 200 {
                    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
                    assert_eq!(answer.header("x-route"), Some("all"));
                    assert!(answer.text().contains("queue_full"), "{}", answer.text());
                    return true;
                }
            }
            false
        });
    });
}

#[test]
fn a_request_that_would_wait_too_long_is_429() {
    each_protocol(|protocol| {
        let gateway = protocol.start(&site(
            "",
            &["{ path: /**, respond: { body: ok } }"],
            &queue("1s").replace("leak: 4/s", "leak: 1/m"),
        ));
        let mut connection = gateway.client();
        assert_eq!(connection.get_as("ann", "/").status, 200);
        assert_eq!(connection.get_as("ann", "/").status, 429);
    });
}

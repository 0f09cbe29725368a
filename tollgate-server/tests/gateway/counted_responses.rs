//! Limits that count responses, and limits on requests in flight.

use std::sync::mpsc;

use http::{Request, Response};
use hyper::body::Incoming;
use testkit::client::each_protocol;
use testkit::gateway::site;
use testkit::port::full_listener;
use testkit::upstream::{AnyBody, Raw, Served, Speaks, full};
use testkit::wait::until;

/// Returns an upstream that responds as its path says: `/401`, or `/200/7` for a cost of 7.
fn obedient() -> Raw {
    Raw::start(|conversation| {
        while let Some(asked) = conversation.request() {
            let target = asked.head.split(' ').nth(1).unwrap_or_default();
            let mut words = target.split('/').skip(1);
            let (status, cost) = (words.next().unwrap_or("200"), words.next().unwrap_or("1"));
            let head = format!("HTTP/1.1 {status} Requested\r\nX-Cost: {cost}\r\nContent-Length: 0\r\n\r\n");
            if !conversation.send(head) {
                return;
            }
        }
    })
}

/// An upstream that holds responses until they are released, and responds as the path says.
fn holding() -> (Raw, mpsc::Sender<()>) {
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let upstream = Raw::start(move |conversation| {
        while let Some(asked) = conversation.request() {
            let status = asked.head.split(' ').nth(1).unwrap_or_default().trim_start_matches('/').to_owned();
            released.lock().unwrap().recv().unwrap();
            if !conversation.send(format!("HTTP/1.1 {status} Requested\r\nContent-Length: 0\r\n\r\n")) {
                return;
            }
        }
    });
    (upstream, release)
}

#[test]
fn only_failed_logins_spend_the_login_limit() {
    each_protocol(|protocol| {
        let upstream = obedient();
        let limits = "{ name: logins, key: 'header:x-user-id', algorithm: fixed_window, limit: 2, window: 10220d, count: [401] }";
        let gateway = protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
        let mut connection = gateway.client();
        for _ in 0..5 {
            assert_eq!(connection.get_as("ann", "/200").status, 200);
        }
        assert_eq!(connection.get_as("ann", "/401").status, 401);
        assert_eq!(connection.get_as("ann", "/500").status, 500);
        assert_eq!(connection.get_as("ann", "/401").status, 401);
        assert_eq!(connection.get_as("ann", "/200").status, 429);
        assert_eq!(upstream.requests(), 8);
    });
}

#[test]
fn response_header_sets_the_cost() {
    each_protocol(|protocol| {
        let upstream = obedient();
        let limits = "{ name: tokens, key: 'header:x-user-id', algorithm: token_bucket, capacity: 100, refill: 1/h, \
                  cost: 50, settle: 'header:x-cost' }";
        let gateway = protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
        let mut connection = gateway.client();
        for left in [90, 80, 70, 60, 50] {
            let answer = connection.get_as("ann", "/200/10");
            // The header is written after the settlement.
            assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some(&*left.to_string())));
        }
        // 50 are left: one more estimate fits, and it costs all of them.
        assert_eq!(connection.get_as("ann", "/200/50").status, 200);
        assert_eq!(connection.get_as("ann", "/200/1").status, 429);
    });
}

/// Units beyond the quota are owed: at one unit an hour, the next request waits for all of them.
#[test]
fn a_cost_beyond_the_quota_is_owed() {
    each_protocol(|protocol| {
        let upstream = obedient();
        let limits = "{ name: rows, key: 'header:x-user-id', algorithm: token_bucket, capacity: 100, refill: 1/h, \
                  settle: 'header:x-cost' }";
        let gateway = protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
        let mut connection = gateway.client();
        let answer = connection.get_as("ann", "/200/300");
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some("0")));
        let denied = connection.get_as("ann", "/200/1");
        let hours = denied.header("retry-after").and_then(|wait| wait.parse::<u64>().ok()).unwrap_or(0) / 3600;
        // It waits for one unit more than it owes.
        assert!(denied.status == 429 && (200..=201).contains(&hours), "{} {hours}", denied.status);
    });
}

/// Logins in progress are not failed ones: the next client waits for their responses, and not for the end of the window.
#[test]
fn requests_in_progress_are_pending_and_not_spent() {
    each_protocol(|protocol| {
        let (upstream, release) = holding();
        let limits = "{ name: logins, key: 'header:x-user-id', algorithm: fixed_window, limit: 2, window: 10220d, count: [401] }";
        let route = format!("{{ path: /**, upstream: {}, timeout: 20s }}", upstream.url());
        let gateway = protocol.start(&site("", &[route], limits));
        let mut logins = [(); 2].map(|()| gateway.client());
        for (number, login) in logins.iter_mut().enumerate() {
            login.send("GET /200 HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n\r\n");
            until("the login is under way", || upstream.requests() == number + 1);
        }
        let mut third = gateway.client();
        let denied = third.get_as("ann", "/200");
        let wait = denied.header("retry-after").and_then(|wait| wait.parse::<u64>().ok()).expect("a number");
        assert!(denied.status == 429 && wait <= 21, "{} {wait}", denied.status);
        assert!(denied.text().contains(r#""reason":"pending""#), "{}", denied.text());
        for login in &mut logins {
            release.send(()).unwrap();
            assert_eq!(login.receive().status, 200);
        }
        release.send(()).unwrap();
        assert_eq!(third.get_as("ann", "/200").status, 200);
    });
}

/// The cost is read from the response of the upstream, over both protocols on both sides.
#[test]
fn cost_counts_although_the_route_removes_its_header() {
    each_protocol(|protocol| {
        let (http1, http2) = (obedient(), Served::start(Speaks::Http2, costing_50));
        let edits = "response_headers: { remove: [X-Cost] }";
        let routes = [
            format!("{{ path: /200/50, upstream: {}, {edits} }}", http1.url()),
            format!("{{ path: /http2, upstream: 'h2c://{}', {edits} }}", http2.address),
            format!("{{ path: /fixed, respond: {{ headers: {{ X-Cost: '50' }} }}, {edits} }}"),
        ];
        let limits = "{ name: tokens, key: 'header:x-user-id', algorithm: token_bucket, capacity: 100, refill: 1/h, \
                  settle: 'header:x-cost' }";
        let gateway = protocol.start(&site("workers: 1", &routes, limits));
        for path in ["/200/50", "/http2", "/fixed"] {
            let mut connection = gateway.client();
            let statuses = [0; 3].map(|_| {
                let answer = connection.get_as(&format!("one{path}"), path);
                assert_eq!(answer.header("x-cost"), None, "{path}");
                answer.status
            });
            assert_eq!(statuses, [200, 200, 429], "HTTP/1, {path}");
        }
    });
}

async fn costing_50(_request: Request<Incoming>) -> Response<AnyBody> {
    Response::builder().header("x-cost", "50").body(full("")).unwrap()
}

#[test]
fn limits_count_the_gateways_response_if_no_upstream_gets_the_request() {
    each_protocol(|protocol| {
        let limits = "{ name: failures, key: 'header:x-user-id', algorithm: fixed_window, limit: 1, window: 1h, \
                  count: successes }";
        let (full, _held) = full_listener().unwrap();
        let routes = [
            "{ path: /refused, upstream: 'http://127.0.0.1:1', retries: 0 }".to_owned(),
            format!("{{ path: /late, upstream: 'http://{full}', retries: 0, connect_timeout: 100ms }}"),
        ];
        let gateway = protocol.start(&site("", &routes, limits));
        let mut connection = gateway.client();
        for _ in 0..3 {
            let paths = ["/refused", "/late"];
            assert_eq!(paths.map(|path| connection.get_as("ann", path).status), [502, 504]);
        }
    });
}

const FAILED_LOGINS: &str = "{ name: logins, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, \
    limit: 5, window: 1h, count: { statuses: [401], when: after } }";

#[test]
fn correct_logins_pass_together_if_they_count_after_their_responses() {
    each_protocol(|protocol| {
        let (upstream, release) = holding();
        let gateway =
            protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], FAILED_LOGINS));
        let ask = |path: &str| {
            let mut client = gateway.client();
            client.send(format!("GET {path} HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n\r\n"));
            client
        };
        let mut asking = [(); 8].map(|()| ask("/200"));
        until("all are with the upstream", || upstream.requests() == 8);
        (0..8).for_each(|_| release.send(()).unwrap());
        for client in &mut asking {
            let answer = client.receive();
            assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some("5")));
        }
        for left in ["4", "3", "2", "1", "0"] {
            release.send(()).unwrap();
            let answer = ask("/401").receive();
            assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (401, Some(left)));
        }
        assert_eq!(ask("/200").receive().status, 429);
        assert_eq!(upstream.requests(), 13);
    });
}

#[test]
fn cost_beyond_the_quota_is_owed_if_requests_count_after_their_responses() {
    each_protocol(|protocol| {
        let upstream = obedient();
        let limits = "{ name: tokens, key: 'header:x-user-id', algorithm: token_bucket, capacity: 100, refill: 100/h, \
                  settle: 'header:x-cost', count: { statuses: successes, when: after } }";
        let gateway = protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
        let mut connection = gateway.client();
        assert_eq!(connection.get_as("ann", "/500/400").status, 500);
        let answer = connection.get_as("ann", "/200/150");
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some("0")));
        // 51 tokens are missing, of which one comes back every 36 s.
        let denied = connection.get_as("ann", "/200/1");
        let wait: u64 = denied.header("retry-after").unwrap().parse().unwrap();
        assert!(denied.status == 429 && (1700..=1836).contains(&wait), "{wait}");
    });
}

#[test]
fn request_that_no_upstream_gets_does_not_count_after_its_response() {
    each_protocol(|protocol| {
        let limits = "{ name: failures, key: 'header:x-user-id', algorithm: fixed_window, limit: 1, window: 1h, \
                  count: { statuses: failures, when: after } }";
        let routes = [
            "{ path: /refused, upstream: 'http://127.0.0.1:1', retries: 0 }".to_owned(),
            "{ path: /fixed, respond: { status: 503 } }".to_owned(),
        ];
        let gateway = protocol.start(&site("", &routes, limits));
        let mut connection = gateway.client();
        for _ in 0..3 {
            assert_eq!(connection.get_as("ann", "/refused").status, 502);
        }
        assert_eq!([(); 2].map(|()| connection.get_as("ann", "/fixed").status), [503, 429]);
    });
}

#[test]
fn in_flight_bounds_concurrent_requests_of_a_key() {
    each_protocol(|protocol| {
        let (upstream, release) = holding();
        let limits = "{ name: at-once, key: 'header:x-user-id', in_flight: 1 }";
        let gateway = protocol.start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
        let mut first = gateway.client();
        first.send("GET /200 HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n\r\n");
        until("the first is under way", || upstream.requests() == 1);
        let mut second = gateway.client();
        let refused = second.get_as("ann", "/200");
        assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
        release.send(()).unwrap();
        assert_eq!(first.receive().status, 200);
        // The permit is free as soon as the response has ended, which is a moment after the client has read it.
        release.send(()).unwrap();
        until("there is a permit again", || second.get_as("ann", "/200").status == 200);
    });
}

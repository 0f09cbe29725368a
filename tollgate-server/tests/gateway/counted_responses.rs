//! Limits that count responses, and limits on requests in flight.

use std::sync::mpsc;

use testkit::gateway::{Gateway, site};
use testkit::upstream::Raw;
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

#[test]
fn only_failed_logins_spend_the_login_limit() {
    let upstream = obedient();
    let limits =
        "{ name: logins, key: 'header:x-user-id', algorithm: fixed_window, limit: 2, window: 10220d, count: [401] }";
    let gateway = Gateway::start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
    let mut connection = gateway.connect();
    for _ in 0..5 {
        assert_eq!(connection.get_as("ann", "/200").status, 200);
    }
    assert_eq!(connection.get_as("ann", "/401").status, 401);
    assert_eq!(connection.get_as("ann", "/500").status, 500);
    assert_eq!(connection.get_as("ann", "/401").status, 401);
    assert_eq!(connection.get_as("ann", "/200").status, 429);
    assert_eq!(upstream.requests(), 8);
}

#[test]
fn response_header_sets_the_cost() {
    let upstream = obedient();
    let limits = "{ name: tokens, key: 'header:x-user-id', algorithm: token_bucket, capacity: 100, refill: 1/h, \
                  cost: 50, settle: 'header:x-cost' }";
    let gateway = Gateway::start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
    let mut connection = gateway.connect();
    for _ in 0..5 {
        assert_eq!(connection.get_as("ann", "/200/10").status, 200);
    }
    // 50 are left: one more estimate fits, and it costs all of them.
    assert_eq!(connection.get_as("ann", "/200/50").status, 200);
    assert_eq!(connection.get_as("ann", "/200/1").status, 429);
}

#[test]
fn limits_count_the_gateways_response_if_no_upstream_responds() {
    let limits = "{ name: failures, key: 'header:x-user-id', algorithm: fixed_window, limit: 1, window: 1h, \
                  count: successes }";
    let gateway = Gateway::start(&site("", &["{ path: /**, upstream: 'http://127.0.0.1:1', retries: 0 }"], limits));
    let mut connection = gateway.connect();
    for _ in 0..3 {
        assert_eq!(connection.get_as("ann", "/").status, 502);
    }
}

#[test]
fn in_flight_bounds_concurrent_requests_of_a_key() {
    let (release, released) = mpsc::channel::<()>();
    let released = std::sync::Mutex::new(released);
    let upstream = Raw::start(move |conversation| {
        while conversation.request().is_some() {
            released.lock().unwrap().recv().unwrap();
            if !conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok") {
                return;
            }
        }
    });
    let limits = "{ name: at-once, key: 'header:x-user-id', in_flight: 1 }";
    let gateway = Gateway::start(&site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits));
    let mut first = gateway.connect();
    first.send("GET / HTTP/1.1\r\nHost: h\r\nX-User-Id: ann\r\n\r\n");
    until("the first is under way", || upstream.requests() == 1);
    let mut second = gateway.connect();
    let refused = second.get_as("ann", "/");
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    release.send(()).unwrap();
    assert_eq!(first.receive().status, 200);
    // The permit is free as soon as the response has ended, which is a moment after the client has read it.
    release.send(()).unwrap();
    until("there is a place again", || second.get_as("ann", "/").status == 200);
}

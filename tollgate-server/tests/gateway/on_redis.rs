//! Gateways whose limits are on Redis, so that decisions take time.

use testkit::client::each_protocol;
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, per_user, site};
use testkit::redis::RedisServer;
use testkit::tollgate::run_in;
use testkit::upstream::Raw;
use testkit::wait::until;

fn rules(redis: &RedisServer, upstream: &Raw) -> String {
    let routes = [
        format!("{{ path: /api/**, upstream: {} }}", upstream.url()),
        "{ path: /written, respond: { body: ok } }".to_owned(),
        "{ path: /echo, upstream: echo }".to_owned(),
    ];
    format!("store: {}\nstore_timeout: 5s\n{}", redis.url(), site("", &routes, &per_user(4)))
}

#[test]
fn two_gateways_share_a_limit_and_count_every_request_once() {
    each_protocol(|protocol| {
        let (redis, upstream) = (RedisServer::start(), Raw::named("one"));
        let gateways = [(); 2].map(|()| protocol.start(&rules(&redis, &upstream)));
        // The third request is not plain, which is found out after the decision.
        for (user, target) in [("ann", "/api/x"), ("bob", "/written"), ("cyd", "/echo"), ("dan", "/nowhere")] {
            let mut connections = gateways.each_ref().map(Gateway::client);
            let expected: Vec<_> = (0..6)
                .map(|turn| {
                    let answer = connections[turn % 2].get_as(user, target);
                    (answer.status, answer.header("x-ratelimit-remaining").unwrap().to_owned())
                })
                .collect();
            let passed = if target == "/nowhere" { 404 } else { 200 };
            let wanted = [(passed, "3"), (passed, "2"), (passed, "1"), (passed, "0"), (429, "0"), (429, "0")];
            assert_eq!(expected, wanted.map(|(status, left)| (status, left.to_owned())), "{target}");
        }
        assert_eq!(upstream.requests(), 4);
    });
}

#[test]
fn two_gateways_count_failed_logins_after_their_responses() {
    each_protocol(|protocol| {
        let redis = RedisServer::start();
        let upstream = Raw::start(|conversation| {
            while let Some(asked) = conversation.request() {
                let status = if asked.head.contains("/wrong") { "401 Unauthorized" } else { "200 OK" };
                if !conversation.send(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n")) {
                    return;
                }
            }
        });
        let limits = "{ name: logins, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, limit: 5, \
                  window: 1h, count: { statuses: [401], when: after } }";
        let site = site("", &[format!("{{ path: /**, upstream: {} }}", upstream.url())], limits);
        let rules = format!("store: {}\nstore_timeout: 5s\n{site}", redis.url());
        let gateways = [(); 2].map(|()| protocol.start(&rules));
        let mut connections = gateways.each_ref().map(Gateway::client);
        for turn in 0..8 {
            let answer = connections[turn % 2].get_as("ann", "/right");
            assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some("5")));
        }
        for (turn, left) in ["4", "3", "2", "1", "0"].into_iter().enumerate() {
            let answer = connections[turn % 2].get_as("ann", "/wrong");
            assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (401, Some(left)));
        }
        assert_eq!(connections.map(|mut connection| connection.get_as("ann", "/right").status), [429, 429]);
    });
}

#[test]
fn published_rules_leave_a_gateway_its_own_proxies() {
    each_protocol(|protocol| {
        let redis = RedisServer::start();
        let limit = |most: u32| {
            format!("{{ name: ip, key: ip, algorithm: fixed_window, align: first_request, limit: {most}, window: 1h }}")
        };
        let routes = ["{ path: /**, respond: { body: ok } }"];
        let site = site("trusted_proxies: [127.0.0.1/32]", &routes, &limit(9));
        let own = format!("store: {}\nstore_timeout: 5s\n{site}", redis.url());
        let gateway = protocol.start(&own);
        let published = format!("store: {}\nlimits: [{}]\n", redis.url(), limit(1));
        let office = folder_with(&[("office.yaml", &published)]);
        let output = run_in(office.path(), &["publish", "--config", "office.yaml"]);
        assert!(output.status.success(), "{output:?}");
        gateway.await_said("published version 1 is in force", 1);
        let statuses = ["192.0.2.1", "192.0.2.1", "192.0.2.2"].map(|address| {
            gateway.client().ask(format!("GET / HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: {address}\r\n\r\n")).status
        });
        assert_eq!(statuses, [200, 429, 200]);
    });
}

#[test]
fn loss_and_return_of_redis_are_logged() {
    each_protocol(|protocol| {
        let (mut redis, upstream) = (RedisServer::start(), Raw::named("one"));
        let gateway = protocol.start(&rules(&redis, &upstream));
        let mut connection = gateway.client();
        assert_eq!(connection.get_as("ann", "/api/x").status, 200);
        redis.kill();
        until("the line about its end", || {
            // Either decision is fine, as long as there is one.
            assert!([200, 429].contains(&connection.get_as("ann", "/api/x").status));
            gateway.said().contains(" does not answer: ")
        });
        let address = redis.url().replace("redis://", "");
        let said = gateway.await_said(&format!("tollgate: warning: the store at {address} does not answer: "), 1);
        let meanwhile = "; until it does, limits follow on_store_failure (local \
                     unless a limit sets its own): start it, or correct its URL\n";
        assert!(said.contains("Connection refused") && said.contains(meanwhile), "{said}");
        redis.restart();
        until("the line about its return", || {
            connection.get_as("ann", "/api/x");
            gateway.said().contains("the store answers again")
        });
    });
}

#[test]
fn pipelined_requests_are_answered_in_order_while_redis_decides() {
    each_protocol(|protocol| {
        let (redis, upstream) = (RedisServer::start(), Raw::named("one"));
        let gateway = protocol.start(&rules(&redis, &upstream));
        let mut connection = gateway.client();
        let request = |number: usize| format!("GET /api/{number} HTTP/1.1\r\nHost: h\r\nX-User-Id: eve\r\n\r\n");
        (0..6).for_each(|number| connection.send(request(number)));
        for number in 0..6 {
            let answer = connection.receive();
            assert_eq!(answer.status, if number < 4 { 200 } else { 429 });
            assert!(number >= 4 || answer.text().starts_with(&format!("GET /api/{number} ")), "{}", answer.text());
        }
    });
}

/// A gateway with a limit on the default store and one on the store `sessions`.
fn rules_on_two(default: &RedisServer, sessions: &RedisServer, more: &str) -> String {
    let limits = format!(
        "{{ name: user, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, limit: 9, window: 1h }}, \
         {{ name: session, key: 'header:x-user-id', algorithm: fixed_window, align: first_request, limit: 4, window: 1h, \
         store: sessions{more} }}"
    );
    let routes = ["{ path: /written, respond: { body: ok } }", "{ path: /echo, upstream: echo }"];
    // A long timeout, so that a busy machine is not mistaken for a failing store.
    let stores = format!("store: {}\nstores: {{ sessions: '{}' }}\nstore_timeout: 5s\n", default.url(), sessions.url());
    format!("{stores}admin: {{ listen: '127.0.0.1:0' }}\n{}", site("", &routes, &limits))
}

#[test]
fn limits_on_two_stores_are_taken_together_or_not_at_all() {
    each_protocol(|protocol| {
        let (default, sessions) = (RedisServer::start(), RedisServer::start());
        let gateways = [(); 2].map(|()| protocol.start(&rules_on_two(&default, &sessions, "")));
        for (user, target) in [("ann", "/written"), ("bob", "/echo")] {
            let mut connections = gateways.each_ref().map(Gateway::client);
            let answers: Vec<_> = (0..6)
                .map(|turn| {
                    let answer = connections[turn % 2].get_as(user, target);
                    (answer.status, answer.header("x-ratelimit-remaining").unwrap().to_owned())
                })
                .collect();
            let wanted = [(200, "3"), (200, "2"), (200, "1"), (200, "0"), (429, "0"), (429, "0")];
            assert_eq!(answers, wanted.map(|(status, left)| (status, left.to_owned())), "{target}");
        }
        sessions.command(&["FLUSHALL"]);
        // The limit on the default store still counts the four that passed, and none of those that were denied.
        let mut connection = gateways[0].client();
        let passed = |answer: u16| answer == 200;
        until("cached denials have ended", || passed(connection.get_as("ann", "/written").status));
        let more = (0..9).filter(|_| passed(connection.get_as("ann", "/written").status)).count();
        assert_eq!(more, 3, "the flushed store admits four, and the other has five left");
    });
}

/// Nothing is counted, so that a number would stay the same for ever.
#[test]
fn responses_by_the_failure_policy_have_no_rate_limit_headers() {
    each_protocol(|protocol| {
        let (mut redis, upstream) = (RedisServer::start(), Raw::named("one"));
        redis.kill();
        let gateway = protocol.start(&format!("on_store_failure: allow\n{}", rules(&redis, &upstream)));
        for target in ["/api/x", "/written", "/echo"] {
            let answer = gateway.client().get_as("ann", target);
            let names: Vec<&str> =
                answer.names().filter(|name| name.to_ascii_lowercase().contains("ratelimit")).collect();
            assert_eq!((answer.status, names), (200, vec![]), "{target}");
        }
    });
}

#[test]
fn a_store_that_fails_is_reported_by_its_name_and_concerns_its_own_limits() {
    each_protocol(|protocol| {
        let (default, mut sessions) = (RedisServer::start(), RedisServer::start());
        let gateway = protocol.start(&rules_on_two(&default, &sessions, ", on_store_failure: allow"));
        let mut connection = gateway.client();
        assert_eq!(connection.get_as("ann", "/written").status, 200);
        let address = sessions.url().replace("redis://", "");
        let metric = format!(r#"tollgate_store_server_available{{store="sessions",server="{address}"}}"#);
        gateway.await_metric(&metric, 1);
        sessions.kill();
        gateway.await_said(&format!("tollgate: warning: store `sessions` at {address} does not answer: "), 1);
        gateway.await_metric(&metric, 0);
        let default_address = default.url().replace("redis://", "");
        gateway.await_metric(
            &format!(r#"tollgate_store_server_available{{store="default",server="{default_address}"}}"#),
            1,
        );
        let statuses: Vec<u16> = (0..10).map(|_| connection.get_as("bob", "/written").status).collect();
        assert_eq!(statuses, [vec![200; 9], vec![429]].concat(), "the limit on the default store counts on");
        sessions.restart();
        gateway.await_said("store `sessions` answers again", 1);
        gateway.await_metric(&metric, 1);
    });
}

#[test]
fn the_wait_for_redis_is_a_part_of_the_duration_of_a_request() {
    each_protocol(|protocol| {
        const TIMEOUT_MILLIS: f64 = 300.0;
        let (mut redis, upstream) = (RedisServer::start(), Raw::named("one"));
        let settings = format!("store_timeout: {TIMEOUT_MILLIS}ms\n");
        let site = site(
            "access_log: { file: log, format: json }",
            &[format!("{{ path: /**, upstream: {} }}", upstream.url())],
            &per_user(9),
        );
        let gateway = protocol.start(&format!("store: {}\n{settings}{site}", redis.url()));
        assert_eq!(gateway.client().get_as("ann", "/").status, 200);
        // It keeps its connections, and answers nothing.
        redis.stop();
        assert_eq!(gateway.client().get_as("ann", "/").status, 200);
        let lines = gateway.await_lines(&gateway.path("log"), 2);
        let entry: serde_json::Value = serde_json::from_str(&lines[1]).unwrap();
        let millis = entry["duration_ms"].as_f64().unwrap();
        // The logged duration is the property. It may be longer.
        assert!(millis >= TIMEOUT_MILLIS, "{entry}");
        redis.cont();
    });
}

//! Metrics for Prometheus.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use testkit::folder::folder_with;
use testkit::gateway::Gateway;
use testkit::http1::{Response, ask};
use testkit::metrics::{EveryMetric, metrics};
use testkit::port::full_listener;
use testkit::redis::RedisServer;
use testkit::tollgate::{Process, RULES};
use testkit::upstream::{HELLO, moody_upstream, slow_upstream, upstream};
use testkit::wait::wait_until;

fn rules(routes: &str, limits: &str) -> String {
    format!("gateway:\n  workers: 2\n  routes:\n{routes}limits:\n{limits}")
}

fn shop(address: impl std::fmt::Display) -> String {
    format!("    - {{ name: shop, path: /shop/**, upstream: 'http://{address}' }}\n")
}

const PER_CLIENT: &str = "    - { name: per-client, key: ip, limit: 2, window: 10220d, match: { path: /shop/** } }\n";

#[test]
fn requests_and_decisions_are_counted_by_route_and_limit() {
    let gateway = Gateway::with_admin(&rules(&shop(upstream(HELLO)), PER_CLIENT));
    let statuses = [(); 3].map(|()| gateway.get("/shop/1").status);
    assert_eq!(statuses, [200, 200, 429]);
    assert_eq!(gateway.get("/nowhere").status, 404);

    gateway.await_metric(r#"tollgate_requests_total{route="shop",status="2xx"}"#, 2);
    gateway.await_metric(r#"tollgate_requests_total{route="shop",status="4xx"}"#, 1);
    gateway.await_metric(r#"tollgate_requests_total{route="",status="4xx"}"#, 1);
    gateway.await_metric(r#"tollgate_decisions_total{limit="per-client",outcome="allowed"}"#, 2);
    gateway.await_metric(r#"tollgate_decisions_total{limit="per-client",outcome="denied"}"#, 1);
    gateway.await_metric(r#"tollgate_request_duration_seconds_count{route="shop"}"#, 3);
    gateway.await_metric(r#"tollgate_request_duration_seconds_bucket{le="+Inf",route="shop"}"#, 3);
    gateway.await_metric(r#"tollgate_requests_in_flight{route="shop"}"#, 0);
    gateway.await_metric("tollgate_connections_accepted_total", 4);
    gateway.await_metric("tollgate_connections", 0);
    assert!(gateway.metric(r#"tollgate_request_duration_seconds_sum{route="shop"}"#).unwrap() > 0.0);
    assert!(gateway.metric("process_resident_memory_bytes").unwrap() > 1e6);
    assert!(gateway.metric("process_open_fds").unwrap() > 3.0);
}

#[test]
fn a_client_that_goes_is_noticed_while_its_upstream_is_dialled() {
    let (address, _full) = full_listener().unwrap();
    let route = format!("    - {{ name: shop, path: /**, upstream: 'http://{address}', connect_timeout: 10m }}\n");
    let gateway = Gateway::with_admin(&rules(&route, PER_CLIENT));
    let mut client = gateway.connect();
    client.send(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n");
    gateway.await_metric(r#"tollgate_requests_in_flight{route="shop"}"#, 1);
    drop(client);
    gateway.await_metric(r#"tollgate_requests_in_flight{route="shop"}"#, 0);
    gateway.await_metric("tollgate_connections", 0);
}

#[test]
fn limits_that_only_watch_are_counted_apart() {
    let limits = "    - { name: tried, key: ip, limit: 1, window: 10220d, shadow: true }\n";
    let gateway = Gateway::with_admin(&rules(&shop(upstream(HELLO)), limits));
    assert_eq!([(); 3].map(|()| gateway.get("/shop/1").status), [200; 3]);
    gateway.await_metric(r#"tollgate_decisions_total{limit="tried",outcome="shadow_allowed"}"#, 1);
    gateway.await_metric(r#"tollgate_decisions_total{limit="tried",outcome="shadow_denied"}"#, 2);
}

/// Otherwise `rate` and `increase` of Prometheus would miss the first decision.
#[test]
fn decisions_have_series_before_the_first_one() {
    let limits = "    - { name: user, key: header:x-user-id, missing: deny, limit: 1 }\n    - { name: tried, shadow: true, limit: 1 }\n    \
                  - { name: listed, limit: 9, blocked: { ips: [192.0.2.0/24] }, on_store_failure: deny }\n    \
                  - { name: off, limit: 9, enabled: false }\n";
    let gateway = Gateway::with_admin(&rules(&shop(upstream(HELLO)), limits));
    let series = || {
        let page = gateway.get_admin("/metrics");
        let of_limit = |line: &str| {
            let labels = line.strip_prefix("tollgate_decisions_total{limit=\"")?;
            let (limit, outcome) = labels.split_once("\",outcome=\"")?;
            Some(format!("{limit} {}", outcome.replace("\"}", "")))
        };
        page.text().lines().filter_map(of_limit).collect::<Vec<String>>().join(", ")
    };
    let of_user = "user allowed 0, user denied 0, user banned 0, user key_missing 0, user bad_request 0";
    assert_eq!(
        series(),
        format!(
            "listed allowed 0, listed denied 0, listed banned 0, listed blocked 0, listed bad_request 0, listed \
             store_unavailable 0, tried shadow_allowed 0, tried shadow_denied 0, {of_user}"
        )
    );
    assert_eq!(gateway.get("/shop/1").status, 403);
    gateway.await_metric(r#"tollgate_decisions_total{limit="user",outcome="key_missing"}"#, 1);
    // A limit that is removed keeps its counts, and one without any disappears.
    gateway.save(&rules(&shop(upstream(HELLO)), "    - { name: new, shadow: true, limit: 1 }\n"));
    gateway.await_metric(r#"tollgate_decisions_total{limit="new",outcome="shadow_denied"}"#, 0);
    let kept = series();
    assert!(kept.contains("user key_missing 1") && !kept.contains("user denied") && !kept.contains("listed"), "{kept}");
}

#[test]
fn failed_expressions_are_counted_for_requests_and_questions() {
    let limits =
        "    - { name: searches, limit: 2, window: 10220d, match: { when: 'int(request.query[\"page\"]) > 9' } }\n";
    let rules = rules(&shop(upstream(HELLO)), limits);
    let gateway = Gateway::with_admin(&format!("service: {{ http: '127.0.0.1:0' }}\n{rules}"));
    gateway.await_metric(r#"tollgate_expression_errors_total{limit="searches",field="match.when"}"#, 0);
    // A missing parameter and one with too many digits do not bypass the limit.
    assert_eq!(gateway.get("/shop/1?page=1").status, 200);
    assert_eq!(gateway.get("/shop/1").status, 200);
    let question = r#"{"request":{"method":"GET","path":"/shop/1?page=99999999999999999999"}}"#;
    let answer = check(gateway.address_of("decisions POST"), question);
    assert!(answer.text().contains(r#""allowed":true"#), "{}", answer.text());
    assert_eq!(gateway.get("/shop/1?page=ten").status, 429);
    gateway.await_metric(r#"tollgate_expression_errors_total{limit="searches",field="match.when"}"#, 3);
}

/// Sends a check to the decision service.
fn check(service: SocketAddr, question: &str) -> Response {
    let head = "POST /v1/check HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close";
    ask(service, format!("{head}\r\ncontent-length: {}\r\n\r\n{question}", question.len()))
}

#[test]
fn questions_are_counted_together_with_requests() {
    let watching =
        "    - { name: tried, key: ip, limit: 1, window: 10220d, match: { path: /shop/** }, shadow: true }\n";
    let rules = rules(&shop(upstream(HELLO)), &format!("{PER_CLIENT}{watching}"));
    let gateway = Gateway::with_admin(&format!("service: {{ http: '127.0.0.1:0' }}\n{rules}"));
    let service = gateway.address_of("decisions POST");
    assert_eq!(gateway.get("/shop/1").status, 200);
    let question = r#"{"request":{"path":"/shop/1","ip":"127.0.0.1"}}"#;
    assert!(check(service, question).text().contains(r#""allowed":true"#));
    let by_name = r#"{"limit":"per-client","key":"127.0.0.1"}"#;
    let look = r#"{"limit":"per-client","key":"127.0.0.1","cost":0}"#;
    let nobody = r#"{"request":{"path":"/elsewhere"}}"#;
    assert_eq!(check(service, &format!("[{question},{by_name},{look},{nobody}]")).status, 200);
    // An invalid check refuses its whole batch.
    assert_eq!(check(service, &format!(r#"[{by_name},{{"limit":"nobody"}}]"#)).status, 400);

    gateway.await_metric(r#"tollgate_decisions_total{limit="per-client",outcome="allowed"}"#, 2);
    gateway.await_metric(r#"tollgate_decisions_total{limit="per-client",outcome="denied"}"#, 2);
    gateway.await_metric(r#"tollgate_decisions_total{limit="tried",outcome="shadow_allowed"}"#, 1);
    gateway.await_metric(r#"tollgate_requests_total{route="shop",status="2xx"}"#, 1);
}

#[test]
fn a_service_without_a_gateway_reports_its_decisions_too() {
    let free = "127.0.0.1:0";
    let rules = format!("limits:\n{PER_CLIENT}");
    let arguments = ["serve", "--config", RULES, "--http", free, "--admin", free];
    let process = Process::start(folder_with(&[(RULES, &rules)]), &arguments);
    let (service, admin) = (process.address_of("decisions POST"), process.address_of("admin"));
    for _ in 0..5 {
        check(service, r#"{"limit":"per-client","key":"192.0.2.7"}"#);
    }
    let response = ask(admin, "GET /metrics HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n");
    let text = response.text();
    for row in [r#"{limit="per-client",outcome="allowed"} 2"#, r#"{limit="per-client",outcome="denied"} 3"#] {
        assert!(text.contains(&format!("\ntollgate_decisions_total{row}\n")), "{text}");
    }
    assert!(!text.contains("192.0.2.7"), "keys are not exposed");
}

/// The largest state in the smallest memory, so that few keys fill it.
#[test]
fn keys_without_memory_are_counted_and_warned_of() {
    let limit =
        "{ name: wide, key: ip, algorithm: sliding_window_counter, limit: 4000000000, window: 1h, segments: 60 }";
    let rules = format!("max_memory: 1MiB\nlimits:\n    - {limit}\n");
    let free = "127.0.0.1:0";
    let arguments = ["serve", "--config", RULES, "--http", free, "--admin", free];
    let process = Process::start(folder_with(&[(RULES, &rules)]), &arguments);
    let (service, admin) = (process.address_of("decisions POST"), process.address_of("admin"));
    let evicted = || {
        let response = ask(admin, "GET /metrics HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n");
        let text = response.text();
        let series = "tollgate_evicted_keys_total{limit=\"wide\"} ";
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.expect("it is there from the start").parse::<u64>().expect("a number")
    };
    assert_eq!(evicted(), 0);
    for batch in 0..60 {
        let questions: Vec<String> =
            (0..100).map(|key| format!(r#"{{"limit":"wide","key":"10.0.{batch}.{key}"}}"#)).collect();
        assert_eq!(check(service, &format!("[{}]", questions.join(","))).status, 200);
    }
    assert!(evicted() > 0);
    let said = process.await_said("max_memory is used up by keys of wide: ", 1);
    assert!(said.contains("raise max_memory"), "{said}");
}

#[test]
fn requests_under_way_and_those_whose_client_left_are_reported() {
    let slow = slow_upstream(HELLO, Duration::from_secs(60));
    let gateway = Gateway::with_admin(&rules(&shop(slow), PER_CLIENT));
    let mut client = gateway.connect();
    client.send(b"GET /shop/1 HTTP/1.1\r\nhost: a\r\n\r\n");
    gateway.await_metric(r#"tollgate_requests_in_flight{route="shop"}"#, 1);
    gateway.await_metric("tollgate_connections", 1);
    drop(client);
    gateway.await_metric(r#"tollgate_requests_in_flight{route="shop"}"#, 0);
    gateway.await_metric(r#"tollgate_requests_total{route="shop",status="aborted"}"#, 1);
}

#[test]
fn failures_of_upstreams_are_reported_by_their_kind() {
    // Nothing listens on this port any more.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let gateway = Gateway::with_admin(&rules(&shop(gone), "    []\n"));
    assert_eq!(gateway.get("/shop/1").status, 502);
    let failures = r#"tollgate_upstream_failures_total{route="shop",kind="cannot_connect"}"#;
    assert!(gateway.metric(failures).unwrap() >= 1.0);
    assert!(gateway.metric(&format!(r#"tollgate_upstream_up{{upstream="{gone}"}}"#)).is_some());
}

#[test]
fn a_route_without_a_healthy_upstream_is_reported_until_a_request_has_succeeded() {
    const UNWELL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let is_well = Arc::new(AtomicBool::new(false));
    let (answers, good) = (Arc::clone(&is_well), upstream(HELLO));
    let moody = moody_upstream(move || if answers.load(Relaxed) { HELLO } else { UNWELL });
    let eject = "eject: { after: 1, for: 100ms, statuses: [503] }";
    let routes = format!(
        "    - {{ name: shop, path: /shop/**, upstream: ['http://{moody}', 'http://{good}'], {eject} }}
    - {{ name: gone, path: /gone/**, upstream: 'http://{moody}', {eject} }}
    - {{ name: here, path: /here, respond: {{ status: 204 }} }}\n"
    );
    let gateway = Gateway::with_admin(&rules(&routes, "    []\n"));
    let (shop, gone) = (r#"tollgate_route_upstreams_up{route="shop"}"#, r#"tollgate_route_upstreams_up{route="gone"}"#);
    gateway.await_metric(shop, 2);
    assert_eq!(gateway.metric(r#"tollgate_route_upstreams_up{route="here"}"#), None);
    assert_eq!(gateway.get("/gone/").status, 503);
    assert_eq!((gateway.metric(shop), gateway.metric(gone)), (Some(2.0), Some(0.0)), "each route counts its own");
    // The ejection is over, but the upstream has not answered a request yet.
    gateway.await_metric(&format!(r#"tollgate_upstream_up{{upstream="{moody}"}}"#), 1);
    assert_eq!(gateway.metric(gone), Some(0.0));
    is_well.store(true, Relaxed);
    assert_eq!(gateway.get("/gone/").status, 200);
    gateway.await_metric(gone, 1);
    gateway.await_metric(shop, 2);
}

#[test]
fn ambiguous_requests_are_reported_by_their_reason() {
    let gateway = Gateway::with_admin(&rules(&shop(upstream(HELLO)), "    []\n"));
    let smuggled = "POST /shop/1 HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n";
    assert_eq!(gateway.send(smuggled).status, 400);
    gateway.await_metric(r#"tollgate_ambiguous_requests_total{reason="both_lengths"}"#, 1);
    let response = gateway.get_admin("/metrics");
    let text = response.text();
    let series = text.lines().filter_map(|line| line.strip_prefix("tollgate_ambiguous_requests_total"));
    let counted: Vec<&str> = series.filter(|row| !row.ends_with(" 0")).collect();
    assert_eq!(counted, [r#"{reason="both_lengths"} 1"#]);
}

#[test]
fn counts_of_a_route_and_a_limit_that_stay_survive_a_reload() {
    let shop = shop(upstream(HELLO));
    let gateway = Gateway::with_admin(&rules(&shop, PER_CLIENT));
    gateway.get("/shop/1");
    let more = "    - { name: other, path: /other, respond: { status: 204 } }\n";
    gateway.save(&rules(&format!("{more}{shop}"), &PER_CLIENT.replace("limit: 2", "limit: 9")));
    gateway.await_said("is in force", 1);
    gateway.get("/shop/1");
    gateway.await_metric(r#"tollgate_requests_total{route="shop",status="2xx"}"#, 2);
    gateway.await_metric(r#"tollgate_requests_total{route="other",status="2xx"}"#, 0);
    gateway.await_metric(r#"tollgate_decisions_total{limit="per-client",outcome="allowed"}"#, 2);
    gateway.await_metric(r#"tollgate_reloads_total{result="applied"}"#, 1);
}

#[test]
fn a_refused_file_is_seen_until_it_is_corrected() {
    let good = rules(&shop(upstream(HELLO)), PER_CLIENT);
    let gateway = Gateway::with_admin(&good);
    gateway.await_metric("tollgate_last_reload_successful", 1);
    gateway.save("limits: [{ nonsense: 1 }]");
    gateway.await_metric(r#"tollgate_reloads_total{result="refused"}"#, 1);
    gateway.await_metric("tollgate_last_reload_successful", 0);
    gateway.save(&good);
    gateway.await_metric("tollgate_last_reload_successful", 1);
}

#[test]
fn the_format_follows_the_accept_header() {
    const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    const CLASSIC: &str = "text/plain; version=0.0.4; charset=utf-8";
    // Prometheus 2.42.
    let prometheus = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
                      text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
    let gateway = Gateway::with_admin(&rules(&shop(upstream(HELLO)), PER_CLIENT));
    gateway.get("/shop/1");
    let counter = "tollgate_connections_accepted";
    for accept in ["*/*", "text/plain", "text/html,*/*;q=0.8", "application/openmetrics-text;q=0"] {
        let answer = metrics(&gateway, accept);
        assert_eq!((answer.header("content-type"), answer.header("vary")), (Some(CLASSIC), Some("accept")), "{accept}");
        assert!(answer.text().contains(&format!("\n# TYPE {counter}_total counter\n{counter}_total 1\n")), "{accept}");
        assert!(!answer.text().contains("# EOF"));
    }
    assert_eq!(gateway.get_admin("/metrics").header("content-type"), Some(CLASSIC), "without the header");
    for accept in [prometheus, "application/openmetrics-text"] {
        let answer = metrics(&gateway, accept);
        assert_eq!((answer.header("content-type"), answer.header("vary")), (Some(OPEN_METRICS), Some("accept")));
        assert!(answer.text().contains(&format!("\n# TYPE {counter} counter\n{counter}_total 1\n")), "{accept}");
        assert!(answer.text().ends_with("# EOF\n"));
    }
}

#[test]
fn no_series_occurs_twice_and_every_histogram_is_complete() {
    let servers = EveryMetric::start();
    for page in servers.pages("*/*") {
        let mut series: Vec<&str> = page
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| Some(line.rsplit_once(' ')?.0))
            .collect();
        let all = series.len();
        series.sort_unstable();
        series.dedup();
        assert_eq!(series.len(), all, "a series occurs twice");
        let counts =
            series.iter().filter(|name| name.contains("_seconds_count") || name.contains("_size_count")).count();
        let unbounded = series.iter().filter(|name| name.contains("le=\"+Inf\"")).count();
        assert!(counts > 5 && counts == unbounded, "{counts} histograms, {unbounded} without a bound");
    }
}

#[test]
fn decisions_of_the_failure_policy_are_counted_by_limit() {
    let mut redis = RedisServer::start();
    let limits =
        "    - { name: open, key: ip, limit: 1, window: 10220d, match: { path: /shop/open }, on_store_failure: allow }
    - { name: shut, key: ip, limit: 1, window: 10220d, match: { path: /shop/shut }, on_store_failure: deny }
    - { name: own, key: ip, limit: 1, window: 10220d, match: { path: /shop/own }, on_store_failure: local }\n";
    let rules = rules(&shop(upstream(HELLO)), limits);
    let service = "service: { http: '127.0.0.1:0' }";
    let gateway = Gateway::with_admin(&format!("store: {}\nexpected_nodes: 1\n{service}\n{rules}", redis.url()));
    assert_eq!(gateway.get("/shop/open").status, 200);
    let series = |limit: &str, policy: &str, outcome: &str| {
        format!(r#"tollgate_fallback_decisions_total{{limit="{limit}",policy="{policy}",outcome="{outcome}"}}"#)
    };
    // Also of limits that have not decided anything yet.
    for (limit, policy, outcome) in
        [("open", "allow", "allowed"), ("shut", "deny", "denied"), ("own", "local", "denied")]
    {
        gateway.await_metric(&series(limit, policy, outcome), 0);
    }
    assert_eq!(gateway.metric(&series("own", "deny", "denied")), None, "the limit has another policy");
    redis.kill();
    // The first requests may still be answered by the store, or by the failure of a connection that was open.
    gateway.await_said("does not answer", 1);
    assert_eq!([(); 3].map(|()| gateway.get("/shop/open").status), [200; 3]);
    assert_eq!([(); 2].map(|()| gateway.get("/shop/shut").status), [503; 2]);
    assert_eq!([(); 3].map(|()| gateway.get("/shop/own").status), [200, 429, 429]);
    let by_name = check(gateway.address_of("decisions POST"), r#"{"limit":"shut","key":"192.0.2.7"}"#);
    assert!(by_name.text().contains("store_unavailable"), "{}", by_name.text());
    gateway.await_metric(&series("open", "allow", "allowed"), 3);
    gateway.await_metric(&series("shut", "deny", "denied"), 3);
    gateway.await_metric(&series("own", "local", "allowed"), 1);
    gateway.await_metric(&series("own", "local", "denied"), 2);
    let server = redis.url().replace("redis://", "");
    let state = |state: &str| {
        format!(r#"tollgate_store_server_breaker_state{{store="default",server="{server}",state="{state}"}}"#)
    };
    gateway.await_metric(&state("open"), 1);
    gateway.await_metric(&state("closed"), 0);
    redis.restart();
    gateway.await_metric(&state("closed"), 1);
    gateway.await_metric(&state("open"), 0);
}

#[test]
fn leases_are_counted_and_returned() {
    let redis = RedisServer::start();
    let limits =
        "    - { name: all, algorithm: token_bucket, capacity: 40000, refill: 40000/s, consistency: leased }\n";
    let rules = rules(&shop(upstream(HELLO)), limits);
    let gateway = Gateway::with_admin(&format!("store: {}\nstore_timeout: 5s\n{rules}", redis.url()));
    let granted = r#"tollgate_store_lease_renewals_total{result="granted"}"#;
    let leased = wait_until(|| {
        gateway.get("/shop/1");
        gateway.metric(granted).filter(|count| *count > 0.0)
    });
    assert!(leased.is_some(), "{}", gateway.get_admin("/metrics").text());
    assert_eq!(gateway.metric(r#"tollgate_store_lease_renewals_total{result="failed"}"#), Some(0.0));
    // The rest of the slices goes back when they expire.
    let returned = wait_until(|| gateway.metric("tollgate_store_leases_returned_total").filter(|count| *count > 0.0));
    assert!(returned.is_some(), "{}", gateway.get_admin("/metrics").text());
    gateway.await_metric("tollgate_store_leases_held", 0);
    gateway.await_metric("tollgate_store_leased_units", 0);
}

#[test]
fn tables_are_reported_by_limit() {
    let limits =
        format!("{PER_CLIENT}    - {{ name: unused, key: ip, limit: 9, window: 1h, match: {{ path: /nowhere }} }}\n");
    let gateway = Gateway::with_admin(&format!("max_memory: 64MiB\n{}", rules(&shop(upstream(HELLO)), &limits)));
    gateway.get("/shop/1");
    gateway.await_metric(r#"tollgate_table_keys{limit="per-client"}"#, 1);
    gateway.await_metric(r#"tollgate_table_keys{limit="unused"}"#, 0);
    gateway.await_metric("tollgate_memory_max_bytes", 64 << 20);
    gateway.await_metric("tollgate_limits", 2);
    let of = |name: &str| gateway.metric(&format!(r#"{name}{{limit="per-client"}}"#)).unwrap();
    assert!(of("tollgate_table_slots") > 100.0 && of("tollgate_table_bytes") > 1000.0);
    assert!(gateway.metric("tollgate_memory_used_bytes").unwrap() >= of("tollgate_table_bytes"));
}

#[test]
fn the_program_and_its_start_are_reported() {
    let gateway = Gateway::with_admin(&rules(&shop(upstream(HELLO)), PER_CLIENT));
    gateway.await_metric(&format!(r#"tollgate_build_info{{version="{}"}}"#, env!("CARGO_PKG_VERSION")), 1);
    let started = gateway.metric("process_start_time_seconds").unwrap();
    let loaded = gateway.metric("tollgate_rules_in_force_timestamp_seconds").unwrap();
    // The time of the boot is rounded to a second, and so are both.
    assert!((loaded - started).abs() < 60.0, "started at {started}, rules in force since {loaded}");
}

#[test]
fn a_store_that_fails_is_reported() {
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let rules = rules(&shop(upstream(HELLO)), PER_CLIENT);
    let gateway = Gateway::with_admin(&format!("store: redis://{gone}\non_store_failure: deny\n{rules}"));
    assert_eq!(gateway.get("/shop/1").status, 503);
    gateway.await_metric("tollgate_store_available", 0);
    gateway.await_metric(r#"tollgate_decisions_total{limit="per-client",outcome="store_unavailable"}"#, 1);
    assert_eq!(gateway.get_admin("/readyz").status, 200);
}

#[test]
fn a_full_redis_is_not_available_until_it_has_memory_again() {
    let redis = RedisServer::start();
    let rules = rules(&shop(upstream(HELLO)), PER_CLIENT);
    let gateway =
        Gateway::with_admin(&format!("store: {}\nstore_timeout: 5s\non_store_failure: deny\n{rules}", redis.url()));
    assert_eq!(gateway.get("/shop/1").status, 200);
    gateway.await_metric("tollgate_store_available", 1);
    redis.command(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(gateway.get("/shop/1").status, 503);
    gateway.await_metric("tollgate_store_available", 0);
    let server = redis.url().replace("redis://", "");
    let refusing =
        format!(r#"tollgate_store_server_breaker_state{{store="default",server="{server}",state="refusing"}}"#);
    gateway.await_metric(&refusing, 1);
    gateway.await_metric("tollgate_store_failures_total", 1);
    let said = gateway.await_said("refuses: ", 1);
    assert!(said.contains("OOM") && said.contains(": raise its maxmemory, or move other data elsewhere\n"), "{said}");
    redis.command(&["CONFIG", "SET", "maxmemory", "0"]);
    gateway.await_metric("tollgate_store_available", 1);
    gateway.await_metric(&refusing, 0);
    gateway.await_metric("tollgate_store_failures_total", 1);
    gateway.await_said("the store answers again", 1);
    assert_eq!(gateway.get("/shop/1").status, 200);
}

#[test]
fn calls_to_redis_are_counted() {
    let redis = RedisServer::start();
    let rules = rules(&shop(upstream(HELLO)), PER_CLIENT);
    let gateway = Gateway::with_admin(&format!("store: {}\nstore_timeout: 5s\n{rules}", redis.url()));
    assert_eq!([(); 2].map(|()| gateway.get("/shop/1").status), [200, 200]);
    gateway.await_metric("tollgate_store_calls_total", 2);
    gateway.await_metric("tollgate_store_batch_size_count", 2);
    gateway.await_metric(r#"tollgate_store_batch_size_bucket{le="1.0"}"#, 2);
    gateway.await_metric("tollgate_store_call_duration_seconds_count", 2);
    gateway.await_metric(r#"tollgate_store_call_duration_seconds_bucket{le="+Inf"}"#, 2);
    assert!(gateway.metric("tollgate_store_sent_bytes_total").unwrap() > 1000.0, "the scripts were sent");
    assert!(gateway.metric("tollgate_store_received_bytes_total").unwrap() > 100.0);
}

#[test]
fn a_redis_that_evicts_keys_is_a_warning() {
    let redis = RedisServer::start();
    redis.command(&["CONFIG", "SET", "maxmemory-policy", "volatile-lru"]);
    redis.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
    let rules = rules(&shop(upstream(HELLO)), PER_CLIENT);
    let gateway = Gateway::with_admin(&format!("store: {}\n{rules}", redis.url()));
    let server = redis.url().replace("redis://", "");
    gateway.await_metric(
        &format!(r#"tollgate_store_server_evicts{{store="default",server="{server}",policy="volatile-lru"}}"#),
        1,
    );
    gateway.await_metric(
        &format!(r#"tollgate_store_server_max_memory_bytes{{store="default",server="{server}"}}"#),
        104_857_600,
    );
    let said = gateway.await_said("evicts keys when its memory is full (maxmemory-policy volatile-lru", 1);
    assert!(said.contains(": set maxmemory-policy noeviction, or use a separate Redis for limits\n"), "{said}");
}

#[test]
fn problems_with_which_a_store_still_decides_are_warnings() {
    let redis = RedisServer::start();
    let rules = rules(&shop(upstream(HELLO)), PER_CLIENT);
    let gateway = |layout: &str| {
        let store = format!("store: {{ url: '{}', layout: {layout} }}", redis.url());
        Gateway::with_admin(&format!("{store}\nstore_timeout: 5s\non_store_failure: allow\n{rules}"))
    };
    let plain = gateway("plain");
    let warning = |problem: &str| format!(r#"tollgate_store_warning{{store="default",problem="{problem}"}}"#);
    for problem in ["foreign_data", "other_layout", "not_subscribed", "file", "invalid_reply", "redirects"] {
        plain.await_metric(&warning(problem), 0);
    }
    redis.command(&["RPUSH", "rate_limit:{per-client|127.0.0.1}", "other data"]);
    assert_eq!(plain.get("/shop/1").status, 200);
    plain.await_metric(&warning("foreign_data"), 1);
    let said = plain.await_said("a key of limit `per-client` holds data that no limiter wrote", 1);
    assert!(said.contains(": move that data to another key, or set a prefix\n"), "{said}");
    let _compact = gateway("compact");
    plain.await_metric(&warning("other_layout"), 1);
    plain.await_said("other processes use the layout compact (15625 hashes) and this one plain", 1);
}

/// To update the snapshot: `INSTA_UPDATE=always cargo test -p tollgate-server --test operation help_and_type`.
#[test]
fn help_and_type_of_every_metric() {
    let text = EveryMetric::start().pages("text/plain").concat();
    let mut lines: Vec<&str> =
        text.lines().filter(|line| line.starts_with("# HELP") || line.starts_with("# TYPE")).collect();
    // Sorted by the name of the metric, with the help first.
    lines.sort_by_key(|line| line.split(' ').nth(2).map(|name| (name, line.starts_with("# TYPE"))));
    lines.dedup();
    insta::assert_snapshot!(lines.join("\n"));
}

/// Returns the names in the first column of the table of metrics.
fn documented() -> BTreeSet<String> {
    let document = include_str!("../../../docs/operating.md");
    let section = document.split_once("\n## Metrics\n").expect("there is a section").1;
    let section = section.split("\n## ").next().unwrap_or_default();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| `")?.split(" |").next());
    cells.flat_map(|cell| cell.split('`')).filter(|name| name.contains('_')).map(str::to_owned).collect()
}

#[test]
fn every_metric_is_documented_and_exists() {
    // `traces.rs` has a server that exports traces, which needs a feature.
    let traces = ["tollgate_trace_spans_total".to_owned()];
    let exist: BTreeSet<String> = EveryMetric::start().types().into_keys().chain(traces).collect();
    let documented = documented();
    let difference =
        |one: &BTreeSet<String>, other: &BTreeSet<String>| one.difference(other).cloned().collect::<Vec<_>>();
    assert_eq!(difference(&exist, &documented), [""; 0], "these are not in the table of docs/operating.md");
    assert_eq!(
        difference(&documented, &exist),
        [""; 0],
        "the table of docs/operating.md has these, and no server does"
    );
}

//! Upstreams that fail and recover, and requests that are retried.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use testkit::client::{Protocol, each_protocol};
use testkit::gateway::{Gateway, per_user, site};
use testkit::port::{full_listener, unused_address};
use testkit::upstream::{Raw, moody};
use testkit::wait::until;

#[test]
fn an_upstream_that_fails_is_left_alone_for_a_while_and_then_used_again() {
    each_protocol(|protocol| {
        let is_healthy = Arc::new(AtomicBool::new(false));
        let (bad, good) = (moody("moody", &is_healthy), Raw::named("good"));
        let route = format!(
            "{{ path: /**, balance: round_robin, upstream: [{}, {}], eject: {{ after: 2, for: 6s }} }}",
            bad.url(),
            good.url()
        );
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut connection = gateway.client();
        for _ in 0..20 {
            assert_eq!(connection.get("/").header("x-upstream"), Some("good"));
        }
        assert_eq!(bad.requests(), 2, "it is left alone after two failures");
        is_healthy.store(true, Relaxed);
        until("its return", || connection.get("/").header("x-upstream") == Some("moody"));
    });
}

#[test]
fn ejection_is_logged_once_at_its_start_and_once_at_its_end() {
    each_protocol(|protocol| {
        let is_healthy = Arc::new(AtomicBool::new(false));
        let (bad, good) = (moody("moody", &is_healthy), Raw::named("good"));
        let upstreams = format!("[{}, {}]", bad.url(), good.url());
        let eject = "eject: { after: 2, for: 3s }";
        let route = format!("{{ path: /**, balance: round_robin, upstream: {upstreams}, {eject} }}");
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut connection = gateway.client();
        for _ in 0..20 {
            connection.get("/");
        }
        let described = format!("upstream {} of route /**", bad.address);
        let began = format!(
            "{described} failed 2 times in a row: it closed the connection before the end of its response; it gets no requests for 3 s while another upstream is healthy\n"
        );
        gateway.await_said(&began, 1);
        is_healthy.store(true, Relaxed);
        let ended = format!("{described} answers requests again, and gets its share of them\n");
        until("the line about its return", || {
            connection.get("/");
            gateway.said().contains(&ended)
        });
        assert_eq!(gateway.said(), format!("{}tollgate: warning: {began}tollgate: {ended}", no_limits(protocol)));
    });
}

/// Returns the log line about rules without limits. With TLS, the rule file has a line more.
fn no_limits(protocol: Protocol) -> String {
    let line = if protocol.scheme() == "https" { 7 } else { 6 };
    format!("tollgate.yaml:{line}:1: warning: there are no limits, so every request passes: add a limit to `limits`\n")
}

#[test]
fn lasting_ejection_is_logged_once() {
    each_protocol(|protocol| {
        let route = format!("{{ path: /**, upstream: http://{}, eject: {{ after: 1, for: 10s }} }}", unused_address());
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut connection = gateway.client();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(3) {
            assert_eq!(connection.get("/").status, 502);
        }
        let said = gateway.await_said("; it still gets requests, as the only upstream of its route\n", 1);
        assert_eq!(said.lines().count(), 2, "{said}");
    });
}

#[test]
fn upstream_that_stays_dead_is_logged_once() {
    each_protocol(|protocol| {
        let (dead, good) = (unused_address(), Raw::named("good"));
        let upstreams = format!("[http://{dead}, {}]", good.url());
        let eject = "eject: { after: 1, for: 1s }";
        let route = format!("{{ path: /**, balance: round_robin, upstream: {upstreams}, {eject} }}");
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut connection = gateway.client();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(5) {
            assert_eq!(connection.get("/").header("x-upstream"), Some("good"));
            // Long enough for a poll between the end of an ejection and the next.
            std::thread::sleep(Duration::from_millis(1500));
        }
        let began = format!(
            "upstream {dead} of route /** failed: Connection refused (os error 111); it gets no requests for 1 s while another upstream is healthy\n"
        );
        assert_eq!(gateway.said(), format!("{}tollgate: warning: {began}", no_limits(protocol)));
    });
}

#[test]
fn passed_check_of_an_ejected_upstream_is_logged() {
    each_protocol(|protocol| {
        let (is_healthy, checks_pass) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let passes = Arc::clone(&checks_pass);
        let bad = Raw::start(move |conversation| {
            while let Some(asked) = conversation.request() {
                if !asked.head.starts_with("GET /health ") || !passes.load(Relaxed) {
                    return;
                }
                conversation.send("HTTP/1.1 204 No Content\r\n\r\n");
            }
        });
        let good = moody("good", &is_healthy);
        is_healthy.store(true, Relaxed);
        let check = "{ path: /health, every: 100ms, timeout: 1s, unhealthy_after: 1, healthy_after: 1 }";
        let upstreams = format!("[{}, {}]", bad.url(), good.url());
        let eject = "eject: { after: 1, for: 1m }";
        let rules = |more: &str| {
            site(
                "workers: 1",
                &[format!("{{ path: /**, balance: round_robin, upstream: {upstreams}, {eject}{more} }}")],
                "",
            )
        };
        let gateway = protocol.start(&rules(""));
        let mut connection = gateway.client();
        until("a failure", || connection.get("/").status == 200 && bad.requests() > 0);
        gateway.save(&rules(&format!(", health_check: {check}")));
        gateway.await_said("fails its health check of /health", 1);
        checks_pass.store(true, Relaxed);
        let said = gateway.await_said(
            "passes its health checks again, but requests have failed there; it gets no requests while another upstream is healthy",
            1,
        );
        assert!(!said.contains("gets its share"), "{said}");
    });
}

/// A client that can provoke such responses could have an upstream ejected for everyone.
#[test]
fn statuses_count_as_failures_only_where_the_route_says_so() {
    each_protocol(|protocol| {
        let (bad, good) =
            (Raw::answering("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"), Raw::named("good"));
        let route = format!(
            "{{ path: /**, balance: round_robin, upstream: [{}, {}], eject: {{ after: 3, for: 1m }} }}",
            bad.url(),
            good.url()
        );
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut connection = gateway.client();
        let mut get = || connection.get("/").status;
        assert_eq!((0..20).filter(|_| get() == 503).count(), 10);
    });
}

#[test]
fn statuses_that_the_route_names_count_as_failures() {
    each_protocol(|protocol| {
        let bad = Raw::answering("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n");
        let good = Raw::named("good");
        let route = format!(
            "{{ path: /**, balance: round_robin, upstream: [{}, {}], eject: {{ after: 3, for: 1m, statuses: [503] }} }}",
            bad.url(),
            good.url()
        );
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut connection = gateway.client();
        let bad_answers = (0..20).filter(|_| connection.get("/").status == 503).count();
        assert_eq!(bad_answers, 3);
    });
}

/// The upstream answers one route, and fails the other.
#[test]
fn success_for_one_route_does_not_end_the_failures_of_another() {
    each_protocol(|protocol| {
        let (bad, good) = (partly_bad(), Raw::named("good"));
        let upstreams = format!("balance: round_robin, upstream: [{}, {}]", bad.url(), good.url());
        for lax in ["/lax/503", "/lax/200"] {
            let routes = [
                format!("{{ path: /strict/**, {upstreams}, eject: {{ after: 3, for: 1m, statuses: [503] }} }}"),
                format!("{{ path: /lax/**, upstream: {} }}", bad.url()),
            ];
            let gateway = protocol.start(&site("workers: 1", &routes, ""));
            let mut connection = gateway.client();
            let bad_answers = (0..20).filter(|_| {
                assert_eq!(connection.get(lax).status.to_string(), lax[5..]);
                connection.get("/strict/503").status == 503
            });
            assert_eq!(bad_answers.count(), 3, "{lax}");
        }
    });
}

#[test]
fn success_for_one_route_does_not_end_an_ejection_by_another() {
    each_protocol(|protocol| {
        let (bad, good) = (partly_bad(), Raw::named("good"));
        let dead = format!("http://{}", unused_address());
        let eject = "balance: round_robin, eject: { after: 1, for: 1h, statuses: [503] }";
        let routes = [
            format!("{{ name: one, path: /one/**, upstream: [{}, {}], {eject} }}", bad.url(), good.url()),
            // It has no other healthy upstream, so requests go there.
            format!("{{ name: other, path: /other/**, upstream: [{}, {dead}], {eject} }}", bad.url()),
        ];
        let gateway = protocol.start(&site("workers: 1", &routes, ""));
        let mut connection = gateway.client();
        until("an ejection", || connection.get("/one/503").status == 503);
        for _ in 0..4 {
            assert_eq!(connection.get("/other/200").status, 200);
            assert_eq!(connection.get("/one/503").header("x-upstream"), Some("good"));
        }
        let said = gateway.await_said(" failed: it responded with 503; ", 1);
        let line = format!(
            "upstream {} of route one failed: it responded with 503; it gets no requests for 3600 s",
            bad.address
        );
        assert!(said.contains(&line), "{said}");
        assert!(!said.contains("answers requests again"), "{said}");
    });
}

/// Routes for different hosts may have the same name.
#[test]
fn ejections_stay_with_their_routes_when_the_rules_change() {
    each_protocol(|protocol| {
        let (bad, good) = (partly_bad(), Raw::named("good"));
        let eject = "balance: round_robin, eject: { after: 1, for: 1h, statuses: [503] }";
        let rules = |more: &str| {
            let route = |host: &str| {
                format!("{{ path: /**, hosts: [{host}], upstream: [{}, {}], {eject} }}", bad.url(), good.url())
            };
            site(&format!("workers: 1{more}"), &["one", "other"].map(route), "")
        };
        let gateway = protocol.start(&rules(""));
        let mut connection = gateway.client();
        let mut get = |host: &str| connection.ask(format!("GET /503 HTTP/1.1\r\nHost: {host}\r\n\r\n")).status;
        until("an ejection", || get("one") == 503);
        gateway.save(&rules("\n  max_head: 8KiB"));
        gateway.await_said("is in force", 1);
        assert!((0..4).all(|_| get("one") == 200));
        until("an ejection", || get("other") == 503);
    });
}

/// Returns an upstream that responds with the status at the end of the path.
fn partly_bad() -> Raw {
    Raw::start(|conversation| {
        while let Some(asked) = conversation.request() {
            let path = asked.head.split(' ').nth(1).unwrap_or_default();
            let status = path.rsplit('/').next().unwrap_or_default();
            conversation.send(format!("HTTP/1.1 {status} As Requested\r\nContent-Length: 0\r\n\r\n"));
        }
    })
}

/// An upstream that cannot be reached is of no use to any route.
#[test]
fn upstream_without_connections_is_ejected_from_all_routes() {
    each_protocol(|protocol| {
        let (dead, good) = (unused_address(), Raw::named("good"));
        let upstreams = format!("balance: round_robin, upstream: [http://{dead}, {}]", good.url());
        let routes = ["one", "other"].map(|name| {
            format!("{{ name: {name}, path: /{name}/**, {upstreams}, eject: {{ after: 1, for: 1h }}, retries: 0 }}")
        });
        let gateway = protocol.start(&site("workers: 1", &routes, ""));
        let mut connection = gateway.client();
        until("a failure", || connection.get("/one/").status == 502);
        for _ in 0..4 {
            assert_eq!(connection.get("/other/").status, 200);
        }
        gateway.await_said(&format!("upstream {dead} of routes one, other failed: Connection refused"), 1);
    });
}

#[test]
fn answers_that_break_off_count_as_failures() {
    each_protocol(|protocol| {
        let heads = ["Content-Length: 100\r\n\r\nhello", "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"];
        // Without a body, and with one.
        let bodies = ["\r\n", "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"];
        for (head, body) in heads.iter().flat_map(|head| bodies.map(|body| (*head, body))) {
            let bad = Raw::start(move |conversation| {
                _ = conversation.request();
                conversation.send(format!("HTTP/1.1 200 OK\r\n{head}"));
            });
            let good = Raw::named("good");
            let upstreams = format!("[{}, {}]", bad.url(), good.url());
            let route =
                format!("{{ path: /**, balance: round_robin, upstream: {upstreams}, eject: {{ after: 3, for: 1m }} }}");
            let gateway = protocol.start(&site("workers: 1", &[route], ""));
            let broken = (0..20).filter(|_| {
                let mut connection = gateway.client();
                connection.send(format!("POST / HTTP/1.1\r\nHost: h\r\n{body}"));
                connection.try_receive().is_err()
            });
            assert_eq!(broken.count(), 3, "{head:?} {body:?}");
        }
    });
}

#[test]
fn a_check_takes_an_upstream_out_and_puts_it_back() {
    each_protocol(|protocol| {
        let is_healthy = Arc::new(AtomicBool::new(true));
        let (checked, other) = (moody("checked", &is_healthy), Arc::new(AtomicBool::new(true)));
        let other = moody("other", &other);
        let check = "{ path: /health, every: 100ms, timeout: 1s, unhealthy_after: 2, healthy_after: 2 }";
        let route = format!(
            "{{ path: /**, balance: round_robin, upstream: [{}, {}], health_check: {check} }}",
            checked.url(),
            other.url()
        );
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        until("a check", || checked.seen().iter().any(|seen| seen.contains("GET /health HTTP/1.1\r\n")));
        let mut connection = gateway.client();
        is_healthy.store(false, Relaxed);
        gateway.await_said("fails its health check of /health", 1);
        let asked = |upstream: &Raw| upstream.seen().concat().matches("GET /asked ").count();
        for _ in 0..6 {
            assert_eq!(connection.get("/asked").header("x-upstream"), Some("other"));
        }
        assert_eq!(asked(&checked), 0);
        is_healthy.store(true, Relaxed);
        gateway.await_said("passes its health checks again, and gets its share of requests", 1);
        let back = (0..4).filter(|_| connection.get("/asked").header("x-upstream") == Some("checked")).count();
        assert_eq!(back, 2);
    });
}

/// The log line has to name what to look at.
#[test]
fn log_line_about_an_upstream_names_its_routes_the_reason_and_the_consequence() {
    each_protocol(|protocol| {
        let unwell = Raw::answering("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n");
        let (silent, good) = (Raw::start(|conversation| while conversation.request().is_some() {}), Raw::named("good"));
        let check = |timeout: &str| {
            format!("health_check: {{ path: /health, every: 100ms, timeout: {timeout}, unhealthy_after: 1 }}")
        };
        let routes = [
            format!("{{ name: api, path: /api/**, upstream: {}, {} }}", unwell.url(), check("30s")),
            format!("{{ name: web, path: /web/**, upstream: [{}, {}] }}", unwell.url(), good.url()),
            format!(
                "{{ name: slow, path: /slow/**, upstream: [{}, {}], {} }}",
                silent.url(),
                good.url(),
                check("200ms")
            ),
            format!("{{ name: gone, path: /gone/**, upstream: http://{}, eject: {{ after: 1 }} }}", unused_address()),
            format!(
                "{{ name: down, path: /down/**, upstream: {}/down, eject: {{ after: 1, statuses: [503] }} }}",
                unwell.url()
            ),
        ];
        let gateway = protocol.start(&site("", &routes, ""));
        for described in [
            format!(
                "upstream {} of routes api, web, down fails its health check of /health: it responded with 503; it gets no \
                 requests while another upstream is healthy, except for routes api, down where it is the only one\n",
                unwell.address
            ),
            format!(
                "upstream {} of route slow fails its health check of /health: no response within 200 ms; it gets no requests \
                 while another upstream is healthy\n",
                silent.address
            ),
        ] {
            gateway.await_said(&described, 1);
        }
        assert_eq!(gateway.get("/gone/").status, 502);
        gateway.await_said(
            "of route gone failed: Connection refused (os error 111); it still gets requests, as the only upstream of its \
             route\n",
            1,
        );
        assert_eq!(gateway.get("/down/").status, 503);
        gateway.await_said(
            "of route down failed: it responded with 503; it still gets requests, as the only upstream of its route\n",
            1,
        );
    });
}

/// A route without a name is called by its path, which a route for other hosts may share.
#[test]
fn route_with_a_single_upstream_is_named_beside_another_of_its_name() {
    let unwell = Raw::answering("HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n");
    let good = Raw::answering("HTTP/1.1 204 No Content\r\n\r\n");
    let check = "health_check: { path: /health, every: 100ms, unhealthy_after: 1 }";
    let routes = [
        format!("{{ path: /**, hosts: [a], upstream: [{}, {}], {check} }}", unwell.url(), good.url()),
        format!("{{ path: /**, hosts: [b], upstream: {} }}", unwell.url()),
    ];
    let gateway = Gateway::start(&site("", &routes, ""));
    let described = format!(
        "upstream {} of route /** fails its health check of /health: it responded with 503; it gets no requests while another upstream is healthy, except for route /** where it is the only one\n",
        unwell.address
    );
    gateway.await_said(&described, 1);
}

#[test]
fn a_check_asks_for_its_path_whatever_the_path_of_the_upstream_is() {
    each_protocol(|protocol| {
        let upstream = moody("based", &Arc::new(AtomicBool::new(true)));
        let check = "health_check: { path: /health, every: 100ms }";
        let route = format!("{{ path: /**, upstream: {}/base, {check} }}", upstream.url());
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        assert_eq!(gateway.get("/x").status, 200);
        let asked = |line: &str| upstream.seen().iter().any(|seen| seen.contains(line));
        until("a check", || asked("GET /health HTTP/1.1\r\n"));
        assert!(asked("GET /base/x HTTP/1.1\r\n"));
    });
}

#[test]
fn an_upstream_that_is_no_longer_checked_is_used_again() {
    each_protocol(|protocol| {
        let is_healthy = Arc::new(AtomicBool::new(false));
        let (checked, other) = (moody("checked", &is_healthy), Raw::named("other"));
        let rules = |check: &str| {
            let upstreams = format!("[{}, {}]", checked.url(), other.url());
            site("workers: 1", &[format!("{{ path: /**, balance: round_robin, upstream: {upstreams}{check} }}")], "")
        };
        let gateway = protocol.start(&rules(", health_check: { path: /health, every: 100ms, unhealthy_after: 1 }"));
        gateway.await_said("fails its health check of /health", 1);
        is_healthy.store(true, Relaxed);
        gateway.save(&rules(", health_check: { path: /health, every: 1h, unhealthy_after: 1 }"));
        gateway.await_said("is in force", 1);
        gateway.save(&rules(""));
        gateway.await_said("is in force", 2);
        let mut connection = gateway.client();
        until("its return", || connection.get("/").header("x-upstream") == Some("checked"));
    });
}

#[test]
fn a_get_is_tried_again_elsewhere_and_spends_one_unit() {
    each_protocol(|protocol| {
        let hangs_up = Raw::start(|conversation| _ = conversation.request());
        let good = Raw::named("good");
        for dead in [format!("http://{}", unused_address()), hangs_up.url()] {
            let route = format!(
                "{{ path: /**, balance: round_robin, upstream: [{dead}, {}], eject: {{ after: 1000000 }} }}",
                good.url()
            );
            let gateway = protocol.start(&site("workers: 1", &[route], &per_user(10)));
            let mut connection = gateway.client();
            for left in (0..10).rev() {
                let answer = connection.get_as("ann", "/");
                assert_eq!(answer.status, 200);
                assert_eq!(answer.header("x-ratelimit-remaining"), Some(left.to_string().as_str()));
            }
            assert_eq!(connection.get_as("ann", "/").status, 429);
        }
        assert!(hangs_up.requests() >= 4, "{}", hangs_up.requests());
    });
}

#[test]
fn without_retries_the_client_gets_the_failure() {
    each_protocol(|protocol| {
        let good = Raw::named("good");
        let route = format!(
            "{{ path: /**, balance: round_robin, retries: 0, upstream: [http://{}, {}], eject: {{ after: 1000000 }} }}",
            unused_address(),
            good.url()
        );
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        let mut connection = gateway.client();
        let failures = (0..10).filter(|_| connection.get("/").status == 502).count();
        assert_eq!(failures, 5);
    });
}

#[test]
fn a_post_that_has_been_sent_is_never_sent_again() {
    each_protocol(|protocol| {
        let hangs_up = [(); 2].map(|()| Raw::start(|conversation| _ = conversation.request()));
        let [one, other] = hangs_up.each_ref().map(Raw::url);
        let gateway =
            protocol.start(&site("", &[format!("{{ path: /**, retries: 10, upstream: [{one}, {other}] }}")], ""));
        for (request, body) in [
            ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n", "hello"),
            ("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n", ""),
            ("PUT / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n", "hello"),
        ] {
            let before: usize = hangs_up.iter().map(Raw::requests).sum();
            let answer = gateway.client().ask(format!("{request}{body}"));
            assert_eq!(answer.status, 502, "{request}");
            assert_eq!(hangs_up.iter().map(Raw::requests).sum::<usize>(), before + 1, "{request}");
        }
    });
}

#[test]
fn a_post_that_found_no_connection_goes_elsewhere() {
    each_protocol(|protocol| {
        let good = Raw::named("good");
        let route =
            format!("{{ path: /**, balance: round_robin, upstream: [http://{}, {}] }}", unused_address(), good.url());
        let gateway = protocol.start(&site("workers: 1", &[route], ""));
        for _ in 0..4 {
            let answer = gateway.client().ask("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\nhello");
            assert_eq!(answer.header("x-upstream"), Some("good"));
        }
        assert_eq!(good.seen().concat().matches("\r\n\r\nhello").count(), 4);
    });
}

/// A server may close an idle connection without notice.
#[test]
fn a_connection_that_the_upstream_closed_in_the_meantime_fails_no_get() {
    each_protocol(|protocol| {
        let once = Raw::start(|conversation| {
            if conversation.request().is_some() {
                conversation.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
        });
        let gateway = protocol.start_before(&once.url());
        let mut connection = gateway.client();
        for _ in 0..5 {
            assert_eq!(connection.get("/").status, 200);
            std::thread::sleep(Duration::from_millis(300));
        }
    });
}

#[test]
fn an_address_that_does_not_answer_is_given_up_after_connect_timeout() {
    each_protocol(|protocol| {
        let (address, _full) = full_listener().unwrap();
        let route =
            format!("{{ path: /**, connect_timeout: 500ms, timeout: 1h, retries: 0, upstream: 'http://{address}' }}");
        let gateway = protocol.start(&site("", &[route], ""));
        let answer = gateway.get("/");
        assert_eq!(answer.status, 504);
        assert!(answer.text().contains("could not be reached in time"), "{}", answer.text());
    });
}

/// Runs the gateway out of descriptors while a client is connected. The client's requests need a new connection each.
#[cfg(target_os = "linux")]
#[test]
fn gateway_without_descriptors_does_not_blame_the_upstream() {
    each_protocol(|protocol| {
        use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
        let upstream = Raw::named("good");
        let route = format!(
            "{{ name: all, path: /**, upstream: {}, upstream_connections: {{ max_requests: 1 }}, \
         eject: {{ after: 1, for: 1h }}, health_check: {{ path: /health, every: 100ms, unhealthy_after: 1 }} }}",
            upstream.url()
        );
        let rules = site("workers: 1\n  max_connections: 100", &[route], "");
        let gateway = protocol.start(&format!("admin: {{ listen: 127.0.0.1:0 }}\n{rules}"));
        let mut connections = [gateway.client(), gateway.client()];
        let mut get = || connections.iter_mut().map(|connection| connection.get("/")).collect::<Vec<_>>();
        assert!(get().iter().all(|answer| answer.status == 200));
        let pid = Pid::from_raw(i32::try_from(gateway.id()).unwrap());
        let before = getrlimit(Resource::Nofile);
        // The standard streams are open, so no descriptor below this is free.
        prlimit(pid, Resource::Nofile, Rlimit { current: Some(3), maximum: before.maximum }).unwrap();
        for answer in get() {
            assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{}", answer.text());
            assert!(answer.text().contains("gateway_exhausted"), "{}", answer.text());
        }
        let said = gateway.await_said("the gateway has no file descriptors left: raise its limit of open files", 1);
        prlimit(pid, Resource::Nofile, before).unwrap();
        assert!(get().iter().all(|answer| answer.status == 200));
        gateway.await_metric("tollgate_upstream_failures_total{route=\"all\",kind=\"gateway_exhausted\"}", 2);
        gateway.await_metric("tollgate_upstream_failures_total{route=\"all\",kind=\"cannot_connect\"}", 0);
        gateway.await_metric(&format!("tollgate_upstream_up{{upstream=\"{}\"}}", upstream.address), 1);
        assert!(!said.contains("failed") && !said.contains("fails its health check"), "{said}");
    });
}

//! Routes without a healthy upstream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use testkit::client::each_protocol;
use testkit::gateway::site;
use testkit::http1::Connection;
use testkit::port::{Port, unused_address};
use testkit::upstream::{Raw, moody};
use testkit::wait::until;

/// Returns an upstream that answers every request, and its checks as `passes` says.
fn checked(passes: &Arc<AtomicBool>) -> Raw {
    let passes = Arc::clone(passes);
    Raw::start(move |conversation| {
        while let Some(asked) = conversation.request() {
            let is_good = !asked.head.starts_with("GET /health ") || passes.load(Relaxed);
            let status = if is_good { "200 OK" } else { "503 Service Unavailable" };
            conversation.send(format!("HTTP/1.1 {status}\r\nX-Upstream: checked\r\nContent-Length: 0\r\n\r\n"));
        }
    })
}

/// Each is down for its own reason, and either may be the one that still responds.
#[test]
fn outage_of_a_route_is_logged_at_its_start_and_end() {
    each_protocol(|protocol| {
        let (is_healthy, passes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        let (ejected, checked) = (moody("ejected", &is_healthy), checked(&passes));
        let check = "health_check: { path: /health, every: 100ms, unhealthy_after: 1, healthy_after: 1 }";
        let (eject, upstreams) = ("eject: { after: 1, for: 1h }", format!("[{}, {}]", ejected.url(), checked.url()));
        let routes = [
            format!("{{ name: both, path: /both/**, balance: round_robin, upstream: {upstreams}, {eject} }}"),
            // Only one of them has a check.
            format!("{{ name: one, path: /one/**, upstream: {}, {check} }}", checked.url()),
        ];
        let gateway = protocol.start(&site("workers: 1", &routes, ""));
        let mut connection = gateway.client();
        until("a failure", || connection.get("/both/").status == 200 && ejected.requests() > 0);
        let described = format!("upstream {} of route both", ejected.address);
        let of_ejected = format!(
            "{described} failed: it closed the connection before the end of its response; it gets no requests for 3600 s while another upstream is healthy\n"
        );
        gateway.await_said(&of_ejected, 1);
        passes.store(false, Relaxed);
        let of_checked = format!(
            "upstream {} of routes both, one fails its health check of /health: it responded with 503; it gets no requests \
         while another upstream is healthy, except for route one where it is the only one\n",
            checked.address
        );
        gateway.await_said(&of_checked, 1);
        gateway.await_said("tollgate: warning: no upstream of route both is healthy: requests go to all of them\n", 1);
        let before = ejected.requests();
        let answered = (0..4).filter(|_| connection.get("/both/").header("x-upstream") == Some("checked")).count();
        assert_eq!(answered, 4, "what fails at one is tried at the other");
        assert!(ejected.requests() > before, "both are asked");
        is_healthy.store(true, Relaxed);
        until("the line about its return", || {
            connection.get("/both/");
            gateway.said().contains(&format!("{described} answers requests again, and gets its share of them\n"))
        });
        gateway.await_said("tollgate: route both has a healthy upstream again\n", 1);
        passes.store(true, Relaxed);
        let said = gateway.await_said("passes its health checks again, and gets its share of requests\n", 1);
        assert_eq!(said.matches("of route both is healthy").count(), 1, "{said}");
    });
}

/// Upstreams that fail for one cause fail together, so that none is the last.
#[test]
fn upstreams_that_fail_together_are_logged_as_one_outage() {
    each_protocol(|protocol| {
        let ports = [Port::claim(), Port::claim()];
        let addresses = ports.each_ref().map(|port| format!("127.0.0.1:{}", port.number()));
        let [one, other] = addresses.each_ref().map(|address| format!("http://{address}"));
        let eject = "eject: { after: 1, for: 1h }";
        let routes = ["a", "b"].map(|name| {
            let upstreams = format!("balance: round_robin, upstream: [{one}, {other}]");
            format!("{{ name: {name}, path: /{name}/**, {upstreams}, {eject} }}")
        });
        let gateway = protocol.start(&site("workers: 1", &routes, ""));
        let mut connection = gateway.client();
        assert_eq!(connection.get("/a/").status, 502, "what fails at one is tried at the other");
        let began = "tollgate: warning: no upstream of routes a, b is healthy: requests go to all of them\n";
        gateway.await_said(began, 1);
        let _back = addresses.map(|address| Raw::at_named(&address, "back"));
        until("an answer", || connection.get("/a/").status == 200);
        gateway.await_said("answers requests again, and gets its share of them\n", 1);
        let ended = "tollgate: routes a, b have a healthy upstream again\n";
        let said = gateway.await_said(ended, 1);
        let described = said.split_inclusive('\n').filter(|line| line.starts_with("tollgate: "));
        let of_routes: Vec<&str> = described.filter(|line| !line.contains(": upstream ")).collect();
        assert_eq!(of_routes, [began, ended]);
    });
}

/// Otherwise requests would keep failing at the others for as long as they are ejected.
#[test]
fn in_an_outage_the_first_upstream_that_responds_gets_all_requests() {
    each_protocol(|protocol| {
        let is_healthy = Arc::new(AtomicBool::new(false));
        let back = moody("back", &is_healthy);
        for upstreams in
            [format!("[http://{}, {}, http://{}]", unused_address(), back.url(), unused_address()), back.url()]
        {
            is_healthy.store(false, Relaxed);
            let eject = "balance: round_robin, retries: 0, eject: { after: 1, for: 1h }";
            let route = format!("{{ name: all, path: /**, upstream: {upstreams}, {eject} }}");
            let gateway =
                protocol.start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", site("workers: 1", &[route], "")));
            let counts = |number: usize| {
                let counted = format!("tollgate_route_upstreams_up{{route=\"all\"}} {number}\n");
                Connection::to(gateway.address_of("admin")).get("/metrics").text().contains(&counted)
            };
            let mut connection = gateway.client();
            until("the outage", || connection.get("/").status == 502 && counts(0));
            is_healthy.store(true, Relaxed);
            until("an answer", || connection.get("/").status == 200);
            // The client may have the response before the gateway has counted it.
            until("one that answers", || counts(1));
            for _ in 0..10 {
                assert_eq!(connection.get("/").header("x-upstream"), Some("back"));
            }
        }
    });
}

/// Its responses to a route with a single upstream say nothing about its failures at another route.
#[test]
fn an_upstream_that_is_the_only_one_of_a_route_stays_ejected_from_another() {
    each_protocol(|protocol| {
        let fussy = Raw::start(|conversation| {
            while conversation.request().is_some_and(|asked| asked.head.starts_with("GET /only/ ")) {
                conversation.send("HTTP/1.1 204 No Content\r\n\r\n");
            }
        });
        let (good, eject) = (Raw::named("good"), "balance: round_robin, eject: { after: 1, for: 1h }");
        let routes = [
            format!("{{ name: both, path: /both/**, upstream: [{}, {}], {eject} }}", fussy.url(), good.url()),
            format!("{{ name: only, path: /only/**, upstream: {} }}", fussy.url()),
        ];
        let gateway = protocol.start(&site("workers: 1", &routes, ""));
        let mut connection = gateway.client();
        until("a failure", || connection.get("/both/").status == 200 && fussy.requests() > 0);
        assert_eq!(connection.get("/only/").status, 204);
        let before = fussy.requests();
        for _ in 0..4 {
            assert_eq!(connection.get("/both/").header("x-upstream"), Some("good"));
        }
        assert_eq!(fussy.requests(), before);
    });
}

/// Requests go first to an upstream whose ejection is over.
#[test]
fn outage_log_line_names_where_requests_go() {
    each_protocol(|protocol| {
        let passes = Arc::new(AtomicBool::new(true));
        let (ejected, checked) = (moody("ejected", &Arc::default()), checked(&passes));
        let check = "health_check: { path: /health, every: 100ms, unhealthy_after: 1 }";
        let upstreams = format!("balance: round_robin, upstream: [{}, {}]", ejected.url(), checked.url());
        let routes = [
            format!("{{ name: both, path: /both/**, {upstreams}, eject: {{ after: 1, for: 1s }} }}"),
            // Only one of them has a check.
            format!("{{ name: one, path: /one/**, upstream: {}, {check} }}", checked.url()),
        ];
        let gateway =
            protocol.start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", site("workers: 1", &routes, "")));
        let mut connection = gateway.client();
        until("a failure", || connection.get("/both/").status == 200 && ejected.requests() > 0);
        gateway.await_said("it gets no requests for 1 s while another upstream is healthy\n", 1);
        let is_over = format!("tollgate_upstream_up{{upstream=\"{}\"}} 1\n", ejected.address);
        until("the end of the ejection", || {
            Connection::to(gateway.address_of("admin")).get("/metrics").text().contains(&is_over)
        });
        passes.store(false, Relaxed);
        gateway
            .await_said("no upstream of route both is healthy: requests go first to those whose ejection is over\n", 1);
        let before = ejected.requests();
        assert_eq!(
            connection.get("/both/").header("x-upstream"),
            Some("checked"),
            "what fails there is tried elsewhere"
        );
        assert_eq!(ejected.requests(), before + 1);
    });
}

/// No alert should fire for a route without requests, once its upstreams are known to be back.
#[test]
fn ejected_upstream_counts_as_healthy_once_it_has_passed_a_check() {
    each_protocol(|protocol| {
        let upstream = Raw::start(|conversation| {
            while conversation.request().is_some_and(|asked| asked.head.starts_with("GET /health ")) {
                conversation.send("HTTP/1.1 204 No Content\r\n\r\n");
            }
        });
        let (check, eject) = ("health_check: { path: /health, every: 100ms }", "eject: { after: 1, for: 4s }");
        let route = format!("{{ name: all, path: /**, upstream: {}, {eject}, {check} }}", upstream.url());
        let gateway =
            protocol.start(&format!("admin: {{ listen: '127.0.0.1:0' }}\n{}", site("workers: 1", &[route], "")));
        let counts = |number: usize| {
            let counted = format!("tollgate_route_upstreams_up{{route=\"all\"}} {number}\n");
            Connection::to(gateway.address_of("admin")).get("/metrics").text().contains(&counted)
        };
        assert!(counts(1));
        assert_eq!(gateway.get("/").status, 502);
        assert!(counts(0));
        until("a check after the ejection", || counts(1));
    });
}

//! Upstreams that are the gateway itself.

use testkit::client::each_protocol;
use testkit::folder::folder_with;
use testkit::gateway::{Gateway, site};
use testkit::http1::Connection;
use testkit::tollgate::{Process, RULES, fails, run_in};
use testkit::upstream::Raw;

/// A request would be forwarded in a loop until its head is too long.
#[test]
fn an_upstream_that_is_the_gateway_itself_is_refused() {
    let limit = "limits: [{ name: user, key: ip }]";
    let rules = |listen: &str, upstream: &str| {
        format!("gateway:\n  listen: {listen}\n  routes:\n    - path: /**\n      upstream: {upstream}\n{limit}\n")
    };
    let validate = |rules: &str| {
        let folder = folder_with(&[(RULES, rules)]);
        String::from_utf8(run_in(folder.path(), &["validate", RULES]).stdout).unwrap()
    };
    let fix = "requests would be forwarded in a loop: name the service behind the gateway, or change gateway.listen\n";
    let expected = |place: &str, upstream: &str, listen: &str| {
        format!("{RULES}:{place}: the upstream {upstream} is the gateway itself, which listens on {listen}: {fix}")
    };
    let problem = expected("5:17", "127.0.0.1:8080", "0.0.0.0:8080");
    let circle = rules("0.0.0.0:8080", "http://127.0.0.1:8080");
    assert_eq!(validate(&circle), format!("{problem}{RULES}: not valid: 1 error\n"));
    assert_eq!(fails(&[(RULES, &circle)]).0, problem);
    let several = rules("127.0.0.1:80", "[http://127.0.0.1:8081, { url: http://localhost, weight: 2 }]");
    let problem = expected("5:48", "localhost:80", "127.0.0.1:80");
    assert_eq!(validate(&several), format!("{problem}{RULES}: not valid: 1 error\n"));
    for (listen, upstream) in [("127.0.0.1:8080", "http://127.0.0.1:8081"), ("127.0.0.1:0", "http://127.0.0.1:8081")] {
        assert_eq!(validate(&rules(listen, upstream)), format!("{RULES}: valid, 1 limit\n"));
    }
}

#[test]
fn upstream_at_the_configured_address_is_allowed_if_the_command_line_overrides_it() {
    let upstream = Raw::named("behind");
    let rules = format!(
        "gateway:\n  listen: {}\n  routes: [{{ path: /**, upstream: {} }}]\nlimits: []\n",
        upstream.address,
        upstream.url()
    );
    let arguments = ["serve", "--config", RULES, "--listen", "127.0.0.1:0"];
    let process = Process::start(folder_with(&[(RULES, &rules)]), &arguments);
    let answer = Connection::to(process.address_of("gateway")).get("/");
    assert_eq!(answer.header("x-upstream"), Some("behind"));
    // The command line overrides the next file, too.
    std::fs::write(process.path(RULES), format!("{rules}# saved again\n")).unwrap();
    process.await_said("is in force", 1);
}

/// The gateway cannot see that the upstream leads back to it: another one is in between.
#[test]
fn request_that_comes_back_is_refused_and_a_chain_of_gateways_is_not() {
    each_protocol(|protocol| {
        let upstream = Raw::named("behind");
        let inner = Gateway::before(&upstream.url());
        let outer = protocol.start_before(&format!("http://{}", inner.address));
        let answer = outer.get("/");
        assert_eq!(answer.header("x-upstream"), Some("behind"));
        let names = |head: &str| -> Vec<String> {
            let entries = head.lines().filter_map(|line| line.strip_prefix("via: "));
            entries.map(|entry| entry.split_once(' ').unwrap().1.to_owned()).collect()
        };
        let chain = names(answer.text());
        assert_eq!(chain.len(), 2, "{}", answer.text());
        assert_ne!(chain[0], chain[1]);

        // The names are not for clients.
        let trace = outer.client().ask("TRACE / HTTP/1.1\r\nHost: h\r\nMax-Forwards: 1\r\n\r\n");
        let via = if protocol.is_http2() { "2" } else { "1.1" };
        let expected = format!("Via: {via} tollgate\r\nMax-Forwards: 0\r\n\r\n");
        assert!(trace.text().ends_with(&expected), "{}", trace.text());

        if protocol.scheme() == "https" {
            // The way back has no TLS.
            return;
        }
        let requests = upstream.requests();
        inner.save(&site("", &[format!("{{ path: /**, upstream: 'http://{}' }}", outer.address)], ""));
        inner.await_said("is in force", 1);
        let answer = outer.get("/");
        assert_eq!(answer.status, 508);
        let body: serde_json::Value = serde_json::from_str(answer.text()).unwrap();
        assert_eq!((&body["error"], &body["reason"]), (&"loop_detected".into(), &"loop".into()));
        let said = "request of 127.0.0.1 for host ";
        outer.await_said(said, 1);
        // The inner one meets its own name, too.
        assert_eq!(inner.get("/").status, 508);
        assert_eq!(outer.said().matches(said).count(), 1, "at most one line in ten seconds: {}", outer.said());
        assert_eq!(upstream.requests(), requests);
    });
}

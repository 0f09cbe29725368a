//! Keys, lists, conditions and costs all use the normal form of a request.

use tollgate_http::Refusal;

use super::compiled::{ask, gate};

/// Returns `ok`, or the error code of the refusal.
fn answer(gate: &tollgate_rules::Gate, line: &str, headers: &[(&str, &str)]) -> String {
    let outcome = ask(gate, line, headers, "192.0.2.1");
    outcome.refusal().map_or("ok".to_owned(), |refusal: &Refusal| refusal.code().to_owned())
}

#[test]
fn listed_keys_are_read_as_requests_are() {
    let gate = gate(
        r#"
limits:
  - { name: cookie, key: "cookie:sid", missing: skip, blocked: { keys: ["s%3Aabc"] } }
  - { name: path, key: path, blocked: { keys: [/admin/, "/caf%c3%a9"] } }
  - { name: method, key: method, blocked: { keys: [purge] } }
  - { name: host, key: host, blocked: { keys: [API.example.com] } }
"#,
    );
    assert_eq!(answer(&gate, "GET /", &[("cookie", "sid=s%3Aabc")]), "blocked");
    assert_eq!(answer(&gate, "GET /", &[("cookie", "sid=s:abc")]), "blocked");
    assert_eq!(answer(&gate, "GET /admin", &[]), "blocked");
    assert_eq!(answer(&gate, "GET /caf%C3%A9/", &[]), "blocked");
    assert_eq!(answer(&gate, "PURGE /", &[]), "blocked");
    assert_eq!(answer(&gate, "GET /", &[("host", "api.EXAMPLE.com:80")]), "blocked");
    assert_eq!(answer(&gate, "GET /", &[("host", "www.example.com"), ("cookie", "sid=x")]), "ok");
}

#[test]
fn an_address_in_a_list_is_the_group_that_counts_as_one_client() {
    let gate = gate(
        r#"
limits:
  - { name: home, key: ip, blocked: { keys: ["2001:db8::7", "::ffff:192.0.2.9"] } }
  - { name: wide, key: ip/48, blocked: { keys: ["2001:db8:1::/48"] } }
  - { name: whole, key: ip/128, blocked: { keys: ["2001:db8:2::7"] } }
  - { name: host, key: host, blocked: { keys: ["[0::1]"] } }
  - { name: matched, match: { hosts: ["[0:0::2]"] }, blocked: { when: "true" } }
"#,
    );
    for (address, expected) in [
        ("2001:db8::9", "blocked"),
        ("2001:db8:0:1::9", "ok"),
        ("192.0.2.9", "blocked"),
        ("2001:db8:1:ffff::1", "blocked"),
        ("2001:db8:2::7", "blocked"),
        ("2001:db8:2::8", "ok"),
    ] {
        let outcome = ask(&gate, "GET /", &[], address);
        assert_eq!(outcome.refusal().map_or("ok", Refusal::code), expected, "{address}");
    }
    for (host, expected) in [("[::1]", "blocked"), ("[0:0::0:1]:80", "blocked"), ("[::2]", "blocked"), ("[::3]", "ok")]
    {
        assert_eq!(answer(&gate, "GET /", &[("host", host)]), expected, "{host}");
    }
}

#[test]
fn lines_of_cookies_are_read_as_one() {
    let gate = gate(
        r#"
limits:
  - { name: when, blocked: { when: '"cookie" in request.headers && request.headers["cookie"].contains("beta=1")' } }
  - { name: match, match: { headers: { cookie: "*gamma=1; delta=1*" } }, blocked: { when: "true" } }
  - { name: key, key: header:cookie, missing: skip, blocked: { keys: ["a=1; b=2"] } }
"#,
    );
    let cookies = |lines: &[&str]| {
        let lines: Vec<(&str, &str)> = lines.iter().map(|line| ("cookie", *line)).collect();
        answer(&gate, "GET /", &lines)
    };
    for lines in
        [&["x=1; beta=1"][..], &["x=1", "beta=1"], &["gamma=1", "delta=1"], &["a=1", " b=2 "], &["a=1", "", "b=2"]]
    {
        assert_eq!(cookies(lines), "blocked", "{lines:?}");
    }
    assert_eq!(cookies(&["x=1", "bet=1", "gamma=1"]), "ok");
}

#[test]
fn every_reading_has_to_be_exempt_and_any_is_blocked() {
    let gate = gate(
        r#"
limits:
  - name: exempt
    key: path
    limit: 1
    exempt: { keys: [/public], when: 'request.path == "/open"' }
  - { name: blocked, key: [path, method], blocked: { keys: [[/secret, GET]] } }
"#,
    );
    for _ in 0..3 {
        assert_eq!(answer(&gate, "GET /public", &[]), "ok");
        assert_eq!(answer(&gate, "GET /open", &[]), "ok");
    }
    assert_eq!(answer(&gate, "GET /public;x", &[]), "ok");
    assert_eq!(answer(&gate, "GET /public;y", &[]), "rate_limit_exceeded", "it may be another path");
    assert_eq!(answer(&gate, "GET /open;x", &[]), "ok");
    assert_eq!(answer(&gate, "GET /open;x", &[]), "rate_limit_exceeded");
    assert_eq!(answer(&gate, "GET /secret;x", &[]), "blocked");
}

#[test]
fn a_cost_is_the_most_of_any_reading() {
    let gate = gate(
        r#"
limits:
  - { name: cost, limit: 60, cost: 'request.path.matches("^/[^/]+$") ? 50 : 1' }
"#,
    );
    let outcome = ask(&gate, "GET /a%2Fb", &[], "192.0.2.1");
    assert_eq!(outcome.decision().map(tollgate::Decision::remaining), Some(10));
}

#[test]
fn a_path_with_dot_segments_is_refused_where_it_is_not_forwarded_clean() {
    let gate = gate("limits: [{ name: graphql, match: { path: /graphql/** }, limit: 1 }]");
    for line in ["GET /graphql/../x", "GET /graphql/./x", "GET /graphql/%2e%2e/x"] {
        assert_eq!(answer(&gate, line, &[]), "bad_request", "{line}");
    }
}

#[test]
fn limits_that_only_watch_refuse_nothing() {
    let gate = gate(
        r#"
limits:
  - { name: shadow, match: { path: /a/** }, key: "header:x-key", shadow: true }
  - { name: disabled, match: { path: /a/** }, enabled: false }
"#,
    );
    assert_eq!(answer(&gate, "GET /a/%0a", &[]), "ok");
    assert_eq!(answer(&gate, "GET /a/", &[("x-key", "1"), ("x-key", "2")]), "ok");
}

#[test]
fn conditions_read_the_normal_form() {
    let gate = gate(
        r#"
limits:
  - { name: headers, match: { headers: { x-tier: free } }, blocked: { when: "true" } }
  - { name: host, match: { when: 'request.host == "node.test"' }, limit: 100 }
  - { name: there, match: { when: '"tag" in request.query && "cookie" in request.headers' }, limit: 100 }
"#,
    );
    assert_eq!(answer(&gate, "GET /", &[("x-tier", "free \t")]), "blocked");
    assert_eq!(answer(&gate, "GET /", &[("host", "node.test:x")]), "bad_request");
    // `in` does not depend on the value, and HTTP/2 splits cookies.
    assert_eq!(answer(&gate, "GET /?tag=a&tag=b", &[("cookie", "a=1"), ("cookie", "b=2")]), "ok");
}

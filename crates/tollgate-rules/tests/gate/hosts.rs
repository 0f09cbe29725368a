//! Requests that name two hosts, and patterns for the `Host` header.

use tollgate::{FixedWindow, Limit, MINUTE};
use tollgate_http::Refusal;
use tollgate_rules::{Facts, KeyPart, Match, Mode, Outcome, Routes, Rule, RuleSet};

use super::{check, gate, headers};

fn once() -> Rule {
    Rule::new(Limit::new("once", FixedWindow::new(1, MINUTE)).unwrap())
}

fn reason(outcome: &Outcome) -> Option<&str> {
    match outcome.refusal()? {
        Refusal::Unreadable(request) => Some(request.reason),
        other => Some(other.code()),
    }
}

/// A limit escapes if it reads one of the hosts and the service reads the other.
#[test]
fn a_host_that_differs_from_the_host_header_is_refused_by_rules_that_read_either() {
    let rules = [
        once().matching(Match::everything().host("api.example")),
        once().matching(Match::everything().host("other.example")),
        once().matching(Match::everything().host("unrelated.example").path("/**")),
        once().matching(Match::everything().header("host", "api.*")),
        once().key(KeyPart::host()),
        once().key(KeyPart::header("host")),
        once().key(KeyPart::custom(|request| request.host().map(Into::into))),
    ];
    let header = headers(&[("host", "api.example")]);
    for rule in rules {
        let (gate, _) = gate([rule.clone()]);
        let outcome = gate.decide_now(&Facts::new("GET", "/").host("other.example").headers(&header)).unwrap();
        assert_eq!(reason(&outcome), Some("several_hosts"), "{rule:?}");
        assert_eq!(outcome.response(&header).unwrap().status(), 400);
    }
    for rule in [once(), once().key(KeyPart::host()).mode(Mode::Shadow)] {
        let (gate, _) = gate([rule.clone()]);
        let outcome = gate.decide_now(&Facts::new("GET", "/").host("other.example").headers(&header)).unwrap();
        assert!(outcome.is_allowed(), "{rule:?}");
    }
}

#[test]
fn spellings_of_one_host_do_not_differ() {
    for (host, header) in [
        ("api.example", "api.example"),
        ("api.example", "API.Example"),
        ("api.example", "api.example."),
        ("api.example", "api.example:"),
        ("api.example", "api.example:8080"),
        ("api.example:8080", "api.example"),
        ("api.example:8080", "api.example:08080"),
        ("[::1]", "[::1]:80"),
    ] {
        let (gate, _) = gate([once().key(KeyPart::host())]);
        let header = headers(&[("host", header)]);
        let outcome = gate.decide_now(&Facts::new("GET", "/").host(host).headers(&header)).unwrap();
        assert!(outcome.is_allowed(), "{host} {header:?}");
    }
    for (host, header) in [
        ("api.example", "api.example.test"),
        ("api.example:80", "api.example:81"),
        ("api.example", "api.example:x"),
        ("api.example", ""),
        ("[::1]", "[::2]"),
        ("[::1]", "::1"),
    ] {
        let (gate, _) = gate([once().key(KeyPart::host())]);
        let header = headers(&[("host", header)]);
        let outcome = gate.decide_now(&Facts::new("GET", "/").host(host).headers(&header)).unwrap();
        assert_eq!(reason(&outcome), Some("several_hosts"), "{host} {header:?}");
    }
}

/// Requests are compared without a port, so such a limit would match no request, or requests on every port.
#[test]
fn a_pattern_for_the_host_header_that_no_host_matches_is_refused() {
    for (pattern, fix) in [
        ("*:8443", "write *"),
        ("api.example:8443", "write api.example"),
        ("api.example:", "write api.example"),
        ("api.*:*", "write api.*"),
        ("[::1]:8443", "write [::1]"),
        ("[2001:db8:*]:*", "write [2001:db8:*]"),
        ("[2001:db8:*:8443", "put the address in brackets"),
        ("2001:db8:*", "put the address in brackets"),
        ("::1", "write [::1]"),
        ("https://api.example:8443/x", "write the host alone"),
        ("https://*.example", "write the host alone"),
        ("api.example/*", "write a name"),
        ("api example", "write a name"),
        ("", "write a name"),
    ] {
        let matching = Match::everything().header("Host", pattern);
        let error = RuleSet::builder().rule(once().matching(matching.clone())).build().unwrap_err();
        assert_eq!((error.limit(), error.field()), (Some("once"), "headers"), "{pattern}");
        assert!(error.to_string().contains(fix), "{error}");
        assert!(Routes::new([matching]).is_err(), "{pattern}");
    }
    let other = Match::everything().header("x-forwarded-host", "*:8443");
    assert!(RuleSet::builder().rule(once().matching(other)).build().is_ok(), "other headers may have ports");
}

#[test]
fn a_pattern_for_the_host_header_matches_every_spelling_of_a_host() {
    for (pattern, host) in [
        ("*", "api.example:8443"),
        ("*.example", "API.Example.:8443"),
        ("*.Example.", "api.example"),
        ("api.example.", "api.example:80"),
        ("[2001:DB8:*]", "[2001:db8::0007]:8443"),
        ("[2001:db8:*", "[2001:db8::7]"),
        ("*:7]", "[2001:db8::7]"),
        ("[2001:db8::0007]", "[2001:db8::7]:8443"),
    ] {
        let (gate, _) = gate([once().matching(Match::everything().header("host", pattern))]);
        assert!(check(&gate, "GET", "/", &[("host", host)]).limit().is_some(), "{pattern} {host}");
    }
}

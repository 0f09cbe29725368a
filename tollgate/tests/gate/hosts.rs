//! Requests that name two hosts.

use tollgate::http::Refusal;
use tollgate::rules::{Facts, KeyPart, Match, Mode, Rule};
use tollgate::{FixedWindow, Limit, MINUTE, Outcome};

use super::{gate, headers};

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

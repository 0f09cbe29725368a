//! Key parts.

use std::net::IpAddr;

use tollgate::{FixedWindow, Limit, MINUTE};
use tollgate_http::Refusal;
use tollgate_rules::{Facts, Gate, KeyPart, Missing, Rule, RuleSet, TrustedProxies};

use super::{check, gate, gate_of, headers};

fn once() -> Rule {
    Rule::new(Limit::new("once", FixedWindow::new(1, MINUTE)).unwrap())
}

/// Returns the key that a rule derives from a request, according to its explanation.
fn key_of(part: KeyPart, facts: &Facts<'_>) -> Vec<String> {
    let (gate, _) = gate([once().key(part)]);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let mut explained = runtime.block_on(gate.explain(facts));
    match explained.rules.remove(0).state {
        tollgate_rules::RuleState::Counted { key, .. } => key,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_key_part_is_read() {
    let headers =
        headers(&[("x-user-id", "ann"), ("cookie", "a=1; session=\"s7\"; b=2"), ("host", "API.Example.com:8080")]);
    let descriptors = [("plan", "gold")];
    let facts = Facts::new("GET", "/a//b/%7euser/?q=x%20y&z=1")
        .headers(&headers)
        .peer("192.0.2.7".parse().unwrap())
        .route("users")
        .descriptors(&descriptors);
    let header = KeyPart::header("x-user-id");
    for (part, text) in [
        (KeyPart::ip(), "192.0.2.7"),
        (header, "ann"),
        (KeyPart::cookie("session"), "s7"),
        (KeyPart::query("q"), "x y"),
        (KeyPart::path(), "/a/b/~user"),
        (KeyPart::method(), "GET"),
        (KeyPart::host(), "api.example.com"),
        (KeyPart::route(), "users"),
        (KeyPart::descriptor("plan"), "gold"),
        (KeyPart::constant("all"), "all"),
        (KeyPart::custom(|request| Some(request.facts().method().to_lowercase())), "get"),
        (KeyPart::cookie("none"), "anonymous"),
    ] {
        assert_eq!(key_of(part.clone(), &facts), [text], "{part}");
    }
}

#[test]
fn an_ipv6_client_is_a_network() {
    let key = |part: KeyPart, address: &str| {
        key_of(part, &Facts::new("GET", "/").peer(address.parse::<IpAddr>().unwrap())).remove(0)
    };
    assert_eq!(key(KeyPart::ip(), "2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
    assert_eq!(key(KeyPart::ip_network(56).unwrap(), "2001:db8:1:2ff:3:4:5:6"), "2001:db8:1:200::/56");
    assert_eq!(key(KeyPart::ip(), "::ffff:192.0.2.1"), "192.0.2.1");
}

#[test]
fn a_forwarded_address_is_ignored_except_from_trusted_proxies() {
    let forged = headers(&[("x-forwarded-for", "203.0.113.9")]);
    let is_allowed = |gate: &Gate| {
        let facts = Facts::new("GET", "/").peer("10.0.0.1".parse().unwrap()).headers(&forged);
        gate.decide_now(&facts).unwrap().is_allowed()
    };
    let rules = || RuleSet::builder().rule(once().key(KeyPart::ip()));
    let direct = Facts::new("GET", "/").peer("203.0.113.9".parse().unwrap());
    let stranger = gate_of(rules().build().unwrap()).0;
    assert!(is_allowed(&stranger) && stranger.decide_now(&direct).unwrap().is_allowed());
    let proxies = TrustedProxies::parse(["10.0.0.0/8"]).unwrap();
    let trusting = gate_of(rules().trusted_proxies(proxies).build().unwrap()).0;
    assert!(is_allowed(&trusting) && !trusting.decide_now(&direct).unwrap().is_allowed());
}

#[test]
fn requests_without_the_key_are_skipped_or_refused() {
    let part = || KeyPart::header("x-api-key");
    let (skipping, _) = gate([once().key(part()).missing(Missing::Skip)]);
    for _ in 0..3 {
        assert!(check(&skipping, "GET", "/", &[]).is_allowed());
    }
    let (denying, _) = gate([once().key(part()).missing(Missing::Deny)]);
    let refused = check(&denying, "GET", "/", &[]);
    assert_eq!(refused.refusal(), Some(&Refusal::KeyMissing { part: "header:x-api-key".into() }));
    assert_eq!(refused.response(&headers(&[])).unwrap().status(), 403);
    assert!(check(&denying, "GET", "/", &[("x-api-key", "k")]).is_allowed());
}

#[test]
fn a_rule_with_a_missing_descriptor_does_not_apply() {
    let (gate, _) = gate([once().key(KeyPart::descriptor("user"))]);
    for _ in 0..3 {
        assert!(gate.decide_now(&Facts::new("GET", "/")).unwrap().is_allowed());
    }
    let descriptors = [("user", "ann")];
    let facts = Facts::new("GET", "/").descriptors(&descriptors);
    assert!(gate.decide_now(&facts).unwrap().is_allowed());
    assert!(!gate.decide_now(&facts).unwrap().is_allowed());
}

#[test]
fn certificates_are_counted_by_fingerprint_or_name() {
    use tollgate_rules::{Certificate, CertificateField};

    let certificate = |fingerprint: &str, cn: Option<&str>| {
        let mut certificate = Certificate::new(fingerprint);
        certificate.cn = cn.map(str::to_owned);
        certificate
    };
    // Two certificates with one name and one without: the number of requests allowed if each key is allowed once.
    for (field, passes) in [(CertificateField::Fingerprint, 3), (CertificateField::Cn, 2), (CertificateField::San, 1)] {
        let (gate, _) = gate([once().key(KeyPart::certificate(field))]);
        let all = [certificate("aa", Some("billing")), certificate("bb", Some("billing")), certificate("cc", None)];
        let passed =
            all.iter().filter(|one| gate.decide_now(&Facts::new("GET", "/").certificate(one)).unwrap().is_allowed());
        assert_eq!(passed.count(), passes, "{field:?}");
    }
    // Other middleware may insert it into the extensions.
    let (gate, _) = gate([once().key(KeyPart::certificate(CertificateField::Cn)).missing(Missing::Skip)]);
    let mut extensions = http::Extensions::new();
    let is_allowed = |extensions: &http::Extensions| {
        gate.decide_now(&Facts::new("GET", "/").extensions(extensions)).unwrap().limit().is_some()
    };
    assert!(!is_allowed(&extensions));
    extensions.insert(certificate("aa", Some("billing")));
    assert!(is_allowed(&extensions));
}

#[test]
fn spellings_of_one_path_are_one_key() {
    let (gate, _) = gate([once().key(KeyPart::path())]);
    assert!(check(&gate, "GET", "/api/x", &[]).is_allowed());
    for evasion in ["/api//x", "/api/./x", "/api/y/../x", "/api/%78", "/api/x/", "/api/x?a=b", "/%61pi/x"] {
        assert!(!check(&gate, "GET", evasion, &[]).is_allowed(), "{evasion}");
    }
}

#[test]
fn keys_can_be_bytes_that_are_not_utf8() {
    let (gate, _) = gate([once().key(KeyPart::header("x-user-id"))]);
    let is_allowed = |bytes: &[u8]| {
        let mut headers = http::HeaderMap::new();
        headers.insert("x-user-id", http::HeaderValue::from_bytes(bytes).unwrap());
        gate.decide_now(&Facts::new("GET", "/").headers(&headers)).unwrap().is_allowed()
    };
    assert!(is_allowed(b"\xff") && is_allowed(b"\xfe") && !is_allowed(b"\xff"));
}

#[test]
fn spellings_of_one_host_are_one_key() {
    let (gate, _) = gate([once().key(KeyPart::host())]);
    assert!(check(&gate, "GET", "/", &[("host", "api.example.com")]).is_allowed());
    for same in ["API.example.com", "api.example.com.", "api.example.com:80", "api.example.com.:80"] {
        assert!(!check(&gate, "GET", "/", &[("host", same)]).is_allowed(), "{same}");
    }
}

#[test]
fn invalid_texts_are_reported_when_rules_are_built() {
    use tollgate_rules::{Cost, Match, Routes};

    let api = || Match::everything();
    for (rule, problem) in [
        (once().matching(api().path("api/**")), "`api/**` matches no request, because every path starts with `/`"),
        (once().matching(api().host("https://example.com")), "`https://example.com` is a URL"),
        (once().matching(api().header("x tier", "gold")), "`x tier` is not the name of a header"),
        (once().key(KeyPart::header("")), "`` is not the name of a header"),
        (once().plan(KeyPart::header("x\nplan")), "`x\\nplan` is not the name of a header"),
        (once().cost(Cost::header("x:cost")), "`x:cost` is not the name of a header"),
        (once().settle_by("x cost"), "`x cost` is not the name of a header"),
    ] {
        let error = tollgate_rules::RuleSet::builder().rule(rule).build().unwrap_err();
        assert_eq!(error.problem(), problem);
        assert!(error.to_string().starts_with("limit `once`: "), "{error}");
    }
    assert!(Routes::new([api().path("/api/**"), api().path("api")]).is_err());
    let error = tollgate_rules::RuleSet::builder().body("Wait {{retry}} s").build().unwrap_err();
    assert_eq!(error.field(), "template");
}

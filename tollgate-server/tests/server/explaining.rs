//! `tollgate explain` with a store in memory. `fleet` tests live counts.

use testkit::folder::folder_with;
use testkit::tollgate::{run_in, transcript};

const RULES: &str = "\
limits:
  - name: global
    limit: 10000
    window: 1m
  - name: per-user
    key: header:x-user-id
    algorithm: token_bucket
    capacity: 100
    refill: 10/s
    plan: header:x-plan
    overrides: [{ plan: gold, capacity: 1000 }]
    blocked: { keys: [mallory] }
  - name: expensive
    match: { path: /api/expensive/**, methods: [POST] }
    key: [header:x-user-id, path]
    algorithm: fixed_window
    limit: 10
    window: 1m
    cost: header:x-cost
  - name: partners
    match: { when: 'request.host == \"partners.example.com\"' }
    key: descriptor:tenant
  - name: tokens
    key: cookie:session
    missing: skip
  - name: office
    key: ip
    exempt: { ips: [10.0.0.0/8] }
  - name: trial
    key: ip
    limit: 1
    shadow: true
    cost: 'request.method == \"POST\" ? 2 : 1'
";

fn explain(arguments: &[&str]) -> String {
    let folder = folder_with(&[("rules.yaml", RULES)]);
    transcript(&run_in(folder.path(), &[&["explain", "--config", "rules.yaml"], arguments].concat()))
}

const EXPENSIVE: [&str; 8] =
    ["POST", "/api/expensive/7?q=1", "-H", "X-User-Id: ann", "-H", "x-plan: gold", "--ip", "10.1.2.3"];

#[test]
fn a_request_that_passes() {
    insta::assert_snapshot!(explain(&EXPENSIVE));
}

#[test]
fn explanation_names_limits_that_count_after_the_response() {
    let rules = "limits: [{ name: logins, key: ip, limit: 5, count: { statuses: [401], when: after } }]\n";
    let folder = folder_with(&[("rules.yaml", rules)]);
    let text =
        transcript(&run_in(folder.path(), &["explain", "--config", "rules.yaml", "GET", "/", "--ip", "192.0.2.7"]));
    assert!(text.contains("key 192.0.2.7, cost 1 after the response: 4 of 5 left"), "{text}");
}

#[test]
fn a_request_that_is_blocked() {
    insta::assert_snapshot!(explain(&["GET", "/", "-H", "X-User-Id: mallory"]));
}

#[test]
fn a_request_that_costs_more_than_there_ever_is() {
    insta::assert_snapshot!(explain(&[&EXPENSIVE[..], &["-H", "x-cost: 11"]].concat()));
}

#[test]
fn descriptors_hosts_and_cookies() {
    let arguments =
        ["GET", "/", "-H", "host: partners.example.com", "-H", "Cookie: session=s1", "--descriptor", "tenant=t1"];
    insta::assert_snapshot!(explain(&arguments));
}

#[test]
fn an_explanation_for_programs() {
    let output = explain(&[&EXPENSIVE[..], &["-H", "x-cost: 11", "--json"]].concat());
    let json = output.rsplit_once('\n').expect("the exit code is a line").0;
    let parsed: serde_json::Value = serde_json::from_str(json).expect("JSON");
    assert!(parsed["limits"][0]["counted"]["reset_after"].is_f64(), "{parsed}");
    let is_time = |line: &&str| line.trim_start().starts_with("\"reset_after\": ");
    let lines = output.lines().map(|line| if is_time(&line) { "        \"reset_after\": [seconds]," } else { line });
    insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"));
}

const ROUTED: &str = "\
gateway:
  routes:
    - { name: shop, path: /shop/**, upstream: [http://192.0.2.5:8081, http://192.0.2.6:8081] }
    - { name: beta, path: /shop/**, headers: { x-beta: '1' }, upstream: 'https://beta.internal' }
    - { path: /status, hosts: [a.example], respond: { status: 204 } }
limits:
  - { name: per-route, key: route, limit: 5 }
";

#[test]
fn the_route_that_a_request_would_take_is_reported() {
    let folder = folder_with(&[("rules.yaml", ROUTED)]);
    let explain = |arguments: &[&str]| {
        transcript(&run_in(folder.path(), &[&["explain", "--config", "rules.yaml"], arguments].concat()))
    };
    for (arguments, route, key) in [
        (
            &["GET", "/shop/1"][..],
            "Route: shop, to http://192.0.2.5:8081/shop/1, http://192.0.2.6:8081/shop/1.",
            "shop",
        ),
        (&["GET", "/shop//%31", "-H", "x-beta: 1"], "Route: beta, to https://beta.internal/shop/1.", "beta"),
        (&["GET", "/status", "-H", "host: A.example:80"], "Route: /status, answers with 204.", "/status"),
        (&["GET", "/status"], "Route: none, so an allowed request gets 404.", "anonymous"),
    ] {
        let text = explain(arguments);
        assert!(text.contains(&format!("\n\n{route}\n\n  per-route  allowed  key {key}, cost 1: ")), "{text}");
        assert!(text.ends_with("exit code 0"), "{text}");
    }
    let json = |arguments: &[&str]| -> serde_json::Value {
        let text = explain(&[arguments, &["--json"]].concat());
        serde_json::from_str(text.strip_suffix("exit code 0").expect("it passes")).expect("JSON")
    };
    let asked = ["https://beta.internal/shop/1"];
    let beta = serde_json::json!({ "name": "beta", "upstreams": ["https://beta.internal"], "upstream_urls": asked });
    assert_eq!(json(&["GET", "/shop/1", "-H", "x-beta: 1"])["route"], beta);
    let status = serde_json::json!({ "name": "/status", "upstreams": [], "upstream_urls": [], "respond": 204 });
    assert_eq!(json(&["GET", "/status", "-H", "host: a.example"])["route"], status);
    let nowhere = json(&["GET", "/"]);
    assert!(nowhere.get("route").is_some_and(serde_json::Value::is_null), "{nowhere}");
    // The decision service has no routes.
    assert_eq!(json(&["GET", "/shop/1", "--domain", "edge"]).get("route"), None);
}

#[test]
fn urls_of_upstreams_are_reported() {
    let rules = "\
gateway:
  routes:
    - { path: /shop/**, strip_prefix: /shop/, upstream: [http://192.0.2.5:8081/base/, http://192.0.2.6] }
    - { path: /old/**, rewrite: { pattern: '^/old/(.*)$', to: '/new/$1' }, upstream: 'h2c://192.0.2.7' }
    - { path: /echo/**, upstream: echo }
limits: [{ name: all }]
";
    let folder = folder_with(&[("rules.yaml", rules)]);
    for (path, route) in [
        ("/shop/1?q=2", "/shop/**, to http://192.0.2.5:8081/base/1?q=2, http://192.0.2.6/1?q=2."),
        ("/shop", "/shop/**, to http://192.0.2.5:8081/base/, http://192.0.2.6/."),
        ("/old/a/../b", "/old/**, to h2c://192.0.2.7/new/b."),
        ("/echo/a", "/echo/**, to echo."),
    ] {
        let text = transcript(&run_in(folder.path(), &["explain", "--config", "rules.yaml", "GET", path]));
        assert!(text.contains(&format!("\nRoute: {route}\n")), "{text}");
    }
}

#[test]
fn a_missing_client_address_is_reported_if_a_limit_needs_it() {
    let note = "\nThe request has no client address, so limits by ip count it as anonymous, and no list of ips contains it: pass one with \
                --ip, such as --ip 192.0.2.7.\n";
    let text = explain(&["GET", "/"]);
    assert!(
        text.contains(note) && text.contains("\n  office     allowed                    key anonymous, "),
        "{text}"
    );
    assert!(!explain(&["GET", "/", "--ip", "192.0.2.7"]).contains("no client address"));

    let gateway = "gateway: { routes: [{ path: /**, upstream: echo }] }";
    for (rules, question, note) in [
        ("limits: [{ name: a, key: ip }]", &[][..], Some("limits by ip count it as anonymous: pass")),
        ("limits: [{ name: a, key: ip, missing: skip }]", &[], Some("limits by ip do not apply: pass")),
        ("limits: [{ name: a, key: ip/48, missing: deny }]", &[], Some("limits by ip refuse it: pass")),
        (
            "limits: [{ name: a, key: ip }, { name: b, key: ip, missing: deny }, { name: c, key: ip, missing: skip }]",
            &[],
            Some("a counts it as anonymous, b refuses it, and c does not apply: pass"),
        ),
        (
            "limits: [{ name: a, key: ip, missing: deny, shadow: true }, { name: b, key: ip, exempt: { ips: [10.0.0.0/8] } }, \
             { name: c, key: [host, ip], in_flight: 1 }, { name: d, key: ip }, { name: e, key: ip }]",
            &["-H", "host: a"],
            Some("b, c, d and 1 more count it as anonymous, a does not apply, and no list of ips contains it: pass"),
        ),
        // Limits that lack another part of the key, or do not match, do not need the address.
        (
            "limits: [{ name: a, key: ip, match: { path: /a }, blocked: { ips: [10.0.0.0/8] } }, { name: b, key: \
             ['header:x', ip], missing: deny }]",
            &[],
            None,
        ),
        ("limits: [{ name: a, blocked: { ips: [192.0.2.7] } }]", &[], Some("no list of ips contains it: pass")),
        (
            &format!("{gateway}\nlimits: [{{ name: a, key: ip }}]"),
            &[],
            Some("limits by ip count it as anonymous; clients of the gateway always have one: pass"),
        ),
        (
            &format!("{gateway}\nlimits: [{{ name: a, key: ip }}]"),
            &["--domain", "edge"],
            Some("limits by ip count it as anonymous: pass"),
        ),
        (ROUTED, &[], None),
    ] {
        let folder = folder_with(&[("rules.yaml", rules)]);
        let asked = [&["explain", "--config", "rules.yaml", "GET", "/"], question].concat();
        let text = transcript(&run_in(folder.path(), &asked));
        match note {
            Some(note) => {
                assert!(text.contains(&format!("\nThe request has no client address, so {note} one with ")), "{text}")
            }
            None => assert!(!text.contains("no client address"), "no limit needs it: {text}"),
        }
    }
}

#[test]
fn a_method_in_lower_case_is_a_warning() {
    let warning = "on stderr:\ntollgate: warning: methods are case-sensitive, and get is not GET: use GET\n";
    assert!(explain(&["get", "/"]).contains(warning));
    for fine in ["GET", "purge", "PURGE"] {
        assert!(!explain(&[fine, "/"]).contains("on stderr"), "{fine}");
    }
}

#[test]
fn wrong_usage_ends_with_2_and_the_fix() {
    for (arguments, message) in [
        (&["GET", "api"][..], "the path `api` does not begin with a slash: use /api"),
        (
            &["GET", "http://foo:81/api?q"],
            "`http://foo:81/api?q` is a URL: use its path, /api?q, and pass its host with -H 'host: foo:81'",
        ),
        (&["G T", "/"], "`G T` is not an HTTP method: use one such as GET"),
        (&["GET", "/", "-H", "x-user-id"], "it has no colon: write 'name: value'"),
        (&["GET", "/", "-H", "x user: 1"], "`x user` is not a header name: write 'name: value'"),
        (&["GET", "/", "--descriptor", "a"], "it has no equals sign: write name=value"),
        (&["GET", "/", "--ip", "300.1.1.1"], "it is not an IP address: use one such as 192.0.2.7 or 2001:db8::7"),
    ] {
        let output = explain(arguments);
        assert!(output.contains(message) && output.ends_with("exit code 2"), "{output}");
    }
}

#[test]
fn an_expression_that_fails_is_explained() {
    let rules = "\
limits:
  - name: pages
    match: { when: 'int(request.query[\"page\"]) > 100' }
    exempt: { when: 'request.headers[\"x-internal\"] == \"1\"' }
    limit: 100
    cost: { expression: 'int(request.query[\"size\"])', when_error: 5 }
  - name: old
    enabled: false
  - name: bots
    blocked: { when: 'request.headers[\"user-agent\"].contains(\"bot\")' }
";
    let folder = folder_with(&[("rules.yaml", rules)]);
    let explain = |arguments: &[&str]| {
        let arguments =
            [&["explain", "--config", "rules.yaml", "GET", "/?page=99999999999999999999"], arguments].concat();
        transcript(&run_in(folder.path(), &arguments))
    };
    insta::assert_snapshot!(explain(&[]));
    let output = explain(&["--json"]);
    let json = output.split_once("\non stderr:").expect("the warnings are on stderr").0;
    let parsed: serde_json::Value = serde_json::from_str(json).expect("JSON");
    let errors = &parsed["limits"][0]["expression_errors"];
    assert_eq!(errors[1]["field"], "exempt.when", "{parsed}");
    assert_eq!(errors[1]["error"], "there is no entry `x-internal`", "{parsed}");
}

#[test]
fn the_reason_of_a_failed_token_is_reported() {
    let secret = "0123456789abcdef0123456789abcdef";
    let rules = "jwt: { key_file: secret.key, algorithms: [HS256], challenge: true }\n\
        limits: [{ name: user, key: 'jwt:sub', missing: deny }]\n";
    let folder = folder_with(&[("rules.yaml", rules), ("secret.key", secret)]);
    let key = jsonwebtoken::EncodingKey::from_secret(secret.as_bytes());
    let token = |claims| jsonwebtoken::encode(&jsonwebtoken::Header::default(), &claims, &key).unwrap();
    let explain = |more: &[&str]| {
        transcript(&run_in(folder.path(), &[&["explain", "--config", "rules.yaml", "GET", "/"], more].concat()))
    };
    let expired = format!("authorization: Bearer {}", token(serde_json::json!({ "sub": "ann", "exp": 1 })));
    let text = explain(&["-H", &expired]);
    assert!(text.contains("refused  token expired\n"), "{text}");
    assert!(text.contains("\nToken: expired. The token has expired.\n"), "{text}");
    let parsed = |text: &str| -> serde_json::Value {
        serde_json::from_str(text.rsplit_once('\n').expect("the exit code is a line").0).expect("JSON")
    };
    let json = parsed(&explain(&["-H", &expired, "--json"]));
    assert_eq!((&json["reason"], &json["status"]), (&"token_expired".into(), &401.into()));
    let described = serde_json::json!({ "valid": false, "reason": "expired", "message": "The token has expired." });
    assert_eq!(json["token"], described);
    let good = format!("authorization: Bearer {}", token(serde_json::json!({ "sub": "ann" })));
    assert!(explain(&["-H", &good]).contains("\nToken: valid.\n"));
    assert_eq!(parsed(&explain(&["-H", &good, "--json"]))["token"], serde_json::json!({ "valid": true }));
    assert_eq!(parsed(&explain(&["--json"]))["token"]["reason"], "missing");
}

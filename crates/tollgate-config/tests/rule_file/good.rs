//! Valid files and the values that they parse to.

use std::time::Duration;

use tollgate::{Consistency, OnStoreFailure, Rate, TokenBucket};
use tollgate_config::internal::{AlgorithmName, BodyRule, CostRule, FailurePolicy, HeaderFamily, KeyPart, StoreUrl};
use tollgate_config::{Parsed, RuleFile};
use tollgate_rules::Missing;

pub(crate) const FILES: [&str; 4] = [DOCUMENTED, EVERYTHING, UNUSUAL, "limits:\n  - name: all\n"];

/// The example of the documentation.
pub(crate) const DOCUMENTED: &str = "
store: memory
store_timeout: 50ms
on_store_failure: local

gateway:
  listen: 127.0.0.1:8080
  trusted_proxies: []
  routes:
    - path: /api/**
      upstream: http://127.0.0.1:8081      # or a list, balanced

service:
  http: 127.0.0.1:8090
  grpc: 127.0.0.1:8091
  resp: 127.0.0.1:8092

admin:
  listen: 127.0.0.1:8099

limits:
  - name: global
    limit: 10000
    window: 1m
  - name: per-user
    key: header:x-user-id
    algorithm: token_bucket
    capacity: 100
    refill: 10/s
  - name: expensive
    match: { path: /api/expensive/**, methods: [POST] }
    key: [header:x-user-id, path]
    algorithm: fixed_window
    limit: 10
    window: 1m
";

/// A file with every key.
const EVERYTHING: &str = r#"
store: redis+sentinel://ann:secret@h1:26379,h2:26379/mymaster
store_timeout: 100ms
on_store_failure: deny
max_memory: 512MiB
headers: [legacy, draft6, draft7, ietf]
body: { template: "wait {{retry_after}}", content_type: text/html; charset=utf-8 }
cors: { origins: [https://shop.example.com, "http://localhost:3000"] }
gateway:
  listen: localhost:8080
  proxy_protocol: { from: [10.0.0.0/8, "2001:db8::/32"] }
  trusted_proxies: [10.0.0.0/8, 192.0.2.1, "2001:db8::/32"]
  routes:
    - path: /a/**
      upstream: [http://127.0.0.1:8081, https://b.example/base]
    - { path: "/*/b", upstream: http://127.0.0.1:8082 }
service:
  http: { listen: "[::1]:8090", proxy_protocol: { from: 127.0.0.1 } }
  grpc: 127.0.0.1:8091
jwt:
  key_file: public.pem
  algorithms: [ES256]
  issuer: https://issuer.example
  audience: [a, b]
  leeway: 10s
  from: cookie:session
limits:
  - &bucket
    name: one
    match:
      path: [/a/*/c, "/**"]
      methods: [GET, PURGE]
      hosts: [api.example.com, "*.example.com"]
      headers: { x-beta: "1", User-Agent: "*bot*" }
      domain: edge
      when: request.path != "/health"
    key: [ip/56, header:X-User, cookie:c, query:q, jwt:sub, descriptor:d, "const:a b", const:eu]
    missing: deny
    algorithm: token_bucket
    capacity: 20
    refill: 1/3s
    refill_mode: interval
    cost: 5
    plan: jwt:plan
    overrides:
      - { plan: gold, capacity: 1000 }
      - { key: [192.0.2.1, b, c, d, e, f, a b, eu], refill: 7/s }
    exempt: { ips: [10.0.0.0/8], keys: [[192.0.2.2, b, c, d, e, f, a b, eu]], when: 'request.ip == "::1"' }
    blocked: { ips: [192.0.2.0/24], when: 'request.method == "TRACE"' }
    shadow: true
    consistency: leased
    on_store_failure: allow
    ban: { after: 5, within: 1m, for: 1h30m }
  - { <<: *bucket, name: two, cost: header:x-cost, shadow: false }
  - { name: queue, algorithm: leaky_bucket, capacity: 5, leak: 0.5/s, overflow: queue, max_wait: 10s, key: route }
  - { name: log, algorithm: sliding_window_log, limit: 5, window: 60s, count_denied: true, key: host }
  - { name: fixed, algorithm: fixed_window, align: first_request, key: method, cost: "int(request.query.n)" }
  - { name: counter, segments: 6, key: [ip, path], missing: skip, exempt: { keys: [[192.0.2.1, /b]] } }
"#;

/// Unusual but valid strings.
const UNUSUAL: &str = r#"
max_memory: 5 GiB
body: { template: x, content_type: "application/vnd.a+json ;x=1" }
cors: { origins: any }
gateway: { listen: "[::1]:0", trusted_proxies: ["::/0", 1.2.3.4/0032], routes: [{ path: /, upstream: "http://[::1]:80/" }] }
service: { http: my_host:00080 }
limits:
  - name: "größe \"x\" / 7"
    match: { path: [/, "/**", "/a*b/*", /ü, //], methods: [M-SEARCH], hosts: ["[::1]", A_b.C, "*.c"], headers: { "X!": "*" } }
    key: [ip/064, "const:a b", "const: x", "jwt:a:b", const:ü]
    window: 1h30m5s
    cost: "header:x!"
  - { name: rate, algorithm: token_bucket, refill: "5. / 10s", key: const:a/b, plan: "descriptor:a b", overrides: [{ plan: "1", capacity: 1 }] }
jwt: { jwks_file: k, from: "query:a b" }
"#;

fn parsed(text: &str) -> Parsed {
    RuleFile::parse("tollgate.yaml", text).unwrap_or_else(|problems| panic!("{problems}"))
}

#[test]
fn the_documented_example_means_what_it_says() {
    let file = parsed(DOCUMENTED);
    assert!(file.store.is_memory());
    assert_eq!(file.store_timeout.duration(), Duration::from_millis(50));
    assert_eq!(file.service.grpc.as_ref().unwrap().listen.as_str(), "127.0.0.1:8091");
    assert_eq!(
        file.gateway.as_ref().unwrap().routes[0].upstream.as_ref().unwrap()[0].url.as_str(),
        "http://127.0.0.1:8081"
    );
    let per_user = &file.limits[1];
    assert_eq!(*per_user.limit().unwrap().algorithm(), TokenBucket::new(100, Rate::per_second(10)).into());
    assert_eq!(per_user.key.as_ref().unwrap().len(), 1);
    assert_eq!(file.limits[2].matches.methods.as_ref().unwrap()[0].as_str(), "POST");
    assert_eq!(file.position_of_limit(2).map(|at| (at.line, at.column)), Some((30, 5)));
    assert_eq!(file.warnings().iter().count(), 0);
}

#[test]
fn texts_at_the_edges_of_their_forms_are_taken() {
    let file = parsed(UNUSUAL);
    assert_eq!(
        file.limits[1].limit().unwrap().algorithm(),
        &TokenBucket::new(10, Rate::new(5, Duration::from_secs(10))).into()
    );
}

#[test]
fn omitted_keys_have_their_defaults() {
    let file = parsed("limits:\n  - name: all\n");
    assert_eq!(file.headers, [HeaderFamily::Legacy, HeaderFamily::Ietf]);
    assert_eq!(file.body, BodyRule::default());
    assert_eq!(file.on_store_failure, FailurePolicy::Local);
    assert_eq!(file.store_timeout.duration(), Duration::from_millis(50));
    let all = &file.limits[0];
    assert_eq!(
        (all.algorithm, all.missing, all.shadow),
        (AlgorithmName::SlidingWindowCounter, Missing::Anonymous, false)
    );
    assert_eq!(*all.limit().unwrap().algorithm(), tollgate::Algorithm::default());
    assert!(all.key.is_none() && all.cost.is_none() && all.ban.is_none());
}

#[test]
fn every_key_is_read() {
    let file = parsed(EVERYTHING);
    assert!(matches!(&file.store.url, StoreUrl::Redis(url) if url.contains("secret")));
    assert!(!format!("{file:?}").contains("secret"), "a password is not for logs");
    let one = &file.limits[0];
    let keys = one.key.as_ref().unwrap();
    assert_eq!(keys[0], KeyPart::Ip { v6_prefix: 56 });
    assert_eq!(keys[7], KeyPart::Const("eu".into()));
    let headers: Vec<_> = one.matches.headers.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(headers, [("User-Agent", "*bot*"), ("x-beta", "1")]);
    assert_eq!(one.cost, Some(CostRule::Units(5)));
    let limit = one.limit().unwrap();
    assert_eq!((limit.consistency(), limit.on_store_failure()), (Consistency::Leased, Some(OnStoreFailure::Allow)));
    assert_eq!(one.overridden(&one.overrides[0]).unwrap().quota(), 1000);
    let by_key = one.overridden(&one.overrides[1]).unwrap();
    assert_eq!(*by_key.algorithm(), TokenBucket::new(20, Rate::per_second(7)).interval().into());
    assert_eq!(one.ban.unwrap().lasts.duration(), Duration::from_secs(5400));
}

#[test]
fn a_merged_map_lends_what_is_not_written() {
    let file = parsed(EVERYTHING);
    let two = &file.limits[1];
    assert_eq!((two.name.as_str(), two.shadow, two.limit().unwrap().quota()), ("two", false, 20));
    assert!(matches!(two.cost, Some(CostRule::Found(_))));
}

#[test]
fn line_ends_and_marks_of_other_systems_change_nothing() {
    let windows = format!("\u{feff}{}", DOCUMENTED.replace('\n', "\r\n"));
    assert_eq!(parsed(&windows).limits.len(), 3);
}

#[test]
fn keys_that_begin_with_x_are_a_place_for_anchors() {
    let file = parsed(
        "x-defaults: &defaults\n  limit: 7\n  key: ip\nx-notes: [1, { anything: goes }]\nlimits:\n  - { <<: *defaults, name: a }\n",
    );
    assert_eq!(file.limits[0].limit().unwrap().quota(), 7);
    assert_eq!(file.warnings().iter().count(), 0);
    // Only at the top level: elsewhere, they are more likely a misplaced header.
    assert!(RuleFile::parse("tollgate.yaml", "limits: [{ name: a, x-note: b }]\n").is_err());
}

#[test]
fn longer_names_of_units_are_taken() {
    for (text, seconds) in
        [("1sec", 1), ("1second", 1), ("2min", 120), ("1minute", 60), ("1hour", 3600), ("1day", 86_400)]
    {
        let file = parsed(&format!("limits: [{{ name: a, window: {text} }}]\n"));
        assert_eq!(file.limits[0].numbers.window.unwrap().duration(), Duration::from_secs(seconds), "{text}");
    }
}

//! Compiled rules do what the file says.

use std::net::IpAddr;
use std::path::Path;

use http::{HeaderMap, HeaderName, HeaderValue};
use jsonwebtoken::{EncodingKey, Header};
use tollgate::{Limiter, ManualClock};
use tollgate_config::RuleFile;
use tollgate_http::Refusal;
use tollgate_rules::{Facts, Gate, Outcome};

/// Returns a gate in memory for a rule file. Its clock does not move, so that no window ends.
pub(crate) fn gate(text: &str) -> Gate {
    let parsed = RuleFile::parse("tollgate.yaml", text).unwrap_or_else(|problems| panic!("{problems}"));
    let clock = ManualClock::at(tollgate::Timestamp::from_secs(1_700_000_000));
    Gate::with_limiter(parsed.compile().unwrap(), Limiter::builder().clock(clock)).unwrap()
}

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

/// A request as a test writes it: `GET /a?b=c`, headers, and an address.
pub(crate) fn ask(gate: &Gate, line: &str, headers: &[(&str, &str)], peer: &str) -> Outcome {
    let (method, target) = line.split_once(' ').unwrap();
    let headers: HeaderMap = headers
        .iter()
        .map(|(name, value)| (name.parse::<HeaderName>().unwrap(), HeaderValue::from_str(value).unwrap()))
        .collect();
    let facts = Facts::new(method, target).headers(&headers).peer(peer.parse::<IpAddr>().unwrap());
    gate.decide_now(&facts).unwrap()
}

fn left(outcome: &Outcome) -> (Option<&str>, Option<u64>) {
    (outcome.limit(), outcome.decision().map(tollgate::Decision::remaining))
}

#[test]
fn the_documented_example_counts_as_it_reads() {
    let gate = gate(super::good::DOCUMENTED);
    let ann = [("x-user-id", "ann")];
    assert_eq!(left(&ask(&gate, "GET /", &ann, "192.0.2.1")), (Some("per-user"), Some(99)));
    for _ in 0..10 {
        assert!(ask(&gate, "POST /api/expensive/x", &ann, "192.0.2.1").is_allowed());
    }
    let denied = ask(&gate, "POST /api/expensive/x", &ann, "192.0.2.1");
    assert_eq!((denied.refusal(), denied.limit()), (Some(&Refusal::Limited), Some("expensive")));
    assert_eq!(left(&ask(&gate, "POST /api/expensive/y", &ann, "192.0.2.1")), (Some("per-user"), Some(88)));
}

#[test]
fn matches_narrow_a_limit() {
    let gate = gate(
        r#"
limits:
  - name: narrow
    match:
      path: [/a/**, /b]
      methods: [POST]
      hosts: ["*.example.com"]
      headers: { user-agent: "*bot*" }
      when: '"n" in request.query && request.query["n"] == "1" && !request.ip.inCidr("10.0.0.0/8")'
"#,
    );
    let bot = ("user-agent", "a bot of ours");
    let host = ("host", "API.example.com:80");
    assert_eq!(ask(&gate, "POST /a/x?n=1", &[bot, host], "192.0.2.1").limit(), Some("narrow"));
    assert_eq!(ask(&gate, "POST /b?n=1", &[bot, host], "192.0.2.1").limit(), Some("narrow"));
    for (line, headers, peer) in [
        ("GET /a/x?n=1", [bot, host], "192.0.2.1"),
        ("POST /c?n=1", [bot, host], "192.0.2.1"),
        ("POST /a?n=2", [bot, host], "192.0.2.1"),
        ("POST /a", [bot, host], "192.0.2.1"),
        ("POST /a?n=1", [("user-agent", "a person"), host], "192.0.2.1"),
        ("POST /a?n=1", [bot, ("host", "example.com")], "192.0.2.1"),
        ("POST /a?n=1", [bot, host], "10.1.2.3"),
    ] {
        assert_eq!(ask(&gate, line, &headers, peer).limit(), None, "{line} {headers:?} {peer}");
    }
}

#[test]
fn costs_plans_lists_and_bans_are_taken_from_the_file() {
    let gate = gate(
        r#"
limits:
  - name: user
    key: header:x-user-id
    limit: 10
    algorithm: fixed_window
    window: 1h
    cost: "request.path.startsWith('/export') ? 5 : 1"
    plan: header:x-plan
    overrides:
      - { plan: gold, limit: 1000 }
      - { key: vip, limit: 5000 }
    exempt: { ips: [10.0.0.0/8], keys: [bot], when: 'request.path == "/health"' }
    blocked: { keys: [eve], ips: [203.0.113.0/24] }
    ban: { after: 2, within: 1h, for: 2h }
  - name: watched
    shadow: true
    limit: 1
"#,
    );
    let one = |line: &str, user: &str, plan: &str| {
        let outcome = ask(&gate, line, &[("x-user-id", user), ("x-plan", plan)], "192.0.2.1");
        (outcome.is_allowed(), outcome.decision().map(tollgate::Decision::remaining))
    };
    assert_eq!(one("GET /export/a", "ann", "none"), (true, Some(5)));
    assert_eq!(one("GET /", "ann", "gold"), (true, Some(994)));
    assert_eq!(one("GET /", "vip", "gold"), (true, Some(4999)));
    assert_eq!(one("GET /", "bot", "none"), (true, None));
    assert_eq!(one("GET /health", "ann", "none"), (true, None));
    assert_eq!(ask(&gate, "GET /", &[], "10.0.0.9").limit(), None);
    for (user, peer) in [("eve", "192.0.2.1"), ("ann", "203.0.113.7")] {
        assert_eq!(ask(&gate, "GET /", &[("x-user-id", user)], peer).refusal(), Some(&Refusal::Blocked));
    }
    assert_eq!(one("GET /export", "bob", "none"), (true, Some(5)));
    assert_eq!(one("GET /export", "bob", "none"), (true, Some(0)));
    let refusals: Vec<_> = (0..3)
        .map(|_| ask(&gate, "GET /", &[("x-user-id", "bob")], "192.0.2.1").refusal().map(Refusal::code))
        .collect();
    assert_eq!(refusals, [Some("rate_limit_exceeded"), Some("banned"), Some("banned")]);
    let watched = ask(&gate, "GET /", &[("x-user-id", "cid")], "192.0.2.1");
    assert_eq!(
        watched.shadow_decisions().map(|(name, decision)| (name, decision.is_allowed())).collect::<Vec<_>>(),
        [("watched", false)]
    );
}

#[test]
fn answers_and_places_are_as_the_file_says() {
    let gate = gate(
        r"
limits:
  - { name: logins, key: header:x-user-id, limit: 5, window: 1h, algorithm: fixed_window, count: [401, 5xx] }
  - { name: tokens, limit: 1000, window: 1h, algorithm: fixed_window, cost: 100, settle: header:x-tokens, count: successes }
  - name: at-once
    key: header:x-user-id
    in_flight: 1
    plan: header:x-plan
    overrides: [{ plan: gold, in_flight: 3 }, { key: vip, in_flight: 2 }]
",
    );
    let asked = |user: &str, plan: &str| ask(&gate, "GET /", &[("x-user-id", user), ("x-plan", plan)], "192.0.2.1");
    let left = |limit: &str, key: &[&[u8]]| match gate.check_by_name(limit, key, 0).unwrap() {
        tollgate_rules::Check::Ready(outcome) => outcome.decision().unwrap().remaining(),
        tollgate_rules::Check::Pending(_) => unreachable!("the store is memory"),
    };
    let tokens: HeaderMap = [("x-tokens".parse().unwrap(), "30".parse().unwrap())].into_iter().collect();
    for (status, logins, rest) in [(200, 5, 970), (401, 4, 970), (404, 4, 970), (503, 3, 970), (302, 3, 940)] {
        let outcome = asked("ann", "none");
        assert!(outcome.awaits_response());
        _ = block_on(outcome.settle_response(http::StatusCode::from_u16(status).unwrap(), &tokens));
        assert_eq!((left("logins", &[b"ann"]), left("tokens", &[])), (logins, rest), "{status}");
    }
    for (user, plan, most) in [("bob", "none", 1), ("cid", "gold", 3), ("vip", "gold", 2)] {
        let mut held = Vec::new();
        let refused = loop {
            let mut outcome = asked(user, plan);
            match outcome.take_permit() {
                Some(place) => held.push((place, block_on(outcome.refund()))),
                None => break outcome,
            }
        };
        assert_eq!((held.len(), refused.limit()), (most, Some("at-once")), "{user}");
    }
}

#[test]
fn proxies_are_believed_as_the_file_says() {
    let file = |header: &str| {
        format!(
            "gateway: {{ trusted_proxies: [10.0.0.0/8], forwarding_header: {header} }}\n\
             limits: [{{ name: ip, key: ip, limit: 1, algorithm: fixed_window, window: 1h }}]\n"
        )
    };
    let forged = [("x-forwarded-for", "198.51.100.1"), ("forwarded", "for=198.51.100.2")];
    for (header, believed) in
        [("either", "198.51.100.1"), ("x-forwarded-for", "198.51.100.1"), ("forwarded", "198.51.100.2")]
    {
        let gate = gate(&file(header));
        assert!(ask(&gate, "GET /", &forged, "10.0.0.1").is_allowed());
        assert!(!ask(&gate, "GET /", &[], believed).is_allowed(), "{header}");
        // From other clients, they are ignored.
        assert!(ask(&gate, "GET /", &forged, "192.0.2.1").is_allowed());
    }
}

fn token(secret: &[u8], claims: &serde_json::Value) -> String {
    jsonwebtoken::encode(&Header::default(), claims, &EncodingKey::from_secret(secret)).unwrap()
}

#[test]
fn a_token_counts_by_its_claims_only_if_it_verifies() {
    let folder = tempfile::tempdir().unwrap();
    let secret = b"a secret of at least thirty-two bytes";
    std::fs::write(folder.path().join("secret"), secret).unwrap();
    let file = folder.path().join("tollgate.yaml");
    let text = r"
jwt: { key_file: secret, algorithms: [HS256] }
limits:
  - { name: sub, key: 'jwt:sub', plan: 'jwt:org.plan', limit: 1, window: 10220d, algorithm: fixed_window, overrides: [{ plan: gold, limit: 7 }] }
";
    std::fs::write(&file, text).unwrap();
    let gate = block_on(tollgate_config::open_gate(&RuleFile::load(&file).unwrap())).unwrap();
    let asked = |token: &str| {
        let outcome = ask(&gate, "GET /", &[("authorization", &format!("Bearer {token}"))], "192.0.2.1");
        (outcome.is_allowed(), outcome.decision().unwrap().quota())
    };
    let good = token(secret, &serde_json::json!({ "sub": "ann", "org": { "plan": "gold" } }));
    assert_eq!(asked(&good), (true, 7));
    let forged = token(b"another secret of at least thirty-two bytes", &serde_json::json!({ "sub": "ann" }));
    assert_eq!(asked(&forged), (true, 1), "anonymous");
    let unsigned = format!("{}.", good.rsplit_once('.').unwrap().0);
    assert_eq!(asked(&unsigned), (false, 1), "anonymous too, and that is spent");
    assert_eq!(asked(&good), (true, 7));
}

#[test]
fn problems_found_at_compilation_have_a_position() {
    let message = |text: &str| {
        let parsed = RuleFile::parse("tollgate.yaml", text).unwrap();
        parsed.compile().unwrap_err().to_string()
    };
    let missing = "jwt: { key_file: nowhere.pem, algorithms: [RS256] }\nlimits: [{ name: a, key: 'jwt:sub' }]\n";
    let error = message(missing);
    assert!(error.starts_with("tollgate.yaml:1:18: ") && error.contains("nowhere.pem"), "{error}");
    let error = message("body: { template: 'wait {{forever}}', content_type: text/plain }\n");
    assert!(error.starts_with("tollgate.yaml:1:19: ") && error.contains("`forever`"), "{error}");
    let nowhere = RuleFile::load(Path::new("/nowhere/tollgate.yaml")).unwrap_err().to_string();
    assert!(nowhere.starts_with("cannot read /nowhere/tollgate.yaml: "), "{nowhere}");
}

#[test]
fn a_disabled_limit_is_checked_but_counts_nothing() {
    let text = |enabled: bool| {
        format!(
            "limits:\n  - {{ name: a, description: for the launch, enabled: {enabled}, limit: 1, window: 1h, blocked: {{ ips: \
             [10.0.0.0/8] }}, match: {{ when: 'request.query.x == \"1\"' }} }}\n  - {{ name: b, in_flight: 1, enabled: false \
             }}\n"
        )
    };
    let gate = gate(&text(false));
    for peer in ["192.0.2.1", "192.0.2.1", "10.0.0.1"] {
        let outcome = ask(&gate, "GET /?x=1", &[], peer);
        assert_eq!((outcome.refusal(), outcome.limit()), (None, None), "{peer}");
    }
    // Its expression is not evaluated, so it cannot fail.
    assert!(ask(&gate, "GET /", &[], "192.0.2.1").is_allowed());
    assert_eq!(gate.rules().expression_errors().map(|(.., count)| count).sum::<u64>(), 0);
    for _ in 0..3 {
        let asking = gate.check_by_name("a", &[], 1).unwrap();
        assert_eq!(block_on(asking.outcome()).limit(), None);
    }
    let explained = block_on(gate.explain(&Facts::new("GET", "/")));
    assert!(explained.rules.iter().all(|rule| matches!(rule.state, tollgate_rules::RuleState::Disabled)));
    // Its mistakes are reported like those of any other limit.
    assert!(RuleFile::parse("tollgate.yaml", "limits: [{ name: a, enabled: false, limit: 0 }]\n").is_err());
    // Enabled again, it applies.
    gate.replace(RuleFile::parse("tollgate.yaml", text(true)).unwrap().compile().unwrap()).unwrap();
    assert_eq!(ask(&gate, "GET /?x=1", &[], "10.0.0.1").refusal(), Some(&Refusal::Blocked));
    assert!(ask(&gate, "GET /?x=1", &[], "192.0.2.1").is_allowed());
    assert_eq!(ask(&gate, "GET /?x=1", &[], "192.0.2.1").refusal(), Some(&Refusal::Limited));
}

/// The suggestion of `validate` for `rate=10r/s burst=5` of nginx, with and without `nodelay`, admits the same requests
/// as nginx: six of many at once, and queued ones 100 ms apart.
#[test]
fn the_suggestions_for_words_of_nginx_admit_what_nginx_admits() {
    let decisions = |numbers: &str| -> Vec<Option<u128>> {
        let text = format!("limits: [{{ name: a, {numbers} }}]");
        let rules = RuleFile::parse("tollgate.yaml", &text).unwrap().compile().unwrap();
        let clock = tollgate::ManualClock::at(tollgate::Timestamp::from_secs(1_700_000_000));
        let gate = Gate::with_limiter(rules, tollgate::Limiter::builder().clock(clock)).unwrap();
        let ask = |_| ask(&gate, "GET /", &[], "192.0.2.1");
        (0..8).map(ask).map(|outcome| outcome.is_allowed().then(|| outcome.delay().as_millis())).collect()
    };
    let at_once = "algorithm: token_bucket, capacity: 6, refill: 10/s";
    assert_eq!(decisions(at_once), [[Some(0); 6].as_slice(), &[None; 2]].concat());
    let waiting = "algorithm: leaky_bucket, capacity: 6, leak: 10/s, overflow: queue, max_wait: 500ms";
    let delays = [0, 100, 200, 300, 400, 500].map(Some);
    assert_eq!(decisions(waiting), [delays.as_slice(), &[None; 2]].concat());
    for (words, numbers) in [("burst: 5", waiting), ("burst: 5, nodelay: true", at_once)] {
        let text = format!("limits: [{{ name: a, rate: 10r/s, {words} }}]");
        let problems = RuleFile::parse("tollgate.yaml", &text).unwrap_err();
        let fix = problems.iter().next().unwrap().fix().to_owned();
        assert!(numbers.split(", ").all(|number| fix.contains(&format!("`{number}`"))), "{fix}");
    }
}

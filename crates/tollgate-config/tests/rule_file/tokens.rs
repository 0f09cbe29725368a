//! Tokens: rules that read none decide first, and a refusal names the reason why its token failed.

use std::net::IpAddr;

use http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use http::{HeaderMap, HeaderValue, StatusCode};
use jsonwebtoken::{EncodingKey, Header};
use serde_json::{Value, json};
use tempfile::TempDir;
use tollgate::{Limiter, ManualClock};
use tollgate_config::{Parsed, RuleFile};
use tollgate_http::{Refusal, TokenError};
use tollgate_rules::{Explanation, Facts, Gate, Outcome, TokenStatus};

const SECRET: &[u8] = b"a secret of at least thirty-two bytes";
const OTHER_SECRET: &[u8] = b"another secret of at least thirty-two bytes";

/// A gate with a rule file that verifies tokens, and a clock that the test moves.
struct Site {
    gate: Gate,
    clock: ManualClock,
    _folder: TempDir,
}

fn parsed(jwt: &str, limits: &str) -> (Parsed, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("secret"), SECRET).unwrap();
    let path = folder.path().join("tollgate.yaml");
    std::fs::write(&path, format!("jwt: {{ key_file: secret, algorithms: [HS256]{jwt} }}\nlimits:\n{limits}")).unwrap();
    (RuleFile::load(&path).unwrap_or_else(|problems| panic!("{problems}")), folder)
}

impl Site {
    fn new(jwt: &str, limits: &str) -> Self {
        let (parsed, folder) = parsed(jwt, limits);
        let clock = ManualClock::at(tollgate::Timestamp::from_secs(1_700_000_000));
        let rules = parsed.compile().unwrap_or_else(|problems| panic!("{problems}"));
        let gate = Gate::with_limiter(rules, Limiter::builder().clock(clock.clone())).unwrap();
        Self { gate, clock, _folder: folder }
    }

    fn ask_at(&self, path: &str, token: Option<&str>, peer: &str) -> Outcome {
        let headers = headers(token);
        let facts = Facts::new("GET", path).headers(&headers).peer(peer.parse::<IpAddr>().unwrap());
        self.gate.decide_now(&facts).unwrap()
    }

    fn ask(&self, token: &str) -> Outcome {
        self.ask_at("/", Some(token), "192.0.2.1")
    }

    fn explain(&self, token: Option<&str>) -> Explanation {
        let headers = headers(token);
        let facts = Facts::new("GET", "/").headers(&headers).peer([192, 0, 2, 1].into());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(self.gate.explain(&facts))
    }
}

fn headers(token: Option<&str>) -> HeaderMap {
    let value = token.map(|token| HeaderValue::from_str(&format!("Bearer {token}")).unwrap());
    value.map(|value| (AUTHORIZATION, value)).into_iter().collect()
}

fn signed(secret: &[u8], claims: &Value) -> String {
    jsonwebtoken::encode(&Header::default(), claims, &EncodingKey::from_secret(secret)).unwrap()
}

fn good(subject: &str) -> String {
    signed(SECRET, &json!({ "sub": subject }))
}

/// Returns an invalid token that was not used before.
fn bad(number: u64) -> String {
    signed(OTHER_SECRET, &json!({ "sub": number }))
}

const BOTH: &str = "
  - { name: per-user, key: 'jwt:sub', algorithm: fixed_window, limit: 4, window: 1h }
  - { name: per-ip, key: ip, algorithm: fixed_window, limit: 2, window: 1h }
";

#[test]
fn a_request_that_is_denied_without_its_token_has_no_signature_verified() {
    let site = Site::new("", BOTH);
    for number in 0..2 {
        let admitted = site.ask(&bad(number));
        assert!(admitted.is_allowed());
        assert_eq!(admitted.token(), TokenStatus::Invalid(TokenError::BadSignature));
        assert_eq!(admitted.signatures_verified(), 1);
    }
    for number in 2..9 {
        let denied = site.ask(&bad(number));
        assert_eq!((denied.refusal(), denied.limit()), (Some(&Refusal::Limited), Some("per-ip")));
        assert_eq!((denied.token(), denied.signatures_verified()), (TokenStatus::NotRead, 0));
        let decision = denied.decision().unwrap();
        assert_eq!((decision.remaining(), decision.quota()), (0, 2));
        assert_eq!(decision.retry_after(), Some(std::time::Duration::from_secs(2_800)));
    }
    assert!(site.ask_at("/", Some(&bad(9)), "192.0.2.2").is_allowed());
}

#[test]
fn a_denial_by_either_kind_of_rule_takes_nothing_from_the_other() {
    let site = Site::new("", BOTH);
    let left = |outcome: &Outcome| (outcome.limit().unwrap().to_owned(), outcome.decision().unwrap().remaining());
    // Both have the same share left: the first in the file is reported.
    let site_even = Site::new("", &BOTH.replace("limit: 4", "limit: 2"));
    assert_eq!(left(&site_even.ask(&good("ann"))), ("per-user".into(), 1));
    for peer in ["192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.2.3"] {
        assert!(site.ask_at("/", Some(&good("ann")), peer).is_allowed(), "{peer}");
    }
    // Denied by the address: nothing is taken from the limit of the user.
    assert_eq!(left(&site.ask(&good("bob"))), ("per-ip".into(), 0));
    assert_eq!(left(&site.ask_at("/", Some(&good("bob")), "192.0.2.4")), ("per-ip".into(), 1));
    assert_eq!(left(&site.ask_at("/", Some(&good("bob")), "192.0.2.5")), ("per-user".into(), 2));
    // Denied by the user: nothing is taken from the limit of the address.
    let denied = site.ask_at("/", Some(&good("ann")), "192.0.2.6");
    assert_eq!((denied.limit(), denied.token()), (Some("per-user"), TokenStatus::Valid));
    assert_eq!(left(&site.ask_at("/", Some(&good("eve")), "192.0.2.6")), ("per-ip".into(), 1));
}

#[test]
fn a_banned_client_has_no_signature_verified_and_each_denial_strikes_once() {
    let site = Site::new(
        "",
        "
  - { name: per-user, key: 'jwt:sub', limit: 100 }
  - name: per-ip
    key: ip
    algorithm: fixed_window
    limit: 1
    window: 1m
    ban: { after: 3, within: 1h, for: 2h }
",
    );
    assert!(site.ask(&bad(0)).is_allowed());
    for number in 1..3 {
        assert_eq!(site.ask(&bad(number)).refusal(), Some(&Refusal::Limited), "{number}");
    }
    let struck = site.ask(&bad(3));
    assert!(matches!(struck.refusal(), Some(Refusal::Banned { .. })), "{struck:?}");
    site.clock.advance(std::time::Duration::from_secs(3600));
    let banned = site.ask(&bad(4));
    assert!(matches!(banned.refusal(), Some(Refusal::Banned { .. })), "{banned:?}");
    assert_eq!(
        (banned.limit(), banned.token(), banned.signatures_verified()),
        (Some("per-ip"), TokenStatus::NotRead, 0)
    );
    site.clock.advance(std::time::Duration::from_secs(3600));
    assert!(site.ask(&bad(5)).is_allowed());
}

#[test]
fn a_blocked_client_has_no_signature_verified_wherever_the_list_stands() {
    for list in [
        "  - { name: banned-hosts, key: ip, limit: 100, blocked: { ips: [192.0.2.1] } }\n",
        "  - { name: other-user, key: 'jwt:sub', limit: 100, blocked: { ips: [192.0.2.1] } }\n",
        "  - { name: other-cost, cost: 'int(jwt.weight)', limit: 100, blocked: { when: 'request.path == \"/\"' } }\n",
    ] {
        let site =
            Site::new("", &format!("  - {{ name: per-user, key: 'jwt:sub', missing: deny, limit: 100 }}\n{list}"));
        let blocked = site.ask(&bad(0));
        assert_eq!(blocked.refusal(), Some(&Refusal::Blocked), "{list}");
        assert_eq!((blocked.token(), blocked.signatures_verified()), (TokenStatus::NotRead, 0), "{list}");
        assert_eq!(site.explain(Some(&bad(0))).refusal, Some(Refusal::Blocked), "{list}");
    }
}

#[test]
fn an_exemption_by_claim_is_read_before_the_block_list_of_its_rule() {
    let site = Site::new(
        "",
        "  - { name: a, key: ip, limit: 100, exempt: { when: 'jwt.sub == \"ann\"' }, blocked: { ips: [192.0.2.1] } }\n",
    );
    assert!(site.ask(&good("ann")).is_allowed());
    assert_eq!(site.ask(&good("bob")).refusal(), Some(&Refusal::Blocked));
}

#[test]
fn a_request_that_finds_no_permit_has_no_signature_verified() {
    let site = Site::new(
        "",
        "
  - { name: per-user, key: 'jwt:sub', in_flight: 1 }
  - { name: per-ip, key: ip, in_flight: 2 }
",
    );
    let mut first = site.ask(&good("ann"));
    let permit = first.take_permit();
    assert!(first.is_allowed() && permit.is_some());
    // Denied by the user's limit: the permit of the address is returned.
    for _ in 0..3 {
        let denied = site.ask(&good("ann"));
        assert_eq!((denied.limit(), denied.token()), (Some("per-user"), TokenStatus::Valid));
    }
    let mut second = site.ask(&good("bob"));
    let other = second.take_permit();
    assert!(second.is_allowed());
    let full = site.ask(&bad(0));
    assert_eq!((full.refusal(), full.limit()), (Some(&Refusal::Limited), Some("per-ip")));
    assert_eq!((full.token(), full.signatures_verified()), (TokenStatus::NotRead, 0));
    drop((permit, other));
    assert!(site.ask(&good("ann")).is_allowed());
}

#[test]
fn denials_that_count_are_counted_once() {
    let site = Site::new(
        "",
        "
  - { name: per-user, key: 'jwt:sub', limit: 100 }
  - { name: per-ip, key: ip, algorithm: sliding_window_log, limit: 2, window: 10s, count_denied: true }
",
    );
    assert!(site.ask(&bad(0)).is_allowed() && site.ask(&bad(1)).is_allowed());
    site.clock.advance(std::time::Duration::from_secs(5));
    let denied = site.ask(&bad(2));
    assert!(!denied.is_allowed());
    // The first two requests and the denial are in the window. If the denial was counted once, one unit is free when
    // the first two have left.
    site.clock.advance(std::time::Duration::from_secs(5));
    assert!(site.ask(&bad(3)).is_allowed());
}

#[test]
fn a_rule_in_shadow_mode_counts_denied_requests_unless_it_reads_their_token() {
    let site = Site::new(
        "",
        "
  - { name: per-ip, key: ip, algorithm: fixed_window, limit: 1, window: 1h }
  - { name: shadow-ip, key: ip, algorithm: fixed_window, limit: 9, window: 1h, shadow: true }
  - { name: shadow-user, key: 'jwt:sub', algorithm: fixed_window, limit: 9, window: 1h, shadow: true }
",
    );
    let watched = |outcome: &Outcome| -> Vec<(String, u64)> {
        outcome.shadow_decisions().map(|(name, decision)| (name.to_owned(), decision.remaining())).collect()
    };
    assert_eq!(watched(&site.ask(&good("ann"))), [("shadow-ip".into(), 8), ("shadow-user".into(), 8)]);
    let denied = site.ask(&good("ann"));
    assert_eq!((denied.limit(), denied.token()), (Some("per-ip"), TokenStatus::NotRead));
    assert_eq!(watched(&denied), [("shadow-ip".into(), 7)]);
    assert_eq!(
        watched(&site.ask_at("/", Some(&good("ann")), "192.0.2.9")),
        [("shadow-ip".into(), 8), ("shadow-user".into(), 7)]
    );
}

#[test]
fn an_explanation_decides_in_the_same_order() {
    let site = Site::new("", &BOTH.replace("key: 'jwt:sub'", "key: 'jwt:sub', missing: deny"));
    let expired = signed(SECRET, &json!({ "sub": "ann", "exp": 1 }));
    let explained = site.explain(Some(&expired));
    let refusal = Refusal::TokenInvalid { error: TokenError::Expired, challenge: false };
    assert_eq!((explained.limit.as_deref(), explained.refusal.as_ref()), (Some("per-user"), Some(&refusal)));
    assert_eq!(explained.token, TokenStatus::Invalid(TokenError::Expired));
    assert_eq!(site.ask(&expired).refusal(), Some(&refusal));
    assert!(site.ask(&good("ann")).is_allowed() && site.ask(&good("ann")).is_allowed());
    let explained = site.explain(Some(&expired));
    assert_eq!((explained.limit.as_deref(), explained.refusal), (Some("per-ip"), Some(Refusal::Limited)));
    assert_eq!(site.ask(&expired).refusal(), Some(&Refusal::Limited));
}

#[test]
fn a_refusal_says_why_the_token_failed() {
    let limits = "  - { name: per-user, key: 'jwt:sub', missing: deny, limit: 9 }\n";
    let expired = signed(SECRET, &json!({ "sub": "ann", "exp": 1 }));
    let nameless = signed(SECRET, &json!({ "name": "ann" }));
    let (forged, malformed) = (bad(0), "a.b.c".to_owned());
    let cases: [(Option<&str>, &str, &str, &str); 4] = [
        (None, "token_missing", "The request carries no token.", ""),
        (
            Some(&expired),
            "token_expired",
            "The token has expired.",
            ", error=\"invalid_token\", error_description=\"The token has expired.\"",
        ),
        (
            Some(&forged),
            "token_bad_signature",
            "The signature of the token is invalid.",
            ", error=\"invalid_token\", error_description=\"The signature of the token is invalid.\"",
        ),
        (
            Some(&malformed),
            "token_malformed",
            "The token is malformed.",
            ", error=\"invalid_token\", error_description=\"The token is malformed.\"",
        ),
    ];
    for (jwt, status) in [("", StatusCode::FORBIDDEN), (", challenge: true, realm: api", StatusCode::UNAUTHORIZED)] {
        let site = Site::new(jwt, limits);
        for (token, code, message, parameters) in cases {
            let refused = site.ask_at("/", token, "192.0.2.1");
            let response = refused.response(&HeaderMap::new()).unwrap();
            assert_eq!(response.status(), status);
            let body: Value = serde_json::from_slice(response.body()).unwrap();
            assert_eq!(body, json!({ "error": code, "message": message }));
            let challenge = (status == StatusCode::UNAUTHORIZED).then(|| format!("Bearer realm=\"api\"{parameters}"));
            let message = response.headers().get(WWW_AUTHENTICATE).map(|value| value.to_str().unwrap().to_owned());
            assert_eq!(message, challenge, "{token:?}");
            let mut written = Vec::new();
            refused.write_http1(&HeaderMap::new(), b"", &mut written).unwrap();
            let written = String::from_utf8(written).unwrap().to_lowercase();
            assert_eq!(written.contains("www-authenticate: bearer"), challenge.is_some(), "{written}");
            let grpc = refused.grpc_response().unwrap();
            assert_eq!(grpc.headers()["grpc-status"], if challenge.is_some() { "16" } else { "7" });
        }
        // The token is valid, but lacks the claim.
        let lacking = site.ask(&nameless);
        assert_eq!(lacking.refusal(), Some(&Refusal::KeyMissing { part: "jwt:sub".into() }));
        assert_eq!(lacking.token(), TokenStatus::Valid);
    }
}

#[test]
fn a_realm_is_refused_where_it_cannot_be_sent() {
    let problems = |jwt: &str| {
        let text =
            format!("jwt: {{ key_file: secret, algorithms: [HS256]{jwt} }}\nlimits: [{{ name: a, key: 'jwt:sub' }}]\n");
        RuleFile::parse("tollgate.yaml", &text).err().map(|problems| problems.to_string()).unwrap_or_default()
    };
    assert_eq!(problems(", challenge: true, realm: api"), "");
    let without = problems(", realm: api");
    assert!(without.contains("realm has no effect without `challenge: true`"), "{without}");
    for realm in [r#"'a"b'"#, r"'a\b'", "ä", r#""a\nb""#] {
        let message = problems(&format!(", challenge: true, realm: {realm}"));
        assert!(message.contains("use printable ASCII"), "{realm}: {message}");
    }
}

//! The rule file: any bytes are refused with reasons at positions in the file, or compile to rules that decide
//! requests.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, StatusCode};
use tollgate_config::{Parsed, RuleFile};
use tollgate_rules::{Facts, Gate, RuleState};

use crate::gates;
use crate::refusals::{check_refusal, check_warnings};

/// Longer than most windows in rule files, so that counts expire.
const A_WHILE: Duration = Duration::from_secs(90);

/// Parses bytes as a rule file and checks a few requests with valid ones.
pub fn rule_file(input: &[u8]) {
    match RuleFile::parse("tollgate.yaml", input) {
        Err(problems) => {
            let text = String::from_utf8_lossy(input.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(input));
            check_refusal(&problems, &text);
        }
        Ok(file) => {
            check_warnings(file.warnings(), file.source());
            check_positions_of_limits(&file);
            if !names_files_elsewhere(&file) {
                compiled(&file);
            }
        }
    }
}

fn check_positions_of_limits(file: &Parsed) {
    for index in 0..file.limits.len() {
        assert!(file.position_of_limit(index).is_some(), "limit {index} stands nowhere");
    }
    assert_eq!(file.position_of_limit(file.limits.len()), None);
}

/// Returns whether the file names key files in other folders. The fuzzer must not open devices. This folder has no
/// keys, so a file in it is refused as missing.
fn names_files_elsewhere(file: &Parsed) -> bool {
    let named = file.jwt.iter().flat_map(|jwt| [&jwt.key_file, &jwt.jwks_file]).flatten();
    named.into_iter().any(|path| path.contains('/'))
}

fn compiled(file: &Parsed) {
    let rules = match file.compile() {
        Ok(rules) => rules,
        Err(problems) => return check_refusal(&problems, file.source()),
    };
    assert!(rules.names().eq(file.limits.iter().map(|limit| limit.name.as_str())), "rules and limits differ");
    let Some((gate, clock)) = gates::gate(rules) else { return };
    for facts in requests(&headers()) {
        for _ in 0..3 {
            decided(&gate, &facts);
        }
        clock.advance(A_WHILE);
        decided(&gate, &facts);
    }
}

/// Checks that the explanation agrees with the decision, and that both can be written to a response.
fn decided(gate: &Gate, facts: &Facts<'_>) {
    let explanation = gates::explained(gate, facts);
    let Some(outcome) = gate.decide_now(facts) else { panic!("a gate in memory waits") };
    assert_eq!(outcome.is_allowed(), explanation.allowed, "{outcome:?} {explanation:?}");
    let counts = |state: &RuleState| matches!(state, RuleState::Counted { .. });
    let watched = explanation.rules.iter().filter(|rule| rule.shadow && counts(&rule.state)).count();
    // If a rule refuses the request regardless of the remaining quota, no other rule counts it.
    assert!(
        watched == outcome.shadow_decisions().count() || outcome.decision().is_none(),
        "{outcome:?} {explanation:?}"
    );
    let mut headers_written = HeaderMap::new();
    outcome.write_headers(&mut headers_written);
    let request = HeaderMap::new();
    match outcome.response(&request) {
        None => assert!(outcome.is_allowed() && outcome.grpc_response().is_none()),
        Some(response) => {
            assert!(!outcome.is_allowed() && outcome.grpc_response().is_some());
            let known = [StatusCode::TOO_MANY_REQUESTS, StatusCode::FORBIDDEN, StatusCode::BAD_REQUEST];
            assert!(known.contains(&response.status()), "{}", response.status());
        }
    }
}

fn headers() -> HeaderMap {
    let value = HeaderValue::from_static;
    HeaderMap::from_iter([
        (http::header::HOST, value("API.example.com:8080")),
        (http::header::COOKIE, value("sid=abc; theme=dark")),
        (http::header::AUTHORIZATION, value("Bearer a.b.c")),
        (http::header::USER_AGENT, value("a bot")),
        (http::HeaderName::from_static("x-forwarded-for"), value("6.6.6.6, 203.0.113.9")),
        (http::HeaderName::from_static("x-user-id"), value("user42")),
        (http::HeaderName::from_static("x-plan"), value("gold")),
        (http::HeaderName::from_static("x-cost"), value("7")),
    ])
}

fn requests(headers: &HeaderMap) -> [Facts<'_>; 4] {
    [
        Facts::new("GET", "/"),
        Facts::new("POST", "/api//expensive/%78?q=a%20b&q=c").headers(headers).peer([10, 0, 0, 1].into()),
        Facts::new("GET", "/api/search").headers(headers).host("[2001:db8::1]:80").peer([203, 0, 113, 9].into()),
        Facts::new("PURGE", "*").domain("edge").route("r").descriptors(&[("plan", "gold"), ("user", "42")]),
    ]
}

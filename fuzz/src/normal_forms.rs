//! Normal forms of key parts: a request and a caller that names a key meet in one count.

use std::net::IpAddr;
use std::sync::LazyLock;

use http::header::{AUTHORIZATION, COOKIE};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use tollgate_rules::{Facts, Gate};

use crate::gates;

/// One limit for each kind of part. The quotas outlast the fuzzer.
const RULES: &str = "
limits:
  - { name: ip, key: ip, limit: 1000000000, window: 1h }
  - { name: ip-network, key: ip/48, limit: 1000000000, window: 1h }
  - { name: header, key: 'header:x-user-id', limit: 1000000000, window: 1h }
  - { name: authorization, key: 'header:authorization', limit: 1000000000, window: 1h }
  - { name: cookie, key: 'cookie:sid', limit: 1000000000, window: 1h }
  - { name: query, key: 'query:sid', limit: 1000000000, window: 1h }
  - { name: path, key: path, limit: 1000000000, window: 1h }
  - { name: method, key: method, limit: 1000000000, window: 1h }
  - { name: host, key: host, limit: 1000000000, window: 1h }
";

const NAMES: [&str; 9] = ["ip", "ip-network", "header", "authorization", "cookie", "query", "path", "method", "host"];

/// The key of a request without the part.
const MISSING: &str = "anonymous";

static GATE: LazyLock<Gate> = LazyLock::new(|| {
    let Some((gate, _)) = gates::gate(gates::rules(RULES)) else { panic!("nine limits do not fit the memory") };
    gate
});

/// Reads the first byte as the number of a limit, and the rest as the value of its part.
pub fn normal_forms(input: &[u8]) {
    let Some((kind, value)) = input.split_first() else { return };
    let Ok(value) = std::str::from_utf8(value) else { return };
    let rule = usize::from(*kind) % NAMES.len();
    let Some(key) = Sent::new(NAMES[rule], value).and_then(|sent| sent.key(rule)) else {
        // A value that no request can have may be refused by name. It does not panic.
        _ = GATE.check_by_name(NAMES[rule], &[value.as_bytes()], 0);
        return;
    };
    // An explanation shows a replacement character for bytes that are not text.
    if key.contains(char::REPLACEMENT_CHARACTER) {
        return;
    }
    // The normal form is its own normal form, for a caller and for a request.
    let before = remaining(rule, &key).unwrap_or_else(|| panic!("{key} of {value} is refused by name"));
    if key != MISSING
        && let Some(again) = Sent::new(NAMES[rule], &as_sent(NAMES[rule], &key)).and_then(|sent| sent.key(rule))
    {
        assert_eq!(again, key, "{}: {value}", NAMES[rule]);
    }
    // The request takes one unit, and a caller who names the key sees it.
    Sent::new(NAMES[rule], value).into_iter().for_each(|sent| sent.take());
    assert_eq!(remaining(rule, &key), Some(before - 1), "{}: {value} counts as {key}", NAMES[rule]);
    // A value without content, such as a scheme without credentials, is missing.
    if key != MISSING && !value.eq_ignore_ascii_case(MISSING) && is_named_as_sent(NAMES[rule], value) {
        // So does a caller who names the value as the request had it.
        assert_eq!(remaining(rule, value), Some(before - 1), "{}: {value} counts as {key}", NAMES[rule]);
    }
    reset(rule, &key);
}

/// Returns the text of a value in a request. In cookies and queries, it is escaped.
fn as_sent(name: &str, value: &str) -> String {
    match name {
        "cookie" | "query" => value.bytes().map(|byte| format!("%{byte:02X}")).collect(),
        _ => value.to_owned(),
    }
}

/// Returns whether a caller can name the value of a part by its text in the request. The texts of cookies, queries and
/// targets have a syntax around values.
fn is_named_as_sent(name: &str, value: &str) -> bool {
    let value = value.trim();
    !value.is_empty()
        && match name {
            "cookie" | "query" => value.bytes().all(|byte| byte.is_ascii_alphanumeric()),
            // The target `*` has no slash, so it is another path than `/*`.
            "path" => value != "*" && !value.contains(['?', '#']),
            "ip" | "ip-network" => value.parse::<IpAddr>().is_ok(),
            _ => true,
        }
}

/// A request with the value of one part.
#[derive(Default)]
struct Sent {
    headers: HeaderMap,
    method: String,
    target: String,
    host: Option<String>,
    peer: Option<IpAddr>,
}

impl Sent {
    /// Returns `None` if no request can have the value.
    fn new(name: &str, value: &str) -> Option<Self> {
        let mut sent = Self { method: "GET".to_owned(), target: "/".to_owned(), ..Self::default() };
        match name {
            "ip" | "ip-network" => {
                let address = value.split_once('/').map_or(value, |(address, _)| address);
                sent.peer = Some(address.trim_matches(['[', ']']).parse().ok()?);
            }
            "header" => sent.add(HeaderName::from_static("x-user-id"), value)?,
            "authorization" => sent.add(AUTHORIZATION, value)?,
            "cookie" => sent.add(COOKIE, &format!("sid={value}"))?,
            "query" => sent.target = format!("/?sid={value}"),
            "path" => sent.target = format!("/{}", value.strip_prefix('/').unwrap_or(value)),
            // Parsers of HTTP refuse everything else.
            "method" => sent.method = Method::from_bytes(value.as_bytes()).ok()?.as_str().to_owned(),
            _ => sent.host = Some(value.to_owned()),
        }
        Some(sent)
    }

    fn add(&mut self, name: HeaderName, value: &str) -> Option<()> {
        self.headers.append(name, HeaderValue::from_bytes(value.as_bytes()).ok()?);
        Some(())
    }

    fn facts(&self) -> Facts<'_> {
        let facts = Facts::new(&self.method, &self.target).headers(&self.headers);
        let facts = self.peer.into_iter().fold(facts, Facts::peer);
        self.host.as_deref().into_iter().fold(facts, Facts::host)
    }

    /// Returns the key by which a rule counts the request, unless the request is refused.
    fn key(&self, rule: usize) -> Option<String> {
        let key = gates::key(&GATE, rule, &self.facts())?;
        let explanation = gates::explained(&GATE, &self.facts());
        let is_refused =
            explanation.rules.iter().any(|rule| matches!(rule.state, tollgate_rules::RuleState::Refused(_)));
        (!is_refused).then(|| key.concat())
    }

    fn take(&self) {
        let outcome = GATE.decide_now(&self.facts());
        assert!(outcome.is_some_and(|outcome| outcome.is_allowed()), "{} {}", self.method, self.target);
    }
}

/// Returns the units left of a named key, or `None` if no request can have it.
fn remaining(rule: usize, key: &str) -> Option<u64> {
    let check = GATE.check_by_name(NAMES[rule], &[key.as_bytes()], 0).ok()?;
    let tollgate_rules::Check::Ready(outcome) = check else { panic!("a gate in memory waits") };
    outcome.decision().map(|decision| decision.remaining())
}

/// Gives the key its quota back, so that memory does not fill.
fn reset(rule: usize, key: &str) {
    use std::pin::pin;
    use std::task::{Context, Waker};

    let Ok(resetting) = GATE.reset_by_name(NAMES[rule], &[key.as_bytes()]) else { panic!("{key} is refused by name") };
    assert!(pin!(resetting).poll(&mut Context::from_waker(Waker::noop())).is_ready(), "a gate in memory waits");
}

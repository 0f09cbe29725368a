//! Cookies and queries: a limit counts by the value that a simple parser finds, or refuses the request.

use std::sync::LazyLock;

use http::header::COOKIE;
use http::{HeaderMap, HeaderValue};
use tollgate_rules::{Facts, Gate};

use crate::gates;

/// The name of the cookie and of the query parameter.
const NAME: &str = "sid";

/// The key of a request without the value.
const MISSING: &str = "anonymous";

static GATE: LazyLock<Gate> = LazyLock::new(|| {
    let rules = gates::rules("limits:\n  - { name: a, key: 'cookie:sid' }\n  - { name: b, key: 'query:sid' }\n");
    let Some((gate, _)) = gates::gate(rules) else { panic!("two limits do not fit the memory") };
    gate
});

/// Reads the first line as a query and the others as lines of `Cookie`.
pub fn cookies(input: &[u8]) {
    let mut lines = input.split(|byte| *byte == b'\n');
    let query = lines.next().and_then(|line| std::str::from_utf8(line).ok()).unwrap_or_default();
    let cookies = lines.filter_map(|line| HeaderValue::from_bytes(line).ok());
    let headers: HeaderMap = cookies.map(|line| (COOKIE, line)).collect();
    let target = format!("/?{query}");
    let facts = Facts::new("GET", &target).headers(&headers);
    let Some(outcome) = GATE.decide_now(&facts) else { panic!("memory answers at once") };
    if !outcome.is_allowed() {
        // A request is refused only if the values of a name differ, so there must be several.
        let lines = headers.get_all(COOKIE).iter().map(|line| String::from_utf8_lossy(line.as_bytes()).into_owned());
        let several = lines.chain([decoded(query)]).map(|line| line.matches(NAME).count()).sum::<usize>() > 1;
        assert!(several, "{query} {headers:?}");
        return;
    }
    let by_cookie = by_rule(0, &facts);
    // A simple parser finds every unambiguous value.
    if let Some(value) = cookie(&headers).filter(|value| is_simple(value)) {
        assert_eq!(by_cookie, or_missing(Some(value)), "{headers:?}");
    }
    let by_query = by_rule(1, &facts);
    let form = form_urlencoded::parse(query.as_bytes()).find(|(name, _)| name == NAME);
    if let Some((_, value)) = form.filter(|(_, value)| is_simple(value)) {
        assert_eq!(by_query, or_missing(Some(value.into_owned())), "{query}");
    }
}

fn decoded(query: &str) -> String {
    form_urlencoded::parse(query.replace(['&', '=', ';'], "%20").as_bytes()).map(|(name, _)| name).collect()
}

fn is_simple(value: &str) -> bool {
    value.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

fn by_rule(rule: usize, facts: &Facts<'_>) -> String {
    match gates::key(&GATE, rule, facts).as_deref() {
        Some([part]) => part.clone(),
        other => panic!("a key of one part, not {other:?}"),
    }
}

fn or_missing(found: Option<String>) -> String {
    found.filter(|value| !value.is_empty()).unwrap_or_else(|| MISSING.to_owned())
}

/// Returns the value of the first pair with that name, without the blanks and the pair of quotes around it. Bytes that
/// are not UTF-8 become replacement characters, as in an explanation.
fn cookie(headers: &HeaderMap) -> Option<String> {
    for line in headers.get_all(COOKIE) {
        for pair in line.as_bytes().split(|byte| *byte == b';') {
            let Some(equals) = pair.iter().position(|byte| *byte == b'=') else { continue };
            if pair[..equals].trim_ascii() != NAME.as_bytes() {
                continue;
            }
            let value = pair[equals + 1..].trim_ascii();
            let inner = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
            return Some(String::from_utf8_lossy(inner.unwrap_or(value)).into_owned());
        }
    }
    None
}

//! Cookies and queries: the value that counts is the one that simpler readers find, or the request is refused.

use std::sync::LazyLock;

use http::header::COOKIE;
use http::{HeaderMap, HeaderValue};
use tollgate::Gate;
use tollgate::rules::Facts;

use crate::asking;

/// The name that is looked for in both.
const NAME: &str = "sid";

/// What a request without the value is called.
const MISSING: &str = "anonymous";

static GATE: LazyLock<Gate> = LazyLock::new(|| {
    let rules = asking::rules("limits:\n  - { name: a, key: 'cookie:sid' }\n  - { name: b, key: 'query:sid' }\n");
    let Some((gate, _)) = asking::gate(rules) else { panic!("two limits do not fit the memory") };
    gate
});

/// The first line is a query; the others are lines of `Cookie`.
pub fn cookies(input: &[u8]) {
    let mut lines = input.split(|byte| *byte == b'\n');
    let query = lines.next().and_then(|line| std::str::from_utf8(line).ok()).unwrap_or_default();
    let cookies = lines.filter_map(|line| HeaderValue::from_bytes(line).ok());
    let headers: HeaderMap = cookies.map(|line| (COOKIE, line)).collect();
    let target = format!("/?{query}");
    let facts = Facts::new("GET", &target).headers(&headers);
    let Some(outcome) = GATE.decide_now(&facts) else { panic!("memory answers at once") };
    if !outcome.is_allowed() {
        // Only differing values of a name are refused, so there are several.
        let lines = headers.get_all(COOKIE).iter().map(|line| String::from_utf8_lossy(line.as_bytes()).into_owned());
        let several = lines.chain([decoded(query)]).map(|line| line.matches(NAME).count()).sum::<usize>() > 1;
        assert!(several, "{query} {headers:?}");
        return;
    }
    let by_cookie = by_rule(0, &facts);
    // An unambiguous value is what a simple parser finds.
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
    match asking::key(&GATE, rule, facts).as_deref() {
        Some([part]) => part.clone(),
        other => panic!("a key of one part, not {other:?}"),
    }
}

fn or_missing(found: Option<String>) -> String {
    found.filter(|value| !value.is_empty()).unwrap_or_else(|| MISSING.to_owned())
}

/// The first pair of that name; its value without blanks and one pair of quotes round it. Bytes that are no text are
/// shown as marks, as an explanation shows them.
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

//! CEL expressions: refused with a reason, or evaluated with the same result each time for the same request.

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate_config::RuleFile;
use tollgate_rules::{Facts, Gate, RuleState};

use crate::gates;
use crate::refusals::check_refusal;

/// Reads a text as a condition and as a cost, and evaluates both for a few requests.
pub fn expressions(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    condition(text);
    if let Some(gate) = read(&format!("cost: {}", quoted(text))) {
        // The rule applies even if its cost cannot be computed.
        assert!(requests(&headers()).iter().all(|facts| holds(&gate, facts)), "{text}");
    }
}

fn condition(text: &str) {
    let Some(gate) = when(text) else { return };
    // The line feeds keep a comment in the text from hiding the bracket.
    let negated = when(&format!("!(\n{text}\n)"));
    let or_true = when(&format!("(\n{text}\n) || true"));
    let and_false = when(&format!("(\n{text}\n) && false"));
    for facts in requests(&headers()) {
        let answer = holds(&gate, &facts);
        assert_eq!(holds(&gate, &facts), answer, "{text} has two answers");
        let evaluated = |gate: &Option<Gate>| gate.as_ref().and_then(|gate| evaluated(gate, &facts));
        // An expression that fails matches, and so does its negation.
        let is_true = answer && !has_failed(&gate, &facts);
        assert!(!(is_true && evaluated(&negated) == Some(true)), "{text} holds, and so does its negation");
        assert_ne!(evaluated(&or_true), Some(false), "{text}");
        assert_ne!(evaluated(&and_false), Some(true), "{text}");
    }
}

fn when(text: &str) -> Option<Gate> {
    read(&format!("match: {{ when: {} }}", quoted(text)))
}

/// Returns a gate with one limit, or `None` if the setting is refused, after checking the reasons.
fn read(setting: &str) -> Option<Gate> {
    let text = format!("limits:\n  - name: one\n    capacity: 1000000\n    algorithm: token_bucket\n    {setting}\n");
    match RuleFile::parse("tollgate.yaml", &text) {
        Err(problems) => {
            check_refusal(&problems, &text);
            None
        }
        Ok(file) => match file.compile() {
            Ok(rules) => gates::gate(rules).map(|(gate, _)| gate),
            Err(problems) => panic!("{text} was taken, but is no rule: {problems}"),
        },
    }
}

/// Returns a string in JSON syntax, which YAML reads as the same text.
fn quoted(text: &str) -> String {
    let mut written = String::from('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => written.extend(['\\', letter]),
            ' '..='~' => written.push(letter),
            other => written.push_str(&format!("\\U{:08x}", u32::from(other))),
        }
    }
    written.push('"');
    written
}

/// Returns whether the rule matches the request. The explanation and the decision must agree.
fn holds(gate: &Gate, facts: &Facts<'_>) -> bool {
    let holds = !matches!(gates::explained(gate, facts).rules[0].state, RuleState::NotMatched(_));
    let Some(outcome) = gate.decide_now(facts) else { panic!("a gate in memory waits") };
    assert_eq!(outcome.limit().is_some(), holds, "{outcome:?}");
    holds
}

/// Returns the value of the condition, or `None` if it fails for this request.
fn evaluated(gate: &Gate, facts: &Facts<'_>) -> Option<bool> {
    let holds = holds(gate, facts);
    (!has_failed(gate, facts)).then_some(holds)
}

fn has_failed(gate: &Gate, facts: &Facts<'_>) -> bool {
    !gates::explained(gate, facts).rules[0].failed_expressions.is_empty()
}

fn headers() -> HeaderMap {
    HeaderMap::from_iter([
        (http::header::HOST, HeaderValue::from_static("api.example.com")),
        (HeaderName::from_static("x-beta"), HeaderValue::from_static("1")),
        (HeaderName::from_static("x-cost"), HeaderValue::from_static("17")),
    ])
}

fn requests(headers: &HeaderMap) -> [Facts<'_>; 3] {
    [
        Facts::new("GET", "/"),
        Facts::new("POST", "/api/v1/users?page=2&q=%C3%A9").headers(headers).peer([192, 0, 2, 7].into()),
        Facts::new("GET", "/a%20b").domain("edge").route("r").descriptors(&[("plan", "gold")]),
    ]
}

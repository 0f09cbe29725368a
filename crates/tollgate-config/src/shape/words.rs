//! Messages about the schema: expected types, examples and likely fixes.

use serde_json::Value;

use super::other_limiters::{WrittenRate, written_rate};
use crate::forms;
use crate::node::{NodeKind, Scalar, ScalarValue};
use crate::problem::{InvalidValue, shown};

/// Returns the error for a value of the wrong type.
pub(super) fn wrong_type(name: &str, kind: &NodeKind, choices: &[&Value]) -> InvalidValue {
    let (takes, mut example) = expected(choices);
    if name == "the file" {
        example = "`limits:` first, and a limit under it".into();
    }
    if let (NodeKind::Scalar(scalar), "match") = (kind, name)
        && scalar.text.starts_with('/')
    {
        let path = shown(&scalar.text);
        return InvalidValue {
            problem: format!("`match` must be {takes}, not `{path}`"),
            fix: format!("write `match: {{ path: {path} }}`"),
        };
    }
    if name.ends_with("statuses") {
        example = "statuses from 500 to 599 one by one, such as [502, 503, 504]".into();
    }
    if let NodeKind::Scalar(scalar) = kind
        && let Some(fix) = rate_for_number(name, &scalar.text)
    {
        return InvalidValue { problem: format!("`{name}` must be {takes}, not `{}`", shown(&scalar.text)), fix };
    }
    let name = quoted(name);
    let NodeKind::Scalar(scalar) = kind else {
        let found = if matches!(kind, NodeKind::List(_)) { "a list" } else { "a map" };
        return InvalidValue {
            problem: format!("{name} must be {takes}, not {found}"),
            fix: format!("write {example}"),
        };
    };
    if scalar.value == ScalarValue::Null {
        let fix = match without(&name) {
            Some(effect) => format!("write {example}; {effect}"),
            None => format!("write {example}, or remove the line"),
        };
        return InvalidValue { problem: format!("{name} has no value"), fix };
    }
    let fix = meant(scalar, choices).unwrap_or_else(|| format!("write {example}"));
    let found = shown(&scalar.text);
    let found =
        if fix.starts_with("remove the quotes") { format!("the string \"{found}\"") } else { format!("`{found}`") };
    InvalidValue { problem: format!("{name} must be {takes}, not {found}"), fix }
}

/// Returns the effect of leaving out a key, if that widens a limit more than expected.
pub(super) fn without(name: &str) -> Option<&'static str> {
    match name.trim_matches('`') {
        "key" => Some("without `key`, all requests share one count"),
        "methods" => Some("without `methods`, all methods match"),
        "hosts" => Some("without `hosts`, all hosts match"),
        "path" => Some("without `path`, all paths match"),
        _ => None,
    }
}

/// Returns the fix for a rate in place of a quota.
fn rate_for_number(name: &str, text: &str) -> Option<String> {
    let WrittenRate { rate, count, window } = written_rate(text)?;
    match name {
        "limit" if text.contains("r/") => Some(format!(
            "write `limit: {count}` and `window: {window}`; nginx's `rate` without `burst` is `algorithm: \
             token_bucket`, `capacity: 1` and `refill: {rate}`"
        )),
        "limit" => Some(format!("write `limit: {count}` and `window: {window}`")),
        "capacity" => Some(format!(
            "write the rate as `refill: {rate}`, or `leak: {rate}` for a leaky bucket, and the largest burst in `capacity`"
        )),
        _ => None,
    }
}

/// Returns the likely fix for a scalar of the wrong type.
fn meant(scalar: &Scalar, choices: &[&Value]) -> Option<String> {
    let text = shown(&scalar.text);
    let takes = |kind: &str| choices.iter().find(|choice| super::takes(choice, kind));
    let is_number = matches!(scalar.value, ScalarValue::Integer(_) | ScalarValue::Float(_));
    // A number in quotes is a string.
    let is_quoted = scalar.value == ScalarValue::Text && scalar.verbatim == Some(1);
    if is_quoted && takes("integer").is_some() && matches!(ScalarValue::of_plain(&scalar.text), ScalarValue::Integer(_))
    {
        return Some(format!("remove the quotes: {text}"));
    }
    if is_quoted && takes("boolean").is_some() && matches!(&*scalar.text, "true" | "false") {
        return Some(format!("remove the quotes: {text}"));
    }
    if let Some(choice) = takes("string").filter(|choice| listed_in(choice).is_empty()) {
        return match choice.get("format").and_then(Value::as_str) {
            Some("span") if is_number => Some(format!("add the unit: {text}s for seconds, {text}ms for milliseconds")),
            Some("rate") if is_number => {
                Some(format!("add the unit: {text}/s for each second, {text}/m for each minute"))
            }
            Some("bytes") if is_number => Some(format!("add the unit: {text}B for bytes")),
            Some("address") if is_number => Some(format!("write 127.0.0.1:{text}")),
            Some("key-part") => {
                Some(format!("write ip, header:NAME or another part, or const:{text} for one shared count"))
            }
            None | Some("limit-name" | "cel") => Some(format!("put it in quotes: \"{text}\"")),
            _ => None,
        };
    }
    if takes("integer").is_some() {
        let digits: String = scalar.text.chars().filter(|letter| !matches!(letter, '_' | ',' | ' ' | '\'')).collect();
        let plain = !digits.is_empty() && digits.len() <= 10 && digits.bytes().all(|byte| byte.is_ascii_digit());
        return plain.then(|| format!("write {digits}"));
    }
    if takes("boolean").is_some() {
        return match scalar.text.to_lowercase().as_str() {
            "yes" | "on" | "y" | "1" => Some("write true".into()),
            "no" | "off" | "n" | "0" => Some("write false".into()),
            _ => None,
        };
    }
    if let Some(list) = takes("array") {
        let items = list.get("items");
        let of_maps = items.is_some_and(|items| items.get("$ref").is_some());
        let of_numbers = items.is_some_and(|items| super::takes(items, "integer"));
        let fits = !of_numbers || matches!(scalar.value, ScalarValue::Integer(_));
        return (!of_maps && fits).then(|| format!("write [{text}]"));
    }
    None
}

/// Returns the expected types and an example.
pub(super) fn expected(choices: &[&Value]) -> (String, String) {
    let words: Vec<&str> = choices.iter().flat_map(|choice| listed_in(choice)).collect();
    let mut kinds: Vec<String> = Vec::new();
    let mut example = None;
    if !words.is_empty() {
        kinds.push(format!("one of {}", listed(&words)));
        example = Some(format!("one of {}", listed(&words)));
    }
    let learns = |choice: &Value| choice.get("properties").is_some_and(|keys| keys.get("learn").is_some());
    for choice in choices.iter().filter(|choice| listed_in(choice).is_empty()) {
        // A plain number is what most limits have.
        if choices.len() > 1 && learns(choice) {
            continue;
        }
        let syntax = choice.get("format").and_then(Value::as_str).and_then(forms::by_format);
        let (kind, good) = match (syntax, choice.get("type").and_then(Value::as_str)) {
            (Some(syntax), _) => (syntax.noun.to_owned(), format!("{} such as {}", syntax.noun, syntax.example)),
            (None, Some("integer")) => ("a whole number".into(), "a whole number such as 10".into()),
            (None, Some("number")) => ("a number".into(), "a number such as 0.999".into()),
            (None, Some("boolean")) => ("true or false".into(), "true or false".into()),
            (None, Some("array")) => {
                ("a list".into(), "a list, with each entry on a line after `- `, or in [ ]".into())
            }
            (None, Some("object")) => ("a map".into(), "keys and values under it, one per line".into()),
            _ => ("a string".into(), "a string".into()),
        };
        kinds.push(kind);
        example.get_or_insert(good);
    }
    (kinds.join(" or "), example.unwrap_or_default())
}

/// Returns a valid value of a schema.
pub(super) fn literal(schema: &Value) -> Option<String> {
    let syntax = schema.get("format").and_then(Value::as_str).and_then(forms::by_format);
    listed_in(schema).first().map(|word| (*word).to_owned()).or_else(|| syntax.map(|syntax| syntax.example.to_owned()))
}

/// Returns a value in YAML flow style.
pub(super) fn flow(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Object(map) => {
            let entries: Vec<String> = map.iter().map(|(key, value)| format!("{key}: {}", flow(value))).collect();
            format!("{{ {} }}", entries.join(", "))
        }
        Value::Array(items) => format!("[{}]", items.iter().map(flow).collect::<Vec<_>>().join(", ")),
        other => other.to_string(),
    }
}

/// Returns the words of an enumeration.
pub(super) fn listed_in(schema: &Value) -> Vec<&str> {
    let words = schema.get("enum").and_then(Value::as_array);
    words.into_iter().flatten().chain(schema.get("const")).filter_map(Value::as_str).collect()
}

/// Returns the fix for a word that a key does not have.
pub(super) fn use_one_of(words: &[&str], choices: &[&Value]) -> String {
    let words = if let [only] = words { format!("use {only}") } else { format!("use one of {}", listed(words)) };
    let list = choices.iter().filter(|choice| super::takes(choice, "array"));
    match list.filter_map(|list| list.get("examples")?.get(0)).next() {
        Some(example) => format!("{words}, or a list such as {}", flow(example)),
        None => words,
    }
}

/// Returns a key with its value: workers 0, entry 404 of `statuses`.
pub(super) fn valued(name: &str, value: &str) -> String {
    match name.strip_prefix("an entry of ") {
        Some(list) => format!("entry {} of {}", shown(value), quoted(list)),
        None => format!("{} {}", shown(name), shown(value)),
    }
}

/// Returns whether a schema is a list that can contain this string.
pub(super) fn lists(schema: &Value, text: &str) -> bool {
    let entries = schema.get("items").and_then(|items| items.get("anyOf")).and_then(Value::as_array);
    let formats = entries.into_iter().flatten().filter_map(|entry| entry.get("format")?.as_str());
    formats.filter_map(forms::by_format).any(|syntax| (syntax.check)(text).is_ok())
}

/// Joins words in alphabetical order. The order of the schema depends on the map type of serde_json.
pub(super) fn listed(words: &[&str]) -> String {
    let mut words = words.to_vec();
    words.sort_unstable();
    words.join(", ")
}

/// Quotes the name of a key for a message: `limit`, the file, an entry of `headers`.
pub(super) fn quoted(name: &str) -> String {
    match name.rsplit_once("entry of ") {
        Some((article, list)) => format!("{article}entry of {}", quoted(list)),
        None if name == "the file" => name.to_owned(),
        None => format!("`{}`", shown(name)),
    }
}

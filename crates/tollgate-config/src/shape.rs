//! Checks a file against the schema: known keys, types, and the syntax of strings.
//!
//! Invalid values are reported and removed, so that the rest can still be read and checked. Supports only the part of
//! JSON Schema that our types generate.

mod other_limiters;
mod words;

use serde_json::Value;

use self::other_limiters::Siblings;
pub(super) use self::other_limiters::rate_text;
use self::words::{expected, listed, quoted, wrong_type};
use super::forms::{self, Pattern, Syntax};
use super::node::{Entry, Map, Node, NodeKind, ScalarValue};
use super::problem::{Findings, InvalidValue, Position, shown};

/// Returns the part of the file that fits the schema.
pub(super) fn check(root: Node, schema: &Value, findings: &mut Findings) -> Option<Node> {
    Shape { root: schema, findings }.node(root, schema, "the file")
}

struct Shape<'s, 'f> {
    root: &'s Value,
    findings: &'f mut Findings,
}

impl<'s> Shape<'s, '_> {
    fn node(&mut self, node: Node, schema: &'s Value, name: &str) -> Option<Node> {
        if self.findings.is_full() {
            return None;
        }
        let choices = self.choices(schema);
        let kind = type_of(&node.kind);
        let Some(choice) = choices.iter().copied().find(|choice| takes(choice, kind)) else {
            let InvalidValue { problem, fix } = wrong_type(name, &node.kind, &choices);
            self.findings.error(node.at, problem, fix);
            return None;
        };
        let Node { at, kind } = node;
        let kind = match kind {
            NodeKind::Map(map) => NodeKind::Map(self.map(map, at, choice, name)?),
            NodeKind::List(items) => NodeKind::List(self.list(items, at, choice, name)?),
            NodeKind::Scalar(scalar) => {
                let invalid = match scalar.value {
                    ScalarValue::Integer(value) => integer(value, choice, name).err(),
                    ScalarValue::Text
                        if choice.get("format").and_then(Value::as_str) == Some(Pattern::SYNTAX.format) =>
                    {
                        Pattern::read_within(&scalar.text, &mut self.findings.patterns).err()
                    }
                    ScalarValue::Text => text(&scalar.text, choice, &choices, name).err(),
                    _ => None,
                };
                if let Some(InvalidValue { problem, fix }) = invalid {
                    self.findings.error(at, problem, fix);
                    return None;
                }
                NodeKind::Scalar(scalar)
            }
        };
        Some(Node { at, kind })
    }

    /// Returns the alternatives of a schema, with references resolved.
    fn choices(&self, schema: &'s Value) -> Vec<&'s Value> {
        let schema = self.resolved(schema);
        let choices = schema.get("anyOf").or_else(|| schema.get("oneOf")).and_then(Value::as_array);
        match choices {
            Some(choices) => choices.iter().flat_map(|choice| self.choices(choice)).collect(),
            None => vec![schema],
        }
    }

    fn resolved(&self, schema: &'s Value) -> &'s Value {
        let name = schema.get("$ref").and_then(Value::as_str).and_then(|name| name.strip_prefix("#/$defs/"));
        name.and_then(|name| self.root.get("$defs")?.get(name)).unwrap_or(schema)
    }

    fn map(&mut self, map: Map, at: Position, schema: &'s Value, name: &str) -> Option<Map> {
        self.check_count(map.entries.len(), (schema, "maxProperties"), at, name)?;
        let mut kept = Map::default();
        let siblings = Siblings::of(&map);
        for Entry { key, key_at, value } in map.entries {
            if self.findings.is_full() {
                return None;
            }
            let Some(schema_of_value) = property(schema, &key) else {
                if !is_ignored(schema, &key) {
                    kept.lost.extend(self.unknown_key(&key, (key_at, &value), &siblings, schema));
                }
                continue;
            };
            if let Some(names) = schema.get("propertyNames")
                && let Err(InvalidValue { problem, fix }) = text(&key, names, &[], &key)
            {
                self.findings.error(key_at, problem, fix);
                continue;
            }
            if let Some(fix) = other_limiters::algorithm(&key, &value, &siblings) {
                let problem = format!("`{}` is not a value of `{key}`", shown(siblings.get(&key).unwrap_or_default()));
                self.findings.error(value.at, problem, fix);
                kept.lost.push(key);
                continue;
            }
            match self.node(value, schema_of_value, &key) {
                Some(value) => kept.entries.push(Entry { key, key_at, value }),
                None => kept.lost.push(key),
            }
        }
        let required = schema.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let mut whole = true;
        for name in required.iter().filter_map(Value::as_str) {
            if kept.entries.iter().any(|entry| entry.key == name) {
                continue;
            }
            whole = false;
            if !kept.lost.iter().any(|lost| lost == name) {
                let fix = property(schema, name).map_or_else(String::new, |schema| self.addition(name, schema));
                self.findings.error(at, format!("`{name}` is missing"), fix);
            }
        }
        whole.then_some(kept)
    }

    /// Reports a key that the schema does not have, and returns the one that was probably meant.
    fn unknown_key(
        &mut self,
        key: &str,
        (at, value): (Position, &Node),
        siblings: &Siblings,
        schema: &'s Value,
    ) -> Option<String> {
        let problem = format!("unknown key `{}`", shown(key));
        if let Some(known) = other_limiters::key(key, value, siblings, schema) {
            self.findings.error(at, problem, known.fix);
            return known.ours.map(str::to_owned);
        }
        let known: Vec<&str> = properties(schema).map(|(name, _)| name).collect();
        let near = forms::nearest(key, known.iter().copied());
        let has_key = |inner: &'s Value| {
            let choices = self.choices(inner);
            choices.iter().any(|choice| choice.get("properties").is_some_and(|inner| inner.get(key).is_some()))
        };
        let mut homes: Vec<&str> =
            properties(schema).filter(|(_, inner)| has_key(inner)).map(|(name, _)| name).collect();
        homes.sort_unstable();
        let (problem, fix) = match (homes.as_slice(), near) {
            ([home], _) => (problem, format!("move it under `{home}`")),
            ([], Some(near)) => {
                (format!("{problem} (known here: {})", listed(&known)), format!("did you mean `{near}`?"))
            }
            ([], None) => (problem, format!("use one of {}", listed(&known))),
            // A guess between them would change the effect of the file.
            (several, _) => (problem, format!("move it under `{}`", several.join("` or `"))),
        };
        self.findings.error(at, problem, fix);
        near.map(str::to_owned)
    }

    fn list(&mut self, items: Vec<Node>, at: Position, schema: &'s Value, name: &str) -> Option<Vec<Node>> {
        if items.is_empty() && schema.get("minItems").is_some() {
            let fix = match words::without(name) {
                Some(effect) => format!("add an entry; {effect}"),
                None => "add an entry, or remove the line".to_owned(),
            };
            self.findings.error(at, format!("`{name}` is an empty list"), fix);
            return None;
        }
        self.check_count(items.len(), (schema, "maxItems"), at, name)?;
        let Some(schema) = schema.get("items") else { return Some(items) };
        let name = format!("an entry of {name}");
        let before = items.len();
        let kept: Vec<Node> = items.into_iter().filter_map(|item| self.node(item, schema, &name)).collect();
        // A list of conditions without its invalid entries has another meaning. Limits, routes and overrides are
        // independent of each other.
        let stands_alone = self.choices(schema).iter().any(|choice| takes(choice, "object"));
        (stands_alone || kept.len() == before).then_some(kept)
    }

    /// Reports a list or a map with more entries than the schema allows.
    fn check_count(&mut self, count: usize, (schema, key): (&Value, &str), at: Position, name: &str) -> Option<()> {
        let most = schema.get(key).and_then(Value::as_u64).filter(|most| count as u64 > *most);
        let Some(most) = most else { return Some(()) };
        let message = format!("`{name}` has {count} entries, more than {most}");
        self.findings.error(at, message, format!("use {most} or fewer"));
        None
    }

    /// Returns the fix for a key that is missing.
    fn addition(&self, name: &str, schema: &'s Value) -> String {
        let examples = schema.get("examples").or_else(|| self.resolved(schema).get("examples"));
        let given = examples.and_then(|examples| examples.get(0));
        if let Some(given) = given {
            return format!("add `{name}: {}`", words::flow(given));
        }
        let choices = self.choices(schema);
        match choices.first().and_then(|choice| words::literal(choice)) {
            Some(example) => format!("add `{name}: {example}`"),
            None => format!("add `{name}`, {}", expected(&choices).0),
        }
    }
}

/// Returns whether a key is ignored: one that starts with `x-` at the top level, for YAML anchors.
fn is_ignored(schema: &Value, key: &str) -> bool {
    schema.get("patternProperties").is_some() && key.starts_with("x-")
}

fn properties(schema: &Value) -> impl Iterator<Item = (&str, &Value)> {
    schema.get("properties").and_then(Value::as_object).into_iter().flatten().map(|(name, schema)| (&**name, schema))
}

fn property<'s>(schema: &'s Value, key: &str) -> Option<&'s Value> {
    let named = schema.get("properties").and_then(|properties| properties.get(key));
    named.or_else(|| schema.get("additionalProperties").filter(|schema| schema.is_object()))
}

fn type_of(kind: &NodeKind) -> &'static str {
    match kind {
        NodeKind::List(_) => "array",
        NodeKind::Map(_) => "object",
        NodeKind::Scalar(scalar) => match scalar.value {
            ScalarValue::Null => "null",
            ScalarValue::Bool(_) => "boolean",
            ScalarValue::Integer(_) => "integer",
            ScalarValue::Float(_) => "number",
            ScalarValue::Text => "string",
        },
    }
}

fn takes(schema: &Value, kind: &str) -> bool {
    match schema.get("type").and_then(Value::as_str) {
        Some("number") => matches!(kind, "number" | "integer"),
        known => known == Some(kind),
    }
}

/// Checks that a number is within the bounds of its key.
fn integer(value: i128, schema: &Value, name: &str) -> Result<(), InvalidValue> {
    let bound = |key: &str| schema.get(key).and_then(Value::as_u64).map(i128::from);
    let (least, most) = (bound("minimum").unwrap_or(0), bound("maximum").unwrap_or(u32::MAX.into()));
    // `meaning` checks units and segments together with the limit that they are for.
    let allowed = match schema.get("format").and_then(Value::as_str) {
        Some("uint64") => 0..=u64::MAX.into(),
        Some("uint32") if name == "segments" => 0..=u32::MAX.into(),
        _ => least..=most,
    };
    if schema.get("type").is_some_and(|kind| kind == "number") || allowed.contains(&value) {
        return Ok(());
    }
    let (problem, fix) = if value < *allowed.start() {
        (format!("below {}", allowed.start()), format!("use {least} or more"))
    } else {
        (format!("above {most}"), format!("use {most} or less"))
    };
    let fix = match name {
        "weight" if value == 0 => "use 1 or more, or remove the upstream".to_owned(),
        "an entry of count" => format!("use {least} to {most}, or a class such as 5xx"),
        _ if least > 1 => format!("use {least} to {most}"),
        _ => fix,
    };
    Err(InvalidValue { problem: format!("{} is {problem}", words::valued(name, &value.to_string())), fix })
}

/// Checks that a duration or a size is within the bounds of its key.
fn quantity(text: &str, syntax: &Syntax, schema: &Value, name: &str) -> Result<(), InvalidValue> {
    let Some(magnitude) = forms::magnitude(syntax.format, text) else { return Ok(()) };
    let bound = |key: &str| {
        let text = schema.get(key).and_then(Value::as_str)?;
        Some((text, forms::magnitude(syntax.format, text)?))
    };
    let (problem, fix) = match (bound("formatMinimum"), bound("formatMaximum")) {
        (Some((least, bound)), _) if magnitude < bound => (format!("below {least}"), format!("use {least} or more")),
        (_, Some((most, bound))) if magnitude > bound => (format!("above {most}"), format!("use {most} or less")),
        _ => return Ok(()),
    };
    Err(InvalidValue { problem: format!("{} is {problem}", words::valued(name, text)), fix })
}

/// Checks that a string is one of the listed words, or has the required syntax.
fn text(text: &str, schema: &Value, choices: &[&Value], name: &str) -> Result<(), InvalidValue> {
    let words: Vec<&str> = choices.iter().flat_map(|choice| words::listed_in(choice)).collect();
    if !words.is_empty() {
        if words.contains(&text) {
            return Ok(());
        }
        let fix = match (other_limiters::word(name, text), forms::nearest(text, words.iter().copied())) {
            (Some(fix), _) => fix.to_owned(),
            _ if choices.iter().any(|choice| words::lists(choice, text)) => format!("write [{text}]"),
            (None, Some(near)) => format!("did you mean `{near}`?"),
            (None, None) => words::use_one_of(&words, choices),
        };
        let role = if name.starts_with("an ") { quoted(name) } else { format!("a value of {}", quoted(name)) };
        return Err(InvalidValue { problem: format!("`{}` is not {role}", shown(text)), fix });
    }
    let format = schema.get("format").and_then(Value::as_str);
    match format.and_then(forms::by_format) {
        Some(syntax) => (syntax.check)(text).and_then(|()| quantity(text, syntax, schema, name)),
        None if text.is_empty() => Err(InvalidValue {
            problem: format!("{} is empty", quoted(name)),
            fix: "write a value, or remove the line".into(),
        }),
        None => Ok(()),
    }
}

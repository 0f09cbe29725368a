//! A YAML document as a tree, with the position of each part.
//!
//! Scalars have the type that YAML 1.2 gives them: `5` is a number and `"5"` is a string. Deliberately not here: the
//! meaning of keys and values.

use serde_json::{Map as JsonMap, Number, Value};

use super::problem::Position;

#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) at: Position,
    pub(super) kind: NodeKind,
}

#[derive(Clone, Debug)]
pub(super) enum NodeKind {
    Scalar(Scalar),
    List(Vec<Node>),
    Map(Map),
}

#[derive(Clone, Debug)]
pub(super) struct Scalar {
    pub(super) text: String,
    pub(super) value: ScalarValue,
    /// The offset of the text from the position in characters, if it is written without escapes.
    pub(super) verbatim: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ScalarValue {
    Null,
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Map {
    pub(super) entries: Vec<Entry>,
    /// Keys whose values were rejected and removed. They must not be reported as missing.
    pub(super) lost: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) key_at: Position,
    pub(super) value: Node,
}

impl Node {
    /// Returns the value of a key.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        Some(&self.entry(key)?.value)
    }

    /// Returns the position of a key, or of the node if the key is missing.
    pub(super) fn key_at(&self, key: &str) -> Position {
        self.entry(key).map_or(self.at, |entry| entry.key_at)
    }

    /// Returns the position of the value of a key, or of the node if the key is missing.
    pub(super) fn value_at(&self, key: &str) -> Position {
        self.get(key).map_or(self.at, |value| value.at)
    }

    /// Returns whether the file has a key, even if its value was rejected.
    pub(super) fn mentions(&self, key: &str) -> bool {
        self.entry(key).is_some() || self.lost(key)
    }

    /// Returns the keys of a map, also those whose values were rejected.
    pub(super) fn keys(&self) -> impl Iterator<Item = &str> {
        let map = if let NodeKind::Map(map) = &self.kind { Some(map) } else { None };
        map.into_iter().flat_map(|map| map.entries.iter().map(|entry| &entry.key).chain(&map.lost)).map(String::as_str)
    }

    /// Returns whether the value of a key was rejected.
    pub(super) fn lost(&self, key: &str) -> bool {
        matches!(&self.kind, NodeKind::Map(map) if map.lost.iter().any(|lost| lost == key))
    }

    /// Returns the items of the list under a key. A single value counts as a list of one.
    pub(super) fn items(&self, key: &str) -> &[Self] {
        match self.get(key) {
            Some(Self { kind: NodeKind::List(items), .. }) => items,
            Some(single) => std::slice::from_ref(single),
            None => &[],
        }
    }

    /// Returns an item of a list. A single value counts as a list of one.
    pub(super) fn item(&self, index: usize) -> &Self {
        match &self.kind {
            NodeKind::List(items) => items.get(index).unwrap_or(self),
            _ => self,
        }
    }

    /// Returns the position of a character of a string, or of the string if it is written with escapes.
    pub(super) fn letter_at(&self, offset: usize) -> Position {
        match &self.kind {
            NodeKind::Scalar(Scalar { verbatim: Some(start), .. }) => {
                let offset = u32::try_from(offset).unwrap_or(0);
                Position { column: self.at.column.saturating_add(*start).saturating_add(offset), ..self.at }
            }
            _ => self.at,
        }
    }

    fn entry(&self, key: &str) -> Option<&Entry> {
        match &self.kind {
            NodeKind::Map(map) => map.entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    /// Returns the number of values in the node, and the depth of its nesting.
    pub(super) fn extent(&self) -> (usize, usize) {
        let add = |(size, depth): (usize, usize), node: &Self| {
            let inner = node.extent();
            (size + inner.0, depth.max(inner.1 + 1))
        };
        match &self.kind {
            NodeKind::Scalar(_) => (1, 0),
            NodeKind::List(items) => items.iter().fold((1, 1), add),
            NodeKind::Map(map) => map.entries.iter().map(|entry| &entry.value).fold((1, 1), add),
        }
    }

    /// Returns the value without positions.
    pub(super) fn to_json(&self) -> Value {
        match &self.kind {
            NodeKind::Scalar(scalar) => scalar.to_json(),
            NodeKind::List(items) => Value::Array(items.iter().map(Self::to_json).collect()),
            NodeKind::Map(map) => {
                let entries = map.entries.iter().map(|entry| (entry.key.clone(), entry.value.to_json()));
                Value::Object(entries.collect::<JsonMap<_, _>>())
            }
        }
    }
}

impl Scalar {
    fn to_json(&self) -> Value {
        let text = || Value::String(self.text.clone());
        match self.value {
            ScalarValue::Null => Value::Null,
            ScalarValue::Bool(value) => Value::Bool(value),
            ScalarValue::Integer(value) => Number::from_i128(value).map_or_else(text, Value::Number),
            ScalarValue::Float(value) => Number::from_f64(value).map_or_else(text, Value::Number),
            ScalarValue::Text => text(),
        }
    }
}

impl ScalarValue {
    /// Returns the type of a plain scalar by the core schema of YAML 1.2.
    pub(super) fn of_plain(text: &str) -> Self {
        match text {
            "" | "~" | "null" | "Null" | "NULL" => return Self::Null,
            "true" | "True" | "TRUE" => return Self::Bool(true),
            "false" | "False" | "FALSE" => return Self::Bool(false),
            _ => {}
        }
        let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
        if let Some(value) = based(text, "0x", 16).or_else(|| based(text, "0o", 8)) {
            return Self::Integer(value);
        }
        if !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) {
            // A larger number is out of range for every key.
            let size = digits.parse::<i128>().unwrap_or(i128::MAX);
            return Self::Integer(if text.starts_with('-') { -size } else { size });
        }
        if digits.starts_with(|first: char| first.is_ascii_digit() || first == '.')
            && digits.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'.' | b'e' | b'E' | b'-' | b'+'))
            && let Ok(value) = text.parse::<f64>()
        {
            return Self::Float(value);
        }
        Self::Text
    }
}

fn based(text: &str, prefix: &str, radix: u32) -> Option<i128> {
    let digits = text.strip_prefix(prefix)?;
    let all_digits = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
    all_digits.then(|| i128::from_str_radix(digits, radix).unwrap_or(i128::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_scalars_have_the_types_of_yaml_1_2() {
        let cases = [
            ("5", ScalarValue::Integer(5)),
            ("-5", ScalarValue::Integer(-5)),
            ("007", ScalarValue::Integer(7)),
            ("0x1F", ScalarValue::Integer(31)),
            ("0o17", ScalarValue::Integer(15)),
            ("1.5", ScalarValue::Float(1.5)),
            ("1e3", ScalarValue::Float(1000.0)),
            ("~", ScalarValue::Null),
            ("true", ScalarValue::Bool(true)),
            ("yes", ScalarValue::Text),
            ("10_000", ScalarValue::Text),
            ("10/s", ScalarValue::Text),
            ("127.0.0.1", ScalarValue::Text),
            ("1m", ScalarValue::Text),
            ("-", ScalarValue::Text),
            ("0x", ScalarValue::Text),
        ];
        for (text, value) in cases {
            assert_eq!(ScalarValue::of_plain(text), value, "{text}");
        }
    }
}

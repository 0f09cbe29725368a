//! What YAML says, with the position of each part.
//!
//! A tree of texts, lists and maps, before anyone has asked what they mean. Scalars are what YAML 1.2 takes them
//! for: `5` is a number and `"5"` is text.

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
    /// How many characters after the position the text begins, if it stands there letter for letter.
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
    /// Keys whose values were refused and taken out. Nothing may be concluded from their absence.
    pub(super) lost: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) key_at: Position,
    pub(super) value: Node,
}

impl Node {
    /// The value under a key.
    pub(super) fn get(&self, key: &str) -> Option<&Self> {
        Some(&self.entry(key)?.value)
    }

    /// Where a key stands, or else the whole.
    pub(super) fn key_at(&self, key: &str) -> Position {
        self.entry(key).map_or(self.at, |entry| entry.key_at)
    }

    /// Where the value of a key stands, or else the whole.
    pub(super) fn value_at(&self, key: &str) -> Position {
        self.get(key).map_or(self.at, |value| value.at)
    }

    /// Whether a key is there, or was there and was refused.
    pub(super) fn mentions(&self, key: &str) -> bool {
        self.entry(key).is_some() || self.lost(key)
    }

    /// Whether the value of a key was refused.
    pub(super) fn lost(&self, key: &str) -> bool {
        matches!(&self.kind, NodeKind::Map(map) if map.lost.iter().any(|lost| lost == key))
    }

    /// An item of a list; a value that is no list is the one item of its own.
    pub(super) fn item(&self, index: usize) -> &Self {
        match &self.kind {
            NodeKind::List(items) => items.get(index).unwrap_or(self),
            _ => self,
        }
    }

    /// Where a character of a text stands: exactly, if the text is written as it is read.
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

    /// How many values it is, and how deep they go.
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

    /// The same without positions.
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
    /// What a text without quotes is, by the core schema of YAML 1.2.
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
            // Beyond an i128 it is too large for everything, however large it is.
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
    fn plain_texts_are_what_yaml_takes_them_for() {
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

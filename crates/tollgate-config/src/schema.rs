//! The JSON Schema of the rule file, generated from its types.

use std::sync::LazyLock;

use schemars::Schema;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use serde_json::{Map, Value};

use super::types::RuleFile;

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let settings = SchemaSettings::draft2020_12().with_transform(RecursiveTransform(finish));
    settings.into_generator().into_root_schema_for::<RuleFile>().to_value()
});

/// Returns the JSON Schema of the rule file, for editors. It is checked in as `docs/tollgate.schema.json`.
#[must_use]
pub fn schema() -> Value {
    SCHEMA.clone()
}

pub(super) fn borrowed() -> &'static Value {
    &SCHEMA
}

/// Removes `null` from optional fields: `key:` without a value is more likely an unfinished line than an omitted field.
fn finish(schema: &mut Schema) {
    let Some(object) = schema.as_object_mut() else { return };
    if let Some(Value::Array(types)) = object.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = types.as_slice() {
            let only = only.clone();
            object.insert("type".into(), only);
        }
    }
    if object.get("default") == Some(&Value::Null) {
        object.remove("default");
    }
    collapse(object);
    // A string without a syntax must not be empty.
    let is_text = object.get("type").is_some_and(|kind| kind == "string");
    if is_text && !["format", "enum", "const"].iter().any(|key| object.contains_key(*key)) {
        object.insert("minLength".into(), 1.into());
    }
}

/// Replaces `anyOf` of a schema and null by the schema.
fn collapse(object: &mut Map<String, Value>) {
    let Some(Value::Array(choices)) = object.get_mut("anyOf") else { return };
    choices.retain(|choice| choice.get("type") != Some(&"null".into()));
    let [Value::Object(only)] = choices.as_slice() else { return };
    let only = only.clone();
    object.remove("anyOf");
    for (key, value) in only {
        object.entry(key).or_insert(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forms::magnitude;

    /// Returns every schema that bounds a duration or a size.
    fn bounded(schema: &Value) -> Vec<&Map<String, Value>> {
        match schema {
            Value::Object(object) => {
                let has_bound = object.contains_key("formatMinimum") || object.contains_key("formatMaximum");
                object.values().flat_map(bounded).chain(has_bound.then_some(object)).collect()
            }
            Value::Array(values) => values.iter().flat_map(bounded).collect(),
            _ => Vec::new(),
        }
    }

    /// A bound that cannot be read would be no bound.
    #[test]
    fn every_bound_can_be_read() {
        let root = borrowed();
        let all = bounded(root);
        assert!(all.len() > 10, "only {} bounds", all.len());
        for schema in all {
            let target = schema.get("$ref").and_then(Value::as_str).and_then(|path| root.pointer(&path[1..]));
            let format = schema.get("format").or_else(|| target?.get("format")).and_then(Value::as_str);
            let format = format.unwrap_or_else(|| panic!("a bound without a syntax: {schema:?}"));
            let read = |text: &Value| magnitude(format, text.as_str().expect("a bound is text"));
            let bound = |key: &str| schema.get(key).map(read);
            let bounds = [bound("formatMinimum"), bound("formatMaximum")];
            assert!(bounds.iter().flatten().all(Option::is_some), "{schema:?}");
            if let [Some(Some(least)), Some(Some(most))] = bounds {
                assert!(least < most, "{schema:?}");
            }
        }
    }
}

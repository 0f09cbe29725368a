//! The JSON Schema of the rule file, generated from its types.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value};

use super::types::RuleFile;

static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let generator = SchemaSettings::draft2020_12().into_generator();
    let mut schema = generator.into_root_schema_for::<RuleFile>().to_value();
    finish(&mut schema);
    schema
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
fn finish(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
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
            object.values_mut().for_each(finish);
        }
        Value::Array(values) => values.iter_mut().for_each(finish),
        _ => {}
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

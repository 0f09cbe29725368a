//! The rule files in the documentation are valid, and the reference names every key.

use std::collections::BTreeSet;

use serde_json::Value;
use tollgate_config::RuleFile;

use super::{pages, parts, read};

#[test]
fn every_rule_file_is_valid() {
    let mut count = 0;
    for (name, page) in pages() {
        for block in parts(&page).0.iter().filter(|block| block.language == "yaml") {
            let text = block.text;
            let file =
                RuleFile::parse("tollgate.yaml", text).unwrap_or_else(|problems| panic!("{name}\n{text}\n{problems}"));
            let warnings = file.warnings().to_string();
            // An excerpt that shows another part of the file may have no limits.
            let others: Vec<&str> = warnings.lines().filter(|line| !line.contains("there are no limits")).collect();
            assert!(others.is_empty(), "{name}\n{text}\n{warnings}");
            count += 1;
        }
    }
    assert!(count > 40, "{count} rule files");
}

/// Adds the names of all properties in a JSON Schema.
fn add_keys(schema: &Value, keys: &mut BTreeSet<String>) {
    match schema {
        Value::Object(map) => {
            if let Some(Value::Object(properties)) = map.get("properties") {
                keys.extend(properties.keys().cloned());
            }
            map.values().for_each(|value| add_keys(value, keys));
        }
        Value::Array(list) => list.iter().for_each(|value| add_keys(value, keys)),
        _ => {}
    }
}

#[test]
fn reference_describes_every_key() {
    let schema: Value = serde_json::from_str(&read("docs/tollgate.schema.json")).unwrap();
    let mut keys = BTreeSet::new();
    add_keys(&schema, &mut keys);
    assert!(keys.len() > 100, "{keys:?}");
    let page = read("docs/rules.md");
    // A row of a table describes the keys in its first cell, such as `timeouts.head`.
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let cells = rows.filter_map(|row| row.split(" | ").next());
    let described: BTreeSet<&str> =
        cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).flat_map(|span| span.split('.')).collect();
    let missing: Vec<&String> = keys.iter().filter(|key| !described.contains(key.as_str())).collect();
    assert!(missing.is_empty(), "docs/rules.md has no row for {missing:?}");
}

//! The JSON Schema is generated from the types, is checked in, and rejects the same files.

use std::path::Path;

use serde_json::Value;
use tollgate_config as file;

use crate::{good, messages};

/// `UPDATE_SCHEMA=1 cargo test -p tollgate-config --all-features --test rule_file` writes it anew.
#[test]
fn the_schema_that_is_checked_in_is_the_one_of_the_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tollgate.schema.json");
    let generated = file::schema();
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&path, format!("{generated:#}\n")).unwrap();
    }
    let checked_in: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert!(checked_in == generated, "docs/tollgate.schema.json is stale; run this test with UPDATE_SCHEMA=1");
}

#[test]
fn an_editor_takes_the_files_that_we_take() {
    let schema = jsonschema::validator_for(&file::schema()).unwrap();
    for text in good::FILES {
        let errors: Vec<String> = schema.iter_errors(&json(text)).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{errors:?}\n{text}");
    }
}

#[test]
fn an_editor_refuses_the_shapes_that_we_refuse() {
    let schema = jsonschema::validator_for(&file::schema()).unwrap();
    for text in messages::SHAPES {
        assert!(!schema.is_valid(&json(text)), "{text}");
    }
}

/// Reads YAML as JSON with another parser.
fn json(text: &str) -> Value {
    let options = serde_saphyr::options! { strict_booleans: true };
    serde_saphyr::from_str_with_options(text, options).expect("is YAML")
}

//! `/openapi.json`: the served document is the one in `docs`, and its paths exist.

use std::path::Path;

use serde_json::Value;
use testkit::http1::{Connection, Response};
use testkit::service::Server;

/// Set to write the served document to `docs/openapi.json`.
const UPDATE: &str = "UPDATE_SCHEMA";

fn send(connection: &mut Connection, method: &str, path: &str) -> Response {
    connection.send(format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n\r\n"));
    connection.receive()
}

#[test]
fn served_document_is_the_documented_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/openapi.json");
    let server = Server::start();
    let response = send(&mut server.connect(), "GET", "/openapi.json");
    assert_eq!(response.status, 200);
    assert_eq!(response.json()["openapi"], "3.1.0");
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, response.text()).expect("docs is writable");
    }
    let documented = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(response.text(), documented, "run this test with {UPDATE}=1 to update docs/openapi.json");
}

#[test]
fn every_documented_path_and_method_is_served() {
    let server = Server::start();
    let document = send(&mut server.connect(), "GET", "/openapi.json").json();
    let paths = document["paths"].as_object().expect("paths");
    for (path, item) in paths {
        // HEAD has a `content-length` without a body, which the client here does not expect.
        let methods =
            item.as_object().expect("a path").keys().filter(|name| !["parameters", "head"].contains(&&***name));
        for method in methods {
            let response = send(&mut server.connect(), &method.to_ascii_uppercase(), path);
            assert!(!matches!(response.status, 404 | 405), "{method} {path}: {}", response.text());
            let documented = &item[method.as_str()]["responses"];
            let status = response.status.to_string();
            let is_documented =
                [status.clone(), format!("{}XX", &status[..1])].iter().any(|key| documented[key] != Value::Null);
            assert!(is_documented, "{method} {path} responds with {status}");
        }
    }
}

#[test]
fn every_reference_leads_to_a_schema() {
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("$ref").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|field| references(field, found));
            }
            Value::Array(items) => items.iter().for_each(|item| references(item, found)),
            _ => {}
        }
    }
    let server = Server::start();
    let document = send(&mut server.connect(), "GET", "/openapi.json").json();
    let mut found = Vec::new();
    references(&document, &mut found);
    assert!(!found.is_empty());
    for reference in found {
        let pointer = reference.strip_prefix('#').expect("references are local");
        assert!(document.pointer(pointer).is_some(), "{reference}");
    }
}

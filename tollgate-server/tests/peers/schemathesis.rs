//! Requests that schemathesis generates from `/openapi.json`.

use std::process::Command;

use testkit::folder::folder_with;
use testkit::tollgate::{Process, RULES};

use crate::peer::python;

const TEST_RULES: &str = "service: { http: '127.0.0.1:0' }
admin: { listen: '127.0.0.1:0' }
limits:
  - { name: per-user, key: header:x-user-id, algorithm: token_bucket, capacity: 100, refill: 100/s }
  - { name: per-ip, key: ip, limit: 50, window: 1s }
  - { name: pairs, match: { path: '/api/**', hosts: ['*.example.com'] }, key: [header:x-user-id, path], limit: 5 }
";

/// Checks of the responses against the document.
const CONFORMANCE: &str = "status_code_conformance,content_type_conformance,response_headers_conformance,\
                           response_schema_conformance";

/// Runs schemathesis with these arguments against a listener of a server.
fn run(listener: &str, arguments: &[&str]) {
    let Some(mut python) = python() else { return };
    let server = Process::start(folder_with(&[(RULES, TEST_RULES)]), &["serve", "--config", RULES]);
    let url = format!("http://{}/openapi.json", server.address_of(listener));
    let folder = folder_with(&[]);
    let command: &mut Command = python.current_dir(folder.path()).args(["-m", "schemathesis.cli", "run", &url]);
    let output = command
        .args(["--no-color", "--seed", "1", "--generation-database", "none", "--suppress-health-check", "all"])
        .args(["--warnings", "off", "--no-shrink", "--phases", "examples,coverage,fuzzing"])
        .args(arguments)
        .output()
        .expect("python3 runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("Operations:") && text.contains("No issues found"), "{text}");
}

#[test]
fn no_generated_question_breaks_the_service_or_its_description() {
    let checks = format!("not_a_server_error,{CONFORMANCE}");
    run("decisions POST", &["--checks", &checks, "--exclude-path", "/v1/authorize", "-n", "20"]);
}

/// `deny_status` may be 500, so a server error is not a failure here.
#[test]
fn no_generated_proxy_breaks_the_description() {
    run(
        "decisions POST",
        &["--checks", CONFORMANCE, "--include-path", "/v1/authorize", "--include-method", "POST", "-n", "10"],
    );
}

#[test]
fn no_generated_request_breaks_the_admin_api_or_its_description() {
    run("admin", &["--checks", &format!("not_a_server_error,{CONFORMANCE}"), "-n", "10"]);
}

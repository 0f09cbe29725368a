//! Who may use the admin API: tokens, browsers, hostile hosts and bodies.

use serde_json::{Value, json};
use testkit::folder::folder_with;
use testkit::http1::Connection;
use testkit::tollgate::{Process, RULES as FILE};
use testkit::wait::wait_until;

use crate::admin_client::AdminRequest;

const LIMITS: &str =
    "service: { http: '127.0.0.1:0' }\nlimits: [{ name: per-user, key: header:x-user-id, limit: 5 }]\n";
const OLD: &str = "0123456789abcdef-old";
const NEW: &str = "0123456789abcdef-new";

/// Starts a server with this admin listener.
fn start(admin: &str) -> Process {
    let rules = format!("admin: {{ {admin} }}\n{LIMITS}");
    let folder = folder_with(&[(FILE, &rules), ("tokens", &format!("{OLD}\n"))]);
    Process::start(folder, &["serve", "--config", FILE])
}

fn reset() -> AdminRequest {
    AdminRequest::post("/v1/keys/reset", &json!({"limit": "per-user", "key": "ann"}))
}

/// Returns the code of a refusal.
#[track_caller]
fn refusal(server: &Process, request: &AdminRequest) -> (u16, String) {
    let mut address = server.address_of("admin");
    if address.ip().is_unspecified() {
        address.set_ip([127, 0, 0, 1].into());
    }
    let response = request.send(address);
    (response.status, response.json()["error"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn a_listener_with_tokens_needs_one_for_the_api_alone() {
    let server = start("listen: '127.0.0.1:0', tokens_file: tokens");
    let admin = server.address_of("admin");
    for page in ["/", "/healthz", "/readyz", "/metrics", "/openapi.json"] {
        assert_eq!(AdminRequest::get(page).send(admin).status, 200, "{page}");
    }
    let status = AdminRequest::get("/v1/status");
    let missing = status.send(admin);
    assert_eq!((missing.status, missing.header("www-authenticate")), (401, Some("Bearer")));
    for request in [AdminRequest::get("/v1/rules"), reset(), AdminRequest::put_rules(LIMITS, "x")] {
        assert_eq!(refusal(&server, &request), (401, "token_missing".to_owned()));
    }
    let with = |token: &str| AdminRequest::get("/v1/status").header("authorization", &format!("Bearer {token}"));
    assert_eq!(refusal(&server, &with(NEW)), (401, "token_invalid".to_owned()));
    assert_eq!(refusal(&server, &with("")).0, 401);
    let basic = AdminRequest::get("/v1/status").header("authorization", &format!("Basic {OLD}"));
    assert_eq!(refusal(&server, &basic).0, 401);
    with(OLD).expect(200, admin);
    reset().header("authorization", &format!("Bearer {OLD}")).expect(200, admin);
    // The log names the token by its digest.
    let said = server.await_said("reset_key", 1);
    assert!(said.contains("token ") && !said.contains(OLD), "{said}");

    // Rotated.
    std::fs::write(server.path("tokens"), format!("{NEW}\n")).expect("the folder is writable");
    wait_until(|| (with(NEW).send(admin).status == 200).then_some(())).expect("the new token is valid");
    assert_eq!(refusal(&server, &with(OLD)), (401, "token_invalid".to_owned()));
}

#[test]
fn a_token_is_valid_only_while_the_file_contains_it() {
    let server = start("listen: '127.0.0.1:0', tokens_file: tokens");
    let admin = server.address_of("admin");
    let path = server.path("tokens");
    let status =
        || AdminRequest::get("/v1/status").header("authorization", &format!("Bearer {OLD}")).send(admin).status;
    let await_status = |wanted: u16| wait_until(|| (status() == wanted).then_some(())).expect("the file is read again");
    let await_tokens = |count: u32| {
        let line = format!("tollgate_valid_tokens{{surface=\"admin\"}} {count}");
        let has_line = || AdminRequest::get("/metrics").send(admin).text().lines().any(|found| found == line);
        wait_until(|| has_line().then_some(())).expect("the metric follows");
    };
    await_tokens(1);
    std::fs::remove_file(&path).expect("it exists");
    await_status(401);
    await_tokens(0);
    server.await_said("tokens has 0 valid tokens: No such file or directory (os error 2): check the path", 1);
    std::fs::write(&path, OLD).expect("the folder is writable");
    await_status(200);
    server.await_said("tokens is correct again, with 1 tokens", 1);
    // Emptied, while no client sends a token.
    std::fs::write(&path, "").expect("the folder is writable");
    await_tokens(0);
    server.await_said("tokens has 0 valid tokens: there is no token", 1);
    assert_eq!(status(), 401);
}

#[test]
fn a_listener_that_other_machines_reach_is_closed_without_tokens() {
    let server = start("listen: '0.0.0.0:0'");
    for request in [AdminRequest::get("/v1/status"), AdminRequest::get("/v1/rules"), reset()] {
        assert_eq!(refusal(&server, &request), (403, "api_closed".to_owned()));
    }
    let mut admin = server.address_of("admin");
    admin.set_ip([127, 0, 0, 1].into());
    let closed = AdminRequest::get("/v1/status").expect(403, admin);
    assert!(closed["message"].as_str().is_some_and(|message| message.contains("set admin.tokens_file")), "{closed}");
    for page in ["/healthz", "/readyz", "/metrics"] {
        assert_eq!(AdminRequest::get(page).send(admin).status, 200, "{page}");
    }
    assert!(server.said().contains("without tokens: its API is closed"), "{}", server.said());
}

#[test]
fn browsers_on_other_sites_cannot_drive_it() {
    let server = start("listen: '127.0.0.1:0'");
    let admin = server.address_of("admin");
    let own = format!("http://{admin}");
    reset().header("host", &admin.to_string()).header("origin", &own).expect(200, admin);
    reset().header("sec-fetch-site", "same-origin").expect(200, admin);
    for request in [reset(), AdminRequest::get("/v1/rules"), AdminRequest::put_rules(LIMITS, "x")] {
        let text = request.text();
        for (name, value) in [
            ("origin", "https://evil.example"),
            ("origin", "null"),
            ("origin", "http://127.0.0.1:3000"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
        ] {
            let mut connection = Connection::to(admin);
            let forged = text.replacen("\r\n", &format!("\r\n{name}: {value}\r\n"), 1);
            let response = connection.ask(forged);
            assert_eq!((response.status, &response.json()["error"]), (403, &json!("cross_site")), "{name}: {value}");
        }
    }
    // A preflight is not answered with permission.
    let preflight = "OPTIONS /v1/rules HTTP/1.1\r\nhost: 127.0.0.1\r\norigin: https://evil.example\r\n\
                     access-control-request-method: PUT\r\n\r\n";
    let response = Connection::to(admin).ask(preflight);
    assert!(response.status >= 400 && response.header("access-control-allow-origin").is_none(), "{response:?}");
}

#[test]
fn a_rebound_host_is_not_served() {
    let server = start("listen: '127.0.0.1:0', hosts: [admin.example.com]");
    for host in ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8099"] {
        assert_eq!(refusal(&server, &reset().header("host", host)), (421, "unknown_host".to_owned()), "{host}");
    }
    reset().header("host", "admin.example.com").expect(200, server.address_of("admin"));
}

/// mDNS answers any machine of the network, which can claim a name and resolve it to 127.0.0.1 later.
#[test]
fn a_page_of_the_local_network_cannot_drive_it() {
    let server = start("listen: '127.0.0.1:0', hosts: [admin.local]");
    let port = server.address_of("admin").port();
    for request in [reset(), AdminRequest::get("/v1/rules")] {
        let of = |host: &str| {
            let origin = format!("http://{host}:{port}");
            request.clone().header("host", &format!("{host}:{port}")).header("origin", &origin)
        };
        assert_eq!(refusal(&server, &of("evil.local")), (421, "unknown_host".to_owned()));
        assert_eq!(refusal(&server, &of("evil")), (403, "cross_site".to_owned()));
        of("admin.local").expect(200, server.address_of("admin"));
        of("localhost").expect(200, server.address_of("admin"));
        let without_origin = request.clone().header("host", &format!("evil.local:{port}"));
        assert_eq!(refusal(&server, &without_origin), (421, "unknown_host".to_owned()));
    }
}

#[test]
fn forms_and_plain_text_change_nothing() {
    let server = start("listen: '127.0.0.1:0'");
    let version = {
        let rules = AdminRequest::get("/v1/rules").expect(200, server.address_of("admin"));
        rules["version"].as_str().expect("a version").to_owned()
    };
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/json"] {
        for request in [
            reset(),
            AdminRequest::put_rules(LIMITS, &version),
            AdminRequest::post_rules("/v1/rules/validate", LIMITS),
            AdminRequest::post("/v1/keys/ban", &json!({"limit": "per-user", "key": "ann", "for": 60})),
            AdminRequest::post("/v1/explain", &json!({"path": "/"})),
        ] {
            let refused = refusal(&server, &request.header("content-type", kind));
            assert_eq!(refused, (415, "unsupported_media_type".to_owned()), "{kind}");
        }
    }
    assert_eq!(refusal(&server, &reset().without("content-type")).0, 415);
    // Rules are not JSON, and JSON is not rules.
    let json_rules = AdminRequest::put_rules(LIMITS, &version).header("content-type", "application/json");
    assert_eq!(refusal(&server, &json_rules).0, 415);
    assert_eq!(refusal(&server, &reset().header("content-type", "application/yaml")).0, 415);
}

#[test]
fn bodies_are_bounded_in_size_and_time() {
    let server = start("listen: '127.0.0.1:0'");
    let admin = server.address_of("admin");
    let head = |length: usize, kind: &str, path: &str| {
        format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n")
    };
    for (length, kind, path) in [
        ((4 << 20) + 1, "application/yaml", "/v1/rules/validate"),
        ((1 << 20) + 1, "application/json", "/v1/keys/reset"),
    ] {
        let mut connection = Connection::to(admin);
        connection.send(head(length, kind, path));
        let response = connection.receive();
        assert_eq!((response.status, &response.json()["error"]), (413, &json!("body_too_large")), "{path}");
    }
    // The largest rules that a file may have are read.
    let largest = format!("limits: [] #{}\n", "x".repeat((4 << 20) - 13));
    assert_eq!(largest.len(), 4 << 20);
    let valid = AdminRequest::post_rules("/v1/rules/validate", &largest).expect(200, admin);
    assert_eq!(valid["valid"], true);
    // A body that never ends does not hold the connection forever.
    let mut slow = Connection::to(admin);
    slow.send(head(100, "application/json", "/v1/keys/reset"));
    slow.send("{");
    let response = slow.receive();
    assert_eq!((response.status, &response.json()["error"]), (408, &json!("body_timeout")));
}

#[test]
fn keys_are_shown_if_the_file_says_so() {
    let server = start("listen: '127.0.0.1:0', show_keys: true");
    let admin = server.address_of("admin");
    assert_eq!(AdminRequest::get("/v1/status").expect(200, admin)["show_keys"], true);
    let keys = reset().expect(200, admin);
    assert_eq!(keys["limits"][0]["key"], json!(["ann"]));
    assert!(server.await_said("reset_key", 1).contains("ann"));
    // A key cannot end the line, or reorder its text.
    let hostile = "\u{202e}n\u{2028}\u{200b}na";
    AdminRequest::post("/v1/keys/reset", &json!({"limit": "per-user", "key": hostile})).expect(200, admin);
    let said = server.await_said("reset_key", 2);
    assert!(said.contains("u{202e}n") && said.contains("u{2028}") && said.contains("u{200b}na"), "{said}");
    assert!(!said.contains(['\u{202e}', '\u{2028}', '\u{200b}']), "{said}");
}

#[test]
fn document_describes_what_is_served() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/admin-openapi.json");
    let server = start("listen: '127.0.0.1:0'");
    let admin = server.address_of("admin");
    let response = AdminRequest::get("/openapi.json").send(admin);
    if std::env::var_os("UPDATE_SCHEMA").is_some() {
        std::fs::write(&path, response.text()).expect("docs is writable");
    }
    let documented = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(response.text(), documented, "run this test with UPDATE_SCHEMA=1 to update docs/admin-openapi.json");
    let document: Value = response.json();
    for (path, item) in document["paths"].as_object().expect("paths") {
        for (method, operation) in item.as_object().expect("methods") {
            let request = format!("{} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n", method.to_uppercase());
            let status = Connection::to(admin).ask(request).status;
            assert!(!matches!(status, 404 | 405), "{method} {path}");
            assert!(operation["responses"][status.to_string()].is_object(), "{method} {path} responds with {status}");
        }
    }
    let listed = document["paths"].as_object().map_or(0, serde_json::Map::len);
    assert!(listed >= 11, "{listed}");
}

//! Peeks, refunds, resets and reservations over HTTP.

use serde_json::{Value, json};
use testkit::folder::folder_with;
use testkit::http1::{Connection, Response};
use testkit::redis::RedisServer;
use testkit::tollgate::{Process, RULES};

const LIMITS: &str = "
limits:
  - { name: per-user, key: 'header:x-user-id', algorithm: token_bucket, capacity: 10, refill: 1/h }
  - { name: per-page, key: ['header:x-user-id', path], limit: 5, window: 10220d }
";

fn server(settings: &str) -> (Process, Connection) {
    let folder = folder_with(&[(RULES, &format!("{settings}service: {{ http: '127.0.0.1:0' }}{LIMITS}"))]);
    let server = Process::start(folder, &["serve", "--config", RULES]);
    let connection = Connection::to(server.address_of("decisions"));
    (server, connection)
}

fn post(connection: &mut Connection, path: &str, body: &Value) -> Response {
    let body = body.to_string();
    connection.send(format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    ));
    connection.receive()
}

/// Returns the units that a response says are left.
fn left(response: &Response) -> Value {
    assert_eq!(response.status, 200, "{}", response.text());
    response.json()["remaining"].clone()
}

fn change_a_key(connection: &mut Connection) {
    let ann = json!({"limit": "per-user", "key": "ann"});
    assert_eq!(connection.check(&json!({"limit": "per-user", "key": "ann", "cost": 8}))["remaining"], 2);
    assert_eq!(left(&post(connection, "/v1/peek", &ann)), 2);
    assert_eq!(left(&post(connection, "/v1/peek", &json!({"request": {"headers": {"x-user-id": "ann"}}}))), 2);
    assert_eq!(left(&post(connection, "/v1/refund", &json!({"limit": "per-user", "key": "ann", "units": 3}))), 5);
    assert_eq!(left(&post(connection, "/v1/refund", &ann)), 6);
    assert_eq!(left(&post(connection, "/v1/refund", &json!({"limit": "per-user", "key": "ann", "units": 99}))), 10);
    assert_eq!(connection.check(&json!({"limit": "per-user", "key": "ann", "cost": 10}))["allowed"], true);
    assert_eq!(connection.check(&ann)["allowed"], false);
    assert_eq!(left(&post(connection, "/v1/reset", &ann)), 10);
    assert_eq!(connection.check(&ann)["remaining"], 9);
    let both = json!([{"limit": "per-user", "key": "ann"}, {"limit": "per-page", "key": ["ann", "/a"]}]);
    for (path, expected) in
        [("/v1/check", [8, 4]), ("/v1/peek", [8, 4]), ("/v1/refund", [9, 5]), ("/v1/reset", [10, 5])]
    {
        let responses = post(connection, path, &both).json();
        assert_eq!([&responses[0]["remaining"], &responses[1]["remaining"]], expected, "{path}");
    }
}

#[test]
fn keys_are_peeked_at_refunded_and_reset_in_memory() {
    let (_server, mut connection) = server("");
    change_a_key(&mut connection);
}

#[test]
fn keys_are_peeked_at_refunded_and_reset_on_redis() {
    let redis = RedisServer::start();
    let (_server, mut connection) = server(&format!("store: '{}'\nstore_timeout: 5s\n", redis.url()));
    change_a_key(&mut connection);
    drop(redis);
    let ann = json!({"limit": "per-user", "key": "ann"});
    for path in ["/v1/refund", "/v1/reset"] {
        let failed = post(&mut connection, path, &ann);
        assert_eq!((failed.status, failed.header("retry-after")), (503, Some("1")), "{}", failed.text());
        assert_eq!(failed.json()["error"], "store_unavailable");
        let failed = post(&mut connection, path, &json!([ann]));
        assert_eq!((failed.status, &failed.json()[0]["error"]), (200, &json!("store_unavailable")));
    }
}

/// Reserves through one server and settles through another.
fn reserve_and_settle(first: &mut Connection, second: &mut Connection) {
    let reserve = json!({"limit": "per-user", "key": "ann", "cost": 8, "expires_after": 60});
    let reserved = post(first, "/v1/reserve", &reserve);
    assert_eq!(left(&reserved), 2);
    assert!(reserved.text().contains(r#""delay":0.000000,"source":"store","reservation":""#), "{}", reserved.text());
    let reservation = reserved.json()["reservation"].clone();
    let denied = post(first, "/v1/reserve", &reserve).json();
    assert_eq!((&denied["allowed"], &denied["reservation"]), (&json!(false), &Value::Null));
    let settle = |actual: u64| json!({"reservation": reservation, "actual": actual});
    assert_eq!(post(second, "/v1/settle", &settle(3)).text(), r#"{"settled":true,"missing":0}"#);
    assert_eq!(first.check(&json!({"limit": "per-user", "key": "ann", "cost": 0}))["remaining"], 7);
    for connection in [first, second] {
        let again = post(connection, "/v1/settle", &settle(3));
        assert_eq!((again.status, &again.json()["error"]), (409, &json!("already_settled")));
    }
}

#[test]
fn a_reservation_is_settled_by_the_process_that_made_it_in_memory() {
    let (server, mut connection) = server("");
    reserve_and_settle(&mut connection, &mut Connection::to(server.address_of("decisions")));
}

#[test]
fn a_reservation_is_settled_by_any_node_on_redis() {
    let redis = RedisServer::start();
    let settings = format!("store: '{}'\nstore_timeout: 5s\n", redis.url());
    let (_first, mut first) = server(&settings);
    let (_second, mut second) = server(&settings);
    reserve_and_settle(&mut first, &mut second);
}

#[test]
fn invalid_reservations_name_the_field_and_the_fix() {
    let (_server, mut connection) = server("");
    let (_other, mut other) = server("");
    let foreign = post(&mut other, "/v1/reserve", &json!({"limit": "per-user", "key": "ann"})).json();
    let cases = [
        ("/v1/reserve", json!({"limit": "per-user"})),
        ("/v1/reserve", json!({"limit": "per-user", "key": "ann", "cost": 0})),
        ("/v1/reserve", json!({"limit": "per-user", "key": "ann", "expires_after": 0})),
        ("/v1/reserve", json!({"limit": "per-user", "key": "ann", "expires_after": 86401})),
        ("/v1/reserve", json!([])),
        ("/v1/settle", json!({"actual": 1})),
        ("/v1/settle", json!({"reservation": "abc"})),
        ("/v1/settle", json!({"reservation": "abc", "actual": 1})),
        ("/v1/settle", json!({"reservation": foreign["reservation"], "actual": 1})),
    ];
    let messages = cases.map(|(path, body)| {
        let response = post(&mut connection, path, &body);
        let error = response.json();
        let text = |field: &str| error[field].as_str().expect("text").to_owned();
        format!("{path}: {} {}\n  {}", response.status, text("error"), text("message"))
    });
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn invalid_changes_name_the_field_and_change_nothing() {
    let (_server, mut connection) = server("");
    assert_eq!(connection.check(&json!({"limit": "per-user", "key": "ann", "cost": 8}))["remaining"], 2);
    let cases = [
        ("/v1/refund", json!({"limit": "per-user"})),
        ("/v1/refund", json!({"limit": "per-user", "key": "ann", "units": -1})),
        ("/v1/refund", json!({"limit": "per-user", "key": "ann", "cost": 1})),
        ("/v1/refund", json!([{"limit": "per-user", "key": "ann"}, {"key": "ann"}])),
        ("/v1/refund", json!("per-user")),
        ("/v1/reset", json!({"limit": "nobody", "key": "ann"})),
        ("/v1/reset", json!({"limit": "per-page", "key": "ann"})),
        ("/v1/reset", json!({"request": {}})),
        ("/v1/peek", json!({"limit": "per-user", "key": "ann", "cost": 2})),
    ];
    let messages = cases.map(|(path, body)| {
        let response = post(&mut connection, path, &body);
        assert_eq!(response.status, 400, "{path} {body}: {}", response.text());
        format!("{path} {body}\n  {}", response.json()["message"].as_str().expect("a message"))
    });
    insta::assert_snapshot!(messages.join("\n"));
    assert_eq!(left(&post(&mut connection, "/v1/peek", &json!({"limit": "per-user", "key": "ann"}))), 2);
}

#[test]
fn health_is_reported_without_a_token() {
    let settings = "service: { http: { listen: '127.0.0.1:0', tokens_file: tokens } }";
    let files = [(RULES, format!("{settings}{LIMITS}")), ("tokens", "0123456789abcdef0123456789abcdef".to_owned())];
    let folder = folder_with(&files.each_ref().map(|(name, text)| (*name, text.as_str())));
    let server = Process::start(folder, &["serve", "--config", RULES]);
    let mut connection = Connection::to(server.address_of("decisions"));
    connection.send("GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let response = connection.receive();
    assert_eq!((response.status, response.text()), (200, "ok\n"));
    assert_eq!(post(&mut connection, "/v1/refund", &json!({})).status, 401);
}

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
    assert_eq!(post(second, "/v1/settle", &settle(3)).text(), r#"{"settled":true,"owed":0,"missing":0}"#);
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

const PLANS: &str = "
limits:
  - name: per-tenant
    key: 'header:x-tenant'
    plan: 'header:x-plan'
    algorithm: token_bucket
    capacity: 60
    refill: 1/h
    overrides: [{ plan: pro, capacity: 600, refill: 1/h }, { plan: trial, capacity: 5, refill: 1/h }, { key: vip, capacity: 7, refill: 1/h }]
  - { name: global, match: { path: /elsewhere }, limit: 100, window: 10220d }
";

/// A pro tenant that has used 300 of 600 has 300 left, however it is asked for.
#[test]
fn a_plan_applies_to_operations_by_name() {
    let redis = RedisServer::start();
    let store = format!("store: '{}'\nstore_timeout: 5s\n", redis.url());
    for store in ["", &store] {
        let settings = "service: { http: '127.0.0.1:0', resp: '127.0.0.1:0' }\nadmin: { listen: '127.0.0.1:0' }";
        let folder = folder_with(&[(RULES, &format!("{store}{settings}{PLANS}"))]);
        let server = Process::start(folder, &["serve", "--config", RULES]);
        let mut connection = Connection::to(server.address_of("decisions POST"));
        let pro = |more: Value| {
            let mut question = json!({"limit": "per-tenant", "key": "ann", "plan": "pro"});
            question.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            question
        };
        let request = json!({"request": {"headers": {"x-tenant": "ann", "x-plan": "pro"}}, "cost": 300});
        assert_eq!(connection.check(&request)["remaining"], 300);
        let mut post = |path: &str, body: &Value| post(&mut connection, path, body);
        assert_eq!(left(&post("/v1/peek", &pro(json!({})))), 300);
        assert_eq!(left(&post("/v1/check", &pro(json!({"cost": 100})))), 200);
        assert_eq!(left(&post("/v1/refund", &pro(json!({"units": 100})))), 300);
        let reserved = post("/v1/reserve", &pro(json!({"cost": 250}))).json();
        assert_eq!((&reserved["allowed"], &reserved["remaining"]), (&json!(true), &json!(50)));
        let settled = post("/v1/settle", &json!({"reservation": reserved["reservation"], "actual": 100}));
        assert_eq!(settled.json()["settled"], true);
        assert_eq!(left(&post("/v1/peek", &pro(json!({})))), 200);
        let state = testkit::http1::ask(
            server.address_of("admin"),
            "GET /v1/keys?limit=per-tenant&key=ann&plan=pro HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        );
        let state = &state.json()["limits"][0];
        assert_eq!((&state["quota"], &state["remaining"]), (&json!(600), &json!(200)));
        let body = json!({"limit": "per-tenant", "key": "ann", "plan": "pro", "units": 40}).to_string();
        let granted = testkit::http1::ask(
            server.address_of("admin"),
            format!(
                "POST /v1/keys/grant HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: \
                 application/json\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ),
        );
        let granted = granted.json();
        assert_eq!((&granted["changed"], &granted["limits"][0]["remaining"]), (&json!(true), &json!(240)));
        assert_eq!(left(&post("/v1/check", &pro(json!({"cost": 40})))), 200);
        // The key's own numbers take precedence, as in a request.
        assert_eq!(left(&post("/v1/peek", &json!({"limit": "per-tenant", "key": "vip", "plan": "pro"}))), 7);
        let client = redis::Client::open(format!("redis://{}", server.address_of("decisions redis"))).unwrap();
        let mut redis = client.get_connection().unwrap();
        let mut remaining = |words: &str| {
            let (name, words) = words.split_once(' ').unwrap();
            let reply: Vec<redis::Value> =
                redis::cmd(name).arg(words.split(' ').collect::<Vec<_>>()).query(&mut redis).unwrap();
            redis::from_redis_value::<i64>(reply[5].clone()).unwrap()
        };
        assert_eq!(remaining("TOLLGATE.PEEK per-tenant ann PLAN pro"), 200);
        assert_eq!(remaining("TOLLGATE.CHECK per-tenant ann 50 plan pro"), 150);
        assert_eq!(remaining("TOLLGATE.CHECK per-tenant ann PLAN pro"), 149);
        assert_eq!(remaining("TOLLGATE.REFUND per-tenant ann 51 PLAN pro"), 200);
        assert_eq!(remaining("TOLLGATE.RESET per-tenant ann PLAN trial"), 5);
        assert_eq!(remaining("TOLLGATE.PEEK per-tenant ann PLAN pro"), 600);
        let error = redis::cmd("TOLLGATE.CHECK").arg(&["per-tenant", "ann", "PLAN", "por"]).exec(&mut redis);
        assert!(error.unwrap_err().to_string().contains("use pro, trial, or leave it out"));
        for (body, message) in [
            (
                json!({"limit": "per-tenant", "key": "ann", "plan": "por"}),
                "`plan`: `per-tenant` has no numbers for a plan `por`: use pro, trial, or leave it out",
            ),
            (
                json!([{"limit": "global"}, {"limit": "global", "plan": "pro"}]),
                "`[1].plan`: `global` has no plans, but the plan `pro` is given: leave it out",
            ),
            (
                json!({"plan": "pro", "request": {}}),
                "`plan` is given without `limit` and `key`: in `request`, send the plan where the limit reads it",
            ),
        ] {
            let refused = post("/v1/check", &body);
            assert_eq!((refused.status, &refused.json()["message"]), (400, &json!(message)));
        }
        assert_eq!(left(&post("/v1/peek", &json!({"limit": "global"}))), 100, "an invalid array spends nothing");
    }
}

//! Valid checks.

use serde_json::{Value, json};
use testkit::service::Server;
use testkit::window::within_one_minute;

fn per_user(key: &str) -> Value {
    json!({"limit": "per-user", "key": key})
}

fn by_header(name: &str, value: &str) -> Value {
    json!({"request": {"headers": {name: value}}})
}

#[test]
fn ten_pass_and_the_eleventh_is_denied_with_a_retry_after() {
    let server = Server::start();
    let mut connection = server.connect();
    let answers = within_one_minute(|attempt| {
        let question = per_user(&format!("user-{attempt}"));
        (0..12).map(|_| connection.check(&question)).collect::<Vec<_>>()
    });
    for (index, answer) in answers[..10].iter().enumerate() {
        assert_eq!(answer["allowed"], true);
        assert_eq!(answer["limit"], "per-user");
        assert_eq!(answer["quota"], 10);
        assert_eq!(answer["remaining"], 9 - index);
        assert_eq!(answer["retry_after"], Value::Null);
        assert_eq!(answer["delay"], 0.0);
        assert!(answer["reset_after"].as_f64().unwrap() > 0.0);
    }
    for answer in &answers[10..] {
        assert_eq!(answer["allowed"], false);
        assert_eq!(answer["remaining"], 0);
        let retry_after = answer["retry_after"].as_f64().unwrap();
        assert!(retry_after > 0.0 && retry_after <= 120.0, "{answer}");
        assert!(answer["reset_after"].as_f64().unwrap() >= retry_after, "{answer}");
    }
}

#[test]
fn answer_has_these_fields_in_this_order_with_six_decimals() {
    let server = Server::start();
    let answer = server.connect().post(r#"{"limit":"per-user","key":"42","cost":1}"#).text().to_owned();
    let rest = answer
        .strip_prefix(r#"{"allowed":true,"limit":"per-user","quota":10,"remaining":9,"reset_after":"#)
        .unwrap_or_else(|| panic!("{answer}"));
    let (reset_after, rest) = rest.split_once(',').unwrap();
    assert_eq!(reset_after.split_once('.').unwrap().1.len(), 6, "{answer}");
    assert_eq!(rest, r#""retry_after":null,"delay":0.000000,"source":"store"}"#);
}

#[test]
fn each_key_has_a_quota_of_its_own() {
    let server = Server::start();
    let mut connection = server.connect();
    assert_eq!(connection.check(&json!({"limit": "per-user", "key": "a", "cost": 10}))["allowed"], true);
    assert_eq!(connection.check(&json!({"limit": "per-user", "key": "b", "cost": 10}))["allowed"], true);
    assert_eq!(connection.check(&json!({"limit": "per-user", "key": "", "cost": 10}))["allowed"], true);
}

#[test]
fn cost_of_zero_spends_nothing() {
    let server = Server::start();
    let mut connection = server.connect();
    for _ in 0..20 {
        let answer = connection.check(&json!({"limit": "per-user", "key": "a", "cost": 0}));
        assert_eq!((&answer["allowed"], &answer["remaining"]), (&json!(true), &json!(10)));
    }
}

#[test]
fn cost_that_can_never_fit_is_denied_without_a_retry_after() {
    let server = Server::start();
    let mut connection = server.connect();
    for cost in [11, u64::MAX] {
        let answer = connection.check(&json!({"limit": "per-user", "key": "a", "cost": cost}));
        assert_eq!((&answer["allowed"], &answer["retry_after"]), (&json!(false), &Value::Null));
        assert_eq!(answer["remaining"], 10);
    }
}

#[test]
fn request_is_counted_under_its_user_header_whatever_its_case() {
    let server = Server::start();
    let mut connection = server.connect();
    let last = within_one_minute(|attempt| {
        let user = format!("user-{attempt}");
        connection.check(&per_user(&user));
        connection.check(&by_header("x-user-id", &user));
        connection.check(&by_header("X-User-Id", &user));
        connection.check(&by_header("X-USER-ID", &user))
    });
    assert_eq!(last["remaining"], 6);
}

#[test]
fn requests_without_a_user_header_share_the_anonymous_key() {
    let server = Server::start();
    let mut connection = server.connect();
    // The key is always the same, so a second attempt would need a second server. With a cost of 4, none is needed.
    let asked = [
        json!({"request": {}, "cost": 4}),
        json!({"request": {"headers": {"accept": "*/*"}}, "cost": 4}),
        json!({"limit": "per-user", "key": "anonymous", "cost": 4}),
    ];
    let allowed = asked.iter().map(|question| connection.check(question)["allowed"].clone()).collect::<Vec<_>>();
    assert_eq!(allowed, [true, true, false]);
}

#[test]
fn request_may_carry_every_fact() {
    let server = Server::start();
    let facts = json!({"method": "GET", "path": "/api/test", "host": "example.org", "ip": "2001:db8::1",
        "headers": {"X-User-Id": "münchen", "Accept": "*/*"}});
    let answer = server.connect().check(&json!({"request": facts, "cost": 1}));
    assert_eq!((&answer["allowed"], &answer["remaining"]), (&json!(true), &json!(9)));
}

#[test]
fn batch_is_answered_in_the_same_order() {
    let server = Server::start();
    let mut connection = server.connect();
    let answers = within_one_minute(|attempt| {
        let user = format!("user-{attempt}");
        connection.check(&json!([
            {"limit": "per-user", "key": user, "cost": 7},
            {"limit": "per-user", "key": user, "cost": 7},
            {"request": {"headers": {"x-user-id": user}}, "cost": 3},
            {"limit": "per-user", "key": format!("other-{user}")},
        ]))
    });
    let field_of =
        |field: &str| answers.as_array().unwrap().iter().map(|answer| answer[field].clone()).collect::<Vec<_>>();
    assert_eq!(field_of("allowed"), [true, false, true, true]);
    assert_eq!(field_of("remaining"), [3, 3, 0, 9]);
}

#[test]
fn batches_may_be_empty_or_of_a_thousand() {
    let server = Server::start();
    let mut connection = server.connect();
    assert_eq!(connection.check(&json!([])), json!([]));
    let thousand = (0..1000).map(|key| per_user(&key.to_string())).collect::<Vec<_>>();
    let answers = connection.check(&json!(thousand));
    assert_eq!(answers.as_array().unwrap().len(), 1000);
    assert!(answers.as_array().unwrap().iter().all(|answer| answer["allowed"] == true));
}

#[test]
fn many_clients_at_once_admit_exactly_the_limit() {
    let server = Server::start();
    let admitted = within_one_minute(|attempt| {
        let question = per_user(&format!("user-{attempt}"));
        let admitted_by = |mut connection: testkit::http1::Connection| {
            (0..20).filter(|_| connection.check(&question)["allowed"] == true).count()
        };
        std::thread::scope(|scope| {
            let clients = [(); 8].map(|()| scope.spawn(|| admitted_by(server.connect())));
            clients.into_iter().map(|client| client.join().unwrap()).sum::<usize>()
        })
    });
    assert_eq!(admitted, 10);
}

/// Simple checks that arrive at once are answered without the router, and everything else by it.
#[test]
fn simple_checks_and_other_requests_of_one_connection_are_answered_in_order() {
    let server = Server::start();
    let whole = |body: &str| format!("{}{body}", testkit::http1::head(body.len()));
    let health = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let unknown = whole(r#"{"limit":"unknown","key":"ann"}"#);
    let mut connection = server.connect();
    let (first, answers) = within_one_minute(|attempt| {
        let check = whole(&per_user(&format!("user-{attempt}")).to_string());
        connection.send(&check);
        let first = connection.receive();
        connection.send([&check, &check, health, &check, &unknown, &check].concat());
        (first, (0..6).map(|_| connection.receive()).collect::<Vec<_>>())
    });
    assert_eq!(first.json()["remaining"], 9);
    assert_eq!(answers.iter().map(|answer| answer.status).collect::<Vec<_>>(), [200, 200, 200, 200, 400, 200]);
    assert_eq!(answers[2].text(), "ok\n");
    assert_eq!([0, 1, 3, 5].map(|index| answers[index].json()["remaining"].clone()), [8, 7, 6, 5]);
    assert_eq!(answers[4].json()["error"], "unknown_limit");
}

#[test]
fn a_check_gets_the_same_response_whether_it_arrives_at_once_or_in_parts() {
    let server = Server::start();
    let body = |user: &str| format!(r#"{{"limit":"per-user","key":"{user}"}}"#);
    let mut at_once = server.connect();
    at_once.send(format!("{}{}", testkit::http1::head(body("ann").len()), body("ann")));
    let at_once = at_once.receive();
    let mut in_parts = server.connect();
    in_parts.send(testkit::http1::head(body("bob").len()));
    // The server has read the head once it has answered another client.
    server.connect().check(&per_user("eve"));
    in_parts.send(body("bob"));
    let in_parts = in_parts.receive();
    let names = |headers: &[(String, String)]| headers.iter().map(|(name, _)| name.to_lowercase()).collect::<Vec<_>>();
    assert_eq!(at_once.status, in_parts.status);
    assert_eq!(names(&at_once.headers), names(&in_parts.headers));
    for field in ["allowed", "limit", "quota", "remaining", "retry_after", "delay", "source"] {
        assert_eq!(at_once.json()[field], in_parts.json()[field], "{field}");
    }
}

const TWO_LIMITS: &str = "
limits:
  - { name: per-day, key: 'header:x-user-id', limit: 5, window: 10220d }
  - { name: at-once, key: 'header:x-user-id', algorithm: token_bucket, capacity: 3, refill: 1/h }
  - { name: elsewhere, match: { path: /elsewhere }, limit: 1, window: 10220d }
";

/// Returns the fields of each limit of an answer that do not depend on the time.
fn limits_of(answer: &Value) -> Vec<Value> {
    let limits = answer["limits"].as_array().unwrap_or_else(|| panic!("no limits: {answer}"));
    limits.iter().map(|one| json!([one["limit"], one["allowed"], one["quota"], one["remaining"]])).collect()
}

#[test]
fn answer_about_a_request_has_every_limit_that_counted_it() {
    let redis = testkit::redis::RedisServer::start();
    let on_redis = format!("store: '{}'\nstore_timeout: 5s\n{TWO_LIMITS}", redis.url());
    for rules in [TWO_LIMITS, &on_redis] {
        let server = Server::with_rules(rules);
        let mut connection = server.connect();
        let ann = json!({"request": {"headers": {"x-user-id": "ann"}}, "cost": 2});
        let answer = connection.check(&ann);
        assert_eq!(limits_of(&answer), [json!(["per-day", true, 5, 3]), json!(["at-once", true, 3, 1])]);
        let denied = connection.check(&ann);
        assert_eq!(denied["limit"], "at-once");
        assert_eq!(limits_of(&denied), [json!(["per-day", true, 5, 3]), json!(["at-once", false, 3, 1])]);
        for field in ["quota", "remaining", "reset_after", "retry_after"] {
            assert_eq!(denied["limits"][1][field], denied[field], "{field}");
        }
        assert_eq!(denied["limits"][0]["retry_after"], Value::Null);
        let mut post = |path: &str, body: &Value| {
            let body = body.to_string();
            let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json");
            connection.send(format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()));
            connection.receive().json()
        };
        let both = json!([{"request": {"headers": {"x-user-id": "ann"}}}, {"limit": "per-day", "key": "ann"}]);
        let peeked = post("/v1/peek", &both);
        assert_eq!(limits_of(&peeked[0]), [json!(["per-day", true, 5, 3]), json!(["at-once", true, 3, 1])]);
        // The limit that a check names is the only one.
        assert_eq!(peeked[1]["limits"], Value::Null);
        assert_eq!(post("/v1/reserve", &json!({"limit": "per-day", "key": "ann"}))["limits"], Value::Null);
    }
}

const NAMES: &str = "
limits:
  - { name: per-user, key: 'descriptor:user', limit: 5, window: 10220d, exempt: { keys: [ops] } }
  - name: per-tenant
    key: 'header:x-tenant'
    missing: skip
    plan: 'header:x-plan'
    limit: 10
    window: 10220d
    overrides: [{ plan: pro, limit: 100 }, { key: vip, limit: 7 }]
";

#[test]
fn a_question_that_meets_no_limit_and_an_unknown_plan_are_reported() {
    let question = |descriptor: &str, value: &str| json!({"request": {"descriptors": {descriptor: value}}});
    let plan = |tenant: &str, plan: &str| json!({"request": {"headers": {"x-tenant": tenant, "x-plan": plan}}});
    let no_limit = "no limit applies to this request: check the names of its descriptors and headers, its domain, and \
                    `match` of the limits";
    let unknown_plan = "the limit `per-tenant` has no numbers for the plan `por`, so its own apply: check the name of the \
                        plan, or add it to `overrides`";
    for deny in [false, true] {
        let unknown = if deny { "deny" } else { "allow" };
        let settings = format!(
            "service: {{ http: '127.0.0.1:0', unknown: {unknown} }}\nadmin: {{ listen: '127.0.0.1:0' }}\n{NAMES}"
        );
        let folder = testkit::folder::folder_with(&[(testkit::tollgate::RULES, &settings)]);
        let process = testkit::tollgate::Process::start(folder, &["serve", "--config", testkit::tollgate::RULES]);
        let mut connection = testkit::http1::Connection::to(process.address_of("decisions POST"));
        for _ in 0..2 {
            let answer = connection.check(&question("usr", "ann"));
            let reason = if deny { json!("no_limit") } else { Value::Null };
            assert_eq!(
                json!([answer["allowed"], answer["limit"], answer["limits"], answer["warning"], answer["reason"]]),
                json!([!deny, null, [], no_limit, reason])
            );
            let answer = connection.check(&plan("ann", "por"));
            let reason = if deny { json!("unknown_plan") } else { Value::Null };
            assert_eq!(
                json!([answer["allowed"], answer["warning"], answer["reason"]]),
                json!([!deny, unknown_plan, reason])
            );
        }
        // What is denied takes nothing.
        let left = connection.check(&json!({"limit": "per-tenant", "key": "ann", "cost": 0}))["remaining"].clone();
        assert_eq!(left, if deny { 10 } else { 8 });
        for known in [question("user", "ann"), question("user", "ops"), plan("ann", "pro"), plan("vip", "por")] {
            let answer = connection.check(&known);
            assert_eq!((&answer["allowed"], &answer["warning"]), (&json!(true), &Value::Null), "{known}");
        }
        let said = process.said();
        for line in [unknown_plan, "no limit applies to a request with the descriptors `usr`"] {
            assert_eq!(said.matches(line).count(), 1, "{said}");
        }
        let metrics = testkit::http1::ask(
            process.address_of("admin"),
            "GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        );
        for kind in ["request", "plan"] {
            let row = format!("tollgate_service_unknown_total{{kind=\"{kind}\"}} 2\n");
            assert!(metrics.text().contains(&row), "{}", metrics.text());
        }
    }
}

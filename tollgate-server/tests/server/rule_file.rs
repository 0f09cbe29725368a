//! The whole rule file, through `POST /v1/check`. Windows are an hour long and start with the first request, so that
//! none ends during a test.

use serde_json::{Value, json};
use testkit::folder::folder_with;
use testkit::http1::Connection;
use testkit::service::{Server, served};
use testkit::tollgate::RULES;

/// Returns a limit whose window does not end during a test.
fn limit(name: &str, limit: u64, rest: &str) -> String {
    format!("  - {{ name: {name}, algorithm: fixed_window, align: first_request, limit: {limit}, window: 1h{rest} }}\n")
}

fn limits(all: &[String]) -> String {
    format!("limits:\n{}", all.concat())
}

fn get(connection: &mut Connection, path: &str, user: &str) -> Value {
    connection.check(&json!({"request": {"method": "GET", "path": path, "headers": {"X-User-Id": user}}}))
}

/// Returns the limit that decided, and its remaining quota.
fn spoken(answer: &Value) -> (&str, u64) {
    (answer["limit"].as_str().expect("a limit speaks"), answer["remaining"].as_u64().expect("a number"))
}

#[test]
fn global_user_and_endpoint_limits_hold_together_and_a_denial_takes_nothing() {
    let server = Server::with_rules(&limits(&[
        limit("global", 10_000, ""),
        limit("user", 100, ", key: 'header:x-user-id'"),
        limit("endpoint", 10, ", key: ['header:x-user-id', path], match: { path: /api/expensive }"),
    ]));
    let mut connection = server.connect();
    for left in (0..10).rev() {
        assert_eq!(spoken(&get(&mut connection, "/api/expensive", "ann")), ("endpoint", left));
    }
    let denied = get(&mut connection, "/api/expensive", "ann");
    assert_eq!((&denied["allowed"], &denied["reason"]), (&json!(false), &json!("limited")));
    assert_eq!(spoken(&denied), ("endpoint", 0));
    assert!(denied["retry_after"].as_f64().unwrap() > 0.0);
    assert_eq!(spoken(&get(&mut connection, "/api/cheap", "ann")), ("user", 89));
    assert_eq!(spoken(&connection.check(&json!({"limit": "global", "cost": 0}))), ("global", 9989));
}

#[test]
fn search_is_limited_beside_the_general_limit() {
    let server = Server::with_rules(&limits(&[
        limit("general", 100, ", key: ip"),
        limit("search", 10, ", key: ip, match: { path: /search/** }"),
    ]));
    let mut connection = server.connect();
    let mut ask = |path: &str| connection.check(&json!({"request": {"path": path, "ip": "192.0.2.7"}}));
    for _ in 0..10 {
        assert_eq!(ask("/search/rust?q=1")["allowed"], true);
    }
    assert_eq!(ask("/search/rust?q=2")["limit"], "search");
    assert_eq!(spoken(&ask("/about")), ("general", 89));
}

#[test]
fn requests_without_a_key_are_anonymous() {
    let server = Server::with_rules(&limits(&[limit("user", 2, ", key: 'header:x-user-id'")]));
    let mut connection = server.connect();
    assert_eq!(connection.check(&json!({"request": {}}))["remaining"], 1);
    assert_eq!(connection.check(&json!({"limit": "user", "key": "anonymous"}))["remaining"], 0);
    assert_eq!(connection.check(&json!({"request": {"path": "/"}}))["allowed"], false);
    assert_eq!(get(&mut connection, "/", "ann")["allowed"], true);
}

#[test]
fn overrides_of_plans_and_single_keys() {
    let rest = ", key: 'header:x-user-id', plan: 'header:x-plan', \
                overrides: [{ plan: gold, limit: 50 }, { key: root, limit: 500 }]";
    let server = Server::with_rules(&limits(&[limit("user", 5, rest)]));
    let mut connection = server.connect();
    let mut quota = |headers: Value| connection.check(&json!({"request": {"headers": headers}}))["quota"].clone();
    assert_eq!(quota(json!({"x-user-id": "ann"})), 5);
    assert_eq!(quota(json!({"x-user-id": "bob", "x-plan": "gold"})), 50);
    assert_eq!(quota(json!({"x-user-id": "root", "x-plan": "gold"})), 500);
    assert_eq!(connection.check(&json!({"limit": "user", "key": "root"}))["remaining"], 498);
}

#[test]
fn exempt_clients_are_not_counted_and_blocked_ones_are_refused() {
    let rest = ", key: 'header:x-user-id', exempt: { ips: [10.0.0.0/8], keys: [ops] }, blocked: { keys: [mallory] }";
    let server = Server::with_rules(&limits(&[limit("user", 1, rest)]));
    let mut connection = server.connect();
    for question in [
        json!({"request": {"ip": "10.1.2.3", "headers": {"x-user-id": "ann"}}}),
        json!({"request": {"headers": {"x-user-id": "ops"}}}),
        json!({"limit": "user", "key": "ops"}),
    ] {
        for _ in 0..3 {
            let answer = connection.check(&question);
            assert_eq!((&answer["allowed"], &answer["limit"]), (&json!(true), &Value::Null), "{question}");
        }
    }
    for question in
        [json!({"request": {"headers": {"x-user-id": "mallory"}}}), json!({"limit": "user", "key": "mallory"})]
    {
        let answer = connection.check(&question);
        let mut expected = json!({"allowed": false, "limit": "user", "quota": null, "remaining": null, "reset_after": null,
            "retry_after": null, "delay": 0.0, "reason": "blocked", "source": null});
        if question.get("request").is_some() {
            // Several limits may apply to a request, and none has counted this one.
            expected["limits"] = json!([]);
        }
        assert_eq!(answer, expected);
    }
}

#[test]
fn client_that_is_denied_too_often_is_banned() {
    let rest = ", key: ip, ban: { after: 3, within: 1h, for: 2h }";
    let server = Server::with_rules(&limits(&[limit("login", 1, rest)]));
    let mut connection = server.connect();
    let mut ask = || connection.check(&json!({"request": {"ip": "192.0.2.7"}}));
    assert_eq!(ask()["allowed"], true);
    for _ in 0..2 {
        assert_eq!(ask()["reason"], "limited");
    }
    let banned = ask();
    assert_eq!((&banned["reason"], &banned["limit"]), (&json!("banned"), &json!("login")));
    assert!(banned["retry_after"].as_f64().unwrap() > 3600.0, "{banned}");
}

#[test]
fn shadow_rules_report_what_they_would_have_decided() {
    let server = Server::with_rules(&limits(&[
        limit("user", 9, ", key: 'header:x-user-id'"),
        limit("trial", 1, ", key: 'header:x-user-id', shadow: true"),
    ]));
    let mut connection = server.connect();
    assert_eq!(get(&mut connection, "/", "ann")["shadow"], json!([{"limit": "trial", "allowed": true}]));
    let second = get(&mut connection, "/", "ann");
    assert_eq!((&second["allowed"], &second["limit"]), (&json!(true), &json!("user")));
    assert_eq!(second["shadow"], json!([{"limit": "trial", "allowed": false}]));
    let named = connection.check(&json!({"limit": "trial", "key": "ann"}));
    assert_eq!((&named["allowed"], &named["limit"]), (&json!(true), &Value::Null));
    assert_eq!(named["shadow"], json!([{"limit": "trial", "allowed": false}]));
}

#[test]
fn missing_keys_are_refused_where_a_limit_insists() {
    let server = Server::with_rules(&limits(&[limit("user", 9, ", key: 'header:x-user-id', missing: deny")]));
    let answer = server.connect().check(&json!({"request": {}}));
    assert_eq!((&answer["allowed"], &answer["reason"]), (&json!(false), &json!("key_missing")));
}

#[test]
fn cost_comes_from_the_question_unless_the_rule_says_otherwise() {
    let server = Server::with_rules(&limits(&[
        limit("plain", 1000, ""),
        limit("fixed", 100, ", cost: 10"),
        limit("header", 100, ", cost: 'header:x-cost'"),
        limit("computed", 100, ", cost: 'size(request.path)'"),
    ]));
    let mut connection = server.connect();
    let request = json!({"path": "/four", "headers": {"x-cost": "20"}});
    connection.check(&json!({"request": request, "cost": 7}));
    let mut left = |name: &str| connection.check(&json!({"limit": name, "cost": 0}))["remaining"].clone();
    assert_eq!(["plain", "fixed", "header", "computed"].map(&mut left), [993, 90, 80, 95]);
    connection.check(&json!({"request": request, "cost": 0}));
    let mut left = |name: &str| connection.check(&json!({"limit": name, "cost": 0}))["remaining"].clone();
    assert_eq!(["plain", "fixed", "header", "computed"].map(&mut left), [993, 90, 80, 95]);
}

#[test]
fn claims_of_a_token_count_only_if_it_verifies() {
    let secret = "0123456789abcdef0123456789abcdef";
    let rules = format!(
        "jwt: {{ key_file: secret.key, algorithms: [HS256] }}\n{}",
        limits(&[limit("user", 2, ", key: 'jwt:sub'")])
    );
    let server = Server::in_folder(folder_with(&[(RULES, &served(&rules)), ("secret.key", secret)]));
    let mut connection = server.connect();
    let token = |secret: &str| {
        let claims = json!({"sub": "ann", "exp": 4_000_000_000_u64});
        let key = jsonwebtoken::EncodingKey::from_secret(secret.as_bytes());
        jsonwebtoken::encode(&jsonwebtoken::Header::default(), &claims, &key).unwrap()
    };
    let mut ask = |token: String| {
        let headers = json!({"authorization": format!("Bearer {token}")});
        connection.check(&json!({"request": {"headers": headers}}))["remaining"].clone()
    };
    assert_eq!(ask(token(secret)), 1);
    assert_eq!(ask(token("ffffffffffffffffffffffffffffffff")), 1, "a forged token is anonymous");
    assert_eq!(ask(token(secret)), 0);
}

#[test]
fn an_answer_tells_why_a_token_failed() {
    let secret = "0123456789abcdef0123456789abcdef";
    let rules = format!(
        "jwt: {{ key_file: secret.key, algorithms: [HS256] }}\n{}",
        limits(&[
            limit("user", 9, ", key: 'jwt:sub', match: { path: /open }"),
            limit("strict", 9, ", key: 'jwt:sub', missing: deny, match: { path: /strict }")
        ])
    );
    let server = Server::in_folder(folder_with(&[(RULES, &served(&rules)), ("secret.key", secret)]));
    let mut connection = server.connect();
    let key = jsonwebtoken::EncodingKey::from_secret(secret.as_bytes());
    let expired = jsonwebtoken::encode(&jsonwebtoken::Header::default(), &json!({"sub": "ann", "exp": 1}), &key);
    let authorization = format!("Bearer {}", expired.unwrap());
    let mut ask =
        |path: &str| connection.check(&json!({"request": {"path": path, "headers": {"authorization": authorization}}}));
    let open = ask("/open");
    assert_eq!((&open["allowed"], &open["token"], open.get("reason")), (&json!(true), &json!("expired"), None));
    let strict = ask("/strict");
    assert_eq!((&strict["allowed"], &strict["token"]), (&json!(false), &json!("expired")));
    assert_eq!(strict["reason"], "token_expired");
    assert_eq!(ask("/other").get("token"), None);
}

#[test]
fn facts_beside_http_domain_descriptors_host_and_lists_of_headers() {
    let server = Server::with_rules(&limits(&[
        limit("edge", 9, ", key: 'descriptor:tenant', match: { domain: edge }"),
        limit("host", 8, ", match: { hosts: ['*.example.com'] }"),
        limit("beta", 7, ", match: { headers: { x-beta: '2' } }"),
    ]));
    let mut connection = server.connect();
    let mut limit = |request: Value| connection.check(&json!({"request": request}))["limit"].clone();
    assert_eq!(limit(json!({"domain": "edge", "descriptors": {"tenant": "a"}})), "edge");
    assert_eq!(limit(json!({"domain": "edge", "descriptors": {"other": "a"}})), Value::Null);
    assert_eq!(limit(json!({"host": "api.example.com:443"})), "host");
    assert_eq!(limit(json!({"headers": {"x-beta": ["1", "2"]}})), "beta");
    assert_eq!(limit(json!({"headers": {"x-beta": "1"}})), Value::Null);
}

#[test]
fn the_address_behind_a_trusted_proxy_is_the_client() {
    let rules = format!(
        "gateway: {{ listen: '127.0.0.1:0', trusted_proxies: [10.0.0.0/8] }}\n{}",
        limits(&[limit("ip", 9, ", key: ip")])
    );
    let server = Server::with_rules(&rules);
    let mut connection = server.connect();
    let mut left = |ip: &str, forwarded: &str| {
        let request = json!({"ip": ip, "headers": {"x-forwarded-for": forwarded}});
        connection.check(&json!({"request": request}))["remaining"].clone()
    };
    assert_eq!(left("10.0.0.1", "192.0.2.7"), 8);
    assert_eq!(left("192.0.2.7", "203.0.113.9"), 7, "nobody else is believed");
}

#[test]
fn keys_of_several_parts_and_of_none() {
    let server =
        Server::with_rules(&limits(&[limit("pair", 9, ", key: ['header:x-user-id', path]"), limit("all", 9, "")]));
    let mut connection = server.connect();
    assert_eq!(connection.check(&json!({"limit": "pair", "key": ["ann", "/a"]}))["remaining"], 8);
    assert_eq!(connection.check(&json!({"limit": "pair", "key": ["ann/", "a"]}))["remaining"], 8);
    assert_eq!(connection.check(&json!({"limit": "all"}))["remaining"], 8);
    for (question, message) in [
        (
            json!({"limit": "pair", "key": "ann"}),
            "`key` has 1 part, but `pair` counts by header:x-user-id, path: send a list of 2 strings",
        ),
        (
            json!({"limit": "all", "key": "ann"}),
            "`key` is given, but `all` has one counter for all requests: remove it",
        ),
        (
            json!({"limit": "all", "key": 1}),
            "`key`: found the number 1 at line 1 column 8: send a string or a list of strings",
        ),
    ] {
        let response = connection.post(question.to_string());
        assert_eq!((response.status, response.json()["message"].as_str().unwrap()), (400, message));
    }
}

#[test]
fn request_without_a_limit_is_allowed() {
    let server = Server::with_rules(&limits(&[limit("posts", 1, ", match: { methods: [POST] }")]));
    let expected = json!({"allowed": true, "limit": null, "quota": null, "remaining": null, "reset_after": null,
        "retry_after": null, "delay": 0.0, "source": null, "limits": [],
        "warning": "no limit applies to this request: check the names of its descriptors and headers, its domain, and \
            `match` of the limits"});
    assert_eq!(server.connect().check(&json!({"request": {"method": "GET"}})), expected);
}

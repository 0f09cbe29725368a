//! The admin API: rules, keys and explanations.

use serde_json::{Value, json};
use testkit::folder::{folder, folder_with};
use testkit::gateway::Gateway;
use testkit::tollgate::Process;
use testkit::wait::wait_until;

use crate::admin_client::AdminRequest;

const RULES: &str = "\
gateway: { routes: [{ path: /**, respond: { status: 204 } }] }
limits:
  - { name: per-user, key: header:x-user-id, algorithm: fixed_window, limit: 3, window: 10220d }
  - { name: per-ip, key: ip, limit: 1000, match: { path: /** } }
  - { name: pairs, key: [header:x-user-id, path], limit: 100 }
  - { name: global, limit: 1000, description: everything }
  - { name: watched, key: header:x-user-id, limit: 1, window: 10220d, shadow: true }
";

fn version(gateway: &Gateway) -> String {
    let rules = AdminRequest::get("/v1/rules").expect(200, gateway.admin());
    rules["version"].as_str().expect("a version").to_owned()
}

fn key(gateway: &Gateway, limit: &str, user: &str) -> Value {
    let keys = AdminRequest::get(&format!("/v1/keys?limit={limit}&key={user}")).expect(200, gateway.admin());
    keys["limits"][0].clone()
}

#[test]
fn status_describes_the_server() {
    let gateway = Gateway::with_admin(RULES);
    let status = AdminRequest::get("/v1/status").expect(200, gateway.admin());
    assert_eq!(status["ready"], true);
    assert_eq!((&status["store"]["kind"], &status["store"]["available"]), (&json!("memory"), &json!(true)));
    assert_eq!((&status["rules"]["source"], &status["rules"]["limits"]), (&json!("file"), &json!(5)));
    assert_eq!(status["rules"]["version"], version(&gateway));
    let surfaces: Vec<&Value> =
        status["listeners"].as_array().expect("a list").iter().map(|one| &one["surface"]).collect();
    assert_eq!(surfaces, ["gateway", "admin"]);
}

#[test]
fn live_shows_decisions_by_limit_while_it_is_polled() {
    let gateway = Gateway::with_admin(RULES);
    let live = wait_until(|| {
        for _ in 0..10 {
            gateway.connect().get_as("ann", "/");
        }
        let live = AdminRequest::get("/v1/live?order=denied&count=2").expect(200, gateway.admin());
        let has_denials = live["totals"]["denied"].as_f64().is_some_and(|rate| rate > 0.0);
        (has_denials && live["history"].as_array().is_some_and(|points| !points.is_empty())).then_some(live)
    });
    let live = live.expect("denials are shown");
    assert_eq!((&live["limits_total"], live["limits"].as_array().map(Vec::len)), (&json!(5), Some(2)));
    assert_eq!(live["limits"][0]["limit"], "per-user");
    assert!(live["limits"][0]["since_start"]["denied"].as_u64().is_some_and(|count| count > 0), "{live}");
    AdminRequest::get("/v1/live?count=1001").expect(400, gateway.admin());
    AdminRequest::get("/v1/live?order=size").expect(400, gateway.admin());
    AdminRequest::get("/v1/live?odrer=name").expect(400, gateway.admin());
}

#[test]
fn rules_are_read_with_their_limits_and_without_credentials() {
    let gateway = Gateway::with_admin(&format!("# redis://:hunter2@old\n{RULES}"));
    let response = AdminRequest::get("/v1/rules").send(gateway.admin());
    let rules = response.json();
    let tag = response.header("etag").expect("an ETag").to_owned();
    assert_eq!(tag, format!("\"{}\"", rules["version"].as_str().expect("a version")));
    assert!(!response.text().contains("hunter2"));
    assert!(rules["text"].as_str().expect("a text").contains("name: per-user"));
    let per_ip = &rules["limits"][1];
    assert_eq!((&per_ip["key"], &per_ip["match"]), (&json!(["ip"]), &json!({"path": "/**"})));
    assert_eq!(per_ip["numbers"], "1000 per 60 s (sliding_window_counter)");
    assert_eq!(
        (&rules["limits"][3]["description"], &rules["limits"][4]["shadow"]),
        (&json!("everything"), &json!(true))
    );
    assert_eq!(AdminRequest::get("/v1/rules").header("if-none-match", &tag).send(gateway.admin()).status, 304);
}

#[test]
fn rules_are_replaced_by_version_and_rolled_back() {
    let gateway = Gateway::with_admin(RULES);
    let first = version(&gateway);
    let next = RULES.replace("limit: 3", "limit: 5");
    let changed = AdminRequest::put_rules(&next, &first).expect(200, gateway.admin());
    assert_eq!(changed["lasts"], "until the file is saved or the server restarts");
    assert_eq!(changed["version"], version(&gateway));
    assert!(!changed["changes"].as_array().expect("a list").is_empty());
    assert_eq!(key(&gateway, "per-user", "ann")["quota"], 5);
    let stale = AdminRequest::put_rules(RULES, &first).send(gateway.admin());
    assert_eq!((stale.status, &stale.json()["error"]), (412, &json!("version_conflict")));
    assert_eq!(stale.json()["version"], changed["version"]);
    assert_eq!(stale.header("etag"), Some(&*format!("\"{}\"", version(&gateway))));

    let rules = AdminRequest::get("/v1/rules").expect(200, gateway.admin());
    assert_eq!((&rules["source"], &rules["history"][0]["version"]), (&json!("api"), &json!(first)));
    let back = json!({"version": first, "expected": changed["version"]});
    assert_eq!(AdminRequest::post("/v1/rules/rollback", &back).expect(200, gateway.admin())["version"], first);
    assert_eq!(key(&gateway, "per-user", "ann")["quota"], 3);
    AdminRequest::post("/v1/rules/rollback", &back).expect(412, gateway.admin());
    let same = json!({"version": first, "expected": first});
    let refused = AdminRequest::post("/v1/rules/rollback", &same).expect(409, gateway.admin());
    assert_eq!(refused["error"], "already_in_force");
    let unknown = json!({"version": "0123456789abcdef", "expected": first});
    AdminRequest::post("/v1/rules/rollback", &unknown).expect(404, gateway.admin());
    let said = gateway.await_said("roll_back_rules", 1);
    assert!(said.contains("replace_rules") && said.contains("local at 127.0.0.1"), "{said}");

    // A file that is saved later wins.
    gateway.save(&RULES.replace("limit: 3", "limit: 7"));
    let source = || AdminRequest::get("/v1/rules").expect(200, gateway.admin())["source"].clone();
    wait_until(|| (source() == "file").then_some(())).expect("the file is applied");
    assert_eq!(key(&gateway, "per-user", "ann")["quota"], 7);
}

#[test]
fn invalid_rules_and_other_settings_are_refused_where_they_stand() {
    let gateway = Gateway::with_admin(RULES);
    let first = version(&gateway);
    let invalid = RULES.replace("limit: 3", "limit: -3");
    let refused = AdminRequest::put_rules(&invalid, &first).expect(422, gateway.admin());
    let problem = &refused["problems"][0];
    assert_eq!((&problem["line"], &problem["severity"]), (&json!(3), &json!("error")), "{refused}");
    let routes = RULES.replace("204", "200");
    let refused = AdminRequest::put_rules(&routes, &first).expect(422, gateway.admin());
    let message = refused["problems"][0]["message"].as_str().expect("a message");
    assert!(message.starts_with("the admin API does not change gateway"), "{refused}");
    AdminRequest::put_rules(RULES, &first).without("if-match").expect(428, gateway.admin());
    AdminRequest::put_rules(RULES, "*").expect(428, gateway.admin());
    assert_eq!(version(&gateway), first, "nothing has changed");

    let validate = |rules: &str| AdminRequest::post_rules("/v1/rules/validate", rules).expect(200, gateway.admin());
    let valid = validate("limits: [{ name: per-user, key: header:x-user-id, limit: 9 }]\n");
    assert_eq!((&valid["valid"], &valid["problems"]), (&json!(true), &json!([])));
    assert!(valid["changes"].to_string().contains("per-user"), "{valid}");
    assert_eq!(validate(&invalid)["valid"], false);
    assert_eq!(validate(RULES)["changes"], json!([]));
    assert_eq!(version(&gateway), first, "nothing has changed");
}

/// The content of a file that everyone can read would be a secret that everyone can sign tokens with.
#[test]
fn rules_over_the_api_name_no_other_files_than_the_rule_file() {
    let jwt = |file: &str| format!("jwt: {{ key_file: {file}, algorithms: [HS256] }}\n{RULES}");
    let (admin, secret) = ("admin: { listen: '127.0.0.1:0' }\n", "0123456789abcdef0123456789abcdef");
    let file = format!("{admin}{}", jwt("secret.key").replacen("routes", "listen: '127.0.0.1:0', routes", 1));
    let files = [(testkit::tollgate::RULES, &*file), ("secret.key", secret), ("public.txt", secret)];
    let server = Process::start(folder_with(&files), &["serve", "--config", testkit::tollgate::RULES]);
    let admin = server.address_of("admin");
    let version = || AdminRequest::get("/v1/rules").expect(200, admin)["version"].as_str().map(str::to_owned);
    let rules =
        |file: &str| jwt(file).replacen("gateway: { routes: [{ path: /**, respond: { status: 204 } }] }\n", "", 1);
    let first = version().expect("a version");
    let names = ["public.txt".to_owned(), server.path("public.txt").display().to_string(), "absent.key".to_owned()];
    for name in names {
        let refused = AdminRequest::put_rules(&rules(&name), &first).expect(422, admin);
        let problem = json!({
            "line": 1, "column": 18, "severity": "error",
            "message": "the rule file of this node names another jwt.key_file",
            "fix": "name `secret.key`, or change the rule file of each node first",
        });
        assert_eq!(refused["problems"], json!([problem]), "{name}");
        let checked = AdminRequest::post_rules("/v1/rules/validate", &rules(&name)).expect(200, admin);
        assert_eq!((&checked["valid"], &checked["problems"]), (&json!(false), &json!([problem])), "{name}");
    }
    assert_eq!(version(), Some(first.clone()), "nothing has changed");
    AdminRequest::put_rules(&rules("secret.key"), &first).expect(200, admin);
}

#[test]
fn of_two_writers_exactly_one_wins() {
    let gateway = Gateway::with_admin(RULES);
    for round in 0..5 {
        let version = version(&gateway);
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let rules = RULES.replace("limit: 3", &format!("limit: {}", 10 * round + writer + 10));
                let (request, address) = (AdminRequest::put_rules(&rules, &version), gateway.admin());
                std::thread::spawn(move || request.send(address).status)
            })
            .collect();
        let mut statuses: Vec<u16> = writers.into_iter().map(|writer| writer.join().expect("it ends")).collect();
        statuses.sort_unstable();
        assert_eq!(statuses, [200, 412, 412, 412]);
    }
}

#[test]
fn built_in_rules_can_be_replaced() {
    let free = "127.0.0.1:0";
    let server = Process::start(folder(), &["serve", "--listen", free, "--admin", free]);
    let admin = server.address_of("admin");
    let rules = AdminRequest::get("/v1/rules").expect(200, admin);
    assert_eq!(rules["source"], "built_in");
    let next = "limits: [{ name: per-user, key: header:x-user-id, limit: 2 }]\n";
    AdminRequest::put_rules(next, rules["version"].as_str().expect("a version")).expect(200, admin);
    let keys = AdminRequest::get("/v1/keys?key=ann").expect(200, admin);
    assert_eq!((&keys["limits"][0]["limit"], &keys["limits"][0]["quota"]), (&json!("per-user"), &json!(2)));
    server.signal("HUP");
    server.await_said("SIGHUP received; the built-in rules are back: per-user: limit 2 → unset", 1);
    assert_eq!(AdminRequest::get("/v1/rules").expect(200, admin)["version"], rules["version"]);
    server.signal("HUP");
    server.await_said("SIGHUP received, and nothing changes: the built-in rules are in force", 1);
}

#[test]
fn state_of_a_key_is_shown_reset_and_granted() {
    let gateway = Gateway::with_admin(RULES);
    for _ in 0..4 {
        gateway.connect().get_as("ann", "/");
    }
    let keys = AdminRequest::get("/v1/keys?key=ann").expect(200, gateway.admin());
    let limits: Vec<&Value> = keys["limits"].as_array().expect("a list").iter().map(|one| &one["limit"]).collect();
    assert_eq!(limits, ["per-user", "watched"]);
    let ann = &keys["limits"][0];
    assert_eq!((&ann["remaining"], &ann["quota"], &ann["key"]), (&json!(0), &json!(3), &Value::Null));
    assert!(ann["retry_after"].as_f64().is_some_and(|wait| wait > 0.0), "{ann}");
    assert_eq!(ann["key_hash"].as_str().map(str::len), Some(16));

    let grant = json!({"limit": "per-user", "key": "ann", "units": 2});
    let granted = AdminRequest::post("/v1/keys/grant", &grant).expect(200, gateway.admin());
    assert_eq!((&granted["limits"][0]["remaining"], &granted["changed"]), (&json!(2), &json!(true)));
    let grant = json!({"limit": "per-user", "key": "ann", "units": 1000});
    let granted = AdminRequest::post("/v1/keys/grant", &grant).expect(200, gateway.admin());
    assert_eq!(granted["limits"][0]["remaining"], 3, "never more than the whole quota");
    gateway.connect().get_as("ann", "/");
    let reset = AdminRequest::post("/v1/keys/reset", &json!({"key": "ann"})).expect(200, gateway.admin());
    assert!(reset["limits"].as_array().expect("a list").iter().all(|one| one["remaining"] == one["quota"]), "{reset}");
    let said = gateway.await_said("reset_key", 1);
    assert!(said.contains("grant_units") && !said.contains("ann"), "keys are hashed: {said}");

    let pair = AdminRequest::get("/v1/keys?key=ann&key=%2F&limit=pairs").expect(200, gateway.admin());
    assert_eq!(pair["limits"][0]["quota"], 100);
    assert_eq!(AdminRequest::get("/v1/keys?limit=global").expect(200, gateway.admin())["limits"][0]["quota"], 1000);
    AdminRequest::get("/v1/keys").expect(400, gateway.admin());
    AdminRequest::get("/v1/keys?key=ann&limit=absent").expect(400, gateway.admin());
    AdminRequest::post("/v1/keys/grant", &json!({"limit": "per-user", "key": "ann"})).expect(400, gateway.admin());
}

#[test]
fn a_key_is_banned_in_any_limit_and_stays_so_over_a_reload() {
    let gateway = Gateway::with_admin(RULES);
    let ban = json!({"limit": "per-user", "key": "ann", "for": "10m"});
    let banned = AdminRequest::post("/v1/keys/ban", &ban).expect(200, gateway.admin());
    assert!(banned["limits"][0]["banned_for"].as_f64().is_some_and(|left| left > 590.0), "{banned}");
    let status = |user: &str| gateway.connect().get_as(user, "/").status;
    let refused = gateway.connect().get_as("ann", "/");
    assert_eq!((refused.status, status("bob")), (429, 204));
    assert!(refused.text().contains("This client is banned. Please retry after"), "{refused:?}");
    assert!(refused.header("retry-after").is_some(), "{refused:?}");
    assert_eq!(key(&gateway, "per-user", "ann")["remaining"], 3, "a banned request takes nothing");
    let explain = json!({"path": "/", "headers": {"x-user-id": "ann"}, "ip": "192.0.2.7"});
    let explained = AdminRequest::post("/v1/explain", &explain).expect(200, gateway.admin());
    assert_eq!((&explained["reason"], &explained["counts"]), (&json!("banned"), &json!("live")), "{explained}");

    gateway.save(&RULES.replace("limit: 3", "limit: 4"));
    gateway.await_said("is in force", 1);
    assert_eq!(status("ann"), 429);
    let unban = json!({"limit": "per-user", "key": "ann"});
    let lifted = AdminRequest::post("/v1/keys/unban", &unban).expect(200, gateway.admin());
    assert_eq!(lifted["limits"][0]["banned_for"], Value::Null);
    assert_eq!(status("ann"), 204);

    AdminRequest::post("/v1/keys/ban", &json!({"limit": "per-user", "key": "ann", "for": 600}))
        .expect(200, gateway.admin());
    AdminRequest::post("/v1/keys/reset", &unban).expect(200, gateway.admin());
    assert_eq!(status("ann"), 204, "a reset lifts the ban");
    let shadow = json!({"limit": "watched", "key": "ann", "for": 600});
    AdminRequest::post("/v1/keys/ban", &shadow).expect(409, gateway.admin());
    for length in [json!(0), json!(-1), json!("soon"), json!(1e12), json!(null)] {
        let ban = json!({"limit": "per-user", "key": "ann", "for": length});
        AdminRequest::post("/v1/keys/ban", &ban).expect(400, gateway.admin());
    }
    let long = json!({"limit": "per-user", "key": "x".repeat(1025), "for": 600});
    AdminRequest::post("/v1/keys/ban", &long).expect(400, gateway.admin());
}

#[test]
fn invalid_fields_are_refused_with_the_field_and_the_fix() {
    let gateway = Gateway::with_admin(RULES);
    let refusals = [
        ("/v1/keys/ban", json!({"limit": "per-user", "key": "ann", "for": "soon"})),
        ("/v1/keys/ban", json!({"limit": "per-user", "key": "ann", "for": 0})),
        ("/v1/keys/ban", json!({"limit": "per-user", "key": "ann"})),
        ("/v1/keys/grant", json!({"limit": "per-user", "key": "ann"})),
        ("/v1/keys/grant", json!({"limit": "per-user", "key": "ann", "units": 1.5})),
        ("/v1/explain", json!({"path": "/", "ip": "localhost"})),
        ("/v1/explain", json!({"path": "/", "ip": 7})),
        ("/v1/explain", json!({"path": "/", "headers": {"x": 1}})),
        ("/v1/simulate", json!({"limits": {"limit": "many"}})),
        ("/v1/simulate", json!({"traffic": {"for": "soon"}})),
        ("/v1/rules/rollback", json!({"version": "1"})),
    ]
    .map(|(path, body)| {
        let refused = AdminRequest::post(path, &body).expect(400, gateway.admin());
        format!("{path} {body}\n  {}\n", refused["message"].as_str().expect("a message"))
    });
    insta::assert_snapshot!(refusals.concat());
}

#[test]
fn a_change_of_nothing_says_so() {
    let gateway = Gateway::with_admin(RULES);
    let key = json!({"limit": "per-user", "key": "ann"});
    let grant = json!({"limit": "per-user", "key": "ann", "units": 5});
    for (path, body) in [("reset", &key), ("unban", &key), ("grant", &grant)] {
        let response = AdminRequest::post(&format!("/v1/keys/{path}"), body).expect(200, gateway.admin());
        assert_eq!(response["changed"], false, "{path}");
    }
    gateway.await_said("changed false", 3);
    for _ in 0..4 {
        gateway.connect().get_as("ann", "/");
    }
    for (path, body) in
        [("grant", &grant), ("ban", &json!({"limit": "per-user", "key": "ann", "for": 60})), ("unban", &key)]
    {
        let response = AdminRequest::post(&format!("/v1/keys/{path}"), body).expect(200, gateway.admin());
        assert_eq!(response["changed"], true, "{path}");
    }
    gateway.connect().get_as("ann", "/");
    assert_eq!(AdminRequest::post("/v1/keys/reset", &key).expect(200, gateway.admin())["changed"], true);
    gateway.await_said("changed true", 3);
}

#[test]
fn bans_are_listed_and_lifted_by_their_hash() {
    let gateway = Gateway::with_admin(RULES);
    let bans = |query: &str| AdminRequest::get(&format!("/v1/bans{query}")).expect(200, gateway.admin());
    assert_eq!(bans(""), json!({"total": 0, "bans": []}));
    for (limit, key) in [("per-user", json!("ann")), ("pairs", json!(["ann", "/a"]))] {
        let ban = json!({"limit": limit, "key": key, "for": 600});
        AdminRequest::post("/v1/keys/ban", &ban).expect(200, gateway.admin());
    }
    let all = bans("");
    let newest = &all["bans"][0];
    assert_eq!((&all["total"], &newest["limit"], &newest["in_force"]), (&json!(2), &json!("pairs"), &json!(true)));
    assert_eq!((&newest["by"], &newest["key"]), (&json!("local at 127.0.0.1"), &Value::Null));
    let length = newest["until"].as_f64().zip(newest["since"].as_f64()).map(|(until, since)| until - since);
    assert!(length.is_some_and(|length| (length - 600.0).abs() < 0.01), "{newest}");
    let of_users = bans("?limit=per-user&count=1");
    // printf 'per-user\0ann' | sha256sum
    assert_eq!((&of_users["total"], &of_users["bans"][0]["key_hash"]), (&json!(1), &json!("9ea16ba994ebd253")));

    let unban = |body: Value| AdminRequest::post("/v1/keys/unban", &body);
    let both = json!({"limit": "per-user", "key": "ann", "key_hash": "9ea16ba994ebd253"});
    unban(both).expect(400, gateway.admin());
    unban(json!({"limit": "pairs", "key_hash": "9ea16ba994ebd253"})).expect(404, gateway.admin());
    let lifted = unban(json!({"key_hash": "9ea16ba994ebd253"})).expect(200, gateway.admin());
    assert_eq!(lifted["changed"], true);
    assert_eq!(gateway.connect().get_as("ann", "/").status, 204);
    // The limit of the other ban refuses nothing any more.
    gateway.save(&RULES.replace(
        "key: [header:x-user-id, path], limit: 100",
        "key: [header:x-user-id, path], shadow: true, limit: 100",
    ));
    let waits = wait_until(|| (bans("")["bans"][0]["in_force"] == false).then_some(()));
    waits.expect("the ban is not in force");
    AdminRequest::get("/v1/bans?count=0").expect(400, gateway.admin());
}

#[test]
fn spellings_of_an_address_are_one_key() {
    let gateway = Gateway::start(
        "gateway: { listen: '127.0.0.1:0', trusted_proxies: [127.0.0.0/8], routes: [{ path: /**, respond: { status: 204 } }] }\n\
         admin: { listen: '127.0.0.1:0', show_keys: true }\n\
         limits: [{ name: per-ip, key: ip, limit: 3, window: 10220d }]\n",
    );
    let status = |client: &str| {
        gateway.connect().ask(format!("GET / HTTP/1.1\r\nHost: h\r\nX-Forwarded-For: {client}\r\n\r\n")).status
    };
    let change = |action: &str, key: &str| {
        let body = json!({"limit": "per-ip", "key": key, "for": 600});
        let body = if action == "ban" { body } else { json!({"limit": "per-ip", "key": key}) };
        AdminRequest::post(&format!("/v1/keys/{action}"), &body).send(gateway.admin())
    };
    let network = json!(["2001:db8::/64"]);
    assert_eq!((status("2001:db8::9"), status("203.0.113.1")), (204, 204));
    let state = AdminRequest::get("/v1/keys?key=2001:DB8:0::7").expect(200, gateway.admin());
    assert_eq!((&state["limits"][0]["remaining"], &state["limits"][0]["key"]), (&json!(2), &network));
    let mapped = AdminRequest::get("/v1/keys?key=::ffff:203.0.113.1").expect(200, gateway.admin());
    assert_eq!(mapped["limits"][0]["remaining"], 2);

    for key in ["2001:db8::1", "2001:db8::/64", "2001:db8:0:0:ffff::"] {
        assert_eq!(change("ban", key).status, 200);
        let bans = AdminRequest::get("/v1/bans").expect(200, gateway.admin());
        assert_eq!((&bans["total"], &bans["bans"][0]["key"]), (&json!(1), &network), "{key}");
        assert_eq!((status("2001:db8::9"), status("2001:db8:0:1::9")), (429, 204));
    }
    assert_eq!(change("unban", "2001:db8::77").json()["changed"], true);
    assert_eq!(status("2001:db8::9"), 204);
    assert_eq!(change("reset", "2001:db8::78").json()["changed"], true);

    for action in ["ban", "unban", "reset"] {
        let refused = change(action, "not-an-ip");
        assert_eq!(refused.status, 400, "{action}");
        let message = refused.json()["message"].as_str().expect("a message").to_owned();
        assert!(message.starts_with("`key`: `not-an-ip` is not an IP address: write"), "{message}");
    }
    AdminRequest::get("/v1/keys?key=not-an-ip").expect(400, gateway.admin());
    // The limit counts by something else now, so the ban can refuse nothing.
    assert_eq!(change("ban", "2001:db8::1").status, 200);
    gateway.save(
        "gateway: { listen: '127.0.0.1:0', trusted_proxies: [127.0.0.0/8], routes: [{ path: /**, respond: { status: 204 } }] }\n\
         admin: { listen: '127.0.0.1:0', show_keys: true }\n\
         limits: [{ name: per-ip, key: method, limit: 3, window: 10220d }]\n",
    );
    let in_force = || AdminRequest::get("/v1/bans").expect(200, gateway.admin())["bans"][0]["in_force"].clone();
    wait_until(|| (in_force() == false).then_some(())).expect("the ban is not in force");
}

#[test]
fn a_hash_in_place_of_a_key_is_refused_with_the_fix() {
    let gateway = Gateway::with_admin(RULES);
    for _ in 0..4 {
        gateway.connect().get_as("ann", "/");
    }
    let top = AdminRequest::get("/v1/top").expect(200, gateway.admin());
    let hash = top["keys"][0]["key"].as_str().expect("a hash").to_owned();
    for target in [format!("/v1/keys?key={hash}"), format!("/v1/keys?key=%23{hash}&limit=per-user")] {
        let refused = AdminRequest::get(&target).expect(400, gateway.admin());
        assert_eq!(refused["error"], "key_is_hash");
        let message = refused["message"].as_str().expect("a message");
        assert!(message.contains("show_keys: true") && message.contains("`per-user`"), "{message}");
    }
    for path in ["reset", "unban"] {
        let body = json!({"limit": "per-user", "key": hash});
        AdminRequest::post(&format!("/v1/keys/{path}"), &body).expect(400, gateway.admin());
    }
    let ban = |key: &str| AdminRequest::post("/v1/keys/ban", &json!({"limit": "per-user", "key": key, "for": 60}));
    ban(&hash).expect(400, gateway.admin());
    // A key may look like a hash.
    let similar = "0123456789abcdef";
    let state = AdminRequest::get(&format!("/v1/keys?key={similar}&limit=per-user")).expect(200, gateway.admin());
    assert!(state["note"].as_str().is_some_and(|note| note.contains("looks like the hash")), "{state}");
    assert_eq!(state["limits"][0]["remaining"], 3);
    ban(similar).expect(200, gateway.admin());
    assert_eq!(AdminRequest::get("/v1/keys?key=ann").expect(200, gateway.admin())["note"], Value::Null);
}

#[test]
fn a_ban_of_the_limit_itself_is_lifted_too() {
    let rules = "gateway: { routes: [{ path: /**, respond: { status: 204 } }] }\nlimits:\n  - { name: login, key: \
                 header:x-user-id, limit: 100, window: 1h, blocked: { keys: [eve] }, ban: { after: 1, within: 1h, for: 1h } }\n  \
                 - { name: tight, key: header:x-user-id, algorithm: fixed_window, limit: 1, window: 10220d, ban: { after: 1, \
                 within: 1h, for: 1h } }\n";
    let gateway = Gateway::with_admin(rules);
    for _ in 0..3 {
        gateway.connect().get_as("ann", "/");
    }
    assert!(key(&gateway, "tight", "ann")["banned_for"].as_f64().is_some());
    let unban = json!({"limit": "tight", "key": "ann"});
    let lifted = AdminRequest::post("/v1/keys/unban", &unban).expect(200, gateway.admin());
    assert_eq!((&lifted["limits"][0]["banned_for"], &lifted["limits"][0]["remaining"]), (&Value::Null, &json!(0)));
    assert_eq!(key(&gateway, "login", "eve")["state"], "blocked");
}

#[test]
fn explanations_have_live_counts_and_count_nothing() {
    let gateway = Gateway::with_admin(RULES);
    gateway.connect().get_as("ann", "/");
    let request = json!({"method": "GET", "path": "/a", "headers": {"X-User-Id": "ann"}, "ip": "192.0.2.7"});
    for _ in 0..2 {
        let explained = AdminRequest::post("/v1/explain", &request).expect(200, gateway.admin());
        assert_eq!((&explained["allowed"], &explained["counts"]), (&json!(true), &json!("live")));
        let per_user = &explained["limits"][0];
        assert_eq!(
            (&per_user["limit"], &per_user["counted"]["remaining"]),
            (&json!("per-user"), &json!(1)),
            "{per_user}"
        );
    }
    for invalid in [json!({}), json!({"path": "a"}), json!({"path": "/", "headers": {"a b": "c"}}), json!([])] {
        AdminRequest::post("/v1/explain", &invalid).expect(400, gateway.admin());
    }
}

//! Several nodes on one Redis, and nodes whose Redis is unreachable.

use std::io::Write;
use std::net::{Shutdown, TcpListener};

use serde_json::{Value, json};
use testkit::folder::folder_with;
use testkit::http1::Connection;
use testkit::redis::RedisServer;
use testkit::service::{Server, served};
use testkit::tollgate::{RULES, run_in, transcript};

fn rules(redis: &RedisServer, limit: u64, rest: &str) -> String {
    // A long timeout, so that a busy machine is not mistaken for a failing store.
    format!(
        "store: {}\nstore_timeout: 5s\n{rest}\nlimits:\n  - {{ name: user, key: 'header:x-user-id', \
         algorithm: fixed_window, align: first_request, limit: {limit}, window: 1h }}\n",
        redis.url()
    )
}

fn user(name: &str) -> Value {
    json!({"request": {"headers": {"x-user-id": name}}})
}

#[test]
fn two_nodes_count_together() {
    let redis = RedisServer::start();
    let nodes = [(); 2].map(|()| Server::with_rules(&rules(&redis, 10, "")));
    let mut connections = nodes.each_ref().map(Server::connect);
    for left in (0..10).rev() {
        let answer = connections[left % 2].check(&user("ann"));
        assert_eq!((&answer["remaining"], &answer["source"]), (&json!(left), &json!("store")));
    }
    for connection in &mut connections {
        assert_eq!(connection.check(&user("ann"))["allowed"], false);
        assert_eq!(connection.check(&user("bob"))["allowed"], true);
    }
    // A cached denial holds for a short time only, so on a busy machine it may have to be cached again.
    assert!((0..100).any(|_| connections[0].check(&user("ann"))["source"] == "denial_cache"));
}

#[test]
fn a_batch_on_redis_is_decided_in_order() {
    let redis = RedisServer::start();
    let server = Server::with_rules(&rules(&redis, 10, ""));
    let mut connection = server.connect();
    let costs = [7, 7, 2, 1, 1];
    let batch: Vec<Value> = costs.map(|cost| json!({"limit": "user", "key": "ann", "cost": cost})).into();
    let answers = connection.check(&json!(batch));
    let allowed: Vec<&Value> = answers.as_array().unwrap().iter().map(|answer| &answer["allowed"]).collect();
    assert_eq!(allowed, [true, false, true, true, false]);
    let thousand: Vec<Value> = (0..1000).map(|key| user(&format!("user-{key}"))).collect();
    let answers = connection.check(&json!(thousand));
    assert!(answers.as_array().unwrap().iter().all(|answer| answer["remaining"] == 9));
}

#[test]
fn without_redis_each_policy_answers_in_its_way() {
    let mut redis = RedisServer::start();
    let cases = ["local", "allow", "deny"].map(|policy| {
        let rest = format!("on_store_failure: {policy}");
        (policy, Server::with_rules(&rules(&redis, 1, &rest)))
    });
    for (_, server) in &cases {
        server.connect().check(&user("before"));
    }
    redis.kill();
    for (policy, server) in &cases {
        let mut connection = server.connect();
        let asked = [(); 2].map(|()| connection.check(&user("ann")));
        let output = asked.each_ref().map(|answer| (answer["allowed"] == true, answer["source"].as_str().unwrap()));
        match *policy {
            "local" => assert_eq!(output, [(true, "local"), (false, "local")]),
            "allow" => assert_eq!(output, [(true, "policy"); 2]),
            _ => {
                assert_eq!(output, [(false, "policy"); 2]);
                assert_eq!(asked[0]["reason"], "store_unavailable");
            }
        }
    }
}

#[test]
fn nodes_without_redis_share_a_limit() {
    let mut redis = RedisServer::start();
    let admin = "admin: { listen: '127.0.0.1:0' }";
    let nodes = [(); 3].map(|()| Server::with_rules(&rules(&redis, 10, admin)));
    for node in &nodes {
        let seen = || metric(node, "tollgate_fleet_nodes").filter(|line| line == "tollgate_fleet_nodes 3");
        assert!(testkit::wait::wait_until(seen).is_some(), "{:?}", metric(node, "tollgate_fleet_nodes"));
    }
    redis.kill();
    let mut admitted = 0;
    for node in &nodes {
        let mut connection = node.connect();
        for _ in 0..10 {
            let answer = connection.check(&user("ann"));
            assert_eq!((&answer["source"], &answer["quota"]), (&json!("local"), &json!(10)));
            admitted += u64::from(answer["allowed"] == true);
        }
    }
    assert_eq!(admitted, 12, "the share of each is 4");
}

#[test]
fn a_node_starts_while_redis_is_down_and_says_so_and_uses_it_once_it_is_back() {
    let mut redis = RedisServer::start();
    redis.kill();
    let lonely = Server::with_rules(&rules(&redis, 10, "expected_nodes: 5"));
    let answer = lonely.connect().check(&user("ann"));
    assert_eq!((&answer["source"], &answer["remaining"]), (&json!("local"), &json!(1)), "its share is 2");
    let server = Server::with_rules(&rules(&redis, 10, "on_store_failure: deny"));
    let address = redis.url().replace("redis://", "");
    let said = server.await_said(&format!("tollgate: warning: the store at {address} does not answer: "), 1);
    let meanwhile = "; until it does, limits follow on_store_failure (deny \
                     unless a limit sets its own): start it, or correct its URL\n";
    assert!(said.contains("Connection refused") && said.contains(meanwhile), "{said}");
    let mut connection = server.connect();
    assert_eq!(connection.check(&user("ann"))["reason"], "store_unavailable");
    redis.restart();
    let back =
        testkit::wait::wait_until(|| Some(connection.check(&user("ann"))).filter(|answer| answer["allowed"] == true));
    assert_eq!(back.expect("the store is asked again")["source"], "store");
}

/// Nothing is counted, so that a number would stay the same for ever.
#[test]
fn decisions_by_the_failure_policy_name_no_remaining_quota() {
    let mut redis = RedisServer::start();
    redis.kill();
    for (policy, allowed) in [("allow", true), ("deny", false)] {
        let server = Server::with_rules(&rules(&redis, 5, &format!("on_store_failure: {policy}")));
        for _ in 0..2 {
            let answer = server.connect().check(&user("ann"));
            assert_eq!((&answer["allowed"], &answer["source"]), (&json!(allowed), &json!("policy")), "{answer}");
            assert_eq!((&answer["quota"], &answer["limit"]), (&json!(5), &json!("user")), "{answer}");
            assert_eq!((&answer["remaining"], &answer["reset_after"]), (&json!(null), &json!(null)), "{answer}");
        }
    }
}

#[test]
fn a_store_that_does_not_take_the_password_is_reported_without_it() {
    let redis = RedisServer::start();
    redis.command(&["ACL", "SETUSER", "ann", "on", ">another", "~*", "&*", "+@all"]);
    let text = rules(&redis, 10, "").replace("redis://", "redis://ann:hunter2@");
    let server = Server::with_rules(&text);
    let address = redis.url().replace("redis://", "");
    let said = server.await_said(&format!("tollgate: warning: the store at {address} does not answer: "), 1);
    assert!(said.contains("uthentication failed") && !said.contains("hunter2"), "{said}");
    assert!(said.contains(": correct the user and the password\n"), "{said}");
}

#[test]
fn reply_of_a_server_that_is_not_redis_is_logged_in_one_line() {
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = web.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in web.incoming() {
            let mut stream = stream.expect("it accepts");
            std::thread::spawn(move || {
                let page = "x".repeat(5000);
                // A client that has disconnected in the meantime is ignored.
                _ = write!(stream, "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\n\r\n{page}\r\n");
                _ = stream.shutdown(Shutdown::Write);
                // A socket that is closed before everything was read resets the connection, and the page may be lost.
                _ = std::io::copy(&mut stream, &mut std::io::sink());
            });
        }
    });
    // A long timeout, so that a busy machine does not look like a server that does not answer.
    let rules = format!("store: redis://{address}\nstore_timeout: 5s\nlimits: [{{ name: user }}]\n");
    let server = Server::with_rules(&rules);
    let said = server.await_said("limits follow on_store_failure", 1);
    assert!(said.starts_with(&format!("tollgate: warning: the store at {address} does not answer: ")), "{said}");
    assert!(
        said.contains(": make sure that a Redis or Valkey is at its address") && said.lines().count() == 1,
        "{said}"
    );
    assert!(said.len() < 600, "{said}");
}

#[test]
fn fleets_with_different_prefixes_share_one_redis_and_no_counts() {
    let redis = RedisServer::start();
    let with = |prefix: &str, limit: u64| {
        let store = format!("store: {{ url: '{}', prefix: {prefix} }}\n", redis.url());
        rules(&redis, limit, "").replace(&format!("store: {}\n", redis.url()), &store)
    };
    let (one, other) = (Server::with_rules(&with("one", 10)), Server::with_rules(&with("other", 10)));
    assert_eq!(one.connect().check(&user("ann"))["remaining"], 9);
    assert_eq!(other.connect().check(&user("ann"))["remaining"], 9);
    let office = folder_with(&[(RULES, &with("other", 20))]);
    let published = run_in(office.path(), &["publish", "--config", RULES]);
    assert_eq!(transcript(&published), "tollgate.yaml is published as version 1\nexit code 0");
    other.await_said("tollgate: published version 1 is in force: user: ", 1);
    assert_eq!(other.connect().check(&user("ann"))["remaining"], 18);
    assert_eq!(one.connect().check(&user("ann"))["remaining"], 8);
}

#[test]
fn a_rule_set_published_once_reaches_every_node_and_a_bad_file_is_not_published() {
    let redis = RedisServer::start();
    let nodes = [(); 2].map(|()| Server::with_rules(&rules(&redis, 10, "")));
    let mut connections = nodes.each_ref().map(Server::connect);
    assert_eq!(connections[0].check(&user("ann"))["remaining"], 9);

    let office = folder_with(&[(RULES, &rules(&redis, 20, ""))]);
    let publish = |arguments: &[&str]| run_in(office.path(), &[&["publish", "--config", RULES], arguments].concat());
    assert_eq!(transcript(&publish(&["--expect", "0"])), "tollgate.yaml is published as version 1\nexit code 0");
    let conflict = "on stderr:\ntollgate: the newest version is 1, not the expected one: see it with `tollgate publish --show`\nexit code 1";
    assert_eq!(transcript(&publish(&["--expect", "0"])), conflict);
    for (node, connection) in nodes.iter().zip(&mut connections) {
        node.await_said("tollgate: published version 1 is in force: user: ", 1);
        assert_eq!(connection.check(&user("bob"))["quota"], 20);
    }
    assert_eq!(connections[1].check(&user("ann"))["remaining"], 18, "what was counted before stays counted");

    std::fs::write(office.path().join(RULES), served(&rules(&redis, 0, ""))).unwrap();
    assert_eq!(publish(&[]).status.code(), Some(2));
    // A node that starts later finds what was published before.
    let late = Server::with_rules(&rules(&redis, 10, ""));
    late.await_said("tollgate: published version 1 is in force: user: ", 1);
    assert_eq!(late.connect().check(&user("ann"))["remaining"], 17);
}

/// Returns the line of a metric.
fn metric(server: &Server, name: &str) -> Option<String> {
    let mut connection = Connection::to(server.address_of("admin"));
    connection.send("GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let text = connection.receive().text().to_owned();
    text.lines().find(|line| line.starts_with(name)).map(str::to_owned)
}

#[test]
fn published_rules_that_redis_lost_are_restored_and_every_node_says_which_it_has() {
    let mut redis = RedisServer::start();
    let admin = "admin: { listen: '127.0.0.1:0' }";
    let start = || Server::with_rules(&rules(&redis, 10, admin));
    let nodes = [(); 2].map(|()| start());
    let info = metric(&nodes[0], "tollgate_rules_info").expect("a metric");
    let version = info.strip_prefix(r#"tollgate_rules_info{source="file",version=""#).expect("the file is in force");
    assert!(version.ends_with(r#"",publication="",id=""} 1"#), "{info}");
    assert_eq!(version.find('"'), Some(16), "a hash of the text: {info}");
    let office = folder_with(&[(RULES, &rules(&redis, 20, ""))]);
    let publish =
        |arguments: &[&str]| transcript(&run_in(office.path(), &[&["publish", "--config", RULES], arguments].concat()));
    assert_eq!(publish(&[]), "tollgate.yaml is published as version 1\nexit code 0");
    for node in &nodes {
        node.await_said("tollgate: published version 1 is in force: user: ", 1);
    }
    // Redis has no persistence, so the rules are lost.
    redis.restart();
    let late = Server::with_rules(&rules(&redis, 10, admin));
    late.await_said("tollgate: published version 1 is in force: user: ", 1);
    let restored = testkit::wait::wait_until(|| {
        let line = "tollgate: warning: Redis had lost the published rules of version 1 (1-";
        nodes.iter().find(|node| node.said().contains(line))
    });
    let restored = restored.expect("one of them restored it");
    assert_eq!(
        metric(restored, "tollgate_published_rules_restored_total").as_deref(),
        Some("tollgate_published_rules_restored_total 1")
    );
    let info = |node: &Server| metric(node, "tollgate_rules_info").expect("a metric");
    let first = info(&nodes[0]);
    assert!(first.starts_with(r#"tollgate_rules_info{source="published",version=""#), "{first}");
    assert!(first.contains(r#"",publication="1",id="1-"#), "{first}");
    for node in [&nodes[1], &late] {
        // A node says that rules are in force a moment before its metrics do.
        let same = testkit::wait::wait_until(|| (info(node) == first).then_some(()));
        assert!(same.is_some(), "{} is not {first}", info(node));
    }
}

#[test]
fn routes_and_listeners_are_not_published_and_not_reported_as_changed() {
    let redis = RedisServer::start();
    let gateway = |route: &str, more: &str| {
        format!("gateway: {{ listen: '127.0.0.1:0', routes: [{{ path: {route}, upstream: echo }}]{more} }}")
    };
    let node = Server::with_rules(&rules(&redis, 10, &gateway("/own/**", "")));
    let more = ", max_body: 1KiB, trusted_proxies: [10.0.0.0/8]";
    let parts = format!("{}\nadmin: {{ listen: '127.0.0.1:9' }}", gateway("/**", more));
    let office = folder_with(&[(RULES, &served(&rules(&redis, 20, &parts)))]);
    let publish =
        |arguments: &[&str]| transcript(&run_in(office.path(), &[&["publish", "--config", RULES], arguments].concat()));
    let note = "tollgate: nodes apply its limits, headers, body and jwt, and gateway.trusted_proxies and gateway.forwarding_header; they keep their own the rest of gateway, service, admin\n";
    assert_eq!(publish(&[]), format!("tollgate.yaml is published as version 1\non stderr:\n{note}exit code 0"));
    node.await_said("tollgate: published version 1 is in force: user: limit 10 → 20; gateway.trusted_proxies unset → [10.0.0.0/8]\n", 1);
    assert_eq!(
        publish(&["--withdraw"]),
        "version 2 withdraws the published rules; nodes return to their own files\nexit code 0"
    );
    node.await_said(
        "tollgate: tollgate.yaml is in force: user: limit 20 → 10; gateway.trusted_proxies [10.0.0.0/8] → unset\n",
        1,
    );
}

#[test]
fn published_rules_can_be_shown_and_withdrawn() {
    let redis = RedisServer::start();
    let node = Server::with_rules(&rules(&redis, 10, ""));
    let text = rules(&redis, 20, "");
    let office = folder_with(&[(RULES, &text)]);
    let publish =
        |arguments: &[&str]| transcript(&run_in(office.path(), &[&["publish", "--config", RULES], arguments].concat()));
    assert_eq!(publish(&["--show"]), "nothing is published\nexit code 1");
    assert_eq!(publish(&["--withdraw"]), "nothing is published\nexit code 0");
    assert_eq!(
        publish(&["--show", "--json"]),
        "{\n  \"version\": 0,\n  \"id\": null,\n  \"rules\": null\n}\nexit code 1"
    );

    assert_eq!(publish(&[]), "tollgate.yaml is published as version 1\nexit code 0");
    node.await_said("tollgate: published version 1 is in force: user: ", 1);
    let mut connection = node.connect();
    assert_eq!(connection.check(&user("ann"))["remaining"], 19);
    assert_eq!(publish(&["--show"]), format!("# published version 1\n{text}exit code 0"));
    let json = publish(&["--show", "--json"]);
    let json: serde_json::Value = serde_json::from_str(json.strip_suffix("exit code 0").expect("yes")).expect("JSON");
    let id = json["id"].as_str().expect("an id");
    assert!(id.starts_with("1-") && id.len() == "1-".len() + 16, "{id}");
    assert_eq!(json, serde_json::json!({ "version": 1, "id": id, "rules": text }));

    let conflict = "on stderr:\ntollgate: the newest version is 1, not the expected one: see it with `tollgate publish --show`\nexit code 1";
    assert_eq!(publish(&["--withdraw", "--expect", "3"]), conflict);
    let withdrawn = "version 2 withdraws the published rules; nodes return to their own files\nexit code 0";
    assert_eq!(publish(&["--withdraw", "--expect", "1"]), withdrawn);
    node.await_said("tollgate: version 2 withdraws the published rules; the rules of tollgate.yaml are back", 1);
    node.await_said("tollgate: tollgate.yaml is in force: user: ", 1);
    let answer = connection.check(&user("ann"));
    assert_eq!((&answer["quota"], &answer["remaining"]), (&serde_json::json!(10), &serde_json::json!(8)));
    assert_eq!(publish(&["--withdraw"]), withdrawn);
    assert_eq!(publish(&["--show"]), "nothing is published; version 2 withdrew the rules\nexit code 1");

    // A node that starts now uses its own file, and has no published rules to withdraw.
    let late = Server::with_rules(&rules(&redis, 10, ""));
    assert_eq!(late.connect().check(&user("bob"))["quota"], 10);
    assert_eq!(publish(&["--expect", "2"]), "tollgate.yaml is published as version 3\nexit code 0");
    let said = late.await_said("tollgate: published version 3 is in force: user: ", 1);
    assert!(!said.contains("withdraws"), "{said}");
}

/// Returns the output for credentials of a store at a position of the file.
fn login_refused(place: &str, what: &str) -> String {
    format!(
        "on stderr:\ntollgate.yaml:{place}: {what}, which everyone who reads published rules would see: remove them from the file, comments included, and pass the URL with its credentials as --store or TOLLGATE_STORE\nexit code 2"
    )
}

#[test]
fn a_file_with_the_login_of_a_store_is_not_published_and_the_login_may_be_given_beside_it() {
    let redis = RedisServer::start();
    redis.command(&["ACL", "SETUSER", "ann", "on", ">hunter2", "~*", "&*", "+@all"]);
    redis.command(&["ACL", "SETUSER", "default", "off"]);
    let url = redis.url().replace("redis://", "redis://ann:hunter2@");
    let with_login = |text: &str| text.replace("redis://", "redis://ann:hunter2@");
    let own = rules(&redis, 10, "");
    let node = Server::with_rules(&with_login(&own));
    let text = rules(&redis, 20, "");
    let office = folder_with(&[(RULES, &text)]);
    let publish =
        |arguments: &[&str]| transcript(&run_in(office.path(), &[&["publish", "--config", RULES], arguments].concat()));
    let no_override = "    overrides: [{ key: 'redis://svc@db', limit: 5 }]\n";
    let listed = "limits:\n  - name: user\n    key: header:x-user-id\n    algorithm: fixed_window\n    limit: 5\n    \
                  window: 1h\n";
    let in_line = "an @ follows the URL of a store, so this line may contain credentials";
    for (refused, place, what) in [
        (with_login(&text), "1:8", in_line),
        (format!("{text}# was redis://:it's-hunter2@old\n"), "6:7", in_line),
        (format!("{text}# was \"RedisS://:two hunter2@old\"\n"), "6:8", in_line),
        (format!("{listed}{no_override}"), "7:25", in_line),
        (format!("store: \"redis:\\/\\/:hunter2@h\"\n{listed}"), "1:8", "the store's URL has credentials"),
    ] {
        std::fs::write(office.path().join(RULES), refused).unwrap();
        assert_eq!(publish(&["--store", &url]), login_refused(place, what));
    }
    std::fs::write(office.path().join(RULES), &text).unwrap();
    assert_eq!(publish(&["--show", "--store", &url]), "nothing is published\nexit code 1");
    assert_eq!(publish(&["--store", &url]), "tollgate.yaml is published as version 1\nexit code 0");
    node.await_said("tollgate: published version 1 is in force: user: ", 1);
    assert_eq!(node.connect().check(&user("ann"))["source"], "store", "the node has its own login");
    assert_eq!(publish(&["--show", "--store", &url]), format!("# published version 1\n{text}exit code 0"));
    let explain = ["explain", "--config", RULES, "--store", &url, "GET", "/", "-H", "X-User-Id: ann"];
    let explained = transcript(&run_in(office.path(), &explain));
    assert!(explained.contains("allowed  key ann, cost 1: 18 of 20 left\n"), "{explained}");
}

/// An older version or another program may have published them.
#[test]
fn a_login_that_was_published_is_not_shown_and_its_rules_are_taken() {
    let redis = RedisServer::start();
    let node = Server::with_rules(&rules(&redis, 10, ""));
    let office = folder_with(&[(RULES, &rules(&redis, 10, ""))]);
    let publish =
        |arguments: &[&str]| transcript(&run_in(office.path(), &[&["publish", "--config", RULES], arguments].concat()));
    let published = |version: &str, rules: &str| {
        redis.command(&["HSET", "rate_limit:{rules}", "version", version, "rules", rules]);
        redis.command(&["PUBLISH", "rate_limit:rules", version]);
    };
    let text = rules(&redis, 20, "# was \"redis://:two hunter2@old\"");
    let rest = text.splitn(4, '\n').last().unwrap();
    let line = "# hidden: this line may contain the credentials of a store";
    published("1", &text.replacen("redis://", "redis://ann:hunter2@", 1));
    node.await_said("tollgate: published version 1 is in force: user: ", 1);
    let shown = format!("# published version 1\n{line}\nstore_timeout: 5s\n{line}\n{rest}exit code 0");
    assert_eq!(publish(&["--show"]), shown);

    let nothing = "# hidden: the rules may contain the credentials of a store: publish them again without credentials";
    published("2", "store: \"redis:\\/\\/ann:hunter2@h\"\nlimits: []\n");
    assert_eq!(publish(&["--show"]), format!("# published version 2\n{nothing}\nexit code 0"));
    let json = format!("{{\n  \"version\": 2,\n  \"id\": \"2@0\",\n  \"rules\": \"{nothing}\"\n}}\nexit code 0");
    assert_eq!(publish(&["--show", "--json"]), json);

    published("3", "store: \"redis://:two hunter2@h\"\nlimits: []\nof_a_newer_version: 1\n");
    assert_eq!(publish(&["--show"]), format!("# published version 3\n{nothing}\nexit code 0"));
}

#[test]
fn withdrawn_rules_are_removed_even_if_the_file_is_invalid() {
    type Spoil = fn(&Server);
    let no_limits: Spoil = |node| node.save_rules("limits: [{ name: user, limit: 0 }]\n");
    let no_keys: Spoil = |node| std::fs::remove_file(node.path("secret.key")).unwrap();
    for (spoil, problem) in [(no_limits, "limit 0 admits nothing"), (no_keys, "secret.key cannot be read")] {
        let redis = RedisServer::start();
        let own = |limit| rules(&redis, limit, "jwt: { key_file: secret.key, algorithms: [HS256] }");
        let key = ("secret.key", "0123456789abcdef0123456789abcdef");
        let node = Server::in_folder(folder_with(&[(RULES, &served(&own(10))), key]));
        let office = folder_with(&[(RULES, &served(&rules(&redis, 20, "")))]);
        let publish = |arguments: &[&str]| {
            let output = run_in(office.path(), &[&["publish", "--config", RULES], arguments].concat());
            assert!(output.status.success(), "{output:?}");
        };
        publish(&[]);
        node.await_said("tollgate: published version 1 is in force", 1);
        spoil(&node);
        node.await_said(problem, 1);
        let mut connection = node.connect();
        assert_eq!(connection.check(&user("ann"))["quota"], 20);

        publish(&["--withdraw"]);
        let back = "tollgate: version 2 withdraws the published rules; the last valid rules of tollgate.yaml are back: \
                    user: limit 20 → 10";
        let said = node.await_said(back, 1);
        assert!(said.matches(problem).count() == 2 && said.matches("are back").count() == 1, "{said}");
        let answer = connection.check(&user("ann"));
        assert_eq!((&answer["quota"], &answer["remaining"]), (&json!(10), &json!(8)));

        std::fs::write(node.path(key.0), key.1).unwrap();
        node.save_rules(&own(30));
        node.await_said("tollgate: tollgate.yaml is in force: user: ", 1);
        assert_eq!(connection.check(&user("ann"))["quota"], 30);
    }
}

/// Another program has published these rules: `tollgate publish` checks them first.
#[test]
fn published_rules_with_problems_change_nothing_and_every_problem_is_reported() {
    let redis = RedisServer::start();
    let server = Server::with_rules(&rules(&redis, 10, ""));
    redis.command(&["HSET", "rate_limit:{rules}", "version", "7", "rules", "limits: [{ name: user, limit: 0 }]"]);
    redis.command(&["PUBLISH", "rate_limit:rules", "7"]);
    let said = server.await_said("limit 0 admits nothing", 1);
    let expected = "tollgate: published version 7 is rejected, and the previous rules stay in force:\n\
                    published version 7:1:31: limit 0 admits nothing: use 1 or more, or `blocked` to refuse every request\n";
    assert_eq!(said, expected);
    assert_eq!(server.connect().check(&user("ann"))["quota"], 10);
}

#[test]
fn published_rules_name_no_other_key_files_than_the_file_of_the_node() {
    let redis = RedisServer::start();
    let server = Server::with_rules(&rules(&redis, 10, ""));
    std::fs::write(server.path("public.txt"), "0123456789abcdef0123456789abcdef").expect("the folder is ours");
    let office = folder_with(&[
        (RULES, &served(&rules(&redis, 20, "jwt: { key_file: public.txt, algorithms: [HS256] }"))),
        ("public.txt", "0123456789abcdef0123456789abcdef"),
    ]);
    assert!(run_in(office.path(), &["publish", "--config", RULES]).status.success());
    server.await_said("the rule file of this node names no jwt.key_file, and only files that it names are read", 1);
    assert_eq!(server.connect().check(&user("ann"))["quota"], 10);
}

#[test]
fn hangup_puts_the_file_back_in_the_place_of_published_rules() {
    let redis = RedisServer::start();
    let server = Server::with_rules(&rules(&redis, 10, ""));
    let office = folder_with(&[(RULES, &served(&rules(&redis, 20, "")))]);
    assert!(run_in(office.path(), &["publish", "--config", RULES]).status.success());
    server.await_said("published version 1 is in force", 1);
    server.signal("HUP");
    server.await_said("tollgate: tollgate.yaml is in force: user: ", 1);
    assert_eq!(server.connect().check(&user("ann"))["quota"], 10);
}

#[test]
fn explaining_looks_at_live_counts_and_takes_nothing() {
    let redis = RedisServer::start();
    let server = Server::with_rules(&rules(&redis, 2, ""));
    let mut connection = server.connect();
    assert_eq!(connection.check(&user("ann"))["remaining"], 1);
    let office = folder_with(&[(RULES, &rules(&redis, 2, ""))]);
    let explain = || run_in(office.path(), &["explain", "--config", RULES, "GET", "/", "-H", "X-User-Id: ann"]);
    for _ in 0..3 {
        let text = transcript(&explain());
        assert!(text.contains("allowed  key ann, cost 1: 0 of 2 left\n"), "{text}");
        assert!(text.ends_with("nothing was taken.\nexit code 0"), "{text}");
    }
    assert_eq!(connection.check(&user("ann"))["remaining"], 0);
    let text = transcript(&explain());
    assert!(text.contains("refused  key ann, cost 1: 0 of 2 left, retry in "), "{text}");
    assert!(text.contains("\nResult: 429 Too Many Requests, Retry-After: "), "{text}");
    assert!(text.ends_with("exit code 1"), "{text}");
}

/// Rules with one limit on the store `sessions`.
fn on_two(default: &RedisServer, sessions: &RedisServer, limit: u64) -> String {
    let stores = format!("stores: {{ sessions: '{}' }}", sessions.url());
    rules(default, limit, &stores).replace("window: 1h }", "window: 1h, store: sessions }")
}

#[test]
fn a_store_by_name_that_moves_starts_anew_and_other_counts_stay() {
    let (default, first, second) = (RedisServer::start(), RedisServer::start(), RedisServer::start());
    let with_other = |text: String| {
        format!("{text}  - {{ name: all, algorithm: fixed_window, align: first_request, limit: 100, window: 1h }}\n")
    };
    let server = Server::with_rules(&with_other(on_two(&default, &first, 10)));
    let left = |limit: &str| {
        let question = if limit == "all" { json!({"limit": limit}) } else { json!({"limit": limit, "key": "ann"}) };
        server.connect().check(&question)["remaining"].clone()
    };
    assert_eq!((left("user"), left("all")), (json!(9), json!(99)));
    server.save_rules(&with_other(on_two(&default, &second, 10)));
    server.await_said("tollgate: store `sessions` is another Redis; counts of its limits start from zero\n", 1);
    assert_eq!((left("user"), left("all")), (json!(9), json!(98)));
    // A limit that moves to the default store is counted there from then on.
    server.save_rules(&with_other(on_two(&default, &second, 10)).replace(", store: sessions", ""));
    server.await_said("tollgate.yaml is in force: user: ", 1);
    assert_eq!((left("user"), left("all")), (json!(9), json!(97)));
}

#[test]
fn published_limits_are_on_the_stores_of_each_node_by_name() {
    let (default, sessions) = (RedisServer::start(), RedisServer::start());
    let node = Server::with_rules(&on_two(&default, &sessions, 10));
    assert_eq!(node.connect().check(&user("ann"))["remaining"], 9);
    let office = folder_with(&[(RULES, &on_two(&default, &sessions, 20))]);
    let publish = || transcript(&run_in(office.path(), &["publish", "--config", RULES]));
    let kept = "on stderr:\ntollgate: nodes apply its limits, headers, body and jwt; they keep their own stores";
    assert_eq!(publish(), format!("tollgate.yaml is published as version 1\n{kept}\nexit code 0"));
    node.await_said("tollgate: published version 1 is in force: user: ", 1);
    assert_eq!(node.connect().check(&user("ann"))["remaining"], 18);
    let unknown = on_two(&default, &sessions, 30).replace("sessions", "audit");
    std::fs::write(office.path().join(RULES), unknown).unwrap();
    assert_eq!(publish(), format!("tollgate.yaml is published as version 2\n{kept}\nexit code 0"));
    node.await_said(
        "tollgate: published version 2 is rejected, and the previous rules stay in force: limit `user`: there is no store \
         `audit`: use one of `default`, `sessions`, or add a store of that name\n",
        1,
    );
    assert_eq!(node.connect().check(&user("ann"))["remaining"], 17);
    let login = on_two(&default, &sessions, 30).replace("sessions: 'redis://", "sessions: 'redis://:hunter2@");
    std::fs::write(office.path().join(RULES), login).unwrap();
    let refused = publish();
    assert!(refused.contains("may contain credentials") && !refused.contains("as version"), "{refused}");
}

#[test]
fn a_command_line_may_put_all_counts_in_memory() {
    let folder = folder_with(&[(
        RULES,
        "stores: { sessions: 'redis://127.0.0.1:1' }\nlimits: [{ name: user, limit: 10, window: 1h, store: sessions }]\n",
    )]);
    let explain = |more: &[&str]| {
        let arguments = ["explain", "--config", RULES, "GET", "/"];
        transcript(&run_in(folder.path(), &[&arguments[..], more].concat()))
    };
    let refused = explain(&[]);
    assert!(refused.contains("`stores` are on Redis and `store` is memory, and a file cannot mix both"), "{refused}");
    let in_memory = explain(&["--store", "memory"]);
    assert!(in_memory.ends_with("exit code 0"), "{in_memory}");
    let validated = transcript(&run_in(folder.path(), &["validate", RULES]));
    assert!(validated.contains("tollgate.yaml:1:9: `stores` are on Redis"), "{validated}");
}

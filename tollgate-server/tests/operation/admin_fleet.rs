//! The admin API of nodes that share a Redis.

use serde_json::json;
use testkit::folder::folder_with;
use testkit::redis::RedisServer;
use testkit::tollgate::{Process, RULES as FILE};
use testkit::wait::wait_until;

use crate::admin_client::AdminRequest;

fn rules(redis: &RedisServer, limit: u64) -> String {
    format!(
        "store: {}\nstore_timeout: 5s\nservice: {{ http: '127.0.0.1:0' }}\nadmin: {{ listen: '127.0.0.1:0' }}\nlimits:\n  \
         - {{ name: per-user, key: header:x-user-id, algorithm: fixed_window, limit: {limit}, window: 1h }}\n",
        redis.url()
    )
}

fn node(redis: &RedisServer) -> Process {
    Process::start(folder_with(&[(FILE, &rules(redis, 5))]), &["serve", "--config", FILE])
}

fn version(node: &Process) -> String {
    let rules = AdminRequest::get("/v1/rules").expect(200, node.address_of("admin"));
    rules["version"].as_str().expect("a version").to_owned()
}

#[test]
fn rules_of_one_node_reach_all_and_one_of_two_nodes_wins() {
    let redis = RedisServer::start();
    let nodes = [node(&redis), node(&redis)];
    let admins = nodes.each_ref().map(|node| node.address_of("admin"));
    let first = version(&nodes[0]);
    assert_eq!(first, version(&nodes[1]), "equal rules have equal versions");
    let next = "limits: [{ name: per-user, key: header:x-user-id, algorithm: fixed_window, limit: 7, window: 1h }]\n";
    let changed = AdminRequest::put_rules(next, &first).expect(200, admins[0]);
    assert_eq!(changed["lasts"], "published to all nodes");
    let follows = wait_until(|| (version(&nodes[1]) == changed["version"]).then_some(()));
    follows.expect("the other node has the rules");
    let status = AdminRequest::get("/v1/status").expect(200, admins[1]);
    assert_eq!(status["rules"]["source"], "published");
    assert_eq!(status["store"]["servers"][0]["breaker"], "closed");

    // Several times, because a node may be about to apply the rules of the other.
    for round in 0..20 {
        let version = wait_until(|| {
            let [one, other] = nodes.each_ref().map(version);
            (one == other).then_some(one)
        });
        let version = version.expect("both nodes have the same rules");
        let writers = [0, 1].map(|number| {
            let rules = next.replace("limit: 7", &format!("limit: {}", 20 + 2 * round + number));
            let (request, address) = (AdminRequest::put_rules(&rules, &version), admins[number]);
            std::thread::spawn(move || request.send(address).status)
        });
        let mut statuses = writers.map(|writer| writer.join().expect("it ends"));
        statuses.sort_unstable();
        assert_eq!(statuses, [200, 412], "round {round}");
    }
}

/// Waits until a node has these rules.
#[track_caller]
fn await_version(node: &Process, wanted: &str) {
    let follows = wait_until(|| (version(node) == wanted).then_some(()));
    follows.unwrap_or_else(|| panic!("the node does not have version {wanted}: {}", node.said()));
}

/// Reads the rules of a node, replaces a part of the text, and sends it back. Returns the new version.
#[track_caller]
fn edit(node: &Process, from: &str, to: &str) -> String {
    let rules = AdminRequest::get("/v1/rules").expect(200, node.address_of("admin"));
    let text = rules["text"].as_str().expect("a text");
    assert!(text.contains(from), "{text}");
    let validated = AdminRequest::post_rules("/v1/rules/validate", &text.replace(from, to));
    assert_eq!(validated.expect(200, node.address_of("admin"))["valid"], true);
    let put = AdminRequest::put_rules(&text.replace(from, to), rules["version"].as_str().expect("a version"));
    put.expect(200, node.address_of("admin"))["version"].as_str().expect("a version").to_owned()
}

/// Rolls a node back. Returns the new version.
#[track_caller]
fn roll_back(node: &Process, to: &str) -> String {
    let back = json!({"version": to, "expected": version(node)});
    let changed = AdminRequest::post("/v1/rules/rollback", &back).expect(200, node.address_of("admin"));
    changed["version"].as_str().expect("a version").to_owned()
}

#[test]
fn nodes_with_different_listeners_edit_and_roll_back_the_same_rules() {
    let redis = RedisServer::start();
    let plain = rules(&redis, 5);
    // Another node with a gateway, keys that are shown, and credentials in its file.
    let other = rules(&redis, 6)
        .replace("store: ", "# redis://:hunter2@old\nstore: ")
        .replace(
            "service: { http: '127.0.0.1:0' }",
            "gateway: { listen: '127.0.0.1:0', routes: [{ path: /**, upstream: echo }] }",
        )
        .replace("listen: '127.0.0.1:0' }\nlimits", "listen: '127.0.0.1:0', show_keys: true }\nlimits");
    let start = |rules: &str| Process::start(folder_with(&[(FILE, rules)]), &["serve", "--config", FILE]);
    let [one, two] = [start(&plain), start(&other)];
    let (first_of_one, first_of_two) = (version(&one), version(&two));
    assert_ne!(first_of_one, first_of_two);
    let listeners =
        |node: &Process| AdminRequest::get("/v1/status").expect(200, node.address_of("admin"))["listeners"].clone();
    let before = [listeners(&one), listeners(&two)];

    // The text of one node is in force on the other, which edits it.
    await_version(&two, &edit(&one, "limit: 5", "limit: 7"));
    await_version(&one, &edit(&two, "limit: 7", "limit: 8"));
    let back = roll_back(&one, &first_of_one);
    assert_eq!(back, first_of_one);
    await_version(&two, &back);
    await_version(&one, &edit(&two, "limit: 5", "limit: 9"));
    // The published text has no credentials, so it is another version than the file.
    let back = roll_back(&two, &first_of_two);
    assert_ne!(back, first_of_two);
    await_version(&one, &back);
    await_version(&two, &edit(&one, "limit: 6", "limit: 10"));
    for node in [&one, &two] {
        let keys = AdminRequest::get("/v1/keys?key=ann").expect(200, node.address_of("admin"));
        assert_eq!(keys["limits"][0]["quota"], 10);
    }
    assert_eq!([listeners(&one), listeners(&two)], before, "each node keeps its listeners");
    let text = AdminRequest::get("/v1/rules").expect(200, one.address_of("admin"))["text"].to_string();
    assert!(!text.contains("hunter2"), "{text}");
}

#[test]
fn bans_reach_all_nodes_and_nodes_that_start_later() {
    let redis = RedisServer::start();
    let nodes = [node(&redis), node(&redis)];
    let ban = json!({"limit": "per-user", "key": "ann", "for": 600});
    AdminRequest::post("/v1/keys/ban", &ban).expect(200, nodes[0].address_of("admin"));
    let is_banned = |node: &Process| {
        let keys = AdminRequest::get("/v1/keys?key=ann").expect(200, node.address_of("admin"));
        keys["limits"][0]["banned_for"].as_f64().is_some()
    };
    assert!(is_banned(&nodes[0]));
    wait_until(|| is_banned(&nodes[1]).then_some(())).expect("the other node has the ban");
    let bans = AdminRequest::get("/v1/bans").expect(200, nodes[1].address_of("admin"));
    assert_eq!((&bans["total"], &bans["bans"][0]["by"]), (&json!(1), &json!("local at 127.0.0.1")), "{bans}");
    let late = node(&redis);
    wait_until(|| is_banned(&late).then_some(())).expect("a node that starts later has the ban");
    let unban = json!({"limit": "per-user", "key": "ann"});
    AdminRequest::post("/v1/keys/unban", &unban).expect(200, late.address_of("admin"));
    wait_until(|| (!is_banned(&nodes[0])).then_some(())).expect("the ban is lifted everywhere");
}

#[test]
fn changes_fail_while_redis_does_and_say_so() {
    let mut redis = RedisServer::start();
    let node = node(&redis);
    let (admin, version) = (node.address_of("admin"), version(&node));
    redis.kill();
    let ban = json!({"limit": "per-user", "key": "ann", "for": 600});
    let refused = AdminRequest::post("/v1/keys/ban", &ban).expect(503, admin);
    assert_eq!(refused["error"], "store_unavailable");
    let reset = json!({"limit": "per-user", "key": "ann"});
    AdminRequest::post("/v1/keys/reset", &reset).expect(503, admin);
    let next = rules(&redis, 6);
    let refused = AdminRequest::put_rules(&next, &version).expect(503, admin);
    assert_eq!(refused["error"], "change_unavailable");
    let unavailable = wait_until(|| {
        let status = AdminRequest::get("/v1/status").expect(200, admin);
        (status["store"]["available"] == false && status["store"]["servers"][0]["breaker"] == "open").then_some(status)
    });
    assert!(unavailable.expect("the breaker opens")["store"]["problem"].is_string());
    let keys = AdminRequest::get("/v1/keys?key=ann").expect(200, admin);
    assert_eq!(keys["limits"][0]["state"], "unknown");
}

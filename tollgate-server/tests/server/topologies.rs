//! Nodes that share a Redis of several servers: with Sentinel, and as a cluster.

use serde_json::{Value, json};
use testkit::folder::folder_with;
use testkit::redis::{Cluster, Sentinels};
use testkit::service::{Server, served};
use testkit::tollgate::RULES;
use testkit::wait::wait_until;

const LIMIT: usize = 4;

/// Returns rules by which only the store admits requests. With the long timeout, a busy machine is not mistaken for a
/// failing store.
fn rules(store: &str) -> String {
    format!(
        "{store}\nstore_timeout: 5s\non_store_failure: deny\nlimits:\n  - {{ name: user, key: 'header:x-user-id', \
         algorithm: fixed_window, align: first_request, limit: {LIMIT}, window: 1h }}\n"
    )
}

/// Starts two nodes on one store: one configured by its rule file, one by the command line.
fn nodes(store: &str) -> [Server; 2] {
    [Server::with_rules(&rules(&format!("store: '{store}'"))), node_with_store(store)]
}

fn node_with_store(store: &str) -> Server {
    Server::run(folder_with(&[(RULES, &served(&rules("")))]), &["serve", "--config", RULES, "--store", store])
}

fn ask(node: &Server, user: &str) -> Value {
    node.connect().check(&json!({"request": {"headers": {"x-user-id": user}}}))
}

/// Checks both nodes in turn: together they admit exactly the limit.
fn share_the_limit(nodes: &[Server; 2], user: &str) {
    for left in (0..LIMIT).rev() {
        let answer = ask(&nodes[left % 2], user);
        assert_eq!((&answer["allowed"], &answer["remaining"]), (&json!(true), &json!(left)), "{user}: {answer}");
        assert_eq!(answer["source"], "store", "{user}");
    }
    for node in nodes {
        let answer = ask(node, user);
        assert_eq!((&answer["allowed"], &answer["reason"]), (&json!(false), &json!("limited")), "{user}: {answer}");
    }
}

#[test]
fn two_nodes_share_a_limit_behind_sentinels_and_a_third_after_a_failover() {
    let mut sentinels = Sentinels::start();
    let nodes = nodes(&sentinels.url());
    share_the_limit(&nodes, "ann");

    // Everything written before this command is replicated before it.
    let mut master = sentinels.master().connection();
    let (replicas,): (usize,) =
        ::redis::pipe().cmd("SET").arg("last").arg(1).ignore().cmd("WAIT").arg(1).arg(5000).query(&mut master).unwrap();
    assert_eq!(replicas, 1);
    sentinels.master().kill();
    sentinels.wait_for_failover();
    for (number, node) in nodes.iter().enumerate() {
        let back = wait_until(|| (ask(node, &format!("probe-{number}"))["source"] == "store").then_some(()));
        assert!(back.is_some(), "node {number} does not find the new master; it said: {}", node.said());
    }
    // This node has no cached denials, so the new master decides.
    let third = node_with_store(&sentinels.url());
    let answer = ask(&third, "ann");
    assert_eq!((&answer["allowed"], &answer["source"]), (&json!(false), &json!("store")), "{answer}");
    share_the_limit(&nodes, "bob");
}

#[test]
fn two_nodes_share_limits_on_every_node_of_a_cluster() {
    let cluster = Cluster::start();
    let nodes = nodes(&cluster.url());
    // Enough keys that each of the three masters has some.
    for number in 0..20 {
        share_the_limit(&nodes, &format!("user-{number}"));
    }
    for node in &nodes {
        let batch: Vec<Value> =
            (0..40).map(|number| json!({"limit": "user", "key": format!("user-{number}")})).collect();
        let answers = node.connect().check(&json!(batch));
        let allowed: Vec<bool> = answers.as_array().unwrap().iter().map(|answer| answer["allowed"] == true).collect();
        assert_eq!(allowed, [[false; 20], [true; 20]].concat());
    }
}

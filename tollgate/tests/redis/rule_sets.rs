//! A rule set that is published once reaches every node.

use std::time::Duration;

use tollgate::redis::{PublishError, RuleSets};

use crate::servers::RedisServer;

/// What a node hears when there is no rule set any more.
const WITHDRAWN: &[u8] = b"withdrawn";

async fn hears(node: &RuleSets, version: u64) -> Vec<u8> {
    let mut latest = node.latest();
    let found = latest.wait_for(|rules| rules.as_ref().is_some_and(|rules| rules.version >= version));
    let found = tokio::time::timeout(Duration::from_secs(20), found).await.expect("in time").expect("follows");
    let rules = found.as_ref().and_then(|found| found.rules.as_ref());
    rules.map_or_else(|| WITHDRAWN.to_vec(), |rules| rules.to_vec())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_hears_of_a_rule_set_and_who_comes_late_finds_it() {
    let server = RedisServer::start();
    let nodes: Vec<RuleSets> = (0..4).map(|_| RuleSets::connect(&server.url()).expect("connects")).collect();
    assert_eq!(nodes[0].publish(b"first", None).await, Ok(1));
    for node in &nodes {
        assert_eq!(hears(node, 1).await, b"first");
    }
    assert_eq!(nodes[1].publish(b"second \xff\0", Some(1)).await, Ok(2));
    assert_eq!(nodes[2].publish(b"lost", Some(1)).await, Err(PublishError::Conflict { version: 2 }));
    for node in &nodes {
        assert_eq!(hears(node, 2).await, b"second \xff\0");
    }
    let late = RuleSets::connect(&server.url()).expect("connects");
    assert_eq!(hears(&late, 2).await, b"second \xff\0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_was_cut_off_catches_up_and_never_goes_back() {
    let mut server = RedisServer::start();
    let node = RuleSets::connect(&server.url()).expect("connects");
    assert_eq!(node.publish(b"old", None).await, Ok(1));
    assert_eq!(hears(&node, 1).await, b"old");
    server.kill();
    assert!(node.publish(b"nowhere", None).await.is_err());
    // It comes back empty: what the node has stays, until something newer is published.
    server.restart();
    let other = RuleSets::connect(&server.url()).expect("connects");
    assert_eq!(other.newest().await, Ok(None));
    assert_eq!(hears(&node, 1).await, b"old");
    for version in 1..=2 {
        assert_eq!(other.publish(b"new", None).await, Ok(version));
    }
    assert_eq!(hears(&node, 2).await, b"new");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn versions_that_begin_anew_are_newer_than_what_was_lost() {
    let mut server = RedisServer::start();
    let node = RuleSets::connect(&server.url()).expect("connects");
    for version in 1..=3 {
        assert_eq!(node.publish(b"old", None).await, Ok(version));
    }
    assert_eq!(hears(&node, 3).await, b"old");
    server.kill();
    server.restart();
    let other = RuleSets::connect(&server.url()).expect("connects");
    assert_eq!(other.publish(b"new", Some(0)).await, Ok(1));
    let mut latest = node.latest();
    let is_new = latest.wait_for(|found| found.as_ref().is_some_and(|found| found.rules.as_deref() == Some(b"new")));
    tokio::time::timeout(Duration::from_secs(20), is_new).await.expect("in time").expect("follows");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_set_that_is_withdrawn_is_gone_for_every_node_and_who_comes_late_knows() {
    let server = RedisServer::start();
    let nodes: Vec<RuleSets> = (0..2).map(|_| RuleSets::connect(&server.url()).expect("connects")).collect();
    assert_eq!(nodes[0].newest().await, Ok(None));
    assert_eq!(nodes[0].withdraw(None).await, Ok(0), "there is nothing to withdraw");
    assert_eq!(nodes[0].publish(b"first", None).await, Ok(1));
    let newest = nodes[1].newest().await.expect("Redis is there").expect("a rule set is published");
    assert_eq!((newest.version, newest.rules.as_deref()), (1, Some(&b"first"[..])));
    let conflict = PublishError::Conflict { version: 1 };
    let told = "the newest version is 1, not the one that was expected; look at it and expect it";
    assert_eq!(conflict.to_string(), told);
    assert_eq!(nodes[1].withdraw(Some(7)).await, Err(conflict));
    assert_eq!(nodes[1].withdraw(Some(1)).await, Ok(2));
    assert_eq!(nodes[1].withdraw(None).await, Ok(2), "what is gone is not withdrawn again");
    for node in &nodes {
        assert_eq!(hears(node, 2).await, WITHDRAWN);
    }
    let late = RuleSets::connect(&server.url()).expect("connects");
    assert_eq!(hears(&late, 2).await, WITHDRAWN);
    assert_eq!(late.publish(b"second", Some(2)).await, Ok(3));
    assert_eq!(hears(&nodes[0], 3).await, b"second");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_set_has_a_bound() {
    let server = RedisServer::start();
    let node = RuleSets::connect(&server.url()).expect("connects");
    assert_eq!(node.publish(&vec![b'x'; (4 << 20) + 1], None).await, Err(PublishError::TooLarge));
    assert!(RuleSets::connect("nowhere").is_err());
}

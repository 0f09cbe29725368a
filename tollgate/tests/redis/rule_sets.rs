//! A rule set that is published once reaches every node.

use std::time::Duration;

use testkit::redis::{RedisServer, Switch};
use tollgate::redis::{PublishError, PublishedRules, Repair, Repairs, RuleSets};

/// The longest that a fleet takes to agree on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// The content that a node receives when the rule set is withdrawn.
const WITHDRAWN: &[u8] = b"withdrawn";

async fn receives(node: &RuleSets, version: u64) -> Vec<u8> {
    let mut latest = node.latest();
    let found = latest.wait_for(|rules| rules.as_ref().is_some_and(|rules| rules.version >= version));
    let found = tokio::time::timeout(LIMIT, found).await.expect("in time").expect("follows");
    let rules = found.as_ref().and_then(|found| found.rules.as_ref());
    rules.map_or_else(|| WITHDRAWN.to_vec(), |rules| rules.to_vec())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_receives_a_rule_set_and_late_nodes_find_it() {
    let server = RedisServer::start();
    let nodes: Vec<RuleSets> = (0..4).map(|_| RuleSets::connect(server.url()).expect("connects")).collect();
    assert_eq!(nodes[0].publish(b"first", None).await, Ok(1));
    for node in &nodes {
        assert_eq!(receives(node, 1).await, b"first");
    }
    assert_eq!(nodes[1].publish(b"second \xff\0", Some(1)).await, Ok(2));
    assert_eq!(nodes[2].publish(b"lost", Some(1)).await, Err(PublishError::Conflict { version: 2 }));
    for node in &nodes {
        assert_eq!(receives(node, 2).await, b"second \xff\0");
    }
    let late = RuleSets::connect(server.url()).expect("connects");
    assert_eq!(receives(&late, 2).await, b"second \xff\0");
}

/// Waits until the node holds the rule set of that id.
async fn holds(node: &RuleSets, id: &str) -> PublishedRules {
    let mut latest = node.latest();
    let found = latest.wait_for(|rules| rules.as_ref().is_some_and(|rules| *rules.id == *id));
    let found = tokio::time::timeout(LIMIT, found).await.expect("in time").expect("follows");
    found.clone().expect("some rule set")
}

async fn newest(node: &RuleSets) -> PublishedRules {
    node.newest().await.expect("Redis answers").expect("something is published")
}

/// Waits until Redis has the rule set of that id.
async fn is_stored(node: &RuleSets, id: &str) {
    let stored = async {
        while node.newest().await.ok().flatten().is_none_or(|found| *found.id != *id) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LIMIT, stored).await.expect("in time");
}

/// Waits until the node has made a matching repair.
async fn repaired(node: &RuleSets, is_it: impl Fn(&Repair) -> bool) -> Repairs {
    let mut repairs = node.repairs();
    let found = repairs.wait_for(|repairs| repairs.latest.as_ref().is_some_and(&is_it));
    tokio::time::timeout(LIMIT, found).await.expect("in time").expect("follows").clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_comes_back_empty_gets_the_rule_set_again() {
    let mut server = RedisServer::start();
    let nodes: Vec<RuleSets> = (0..3).map(|_| RuleSets::connect(server.url()).expect("connects")).collect();
    for version in 1..=3 {
        assert_eq!(nodes[0].publish(format!("set {version}").as_bytes(), None).await, Ok(version));
    }
    for node in &nodes {
        assert_eq!(receives(node, 3).await, b"set 3");
    }
    let published = newest(&nodes[0]).await;
    server.kill();
    assert!(nodes[0].publish(b"nowhere", None).await.is_err());
    server.restart();
    let late = RuleSets::connect(server.url()).expect("connects");
    let found = holds(&late, &published.id).await;
    assert_eq!((found.version, found.rules.as_deref()), (3, Some(&b"set 3"[..])));
    assert_eq!(late.publish(b"set 4", Some(3)).await, Ok(4), "versions go on");
    for node in &nodes {
        assert_eq!(receives(node, 4).await, b"set 4");
        assert_eq!(node.repairs().borrow().replaced, 0);
    }
    let restored: u64 = nodes.iter().map(|node| node.repairs().borrow().restored).sum();
    assert_eq!(restored, 1, "one node wrote it back, the others saw that");
}

/// Starts a master and a replica with the first version, and two nodes that have loaded it. Each node has its own
/// address.
async fn split() -> (RedisServer, RedisServer, [(Switch, RuleSets); 2]) {
    let master = RedisServer::start();
    let mut nodes = Vec::new();
    for _ in 0..2 {
        let switch = Switch::to(master.port()).await;
        let node = RuleSets::connect(switch.url()).expect("connects");
        nodes.push((switch, node));
    }
    assert_eq!(nodes[0].1.publish(b"first", None).await, Ok(1));
    for (_, node) in &nodes {
        assert_eq!(receives(node, 1).await, b"first");
    }
    // From here on the replica receives nothing, as if the master died before it replicates.
    let replica = master.replica();
    replica.promote();
    let Ok(nodes) = <[_; 2]>::try_from(nodes) else { panic!("two nodes") };
    (master, replica, nodes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publication_that_a_failover_lost_is_restored_and_reaches_every_node() {
    let (mut master, replica, [(heard_at, heard), (missed_at, missed)]) = split().await;
    missed_at.turn(None);
    assert_eq!(heard.publish(b"lost", Some(1)).await, Ok(2));
    assert_eq!(receives(&heard, 2).await, b"lost");
    let lost = newest(&heard).await;
    master.kill();
    for switch in [&heard_at, &missed_at] {
        switch.turn(Some(replica.port()));
    }
    let found = holds(&missed, &lost.id).await;
    assert_eq!(found.rules.as_deref(), Some(&b"lost"[..]));
    let repairs = repaired(&heard, |repair| matches!(repair, Repair::Restored { lost } if lost.version == 2)).await;
    assert_eq!((repairs.restored, repairs.replaced), (1, 0));
    let text = repairs.latest.expect("a repair").to_string();
    let expected = format!(
        "Redis had lost the published rules of version 2 ({}), as a failover can: this node restored them",
        lost.id
    );
    assert_eq!(text, expected);
    let late = RuleSets::connect(replica.url()).expect("connects");
    assert_eq!(late.publish(b"stale", Some(1)).await, Err(PublishError::Conflict { version: 2 }));
    assert_eq!(newest(&late).await.id, lost.id);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_that_a_failover_split_converges_to_the_set_on_redis_and_reports_the_other() {
    let (mut master, replica, [(heard_at, heard), (missed_at, missed)]) = split().await;
    missed_at.turn(None);
    // Two versions that only one node receives.
    assert_eq!(heard.publish(b"lost 2", Some(1)).await, Ok(2));
    assert_eq!(heard.publish(b"lost 3", Some(2)).await, Ok(3));
    assert_eq!(receives(&heard, 3).await, b"lost 3");
    let lost = newest(&heard).await;
    heard_at.turn(None);
    master.kill();
    // The other side has not received them, and publishes its own version 2.
    missed_at.turn(Some(replica.port()));
    let publisher = RuleSets::connect(replica.url()).expect("connects");
    assert_eq!(publisher.publish(b"other 2", Some(1)).await, Ok(2));
    assert_eq!(receives(&missed, 2).await, b"other 2");
    heard_at.turn(Some(replica.port()));

    let other = newest(&publisher).await;
    assert_eq!(holds(&heard, &other.id).await, other);
    assert_eq!(holds(&missed, &other.id).await, other);
    let repairs = repaired(&heard, |repair| matches!(repair, Repair::Replaced { .. })).await;
    assert_eq!((repairs.restored, repairs.replaced), (0, 1));
    assert_eq!(repairs.latest, Some(Repair::Replaced { lost, by: other }));
    assert_eq!(missed.repairs().borrow().replaced, 0);
    // From here on they agree.
    assert_eq!(publisher.publish(b"third", Some(2)).await, Ok(3));
    let third = newest(&publisher).await;
    for node in [&heard, &missed] {
        assert_eq!(holds(node, &third.id).await.rules.as_deref(), Some(&b"third"[..]));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_withdrawal_that_a_failover_lost_is_restored() {
    let (mut master, replica, [(heard_at, heard), (missed_at, missed)]) = split().await;
    missed_at.turn(None);
    assert_eq!(heard.withdraw(Some(1)).await, Ok(2));
    assert_eq!(receives(&heard, 2).await, WITHDRAWN);
    let lost = newest(&heard).await;
    master.kill();
    for switch in [&heard_at, &missed_at] {
        switch.turn(Some(replica.port()));
    }
    assert_eq!(holds(&missed, &lost.id).await.rules, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_may_not_write_the_rule_set_reports_that_it_is_lost() {
    let (mut master, replica, [(heard_at, heard), _]) = split().await;
    assert_eq!(heard.publish(b"lost", Some(1)).await, Ok(2));
    assert_eq!(receives(&heard, 2).await, b"lost");
    let lost = newest(&heard).await;
    master.kill();
    let mut connection = replica.connection();
    let forbid = ["SETUSER", "default", "-hset"];
    let () = redis::cmd("ACL").arg(&forbid).query(&mut connection).expect("the user is changed");
    heard_at.turn(Some(replica.port()));
    let repairs = repaired(&heard, |repair| matches!(repair, Repair::NotRestored { .. })).await;
    let text = repairs.latest.expect("a repair").to_string();
    assert!(text.starts_with("Redis has lost the published rules of version 2 (2-"), "{text}");
    assert!(text.ends_with(": let its user write rate_limit:{rules}, or publish them again"), "{text}");
    assert_eq!(receives(&heard, 2).await, b"lost", "it stays in force here");
    let allow = ["SETUSER", "default", "+hset"];
    let () = redis::cmd("ACL").arg(&allow).query(&mut connection).expect("the user is changed");
    is_stored(&heard, &lost.id).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_set_that_an_earlier_release_published_is_read_and_followed() {
    let server = RedisServer::start();
    let mut connection = server.connection();
    let mut publish = |version: u64| {
        let mut command = redis::cmd("HSET");
        command.arg("rate_limit:{rules}").arg("version").arg(version).arg("rules").arg(format!("set {version}"));
        let () = command.arg("epoch").arg(1_700_000_000_000_000_u64).query(&mut connection).expect("stored");
        let () = redis::cmd("PUBLISH").arg("rate_limit:rules").arg(version).query(&mut connection).expect("announced");
    };
    publish(1);
    let node = RuleSets::connect(server.url()).expect("connects");
    assert_eq!(receives(&node, 1).await, b"set 1");
    publish(2);
    assert_eq!(receives(&node, 2).await, b"set 2");
    assert_eq!(node.publish(b"set 3", Some(2)).await, Ok(3));
    assert_eq!(receives(&node, 3).await, b"set 3");
    // A publisher of that release leaves the id of the set before.
    publish(4);
    assert_eq!(receives(&node, 4).await, b"set 4");
    assert_eq!(node.publish(b"set 5", Some(4)).await, Ok(5));
    assert_eq!(receives(&node, 5).await, b"set 5");
    assert_eq!(*node.repairs().borrow(), Repairs::default(), "nothing was lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stored_data_stays_small_after_many_publications() {
    let server = RedisServer::start();
    let publisher = RuleSets::connect(server.url()).expect("connects");
    let (away, node) = {
        let switch = Switch::to(server.port()).await;
        let node = RuleSets::connect(switch.url()).expect("connects");
        (switch, node)
    };
    assert_eq!(publisher.publish(b"first", None).await, Ok(1));
    assert_eq!(receives(&node, 1).await, b"first");
    away.turn(None);
    for version in 2..=300 {
        assert_eq!(publisher.publish(b"more", None).await, Ok(version));
    }
    let length: usize = redis::cmd("HSTRLEN")
        .arg("rate_limit:{rules}")
        .arg("predecessors")
        .query(&mut server.connection())
        .expect("a length");
    assert!((1_000..=2_000).contains(&length), "{length}");
    // A node that was away for longer than predecessors are recorded has lost nothing.
    away.turn(Some(server.port()));
    assert_eq!(receives(&node, 300).await, b"more");
    assert_eq!(*node.repairs().borrow(), Repairs::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_withdrawn_rule_set_is_gone_for_every_node_and_for_late_ones() {
    let server = RedisServer::start();
    let nodes: Vec<RuleSets> = (0..2).map(|_| RuleSets::connect(server.url()).expect("connects")).collect();
    assert_eq!(nodes[0].newest().await, Ok(None));
    assert_eq!(nodes[0].withdraw(None).await, Ok(0), "there is nothing to withdraw");
    assert_eq!(nodes[0].publish(b"first", None).await, Ok(1));
    let newest = nodes[1].newest().await.expect("Redis is there").expect("a rule set is published");
    assert_eq!((newest.version, newest.rules.as_deref()), (1, Some(&b"first"[..])));
    let conflict = PublishError::Conflict { version: 1 };
    let message = "the newest version is 1, not the expected one: read it, and publish with that version";
    assert_eq!(conflict.to_string(), message);
    assert_eq!(nodes[1].withdraw(Some(7)).await, Err(conflict));
    assert_eq!(nodes[1].withdraw(Some(1)).await, Ok(2));
    assert_eq!(nodes[1].withdraw(None).await, Ok(2), "what is gone is not withdrawn again");
    for node in &nodes {
        assert_eq!(receives(node, 2).await, WITHDRAWN);
    }
    let late = RuleSets::connect(server.url()).expect("connects");
    assert_eq!(receives(&late, 2).await, WITHDRAWN);
    assert_eq!(late.publish(b"second", Some(2)).await, Ok(3));
    assert_eq!(receives(&nodes[0], 3).await, b"second");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_set_that_is_too_large_is_rejected() {
    let server = RedisServer::start();
    let node = RuleSets::connect(server.url()).expect("connects");
    assert_eq!(node.publish(&vec![b'x'; (4 << 20) + 1], None).await, Err(PublishError::TooLarge));
    assert!(RuleSets::connect("nowhere").is_err());
}

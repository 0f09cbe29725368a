//! A dead server of a cluster, and requests with limits on it and on healthy servers: its own limits follow their
//! failure policies, and the others keep counting.

use std::time::Duration;

use testkit::redis::Cluster;
use tollgate::redis::RedisLimiter;
use tollgate::{Consistency, DAY, Decision, FixedWindow, Hit, Limit, LimitId, OnStoreFailure, Settlement, Source};

/// More than any of these tests uses.
const WIDE: u64 = 1_000_000;

fn window(name: &str, quota: u64) -> Limit {
    Limit::new(name, FixedWindow::new(quota, DAY).from_first_request()).expect("the numbers are within the bounds")
}

/// A cluster of which one master is dead, and no replica takes over.
struct Rig {
    cluster: Cluster,
    /// Keys of `global` and `per-user`, on different masters.
    keys: [String; 2],
}

impl Rig {
    fn new() -> Self {
        let cluster = Cluster::with(&["--cluster-node-timeout", "60000"]);
        let key_on = |limit: &str, master: usize| {
            let slot = |key: &str| crc16::State::<crc16::XMODEM>::calculate(format!("{limit}|{key}").as_bytes());
            let mut keys = (0..).map(|nth| format!("key {nth}"));
            keys.find(|key| cluster.owner(slot(key) % 16_384) == Some(master)).expect("one of them is there")
        };
        let keys = [key_on("global", 0), key_on("per-user", 1)];
        Self { cluster, keys }
    }

    async fn node(&self, global: Limit, per_user: Limit) -> Node {
        let builder = RedisLimiter::builder(self.cluster.url()).store_timeout(Duration::from_secs(2));
        let limiter = builder.limit(global).limit(per_user).connect().await.expect("connects");
        let ids = ["global", "per-user"].map(|name| limiter.id(name).expect("a limit"));
        Node { limiter, ids, keys: self.keys.clone() }
    }

    fn kill_the_server_of_global(&mut self) {
        self.cluster.node(0).kill();
    }
}

struct Node {
    limiter: RedisLimiter,
    ids: [LimitId; 2],
    keys: [String; 2],
}

impl Node {
    fn hits(&self) -> [Hit<'_>; 2] {
        [Hit::new(self.ids[0], &self.keys[0]), Hit::new(self.ids[1], &self.keys[1])]
    }

    async fn check(&self) -> Decision {
        self.limiter.decide(&self.hits()).await
    }

    /// Returns the remaining units of the limit on the healthy server.
    async fn left(&self) -> u64 {
        let decision = self.limiter.decide(&[self.hits()[1].cost(0)]).await;
        assert_eq!((decision.source(), decision.limit()), (Source::Store, Some(self.ids[1])), "{decision:?}");
        decision.remaining()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_on_a_healthy_server_counts_while_another_allows_by_policy() {
    let mut rig = Rig::new();
    rig.kill_the_server_of_global();
    let global = || window("global", 5).with_on_store_failure(OnStoreFailure::Allow);
    let nodes = [rig.node(global(), window("per-user", 10)).await, rig.node(global(), window("per-user", 10)).await];
    let mut admitted = 0;
    for turn in 0..30 {
        let node = &nodes[turn % 2];
        let decision = node.check().await;
        admitted += u64::from(decision.is_allowed());
        assert_eq!(decision.limit(), Some(node.ids[1]), "{turn}: {decision:?}");
        assert!(matches!(decision.source(), Source::Store | Source::DenialCache), "{turn}: {decision:?}");
    }
    assert_eq!(admitted, 10);
    assert!(nodes[0].limiter.stats().by_policy > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_on_a_healthy_server_is_shared_while_another_is_local() {
    let mut rig = Rig::new();
    rig.kill_the_server_of_global();
    let global = || window("global", 20).with_on_store_failure(OnStoreFailure::Local);
    let nodes = [rig.node(global(), window("per-user", 50)).await, rig.node(global(), window("per-user", 50)).await];
    let mut admitted = 0;
    for node in &nodes {
        let mut here = 0;
        for _ in 0..25 {
            let decision = node.check().await;
            match decision.is_allowed() {
                true => here += 1,
                // The memory of this node decides on the failed limit.
                false => assert_eq!((decision.source(), decision.limit()), (Source::Local, Some(node.ids[0]))),
            }
        }
        // The whole limit, or half of it once the nodes know of each other.
        assert!((10..=20).contains(&here), "{here}");
        admitted += here;
    }
    assert_eq!(nodes[0].left().await, 50 - admitted, "a denial takes nothing from the other limit");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_on_a_healthy_server_loses_nothing_while_another_denies() {
    let mut rig = Rig::new();
    rig.kill_the_server_of_global();
    let global = window("global", WIDE).with_on_store_failure(OnStoreFailure::Deny);
    let node = rig.node(global, window("per-user", 10)).await;
    for _ in 0..20 {
        let decision = node.check().await;
        assert!(!decision.is_allowed(), "{decision:?}");
        assert_eq!((decision.source(), decision.limit()), (Source::Policy, Some(node.ids[0])));
    }
    assert_eq!(node.left().await, 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exhausted_limit_on_a_healthy_server_denies_under_every_policy_of_the_others() {
    let mut rig = Rig::new();
    rig.kill_the_server_of_global();
    for policy in [OnStoreFailure::Allow, OnStoreFailure::Local, OnStoreFailure::Deny] {
        let node = rig.node(window("global", WIDE).with_on_store_failure(policy), window("per-user", 3)).await;
        while node.left().await > 0 {
            assert!(node.limiter.decide(&[node.hits()[1]]).await.is_allowed());
        }
        let decision = node.check().await;
        assert!(!decision.is_allowed(), "{policy:?}: {decision:?}");
        assert_eq!(decision.limit(), Some(node.ids[1]), "{policy:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_goes_to_the_healthy_server_and_to_local_memory() {
    let mut rig = Rig::new();
    rig.kill_the_server_of_global();
    let global = window("global", 20).with_on_store_failure(OnStoreFailure::Local);
    let node = rig.node(global, window("per-user", 50)).await;
    // More often than either limit allows without refunds.
    for _ in 0..60 {
        let reserved = node.limiter.reserve_hits(&node.hits(), DAY).await.expect("both have units");
        assert_eq!(node.limiter.refund(reserved).await, Ok(Settlement::Settled));
    }
    assert_eq!(node.left().await, 50);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_limit_decides_while_another_allows_by_policy() {
    let mut rig = Rig::new();
    let global = window("global", WIDE).with_on_store_failure(OnStoreFailure::Allow);
    let per_user = window("per-user", 100).with_consistency(Consistency::Leased);
    let node = rig.node(global, per_user).await;
    assert!(node.check().await.is_allowed());
    rig.kill_the_server_of_global();
    let mut admitted = 1;
    for _ in 0..300 {
        let decision = node.check().await;
        admitted += u64::from(decision.is_allowed());
        assert_eq!(decision.limit(), Some(node.ids[1]), "{decision:?}");
    }
    assert!(admitted <= 100, "{admitted} admitted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_limit_on_a_healthy_server_counts_while_another_server_hangs() {
    let mut rig = Rig::new();
    let global = window("global", 5).with_on_store_failure(OnStoreFailure::Allow);
    let node = rig.node(global, window("per-user", 10)).await;
    rig.cluster.node(0).stop();
    let mut admitted = 0;
    // The first of these wait for the server until their timeout.
    for _ in 0..20 {
        let decision = node.check().await;
        admitted += u64::from(decision.is_allowed());
        assert_eq!(decision.limit(), Some(node.ids[1]), "{decision:?}");
    }
    assert_eq!(admitted, 10);
}

//! A leased limit together with others on one request: all or nothing, and few calls for the leased key.

use std::time::Duration;

use futures_util::future::join_all;
use redis::InfoDict;
use testkit::redis::{Cluster, RedisServer};
use tokio::time::{Instant, timeout};
use tollgate::redis::{RedisLimiter, RedisLimiterBuilder};
use tollgate::{
    Algorithm, Consistency, DAY, Decision, FixedWindow, Hit, Limit, LimitId, OnStoreFailure, Rate, SlidingWindowLog,
    Source, TokenBucket,
};

/// More than any of these tests uses.
const WIDE: u64 = 1_000_000;

fn limit(name: &str, algorithm: impl Into<Algorithm>) -> Limit {
    Limit::new(name, algorithm).expect("the numbers are within the bounds")
}

fn window(quota: u64) -> FixedWindow {
    FixedWindow::new(quota, DAY).from_first_request()
}

fn leased(name: &str, algorithm: impl Into<Algorithm>) -> Limit {
    limit(name, algorithm).with_consistency(Consistency::Leased)
}

fn builder(url: String) -> RedisLimiterBuilder {
    RedisLimiter::builder(url).store_timeout(Duration::from_secs(20)).on_store_failure(OnStoreFailure::Deny)
}

/// A cluster without failover, even on a busy machine.
fn steady_cluster() -> Cluster {
    Cluster::with(&["--cluster-node-timeout", "60000"])
}

fn owner(cluster: &mut Cluster, name: &str) -> usize {
    let mut connection = cluster.node(0).connection();
    let slot = redis::cmd("CLUSTER").arg("KEYSLOT").arg(name).query(&mut connection).expect("a slot");
    cluster.owner(slot).expect("all nodes agree")
}

/// Returns the node of the global limit's key, and users whose keys are on other nodes.
fn users_elsewhere(cluster: &mut Cluster, count: usize) -> (usize, Vec<String>) {
    let global = owner(cluster, "rate_limit:{global|all}");
    let mut users = Vec::new();
    for number in 0.. {
        let user = format!("user {number}");
        if owner(cluster, &format!("rate_limit:{{per-user|{user}}}")) != global {
            users.push(user);
        }
        if users.len() == count {
            break;
        }
    }
    (global, users)
}

/// Returns the number of script calls since the start of the server.
fn script_calls(server: &RedisServer) -> u64 {
    let info: InfoDict = redis::cmd("INFO").arg("commandstats").query(&mut server.connection()).expect("statistics");
    let calls = |field: &str| {
        let line: String = info.get(field).unwrap_or_default();
        line.split(',').find_map(|part| part.strip_prefix("calls=")?.parse().ok()).unwrap_or(0_u64)
    };
    calls("cmdstat_evalsha") + calls("cmdstat_eval")
}

async fn left(node: &RedisLimiter, id: LimitId, key: &str) -> u64 {
    let decision = node.decide(&[Hit::new(id, key).cost(0)]).await;
    assert_eq!(decision.source(), Source::Store, "{decision:?}");
    decision.remaining()
}

/// Sends the given number of requests for every user, to all nodes in turn. Returns how many were allowed, by user.
async fn check_all(nodes: &[RedisLimiter], users: &[String], times: usize) -> Vec<u64> {
    let ids = ["global", "per-user"].map(|name| nodes[0].id(name).expect("a limit"));
    let tasks = users.iter().map(|user| {
        let (nodes, user) = (nodes.to_vec(), user.clone());
        tokio::spawn(async move {
            let mut admitted = 0;
            for turn in 0..times {
                let hits = [Hit::new(ids[0], "all"), Hit::new(ids[1], &user)];
                let decision = nodes[turn % nodes.len()].decide(&hits).await;
                assert!(!matches!(decision.source(), Source::Local | Source::Policy), "{decision:?}");
                admitted += u64::from(decision.is_allowed());
            }
            admitted
        })
    });
    join_all(tasks).await.into_iter().map(|task| task.expect("no task panics")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_global_limit_costs_its_slot_a_few_calls_and_users_stay_exact() {
    let mut cluster = steady_cluster();
    let build = || {
        let limits = builder(cluster.url()).limit(leased("global", window(WIDE)));
        limits.limit(limit("per-user", SlidingWindowLog::new(60, DAY))).connect()
    };
    let nodes = [build().await.expect("connects"), build().await.expect("connects")];
    let (global, users) = users_elsewhere(&mut cluster, 20);
    let (calls_before, began) = (script_calls(cluster.node(global)), Instant::now());
    let admitted = check_all(&nodes, &users, 100).await;
    let (calls, seconds) = (script_calls(cluster.node(global)) - calls_before, began.elapsed().as_secs());
    assert!(admitted.iter().all(|admitted| *admitted == 60), "{admitted:?}");
    // A lease lasts for 200 ms, and its rest is given back. The first requests find an idle key.
    assert!(calls < 100 + seconds * 40, "{calls} calls in {seconds} s for 2000 requests");
    for node in &nodes {
        node.return_leases().await;
    }
    let id = nodes[0].id("global").expect("a limit");
    assert_eq!(left(&nodes[0], id, "all").await, WIDE - 20 * 60, "what users were denied is not charged");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exhausted_global_limit_takes_nothing_from_users() {
    let cluster = steady_cluster();
    let build = || {
        let limits = builder(cluster.url()).limit(leased("global", window(300)));
        limits.limit(limit("per-user", window(WIDE))).connect()
    };
    let nodes = [build().await.expect("connects"), build().await.expect("connects")];
    let users: Vec<String> = (0..20).map(|number| format!("user {number}")).collect();
    let admitted = check_all(&nodes, &users, 40).await;
    let in_all: u64 = admitted.iter().sum();
    assert!(in_all <= 300, "{in_all} admitted");
    assert!(in_all > 150, "{in_all} admitted");
    let id = nodes[0].id("per-user").expect("a limit");
    for (user, admitted) in users.iter().zip(admitted) {
        assert_eq!(left(&nodes[0], id, user).await, WIDE - admitted, "{user}");
    }
}

/// Sends requests until one is decided from a lease, and returns how many were allowed.
async fn until_leased(node: &RedisLimiter, hits: &[Hit<'_>]) -> u64 {
    for admitted in 0..10_000 {
        let before = node.stats().leased;
        assert!(node.decide(hits).await.is_allowed());
        if node.stats().leased > before {
            return admitted + 1;
        }
    }
    panic!("the key is busy, and never leased");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_times_out_or_is_decided_by_policy_returns_its_units_to_the_lease() {
    let mut cluster = steady_cluster();
    let build = |policy| {
        let limits = builder(cluster.url()).on_store_failure(policy).limit(leased("global", window(WIDE)));
        limits.limit(limit("per-user", window(WIDE))).limit(leased("tenant", window(WIDE))).connect()
    };
    let denying = build(OnStoreFailure::Deny).await.expect("connects");
    let allowing = build(OnStoreFailure::Allow).await.expect("connects");
    let [global, per_user, tenant] = ["global", "per-user", "tenant"].map(|name| denying.id(name).expect("a limit"));
    let on_global = owner(&mut cluster, "rate_limit:{global|all}");
    let user = users_elsewhere(&mut cluster, 1).1.remove(0);
    let tenant_key = (0..).map(|number| format!("tenant {number}"));
    let tenant_key = tenant_key
        .into_iter()
        .find(|key| owner(&mut cluster, &format!("rate_limit:{{tenant|{key}}}")) == on_global)
        .expect("some key is there");
    let hits = [Hit::new(global, "all"), Hit::new(per_user, &user), Hit::new(tenant, &tenant_key)];
    let mut admitted = until_leased(&denying, &hits).await;
    let on_user = owner(&mut cluster, &format!("rate_limit:{{per-user|{user}}}"));
    cluster.node(on_user).stop();
    for _ in 0..5 {
        let given_up = timeout(Duration::from_millis(20), denying.decide(&hits)).await;
        assert!(given_up.is_err(), "{given_up:?}");
    }
    cluster.node(on_user).kill();
    let by_policy = async |node: &RedisLimiter| -> Decision {
        loop {
            let before = node.stats().by_policy;
            let decision = node.decide(&hits).await;
            if node.stats().by_policy > before {
                return decision;
            }
        }
    };
    for _ in 0..5 {
        assert!(!by_policy(&denying).await.is_allowed());
    }
    for _ in 0..50 {
        assert!(by_policy(&allowing).await.is_allowed());
        admitted += 1;
    }
    denying.return_leases().await;
    allowing.return_leases().await;
    for (id, key) in [(global, "all"), (tenant, &tenant_key)] {
        let left = left(&denying, id, key).await;
        // The server of these limits is healthy: they count the requests that the policy of the other limit allows.
        assert_eq!(left, WIDE - admitted);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_leased_limits_with_costs_and_variants_count_admitted_units() {
    let server = RedisServer::start();
    let build = || {
        let limits = builder(server.url())
            .limit(leased("global", TokenBucket::new(10_000, Rate::per_day(1))))
            .limit(leased("plan", window(1_000)))
            .limit(limit("per-user", window(90)))
            .variant("large", leased("plan", window(2_000)));
        limits.connect()
    };
    let nodes = [build().await.expect("connects"), build().await.expect("connects")];
    let [global, plan, per_user] = ["global", "plan", "per-user"].map(|name| nodes[0].id(name).expect("a limit"));
    let variant = nodes[0].variant("plan", "large").expect("the variant");
    let tasks = (0..40).map(|number| {
        let node = nodes[number % 2].clone();
        tokio::spawn(async move {
            let (user, mut units) = (format!("user {number}"), 0);
            // Half of them by the limit itself, half by its variant. They share the keys.
            let plan = if number < 20 { plan } else { variant };
            for turn in 0..60 {
                let cost = 1 + turn % 3;
                let hits = [Hit::new(global, "all"), Hit::new(plan, "gold"), Hit::new(per_user, &user)];
                let decision = node.decide(&hits.map(|hit| hit.cost(cost))).await;
                units += if decision.is_allowed() { cost } else { 0 };
            }
            units
        })
    });
    let units: Vec<u64> = join_all(tasks).await.into_iter().map(|task| task.expect("no task panics")).collect();
    assert!(units.iter().all(|units| *units <= 90), "{units:?}");
    let in_all: u64 = units.iter().sum();
    assert!(in_all <= 2_000, "{in_all} units");
    assert!(in_all > 1_000, "{in_all} units");
    for node in &nodes {
        node.return_leases().await;
    }
    // A leased bucket holds back the refill during a lease: here a fraction of a unit.
    assert_eq!(left(&nodes[0], global, "all").await, 10_000 - 1 - in_all);
    assert_eq!(left(&nodes[0], variant, "gold").await, 2_000 - in_all);
    for (number, units) in units.iter().enumerate() {
        assert_eq!(left(&nodes[0], per_user, &format!("user {number}")).await, 90 - units);
    }
    assert!(nodes.iter().all(|node| node.stats().leased > 0));
}

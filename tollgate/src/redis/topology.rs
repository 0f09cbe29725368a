//! The topology of a store: a single server, the master that sentinels name, or the nodes of a cluster.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::bounds::ReplyBounds;
use super::breaker::BreakerCounts;
use super::cluster::{Cluster, Job, Member, ScriptCalls};
use super::dial::{Address, Dialer};
use super::names::{self, Names};
use super::node::{Common, Node, RunError, Sentinels, ServerRole, Subscriber};
use super::settings::{RedisSettings, Resolved};
use super::stats::Traffic;
use super::warnings::{RecentWarnings, StoreWarning};
use super::{ConnectError, StoreError, Tasks};

/// Time between two looks at the server of a subscription.
const LEFT_EVERY: Duration = Duration::from_secs(1);

/// The servers of a store. Finds the server of each key.
pub(super) struct Topology {
    servers: Servers,
    /// The address for display.
    address: String,
    names: Names,
    traffic: Arc<Traffic>,
    breaker_counts: Arc<BreakerCounts>,
    dialer: Arc<Dialer>,
    recent: Arc<RecentWarnings>,
    _tasks: Tasks,
}

enum Servers {
    One(Member),
    Cluster(Arc<Cluster>),
}

impl Topology {
    /// Connects to the servers in the background. `store` is its name in logs. With `script_calls`, jobs can be
    /// submitted. `bounds` are those on replies of the servers.
    pub(super) fn new(
        settings: &RedisSettings,
        store: Arc<str>,
        timeout: Duration,
        script_calls: Option<&Arc<ScriptCalls>>,
        bounds: ReplyBounds,
    ) -> Result<Self, ConnectError> {
        let Resolved { address, servers, tls, login, sentinel_login, names } = settings.resolved()?;
        let breaker_counts = Arc::new(BreakerCounts::default());
        let traffic = Arc::new(Traffic::default());
        let recent = Arc::new(RecentWarnings::default());
        let dialer = Arc::new(Dialer::new(tls.clone(), login, traffic.clone(), store.clone(), bounds, recent.clone()));
        let (loads_scripts, trouble) = (script_calls.is_some(), Arc::new(Notify::new()));
        let (changed, names_of_keys) = (breaker_counts.clone(), names.clone());
        let common = Common {
            store,
            dialer: dialer.clone(),
            timeout,
            loads_scripts,
            breaker_counts: changed,
            trouble,
            names: names_of_keys,
            recent: recent.clone(),
            down: Arc::default(),
        };
        let mut tasks = Vec::new();
        let servers = match servers {
            super::target::Servers::Single(address) => {
                Servers::One(Member::start(ServerRole::At(address), common, script_calls, None, Duration::ZERO))
            }
            super::target::Servers::Sentinel { sentinels, service } => {
                // Sentinels have their own login.
                let (store, bounds) = (common.store.clone(), ReplyBounds::SENTINELS);
                let dialer = Dialer::new(tls, sentinel_login, traffic.clone(), store, bounds, recent.clone());
                let sentinels = Sentinels::new(sentinels, service, dialer, common.connect_limit());
                Servers::One(Member::start(
                    ServerRole::Master(Box::new(sentinels)),
                    common,
                    script_calls,
                    None,
                    Duration::ZERO,
                ))
            }
            super::target::Servers::Cluster(seeds) => {
                let cluster = Cluster::new(seeds, common, script_calls.cloned());
                tasks.push(tokio::spawn(cluster.clone().follow()).abort_handle());
                Servers::Cluster(cluster)
            }
        };
        Ok(Self { servers, address, names, traffic, breaker_counts, dialer, recent, _tasks: Tasks(tasks) })
    }

    pub(super) fn address(&self) -> &str {
        &self.address
    }

    /// Returns the names of its keys and channels.
    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    pub(super) fn traffic(&self) -> &Traffic {
        &self.traffic
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.servers, Servers::Cluster(_))
    }

    /// Waits until the first attempt to connect to every server has succeeded or failed.
    pub(super) async fn settled(&self) {
        match &self.servers {
            Servers::One(member) => member.node.settled().await,
            Servers::Cluster(cluster) => cluster.settled().await,
        }
    }

    /// Puts a job in the queue of the server that has its keys.
    pub(super) fn submit(&self, job: Job) -> Result<(), StoreError> {
        match &self.servers {
            Servers::One(member) => member.submit(job),
            Servers::Cluster(cluster) => cluster.submit(job),
        }
    }

    /// Runs a command that decides nothing on the server that has the key. A refusal does not affect the limits.
    pub(super) async fn run(&self, key: &[u8], command: &Cmd, deadline: Instant) -> Result<Value, RunError> {
        match &self.servers {
            Servers::One(member) => member.node.run(command, deadline).await,
            Servers::Cluster(cluster) => {
                let slot = names::slot(key);
                // The command may come before the first map of slots.
                let _ = timeout_at(deadline, cluster.requested()).await;
                let node = cluster.owner(slot).map_err(RunError::Lost)?;
                cluster.run(&node, slot, command, deadline, |_, _| ()).await
            }
        }
    }

    /// Runs a command on which no decision depends. Its failure does not count towards the breaker. Returns `None` if
    /// there is no reply in time.
    pub(super) async fn run_in_background(&self, key: &[u8], command: &Cmd, limit: Duration) -> Option<Value> {
        let node = match &self.servers {
            Servers::One(member) => member.node.clone(),
            Servers::Cluster(cluster) => cluster.owner(names::slot(key)).ok()?,
        };
        node.run_in_background(command, limit).await
    }

    /// Waits until the server of a key has recovered from a failure, unless it has recovered since the last call. For one
    /// task.
    pub(super) async fn recovered(&self, key: &[u8]) {
        match &self.servers {
            Servers::One(member) => member.node.breaker.closed().await,
            Servers::Cluster(cluster) => match cluster.owner(names::slot(key)) {
                Ok(node) => node.breaker.closed().await,
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// Returns the number of the connection to the server of a key, if it is open: see [`Node::connection_number`].
    pub(super) fn connection_to(&self, key: &[u8]) -> Option<u64> {
        match &self.servers {
            Servers::One(member) => member.node.connection_number(),
            Servers::Cluster(cluster) => cluster.owner(names::slot(key)).ok()?.connection_number(),
        }
    }

    /// Returns whether requests for a key fail without a call, because its server has failed and is not back yet.
    pub(super) fn has_failed_for(&self, key: &[u8]) -> bool {
        match &self.servers {
            Servers::One(member) => !member.node.is_available(),
            Servers::Cluster(cluster) => cluster.owner(names::slot(key)).is_ok_and(|node| !node.is_available()),
        }
    }

    /// Returns a connection for subscriptions. On a cluster, every node receives all messages.
    pub(super) async fn subscriber(&self) -> Result<Subscriber, StoreError> {
        match &self.servers {
            Servers::One(member) => member.node.subscriber().await,
            Servers::Cluster(cluster) => cluster.subscriber().await,
        }
    }

    /// Waits until the server of a subscription is no longer one of these: after a failover or a partition it may still
    /// answer, and receive no messages.
    pub(super) async fn left(&self, subscribed: &Address) {
        let is_one = || match &self.servers {
            Servers::One(member) => member.node.is_at(subscribed),
            Servers::Cluster(cluster) => cluster.has(subscribed),
        };
        while is_one() {
            tokio::time::sleep(LEFT_EVERY).await;
        }
    }

    /// Returns the servers that hold keys.
    pub(super) fn nodes(&self) -> Vec<Arc<Node>> {
        match &self.servers {
            Servers::One(member) => vec![member.node.clone()],
            Servers::Cluster(cluster) => cluster.nodes(),
        }
    }

    /// Returns why some or all keys cannot be decided. `None` if all servers are available.
    pub(super) fn why_unavailable(&self) -> Option<StoreError> {
        match &self.servers {
            Servers::One(member) => member.node.breaker.why(),
            Servers::Cluster(cluster) => cluster.why_unavailable(),
        }
    }

    /// Returns the problems with which the servers still decide.
    pub(super) fn warnings(&self) -> Vec<StoreWarning> {
        let mut problems: Vec<String> = self.dialer.problems().collect();
        if let Servers::One(member) = &self.servers
            && let ServerRole::Master(sentinels) = &member.node.role
        {
            // Their certificates are those of the servers.
            problems.extend(sentinels.file_problems());
        }
        problems.sort_unstable();
        problems.dedup();
        let files = problems.into_iter().map(|problem| StoreWarning::File { problem });
        self.recent.current().into_iter().chain(files).collect()
    }

    /// Returns how often breakers opened and closed.
    pub(super) fn breaker_counts(&self) -> (u64, u64) {
        (self.breaker_counts.opened(), self.breaker_counts.closed())
    }
}

//! Rule sets published on Redis for every node of a fleet. A rule set is bytes here: this module does not read its
//! content.
//!
//! The newest set is stored under one key, with a version that grows by one and a unique id. A node polls version and
//! id every few seconds, and reads the set when they differ from those it holds. So a node that was offline, or that
//! missed the announcement, gets it too.
//!
//! Redis replicates asynchronously, so a failover can lose a publication that some nodes hold already. Every set
//! therefore carries the ids of its predecessors, and a node that finds another set than its own decides by them
//! (`follower.rs`):
//!
//! - Its own set is a predecessor of the one on Redis: the node takes the newer one.
//! - The set on Redis is a predecessor of its own, or there is none: Redis has lost a publication. The node writes its
//!   own set back.
//! - Neither: another set was published after the loss. The one on Redis wins, and the node reports the one it gives
//!   up.

mod follower;
mod stored;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use self::follower::Follower;
use super::settings::RedisSettings;
use super::stores::DEFAULT;
use super::topology::Topology;
use super::{ConnectError, StoreError, Tasks};

/// Deadline of probes after a server has failed.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// Maximum size of a rule set. People write rules, so a larger set is a mistake, and every node would fetch it.
const MAX_BYTES: usize = 4 << 20;

/// A published rule set.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PublishedRules {
    /// Grows by one with each publication and each withdrawal.
    pub version: u64,
    /// A unique id of the publication or withdrawal. The version is not unique: after a failover that lost a
    /// publication, it is used again.
    pub id: Arc<str>,
    /// The published rules. `None` after a withdrawal: each node goes back to its own rules.
    pub rules: Option<Arc<[u8]>>,
    /// The time of the first publication in this line of versions, in microseconds. A Redis that has lost its data
    /// begins another line.
    epoch: u64,
    /// The ids of its predecessors, the latest first, separated by spaces. Only the last hundred or so.
    predecessors: Arc<str>,
}

impl PublishedRules {
    /// Returns whether `later` was published with knowledge of this set.
    fn precedes(&self, later: &Self) -> bool {
        if self.version >= later.version {
            return false;
        }
        let known = later.predecessors.split_ascii_whitespace();
        if known.clone().any(|id| *id == *self.id) {
            return true;
        }
        // Older than the recorded ids, or published by a release that recorded none.
        let oldest = known.last().and_then(stored::version_of).unwrap_or(later.version);
        self.epoch == later.epoch && self.version < oldest
    }
}

impl fmt::Display for PublishedRules {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "version {} ({})", self.version, self.id)
    }
}

/// The reaction of a node to the loss of its rule set on Redis: see [`RuleSets::repairs`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Repair {
    /// Redis had an older rule set or none, and this node has written its own back.
    Restored {
        /// The rule set that was lost.
        lost: PublishedRules,
    },
    /// Redis has an older rule set or none, and this node cannot write its own back. It keeps trying.
    NotRestored {
        /// The rule set that is lost.
        lost: PublishedRules,
        /// Why it could not be written.
        why: StoreError,
    },
    /// Another rule set was published after the loss, and this node has taken it.
    Replaced {
        /// The rule set that was lost.
        lost: PublishedRules,
        /// The rule set that is published now.
        by: PublishedRules,
    },
}

impl fmt::Display for Repair {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Restored { lost } => {
                write!(out, "Redis had lost the published rules of {lost}, as a failover can: this node restored them")
            }
            Self::NotRestored { lost, why } => write!(
                out,
                "Redis has lost the published rules of {lost}, and this node cannot restore them: {}: let its user \
                 write rate_limit:{{rules}}, or publish them again",
                why.detail()
            ),
            Self::Replaced { lost, by } => write!(
                out,
                "the published rules of {lost} were lost on Redis, as a failover can do, and {by} was published without \
                 knowledge of them and replaces them: publish them again if they are still wanted"
            ),
        }
    }
}

/// The repairs that a node has made so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Repairs {
    /// Rule sets that this node wrote back to Redis.
    pub restored: u64,
    /// Rule sets that this node gave up for others that were published after Redis had lost them.
    pub replaced: u64,
    /// The latest repair.
    pub latest: Option<Repair>,
}

/// The reason why a rule set was not published or withdrawn.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PublishError {
    /// The newest version is not the expected one: another client has published or withdrawn in the meantime, or the
    /// version never existed.
    Conflict {
        /// The newest version.
        version: u64,
    },
    /// The rule set is larger than 4 MiB.
    TooLarge,
    /// Redis did not execute the command.
    Store(StoreError),
}

impl fmt::Display for PublishError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Conflict { version } => {
                write!(
                    out,
                    "the newest version is {version}, not the expected one: read it, and publish with that version"
                )
            }
            Self::TooLarge => {
                out.write_str("the rule set is larger than 4 MiB: use overrides by key instead of limits by key")
            }
            Self::Store(error) => error.fmt(out),
        }
    }
}

impl std::error::Error for PublishError {}

/// Publishes the rule sets of a fleet, and follows them.
pub struct RuleSets {
    topology: Arc<Topology>,
    latest: watch::Receiver<Option<PublishedRules>>,
    repairs: watch::Receiver<Repairs>,
    _tasks: Tasks,
}

impl RuleSets {
    /// Connects to the rule sets on a Redis: a URL as for [`RedisLimiter::builder`](super::RedisLimiter::builder), or
    /// [`RedisSettings`]. Redis need not be reachable yet.
    ///
    /// # Errors
    ///
    /// If a setting is invalid.
    ///
    /// # Panics
    ///
    /// If there is no tokio runtime.
    pub fn connect(settings: impl Into<RedisSettings>) -> Result<Self, ConnectError> {
        let topology = Arc::new(Topology::new(&settings.into(), DEFAULT.into(), ANSWER_WITHIN, None)?);
        let (sender, latest) = watch::channel(None);
        let (repaired, repairs) = watch::channel(Repairs::default());
        let task = tokio::spawn(Follower::new(topology.clone(), sender, repaired).follow());
        Ok(Self { topology, latest, repairs, _tasks: Tasks(vec![task.abort_handle()]) })
    }

    /// Publishes a rule set to every node, and returns its version. With `expected`, only if that is the newest
    /// version; 0 means that nothing was published yet.
    ///
    /// # Errors
    ///
    /// If the newest version is not the expected one, the rule set is too large, or Redis cannot be reached.
    pub async fn publish(&self, rules: &[u8], expected: Option<u64>) -> Result<u64, PublishError> {
        if rules.len() > MAX_BYTES {
            return Err(PublishError::TooLarge);
        }
        stored::publish(&self.topology, rules, expected).await
    }

    /// Withdraws the published rule set, so that every node goes back to its own rules, and returns the new version. If
    /// nothing is published, nothing changes. `expected` is as for [`publish`](Self::publish).
    ///
    /// # Errors
    ///
    /// If the newest version is not the expected one, or Redis cannot be reached.
    pub async fn withdraw(&self, expected: Option<u64>) -> Result<u64, PublishError> {
        stored::withdraw(&self.topology, expected).await
    }

    /// Reads the latest publication or withdrawal from Redis. Returns `None` if nothing was ever published.
    ///
    /// # Errors
    ///
    /// If Redis cannot be reached.
    pub async fn newest(&self) -> Result<Option<PublishedRules>, StoreError> {
        stored::read(&self.topology).await
    }

    /// Returns a receiver of the newest rule set that this node has received, and of every later one: see
    /// [`watch::Receiver::changed`].
    #[must_use]
    pub fn latest(&self) -> watch::Receiver<Option<PublishedRules>> {
        self.latest.clone()
    }

    /// Returns a receiver of the repairs by this node, made when Redis lost a rule set. A node that only publishes
    /// holds no rule set, and repairs nothing.
    #[must_use]
    pub fn repairs(&self) -> watch::Receiver<Repairs> {
        self.repairs.clone()
    }
}

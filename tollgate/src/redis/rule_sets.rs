//! Rule sets on Redis: published once, they reach every node. The content of a rule set is not read here: it is bytes.
//!
//! The newest set is kept under one key, with a version that grows by one and an id that no other publication has. A
//! node polls version and id every few seconds, and reads the set when they differ from those it holds: so a node that
//! was away, or that missed the announcement, finds it.
//!
//! Redis replicates asynchronously, so a failover can lose a publication that some nodes hold already. Every set
//! therefore carries the ids of its predecessors, and a node that finds another set than its own can decide
//! (`follower.rs`):
//!
//! - Its own set is a predecessor of the one on Redis: it takes the newer one.
//! - The set on Redis is a predecessor of its own, or there is none: Redis has lost a publication. The node writes its
//!   own set back.
//! - Neither: another set was published after the loss. The one on Redis wins, and the node reports the one it gives up.

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

/// How soon a server that failed has to answer to be asked again.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// Rules are written by people: a larger one is a mistake, and every node would fetch it.
const MAX_BYTES: usize = 4 << 20;

/// A rule set as it was published.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PublishedRules {
    /// Grows by one with each publication and each withdrawal.
    pub version: u64,
    /// Identifies the publication or withdrawal. A version does not: after a failover that lost one, it is used again.
    pub id: Arc<str>,
    /// What was published. Nothing, if that was withdrawn: then each node goes back to rules of its own.
    pub rules: Option<Arc<[u8]>>,
    /// The time of the first publication in this line of versions, in microseconds. A Redis that has lost its data
    /// begins another line.
    epoch: u64,
    /// The ids of its predecessors, the latest first, separated by spaces. Only the last hundred or so.
    predecessors: Arc<str>,
}

impl PublishedRules {
    /// Whether `later` was published with knowledge of this one.
    fn precedes(&self, later: &Self) -> bool {
        if self.version >= later.version {
            return false;
        }
        let known = later.predecessors.split_ascii_whitespace();
        if known.clone().any(|id| *id == *self.id) {
            return true;
        }
        // Older than what is recorded, or published by a release that recorded nothing.
        let oldest = known.last().and_then(stored::version_of).unwrap_or(later.version);
        self.epoch == later.epoch && self.version < oldest
    }
}

impl fmt::Display for PublishedRules {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "version {} ({})", self.version, self.id)
    }
}

/// What a node did about a rule set that Redis has lost: see [`RuleSets::repairs`].
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
    /// Another rule set was published after the loss. This node has taken that.
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
                "Redis has lost the published rules of {lost}, and this node cannot restore them: {}; let its user \
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

/// Why a rule set was not published.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PublishError {
    /// The newest version is not the one that was expected: someone else has published or withdrawn meanwhile, or there
    /// never was that one.
    Conflict {
        /// The newest version.
        version: u64,
    },
    /// It is larger than 4 MiB.
    TooLarge,
    /// Redis could not be asked.
    Store(StoreError),
}

impl fmt::Display for PublishError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Conflict { version } => {
                write!(out, "the newest version is {version}, not the one that was expected; look at it and expect it")
            }
            Self::TooLarge => {
                out.write_str("a rule set may have 4 MiB; use overrides by key rather than limits by key")
            }
            Self::Store(error) => error.fmt(out),
        }
    }
}

impl std::error::Error for PublishError {}

/// Where the rule sets of a fleet are published, and heard of.
pub struct RuleSets {
    topology: Arc<Topology>,
    latest: watch::Receiver<Option<PublishedRules>>,
    repairs: watch::Receiver<Repairs>,
    _tasks: Tasks,
}

impl RuleSets {
    /// The rule sets on that Redis: a URL as for [`RedisLimiter::builder`](super::RedisLimiter::builder), or
    /// [`RedisSettings`]. Redis need not be there yet.
    ///
    /// # Errors
    ///
    /// When a setting can never work.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn connect(settings: impl Into<RedisSettings>) -> Result<Self, ConnectError> {
        let topology = Arc::new(Topology::new(&settings.into(), DEFAULT.into(), ANSWER_WITHIN, None)?);
        let (sender, latest) = watch::channel(None);
        let (repaired, repairs) = watch::channel(Repairs::default());
        let task = tokio::spawn(Follower::new(topology.clone(), sender, repaired).follow());
        Ok(Self { topology, latest, repairs, _tasks: Tasks(vec![task.abort_handle()]) })
    }

    /// Publishes a rule set to every node, and says its version. With `expected`, only if that is the version in
    /// force: 0 if there is none.
    ///
    /// # Errors
    ///
    /// When another was published meanwhile, when it is too large, or when Redis is not there.
    pub async fn publish(&self, rules: &[u8], expected: Option<u64>) -> Result<u64, PublishError> {
        if rules.len() > MAX_BYTES {
            return Err(PublishError::TooLarge);
        }
        stored::publish(&self.topology, rules, expected).await
    }

    /// Takes away what is published, so that every node goes back to rules of its own, and says the version that this
    /// is. Where nothing is published, nothing changes. `expected` is as for [`publish`](Self::publish).
    ///
    /// # Errors
    ///
    /// When another was published meanwhile, or when Redis is not there.
    pub async fn withdraw(&self, expected: Option<u64>) -> Result<u64, PublishError> {
        stored::withdraw(&self.topology, expected).await
    }

    /// What is published at this moment, or was withdrawn last; nothing, if nothing ever was.
    ///
    /// # Errors
    ///
    /// When Redis is not there.
    pub async fn newest(&self) -> Result<Option<PublishedRules>, StoreError> {
        stored::read(&self.topology).await
    }

    /// The newest rule set this node has heard of, and every one after it: see [`watch::Receiver::changed`].
    #[must_use]
    pub fn latest(&self) -> watch::Receiver<Option<PublishedRules>> {
        self.latest.clone()
    }

    /// The repairs that this node has made after Redis lost a rule set, and every one after them. A node that only
    /// publishes holds no rule set, and repairs nothing.
    #[must_use]
    pub fn repairs(&self) -> watch::Receiver<Repairs> {
        self.repairs.clone()
    }
}

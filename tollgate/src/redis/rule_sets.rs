//! Rule sets on Redis: published once, they reach every node.
//!
//! The newest set is kept under one key with a version that only grows, so a node that was away, or that missed
//! the announcement, finds it: it looks when it hears an announcement, when it has connected anew, and every few
//! seconds. What a rule set says is not read here: it is bytes.
//!
//! A Redis that has lost its data begins again with version 1. So there is an epoch beside the version, the moment of
//! the first publication: to nodes that have seen higher versions, those of a later epoch are newer all the same.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use redis::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use super::target::Target;
use super::topology::Topology;
use super::{ConnectError, StoreError, Tasks};

const KEY: &str = "rate_limit:{rules}";
const CHANNEL: &str = "rate_limit:rules";
/// The longest that a node is behind when announcements are lost.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// How soon to try again when Redis is not there.
const AGAIN_AFTER: Duration = Duration::from_millis(500);
/// How long publishing and looking may take. No request waits for either.
const PATIENCE: Duration = Duration::from_secs(5);
/// How soon a server that failed has to answer to be asked again.
const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// Rules are written by people: a larger one is a mistake, and every node would fetch it.
const MAX_BYTES: usize = 4 << 20;

/// Publishes if the version is as expected, or whatever it is if none is.
const PUBLISH: &str = r"
local version = tonumber(redis.call('HGET', KEYS[1], 'version') or '0')
if ARGV[2] ~= '' and tonumber(ARGV[2]) ~= version then return {0, version} end
if redis.call('HEXISTS', KEYS[1], 'epoch') == 0 then
  local now = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'epoch', string.format('%d%06d', now[1], now[2]))
end
redis.call('HSET', KEYS[1], 'version', version + 1, 'rules', ARGV[1])
redis.call('PUBLISH', ARGV[3], version + 1)
return {1, version + 1}
";

/// Takes away what is published, if the version is as expected. That is a version too, so that nodes which were away
/// hear of it.
const WITHDRAW: &str = r"
local version = tonumber(redis.call('HGET', KEYS[1], 'version') or '0')
if ARGV[1] ~= '' and tonumber(ARGV[1]) ~= version then return {0, version} end
if redis.call('HDEL', KEYS[1], 'rules') == 0 then return {1, version} end
redis.call('HSET', KEYS[1], 'version', version + 1)
redis.call('PUBLISH', ARGV[2], version + 1)
return {1, version + 1}
";

/// A rule set as it was published.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuleSet {
    /// Grows by one with each publication and each withdrawal.
    pub version: u64,
    /// What was published. Nothing, if that was withdrawn: then each node goes back to rules of its own.
    pub rules: Option<Arc<[u8]>>,
    /// When the first of those was published that this one's version counts, in microseconds.
    epoch: u64,
}

impl RuleSet {
    fn is_newer_than(&self, other: &Self) -> bool {
        (self.epoch, self.version) > (other.epoch, other.version)
    }
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

impl std::fmt::Display for PublishError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
    latest: watch::Receiver<Option<RuleSet>>,
    _tasks: Tasks,
}

impl RuleSets {
    /// The rule sets on that Redis; the URL as for [`RedisLimiter::builder`](super::RedisLimiter::builder). Redis
    /// need not be there yet.
    ///
    /// # Errors
    ///
    /// When the URL can never work.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn connect(url: &str) -> Result<Self, ConnectError> {
        let topology = Arc::new(Topology::new(Target::parse(url)?, None, ANSWER_WITHIN, None)?);
        let (sender, latest) = watch::channel(None);
        let task = tokio::spawn(follow(topology.clone(), sender));
        Ok(Self { topology, latest, _tasks: Tasks(vec![task.abort_handle()]) })
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
        let mut command = redis::cmd("EVAL");
        command.arg(PUBLISH).arg(1).arg(KEY).arg(rules).arg(text(expected)).arg(CHANNEL);
        self.change(&command).await
    }

    /// Takes away what is published, so that every node goes back to rules of its own, and says the version that this
    /// is. Where nothing is published, nothing changes. `expected` is as for [`publish`](Self::publish).
    ///
    /// # Errors
    ///
    /// When another was published meanwhile, or when Redis is not there.
    pub async fn withdraw(&self, expected: Option<u64>) -> Result<u64, PublishError> {
        let mut command = redis::cmd("EVAL");
        command.arg(WITHDRAW).arg(1).arg(KEY).arg(text(expected)).arg(CHANNEL);
        self.change(&command).await
    }

    async fn change(&self, command: &redis::Cmd) -> Result<u64, PublishError> {
        let reply = run(&self.topology, command).await.map_err(PublishError::Store)?;
        match redis::from_redis_value::<(u64, u64)>(reply) {
            Ok((1, version)) => Ok(version),
            Ok((_, version)) => Err(PublishError::Conflict { version }),
            Err(_) => Err(PublishError::Store(StoreError::unavailable("the reply is not what was expected"))),
        }
    }

    /// What is published at this moment, or was withdrawn last; nothing, if nothing ever was.
    ///
    /// # Errors
    ///
    /// When Redis is not there.
    pub async fn newest(&self) -> Result<Option<RuleSet>, StoreError> {
        look(&self.topology).await
    }

    /// The newest rule set this node has heard of, and every one after it: see [`watch::Receiver::changed`].
    #[must_use]
    pub fn latest(&self) -> watch::Receiver<Option<RuleSet>> {
        self.latest.clone()
    }
}

fn text(expected: Option<u64>) -> String {
    expected.map(|version| version.to_string()).unwrap_or_default()
}

async fn follow(topology: Arc<Topology>, sender: watch::Sender<Option<RuleSet>>) {
    loop {
        let ear = tokio::time::timeout(PATIENCE, async {
            let mut ear = topology.subscriber().await.ok()?;
            ear.subscribe(CHANNEL).await.ok()?;
            Some(ear)
        });
        if let Ok(Some(mut ear)) = ear.await {
            let mut announced = ear.on_message();
            loop {
                if let Ok(Some(found)) = look(&topology).await {
                    offer(&sender, found);
                }
                // An announcement, or nothing for a while: look again. The end: connect again.
                if let Ok(None) = tokio::time::timeout(LOOK_EVERY, announced.next()).await {
                    break;
                }
            }
        }
        tokio::time::sleep(AGAIN_AFTER).await;
    }
}

/// A failover may bring back an older version: what a node has is never replaced by that.
fn offer(sender: &watch::Sender<Option<RuleSet>>, found: RuleSet) {
    sender.send_if_modified(|latest| {
        let newer = latest.as_ref().is_none_or(|latest| found.is_newer_than(latest));
        if newer {
            let verb = if found.rules.is_some() { "published" } else { "withdrawn" };
            tracing::info!(version = found.version, "a rule set was {verb}");
            *latest = Some(found);
        }
        newer
    });
}

async fn look(topology: &Topology) -> Result<Option<RuleSet>, StoreError> {
    let mut command = redis::cmd("HMGET");
    command.arg(KEY).arg("version").arg("rules").arg("epoch");
    let reply = run(topology, &command).await?;
    let found = redis::from_redis_value::<(Option<u64>, Option<Vec<u8>>, Option<u64>)>(reply);
    let (version, rules, epoch) = found.unwrap_or_default();
    Ok(version.map(|version| RuleSet { version, rules: rules.map(Into::into), epoch: epoch.unwrap_or(0) }))
}

async fn run(topology: &Topology, command: &redis::Cmd) -> Result<Value, StoreError> {
    Ok(topology.run(KEY.as_bytes(), command, Instant::now() + PATIENCE).await?)
}

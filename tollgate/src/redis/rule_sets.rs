//! Rule sets published on Redis for every node of a fleet. A rule set is bytes here: this module does not read its
//! content.
//!
//! The newest set is stored under one key, with a version that grows by one and a unique id. A node polls version and
//! id every few seconds, and reads the set when they differ from those it holds. So a node that was offline, or that
//! missed the announcement, gets it too.
//!
//! Redis replicates asynchronously, so a failover can lose a publication that some nodes hold already. Every set
//! therefore carries the ids of its predecessors, and a node that finds another set than its own decides by them:
//!
//! - Its own set is a predecessor of the one on Redis: the node takes the newer one.
//! - The set on Redis is a predecessor of its own, or there is none: Redis has lost a publication. The node writes its
//!   own set back.
//! - Neither: another set was published after the loss. The one on Redis wins, and the node reports the one it gives
//!   up.
//!
//! A stored rule set is a hash under one key:
//!
//! | field | |
//! |---|---|
//! | `version` | grows by one |
//! | `id` | the version, a dash, and 16 random hexadecimal digits |
//! | `predecessors` | the ids before it, the latest first, separated by spaces |
//! | `epoch` | the time of the first publication, in microseconds |
//! | `rules` | the bytes; absent once they are withdrawn |
//!
//! Earlier releases wrote no ids. A set of theirs, recognised by an `id` that is absent or of another version, is
//! identified by its version and the epoch.

use std::fmt;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use super::bounds::ReplyBounds;
use super::settings::RedisSettings;
use super::stores::DEFAULT;
use super::topology::Topology;
use super::{ConnectError, StoreError, Tasks};
use crate::redis::node::jittered;

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
        let oldest = known.last().and_then(version_of).unwrap_or(later.version);
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
    problem: watch::Receiver<Option<StoreError>>,
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
        let topology =
            Arc::new(Topology::new(&settings.into(), DEFAULT.into(), ANSWER_WITHIN, None, ReplyBounds::RULE_SETS)?);
        let (sender, latest) = watch::channel(None);
        let (repaired, repairs) = watch::channel(Repairs::default());
        let (problem_found, problem) = watch::channel(None);
        let task = tokio::spawn(Follower::new(topology.clone(), sender, repaired, problem_found).follow());
        Ok(Self { topology, latest, repairs, problem, _tasks: Tasks(vec![task.abort_handle()]) })
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
        publish(&self.topology, rules, expected).await
    }

    /// Withdraws the published rule set, so that every node goes back to its own rules, and returns the new version. If
    /// nothing is published, nothing changes. `expected` is as for [`publish`](Self::publish).
    ///
    /// # Errors
    ///
    /// If the newest version is not the expected one, or Redis cannot be reached.
    pub async fn withdraw(&self, expected: Option<u64>) -> Result<u64, PublishError> {
        withdraw(&self.topology, expected).await
    }

    /// Reads the latest publication or withdrawal from Redis. Returns `None` if nothing was ever published.
    ///
    /// # Errors
    ///
    /// If Redis cannot be reached.
    pub async fn newest(&self) -> Result<Option<PublishedRules>, StoreError> {
        read(&self.topology).await
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

    /// Returns a receiver of the reason why the published rules cannot be read, although Redis replies: they are larger
    /// than any that can be published, or the reply exceeds a bound.
    #[must_use]
    pub fn problem(&self) -> watch::Receiver<Option<StoreError>> {
        self.problem.clone()
    }
}

/// Time between two polls of version and id. Bounds how late a node gets a set whose announcement is lost.
const POLL_EVERY: Duration = Duration::from_secs(3);
/// Pause before the next attempt to subscribe.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Delay before a lost set is written back, with jitter, so that one of many nodes does it.
const RESTORE_AFTER: Duration = Duration::from_millis(250);

pub(super) struct Follower {
    topology: Arc<Topology>,
    held: watch::Sender<Option<PublishedRules>>,
    repairs: watch::Sender<Repairs>,
    problem: watch::Sender<Option<StoreError>>,
}

impl Follower {
    pub(super) fn new(
        topology: Arc<Topology>,
        held: watch::Sender<Option<PublishedRules>>,
        repairs: watch::Sender<Repairs>,
        problem: watch::Sender<Option<StoreError>>,
    ) -> Self {
        Self { topology, held, repairs, problem }
    }

    /// Follows the rule set. Never returns.
    pub(super) async fn follow(self) {
        loop {
            let subscriber = timeout(REPLY_TIMEOUT, async {
                let mut subscriber = self.topology.subscriber().await.ok()?.connection;
                subscriber.subscribe(self.topology.names().of(CHANNEL)).await.ok()?;
                Some(subscriber)
            });
            match subscriber.await {
                Ok(Some(mut subscriber)) => {
                    // One poll is enough for all announcements before it.
                    while subscriber.discard_arrived() {
                        self.poll().await;
                        // After an announcement or a timeout, poll again. At the end of the stream, subscribe again.
                        if let Ok(None) = timeout(jittered(POLL_EVERY), subscriber.next()).await {
                            break;
                        }
                    }
                }
                // A Redis that refuses the subscription may still allow reads.
                Ok(None) | Err(_) => self.poll().await,
            }
            sleep(jittered(RETRY_AFTER)).await;
        }
    }

    async fn poll(&self) {
        let why = self.compare().await.err();
        if let Some(why) = &why {
            tracing::debug!(%why, "cannot read the published rule set");
        }
        // A Redis that is unavailable says nothing about the rules on it, and neither does a server that is not a Redis.
        let is_available = || self.topology.why_unavailable().is_none();
        let is_about_rules = |why: &StoreError| why.is_foreign_data() || (why.is_invalid_reply() && is_available());
        if why.as_ref().is_none_or(is_about_rules) {
            self.problem.send_if_modified(|problem| {
                let is_new = *problem != why;
                if let Some(why) = why.as_ref().filter(|_| is_new) {
                    tracing::warn!("the published rules cannot be read: {why}");
                }
                *problem = why;
                is_new
            });
        }
    }

    /// Compares the stored set with the one that this node holds, and takes it or restores its own.
    async fn compare(&self) -> Result<(), StoreError> {
        let held = self.held.borrow().clone();
        let stored = current_id(&self.topology).await?;
        if stored.as_deref() == held.as_ref().map(|held| &*held.id) {
            return Ok(());
        }
        let found = read(&self.topology).await?;
        match (held, found) {
            (None, None) => {}
            (None, Some(found)) => self.take(found),
            (Some(held), None) => self.restore(held, "").await,
            (Some(held), Some(found)) if held.id == found.id => {}
            (Some(held), Some(found)) if held.precedes(&found) => self.take(found),
            (Some(held), Some(found)) if found.precedes(&held) => self.restore(held, &found.id).await,
            (Some(held), Some(found)) => {
                self.take(found.clone());
                self.report(Repair::Replaced { lost: held, by: found });
            }
        }
        Ok(())
    }

    fn take(&self, found: PublishedRules) {
        let verb = if found.rules.is_some() { "published" } else { "withdrawn" };
        tracing::info!(version = found.version, id = %found.id, "a rule set was {verb}");
        self.held.send_replace(Some(found));
    }

    async fn restore(&self, lost: PublishedRules, found: &str) {
        sleep(jittered(RESTORE_AFTER)).await;
        // A set may be large: do not send it if another node was faster.
        let current = current_id(&self.topology).await;
        if !current.is_ok_and(|id| id.unwrap_or_default() == found) {
            return;
        }
        match restore(&self.topology, &lost, found).await {
            Ok(true) => self.report(Repair::Restored { lost }),
            // Another node was faster, or another set was published. Either is announced.
            Ok(false) => {}
            Err(why) => {
                let failed = Repair::NotRestored { lost, why };
                // Every poll tries again: report it once.
                if self.repairs.borrow().latest.as_ref() != Some(&failed) {
                    self.report(failed);
                }
            }
        }
    }

    fn report(&self, repair: Repair) {
        tracing::warn!("{repair}");
        self.repairs.send_modify(|repairs| {
            repairs.restored += u64::from(matches!(repair, Repair::Restored { .. }));
            repairs.replaced += u64::from(matches!(repair, Repair::Replaced { .. }));
            repairs.latest = Some(repair);
        });
    }
}

/// The key, after `rate_limit:`.
const KEY: &str = "{rules}";
/// The channel of announcements, after `rate_limit:`.
pub(super) const CHANNEL: &str = "rules";
/// Timeout of publishing and reading. No request waits for either.
pub(super) const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// The common part of the scripts. The first argument of each is the channel.
///
/// `current` returns the version and the id of the stored set, and the id that an old release left in place when it
/// published. `advance` makes the stored set the next version.
const COMMON: &str = r"
local function current()
  local fields = redis.call('HMGET', KEYS[1], 'version', 'id', 'epoch')
  local version, id = fields[1], fields[2]
  if not version then return 0, '' end
  if id and string.sub(id, 1, #version + 1) == version .. '-' then return tonumber(version), id end
  return tonumber(version), version .. '@' .. (fields[3] or '0'), id
end
local function announce(version)
  -- The set is stored. If the user may not publish on the channel, nodes find it at the next poll.
  redis.pcall('PUBLISH', ARGV[1], version)
end
local function advance(version, id, overtaken, random)
  local known = id
  if overtaken then known = known .. ' ' .. overtaken end
  local before = redis.call('HGET', KEYS[1], 'predecessors')
  if before and before ~= '' then known = known .. ' ' .. before end
  if #known > 2000 then known = string.match(string.sub(known, 1, 2000), '^(.*) ') or '' end
  version = string.format('%d', version + 1)
  redis.call('HSET', KEYS[1], 'version', version, 'id', version .. '-' .. random, 'predecessors', known)
  announce(version)
end
";

/// Publishes if the version is the expected one. An empty expectation means any version.
const PUBLISH: &str = r"
local version, id, overtaken = current()
if ARGV[3] ~= '' and tonumber(ARGV[3]) ~= version then return {0, version} end
if redis.call('HEXISTS', KEYS[1], 'epoch') == 0 then
  local now = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'epoch', string.format('%d%06d', now[1], now[2]))
end
redis.call('HSET', KEYS[1], 'rules', ARGV[4])
advance(version, id, overtaken, ARGV[2])
return {1, version + 1}
";

/// Removes the published rules, if the version is the expected one. That creates a version too, so that nodes that were
/// offline notice it.
const WITHDRAW: &str = r"
local version, id, overtaken = current()
if ARGV[3] ~= '' and tonumber(ARGV[3]) ~= version then return {0, version} end
if redis.call('HDEL', KEYS[1], 'rules') == 0 then return {1, version} end
advance(version, id, overtaken, ARGV[2])
return {1, version + 1}
";

/// Returns the stored set, or the length of its rules if they are larger than any that can be published.
const READ: &str = r"
local fields = redis.call('HMGET', KEYS[1], 'version', 'id', 'epoch', 'predecessors', 'rules')
if fields[5] and #fields[5] > tonumber(ARGV[2]) then return #fields[5] end
for i = 1, 4 do fields[i] = fields[i] and string.sub(fields[i], 1, 4096) end
return fields
";

/// Stores a set that was lost, if the stored one is still the one that was found.
const RESTORE: &str = r"
local version, id = current()
if id ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'version', ARGV[3], 'id', ARGV[4], 'epoch', ARGV[5], 'predecessors', ARGV[6])
if ARGV[7] then redis.call('HSET', KEYS[1], 'rules', ARGV[7]) else redis.call('HDEL', KEYS[1], 'rules') end
announce(ARGV[3])
return 1
";

pub(super) async fn publish(topology: &Topology, rules: &[u8], expected: Option<u64>) -> Result<u64, PublishError> {
    let mut command = script(topology, PUBLISH);
    command.arg(random_text()).arg(expected_text(expected)).arg(rules);
    change(topology, &command).await
}

pub(super) async fn withdraw(topology: &Topology, expected: Option<u64>) -> Result<u64, PublishError> {
    let mut command = script(topology, WITHDRAW);
    command.arg(random_text()).arg(expected_text(expected));
    change(topology, &command).await
}

async fn change(topology: &Topology, command: &Cmd) -> Result<u64, PublishError> {
    let reply = run(topology, command).await.map_err(PublishError::Store)?;
    match redis::from_redis_value::<(u64, u64)>(reply) {
        Ok((1, version)) => Ok(version),
        Ok((_, version)) => Err(PublishError::Conflict { version }),
        Err(_) => Err(PublishError::Store(unexpected())),
    }
}

/// Stores `lost` again if the set with the id `found` is still stored; an empty id means that there is none. Returns
/// whether it was stored.
async fn restore(topology: &Topology, lost: &PublishedRules, found: &str) -> Result<bool, StoreError> {
    let mut command = script(topology, RESTORE);
    command.arg(found).arg(lost.version).arg(&*lost.id).arg(lost.epoch).arg(&*lost.predecessors);
    if let Some(rules) = &lost.rules {
        command.arg(&**rules);
    }
    redis::from_redis_value(run(topology, &command).await?).map_err(|_| unexpected())
}

/// Returns the id of the stored set: a few bytes, however large the set is.
async fn current_id(topology: &Topology) -> Result<Option<String>, StoreError> {
    let mut command = redis::cmd("HMGET");
    command.arg(topology.names().of(KEY)).arg("version").arg("id").arg("epoch");
    let reply = run(topology, &command).await?;
    let found = redis::from_redis_value::<(Option<u64>, Option<String>, Option<u64>)>(reply);
    let (version, id, epoch) = found.map_err(|_| unexpected())?;
    Ok(version.map(|version| identity(version, id, epoch.unwrap_or(0)).0))
}

pub(super) async fn read(topology: &Topology) -> Result<Option<PublishedRules>, StoreError> {
    let mut command = script(topology, READ);
    command.arg(MAX_BYTES);
    read_reply(run(topology, &command).await?)
}

/// Reads the reply of [`READ`].
pub(super) fn read_reply(reply: Value) -> Result<Option<PublishedRules>, StoreError> {
    type Fields = (Option<u64>, Option<String>, Option<u64>, Option<String>, Option<Vec<u8>>);
    let too_large = |length: &dyn fmt::Display| {
        StoreError::foreign_data(&format!(
            "the published rules have {length} bytes, more than the maximum of {MAX_BYTES}"
        ))
    };
    if let Value::Int(length) = &reply {
        return Err(too_large(length));
    }
    let (version, id, epoch, predecessors, rules) =
        redis::from_redis_value::<Fields>(reply).map_err(|_| unexpected())?;
    if let Some(rules) = rules.as_ref().filter(|rules| rules.len() > MAX_BYTES) {
        return Err(too_large(&rules.len()));
    }
    Ok(version.map(|version| {
        let epoch = epoch.unwrap_or(0);
        let (id, overtaken) = identity(version, id, epoch);
        let predecessors = [overtaken.unwrap_or_default(), predecessors.unwrap_or_default()].join(" ");
        PublishedRules {
            version,
            id: id.into(),
            rules: rules.map(Into::into),
            epoch,
            predecessors: predecessors.trim().into(),
        }
    }))
}

/// Returns the id of a stored set, and the id of the set that an old release replaced with it, if any.
fn identity(version: u64, id: Option<String>, epoch: u64) -> (String, Option<String>) {
    match id {
        Some(id) if version_of(&id) == Some(version) && id.contains('-') => (id, None),
        overtaken => (format!("{version}@{epoch}"), overtaken),
    }
}

/// Returns the version of an id.
fn version_of(id: &str) -> Option<u64> {
    id.split_once(['-', '@'])?.0.parse().ok()
}

fn script(topology: &Topology, body: &str) -> Cmd {
    let mut command = redis::cmd("EVAL");
    command.arg([COMMON, body].concat()).arg(1);
    command.arg(topology.names().of(KEY)).arg(topology.names().of(CHANNEL));
    command
}

fn expected_text(expected: Option<u64>) -> String {
    expected.map(|version| version.to_string()).unwrap_or_default()
}

fn random_text() -> String {
    // The standard library seeds it from the operating system once per thread, and increments it for each use.
    format!("{:016x}", std::hash::RandomState::new().hash_one(std::process::id()))
}

fn unexpected() -> StoreError {
    StoreError::unavailable("the published rules on Redis are not in the expected form")
}

async fn run(topology: &Topology, command: &Cmd) -> Result<Value, StoreError> {
    Ok(topology.run(topology.names().of(KEY).as_bytes(), command, Instant::now() + REPLY_TIMEOUT).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule_set(id: &str, epoch: u64, predecessors: &str) -> PublishedRules {
        let version = version_of(id).unwrap();
        PublishedRules { version, id: id.into(), rules: None, epoch, predecessors: predecessors.into() }
    }

    #[test]
    fn a_set_precedes_those_that_name_it() {
        let (first, second, third) = (rule_set("1-a", 9, ""), rule_set("2-b", 9, "1-a"), rule_set("3-c", 9, "2-b 1-a"));
        assert!(first.precedes(&second) && first.precedes(&third) && second.precedes(&third));
        assert!(!third.precedes(&first) && !second.precedes(&second));
    }

    #[test]
    fn sets_published_on_both_sides_of_a_failover_precede_neither() {
        let (lost, other, later) =
            (rule_set("2-b", 9, "1-a"), rule_set("2-x", 9, "1-a"), rule_set("4-z", 9, "3-y 2-x 1-a"));
        for set in [other, later] {
            assert!(!lost.precedes(&set) && !set.precedes(&lost));
        }
    }

    #[test]
    fn a_set_older_than_all_recorded_predecessors_precedes_only_in_its_own_epoch() {
        let latest = rule_set("200-c", 9, "199-b 198-a");
        assert!(rule_set("7-q", 9, "6-p").precedes(&latest));
        assert!(!rule_set("7-q", 8, "6-p").precedes(&latest), "a Redis that lost its data began another epoch");
    }

    #[test]
    fn sets_of_releases_without_ids_are_in_order() {
        let (fifth, sixth) = (rule_set("5@9", 9, ""), rule_set("6@9", 9, ""));
        assert!(fifth.precedes(&sixth) && !sixth.precedes(&fifth));
        assert!(fifth.precedes(&rule_set("7-a", 9, "6@9")) && sixth.precedes(&rule_set("7-a", 9, "6@9")));
        // An old release published over a set with an id.
        assert!(rule_set("7-a", 9, "6@9").precedes(&rule_set("8@9", 9, "7-a 6@9")));
    }
}

//! The stored rule set: a hash under one key.
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

use std::hash::BuildHasher;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::Instant;

use super::{PublishError, PublishedRules};
use crate::redis::StoreError;
use crate::redis::topology::Topology;

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
pub(super) async fn restore(topology: &Topology, lost: &PublishedRules, found: &str) -> Result<bool, StoreError> {
    let mut command = script(topology, RESTORE);
    command.arg(found).arg(lost.version).arg(&*lost.id).arg(lost.epoch).arg(&*lost.predecessors);
    if let Some(rules) = &lost.rules {
        command.arg(&**rules);
    }
    redis::from_redis_value(run(topology, &command).await?).map_err(|_| unexpected())
}

/// Returns the id of the stored set: a few bytes, however large the set is.
pub(super) async fn current_id(topology: &Topology) -> Result<Option<String>, StoreError> {
    let mut command = redis::cmd("HMGET");
    command.arg(topology.names().of(KEY)).arg("version").arg("id").arg("epoch");
    let reply = run(topology, &command).await?;
    let found = redis::from_redis_value::<(Option<u64>, Option<String>, Option<u64>)>(reply);
    let (version, id, epoch) = found.map_err(|_| unexpected())?;
    Ok(version.map(|version| identity(version, id, epoch.unwrap_or(0)).0))
}

pub(super) async fn read(topology: &Topology) -> Result<Option<PublishedRules>, StoreError> {
    type Fields = (Option<u64>, Option<String>, Option<u64>, Option<String>, Option<Vec<u8>>);
    let mut command = redis::cmd("HMGET");
    command.arg(topology.names().of(KEY)).arg("version").arg("id").arg("epoch").arg("predecessors").arg("rules");
    let found = redis::from_redis_value::<Fields>(run(topology, &command).await?);
    let (version, id, epoch, predecessors, rules) = found.map_err(|_| unexpected())?;
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
pub(super) fn version_of(id: &str) -> Option<u64> {
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

//! State that the nodes of a fleet share: that of limits that learn, and the bans of operators. The state is bytes
//! here.
//!
//! Each limit, and the bans, have a hash with a version and the state. A node reads both, merges its own observations,
//! decides whether the number moves, and writes the result only if the version is still the one that it read. So of two
//! nodes that decide at the same time, one writes; the other one reads again, and finds that the number has just moved.
//!
//! Nodes also write reports about themselves, which any node reads. Each report is a key that expires, and a sorted set
//! lists the nodes by the time of their last report.

use std::time::Duration;

use tokio::time::Instant;

use super::{RedisLimiter, StoreError};
use crate::units::Timestamp;

/// Timeout of reading and writing. No request waits for either.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum bytes of the state of a limit that learns: several times what the largest has.
const MAX_LEARNED_BYTES: usize = 1 << 20;
/// Maximum bytes of all bans: the most bans, with the longest keys and names.
const MAX_BANS_BYTES: usize = 32 << 20;
/// Bytes of a state in one reply: decisions on the same connection wait for it.
const PART_BYTES: usize = 1 << 20;
/// Maximum number of times that a state is read from the beginning, because another node has written it meanwhile.
const MAX_READS: usize = 5;

/// Returns the time of Redis, the version, the length of the state, and a part of the state.
const LOAD: &str = r"
local now = redis.call('TIME')
local fields = redis.call('HMGET', KEYS[1], 'version', 'state')
local version, state, from = fields[1] or '0', fields[2] or '', tonumber(ARGV[1])
return {tonumber(now[1]), tonumber(now[2]), string.sub(version, 1, 20), #state, string.sub(state, from + 1, from + ARGV[2])}
";

/// Returns the version.
const VERSION: &str = "return string.sub(redis.call('HGET', KEYS[1], 'version') or '0', 1, 20)";

/// Writes the next version, if the version is the expected one.
const STORE: &str = r"
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'version', string.format('%d', ARGV[1] + 1), 'state', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
";

/// A stored state.
#[doc(hidden)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredState {
    /// Grows by one with each write. 0 if there is no state.
    pub version: u64,
    /// The stored state, or no bytes if nothing is stored.
    pub state: Vec<u8>,
    /// The time of Redis, so that nodes with different clocks agree.
    pub now: Timestamp,
}

impl RedisLimiter {
    /// Reads the state of a limit that learns, from the default store.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error.
    #[doc(hidden)]
    pub async fn load_learning(&self, limit: &str) -> Result<StoredState, StoreError> {
        self.load_state(&self.learning_key(limit), MAX_LEARNED_BYTES).await
    }

    /// Reads the version of the state of a limit that learns: a few bytes, however large the state is.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error.
    #[doc(hidden)]
    pub async fn learning_version(&self, limit: &str) -> Result<u64, StoreError> {
        self.state_version(&self.learning_key(limit)).await
    }

    /// Writes the state of a limit that learns, if its version is the expected one, and returns whether it was written.
    /// It expires unless it is written again within `keep_for`.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error.
    #[doc(hidden)]
    pub async fn store_learning(
        &self,
        limit: &str,
        expected: u64,
        state: &[u8],
        keep_for: Duration,
    ) -> Result<bool, StoreError> {
        self.store_state(&self.learning_key(limit), expected, state, keep_for).await
    }

    /// Reads the bans of operators, from the default store.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error.
    #[doc(hidden)]
    pub async fn load_bans(&self) -> Result<StoredState, StoreError> {
        self.load_state(&self.bans_key(), MAX_BANS_BYTES).await
    }

    /// Reads the version of the bans.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error.
    #[doc(hidden)]
    pub async fn bans_version(&self) -> Result<u64, StoreError> {
        self.state_version(&self.bans_key()).await
    }

    /// Writes the bans, as [`store_learning`](Self::store_learning) does.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error.
    #[doc(hidden)]
    pub async fn store_bans(&self, expected: u64, state: &[u8], keep_for: Duration) -> Result<bool, StoreError> {
        self.store_state(&self.bans_key(), expected, state, keep_for).await
    }

    fn learning_key(&self, limit: &str) -> String {
        self.0.shared.stores.default_store().topology.names().learned(limit)
    }

    fn bans_key(&self) -> String {
        self.0.shared.stores.default_store().topology.names().of("{bans}")
    }

    /// Reads a state in parts. A state of more than `maximum` bytes is refused before it is read.
    async fn load_state(&self, key: &str, maximum: usize) -> Result<StoredState, StoreError> {
        let (mut loading, mut reads) = (None::<StoredState>, 1);
        loop {
            let from = loading.as_ref().map_or(0, |loading| loading.state.len());
            let reply = self.run_on_state(key, |command| {
                command.arg(LOAD).arg(1).arg(key).arg(from).arg(PART_BYTES);
            });
            let part = StatePart::read(reply.await?, from, maximum)?;
            let state = match loading.take() {
                Some(loading) if loading.version != part.version => {
                    reads += 1;
                    if reads > MAX_READS {
                        return Err(StoreError::unavailable("the state that nodes share changes while it is read"));
                    }
                    continue;
                }
                Some(loading) => [loading.state, part.bytes].concat(),
                None => part.bytes,
            };
            let stored = StoredState { version: part.version, state, now: part.now };
            if stored.state.len() >= part.length {
                return Ok(stored);
            }
            loading = Some(stored);
        }
    }

    async fn state_version(&self, key: &str) -> Result<u64, StoreError> {
        let reply = self.run_on_state(key, |command| _ = command.arg(VERSION).arg(1).arg(key)).await?;
        redis::from_redis_value(reply).map_err(|_| unexpected())
    }

    async fn store_state(
        &self,
        key: &str,
        expected: u64,
        state: &[u8],
        keep_for: Duration,
    ) -> Result<bool, StoreError> {
        let millis = u64::try_from(keep_for.as_millis()).unwrap_or(u64::MAX);
        let reply = self.run_on_state(key, |command| {
            command.arg(STORE).arg(1).arg(key).arg(expected).arg(state).arg(millis);
        });
        redis::from_redis_value(reply.await?).map_err(|_| unexpected())
    }

    async fn run_on_state(
        &self,
        key: &str,
        arguments: impl FnOnce(&mut redis::Cmd),
    ) -> Result<redis::Value, StoreError> {
        let topology = &self.0.shared.stores.default_store().topology;
        let mut command = redis::cmd("EVAL");
        arguments(&mut command);
        Ok(topology.run(key.as_bytes(), &command, Instant::now() + REPLY_TIMEOUT).await?)
    }
}

fn unexpected() -> StoreError {
    StoreError::unavailable("the state that nodes share is not in the expected form")
}

/// The reply of [`LOAD`].
pub(super) struct StatePart {
    now: Timestamp,
    version: u64,
    /// The length of the whole state.
    length: usize,
    bytes: Vec<u8>,
}

impl StatePart {
    /// Reads the part from that byte on.
    pub(super) fn read(reply: redis::Value, from: usize, maximum: usize) -> Result<Self, StoreError> {
        let (secs, micros, version, length, bytes) =
            redis::from_redis_value::<(u64, u64, u64, usize, Vec<u8>)>(reply).map_err(|_| unexpected())?;
        if length > maximum {
            return Err(StoreError::foreign_data(&format!(
                "the state that nodes share has {length} bytes, more than the maximum of {maximum}"
            )));
        }
        if bytes.len() != length.saturating_sub(from).min(PART_BYTES) {
            return Err(unexpected());
        }
        let now = Timestamp::from_micros(secs.saturating_mul(1_000_000).saturating_add(micros));
        Ok(Self { now, version, length, bytes })
    }
}

/// The key of the list, after `rate_limit:`. Those of the reports follow it.
const KEY: &str = "{reports}";
/// Timeout of reading and writing. No request waits for either.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// The most nodes whose reports are kept and read.
const MAX_NODES: u32 = 256;

/// Maximum bytes of a report that is read. Larger ones are left out.
const MAX_REPORT_BYTES: usize = 256 << 10;
/// Maximum bytes of the name of a node. Longer ones are left out.
const MAX_NAME_BYTES: usize = 64;
/// Number of reports that are read at once: decisions on the same connection wait for the reply.
const REPORTS_AT_ONCE: usize = 8;

/// Returns the nodes that have reported last.
const LIST: &str = r"
local nodes, names = redis.call('ZRANGE', KEYS[1], -ARGV[1], -1), {}
for _, node in ipairs(nodes) do if #node <= tonumber(ARGV[2]) then names[#names + 1] = node end end
return names
";

/// Returns the reports under some keys.
const READ: &str = r"
local reports = redis.call('MGET', unpack(KEYS))
for i = 1, #reports do
  if reports[i] and #reports[i] > tonumber(ARGV[1]) then reports[i] = false end
end
return reports
";

/// Writes a report.
const WRITE: &str = r"
local now = redis.call('TIME')
local millis, keep = now[1] * 1000 + math.floor(now[2] / 1000), tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%d', millis - keep))
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%d', millis + keep), '+inf')
if redis.call('EXISTS', KEYS[2]) == 0 and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[4]) then return 0 end
redis.call('ZADD', KEYS[1], millis, ARGV[1])
redis.call('PEXPIRE', KEYS[1], keep)
redis.call('SET', KEYS[2], ARGV[2], 'PX', keep)
return 1
";

impl RedisLimiter {
    /// Writes the report of a node to the default store. It expires after `keep_for`.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error.
    #[doc(hidden)]
    pub async fn write_node_report(&self, node: &str, report: &[u8], keep_for: Duration) -> Result<(), StoreError> {
        let topology = &self.0.shared.stores.default_store().topology;
        let list = topology.names().of(KEY);
        let millis = u64::try_from(keep_for.as_millis()).unwrap_or(u64::MAX);
        let mut command = redis::cmd("EVAL");
        command.arg(WRITE).arg(2).arg(&list).arg(format!("{list}:{node}"));
        command.arg(node).arg(report).arg(millis).arg(MAX_NODES);
        topology.run(list.as_bytes(), &command, Instant::now() + REPORT_TIMEOUT).await?;
        Ok(())
    }

    /// Reads the reports of all nodes from the default store.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error.
    #[doc(hidden)]
    pub async fn node_reports(&self) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        let topology = &self.0.shared.stores.default_store().topology;
        let (list, deadline) = (topology.names().of(KEY), Instant::now() + REPORT_TIMEOUT);
        let mut command = redis::cmd("EVAL");
        command.arg(LIST).arg(1).arg(&list).arg(MAX_NODES).arg(MAX_NAME_BYTES);
        let nodes = read_nodes(topology.run(list.as_bytes(), &command, deadline).await?)?;
        let mut found = Vec::new();
        for nodes in nodes.chunks(REPORTS_AT_ONCE) {
            // All are in the slot of the list.
            let mut command = redis::cmd("EVAL");
            command.arg(READ).arg(nodes.len());
            for node in nodes {
                command.arg(format!("{list}:{node}"));
            }
            command.arg(MAX_REPORT_BYTES);
            let reports = read_reports(topology.run(list.as_bytes(), &command, deadline).await?)?;
            // A report may have expired before its node leaves the list.
            let named = nodes.iter().zip(reports).filter_map(|(node, report)| Some((node.clone(), report?)));
            found.extend(named.filter(|(_, report)| report.len() <= MAX_REPORT_BYTES));
        }
        Ok(found)
    }
}

/// Reads the reply of [`LIST`].
pub(super) fn read_nodes(reply: redis::Value) -> Result<Vec<String>, StoreError> {
    let mut nodes: Vec<String> = redis::from_redis_value(reply).map_err(|_| unexpected_reports())?;
    nodes.truncate(MAX_NODES as usize);
    Ok(nodes)
}

/// Reads the reply of [`READ`].
pub(super) fn read_reports(reply: redis::Value) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
    redis::from_redis_value(reply).map_err(|_| unexpected_reports())
}

fn unexpected_reports() -> StoreError {
    StoreError::unavailable("the reports of the nodes are not in the expected form")
}

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

/// Returns the time of Redis, the version and the state.
const LOAD: &str = r"
local now = redis.call('TIME')
local fields = redis.call('HMGET', KEYS[1], 'version', 'state')
return {tonumber(now[1]), tonumber(now[2]), fields[1] or '0', fields[2] or ''}
";

/// Returns the version.
const VERSION: &str = "return redis.call('HGET', KEYS[1], 'version') or '0'";

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
        self.load_state(&self.learning_key(limit)).await
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
        self.load_state(&self.bans_key()).await
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

    async fn load_state(&self, key: &str) -> Result<StoredState, StoreError> {
        let reply = self.run_on_state(key, |command| _ = command.arg(LOAD).arg(1).arg(key)).await?;
        let (secs, micros, version, state) =
            redis::from_redis_value::<(u64, u64, u64, Vec<u8>)>(reply).map_err(|_| unexpected())?;
        let now = Timestamp::from_micros(secs.saturating_mul(1_000_000).saturating_add(micros));
        Ok(StoredState { version, state, now })
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

/// The key of the list, after `rate_limit:`. Those of the reports follow it.
const KEY: &str = "{reports}";
/// Timeout of reading and writing. No request waits for either.
const REPORT_TIMEOUT: Duration = Duration::from_secs(2);
/// The most nodes whose reports are kept and read.
const MAX_NODES: u32 = 256;

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
        let unexpected = |_| StoreError::unavailable("the reports of the nodes are not in the expected form");
        let mut command = redis::cmd("ZRANGE");
        command.arg(&list).arg(0).arg(-1);
        let reply = topology.run(list.as_bytes(), &command, deadline).await?;
        let nodes: Vec<String> = redis::from_redis_value(reply).map_err(unexpected)?;
        if nodes.is_empty() {
            return Ok(Vec::new());
        }
        // All are in the slot of the list.
        let mut command = redis::cmd("MGET");
        for node in &nodes {
            command.arg(format!("{list}:{node}"));
        }
        let reply = topology.run(list.as_bytes(), &command, deadline).await?;
        let reports: Vec<Option<Vec<u8>>> = redis::from_redis_value(reply).map_err(unexpected)?;
        // A report may have expired before its node leaves the list.
        Ok(nodes.into_iter().zip(reports).filter_map(|(node, report)| Some((node, report?))).collect())
    }
}

//! Reports that each node writes about itself, and that any node reads. A report is bytes here.
//!
//! Each report is a key that expires, and a sorted set lists the nodes by the time of their last report.

use std::time::Duration;

use tokio::time::Instant;

use super::{RedisLimiter, StoreError};

/// The key of the list, after `rate_limit:`. Those of the reports follow it.
const KEY: &str = "{reports}";
/// Timeout of reading and writing. No request waits for either.
const REPLY_TIMEOUT: Duration = Duration::from_secs(2);
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
        topology.run(list.as_bytes(), &command, Instant::now() + REPLY_TIMEOUT).await?;
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
        let (list, deadline) = (topology.names().of(KEY), Instant::now() + REPLY_TIMEOUT);
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

//! The number of nodes that share a Redis, so that each takes its share of a limit while Redis fails.
//!
//! Every node registers in a sorted set, with Redis's time as score, and reads the number of recent registrations, in
//! one small call about every two seconds. A node without a limit with [`OnStoreFailure::Local`](crate::OnStoreFailure)
//! needs no share, and does not register.
//!
//! Too small a number admits too much during an outage, and too large a number too little. The largest number of the
//! last minutes is used, and these minutes do not pass while Redis is unreachable.

use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use tokio::time::sleep;

use super::node::jittered;
use super::topology::Topology;

/// The key, after `rate_limit:`.
const KEY: &str = "{nodes}";
/// Time between two registrations of a node.
const BEAT_EVERY: Duration = Duration::from_secs(2);
/// Delay before a new node registers. A command that only reads the store has ended by then.
const JOIN_AFTER: Duration = Duration::from_secs(1);
/// A node that has not registered for this long is gone: three to ten beats.
const ALIVE_FOR: Duration = Duration::from_secs(10);
/// Minimum timeout of a registration. No request waits for it.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum number of registered nodes: more than share one Redis.
const MAX_NODES: u32 = 10_000;

/// Beats in one of the periods whose maxima are kept: a minute.
const PERIOD_BEATS: u32 = 30;
/// Periods that are kept: five minutes.
const PERIODS: usize = 5;

/// Registers a node, or only counts if its id is empty. Scores that a failover to a server with a slower clock left in
/// the future are removed too.
const BEAT: &str = r"
local now = redis.call('TIME')
local millis, alive = now[1] * 1000 + math.floor(now[2] / 1000), tonumber(ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%d', millis - alive))
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%d', millis + alive), '+inf')
local count = redis.call('ZCARD', KEYS[1])
if ARGV[1] ~= '' and count < tonumber(ARGV[3]) then
  count = count + redis.call('ZADD', KEYS[1], millis, ARGV[1])
end
redis.call('PEXPIRE', KEYS[1], alive)
return count
";

pub(super) struct Fleet {
    expected: u32,
    nodes: AtomicU32,
    /// Whether this node has a limit that fails over to memory.
    joins: AtomicBool,
}

impl Fleet {
    pub(super) fn new(expected: u32) -> Self {
        let expected = expected.clamp(1, MAX_NODES);
        Self { expected, nodes: AtomicU32::new(expected), joins: AtomicBool::new(false) }
    }

    /// Returns the number of nodes that local limits are divided by.
    pub(super) fn nodes(&self) -> u32 {
        self.nodes.load(Ordering::Relaxed)
    }

    /// Registers this node from now on: it has a limit with a local share.
    pub(super) fn join(&self) {
        self.joins.store(true, Ordering::Relaxed);
    }

    /// Registers periodically. Never returns.
    pub(super) async fn beat(self: Arc<Self>, topology: Arc<Topology>, store_timeout: Duration) {
        let id = format!("{:016x}", std::hash::RandomState::new().hash_one(std::process::id()));
        let (mut recent, mut member) = (Recent::default(), "");
        loop {
            if !self.joins.load(Ordering::Relaxed) {
                sleep(jittered(BEAT_EVERY)).await;
                continue;
            }
            if let Some(others) = count(&topology, member, store_timeout.max(REPLY_TIMEOUT)).await {
                let nodes = others + u32::from(member.is_empty());
                self.nodes.store(recent.largest_with(nodes).clamp(self.expected, MAX_NODES), Ordering::Relaxed);
            }
            sleep(jittered(if member.is_empty() { JOIN_AFTER } else { BEAT_EVERY })).await;
            member = &id;
        }
    }
}

/// Registers `member`, and returns the number of registered nodes. `None` if Redis does not reply.
async fn count(topology: &Topology, member: &str, limit: Duration) -> Option<u32> {
    let key = topology.names().of(KEY);
    let mut command = redis::cmd("EVAL");
    command.arg(BEAT).arg(1).arg(&key).arg(member).arg(ALIVE_FOR.as_millis() as u64).arg(MAX_NODES);
    let reply = topology.run_in_background(key.as_bytes(), &command, limit).await?;
    redis::from_redis_value(reply).ok()
}

/// The largest numbers of the last periods, whose length is counted in registrations that Redis confirmed.
#[derive(Default)]
struct Recent {
    maxima: [u32; PERIODS],
    beats: u32,
}

impl Recent {
    fn largest_with(&mut self, nodes: u32) -> u32 {
        if self.beats == PERIOD_BEATS {
            self.maxima.rotate_right(1);
            (self.maxima[0], self.beats) = (0, 0);
        }
        self.beats += 1;
        self.maxima[0] = self.maxima[0].max(nodes);
        self.maxima.iter().copied().max().unwrap_or(nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_gone_counts_for_some_minutes_more() {
        let mut recent = Recent::default();
        assert_eq!(recent.largest_with(2), 2);
        assert_eq!(recent.largest_with(5), 5);
        let counted_as_five = (0..1000).take_while(|_| recent.largest_with(3) == 5).count();
        // The rest of its period and four more.
        assert_eq!(counted_as_five, 5 * 30 - 2);
        assert_eq!(recent.largest_with(4), 4, "a node that joins counts at once");
    }

    #[test]
    fn the_expected_number_is_the_least() {
        assert_eq!(Fleet::new(0).nodes(), 1);
        assert_eq!(Fleet::new(3).nodes(), 3);
        assert_eq!(Fleet::new(u32::MAX).nodes(), MAX_NODES);
    }
}

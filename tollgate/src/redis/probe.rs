//! Probes of a server: find out whether it serves, refuses or fails, and read its memory.

use std::sync::PoisonError;
use std::time::Duration;

use tokio::time::timeout;

use super::StoreError;
use super::dial::Connection;
use super::memory::{self, ServerMemory};
use super::node::{Node, PROBE_LIMIT, RunError, ServerRole};
use super::script;

/// The result of a probe with a reply.
pub(super) enum ProbeResult {
    Serves,
    /// The server replies, but cannot decide.
    Refuses(StoreError),
}

impl Node {
    /// Checks that the server replies and accepts writes.
    pub(super) async fn probe(&self, connection: &Connection, limit: Duration) -> Result<ProbeResult, StoreError> {
        let (key, is_in_cluster) = match self.role {
            ServerRole::ClusterNode(_) => (None, true),
            ServerRole::At(_) | ServerRole::Master(_) => (Some(self.common.names.of("{probe}")), false),
        };
        match timeout(limit, connection.run(&script::probe(key.as_deref()))).await {
            Ok(Ok(_)) if is_in_cluster => self.probe_slots(connection, limit).await,
            Ok(Ok(_)) => Ok(ProbeResult::Serves),
            Ok(Err(error)) => match self.classified(&error) {
                RunError::Refused(why) => Ok(ProbeResult::Refuses(why)),
                // A node that has become a replica has no slots any more: the next map of slots will not list it.
                RunError::Lost(why) if is_in_cluster && why.is_read_only() => Ok(ProbeResult::Serves),
                error => Err(error.into()),
            },
            Err(_) => Err(StoreError::timed_out()),
        }
    }

    /// Checks that a node of a cluster serves keys. While slots are not covered, it replies `CLUSTERDOWN` to every
    /// command with a key, whatever the slot. So the slot of the probe's key does not matter.
    async fn probe_slots(&self, connection: &Connection, limit: Duration) -> Result<ProbeResult, StoreError> {
        let mut command = redis::cmd("EXISTS");
        command.arg(self.common.names.of("{probe}"));
        match timeout(limit, connection.run(&command)).await {
            Ok(Ok(_)) => Ok(ProbeResult::Serves),
            Ok(Err(error)) => match self.classified(&error) {
                RunError::Lost(why) => Err(why),
                RunError::Refused(why) => Ok(ProbeResult::Refuses(why)),
                _ => Ok(ProbeResult::Serves),
            },
            Err(_) => Err(StoreError::timed_out()),
        }
    }

    /// Closes the breaker after a probe that was as fast as a decision has to be.
    pub(super) fn close_breaker(&self, probed: ProbeResult) {
        let was_open = self.breaker.close();
        if self.note(probed) || (was_open && !self.breaker.is_refusing()) {
            self.log_recovery();
        }
    }

    /// Records a probe while the breaker is closed. Failures of decisions still count: a server can be fast enough for
    /// a probe and too slow for decisions.
    pub(super) fn note_probe(&self, probed: ProbeResult) {
        if self.note(probed) {
            self.log_recovery();
        }
    }

    /// Records the result of a probe. Returns whether the server has stopped refusing requests.
    fn note(&self, probed: ProbeResult) -> bool {
        match probed {
            ProbeResult::Refuses(why) => {
                self.refused(&why);
                false
            }
            ProbeResult::Serves => self.breaker.served(),
        }
    }

    fn log_recovery(&self) {
        tracing::info!(store = %self.common.store, node = %self, "the store has recovered");
    }

    /// Reads the memory of the server and its eviction policy. A server that does not report them is used anyway.
    pub(super) async fn inspect(&self, connection: &Connection) {
        let Ok(Ok(reply)) = timeout(PROBE_LIMIT, connection.run(&memory::command())).await else { return };
        let Some(memory) = ServerMemory::read(&reply) else { return };
        let mut known = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if memory.evicts() && !known.as_ref().is_some_and(ServerMemory::evicts) {
            tracing::warn!(store = %self.common.store, node = %self, policy = memory.eviction_policy, "{}", memory::EVICTS);
        }
        *known = Some(memory);
    }
}

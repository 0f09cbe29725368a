//! What limits have learned, shared through Redis.
//!
//! Each node reads the state of a limit, merges its own observations, evaluates, and writes the state only if no other
//! node has written in between. So a number moves once, whichever node moves it, and all nodes follow within seconds.

use std::time::Duration;

use tollgate::internal::demand::Evaluation;
use tollgate::redis::{RedisLimiter, StoreError};

use super::Learners;

/// The most attempts to write while other nodes write too. The next tick tries again.
const MAX_ATTEMPTS: u32 = 3;

/// A state expires once the limit has not been evaluated for this many times the time that it learns from.
const KEEP_FACTOR: u32 = 2;

impl Learners {
    /// Evaluates the limits if that is due, and follows the numbers of other nodes. While Redis fails, nothing moves.
    pub(super) async fn sync(&self, redis: &RedisLimiter, is_due: bool) {
        let names: Vec<String> = self.limits().keys().cloned().collect();
        for name in names {
            // The store reports its own failures.
            _ = match is_due {
                true => self.evaluate_shared(redis, &name).await,
                false => self.follow(redis, &name).await,
            };
        }
    }

    /// Takes over the state of a limit, if another node has changed it.
    pub(crate) async fn follow(&self, redis: &RedisLimiter, name: &str) -> Result<(), StoreError> {
        let version = redis.learning_version(name).await?;
        if self.limits().get(name).is_some_and(|state| state.version != version) {
            let stored = redis.load_learning(name).await?;
            self.restore(name, stored.version, &stored.state);
        }
        Ok(())
    }

    /// Takes over a state. Its number is in force from now on.
    fn restore(&self, name: &str, version: u64, stored: &[u8]) {
        let mut limits = self.limits();
        let Some(state) = limits.get_mut(name) else { return };
        let before = state.quota();
        // A state that does not fit, such as that of nodes with other rules, is left to them.
        if stored.is_empty() || state.learning.restore(stored) {
            state.version = version;
        }
        if state.quota() != before {
            self.changed.notify_one();
        }
    }

    async fn evaluate_shared(&self, redis: &RedisLimiter, name: &str) -> Result<(), StoreError> {
        for _ in 0..MAX_ATTEMPTS {
            let stored = redis.load_learning(name).await?;
            self.restore(name, stored.version, &stored.state);
            let Some((evaluation, state, keep_for)) = self.evaluate_one(name, &stored) else { return Ok(()) };
            let written = redis.store_learning(name, stored.version, &state, keep_for).await;
            if let Some(state) = self.limits().get_mut(name) {
                match &written {
                    Ok(true) => {
                        state.version = stored.version + 1;
                        state.report(name, &evaluation);
                        if evaluation.moved.is_some() {
                            self.changed.notify_one();
                        }
                    }
                    _ => state.learning.take_back(&evaluation),
                }
            }
            if written? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Evaluates one limit by the clock of Redis. Returns the evaluation, the state, and how long to keep it.
    fn evaluate_one(
        &self,
        name: &str,
        stored: &tollgate::redis::StoredLearning,
    ) -> Option<(Evaluation, Vec<u8>, Duration)> {
        let mut limits = self.limits();
        let state = limits.get_mut(name)?;
        if !stored.state.is_empty() && state.version != stored.version {
            return None;
        }
        let evaluation = state.learning.evaluate(stored.now);
        Some((evaluation, state.learning.encode()?, state.learning.settings().over * KEEP_FACTOR))
    }
}

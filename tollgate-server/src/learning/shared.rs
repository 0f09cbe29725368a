//! What limits have learned, shared through Redis.
//!
//! Each node reads the state of a limit, merges its own observations, evaluates, and writes the state only if no other
//! node has written in between. So a number moves once, whichever node moves it, and all nodes follow within seconds.

use std::time::Duration;

use tollgate::redis::{RedisLimiter, StoreError, StoredState};
use tollgate_rules::internal::demand::{Evaluation, Learning};
use tollgate_telemetry::notice::Level;

use super::{Learners, text};

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
    pub(super) async fn follow(&self, redis: &RedisLimiter, name: &str) -> Result<(), StoreError> {
        let Some((stored_name, known)) = self.stored_name(name) else { return Ok(()) };
        if redis.learning_version(&stored_name).await? != known {
            let stored = redis.load_learning(&stored_name).await?;
            self.restore(name, &stored);
        }
        Ok(())
    }

    /// Returns the name of the stored state of a limit, and its version as far as this node knows. Nodes whose rules
    /// measure something else have another state.
    fn stored_name(&self, name: &str) -> Option<(String, u64)> {
        let limits = self.limits();
        let state = limits.get(name)?;
        Some((stored_name(name, &state.learning), state.version))
    }

    /// Takes over a state. Its number is in force from now on.
    fn restore(&self, name: &str, stored: &StoredState) {
        let mut limits = self.limits();
        let Some(state) = limits.get_mut(name) else { return };
        let before = state.quota();
        // A damaged state is replaced by the next evaluation.
        if !stored.state.is_empty() && !state.learning.restore(&stored.state) {
            Level::Warning.log(text::damaged(name), &[("limit", name.into())]);
        }
        state.version = stored.version;
        if state.quota() != before {
            self.changed.notify_one();
        }
    }

    async fn evaluate_shared(&self, redis: &RedisLimiter, name: &str) -> Result<(), StoreError> {
        for _ in 0..MAX_ATTEMPTS {
            let Some((stored_name, _)) = self.stored_name(name) else { return Ok(()) };
            let stored = redis.load_learning(&stored_name).await?;
            self.restore(name, &stored);
            let Some((evaluation, state, keep_for)) = self.evaluate_one(name, &stored) else { return Ok(()) };
            let written = redis.store_learning(&stored_name, stored.version, &state, keep_for).await;
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
    fn evaluate_one(&self, name: &str, stored: &StoredState) -> Option<(Evaluation, Vec<u8>, Duration)> {
        let mut limits = self.limits();
        let state = limits.get_mut(name).filter(|state| state.version == stored.version)?;
        let evaluation = state.learning.evaluate(stored.now);
        Some((evaluation, state.learning.encode()?, state.learning.settings().over * KEEP_FACTOR))
    }
}

/// Returns the name of the stored state of a limit.
fn stored_name(name: &str, learning: &Learning) -> String {
    format!("{name}:{:016x}", learning.measure_id())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    use testkit::redis::RedisServer;
    use tollgate::{FixedWindow, Limit, Limiter, ManualClock, Timestamp};
    use tollgate_config::{Parsed, RuleFile};
    use tollgate_rules::Gate;
    use tollgate_rules::internal::demand::{LearningLimit, TICK};

    use super::*;

    const NAME: &str = "per-user";

    fn rules() -> Parsed {
        let limit = "{ learn: { from: 50, to: 400, over: 7h } }";
        let text = format!("limits: [{{ name: {NAME}, key: ip, window: 1m, limit: {limit} }}]\n");
        RuleFile::parse("tollgate.yaml", text).unwrap()
    }

    /// Returns what a limit learns within an hour in which each of its clients needs 80. The first move is due after it.
    fn observed(file: &Parsed, start: Timestamp) -> Learning {
        let rule = &file.limits[0];
        let mut learning = Learning::new(rule.learn().unwrap().settings().unwrap(), rule.measure().unwrap(), 7);
        let limit = LearningLimit { quota: learning.value(), observer: Arc::clone(learning.observer()) };
        let file = file.clone().with_learning(Arc::new([(NAME.to_owned(), limit)].into()));
        let clock = ManualClock::at(start);
        let gate = Gate::with_limiter(file.compile().unwrap(), Limiter::builder().clock(clock.clone())).unwrap();
        for tick in 0..12 {
            clock.set(start.saturating_add(TICK * tick));
            for client in 0_u32..1100 {
                let address = Ipv4Addr::from_bits(client).to_string();
                assert!(gate.check_by_name(NAME, &[address.as_bytes()], 80).is_ok());
            }
            learning.evaluate(clock.now());
        }
        assert_eq!(learning.value(), 50);
        learning
    }

    #[tokio::test]
    async fn two_nodes_move_a_number_once() {
        let server = RedisServer::start();
        let any = Limit::new("any", FixedWindow::default()).unwrap();
        let redis = RedisLimiter::builder(server.url()).limit(any).connect().await.unwrap();
        let nodes = [(); 2].map(|()| {
            let learners = Learners::default();
            let (_, attached) = learners.attach(rules());
            learners.commit(attached);
            learners
        });
        let (name, _) = nodes[0].stored_name(NAME).unwrap();
        let now = redis.load_learning(&name).await.unwrap().now;
        let learning = observed(&rules(), now.saturating_sub(TICK * 13));
        assert!(redis.store_learning(&name, 0, &learning.encode().unwrap(), TICK).await.unwrap());

        let [one, other] = &nodes;
        let (first, second) = tokio::join!(one.evaluate_shared(&redis, NAME), other.evaluate_shared(&redis, NAME));
        first.and(second).unwrap();
        let moved = nodes.each_ref().map(|node| node.limits()[NAME].ups);
        assert_eq!(moved.iter().sum::<u64>(), 1, "{moved:?}");
        for node in &nodes {
            node.follow(&redis, NAME).await.unwrap();
            assert_eq!(node.limits()[NAME].quota(), 55);
        }
        assert_eq!(redis.learning_version(&name).await.unwrap(), 3, "both nodes have added what they saw");

        // A damaged state is replaced by what the node knows.
        assert!(redis.store_learning(&name, 3, b"damaged", TICK).await.unwrap());
        one.evaluate_shared(&redis, NAME).await.unwrap();
        other.follow(&redis, NAME).await.unwrap();
        assert_eq!((redis.learning_version(&name).await.unwrap(), other.limits()[NAME].quota()), (5, 55));
    }
}

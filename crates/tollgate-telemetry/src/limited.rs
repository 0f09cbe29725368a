//! Who is limited: the keys that limits deny or nearly deny, over the last minute and hour.
//!
//! The gate counts keys, each thread in its own table. Every ten seconds, and whenever someone looks, the counts move
//! from there into the history. On Redis, each node writes a bounded report, from which any node answers for all of them.
//!
//! Keys are counted only while there is an admin listener, because nobody can look at them otherwise.

mod display;
mod fleet;
mod history;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};
use tollgate_rules::Gate;
use tollgate_rules::internal::limited::{KeyTexts, LimitedKeys};

pub use self::display::{key_text, printable};
pub use self::history::{History, TopEntry, TopList, TopQuery, Window};

/// How often counts move into the history, and reports are written to Redis.
const COLLECT_INTERVAL: Duration = Duration::from_secs(10);

/// The limited keys of this node.
pub struct Limited {
    gate: Gate,
    /// The name of this node among the reports on Redis: random, and different after each start.
    node: String,
    started: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The counts of the gate, while keys are counted.
    keys: Option<Arc<LimitedKeys>>,
    history: History,
}

/// The most limited keys of a node or of a fleet.
#[derive(Debug)]
pub struct Top {
    /// The keys.
    pub list: TopList,
    /// The number of nodes in the list.
    pub nodes: usize,
    /// Why the list is of this node only, if that of the fleet was wanted.
    pub problem: Option<String>,
}

impl Limited {
    /// Creates an empty history. Nothing is counted before [`count`](Self::count).
    pub fn new(gate: Gate) -> Self {
        let node = format!("{:016x}", ahash::RandomState::new().hash_one(std::process::id()));
        Self { gate, node, started: Instant::now(), state: Mutex::default() }
    }

    /// Counts keys from now on, with or without their texts, or no longer.
    pub fn count(&self, texts: Option<KeyTexts>) {
        let mut state = self.state();
        if state.keys.as_ref().map(|keys| keys.texts()) == texts {
            return;
        }
        self.collect(&mut state);
        match texts {
            None => *state = State::default(),
            Some(texts) => {
                if texts == KeyTexts::Hashed {
                    state.history.forget_texts();
                }
                state.keys = Some(Arc::new(LimitedKeys::new(texts)));
            }
        }
        self.gate.count_limited(state.keys.clone());
    }

    /// Moves counts into the history, and writes reports to Redis. Never returns.
    pub async fn run(self: Arc<Self>) {
        let mut ticks = interval(COLLECT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let own = Arc::clone(&self);
            // Merging thousands of keys takes milliseconds.
            let report = tokio::task::spawn_blocking(move || {
                let mut state = own.state();
                own.collect(&mut state);
                let is_shared = own.gate.redis().is_some() && state.keys.is_some();
                is_shared.then(|| fleet::report(&state.history, own.started.elapsed()))
            });
            if let (Ok(Some(report)), Some(redis)) = (report.await, self.gate.redis()) {
                // The store reports its own failures.
                _ = redis.write_node_report(&self.node, &report, fleet::KEEP_REPORT).await;
            }
        }
    }

    /// Returns the most limited keys of this node. It may take milliseconds.
    pub fn top(&self, query: &TopQuery) -> Top {
        let mut state = self.state();
        self.collect(&mut state);
        let list = state.history.top(query, self.started.elapsed());
        Top { list, nodes: 1, problem: None }
    }

    /// Returns the limit of a key that was limited within the last hour on this node, by its hash. It may take
    /// milliseconds.
    pub fn limit_of(&self, hash: u64) -> Option<Arc<str>> {
        let mut state = self.state();
        self.collect(&mut state);
        state.history.limit_of(hash)
    }

    /// Returns the most limited keys of all nodes that share the Redis of this one.
    pub async fn fleet_top(self: &Arc<Self>, query: TopQuery) -> Top {
        let reports = match self.gate.redis() {
            Some(redis) => redis.node_reports().await.map_err(|error| error.to_string()),
            None => Err("the store is in memory, which other nodes do not share".to_owned()),
        };
        let own = Arc::clone(self);
        let merged = tokio::task::spawn_blocking(move || match reports {
            Err(problem) => Top { problem: Some(problem), ..own.top(&query) },
            Ok(reports) => {
                let all = TopQuery { count: usize::MAX, ..query.clone() };
                let others = reports.iter().filter(|(node, _)| *node != own.node).map(|(_, report)| report.as_slice());
                fleet::merge(own.top(&all).list, others, &query)
            }
        });
        merged.await.unwrap_or_else(|_| Top {
            list: TopList::default(),
            nodes: 0,
            problem: Some("the reports of the nodes could not be merged".to_owned()),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves the counts of the gate into the history.
    fn collect(&self, state: &mut State) {
        if let Some(keys) = &state.keys {
            let taken = keys.take();
            state.history.add(taken, self.started.elapsed());
        }
    }
}

#[cfg(test)]
mod tests {
    use testkit::redis::RedisServer;
    use tollgate_config::RuleFile;
    use tollgate_rules::internal::limited::LimitedKind;

    use super::*;

    async fn node(store: &str) -> Arc<Limited> {
        let text =
            format!("store: {store}\nlimits: [{{ name: per-user, key: header:x-user-id, window: 1h, limit: 2 }}]\n");
        let gate = tollgate_config::open_gate(&RuleFile::parse("tollgate.yaml", text).unwrap()).await.unwrap();
        let limited = Arc::new(Limited::new(gate));
        limited.count(Some(KeyTexts::Kept));
        limited
    }

    async fn check(node: &Limited, key: &str, times: usize) {
        for _ in 0..times {
            drop(node.gate.check_by_name("per-user", &[key.as_bytes()], 1).unwrap().outcome().await);
        }
    }

    fn denied() -> TopQuery {
        TopQuery { window: Window::Minute, kind: LimitedKind::Denied, limit: None, count: 10 }
    }

    fn listed(top: &Top) -> Vec<(String, u64, u64)> {
        top.list.keys.iter().map(|entry| (key_text(&entry.key), entry.count, entry.error)).collect()
    }

    #[tokio::test]
    async fn denied_keys_are_listed_until_nobody_can_look() {
        let node = node("memory").await;
        check(&node, "ann", 5).await;
        check(&node, "bob", 3).await;
        let top = node.top(&denied());
        assert_eq!(listed(&top), [("ann".to_owned(), 3, 0), ("bob".to_owned(), 1, 0)]);
        assert_eq!(top.list.total, 4);
        assert_eq!(listed(&node.top(&TopQuery { window: Window::Hour, ..denied() })).len(), 2);
        let fleet = node.fleet_top(denied()).await;
        assert_eq!(fleet.list.keys.len(), 2);
        assert!(fleet.problem.is_some_and(|problem| problem.contains("memory")));
        node.count(Some(KeyTexts::Hashed));
        check(&node, "ann", 1).await;
        let top = node.top(&denied());
        assert!(top.list.keys.iter().all(|entry| entry.key.parts.is_none()), "{top:?}");
        assert_eq!(top.list.keys[0].count, 4, "the hash is the same");
        node.count(None);
        check(&node, "ann", 1).await;
        assert!(node.top(&denied()).list.keys.is_empty());
    }

    #[tokio::test]
    async fn nodes_on_one_redis_are_added_up() {
        let server = RedisServer::start();
        let (one, other) = (node(&server.url()).await, node(&server.url()).await);
        check(&one, "ann", 5).await;
        check(&other, "ann", 2).await;
        check(&other, "b|}%\u{1b}", 3).await;
        for node in [&one, &other] {
            _ = node.top(&denied());
            let report = fleet::report(&node.state().history, node.started.elapsed());
            let redis = node.gate.redis().unwrap();
            redis.write_node_report(&node.node, &report, fleet::KEEP_REPORT).await.unwrap();
        }
        for node in [&one, &other] {
            let top = node.fleet_top(denied()).await;
            assert_eq!((top.nodes, top.problem.as_deref()), (2, None));
            assert_eq!(listed(&top), [("ann".to_owned(), 5, 0), ("b|}%\\u{1b}".to_owned(), 1, 0)]);
            assert_eq!(top.list.total, 6);
        }
        // Reports of programs that are not ours are skipped.
        one.gate.redis().unwrap().write_node_report("x", b"{]", fleet::KEEP_REPORT).await.unwrap();
        let top = one.fleet_top(denied()).await;
        assert_eq!((top.nodes, listed(&top).len()), (2, 2));
        drop(server);
        let top = one.fleet_top(denied()).await;
        assert!(top.problem.is_some());
        assert_eq!(listed(&top), [("ann".to_owned(), 3, 0)]);
    }
}

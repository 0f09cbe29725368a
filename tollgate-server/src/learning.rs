//! Limits that learn: evaluates the demand every few minutes, and moves the numbers in force.
//!
//! What a number is moved by is in the library. Here are the times of evaluation, the log, the metrics, and the places
//! that keep what was learned: a file beside the state file for the in-memory store, or Redis, where all nodes share it.
//!
//! A move is applied like a reload of the rules: counts stay, and a client never gets more than the stricter of both
//! numbers allows for what it has spent.

mod file;
mod shared;
mod text;

use std::collections::BTreeMap;
use std::fmt;
use std::hash::BuildHasher;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::sleep;
use tollgate::redis::{RedisLimiter, StoreError};
use tollgate_config::Parsed;
use tollgate_rules::Gate;
use tollgate_rules::internal::demand::{Evaluation, Learning, LearningLimit, Phase, TICK};
use tollgate_telemetry::notice::{self, Level};
use tollgate_telemetry::page::Page;

use self::file::Stored;
use crate::state::StateError;

/// The time between two looks at the clock, and at the numbers of other nodes.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The limits that learn.
#[derive(Debug, Default)]
pub(crate) struct Learners {
    limits: Mutex<BTreeMap<String, LearningState>>,
    /// What was learned before the start, by the names of limits that no rules have had yet.
    saved: Mutex<BTreeMap<String, Vec<u8>>>,
    /// The file that keeps what was learned.
    path: Option<PathBuf>,
    changed: Notify,
}

/// The limits of rules that are not in force yet.
#[derive(Debug, Default)]
pub(crate) struct Attached(BTreeMap<String, LearningState>);

/// A limit that learns.
#[derive(Clone, Debug)]
struct LearningState {
    learning: Learning,
    /// `limit` or `capacity`.
    quota_name: &'static str,
    /// The number is shown, and `from` is in force.
    is_shadow: bool,
    ups: u64,
    downs: u64,
    /// The version of the state on Redis that this node has.
    version: u64,
    was_frozen: bool,
}

impl Learners {
    /// Creates learners that continue with the file beside a state file. A damaged one is kept under another name.
    pub(crate) fn restored(state: Option<&Path>) -> Result<Self, StateError> {
        let Some(path) = state.map(file::path_beside) else { return Ok(Self::default()) };
        let saved = match read(&path)? {
            Stored::States(states) => states,
            Stored::Missing => BTreeMap::new(),
            Stored::Damaged => {
                let rejected = StateError::set_aside(&path)?;
                notice::warn(text::damaged_file(&path, Some(&rejected)));
                BTreeMap::new()
            }
        };
        Ok(Self { path: Some(path), saved: saved.into(), ..Self::default() })
    }

    /// Creates learners that continue with what another process [has learned](Self::encoded), and keep it in the file
    /// beside a state file.
    pub(crate) fn taken_over(state: Option<&Path>, learned: &[u8]) -> Self {
        let saved = file::decode(learned).unwrap_or_default();
        Self { path: state.map(file::path_beside), saved: saved.into(), ..Self::default() }
    }

    /// Returns what was learned, for another process.
    pub(crate) fn encoded(&self) -> Vec<u8> {
        file::encode(&self.states())
    }

    fn states(&self) -> BTreeMap<String, Vec<u8>> {
        self.limits().iter().filter_map(|(name, state)| Some((name.clone(), state.learning.encode()?))).collect()
    }

    /// Creates learners with the numbers in the file beside the state file of a server, which is not changed.
    pub(crate) fn of_server(state: &Path) -> Result<Self, StateError> {
        let path = file::path_beside(state);
        let saved = match read(&path)? {
            Stored::States(states) => states,
            Stored::Missing => {
                notice::warn(text::missing_file(&path));
                BTreeMap::new()
            }
            Stored::Damaged => {
                notice::warn(text::damaged_file(&path, None));
                BTreeMap::new()
            }
        };
        Ok(Self { saved: saved.into(), ..Self::default() })
    }

    fn limits(&self) -> MutexGuard<'_, BTreeMap<String, LearningState>> {
        self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the rules with the numbers in force and the observers of limits that learn, and what to
    /// [commit](Self::commit) once the rules are in force. What a limit has learned is kept while its name, its time to
    /// learn from and what it measures stay the same.
    pub(crate) fn attach(&self, file: Parsed) -> (Parsed, Attached) {
        let limits = self.limits();
        let mut attached = Attached::default();
        for rule in &file.limits {
            let learns = rule.learn().and_then(|learn| Some((learn.shadow, learn.settings()?, rule.measure()?)));
            let Some((is_shadow, settings, measure)) = learns else { continue };
            let name = rule.name.as_str();
            let kept = limits.get(name).and_then(|state| {
                let mut kept = state.clone();
                kept.learning.change(settings, measure).then_some(kept)
            });
            let mut state =
                kept.unwrap_or_else(|| self.new_state(name, Learning::new(settings, measure, random_seed())));
            (state.is_shadow, state.quota_name) = (is_shadow, rule.quota_name());
            attached.0.insert(name.to_owned(), state);
        }
        drop(limits);
        let limit = |state: &LearningState| LearningLimit {
            quota: state.quota(),
            observer: Arc::clone(state.learning.observer()),
        };
        let learning = attached.0.iter().map(|(name, state)| (name.clone(), limit(state))).collect();
        (file.with_learning(Arc::new(learning)), attached)
    }

    /// Returns the state of a limit that is new or measures something else than before, with what was saved.
    fn new_state(&self, name: &str, mut learning: Learning) -> LearningState {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = saved.get(name)
            && !learning.restore(state)
        {
            Level::Info.log(text::started_again(name), &[("limit", name.into())]);
        }
        LearningState::new(learning)
    }

    /// Takes over the limits of rules that are in force.
    pub(crate) fn commit(&self, attached: Attached) {
        let mut limits = self.limits();
        for (name, next) in attached.0 {
            self.saved.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
            match limits.get_mut(&name) {
                // It may have learned more since.
                Some(state) if Arc::ptr_eq(state.learning.observer(), next.learning.observer()) => {
                    state.learning.change_settings(*next.learning.settings());
                    (state.is_shadow, state.quota_name) = (next.is_shadow, next.quota_name);
                }
                _ => _ = limits.insert(name, next),
            }
        }
    }

    /// Returns whether a limit learns.
    pub(crate) fn are_any(&self) -> bool {
        !self.limits().is_empty()
    }

    /// Waits until a number in force has changed.
    pub(crate) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Evaluates the demand once per tick, and follows the numbers of other nodes. Never returns.
    pub(crate) async fn run(self: Arc<Self>, gate: Gate) {
        let mut evaluated = None;
        loop {
            let tick = gate.time().as_micros() / TICK.as_micros() as u64;
            // The first tick of a process is not a whole one.
            let is_due = evaluated.replace(tick).is_some_and(|before| before != tick);
            match gate.redis() {
                Some(redis) => self.sync(&redis, is_due).await,
                None if is_due => self.evaluate(&gate),
                None => {}
            }
            if is_due {
                self.forget_removed();
                self.save(&gate);
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Evaluates limits whose counts are in memory.
    fn evaluate(&self, gate: &Gate) {
        let now = gate.time();
        let mut is_changed = false;
        for (name, state) in self.limits().iter_mut() {
            let before = state.quota();
            let evaluation = state.learning.evaluate(now);
            state.report(name, &evaluation);
            is_changed |= state.quota() != before;
        }
        if is_changed {
            self.changed.notify_one();
        }
    }

    /// Forgets limits that no rules have any more.
    fn forget_removed(&self) {
        // The observer of a limit is held here, and by the rules that decide or may decide again.
        self.limits().retain(|_, state| Arc::strong_count(state.learning.observer()) > 1);
    }

    /// Writes the file for the last time, with what was observed since the last evaluation.
    pub(crate) fn end(&self, gate: &Gate) {
        let now = gate.time();
        self.limits().values_mut().for_each(|state| state.learning.end(now));
        self.save(gate);
    }

    /// Writes the file, if the counts are in memory.
    fn save(&self, gate: &Gate) {
        let Some(path) = self.path.as_deref().filter(|_| gate.memory().is_some()) else { return };
        let states = self.states();
        if !states.is_empty()
            && let Err(error) = file::write(path, &states)
        {
            notice::warn(format_args!(
                "cannot write what limits have learned to {}: {error}: make its folder writable for the user of this process",
                path.display()
            ));
        }
    }

    /// Reads what other nodes have learned from Redis.
    pub(crate) async fn load(&self, redis: &RedisLimiter) -> Result<(), StoreError> {
        let names: Vec<String> = self.limits().keys().cloned().collect();
        for name in names {
            self.follow(redis, &name).await?;
        }
        Ok(())
    }

    /// Returns what a limit has learned, for `explain`.
    pub(crate) fn describe(&self, name: &str) -> Option<Learned> {
        let limits = self.limits();
        let state = limits.get(name)?;
        let (settings, last) = (state.learning.settings(), state.learning.last());
        Some(Learned {
            quota: state.quota_name,
            in_force: last.map(|_| state.quota()),
            learned: last.map(|_| state.learning.value()),
            from: settings.from,
            to: settings.to,
            shadow: state.is_shadow,
            need: last.and_then(|last| last.target),
            clients: last.map(|last| last.clients),
            phase: last.map(|last| text::phase(last.phase)),
            text: text::explain(state),
        })
    }

    pub(crate) fn write_metrics(&self, page: &mut Page<'_>) -> fmt::Result {
        let limits = self.limits();
        if limits.is_empty() {
            return Ok(());
        }
        let gauges = |value: fn(&LearningState) -> Option<u64>| {
            let row = move |(name, state): (&String, &LearningState)| {
                Some(([("limit", name.clone())], i64::try_from(value(state)?).unwrap_or(i64::MAX)))
            };
            limits.iter().filter_map(row)
        };
        let help = "Number that a limit has learned; with shadow it is not in force";
        page.gauges("tollgate_learned_value", help, gauges(|state| Some(state.learning.value())))?;
        let help = "Number that the share of clients needs, inside the bounds, by limit that learns";
        page.gauges("tollgate_learned_target", help, gauges(|state| state.learning.last()?.target))?;
        let help = "Clients that have returned, from which a limit learns; a sample if there are more than 8192";
        page.gauges("tollgate_learned_clients", help, gauges(|state| Some(state.learning.last()?.clients)))?;
        let help = "1 while a limit does not learn because denials surge";
        let is_frozen = gauges(|state| Some(u64::from(state.learning.last()?.phase == Phase::Frozen)));
        page.gauges("tollgate_learning_frozen", help, is_frozen)?;
        let moves = limits.iter().flat_map(|(name, state)| {
            [("up", state.ups), ("down", state.downs)]
                .map(|(direction, count)| ([("limit", name.clone()), ("direction", direction.to_owned())], count))
        });
        page.counters("tollgate_learned_moves", "Moves of learned numbers by this node, by limit and direction", moves)
    }
}

/// What a limit has learned. The numbers are unknown where only the running server knows them.
#[derive(Debug, serde::Serialize, schemars::JsonSchema)]
pub(crate) struct Learned {
    quota: &'static str,
    in_force: Option<u64>,
    learned: Option<u64>,
    from: u64,
    to: u64,
    shadow: bool,
    need: Option<u64>,
    clients: Option<u64>,
    /// `collecting`, `frozen` or `following`.
    phase: Option<&'static str>,
    #[serde(skip)]
    pub(crate) text: String,
}

impl LearningState {
    fn new(learning: Learning) -> Self {
        Self { learning, quota_name: "limit", is_shadow: false, ups: 0, downs: 0, version: 0, was_frozen: false }
    }

    /// Returns the number in force.
    fn quota(&self) -> u64 {
        if self.is_shadow { self.learning.settings().from } else { self.learning.value() }
    }

    /// Logs and counts a move, and logs when denials begin or cease to surge.
    fn report(&mut self, name: &str, evaluation: &Evaluation) {
        let is_frozen = evaluation.phase == Phase::Frozen;
        if std::mem::replace(&mut self.was_frozen, is_frozen) != is_frozen {
            Level::Info.log(text::frozen(name, evaluation), &[("limit", name.into())]);
        }
        if let Some((before, after)) = evaluation.moved {
            *(if after > before { &mut self.ups } else { &mut self.downs }) += 1;
            Level::Info.log(text::moved(name, self, evaluation), &[("limit", name.into())]);
        }
    }
}

fn read(path: &Path) -> Result<Stored, StateError> {
    file::read(path).map_err(|source| StateError::Read { path: path.to_owned(), source })
}

/// Returns a seed that clients cannot know.
fn random_seed() -> u64 {
    std::hash::RandomState::new().hash_one(std::process::id())
}

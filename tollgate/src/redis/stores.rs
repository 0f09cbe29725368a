//! The stores of a limiter: the default one, and those that limits choose by name.
//!
//! Each store has its own servers with their breakers, its own subscription to resets and its own count of nodes. A
//! store that fails therefore affects only its own limits.
//!
//! Keys that are on one store, and on a cluster in one slot, are decided by one script call. `several_calls.rs` decides
//! requests whose keys need several.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::fleet::Fleet;
use super::script::ScriptHit;
use super::topology::Topology;
use super::{ConnectError, ServerStatus, StoreError, StoreStatus, names};
use crate::error::InvalidLimit;
use crate::limit::{Limit, OnStoreFailure};

/// The name of the store for limits that choose none.
pub(super) const DEFAULT: &str = "default";
/// Names with another meaning.
const RESERVED: [&str; 2] = [DEFAULT, "memory"];
/// Maximum number of stores of one limiter. Each has connections and background tasks.
const MAX_STORES: usize = 16;
/// Maximum length of a store's name, which is used in logs and metrics.
const MAX_NAME: usize = 64;

/// The position of a store in its limiter. The default store is the first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StoreIndex(u8);

impl StoreIndex {
    pub(super) fn position(self) -> usize {
        usize::from(self.0)
    }
}

pub(super) struct Store {
    pub(super) name: Arc<str>,
    pub(super) topology: Arc<Topology>,
    /// Whether the subscription to resets is up. Without it, no denial is cached.
    pub(super) is_subscribed: Arc<AtomicBool>,
    pub(super) fleet: Arc<Fleet>,
}

/// All stores of a limiter.
pub(super) struct Stores(Box<[Store]>);

/// Positions of the hits of a request that one script call decides.
pub(super) type Call = SmallVec<[usize; 4]>;

impl Stores {
    pub(super) fn new(stores: Vec<Store>) -> Self {
        Self(stores.into())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Store> {
        self.0.iter()
    }

    pub(super) fn indexed(&self) -> impl Iterator<Item = (StoreIndex, &Store)> {
        (0..).map(StoreIndex).zip(self.iter())
    }

    pub(super) fn at(&self, index: StoreIndex) -> &Store {
        &self.0[index.position()]
    }

    /// Returns the store that has a key.
    pub(super) fn of(&self, hit: &ScriptHit) -> &Store {
        self.at(hit.terms.store)
    }

    /// Returns the store for limits that choose none.
    pub(super) fn default_store(&self) -> &Store {
        self.at(StoreIndex::default())
    }

    /// Returns the store that a limit chooses.
    pub(super) fn chosen_by(&self, limit: &Limit) -> Result<StoreIndex, InvalidLimit> {
        let Some(name) = limit.store() else { return Ok(StoreIndex::default()) };
        let found = self.indexed().find(|(_, store)| *store.name == *name);
        found.map(|(index, _)| index).ok_or_else(|| {
            let known: Vec<String> = self.iter().map(|store| format!("`{}`", store.name)).collect();
            let fix = format!("use one of {}, or add a store of that name", known.join(", "));
            InvalidLimit::new("store", format!("there is no store `{name}`"), fix).of_limit(limit.name())
        })
    }

    /// Checks that every limit chooses a store that exists, and that variants of a limit choose the same: they share
    /// its keys.
    pub(super) fn check(&self, limits: &[Limit], base_count: usize) -> Result<(), InvalidLimit> {
        let (base, beside) = limits.split_at(base_count);
        let mut chosen = HashMap::new();
        for limit in base {
            chosen.insert(limit.name(), (limit, self.chosen_by(limit)?));
        }
        for variant in beside {
            let store = self.chosen_by(variant)?;
            let of = chosen.get(variant.name()).filter(|(limit, _)| limit.is_variant_of(variant));
            if of.is_some_and(|(_, other)| *other != store) {
                let problem = "a variant is on another store than its limit".to_owned();
                let fix = "give both the same store: a variant counts the keys of its limit";
                return Err(InvalidLimit::new("store", problem, fix).of_limit(variant.name()));
            }
        }
        Ok(())
    }

    /// Returns whether one script call can decide all hits.
    pub(super) fn is_one_call(&self, hits: &[ScriptHit]) -> bool {
        let Some((first, others @ [_, ..])) = hits.split_first() else { return true };
        if others.iter().any(|hit| hit.terms.store != first.terms.store) {
            return false;
        }
        if !self.of(first).topology.is_cluster() {
            return true;
        }
        let slot = names::slot(&first.name);
        others.iter().all(|hit| names::slot(&hit.name) == slot)
    }

    /// Groups hits into as many script calls as their keys need.
    pub(super) fn calls<'a>(&self, hits: impl IntoIterator<Item = &'a ScriptHit>) -> SmallVec<[Call; 2]> {
        let mut destinations: SmallVec<[(StoreIndex, u16); 4]> = SmallVec::new();
        let mut calls: SmallVec<[Call; 2]> = SmallVec::new();
        for (position, hit) in hits.into_iter().enumerate() {
            let slot = if self.of(hit).topology.is_cluster() { names::slot(&hit.name) } else { 0 };
            let destination = (hit.terms.store, slot);
            match destinations.iter().position(|other| *other == destination) {
                Some(call) => calls[call].push(position),
                None => {
                    destinations.push(destination);
                    calls.push(SmallVec::from_iter([position]));
                }
            }
        }
        calls
    }

    /// Returns whether the subscription to resets of a key is up.
    pub(super) fn is_subscribed_for(&self, hit: &ScriptHit) -> bool {
        self.of(hit).is_subscribed.load(Ordering::Relaxed)
    }

    /// Registers this node in the fleet of every store that has a limit with a local share.
    pub(super) fn join_fleets(&self, limits: &[Limit], default: OnStoreFailure) {
        for limit in limits {
            if limit.on_store_failure().unwrap_or(default) == OnStoreFailure::Local
                && let Ok(index) = self.chosen_by(limit)
            {
                self.at(index).fleet.join();
            }
        }
    }

    /// Returns why some or all keys cannot be decided. `None` if all stores are available.
    pub(super) fn why_unavailable(&self) -> Option<StoreError> {
        self.indexed().find_map(|(index, store)| {
            let why = store.topology.why_unavailable()?;
            let is_default = index == StoreIndex::default();
            Some(if is_default { why } else { why.at(&format_args!("store {}", store.name)) })
        })
    }

    pub(super) fn status(&self) -> Vec<StoreStatus> {
        let status = |store: &Store| StoreStatus {
            name: store.name.to_string(),
            address: store.topology.address().to_owned(),
            why_unavailable: store.topology.why_unavailable(),
        };
        self.iter().map(status).collect()
    }

    pub(super) fn servers(&self) -> Vec<ServerStatus> {
        let of_store = |store: &Store| {
            let name = store.name.to_string();
            let nodes = store.topology.nodes().into_iter();
            nodes.map(move |node| ServerStatus {
                store: name.clone(),
                address: node.to_string(),
                available: node.breaker.why().is_none(),
                breaker: node.breaker.state(),
                memory: node.memory(),
            })
        };
        self.iter().flat_map(of_store).collect()
    }
}

/// Checks the name of a store that limits choose.
pub(super) fn check_name<'a>(
    name: &str,
    mut others: impl ExactSizeIterator<Item = &'a str>,
) -> Result<(), ConnectError> {
    let problem = |problem: String, fix: &str| Err(ConnectError::new(problem, fix));
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    if name.is_empty() || name.len() > MAX_NAME || !name.bytes().all(is_good) {
        let shown: String = name.chars().take(MAX_NAME).collect();
        return problem(format!("`{shown}` is not a name of a store"), "use letters, digits and _ - ., 64 at most");
    }
    if RESERVED.contains(&name) {
        return problem(format!("the name `{name}` of a store is reserved"), "choose another name");
    }
    if others.len() >= MAX_STORES - 1 {
        return problem("there are more than 16 stores".into(), "use fewer");
    }
    if others.any(|other| other == name) {
        return problem(format!("two stores are named `{name}`"), "give each store its own name");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(name: &str, others: &[&str]) -> String {
        check_name(name, others.iter().copied()).expect_err("a mistake").to_string()
    }

    #[test]
    fn names_of_stores_are_checked() {
        assert_eq!(check_name("sessions.eu-1_a", ["audit"].into_iter()), Ok(()));
        let fix = "use letters, digits and _ - ., 64 at most";
        for name in ["", "a b", "é", "redis://h"] {
            assert_eq!(problem(name, &[]), format!("`{name}` is not a name of a store: {fix}"));
        }
        assert!(problem(&"x".repeat(65), &[]).ends_with(fix));
        assert_eq!(problem("memory", &[]), "the name `memory` of a store is reserved: choose another name");
        assert_eq!(problem("audit", &["audit"]), "two stores are named `audit`: give each store its own name");
        assert_eq!(problem("audit", &["other"; 15]), "there are more than 16 stores: use fewer");
    }
}

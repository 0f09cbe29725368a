//! Checks that values make sense together: numbers that admit requests, limits that requests can reach, unique names.
//!
//! Works on types, and finds positions in the nodes that they were read from. Values that `shape` has rejected are not
//! reported again as missing.

mod dropped_headers;
mod gateway;
mod keys;
mod limits;
mod numbers;
mod settings;
mod store;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;

use tollgate::InvalidLimit;

use super::node::Node;
use super::problem::{Findings, Position};
use super::types::RuleFile;

pub(super) fn check(file: &RuleFile, root: &Node, findings: &mut Findings) {
    settings::check(file, root, findings);
    limits::check(file, root, findings);
    store::check_use(file, root, findings);
    dropped_headers::check(file, root, findings);
}

/// Reports the problem that a check of rules has found.
fn report(checked: Result<(), InvalidLimit>, at: Position, findings: &mut Findings) {
    if let Err(error) = checked {
        findings.error(at, error.problem(), error.fix());
    }
}

/// The first position of each value, to find duplicates.
struct FirstPositions<T>(HashMap<T, Position>);

impl<T: Eq + Hash> FirstPositions<T> {
    fn new() -> Self {
        Self(HashMap::new())
    }

    /// Returns the first position of `this` if it is a duplicate.
    fn duplicate_of(&mut self, this: T, at: Position) -> Option<String> {
        match self.0.entry(this) {
            Entry::Occupied(first) => Some(format!("{}:{}", first.get().line, first.get().column)),
            Entry::Vacant(none) => {
                none.insert(at);
                None
            }
        }
    }
}

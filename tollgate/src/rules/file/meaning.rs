//! Whether what a file says can be meant: numbers that admit something, limits that requests can reach, names that
//! differ.
//!
//! Works on types, and looks up positions in the nodes they were read from. What was refused before is not judged
//! again: a value that was taken out for its form is not missing.

mod answers;
mod dropped_headers;
mod gateway;
mod in_flight;
mod keys;
mod limits;
mod numbers;
mod settings;
mod store;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;

use super::node::Node;
use super::problem::{Findings, Position};
use super::types::RuleFile;

pub(super) use self::store::NO_DEFAULT;

pub(super) fn check(file: &RuleFile, root: &Node, findings: &mut Findings) {
    settings::check(file, root, findings);
    limits::check(file, root, findings);
    store::check_use(file, root, findings);
    dropped_headers::check(file, root, findings);
}

/// What was seen before, and where.
struct FirstPositions<T>(HashMap<T, Position>);

impl<T: Eq + Hash> FirstPositions<T> {
    fn new() -> Self {
        Self(HashMap::new())
    }

    /// Where this was seen first, if it is not the first.
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

//! Changes that a route makes to headers.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate::rules::file::HeaderEdits;

/// First what is removed, then what is set, then what is added.
#[derive(Debug, Default)]
pub(in super::super) struct Edits {
    remove: Vec<HeaderName>,
    set: Vec<(HeaderName, HeaderValue)>,
    add: Vec<(HeaderName, HeaderValue)>,
}

impl Edits {
    pub(super) fn new(rule: &HeaderEdits) -> Self {
        let remove = rule.remove.iter().filter_map(|name| HeaderName::try_from(name.as_str()).ok()).collect();
        Self { remove, set: pairs(&rule.set).collect(), add: pairs(&rule.add).collect() }
    }

    pub(in super::super) fn apply(&self, headers: &mut HeaderMap) {
        for name in &self.remove {
            headers.remove(name);
        }
        for (name, value) in &self.set {
            headers.insert(name, value.clone());
        }
        for (name, value) in &self.add {
            headers.append(name, value.clone());
        }
    }
}

/// A file that was understood has only names and values that can be headers.
fn pairs(map: &BTreeMap<String, String>) -> impl Iterator<Item = (HeaderName, HeaderValue)> + '_ {
    map.iter().filter_map(|(name, value)| {
        Some((HeaderName::try_from(name.as_str()).ok()?, HeaderValue::try_from(value.as_str()).ok()?))
    })
}

pub(super) fn map(headers: &BTreeMap<String, String>) -> HeaderMap {
    pairs(headers).collect()
}

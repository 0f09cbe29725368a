//! Header changes of a route.

use std::collections::BTreeMap;

use http::{HeaderMap, HeaderName, HeaderValue};
use tollgate::rules::file::internal::HeaderEdits;

/// Headers to remove, then to set, then to add.
#[derive(Debug, Default)]
pub(in super::super) struct Edits {
    remove: Vec<HeaderName>,
    set: Vec<(HeaderName, HeaderValue)>,
    add: Vec<(HeaderName, HeaderValue)>,
}

/// Operations on heads in text form.
impl Edits {
    /// Returns whether headers of that name, in any case, are removed.
    pub(in super::super) fn removes(&self, name: &str) -> bool {
        let is = |other: &HeaderName| other.as_str().eq_ignore_ascii_case(name);
        self.remove.iter().any(is) || self.set.iter().any(|(other, _)| is(other))
    }

    /// Returns whether a header is removed and not replaced.
    pub(in super::super) fn removes_for_good(&self, name: &HeaderName) -> bool {
        self.remove.contains(name) && !self.sets(name)
    }

    pub(in super::super) fn sets(&self, name: &HeaderName) -> bool {
        self.new_headers().any(|(other, _)| other == name)
    }

    pub(in super::super) fn new_headers(&self) -> impl Iterator<Item = &(HeaderName, HeaderValue)> {
        self.set.iter().chain(&self.add)
    }

    /// Writes the new headers, except for some.
    pub(in super::super) fn write_new(&self, out: &mut Vec<u8>, except: impl Fn(&HeaderName) -> bool) {
        for (name, value) in self.new_headers().filter(|(name, _)| !except(name)) {
            for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
                out.extend_from_slice(part);
            }
        }
    }
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

/// Returns the headers of a rule. The file was validated, so all names and values are valid.
fn pairs(map: &BTreeMap<String, String>) -> impl Iterator<Item = (HeaderName, HeaderValue)> + '_ {
    map.iter().filter_map(|(name, value)| {
        Some((HeaderName::try_from(name.as_str()).ok()?, HeaderValue::try_from(value.as_str()).ok()?))
    })
}

pub(super) fn map(headers: &BTreeMap<String, String>) -> HeaderMap {
    pairs(headers).collect()
}

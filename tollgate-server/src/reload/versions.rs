//! The rules in force, their version, and the versions before.
//!
//! A version is a hash of the text, so nodes with the same rules have the same version, and so have rules that are rolled
//! back. Deliberately not in it: limits of an xDS server, and the contents of files that the rules name.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use schemars::JsonSchema;
use serde::Serialize;
use sha2::{Digest, Sha256};
use tollgate_config::Parsed;
use tollgate_telemetry::seconds::unix_seconds;

use crate::config::logins;

/// The most earlier versions.
const MAX_VERSIONS: usize = 32;
/// The most bytes of the texts of earlier versions.
const MAX_BYTES: usize = 8 << 20;

/// The source of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum RulesSource {
    /// No rule file: the rules in the program.
    BuiltIn,
    File,
    /// Rules that were published on Redis.
    Published,
    /// The admin API of this node.
    Api,
}

impl RulesSource {
    /// Returns the word for it, as in JSON.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::BuiltIn => "built_in",
            Self::File => "file",
            Self::Published => "published",
            Self::Api => "api",
        }
    }
}

/// Rules that are in force, or were.
#[derive(Debug)]
pub(crate) struct RulesInForce {
    pub(crate) version: String,
    pub(crate) source: RulesSource,
    /// Seconds since the Unix epoch.
    pub(crate) loaded_at: f64,
    pub(crate) file: Arc<Parsed>,
    /// The changes to the rules before.
    pub(crate) changes: Vec<String>,
    /// The text without credentials, once it was requested.
    shown: OnceLock<String>,
}

/// Rules that were in force.
#[derive(Debug)]
pub(crate) struct EarlierRules {
    pub(crate) version: String,
    pub(crate) source: RulesSource,
    pub(crate) loaded_at: f64,
    pub(crate) text: String,
    pub(crate) changes: Vec<String>,
}

impl EarlierRules {
    fn of(rules: &RulesInForce) -> Self {
        Self {
            version: rules.version.clone(),
            source: rules.source,
            loaded_at: rules.loaded_at,
            text: rules.file.source().to_owned(),
            changes: rules.changes.clone(),
        }
    }
}

/// The rules in force, and those before.
#[derive(Debug)]
pub(super) struct Versions(Mutex<State>);

#[derive(Debug)]
struct State {
    in_force: Arc<RulesInForce>,
    /// The latest first.
    earlier: VecDeque<Arc<EarlierRules>>,
}

impl RulesInForce {
    pub(super) fn new(file: Arc<Parsed>, source: RulesSource, changes: Vec<String>) -> Self {
        let version = version_of(file.source());
        Self { version, source, loaded_at: unix_seconds(), file, changes, shown: OnceLock::new() }
    }

    /// Returns the text without lines that may contain credentials. To find them may take as long as to load the rules, so
    /// this is done once.
    pub(crate) fn shown_text(&self) -> &str {
        self.shown.get_or_init(|| logins::redacted(self.file.source()).into_owned())
    }
}

/// Returns the version of rules with this text.
pub(crate) fn version_of(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes())[..8])
}

/// Writes bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Versions {
    pub(super) fn new(in_force: RulesInForce) -> Self {
        Self(Mutex::new(State { in_force: Arc::new(in_force), earlier: VecDeque::new() }))
    }

    pub(super) fn in_force(&self) -> Arc<RulesInForce> {
        Arc::clone(&self.0.lock().unwrap_or_else(PoisonError::into_inner).in_force)
    }

    /// Returns the earlier rules, the latest first.
    pub(super) fn earlier(&self) -> Vec<Arc<EarlierRules>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).earlier.iter().cloned().collect()
    }

    /// Puts other rules in force. Equal rules of another source replace those in force without a trace.
    pub(super) fn add(&self, next: RulesInForce) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut state.in_force, Arc::new(next));
        if before.version == state.in_force.version {
            return;
        }
        state.earlier.push_front(Arc::new(EarlierRules::of(&before)));
        let lengths = state.earlier.iter().take(MAX_VERSIONS).map(|one| one.text.len());
        let sums = lengths.scan(0, |sum, length| {
            *sum += length;
            Some(*sum)
        });
        let kept = sums.take_while(|sum| *sum <= MAX_BYTES).count();
        state.earlier.truncate(kept);
    }
}

#[cfg(test)]
mod tests {
    use tollgate_config::RuleFile;

    use super::*;

    fn rules(text: &str) -> RulesInForce {
        let file = RuleFile::parse("rules", text).expect("valid rules");
        RulesInForce::new(Arc::new(file), RulesSource::Api, Vec::new())
    }

    #[test]
    fn history_is_bounded_by_number_and_by_bytes() {
        let versions = Versions::new(rules("limits: []\n"));
        versions.add(rules("limits: []\n"));
        assert!(versions.earlier().is_empty(), "equal rules are one version");
        for number in 0..2 * MAX_VERSIONS {
            versions.add(rules(&format!("limits: [] # {number}\n")));
        }
        let earlier = versions.earlier();
        assert_eq!(earlier.len(), MAX_VERSIONS);
        assert_eq!(earlier[0].text, format!("limits: [] # {}\n", 2 * MAX_VERSIONS - 2));
        assert_eq!(versions.in_force().version, version_of(&format!("limits: [] # {}\n", 2 * MAX_VERSIONS - 1)));
        let long = |number: usize| format!("limits: [] # {number}{}\n", "x".repeat(MAX_BYTES / 3));
        for number in 0..4 {
            versions.add(rules(&long(number)));
        }
        assert_eq!(versions.earlier().len(), 2);
    }
}

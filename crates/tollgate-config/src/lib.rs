//! The rule file: reads YAML into rules, and reports every problem with its line, column and fix.
//!
//! [`RuleFile::load`] reads a file and [`RuleFile::parse`] a text. Both return a [`Parsed`] file, which [`open_gate`]
//! takes, or every [`Problem`] of the file in one error:
//!
//! ```
//! use tollgate_config::RuleFile;
//!
//! let text = "limits:\n  - name: per-user\n    key: header:x-user-id\n    capacity: 0\n    algorithm: token_bucket\n";
//! let problems = RuleFile::parse("tollgate.yaml", text).unwrap_err();
//! assert_eq!(
//!     problems.to_string(),
//!     "tollgate.yaml:4:15: capacity 0 admits nothing: use 1 or more, or `blocked` to refuse every request"
//! );
//! ```
//!
//! A file is read in four steps, each in its own module. `yaml` reads nodes with positions. `shape` checks them against
//! the [`schema`] that is generated from `types`. serde makes the types. `meaning` checks that the values make sense
//! together. Each step continues after a problem, so that all problems are reported at once.
//!
//! This is a separate crate so that services whose limits are in code build without a YAML parser. Deliberately not here:
//! watching files for changes, and matching requests.

// Shows on each item the feature that it needs. Only docs.rs sets `docsrs`, with a nightly compiler.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod compile;
mod envoy;
mod forms;
mod meaning;
mod node;
mod open;
mod problem;
mod schema;
mod setting_error;
mod shape;
#[cfg(feature = "redis")]
mod store;
mod types;
mod yaml;

use std::borrow::Cow;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tollgate_rules::internal::demand::LearningLimits;
use tollgate_rules::internal::read_up_to;

use self::envoy::{DomainConfig, EnvoyRules};
use self::node::Node;
use self::problem::Findings;

pub use self::open::{OpenError, open_gate, open_gate_restored};
pub use self::problem::{Position, Problem, Problems, Severity};
pub use self::schema::schema;
pub use self::types::RuleFile;
pub use tollgate;
pub use tollgate_rules;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The settings of a rule file as types, for the server of this workspace.
///
/// Not covered by semantic versioning: anything in this module can change in any release.
#[doc(hidden)]
pub mod internal {
    pub use super::envoy::{DescriptorConfig, DomainConfig, EnvoyRules, RateLimitConfig};
    pub use super::{forms::*, setting_error::*, types::*};
}

/// A rule file that was read, with the position of each of its parts.
///
/// [`compile`](Self::compile) makes the rules that decide; [`open_gate`] does that and opens the
/// store.
#[derive(Clone)]
pub struct Parsed {
    name: String,
    source: String,
    /// The folder that relative paths in the file start from.
    folder: PathBuf,
    rules: RuleFile,
    root: Node,
    warnings: Problems,
    /// The domains of envoyproxy/ratelimit's files that the file names.
    domains: Arc<[DomainConfig]>,
    /// The rules of these and of other domains.
    envoy: EnvoyRules,
    /// The limits that learn.
    learning: Arc<LearningLimits>,
}

impl RuleFile {
    /// Reads the text of a rule file. The name of the file is only used in messages.
    ///
    /// # Errors
    ///
    /// Returns every problem of the file at once: text that is not YAML, unknown keys, and values that cannot be used.
    pub fn parse(file_name: &str, text: impl AsRef<[u8]>) -> Result<Parsed, Problems> {
        let mut findings = Findings::default();
        let source = decoded(text.as_ref(), &mut findings);
        let parsed = if findings.refused() { None } else { read(&source, &mut findings) };
        let refused = findings.refused();
        let problems = findings.into_problems(file_name, &source);
        match parsed {
            Some((rules, root)) if !refused => {
                let (name, source) = (file_name.to_owned(), source.into_owned());
                let folder = PathBuf::new();
                Ok(Parsed {
                    name,
                    source,
                    folder,
                    rules,
                    root,
                    warnings: problems,
                    domains: Arc::default(),
                    envoy: EnvoyRules::default(),
                    learning: Arc::default(),
                })
            }
            _ => Err(problems),
        }
    }

    /// Reads the rule file at `path`. Relative paths in it start from its folder.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, and as [`parse`](Self::parse) does.
    pub fn load(path: &Path) -> Result<Parsed, LoadError> {
        let unreadable = |source| LoadError::Unreadable { path: path.to_owned(), source };
        let text = read_up_to(path, yaml::MAX_FILE as u64 + 1).map_err(unreadable)?;
        let mut parsed = Self::parse(&path.display().to_string(), text).map_err(LoadError::Refused)?;
        parsed.folder = path.parent().unwrap_or(Path::new("")).to_owned();
        Ok(parsed)
    }
}

/// The reason that a rule file was not loaded.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// The file cannot be read.
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file was read and has problems.
    Refused(Problems),
}

impl fmt::Display for LoadError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { path, source } => {
                write!(out, "cannot read {}: {source}: check the path and its permissions", path.display())
            }
            Self::Refused(problems) => problems.fmt(out),
        }
    }
}

impl std::error::Error for LoadError {}

impl Parsed {
    /// Returns the text of the file.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Sets the folder that relative paths in the file start from, for a text that was not read by
    /// [`load`](RuleFile::load).
    #[must_use]
    pub fn in_folder(self, folder: &Path) -> Self {
        Self { folder: folder.to_owned(), ..self }
    }

    /// Returns the folder that relative paths in the file start from.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the warnings: settings that are valid, but probably not intended.
    #[must_use]
    pub fn warnings(&self) -> &Problems {
        &self.warnings
    }
}

/// Methods for the server of this workspace, like the types in [`internal`].
#[doc(hidden)]
impl Parsed {
    /// Replaces the store by `memory` or the URL of a Redis. Other settings of the store stay where they apply to the
    /// new one; a login in the URL replaces `username` and `password_file`. With `memory`, all counts are kept in
    /// memory, also those of limits with another store.
    ///
    /// # Errors
    ///
    /// Returns the problem and the fix if the text is neither.
    pub fn with_store(mut self, store: &str) -> Result<Self, String> {
        let url = forms::StoreUrl::read(store).map_err(|invalid| invalid.to_string())?;
        self.rules.store = self.rules.store.at(url);
        if self.rules.store.is_memory() {
            self.rules.stores.clear();
            self.rules.limits.iter_mut().for_each(|limit| limit.store = None);
        }
        Ok(self)
    }

    /// Replaces the gateway by that of another file: its listeners, routes and trusted proxies.
    #[must_use]
    pub fn with_gateway_of(mut self, other: &RuleFile) -> Self {
        self.rules.gateway.clone_from(&other.gateway);
        self
    }

    /// Sets the domains of the files of envoyproxy/ratelimit that the file names. Their rules are compiled with those of
    /// the file.
    ///
    /// # Errors
    ///
    /// Returns the problems of the domains.
    pub fn with_domains(self, domains: Vec<DomainConfig>) -> Result<Self, Problems> {
        Self { domains: domains.into(), ..self }.with_more_domains(&[])
    }

    /// Adds domains to those of the files, in place of the ones that were added before.
    ///
    /// # Errors
    ///
    /// Returns the problems of the domains.
    pub fn with_more_domains(self, more: &[DomainConfig]) -> Result<Self, Problems> {
        let settings = self.rules.service.envoy.clone().unwrap_or_default();
        let envoy = EnvoyRules::new(self.domains.iter().chain(more), &settings)?;
        Ok(Self { envoy, ..self })
    }

    /// Returns the names and texts of the files of envoyproxy/ratelimit, in the order in which they were read.
    pub fn domain_files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.domains.iter().map(|domain| (&*domain.source, &*domain.text))
    }

    /// Replaces the domains by those of another file.
    #[must_use]
    pub fn with_domains_of(self, other: &Self) -> Self {
        Self { domains: Arc::clone(&other.domains), envoy: other.envoy.clone(), ..self }
    }

    /// Returns the rules of envoyproxy/ratelimit's configuration.
    #[must_use]
    pub fn envoy_rules(&self) -> &EnvoyRules {
        &self.envoy
    }

    /// Sets the numbers in force of limits that learn, and the observers of their demand. Without them, such a limit has
    /// its smallest number, and learns nothing.
    #[must_use]
    pub fn with_learning(self, learning: Arc<LearningLimits>) -> Self {
        Self { learning, ..self }
    }

    /// Adds warnings about files that the rule file names.
    #[must_use]
    pub fn with_warnings(mut self, warnings: Problems) -> Self {
        self.warnings = self.warnings.and(warnings);
        self
    }

    /// Returns the values as they are written in the file, to compare files.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        self.root.to_json()
    }

    /// Returns the settings without their positions.
    #[must_use]
    pub fn into_rules(self) -> RuleFile {
        self.rules
    }

    /// Returns a setting of a limit as it is written, by its index among the limits.
    #[must_use]
    pub fn setting_of_limit(&self, index: usize, key: &str) -> Option<serde_json::Value> {
        Some(self.limit_node(index)?.get(key)?.to_json())
    }

    /// Returns the position of a limit in the file, by its index among the limits.
    #[must_use]
    pub fn position_of_limit(&self, index: usize) -> Option<Position> {
        Some(self.limit_node(index)?.at)
    }

    fn limit_node(&self, index: usize) -> Option<&Node> {
        self.rules.limits.get(index)?;
        Some(self.root.get("limits")?.item(index))
    }
}

/// Leaves out the nodes, which contain the password of a store.
impl fmt::Debug for Parsed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Parsed").field("rules", &self.rules).field("warnings", &self.warnings).finish_non_exhaustive()
    }
}

impl Deref for Parsed {
    type Target = RuleFile;

    fn deref(&self) -> &RuleFile {
        &self.rules
    }
}

fn read(source: &str, findings: &mut Findings) -> Option<(RuleFile, Node)> {
    let root = yaml::read(source, "write `limits:` and a limit under it", findings)?;
    let root = shape::check(root, schema::borrowed(), findings)?;
    match serde_json::from_value::<RuleFile>(root.to_json()) {
        Ok(rules) => {
            meaning::check(&rules, &root, findings);
            Some((rules, root))
        }
        // The schema allows nothing that the types reject. If it ever does, the file is still rejected.
        Err(error) => {
            findings.error(root.at, format!("the file cannot be read: {error}"), "compare it with the JSON Schema");
            None
        }
    }
}

/// Returns the text without its byte order mark.
fn decoded<'t>(bytes: &'t [u8], findings: &mut Findings) -> Cow<'t, str> {
    let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(error) => {
            let good = std::str::from_utf8(&bytes[..error.valid_up_to()]).unwrap_or_default();
            findings.error(Position::after(good), "the file is not UTF-8", "save it as UTF-8");
            Cow::Borrowed("")
        }
    }
}

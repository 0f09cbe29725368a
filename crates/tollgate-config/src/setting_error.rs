//! Errors in settings that the server finds after the file was read, such as a certificate that does not exist.

use std::fmt;

use super::node::Node;
use super::problem::Findings;
use super::{Parsed, Position, Problems};

/// A setting that cannot be used, found after the file was read.
///
/// Each caller adds the key or index that it knows, from the inside outwards, so that the code that finds an error does
/// not have to know the position of its setting. [`Parsed::problems`] resolves that path to a position.
///
/// ```
/// use tollgate_config::RuleFile;
/// use tollgate_config::internal::SettingError;
///
/// let text = "limits: []\ngateway:\n  routes:\n    - { path: /**, upstream: http://api.internal }\n";
/// let file = RuleFile::parse("tollgate.yaml", text)?;
/// let error = SettingError::new("cannot connect to http://api.internal", "start the server").of("upstream");
/// let problems = file.problems([error.of(0).of("routes").of("gateway")]);
/// assert_eq!(
///     problems.to_string(),
///     "tollgate.yaml:4:30: cannot connect to http://api.internal: start the server"
/// );
/// # Ok::<(), tollgate_config::Problems>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingError {
    message: String,
    fix: String,
    /// The path of the setting, from the inside outwards.
    path: Vec<KeyOrIndex>,
    /// The position of an error that is not in a setting.
    at: Option<Position>,
}

/// A step of the path of a setting: a key of a map, or an index of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyOrIndex {
    /// A key of a map.
    Key(String),
    /// An index of a list, from 0.
    Index(usize),
}

impl From<&str> for KeyOrIndex {
    fn from(key: &str) -> Self {
        Self::Key(key.to_owned())
    }
}

impl From<usize> for KeyOrIndex {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

impl SettingError {
    /// Creates an error from the problem and its fix. It is about the whole file until [`of`](Self::of) names a
    /// setting.
    #[must_use]
    pub fn new(message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { message: message.into(), fix: fix.into(), path: Vec::new(), at: None }
    }

    /// Adds the key or index that contains the setting.
    #[must_use]
    pub fn of(mut self, step: impl Into<KeyOrIndex>) -> Self {
        self.path.push(step.into());
        self
    }

    /// Sets the position, for an error that is not in a setting, such as in a comment.
    #[must_use]
    pub fn at(mut self, position: Position) -> Self {
        self.at = Some(position);
        self
    }

    /// Returns the node of the setting, or the innermost node around it that exists.
    fn node<'n>(&self, root: &'n Node) -> &'n Node {
        self.path.iter().rev().fold(root, |node, step| match step {
            KeyOrIndex::Key(key) => node.get(key).unwrap_or(node),
            KeyOrIndex::Index(index) => node.item(*index),
        })
    }
}

/// Without the position.
impl fmt::Display for SettingError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.message, self.fix)
    }
}

/// The problem of a file with stores by name and counts in memory, and the fix.
pub(super) const NO_DEFAULT: (&str, &str) = (
    "`stores` are on Redis and `store` is memory, and a file cannot mix both",
    "write the URL of a Redis in `store`, or remove `stores`",
);

impl Parsed {
    /// Checks that stores by name stand beside a default store on Redis. The text alone does not show it: the default
    /// store may be given on the command line.
    pub(crate) fn check_default_store(&self) -> Result<(), Problems> {
        if self.rules.stores.is_empty() || !self.rules.store.is_memory() {
            return Ok(());
        }
        let (message, fix) = NO_DEFAULT;
        Err(self.problems([SettingError::new(message, fix).of("stores")]))
    }

    /// Returns errors as problems of this file, each at the position of its setting. If the setting is left out, the
    /// position is that of the part that would contain it.
    #[doc(hidden)]
    #[must_use]
    pub fn problems(&self, errors: impl IntoIterator<Item = SettingError>) -> Problems {
        let mut findings = Findings::default();
        for error in errors {
            findings.error(error.at.unwrap_or(error.node(&self.root).at), error.message, error.fix);
        }
        findings.into_problems(&self.name, &self.source)
    }
}

#[cfg(test)]
mod tests {
    use super::super::RuleFile;
    use super::*;

    const TEXT: &str = "\
limits: []
gateway:
  routes:
    - { path: /a, upstream: http://a, request_headers: { set: { '0': zero } } }
    - { path: /b, upstream: [http://b, { url: http://c }] }
";

    fn report(errors: impl IntoIterator<Item = SettingError>) -> String {
        RuleFile::parse("file", TEXT).unwrap().problems(errors).to_string()
    }

    fn error() -> SettingError {
        SettingError::new("bad", "correct it")
    }

    fn of_route(error: SettingError, index: usize) -> SettingError {
        error.of(index).of("routes").of("gateway")
    }

    #[test]
    fn an_error_is_reported_at_its_setting() {
        assert_eq!(report([error()]), "file:1:1: bad: correct it");
        assert_eq!(report([error().of("gateway")]), "file:3:3: bad: correct it");
        assert_eq!(report([error().of("gateway").at(Position { line: 1, column: 9 })]), "file:1:9: bad: correct it");
        assert_eq!(report([of_route(error().of("path"), 1)]), "file:5:15: bad: correct it");
        assert_eq!(report([of_route(error().of("url").of(1).of("upstream"), 1)]), "file:5:47: bad: correct it");
    }

    #[test]
    fn an_error_of_a_missing_setting_is_reported_at_its_container() {
        assert_eq!(report([error().of("store")]), "file:1:1: bad: correct it");
        assert_eq!(report([of_route(error().of("ca").of("upstream_tls"), 0)]), "file:4:7: bad: correct it");
        assert_eq!(report([of_route(error(), 7)]), "file:4:5: bad: correct it");
        // A single upstream may be written without a list and without `url`.
        assert_eq!(report([of_route(error().of("url").of(0).of("upstream"), 0)]), "file:4:29: bad: correct it");
    }

    #[test]
    fn a_key_may_be_a_number() {
        let of_headers = |error: SettingError| of_route(error.of("set").of("request_headers"), 0);
        assert_eq!(report([of_headers(error().of("0"))]), "file:4:70: bad: correct it");
        assert_eq!(report([of_headers(error().of(0))]), "file:4:63: bad: correct it");
    }

    #[test]
    fn errors_are_reported_in_file_order() {
        let errors = [of_route(error(), 1), of_route(error(), 0)];
        assert_eq!(errors[0].to_string(), "bad: correct it");
        assert_eq!(report(errors), "file:4:7: bad: correct it\nfile:5:7: bad: correct it");
    }
}

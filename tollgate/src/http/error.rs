//! What the settings of an answer can be refused for.

use std::fmt;

/// Headers or a body that cannot be sent as they are set: the field that is wrong, what is wrong with it, and
/// the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidAnswer {
    field: &'static str,
    problem: String,
    fix: String,
}

/// The most of a wrong text that an error repeats: enough to find it, and no more than fits a line.
const MAX_SHOWN: usize = 40;

impl InvalidAnswer {
    pub(super) fn new(field: &'static str, problem: String, fix: impl Into<String>) -> Self {
        Self { field, problem, fix: fix.into() }
    }

    /// The field that has to change, by the name it has in a rule file: `headers`, `template`, `content_type`.
    #[must_use]
    pub fn field(&self) -> &str {
        self.field
    }

    /// What is wrong with it.
    #[must_use]
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// What to write instead.
    #[must_use]
    pub fn fix(&self) -> &str {
        &self.fix
    }
}

impl fmt::Display for InvalidAnswer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}; {}", self.problem, self.fix)
    }
}

impl std::error::Error for InvalidAnswer {}

impl From<InvalidAnswer> for crate::InvalidLimit {
    fn from(InvalidAnswer { field, problem, fix }: InvalidAnswer) -> Self {
        Self::new(field, problem, fix)
    }
}

/// A wrong text as an error shows it: cut short, and without characters that would disturb a terminal.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(MAX_SHOWN).map(|letter| if letter.is_control() { ' ' } else { letter }).collect()
}

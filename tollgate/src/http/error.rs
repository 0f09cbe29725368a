//! The error for response settings that cannot be used.

use std::fmt;

use crate::invisible::is_control_or_format;

/// Headers or a body that cannot be sent: the invalid field, the problem, and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidResponse {
    field: &'static str,
    problem: String,
    fix: String,
}

/// Length of an invalid text in an error: enough to find it, and short enough for one line.
const MAX_SHOWN: usize = 40;

impl InvalidResponse {
    pub(super) fn new(field: &'static str, problem: String, fix: impl Into<String>) -> Self {
        Self { field, problem, fix: fix.into() }
    }

    /// Returns the invalid field, by its name in the rule file: `headers`, `template` or `content_type`.
    #[must_use]
    pub fn field(&self) -> &str {
        self.field
    }

    /// Returns the problem.
    #[must_use]
    pub fn problem(&self) -> &str {
        &self.problem
    }

    /// Returns the fix.
    #[must_use]
    pub fn fix(&self) -> &str {
        &self.fix
    }
}

impl fmt::Display for InvalidResponse {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.problem, self.fix)
    }
}

impl std::error::Error for InvalidResponse {}

impl From<InvalidResponse> for crate::InvalidLimit {
    fn from(InvalidResponse { field, problem, fix }: InvalidResponse) -> Self {
        Self::new(field, problem, fix)
    }
}

/// Returns an invalid text for an error message: truncated, and without control and format characters, which could
/// disturb a terminal.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(MAX_SHOWN).map(|letter| if is_control_or_format(letter) { ' ' } else { letter }).collect()
}

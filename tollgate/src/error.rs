//! The error of invalid limits. A denial is not an error: see [`crate::Decision`].

use std::borrow::Cow;
use std::fmt;

/// The error if a limit, rate or limiter cannot be built: the field, the problem and the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidLimit {
    limit: Option<String>,
    field: &'static str,
    problem: String,
    fix: Cow<'static, str>,
}

impl InvalidLimit {
    #[doc(hidden)]
    pub fn new(field: &'static str, problem: String, fix: impl Into<Cow<'static, str>>) -> Self {
        Self { limit: None, field, problem, fix: fix.into() }
    }

    #[doc(hidden)]
    pub fn of_limit(mut self, name: &str) -> Self {
        self.limit = Some(name.chars().take(80).collect());
        self
    }

    /// Returns the name of the limit, or `None` for an error of a rate or of a limiter as a whole.
    #[must_use]
    pub fn limit(&self) -> Option<&str> {
        self.limit.as_deref()
    }

    /// Returns the name of the invalid field as in a rule file: `capacity`, `refill`, `window`.
    #[must_use]
    pub fn field(&self) -> &str {
        self.field
    }

    /// Returns the problem, without the name of the limit.
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

impl fmt::Display for InvalidLimit {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(limit) = &self.limit {
            write!(out, "limit `{limit}`: ")?;
        }
        write!(out, "{}: {}", self.problem, self.fix)
    }
}

impl std::error::Error for InvalidLimit {}

impl From<std::convert::Infallible> for InvalidLimit {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

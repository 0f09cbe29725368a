//! Parts that opening a gate from a rule file needs for every store.

use std::fmt;

use crate::error::InvalidLimit;
use crate::limiter::{Limiter, LimiterBuilder};
use crate::rules::file::{Parsed, Problems};

/// The reason that a gate cannot be opened.
#[derive(Debug)]
#[non_exhaustive]
pub enum OpenError {
    /// The rule file refers to files that cannot be read or used.
    Rules(Problems),
    /// The limits need more memory than the rule file allows.
    Limits(InvalidLimit),
    /// The store settings are invalid.
    Store(String),
}

impl OpenError {
    pub(super) fn store(error: impl fmt::Display) -> Self {
        Self::Store(error.to_string())
    }
}

impl From<Problems> for OpenError {
    fn from(problems: Problems) -> Self {
        Self::Rules(problems)
    }
}

impl From<InvalidLimit> for OpenError {
    fn from(error: InvalidLimit) -> Self {
        Self::Limits(error)
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rules(problems) => problems.fmt(out),
            Self::Limits(error) => error.fmt(out),
            Self::Store(error) => write!(out, "store: {error}"),
        }
    }
}

impl std::error::Error for OpenError {}

/// Returns the settings of the in-memory limiter that a rule file describes.
pub(super) fn limiter(file: &Parsed) -> LimiterBuilder {
    match max_memory(file) {
        Some(bytes) => Limiter::builder().max_memory(bytes),
        None => Limiter::builder(),
    }
}

/// Returns the memory bound of a rule file, in bytes.
pub(super) fn max_memory(file: &Parsed) -> Option<usize> {
    file.max_memory.map(|size| usize::try_from(size.bytes()).unwrap_or(usize::MAX))
}

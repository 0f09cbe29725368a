//! Patterns and address ranges, compiled when the file is loaded.
//!
//! The checker replaces the literal with a name that no file can contain, `@0`. Evaluation finds the compiled value by
//! that name, so nothing is compiled during a request.

use std::any::Any;
use std::net::IpAddr;

use cel::common::types::Type as CelType;
use cel::common::value::{StaticVal, Val};
use ipnet::IpNet;
use regex::Regex;

use super::error::excerpt;
use crate::pattern::{FILE_TOO_LARGE, PatternBudget, PatternError};

/// The interpreter's name for such a value. No expression can use it.
static TYPE: CelType = CelType::new_unspecified_type("prepared");

/// A compiled literal.
#[derive(Clone, Debug)]
pub(super) enum Prepared {
    Pattern(Regex),
    Range(IpNet),
}

impl Prepared {
    /// Compiles a regular expression.
    pub(super) fn pattern(text: &str, budget: &mut PatternBudget) -> Result<Self, String> {
        budget.compile(text).map(Self::Pattern).map_err(|error| match error {
            PatternError::TooLarge => format!("the pattern `{}` is too large; repeat less in it", excerpt(text)),
            PatternError::FileTooLarge => format!("{}; {}", FILE_TOO_LARGE.0, FILE_TOO_LARGE.1),
            PatternError::Syntax(reason) => {
                format!("the pattern `{}` cannot be read: {reason}; write a regular expression", excerpt(text))
            }
        })
    }

    /// Parses a range of addresses, or one address.
    pub(super) fn range(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self::Range(address.into()));
        }
        match text.parse::<IpNet>() {
            Ok(range) if range.addr() == range.network() => Ok(Self::Range(range)),
            Ok(range) => {
                let whole = range.trunc();
                Err(format!(
                    "the range `{range}` begins at {}; write `{whole}`, or `{}` for that address alone",
                    whole.addr(),
                    range.addr()
                ))
            }
            Err(_) => Err(format!(
                "`{}` is not a range of addresses; write one such as `10.0.0.0/8` or `2001:db8::/32`",
                excerpt(text)
            )),
        }
    }

    /// Returns the name that replaces the literal in the tree.
    pub(super) fn name(index: usize) -> String {
        format!("@{index}")
    }

    /// Returns the index in such a name.
    pub(super) fn index(name: &str) -> Option<usize> {
        name.strip_prefix('@')?.parse().ok()
    }
}

impl Val for Prepared {
    fn get_type(&self) -> &CelType {
        &TYPE
    }

    fn cel_type() -> &'static CelType {
        &TYPE
    }

    fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
        Box::new(self.clone())
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

impl StaticVal for Prepared {}

//! Patterns and address ranges, compiled when the file is loaded.
//!
//! The check puts a name that no file can write, `@0`, in the place of the literal; evaluation finds the compiled value
//! by it. So nothing is compiled while a request waits.

use std::any::Any;
use std::net::IpAddr;

use cel::common::types::Type as CelType;
use cel::common::value::{StaticVal, Val};
use ipnet::IpNet;
use regex::Regex;

use super::error::excerpt;

/// What a pattern may take once compiled: far more than any path needs, and ten thousand rules of it still fit.
const MAX_PATTERN_BYTES: usize = 256 << 10;

/// What the interpreter calls such a value; no expression can name it.
static TYPE: CelType = CelType::new_unspecified_type("prepared");

/// A literal that was compiled.
#[derive(Clone, Debug)]
pub(super) enum Prepared {
    Pattern(Regex),
    Range(IpNet),
}

impl Prepared {
    /// A regular expression. Matching it takes time in proportion to the text, whatever the two are.
    pub(super) fn pattern(text: &str) -> Result<Self, String> {
        let built =
            regex::RegexBuilder::new(text).size_limit(MAX_PATTERN_BYTES).dfa_size_limit(MAX_PATTERN_BYTES).build();
        built.map(Self::Pattern).map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => {
                format!("the pattern `{}` is too large; repeat less in it", excerpt(text))
            }
            // The crate draws the pattern with a mark below it, and says what is wrong in the last line.
            other => {
                let drawn = other.to_string();
                let reason = drawn.lines().last().unwrap_or_default().trim_start_matches("error: ");
                format!("the pattern `{}` cannot be read: {reason}; write a regular expression", excerpt(text))
            }
        })
    }

    /// A range of addresses, or one address.
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

    /// The name that stands for the literal in the tree.
    pub(super) fn name(index: usize) -> String {
        format!("@{index}")
    }

    /// The index that such a name has.
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

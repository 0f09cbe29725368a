//! What goes wrong with a store.

use std::fmt;

/// The longest text of a store that is repeated: enough to know it by, in one line of a log.
const MAX_DETAIL_BYTES: usize = 200;

/// Why a store could not be asked or did not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreError {
    kind: Kind,
    detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Unavailable,
    TooLate,
    Busy,
    Refused,
    NotOurs,
}

impl StoreError {
    pub(super) fn unavailable(detail: &str) -> Self {
        Self { kind: Kind::Unavailable, detail: one_line(detail) }
    }

    pub(super) fn too_late() -> Self {
        Self { kind: Kind::TooLate, detail: String::new() }
    }

    pub(super) fn busy() -> Self {
        Self { kind: Kind::Busy, detail: String::new() }
    }

    pub(super) fn refused(detail: &str) -> Self {
        Self { kind: Kind::Refused, detail: one_line(detail) }
    }

    /// What the script said of one key.
    pub(super) fn of_key(why: &str) -> Self {
        let not_ours = why.contains("WRONGTYPE") || why.contains("holds something else");
        Self { kind: if not_ours { Kind::NotOurs } else { Kind::Refused }, detail: one_line(why) }
    }

    /// Whether the store did not answer, or not in time.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        matches!(self.kind, Kind::Unavailable | Kind::TooLate)
    }

    /// Whether the store answered that it will not, for example because its memory is full.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        self.kind == Kind::Refused
    }

    /// Whether the key is taken by data that is not a limiter's, which is left alone.
    #[must_use]
    pub fn is_not_ours(&self) -> bool {
        self.kind == Kind::NotOurs
    }

    /// Whether more is waiting for the store already than it can be expected to answer in time.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.kind == Kind::Busy
    }

    /// What the store or the system said, in its own words, such as `Connection refused (os error 111)`, in one line and
    /// cut short; if neither said anything, what they did not do.
    #[must_use]
    pub fn detail(&self) -> &str {
        match self.kind {
            Kind::TooLate => "no answer in time",
            Kind::Busy => "too much is waiting already",
            Kind::Unavailable | Kind::Refused | Kind::NotOurs => &self.detail,
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn fix(&self) -> &'static str {
        match self.kind {
            Kind::Unavailable => "start it, or correct its URL",
            Kind::TooLate => "look at its load and the way to it, or raise store_timeout",
            Kind::Busy => "add nodes or use leases",
            Kind::Refused => "look at its memory, and at what its user may do",
            Kind::NotOurs => "move that data elsewhere",
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Unavailable => write!(out, "the store is not available: {}", self.detail),
            Kind::TooLate => out.write_str("the store did not answer in time"),
            Kind::Busy => out.write_str("too much is waiting for the store already"),
            Kind::Refused => write!(out, "the store refused: {}", self.detail),
            Kind::NotOurs => write!(out, "the key holds data that is not a limiter's ({})", self.detail),
        }?;
        write!(out, "; {}", self.fix())
    }
}

impl std::error::Error for StoreError {}

/// What was said, in one line that is not too long. What answers at the address of a store need not be one, and may say
/// anything.
fn one_line(said: &str) -> String {
    let clean: String = said.trim().chars().map(|letter| if letter.is_control() { ' ' } else { letter }).collect();
    if clean.len() <= MAX_DETAIL_BYTES {
        return clean;
    }
    let end = (0..=MAX_DETAIL_BYTES).rev().find(|end| clean.is_char_boundary(*end)).unwrap_or(0);
    format!("{}…", &clean[..end])
}

/// Why a limiter could not be set up: a setting that can never work. A Redis that is down is no such thing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectError(String);

impl ConnectError {
    pub(super) fn new(problem: String) -> Self {
        Self(problem)
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for ConnectError {}

impl From<crate::InvalidLimit> for ConnectError {
    fn from(error: crate::InvalidLimit) -> Self {
        Self(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_store_says_is_one_line_that_is_not_too_long() {
        let made = [StoreError::unavailable, StoreError::refused, StoreError::of_key];
        for error in made.map(|made| made(&format!("two\r\nlines\x1b[31m{}\n", "é".repeat(200)))) {
            let begin = "two  lines [31m";
            // The begin has an odd number of bytes, and each letter of the rest has two.
            assert_eq!(error.detail(), format!("{begin}{}…", "é".repeat((MAX_DETAIL_BYTES - begin.len()) / 2)));
        }
        assert_eq!(StoreError::refused("OOM\n").detail(), "OOM");
    }
}

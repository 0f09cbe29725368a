//! What goes wrong with a store.

use std::fmt;

use redis::{ErrorKind, RedisError};

/// The longest text of a store that is repeated: enough to know it by, in one line of a log.
const MAX_DETAIL_BYTES: usize = 200;

/// Why a store could not be asked or did not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreError {
    kind: StoreErrorKind,
    detail: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoreErrorKind {
    Unavailable,
    TimedOut,
    Busy,
    Refused,
    ForeignData,
    /// Its memory is full.
    Full,
    /// Its user lacks a right.
    NoPermission,
    /// It is a replica.
    ReadOnly,
    /// It reads its data from disk.
    Loading,
    /// It cannot save its data, and takes no writes until it can.
    CannotSave,
    /// A script keeps it busy.
    RunsScript,
    /// It does not accept the login.
    Login,
}

impl StoreErrorKind {
    /// What an error reply means, by its code and text.
    fn of_reply(code: &str, text: &str) -> Option<Self> {
        Some(match code {
            "OOM" => Self::Full,
            "NOPERM" => Self::NoPermission,
            "READONLY" => Self::ReadOnly,
            "LOADING" => Self::Loading,
            "MISCONF" => Self::CannotSave,
            "BUSY" => Self::RunsScript,
            "NOAUTH" | "WRONGPASS" => Self::Login,
            // There is no code for it where a script runs the command. Redis 7.0 says the first, later ones the second.
            _ if text.contains("user executing the script can't") => Self::NoPermission,
            _ if text.contains("ACL failure in script") => Self::NoPermission,
            _ => return None,
        })
    }
}

impl StoreError {
    pub(super) fn unavailable(detail: &str) -> Self {
        Self { kind: StoreErrorKind::Unavailable, detail: one_line(detail) }
    }

    pub(super) fn timed_out() -> Self {
        Self { kind: StoreErrorKind::TimedOut, detail: String::new() }
    }

    pub(super) fn busy() -> Self {
        Self { kind: StoreErrorKind::Busy, detail: String::new() }
    }

    pub(super) fn refused(detail: &str) -> Self {
        Self { kind: StoreErrorKind::Refused, detail: one_line(detail) }
    }

    /// What the script reports of one key.
    pub(super) fn of_key(why: &str) -> Self {
        let not_ours = why.contains("WRONGTYPE") || why.contains("holds something else");
        let code = why.split_ascii_whitespace().next().unwrap_or_default();
        let of_server = || StoreErrorKind::of_reply(code, why).unwrap_or(StoreErrorKind::Refused);
        Self { kind: if not_ours { StoreErrorKind::ForeignData } else { of_server() }, detail: one_line(why) }
    }

    /// An error of the client or of the server that is no refusal, unless it is known to be one.
    pub(super) fn of(error: &RedisError) -> Self {
        Self { kind: Self::kind_of(error).unwrap_or(StoreErrorKind::Unavailable), detail: one_line(&error.to_string()) }
    }

    /// A refusal by the server, unless it is known to be something else.
    pub(super) fn refused_by(error: &RedisError) -> Self {
        Self { kind: Self::kind_of(error).unwrap_or(StoreErrorKind::Refused), detail: one_line(&error.to_string()) }
    }

    fn kind_of(error: &RedisError) -> Option<StoreErrorKind> {
        match error.kind() {
            ErrorKind::AuthenticationFailed => Some(StoreErrorKind::Login),
            _ => StoreErrorKind::of_reply(error.code().unwrap_or_default(), &error.to_string()),
        }
    }

    /// The same of one server of several.
    pub(super) fn at(mut self, server: &impl fmt::Display) -> Self {
        self.detail = one_line(&format!("{server}: {}", self.detail()));
        if matches!(self.kind, StoreErrorKind::TimedOut | StoreErrorKind::Busy) {
            self.kind = StoreErrorKind::Unavailable;
        }
        self
    }

    /// Whether the server refuses all writes or all calls, whatever their keys.
    pub(super) fn refuses_all(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Full | StoreErrorKind::NoPermission)
    }

    pub(super) fn is_full(&self) -> bool {
        self.kind == StoreErrorKind::Full
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.kind == StoreErrorKind::ReadOnly
    }

    /// Whether the store did not answer, or not in time.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        match self.kind {
            StoreErrorKind::Busy
            | StoreErrorKind::Refused
            | StoreErrorKind::ForeignData
            | StoreErrorKind::Full
            | StoreErrorKind::NoPermission => false,
            StoreErrorKind::Unavailable
            | StoreErrorKind::TimedOut
            | StoreErrorKind::ReadOnly
            | StoreErrorKind::Loading => true,
            StoreErrorKind::CannotSave | StoreErrorKind::RunsScript | StoreErrorKind::Login => true,
        }
    }

    /// Whether the store answered that it will not, for example because its memory is full.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        matches!(self.kind, StoreErrorKind::Refused | StoreErrorKind::Full | StoreErrorKind::NoPermission)
    }

    /// Whether the key is taken by data that is not a limiter's, which is left alone.
    #[must_use]
    pub fn is_foreign_data(&self) -> bool {
        self.kind == StoreErrorKind::ForeignData
    }

    /// Whether more is waiting for the store already than it can be expected to answer in time.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.kind == StoreErrorKind::Busy
    }

    /// What the store or the system said, in its own words, such as `Connection refused (os error 111)`, in one line and
    /// cut short; if neither said anything, what they did not do.
    #[must_use]
    pub fn detail(&self) -> &str {
        match self.kind {
            StoreErrorKind::TimedOut => "no answer in time",
            StoreErrorKind::Busy => "too much is waiting already",
            _ => &self.detail,
        }
    }

    /// What to do about it.
    #[must_use]
    pub fn fix(&self) -> &'static str {
        match self.kind {
            StoreErrorKind::Unavailable => "start it, or correct its URL",
            StoreErrorKind::TimedOut => "look at its load and the way to it, or raise store_timeout",
            StoreErrorKind::Busy => "add nodes or use leases",
            StoreErrorKind::Refused => "look at its memory, and at what its user may do",
            StoreErrorKind::ForeignData => "move that data elsewhere",
            StoreErrorKind::Full => "raise its maxmemory, or move other data elsewhere",
            StoreErrorKind::NoPermission => {
                "give its user the keys, channels and commands that docs/redis.md lists (ACL SETUSER)"
            }
            StoreErrorKind::ReadOnly => "use the URL of the master, or of sentinels or a cluster, which know it",
            StoreErrorKind::Loading => "wait until it has read its data from disk",
            StoreErrorKind::CannotSave => "look at its disk and its log: it takes no writes until it can save its data",
            StoreErrorKind::RunsScript => "end the script that keeps it busy (SCRIPT KILL)",
            StoreErrorKind::Login => "correct the user and the password",
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            StoreErrorKind::Unavailable
            | StoreErrorKind::ReadOnly
            | StoreErrorKind::Loading
            | StoreErrorKind::CannotSave
            | StoreErrorKind::RunsScript
            | StoreErrorKind::Login => {
                write!(out, "the store is not available: {}", self.detail)
            }
            StoreErrorKind::TimedOut => out.write_str("the store did not answer in time"),
            StoreErrorKind::Busy => out.write_str("too much is waiting for the store already"),
            StoreErrorKind::Refused | StoreErrorKind::Full | StoreErrorKind::NoPermission => {
                write!(out, "the store refused: {}", self.detail)
            }
            StoreErrorKind::ForeignData => write!(out, "the key holds data that is not a limiter's ({})", self.detail),
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

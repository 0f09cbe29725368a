//! Errors of a store and of its settings.

use std::fmt;

use redis::{ErrorKind, RedisError};

use crate::invisible::is_control_or_format;

/// Maximum length of a store's message in an error, so that it fits in a line of a log.
const MAX_DETAIL_BYTES: usize = 200;

/// The reason why a store did not execute a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreError {
    kind: StoreErrorKind,
    detail: String,
    /// The limit whose key the error is about.
    limit: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoreErrorKind {
    Unavailable,
    TimedOut,
    Busy,
    Refused,
    /// The request has more keys than one call can have. It was not sent.
    TooManyKeys,
    ForeignData,
    /// Its memory is full.
    Full,
    /// Its user lacks a permission.
    NoPermission,
    /// It is a node of a cluster, and other nodes have some of the keys.
    InCluster,
    /// It is a replica.
    ReadOnly,
    /// It reads its data from disk.
    Loading,
    /// It cannot save its data, and accepts no writes until it can.
    CannotSave,
    /// It has fewer replicas than it must have to accept writes.
    NoReplicas,
    /// A script keeps it busy.
    RunsScript,
    /// It does not accept the login.
    Login,
    /// It accepts no more clients.
    TooManyClients,
    /// Its reply exceeds a bound, or is not one of a Redis.
    InvalidReply,
}

impl StoreErrorKind {
    /// Classifies an error reply by its code and text.
    fn of_reply(code: &str, text: &str) -> Option<Self> {
        Some(match code {
            "OOM" => Self::Full,
            "NOPERM" => Self::NoPermission,
            "WRONGTYPE" => Self::ForeignData,
            "MOVED" | "ASK" | "CROSSSLOT" | "TRYAGAIN" => Self::InCluster,
            "READONLY" => Self::ReadOnly,
            "LOADING" => Self::Loading,
            "MISCONF" => Self::CannotSave,
            "NOREPLICAS" => Self::NoReplicas,
            "BUSY" => Self::RunsScript,
            "NOAUTH" | "WRONGPASS" => Self::Login,
            _ if text.contains("max number of clients") => Self::TooManyClients,
            // Errors inside a script have no code. The first text is that of Redis 7.0, the second that of later
            // versions.
            _ if text.contains("user executing the script can't") => Self::NoPermission,
            _ if text.contains("ACL failure in script") => Self::NoPermission,
            _ => return None,
        })
    }
}

impl StoreError {
    fn new(kind: StoreErrorKind, detail: String) -> Self {
        Self { kind, detail, limit: None }
    }

    pub(super) fn unavailable(detail: &str) -> Self {
        Self::new(StoreErrorKind::Unavailable, one_line(detail))
    }

    pub(super) fn timed_out() -> Self {
        Self::new(StoreErrorKind::TimedOut, String::new())
    }

    pub(super) fn busy() -> Self {
        Self::new(StoreErrorKind::Busy, String::new())
    }

    pub(super) fn too_many_keys(detail: &str) -> Self {
        Self::new(StoreErrorKind::TooManyKeys, one_line(detail))
    }

    /// Converts an error that the script reports for one key, which belongs to that limit.
    pub(super) fn of_key(why: &str, limit: Option<String>) -> Self {
        let not_ours = why.contains("WRONGTYPE") || why.contains("holds something else");
        let code = why.split_ascii_whitespace().next().unwrap_or_default();
        let of_server = || StoreErrorKind::of_reply(code, why).unwrap_or(StoreErrorKind::Refused);
        Self { limit, ..Self::new(if not_ours { StoreErrorKind::ForeignData } else { of_server() }, one_line(why)) }
    }

    /// Describes data that no limiter wrote.
    pub(super) fn foreign_data(detail: &str) -> Self {
        Self::new(StoreErrorKind::ForeignData, one_line(detail))
    }

    /// Converts an error of the client or the server. An unknown error means that the server is unavailable.
    pub(super) fn of(error: &RedisError) -> Self {
        let kind = Self::kind_of(error).unwrap_or(StoreErrorKind::Unavailable);
        match error.detail() {
            Some(detail) if kind == StoreErrorKind::InvalidReply => Self::new(kind, one_line(detail)),
            _ => Self::new(kind, one_line(&error.to_string())),
        }
    }

    /// Converts a well-formed reply that no Redis sends.
    pub(super) fn invalid_reply(detail: &str) -> Self {
        Self::new(StoreErrorKind::InvalidReply, one_line(detail))
    }

    /// Converts an error that the server sends before any command.
    pub(super) fn of_greeting(text: &str) -> Self {
        let code = text.split_ascii_whitespace().next().unwrap_or_default();
        Self::new(StoreErrorKind::of_reply(code, text).unwrap_or(StoreErrorKind::Unavailable), one_line(text))
    }

    /// Converts an error reply of the server. An unknown error is a refusal.
    pub(super) fn refused_by(error: &RedisError) -> Self {
        Self::new(Self::kind_of(error).unwrap_or(StoreErrorKind::Refused), one_line(&error.to_string()))
    }

    fn kind_of(error: &RedisError) -> Option<StoreErrorKind> {
        match error.kind() {
            ErrorKind::AuthenticationFailed => Some(StoreErrorKind::Login),
            ErrorKind::Parse => Some(StoreErrorKind::InvalidReply),
            _ => StoreErrorKind::of_reply(error.code().unwrap_or_default(), &error.to_string()),
        }
    }

    /// Adds the server to the message.
    pub(super) fn at(mut self, server: &impl fmt::Display) -> Self {
        self.detail = one_line(&format!("{server}: {}", self.detail()));
        self
    }

    /// Returns whether the server refuses writes or calls whatever their keys, so that it cannot decide.
    pub(super) fn refuses_all(&self) -> bool {
        self.is_refused()
    }

    pub(super) fn is_timed_out(&self) -> bool {
        self.kind == StoreErrorKind::TimedOut
    }

    pub(super) fn is_full(&self) -> bool {
        self.kind == StoreErrorKind::Full
    }

    pub(super) fn is_invalid_reply(&self) -> bool {
        self.kind == StoreErrorKind::InvalidReply
    }

    pub(super) fn is_no_permission(&self) -> bool {
        self.kind == StoreErrorKind::NoPermission
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.kind == StoreErrorKind::ReadOnly
    }

    /// Returns whether the store could not be reached, did not reply in time, or cannot serve at the moment.
    #[must_use]
    pub fn is_unavailable(&self) -> bool {
        match self.kind {
            StoreErrorKind::Busy
            | StoreErrorKind::Refused
            | StoreErrorKind::TooManyKeys
            | StoreErrorKind::ForeignData
            | StoreErrorKind::Full
            | StoreErrorKind::NoPermission
            | StoreErrorKind::InCluster => false,
            StoreErrorKind::Unavailable
            | StoreErrorKind::TimedOut
            | StoreErrorKind::ReadOnly
            | StoreErrorKind::Loading => true,
            StoreErrorKind::CannotSave
            | StoreErrorKind::NoReplicas
            | StoreErrorKind::RunsScript
            | StoreErrorKind::Login
            | StoreErrorKind::TooManyClients
            | StoreErrorKind::InvalidReply => true,
        }
    }

    /// Returns whether the store refused the request, for example because its memory is full.
    #[must_use]
    pub fn is_refused(&self) -> bool {
        use StoreErrorKind::{Full, InCluster, NoPermission, Refused};
        matches!(self.kind, Refused | Full | NoPermission | InCluster)
    }

    /// Returns whether the key holds data that no limiter wrote. Such data is left unchanged.
    #[must_use]
    pub fn is_foreign_data(&self) -> bool {
        self.kind == StoreErrorKind::ForeignData
    }

    /// Returns the limit whose key has foreign data.
    pub(super) fn limit_with_foreign_data(&self) -> Option<&str> {
        self.limit.as_deref().filter(|_| self.is_foreign_data())
    }

    /// Returns whether the queue to the store is full: it could not reply in time.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.kind == StoreErrorKind::Busy
    }

    /// Returns the message of the store or the operating system, such as `Connection refused (os error 111)`, shortened
    /// to one line. Without such a message it describes the failure.
    #[must_use]
    pub fn detail(&self) -> &str {
        match self.kind {
            StoreErrorKind::TimedOut if self.detail.is_empty() => "no answer in time",
            StoreErrorKind::Busy if self.detail.is_empty() => "the queue is full",
            _ => &self.detail,
        }
    }

    /// Returns the advice how to fix it.
    #[must_use]
    pub fn fix(&self) -> &'static str {
        match self.kind {
            StoreErrorKind::Unavailable => "start it, or correct its URL",
            StoreErrorKind::TimedOut => "check its load and the network, or raise store_timeout",
            StoreErrorKind::Busy => "add nodes or use leases",
            StoreErrorKind::Refused => "use a Redis 7 or Valkey that has all commands that docs/redis.md lists",
            StoreErrorKind::TooManyKeys => "send fewer limits and keys in one request",
            StoreErrorKind::ForeignData => "move that data to another key, or set a prefix",
            StoreErrorKind::Full => "raise its maxmemory, or move other data elsewhere",
            StoreErrorKind::NoPermission => {
                "give its user the keys, channels and commands that docs/redis.md lists (ACL SETUSER)"
            }
            StoreErrorKind::InCluster => "use a redis+cluster:// URL: it is a node of a cluster",
            StoreErrorKind::ReadOnly => "use the URL of the master, or a redis+sentinel:// or redis+cluster:// URL",
            StoreErrorKind::Loading => "wait until it has read its data from disk",
            StoreErrorKind::CannotSave => "check its disk and its log: it accepts no writes until it can save its data",
            StoreErrorKind::NoReplicas => "start its replicas, or lower its min-replicas-to-write",
            StoreErrorKind::RunsScript => "end the script that keeps it busy (SCRIPT KILL)",
            StoreErrorKind::Login => "correct the user and the password",
            StoreErrorKind::TooManyClients => "raise its maxclients, or close connections of other clients",
            StoreErrorKind::InvalidReply => {
                "make sure that a Redis or Valkey is at its address (docs/redis.md lists the bounds on replies)"
            }
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
            | StoreErrorKind::NoReplicas
            | StoreErrorKind::RunsScript
            | StoreErrorKind::Login
            | StoreErrorKind::TooManyClients
            | StoreErrorKind::InvalidReply => {
                write!(out, "the store is not available: {}", self.detail)
            }
            StoreErrorKind::TimedOut | StoreErrorKind::Busy if !self.detail.is_empty() => {
                write!(out, "the store is not available: {}", self.detail)
            }
            StoreErrorKind::TimedOut => out.write_str("the store did not answer in time"),
            StoreErrorKind::Busy => out.write_str("the queue to the store is full"),
            StoreErrorKind::Refused
            | StoreErrorKind::Full
            | StoreErrorKind::NoPermission
            | StoreErrorKind::InCluster => {
                write!(out, "the store refused: {}", self.detail)
            }
            StoreErrorKind::TooManyKeys => out.write_str(&self.detail),
            StoreErrorKind::ForeignData => {
                out.write_str("the key holds data that no limiter wrote (")?;
                if let Some(limit) = &self.limit {
                    write!(out, "limit `{limit}`: ")?;
                }
                write!(out, "{})", self.detail)
            }
        }?;
        write!(out, ": {}", self.fix())
    }
}

impl std::error::Error for StoreError {}

/// Shortens a message to one line without control and format characters. The server at the address of a store need not be a Redis,
/// and may send anything.
fn one_line(message: &str) -> String {
    let clean: String =
        message.trim().chars().map(|letter| if is_control_or_format(letter) { ' ' } else { letter }).collect();
    if clean.len() <= MAX_DETAIL_BYTES {
        return clean;
    }
    let end = (0..=MAX_DETAIL_BYTES).rev().find(|end| clean.is_char_boundary(*end)).unwrap_or(0);
    format!("{}…", &clean[..end])
}

/// An invalid setting of a limiter or a store. A Redis that is down is not such an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectError {
    problem: String,
    fix: String,
}

impl ConnectError {
    pub(super) fn new(problem: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { problem: problem.into(), fix: fix.into() }
    }

    /// Adds the store to the problem.
    pub(super) fn of_store(mut self, name: &str) -> Self {
        self.problem = format!("store `{name}`: {}", self.problem);
        self
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

impl fmt::Display for ConnectError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.problem, self.fix)
    }
}

impl std::error::Error for ConnectError {}

impl From<crate::InvalidLimit> for ConnectError {
    fn from(error: crate::InvalidLimit) -> Self {
        let limit = error.limit().map_or_else(String::new, |limit| format!("limit `{limit}`: "));
        Self::new(format!("{limit}{}", error.problem()), error.fix())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_a_store_are_described_with_the_fix() {
        let kinds = [
            StoreErrorKind::Unavailable,
            StoreErrorKind::TimedOut,
            StoreErrorKind::Busy,
            StoreErrorKind::Refused,
            StoreErrorKind::TooManyKeys,
            StoreErrorKind::ForeignData,
            StoreErrorKind::Full,
            StoreErrorKind::NoPermission,
            StoreErrorKind::InCluster,
            StoreErrorKind::ReadOnly,
            StoreErrorKind::Loading,
            StoreErrorKind::CannotSave,
            StoreErrorKind::NoReplicas,
            StoreErrorKind::RunsScript,
            StoreErrorKind::Login,
            StoreErrorKind::TooManyClients,
            StoreErrorKind::InvalidReply,
        ];
        let lines = kinds.map(|kind| StoreError { kind, ..StoreError::unavailable("REASON") }.to_string());
        let without_detail = [StoreError::timed_out(), StoreError::busy()].map(|error| error.to_string());
        let lines = [&lines[..], &without_detail].concat();
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn messages_of_a_store_are_shortened_to_one_line() {
        let made = [StoreError::unavailable, StoreError::too_many_keys, |why: &str| StoreError::of_key(why, None)];
        for error in made.map(|made| made(&format!("two\r\nlines\x1b[31m{}\n", "é".repeat(200)))) {
            let beginning = "two  lines [31m";
            // The beginning has an odd number of bytes, and each of the other letters has two.
            assert_eq!(error.detail(), format!("{beginning}{}…", "é".repeat((MAX_DETAIL_BYTES - beginning.len()) / 2)));
        }
        assert_eq!(StoreError::unavailable("OOM\n").detail(), "OOM");
    }
}

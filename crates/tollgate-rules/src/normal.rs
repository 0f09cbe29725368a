//! The normal form: one reading of a request for matching, keys, plans, block lists, expressions, routing and
//! forwarding.
//!
//! A limit is only as good as its reading of a request. If the service reads the same bytes differently, a client can
//! bypass the limit with another spelling. So everything that rules read is normalized first, and the gateway forwards
//! the normal form. Where services disagree and each reading is legitimate (encoded slashes, `;` parameters), a limit
//! applies if any reading matches it, unless [`PathReading`] selects the one that the service uses. A request that
//! cannot be read safely is [`Unreadable`] and refused.
//!
//! `docs/normal-form.md` describes the form for users.
//!
//! Not here: framing (where a message ends), which the server decides before anything here sees a request, and header
//! names, which the server filters.

pub(super) mod address;
pub(super) mod base64;
pub(super) mod cookies;
mod credentials;
pub(super) mod header;
pub(super) mod host;
pub(super) mod method;
mod name;
pub(super) mod path;
pub(super) mod query;
pub(super) mod signed_token;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

pub use self::header::is_padded;
pub use self::host::{check_host, is_same_host};
pub use self::method::check_method;
pub use self::path::{CleanPath, EncodedSlash, PathCase, PathParameters, PathReading, PathReadings, without_case};
pub use self::query::without_names_of;

/// The reason that a request cannot be read safely. The gateway refuses it with 400.
///
/// `Display` describes the ambiguity and how to avoid it, or the setting that allows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unreadable {
    /// A `.` or `..` segment that appears only after decoding, or carries `;` parameters.
    DotSegment,
    /// A control character in the path, raw or encoded.
    ControlCharacter,
    /// A raw backslash in the path, which some services read as a slash.
    Backslash,
    /// An encoded slash or backslash, where `paths.encoded_slash` is `refuse`.
    EncodedSlash,
    /// A `;` in the path, where `paths.parameters` is `refuse`.
    PathParameters,
    /// A `Host` that is not a host with an optional port.
    InvalidHost,
    /// A registered method in another case, such as `post`.
    MethodCase,
    /// `*` as the target of a method other than `OPTIONS`.
    AsteriskTarget,
    /// A header value that begins or ends with white space, which HTTP/2 forbids.
    PaddedHeader(Box<str>),
    /// A header that a limit reads, with several differing values.
    DuplicateHeader(Box<str>),
    /// A cookie that a limit reads, with several differing values.
    DuplicateCookie(Box<str>),
    /// A query parameter that a limit reads, with several differing values.
    DuplicateParameter(Box<str>),
    /// A cookie that a limit reads, with a quote that is not closed in it or before it.
    InvalidCookie(Box<str>),
    /// A descriptor that a limit reads, with several differing values.
    DuplicateDescriptor(Box<str>),
    /// A target or an `:authority` that names another host than the `Host` header, or several `Host` headers.
    SeveralHosts,
    /// Credentials or a signed token that upstreams read differently. Names the header, the cookie or the parameter that
    /// has them, as in `header authorization`.
    InvalidCredentials(Box<str>),
    /// A header with the cost of the request that is not a whole number.
    InvalidCost(Box<str>),
}

impl Unreadable {
    /// All reasons, in the order of the metric's labels.
    pub const REASONS: [&'static str; 17] = [
        "dot_segment",
        "control_character",
        "backslash",
        "encoded_slash",
        "path_parameters",
        "invalid_host",
        "method_case",
        "asterisk_target",
        "padded_header",
        "duplicate_header",
        "duplicate_cookie",
        "duplicate_parameter",
        "several_hosts",
        "invalid_credentials",
        "invalid_cost",
        "invalid_cookie",
        "duplicate_descriptor",
    ];

    /// Returns the reason as one word, for metrics and programs.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        Self::REASONS[self.number()]
    }

    /// Returns the index of the reason in [`REASONS`](Self::REASONS).
    #[must_use]
    pub fn number(&self) -> usize {
        match self {
            Self::DotSegment => 0,
            Self::ControlCharacter => 1,
            Self::Backslash => 2,
            Self::EncodedSlash => 3,
            Self::PathParameters => 4,
            Self::InvalidHost => 5,
            Self::MethodCase => 6,
            Self::AsteriskTarget => 7,
            Self::PaddedHeader(_) => 8,
            Self::DuplicateHeader(_) => 9,
            Self::DuplicateCookie(_) => 10,
            Self::DuplicateParameter(_) => 11,
            Self::SeveralHosts => 12,
            Self::InvalidCredentials(_) => 13,
            Self::InvalidCost(_) => 14,
            Self::InvalidCookie(_) => 15,
            Self::DuplicateDescriptor(_) => 16,
        }
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::DotSegment => {
                "The path has a dot segment (`.` or `..`, plain or encoded): send the path it resolves to."
            }
            Self::ControlCharacter => "The path has a control character: remove it.",
            Self::Backslash => "The path has a backslash: use a slash, or encode it as %5C.",
            Self::EncodedSlash => {
                "The path has an encoded slash: send a plain slash; the setting paths.encoded_slash allows it."
            }
            Self::PathParameters => {
                "The path has a semicolon: encode it as %3B; the setting paths.parameters allows it."
            }
            Self::InvalidHost => "The Host header is invalid: send a host name or address, with an optional port.",
            Self::MethodCase => "The method is a registered one in another case: send it in upper case.",
            Self::AsteriskTarget => "Only OPTIONS may ask for *: send a path.",
            Self::PaddedHeader(name) => {
                return write!(out, "The header {name} begins or ends with white space: remove it.");
            }
            Self::DuplicateHeader(name) => {
                return write!(out, "The header {name} has several differing values: send it once.");
            }
            Self::DuplicateCookie(name) => {
                return write!(out, "The cookie {name} has several differing values: send it once.");
            }
            Self::DuplicateDescriptor(name) => {
                return write!(out, "The descriptor {name} has several differing values: send it once.");
            }
            Self::InvalidCookie(name) => {
                return write!(out, "The cookie {name} has an open quote in it or before it: close the quote.");
            }
            Self::DuplicateParameter(name) => {
                return write!(out, "The query parameter {name} has several differing values: send it once.");
            }
            Self::SeveralHosts => {
                "The request names more than one host: send one Host header, with the host of the target or of :authority."
            }
            Self::InvalidCredentials(place) => {
                return write!(
                    out,
                    "The {place} is not one token that all servers read alike: send one token without quotes, spaces and \
                     other special characters, and with padding only at its end."
                );
            }
            Self::InvalidCost(name) => {
                return write!(out, "The header {name} is not a whole number: send digits only, or leave it out.");
            }
        };
        out.write_str(text)
    }
}

impl std::error::Error for Unreadable {}

/// The reason that a rule cannot read a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ReadError {
    /// The request is ambiguous.
    Unreadable(Unreadable),
    /// The server does not know the client's address, although it serves clients.
    ClientAddressUnknown,
}

impl From<Unreadable> for ReadError {
    fn from(problem: Unreadable) -> Self {
        Self::Unreadable(problem)
    }
}

/// Collects errors while rules read a request. The read itself returns its best result, and the rule set refuses the
/// request afterwards.
#[derive(Debug, Default)]
pub struct ReadErrors {
    /// Read after every rule, so it has to be cheap. Only one thread uses it, but expressions require `Sync`.
    is_some: AtomicBool,
    first: Mutex<Option<ReadError>>,
}

impl ReadErrors {
    #[cold]
    pub(crate) fn note(&self, problem: impl Into<ReadError>) {
        self.is_some.store(true, Relaxed);
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| problem.into());
    }

    #[inline(always)]
    pub(crate) fn take(&self) -> Option<ReadError> {
        if self.is_some.load(Relaxed) { self.take_noted() } else { None }
    }

    #[cold]
    fn take_noted(&self) -> Option<ReadError> {
        self.is_some.store(false, Relaxed);
        self.first.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Returns the value of a descriptor. Several differing values are recorded as an error.
pub(super) fn descriptor<'a>(entries: &'a [(&str, &'a str)], name: &str, errors: &ReadErrors) -> Option<&'a str> {
    let values = entries.iter().filter(|(given, _)| *given == name).map(|(_, value)| *value);
    only(values, errors, || Unreadable::DuplicateDescriptor(name.into()))
}

/// Returns the single value among normalized `values`. Differing values are recorded as an error, and the first one is
/// returned.
pub(super) fn only<T: PartialEq>(
    mut values: impl Iterator<Item = T>,
    errors: &ReadErrors,
    differ: impl FnOnce() -> Unreadable,
) -> Option<T> {
    let first = values.next()?;
    if values.any(|other| other != first) {
        errors.note(differ());
    }
    Some(first)
}

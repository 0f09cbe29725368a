//! A request as rules see it: the facts, and values derived from them on demand.

use std::borrow::Cow;
use std::cell::{Cell, OnceCell};
use std::net::IpAddr;
use std::sync::Arc;

use http::HeaderName;
use http::header::HOST;
use serde_json::{Map, Value};
use tollgate_http::TokenError;

use super::client::TrustedProxies;
use super::normal::path::Readings;
use super::normal::{self, PathCase, PathReading, ReadError, ReadErrors, Unreadable, cookies, header, host, query};
use super::{Facts, FailedExpressions, claims};

/// The claims of a verified token.
pub(super) type Claims = Arc<Map<String, Value>>;

/// Finds and verifies the token of a request.
pub type Tokens = Arc<dyn Fn(&Facts<'_>, &ReadErrors) -> Token + Send + Sync>;

/// The result of verifying the token of a request.
pub struct Token {
    /// The claims, or the reason that there are none.
    pub claims: Result<Claims, TokenError>,
    /// The number of signatures that were verified.
    pub signatures: u8,
}

/// The result of verifying the token of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenStatus {
    /// No rule needed the token.
    #[default]
    NotRead,
    /// The token is valid.
    Valid,
    /// The token is invalid, or there is none.
    Invalid(TokenError),
}

impl TokenStatus {
    /// Returns the reason that the token is invalid.
    #[must_use]
    pub fn error(self) -> Option<TokenError> {
        match self {
            Self::Invalid(error) => Some(error),
            Self::NotRead | Self::Valid => None,
        }
    }
}

/// A request as rules see it, for conditions, keys and costs in closures. All values are in their normal form.
pub struct Request<'a> {
    facts: &'a Facts<'a>,
    path_reading: PathReading,
    readings: OnceCell<Result<Readings<'a>, Unreadable>>,
    /// The index of the reading that [`path`](Self::path) returns.
    current: Cell<usize>,
    errors: ReadErrors,
    proxies: &'a TrustedProxies,
    tokens: Option<&'a Tokens>,
    client: OnceCell<Option<IpAddr>>,
    token: OnceCell<ReadToken>,
    /// Records expressions that fail, if the request is only explained.
    failed: Option<&'a FailedExpressions>,
}

/// The token of a request, once it has been read.
struct ReadToken {
    /// `None` if the rules verify no tokens.
    token: Option<Token>,
    /// The error of an ambiguous token.
    problem: Option<ReadError>,
}

impl<'a> Request<'a> {
    pub(super) fn new(
        facts: &'a Facts<'a>,
        path_reading: PathReading,
        proxies: &'a TrustedProxies,
        tokens: Option<&'a Tokens>,
    ) -> Self {
        Self {
            facts,
            path_reading: facts.given_path_reading().unwrap_or(path_reading),
            readings: OnceCell::new(),
            current: Cell::new(0),
            errors: ReadErrors::default(),
            proxies,
            tokens,
            client: OnceCell::new(),
            token: OnceCell::new(),
            failed: None,
        }
    }

    /// Records failed expressions instead of counting them.
    pub(crate) fn recording(self, failed: &'a FailedExpressions) -> Self {
        Self { failed: Some(failed), ..self }
    }

    #[doc(hidden)]
    #[inline]
    pub fn failed_expressions(&self) -> Option<&FailedExpressions> {
        self.failed
    }

    /// Returns the facts.
    pub fn facts(&self) -> &Facts<'a> {
        self.facts
    }

    /// Returns the path in its normal form: decoded where that changes nothing, with `.`, `..` and empty segments
    /// resolved, and without a trailing slash. If a path has several readings, conditions are evaluated for each.
    #[must_use]
    pub fn path(&self) -> &str {
        self.path_readings().get(self.current.get()).map_or(self.facts.path(), |path| path)
    }

    /// Returns the value of a header, trimmed. A request with several differing values is refused, except that several
    /// lines of cookies are joined. `Authorization` has one space after its scheme, which is written as in `Bearer`.
    #[must_use]
    #[inline]
    pub fn header(&self, name: &HeaderName) -> Option<Cow<'a, [u8]>> {
        if *name == HOST {
            host::check_only_host(self.facts, &self.errors);
        }
        header::header(self.facts.all_headers()?, name, &self.errors)
    }

    /// Returns the value of a header for a key.
    #[inline]
    pub(super) fn key_header(&self, name: &HeaderName) -> Option<Cow<'a, [u8]>> {
        header::key(self.facts.all_headers()?, name, &self.errors)
    }

    /// Refuses the request once the rule that reads it has been checked.
    #[cold]
    pub(super) fn refuse(&self, problem: Unreadable) {
        self.errors.note(problem);
    }

    /// Returns the value of a cookie: unquoted, unescaped and trimmed. A request with several differing values is
    /// refused.
    #[must_use]
    pub fn cookie(&self, name: &str) -> Option<Cow<'a, [u8]>> {
        cookies::cookie(self.facts.all_headers()?, name, &self.errors)
    }

    /// Returns the value of a query parameter: decoded and trimmed. A request with several differing values is refused.
    #[must_use]
    pub fn query(&self, name: &str) -> Option<Cow<'a, str>> {
        query::query(self.facts.query()?, name, &self.errors)
    }

    /// Returns the value of a descriptor. A request with several differing values is refused.
    pub(super) fn descriptor(&self, name: &str) -> Option<&'a str> {
        normal::descriptor(self.facts.all_descriptors(), name, &self.errors)
    }

    /// Returns the host in lower case, without its port and trailing dot. An IPv6 address is in its shortest text.
    #[must_use]
    pub fn host(&self) -> Option<Cow<'a, str>> {
        host::host(self.facts, &self.errors)
    }

    /// Returns the client's address: the peer's, or the address that a trusted proxy reports.
    ///
    /// A `RateLimitLayer` of `tollgate-tower` that does not know the address refuses the request.
    #[must_use]
    pub fn client(&self) -> Option<IpAddr> {
        let client = *self.client.get_or_init(|| self.proxies.client(self.facts));
        if client.is_none() && self.facts.requires_address() {
            // Every rule that reads the address must see the error.
            self.errors.note(ReadError::ClientAddressUnknown);
        }
        client
    }

    /// Returns the claims of the request's token, if it is valid.
    #[must_use]
    pub fn claims(&self) -> Option<&Map<String, Value>> {
        self.token()?.claims.as_deref().ok()
    }

    fn token(&self) -> Option<&Token> {
        let ReadToken { token, problem } = self.token.get_or_init(|| {
            let errors = ReadErrors::default();
            let token = self.tokens.map(|tokens| tokens(self.facts, &errors));
            ReadToken { token, problem: errors.take() }
        });
        // Every rule that reads the token must see the error.
        if let Some(problem) = problem {
            self.errors.note(problem.clone());
        }
        token.as_ref()
    }

    /// Returns the result of verifying the request's token, without verifying it now.
    #[must_use]
    pub fn token_status(&self) -> TokenStatus {
        match self.verified_token() {
            Some(Token { claims: Ok(_), .. }) => TokenStatus::Valid,
            Some(Token { claims: Err(error), .. }) => TokenStatus::Invalid(*error),
            None => TokenStatus::NotRead,
        }
    }

    /// Returns the number of signatures that were verified for the request.
    pub(crate) fn signatures_verified(&self) -> u8 {
        self.verified_token().map_or(0, |token| token.signatures)
    }

    fn verified_token(&self) -> Option<&Token> {
        self.token.get()?.token.as_ref()
    }

    /// Returns a claim as text: a string unchanged, a number or a boolean in JSON syntax. If no claim has the whole
    /// name, dots select members of objects.
    #[must_use]
    pub fn claim(&self, name: &str) -> Option<Cow<'_, str>> {
        claims::text(self.claims()?, name)
    }
}

/// Readings and errors.
impl<'a> Request<'a> {
    /// Returns the readings of the path. A path that cannot be read safely is recorded as an error.
    pub(super) fn readings(&self) -> Option<&Readings<'a>> {
        match self.readings.get_or_init(|| Readings::new(self.facts.path(), self.path_reading)) {
            Ok(readings) => Some(readings),
            Err(problem) => {
                self.errors.note(problem.clone());
                None
            }
        }
    }

    /// Returns the same as a slice, which is empty if the path cannot be read safely.
    pub(super) fn path_readings(&self) -> &[Cow<'a, str>] {
        self.readings().map_or(&[], Readings::as_slice)
    }

    /// Returns `true` if something has read the path, and it has several readings.
    pub(super) fn has_several_readings(&self) -> bool {
        self.readings.get().is_some_and(|readings| readings.as_ref().is_ok_and(|all| all.as_slice().len() > 1))
    }

    /// Returns `true` if a key may have several readings, or several names of the client.
    pub(super) fn has_several_keys(&self) -> bool {
        self.has_several_readings() || self.has_two_fingerprints()
    }

    /// Returns `true` if the client can present its certificate with another fingerprint.
    pub(super) fn has_two_fingerprints(&self) -> bool {
        self.facts.client_certificate().is_some_and(|certificate| certificate.other_fingerprint.is_some())
    }

    /// Returns the result of `read` for each reading of the path after the first. There are none if nothing has read the
    /// path.
    pub(super) fn for_other_readings<T>(&self, read: impl Fn() -> T) -> impl Iterator<Item = T> {
        let count = self.readings.get().and_then(|all| all.as_ref().ok()).map_or(1, |all| all.as_slice().len());
        (1..count).map(move |number| {
            self.current.set(number);
            let result = read();
            self.current.set(0);
            result
        })
    }

    pub(super) fn path_case(&self) -> PathCase {
        self.path_reading.case
    }

    /// Returns `true` if the path has upper-case letters.
    pub(super) fn has_upper_case_path(&self) -> bool {
        self.readings().is_some_and(Readings::has_upper_case)
    }

    /// Returns `true` if a condition holds for any reading of the path.
    pub(super) fn in_any_reading(&self, holds: impl Fn() -> bool) -> bool {
        holds() || self.for_other_readings(&holds).any(|held| held)
    }

    /// Returns `true` if a condition holds for every reading of the path.
    pub(super) fn in_every_reading(&self, holds: impl Fn() -> bool) -> bool {
        holds() && self.for_other_readings(&holds).all(|held| held)
    }

    /// Returns the largest value over all readings of the path.
    pub(super) fn max_over_readings(&self, number: impl Fn() -> u64) -> u64 {
        let first = number();
        self.for_other_readings(number).fold(first, u64::max)
    }

    #[doc(hidden)]
    #[inline]
    pub fn errors(&self) -> &ReadErrors {
        &self.errors
    }
}

impl std::fmt::Debug for Request<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Request").field("facts", &self.facts).field("path", &self.path()).finish_non_exhaustive()
    }
}

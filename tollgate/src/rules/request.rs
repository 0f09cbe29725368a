//! A request as rules see it: the facts, and what is found out from them once it is asked for.

use std::borrow::Cow;
use std::cell::{Cell, OnceCell};
use std::net::IpAddr;
use std::sync::Arc;

use http::HeaderName;
use serde_json::{Map, Value};

use super::client::TrustedProxies;
use super::normal::path::Readings;
use super::normal::{PathCase, PathReading, ReadErrors, Unreadable};
use super::normal::{cookies, header, host, query};
use super::{Facts, FailedExpressions, claims};
use crate::http::TokenError;

/// The claims of a token that was verified.
pub(super) type Claims = Arc<Map<String, Value>>;

/// Finds and verifies the token of a request.
pub(super) type Tokens = Arc<dyn Fn(&Facts<'_>, &ReadErrors) -> Token + Send + Sync>;

/// What came of the token of a request.
pub(super) struct Token {
    /// Its claims, or why there are none.
    pub(super) claims: Result<Claims, TokenError>,
    /// How many signatures were verified to know that.
    pub(super) signatures: u8,
}

/// Whether a token was read for a request, and what came of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenStatus {
    /// No rule needed to know.
    #[default]
    NotRead,
    /// It is valid.
    Valid,
    /// It is not valid, or there is none.
    Invalid(TokenError),
}

impl TokenStatus {
    /// Why the token is not valid.
    #[must_use]
    pub fn error(self) -> Option<TokenError> {
        match self {
            Self::Invalid(error) => Some(error),
            Self::NotRead | Self::Valid => None,
        }
    }
}

/// A request as rules see it, for conditions, keys and costs that are closures. Everything is in its normal form.
pub struct Request<'a> {
    facts: &'a Facts<'a>,
    path_reading: PathReading,
    readings: OnceCell<Result<Readings<'a>, Unreadable>>,
    /// The reading that [`path`](Self::path) returns.
    current: Cell<usize>,
    errors: ReadErrors,
    proxies: &'a TrustedProxies,
    tokens: Option<&'a Tokens>,
    client: OnceCell<Option<IpAddr>>,
    token: OnceCell<ReadToken>,
    /// Where expressions that fail are recorded, if the request is only explained.
    failed: Option<&'a FailedExpressions>,
}

/// The token of a request, once it was read.
struct ReadToken {
    /// `None` if the rules know no tokens.
    token: Option<Token>,
    /// Why it cannot be read in one way.
    problem: Option<Unreadable>,
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

    /// The same request, with its failed expressions recorded rather than counted.
    pub(crate) fn recording(self, failed: &'a FailedExpressions) -> Self {
        Self { failed: Some(failed), ..self }
    }

    pub(super) fn failed_expressions(&self) -> Option<&FailedExpressions> {
        self.failed
    }

    /// What was given.
    pub fn facts(&self) -> &Facts<'a> {
        self.facts
    }

    /// Returns the path in its normal form: unescaped where that changes nothing, with `.`, `..` and empty segments
    /// resolved, without a slash at the end. Where a path has several readings, conditions are asked about each.
    #[must_use]
    pub fn path(&self) -> &str {
        self.path_readings().get(self.current.get()).map_or(self.facts.path(), |path| path)
    }

    /// Returns the value of a header without the white space around it. A request with several differing values is
    /// refused.
    #[must_use]
    #[inline]
    pub fn header(&self, name: &HeaderName) -> Option<&'a [u8]> {
        header::header(self.facts.all_headers()?, name, &self.errors)
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

    /// Returns the host without its port and without the dot that may end it. Its case means nothing.
    #[must_use]
    pub fn host(&self) -> Option<&'a str> {
        host::host(self.facts, &self.errors)
    }

    /// The client's address: the peer's, or if that is a trusted proxy, whom it speaks for.
    #[must_use]
    pub fn client(&self) -> Option<IpAddr> {
        *self.client.get_or_init(|| self.proxies.client(self.facts))
    }

    /// The claims of the request's token, if it has one that verifies.
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
        // Every rule that reads the token has to know.
        if let Some(problem) = problem {
            self.errors.note(problem.clone());
        }
        token.as_ref()
    }

    /// Whether its token was read, and what came of it. It is not read for this.
    #[must_use]
    pub fn token_status(&self) -> TokenStatus {
        match self.verified_token() {
            Some(Token { claims: Ok(_), .. }) => TokenStatus::Valid,
            Some(Token { claims: Err(error), .. }) => TokenStatus::Invalid(*error),
            None => TokenStatus::NotRead,
        }
    }

    /// How many signatures were verified for it.
    pub(crate) fn signatures_verified(&self) -> u8 {
        self.verified_token().map_or(0, |token| token.signatures)
    }

    fn verified_token(&self) -> Option<&Token> {
        self.token.get()?.token.as_ref()
    }

    /// A claim as text: a string as it is, a number or a truth value as it is written. A name with dots looks
    /// into objects where no claim has the whole name.
    #[must_use]
    pub fn claim(&self, name: &str) -> Option<Cow<'_, str>> {
        claims::text(self.claims()?, name)
    }
}

/// Readings and errors.
impl<'a> Request<'a> {
    /// The readings of the path. That a path cannot be read safely is a problem.
    pub(super) fn readings(&self) -> Option<&Readings<'a>> {
        match self.readings.get_or_init(|| Readings::new(self.facts.path(), self.path_reading)) {
            Ok(readings) => Some(readings),
            Err(problem) => {
                self.errors.note(problem.clone());
                None
            }
        }
    }

    /// The same as a list, which is empty if the path cannot be read safely.
    pub(super) fn path_readings(&self) -> &[Cow<'a, str>] {
        self.readings().map_or(&[], Readings::as_slice)
    }

    pub(super) fn path_case(&self) -> PathCase {
        self.path_reading.case
    }

    /// Returns whether the path has letters whose case counts and is not the usual one.
    pub(super) fn has_upper_case_path(&self) -> bool {
        self.readings().is_some_and(Readings::has_upper_case)
    }

    /// Returns whether a condition holds for any reading of the path.
    pub(super) fn in_any_reading(&self, holds: impl Fn() -> bool) -> bool {
        holds() || self.other_readings(&holds).any(|held| held)
    }

    /// Returns whether a condition holds for every reading of the path.
    pub(super) fn in_every_reading(&self, holds: impl Fn() -> bool) -> bool {
        holds() && self.other_readings(&holds).all(|held| held)
    }

    /// Returns the most that a number is in any reading of the path.
    pub(super) fn most_of_readings(&self, number: impl Fn() -> u64) -> u64 {
        let most = Cell::new(number());
        self.other_readings(&|| {
            most.set(most.get().max(number()));
            true
        })
        .for_each(drop);
        most.get()
    }

    /// Asks about every reading but the first. A condition that has not looked at the path needs no other.
    fn other_readings(&self, holds: &impl Fn() -> bool) -> impl Iterator<Item = bool> {
        let count =
            self.readings.get().and_then(|readings| readings.as_ref().ok()).map_or(1, |all| all.as_slice().len());
        (1..count).map(move |number| {
            self.current.set(number);
            let held = holds();
            self.current.set(0);
            held
        })
    }

    pub(super) fn errors(&self) -> &ReadErrors {
        &self.errors
    }
}

impl std::fmt::Debug for Request<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Request").field("facts", &self.facts).field("path", &self.path()).finish_non_exhaustive()
    }
}

//! A request as rules see it: the facts, and what is found out from them once it is asked for.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::client::TrustedProxies;
use super::path::normal;
use super::{Facts, FailedExpressions, claims};
use crate::http::TokenError;

/// The claims of a token that was verified.
pub(super) type Claims = Arc<Map<String, Value>>;

/// Finds and verifies the token of a request.
pub(super) type Tokens = Arc<dyn Fn(&Facts<'_>) -> Token + Send + Sync>;

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

/// A request as rules see it, for conditions, keys and costs that are closures.
pub struct Request<'a> {
    facts: &'a Facts<'a>,
    path: OnceCell<Cow<'a, str>>,
    proxies: &'a TrustedProxies,
    tokens: Option<&'a Tokens>,
    client: OnceCell<Option<IpAddr>>,
    token: OnceCell<Option<Token>>,
    /// Where expressions that fail are recorded, if the request is only explained.
    failed: Option<&'a FailedExpressions>,
}

impl<'a> Request<'a> {
    pub(super) fn new(facts: &'a Facts<'a>, proxies: &'a TrustedProxies, tokens: Option<&'a Tokens>) -> Self {
        Self {
            facts,
            path: OnceCell::new(),
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

    /// The path in the form in which it is matched: unescaped where that changes nothing, with `.`, `..` and empty
    /// segments resolved, without a slash at the end.
    #[must_use]
    pub fn path(&self) -> &str {
        self.path.get_or_init(|| normal(self.facts.path()))
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
        self.token.get_or_init(|| self.tokens.map(|tokens| tokens(self.facts))).as_ref()
    }

    /// Whether its token was read, and what came of it. It is not read for this.
    #[must_use]
    pub fn token_status(&self) -> TokenStatus {
        match self.token.get() {
            Some(Some(Token { claims: Ok(_), .. })) => TokenStatus::Valid,
            Some(Some(Token { claims: Err(error), .. })) => TokenStatus::Invalid(*error),
            Some(None) | None => TokenStatus::NotRead,
        }
    }

    /// How many signatures were verified for it.
    pub(crate) fn signatures_verified(&self) -> u8 {
        self.token.get().and_then(Option::as_ref).map_or(0, |token| token.signatures)
    }

    /// A claim as text: a string as it is, a number or a truth value as it is written. A name with dots looks
    /// into objects where no claim has the whole name.
    #[must_use]
    pub fn claim(&self, name: &str) -> Option<Cow<'_, str>> {
        claims::text(self.claims()?, name)
    }
}

impl std::fmt::Debug for Request<'_> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Request").field("facts", &self.facts).field("path", &self.path()).finish_non_exhaustive()
    }
}

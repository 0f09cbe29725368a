//! A request as rules see it: the facts, and what is found out from them once it is asked for.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::net::IpAddr;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::client::TrustedProxies;
use super::path::normal;
use super::{Facts, claims};

/// The claims of a token that was verified.
pub(super) type Claims = Arc<Map<String, Value>>;

/// Finds and verifies the token of a request.
pub(super) type Tokens = Arc<dyn Fn(&Facts<'_>) -> Option<Claims> + Send + Sync>;

/// A request as rules see it, for conditions, keys and costs that are closures.
pub struct Request<'a> {
    facts: &'a Facts<'a>,
    path: OnceCell<Cow<'a, str>>,
    proxies: &'a TrustedProxies,
    tokens: Option<&'a Tokens>,
    client: OnceCell<Option<IpAddr>>,
    claims: OnceCell<Option<Claims>>,
}

impl<'a> Request<'a> {
    pub(super) fn new(facts: &'a Facts<'a>, proxies: &'a TrustedProxies, tokens: Option<&'a Tokens>) -> Self {
        Self { facts, path: OnceCell::new(), proxies, tokens, client: OnceCell::new(), claims: OnceCell::new() }
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
        let found = self.claims.get_or_init(|| self.tokens.and_then(|tokens| tokens(self.facts)));
        found.as_deref()
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

//! Counts decisions by limit and outcome. Deliberately not here: keys and clients.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use tollgate::Source;
use tollgate_config::internal::{FailurePolicy, LimitRule, ListRule};
use tollgate_http::{Refusal, TokenError};
use tollgate_rules::{Missing, Outcome, TokenStatus};

use crate::counter::Counter;
use crate::unknown::Unknowns;

/// The most limits that are counted. Names of removed limits are kept, so rules that are published with ever new names
/// fill this; further names are not counted.
const MAX_NAMES: usize = 20_000;

/// The decisions of one worker of the gateway, or of the decision service, which takes the lock once per batch.
#[derive(Debug, Default)]
pub struct Decisions {
    limits: Mutex<HashMap<Box<str>, Arc<LimitCounts>, ahash::RandomState>>,
    tokens: Tokens,
    /// Questions to the decision service that no limit applies to.
    pub unknown: Unknowns,
}

/// Counts of token checks.
#[derive(Debug, Default)]
struct Tokens {
    signatures: Counter,
    /// By [`TokenError::ALL`].
    failures: [Counter; TokenError::ALL.len()],
}

/// Sums of token checks.
#[derive(Debug, Default)]
pub struct TokenSums {
    /// Signatures that were verified.
    pub signatures: u64,
    /// Requests without a valid token, by [`TokenError::ALL`].
    pub failures: [u64; TokenError::ALL.len()],
}

/// The decisions of one limit. Its writer holds the lock, or is the only writer.
#[derive(Debug)]
struct LimitCounts {
    name: Box<str>,
    outcomes: [Counter; DecisionLabel::ALL.len()],
    /// Those that `on_store_failure` made, by [`Fallback::ALL`].
    fallbacks: [Counter; Fallback::ALL.len()],
}

/// The limit that the only writer recorded last.
#[derive(Debug, Default)]
pub struct LastLimit(Option<Arc<LimitCounts>>);

/// Sums of decisions by limit.
pub type Sums = BTreeMap<Box<str>, DecisionCounts>;

/// The number of decisions with each outcome.
pub type DecisionCounts = [u64; DecisionLabel::ALL.len()];

/// Sums of decisions by `on_store_failure`, by limit and [`Fallback::ALL`].
pub type FallbackSums = BTreeMap<Box<str>, [u64; Fallback::ALL.len()]>;

/// A decision by `on_store_failure`, because the store failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fallback {
    /// `allow`
    Allowed,
    /// `deny`
    Denied,
    /// `local`
    LocallyAllowed,
    /// `local`
    LocallyDenied,
}

impl Fallback {
    /// All of them, in declaration order.
    pub const ALL: [Self; 4] = [Self::Allowed, Self::Denied, Self::LocallyAllowed, Self::LocallyDenied];

    /// Returns `None` if the store decided, or a lease or a cached denial of it.
    fn of(outcome: &Outcome) -> Option<Self> {
        let decision = outcome.decision()?;
        match (decision.source(), decision.is_allowed()) {
            (Source::Policy, true) => Some(Self::Allowed),
            (Source::Policy, false) => Some(Self::Denied),
            (Source::Local, true) => Some(Self::LocallyAllowed),
            (Source::Local, false) => Some(Self::LocallyDenied),
            _ => None,
        }
    }

    /// Returns whether a limit with this policy can have it, as [`DecisionLabel::is_possible`].
    pub fn is_possible(self, limit: &LimitRule, policy: FailurePolicy) -> bool {
        // Requests in flight are counted by the node itself.
        if limit.shadow || !limit.enabled || limit.in_flight.is_some() {
            return false;
        }
        match limit.on_store_failure.unwrap_or(policy) {
            FailurePolicy::Allow => self == Self::Allowed,
            FailurePolicy::Deny => self == Self::Denied,
            _ => matches!(self, Self::LocallyAllowed | Self::LocallyDenied),
        }
    }

    /// Returns the labels `policy` and `outcome`.
    pub const fn labels(self) -> (&'static str, &'static str) {
        match self {
            Self::Allowed => ("allow", "allowed"),
            Self::Denied => ("deny", "denied"),
            Self::LocallyAllowed => ("local", "allowed"),
            Self::LocallyDenied => ("local", "denied"),
        }
    }
}

/// The label `outcome` of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecisionLabel {
    /// The limit was not exceeded.
    Allowed,
    /// The limit was exceeded.
    Denied,
    /// An operator has banned the key.
    Banned,
    /// The key is on the block list.
    Blocked,
    /// The request has no key, or no valid token.
    KeyMissing,
    /// The request is ambiguous.
    Unreadable,
    /// The store failed, and `on_store_failure` is `deny`.
    StoreUnavailable,
    /// A limit in shadow mode was not exceeded.
    ShadowAllowed,
    /// A limit in shadow mode was exceeded.
    ShadowDenied,
}

impl DecisionLabel {
    /// All labels, in declaration order.
    pub const ALL: [Self; 9] = [
        Self::Allowed,
        Self::Denied,
        Self::Banned,
        Self::Blocked,
        Self::KeyMissing,
        Self::Unreadable,
        Self::StoreUnavailable,
        Self::ShadowAllowed,
        Self::ShadowDenied,
    ];

    /// Returns the label of an outcome.
    pub fn of(outcome: &Outcome) -> Self {
        match outcome.refusal() {
            None => Self::Allowed,
            Some(Refusal::Banned { .. }) => Self::Banned,
            Some(Refusal::Blocked) => Self::Blocked,
            Some(Refusal::KeyMissing { .. } | Refusal::TokenInvalid { .. }) => Self::KeyMissing,
            Some(Refusal::Unreadable(_)) => Self::Unreadable,
            Some(Refusal::StoreUnavailable) => Self::StoreUnavailable,
            Some(_) => Self::Denied,
        }
    }

    /// Returns whether a limit can have this outcome. Its series exists before the first decision then, so that
    /// Prometheus sees the first one as an increase.
    pub fn is_possible(self, limit: &LimitRule, policy: FailurePolicy) -> bool {
        if limit.shadow || !limit.enabled {
            return limit.enabled && matches!(self, Self::ShadowAllowed | Self::ShadowDenied);
        }
        match self {
            // An operator can ban keys of any limit.
            Self::Allowed | Self::Denied | Self::Banned | Self::Unreadable => true,
            Self::Blocked => limit.blocked != ListRule::default(),
            Self::KeyMissing => limit.missing == Missing::Deny,
            Self::StoreUnavailable => limit.on_store_failure.unwrap_or(policy) == FailurePolicy::Deny,
            Self::ShadowAllowed | Self::ShadowDenied => false,
        }
    }

    /// Returns the label in metrics, logs and traces.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
            Self::Banned => "banned",
            Self::Blocked => "blocked",
            Self::KeyMissing => "key_missing",
            Self::Unreadable => "bad_request",
            Self::StoreUnavailable => "store_unavailable",
            Self::ShadowAllowed => "shadow_allowed",
            Self::ShadowDenied => "shadow_denied",
        }
    }
}

impl Decisions {
    /// Records outcomes.
    pub fn record<'r>(&self, outcomes: impl IntoIterator<Item = &'r Outcome>) {
        self.record_all(outcomes);
    }

    /// Records the outcomes and returns the limit that decided the last one.
    fn record_all<'r>(&self, outcomes: impl IntoIterator<Item = &'r Outcome>) -> Option<Arc<LimitCounts>> {
        let counts = |outcome: &&Outcome| {
            outcome.limit().is_some()
                || outcome.shadow_decisions().next().is_some()
                || outcome.token() != TokenStatus::NotRead
        };
        let mut outcomes = outcomes.into_iter().filter(counts).peekable();
        outcomes.peek()?;
        let mut last = None;
        let mut names = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        let mut counts_of = |name: &str| {
            if let Some(known) = names.get(name) {
                return Some(Arc::clone(known));
            }
            (names.len() < MAX_NAMES).then(|| {
                let new = Arc::new(LimitCounts::new(name));
                names.insert(name.into(), Arc::clone(&new));
                new
            })
        };
        for outcome in outcomes {
            self.tokens.record(outcome);
            if let Some(name) = outcome.limit() {
                last = counts_of(name).inspect(|counts| counts.record(outcome));
            }
            for (name, decision) in outcome.shadow_decisions() {
                let label =
                    if decision.is_allowed() { DecisionLabel::ShadowAllowed } else { DecisionLabel::ShadowDenied };
                counts_of(name).inspect(|counts| counts.add(label));
            }
        }
        last
    }

    /// Records one outcome, for a `Decisions` with a single writer. It takes no lock while the same limit decides.
    #[inline]
    pub fn record_unlocked(&self, outcome: &Outcome, last: &mut LastLimit) {
        let name = outcome.limit().filter(|_| outcome.shadow_decisions().next().is_none());
        match (name, &last.0) {
            (Some(name), Some(known)) if *known.name == *name => {
                known.record(outcome);
                self.tokens.record(outcome);
            }
            _ => last.0 = self.record_all([outcome]).or(last.0.take()),
        }
    }

    /// Adds the counts to `sums`.
    pub fn add_to(&self, sums: &mut Sums) {
        let names = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, counts) in names.iter() {
            let sum = sums.entry(name.clone()).or_default();
            for (sum, count) in sum.iter_mut().zip(&counts.outcomes) {
                *sum += count.value();
            }
        }
    }
}

impl Decisions {
    /// Adds the decisions by `on_store_failure` to `sums`.
    pub fn add_fallbacks_to(&self, sums: &mut FallbackSums) {
        let names = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, counts) in names.iter() {
            let sum = sums.entry(name.clone()).or_default();
            for (sum, count) in sum.iter_mut().zip(&counts.fallbacks) {
                *sum += count.value();
            }
        }
    }

    /// Adds the counts of token checks to `sums`.
    pub fn add_tokens_to(&self, sums: &mut TokenSums) {
        sums.signatures += self.tokens.signatures.value();
        for (sum, count) in sums.failures.iter_mut().zip(&self.tokens.failures) {
            *sum += count.value();
        }
    }
}

impl Tokens {
    fn record(&self, outcome: &Outcome) {
        if outcome.token() == TokenStatus::NotRead {
            return;
        }
        self.signatures.add(u64::from(outcome.signatures_verified()));
        let failed = |error| TokenError::ALL.iter().position(|known| *known == error);
        if let Some(count) = outcome.token().error().and_then(failed).and_then(|number| self.failures.get(number)) {
            count.add(1);
        }
    }
}

impl LimitCounts {
    fn new(name: &str) -> Self {
        Self { name: name.into(), outcomes: Default::default(), fallbacks: Default::default() }
    }

    /// Counts an outcome that this limit decided.
    fn record(&self, outcome: &Outcome) {
        self.add(DecisionLabel::of(outcome));
        if let Some(fallback) = Fallback::of(outcome) {
            self.fallbacks[fallback as usize].add(1);
        }
    }

    fn add(&self, outcome: DecisionLabel) {
        self.outcomes[outcome as usize].add(1);
    }
}

/// Returns the name of a source in responses, logs and traces.
#[inline]
pub fn source_name(source: Source) -> &'static str {
    match source {
        Source::SharedQuota => "shared_quota",
        Source::DenialCache => "denial_cache",
        Source::Lease => "lease",
        Source::Local => "local",
        Source::Policy => "policy",
        _ => "store",
    }
}

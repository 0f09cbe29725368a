//! Counts decisions by limit and outcome. Deliberately not here: keys and clients.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use tollgate::Outcome;
use tollgate::http::{Refusal, TokenError};
use tollgate::rules::TokenStatus;

use crate::counter::Counter;

/// The most limits that are counted. Names of removed limits are kept, so rules that are published with ever new names
/// fill this; further names are not counted.
const MAX_NAMES: usize = 20_000;

/// The decisions of one worker of the gateway, or of the decision service, which takes the lock once per batch.
#[derive(Debug, Default)]
pub(crate) struct Decisions {
    limits: Mutex<HashMap<Box<str>, Arc<LimitCounts>, ahash::RandomState>>,
    tokens: Tokens,
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
pub(crate) struct TokenSums {
    /// Signatures that were verified.
    pub(crate) signatures: u64,
    /// Requests without a valid token, by [`TokenError::ALL`].
    pub(crate) failures: [u64; TokenError::ALL.len()],
}

/// The decisions of one limit. Its writer holds the lock, or is the only writer.
#[derive(Debug)]
struct LimitCounts {
    name: Box<str>,
    outcomes: [Counter; DecisionLabel::ALL.len()],
}

/// The limit that the only writer recorded last.
#[derive(Debug, Default)]
pub(crate) struct LastLimit(Option<Arc<LimitCounts>>);

/// Sums of decisions by limit.
pub(crate) type Sums = BTreeMap<Box<str>, DecisionCounts>;

/// The number of decisions with each outcome.
pub(crate) type DecisionCounts = [u64; DecisionLabel::ALL.len()];

/// The label `outcome` of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecisionLabel {
    Allowed,
    Denied,
    Banned,
    Blocked,
    KeyMissing,
    Unreadable,
    StoreUnavailable,
    ShadowAllowed,
    ShadowDenied,
}

impl DecisionLabel {
    /// All labels, in declaration order.
    pub(crate) const ALL: [Self; 9] = [
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

    pub(crate) fn of(outcome: &Outcome) -> Self {
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

    pub(crate) const fn as_str(self) -> &'static str {
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
    pub(crate) fn record<'r>(&self, outcomes: impl IntoIterator<Item = &'r Outcome>) {
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
        let mut count = |name: &str, outcome: DecisionLabel| {
            if let Some(known) = names.get(name) {
                known.add(outcome);
                return Some(Arc::clone(known));
            }
            (names.len() < MAX_NAMES).then(|| {
                let new = Arc::new(LimitCounts { name: name.into(), outcomes: Default::default() });
                new.add(outcome);
                names.insert(name.into(), Arc::clone(&new));
                new
            })
        };
        for outcome in outcomes {
            self.tokens.record(outcome);
            if let Some(name) = outcome.limit() {
                last = count(name, DecisionLabel::of(outcome));
            }
            for (name, decision) in outcome.shadow_decisions() {
                count(
                    name,
                    if decision.is_allowed() { DecisionLabel::ShadowAllowed } else { DecisionLabel::ShadowDenied },
                );
            }
        }
        last
    }

    /// Records one outcome, for a `Decisions` with a single writer. It takes no lock while the same limit decides.
    pub(crate) fn record_unlocked(&self, outcome: &Outcome, last: &mut LastLimit) {
        let name = outcome.limit().filter(|_| outcome.shadow_decisions().next().is_none());
        match (name, &last.0) {
            (Some(name), Some(known)) if *known.name == *name => {
                known.add(DecisionLabel::of(outcome));
                self.tokens.record(outcome);
            }
            _ => last.0 = self.record_all([outcome]).or(last.0.take()),
        }
    }

    /// Adds the counts to `sums`.
    pub(crate) fn add_to(&self, sums: &mut Sums) {
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
    /// Adds the counts of token checks to `sums`.
    pub(crate) fn add_tokens_to(&self, sums: &mut TokenSums) {
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
    fn add(&self, outcome: DecisionLabel) {
        self.outcomes[outcome as usize].add(1);
    }
}

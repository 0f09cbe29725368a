//! What limits have decided, by their names. Deliberately not here: for whom, and by which keys.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use tollgate::Ruling;
use tollgate::http::Refusal;

/// Names come from rule files, and each that was ever in force is remembered. Whoever publishes rules with new names
/// all the time fills this and no more; from then on new names are not counted.
const MAX_NAMES: usize = 20_000;

/// The decisions of one worker of the gateway, whose lock nobody else wants but for whoever reads the metrics; or those
/// of the decision service, which takes the lock once for all that a client asks together.
#[derive(Debug, Default)]
pub(crate) struct Decisions(Mutex<HashMap<Box<str>, Outcomes, ahash::RandomState>>);

/// Decisions added up, by the names of the limits.
pub(crate) type Sums = BTreeMap<Box<str>, Outcomes>;

/// How often each outcome has come about.
pub(crate) type Outcomes = [u64; Outcome::ALL.len()];

/// What a limit made of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Allowed,
    Denied,
    Banned,
    Blocked,
    KeyMissing,
    StoreUnavailable,
    ShadowAllowed,
    ShadowDenied,
}

impl Outcome {
    /// All of them, in their order.
    pub(crate) const ALL: [Self; 8] = [
        Self::Allowed,
        Self::Denied,
        Self::Banned,
        Self::Blocked,
        Self::KeyMissing,
        Self::StoreUnavailable,
        Self::ShadowAllowed,
        Self::ShadowDenied,
    ];

    pub(crate) fn of(ruling: &Ruling) -> Self {
        match ruling.refusal() {
            None => Self::Allowed,
            Some(Refusal::Banned { .. }) => Self::Banned,
            Some(Refusal::Blocked) => Self::Blocked,
            Some(Refusal::KeyMissing { .. }) => Self::KeyMissing,
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
            Self::StoreUnavailable => "store_unavailable",
            Self::ShadowAllowed => "shadow_allowed",
            Self::ShadowDenied => "shadow_denied",
        }
    }
}

impl Decisions {
    pub(crate) fn note<'r>(&self, rulings: impl IntoIterator<Item = &'r Ruling>) {
        let counts = |ruling: &&Ruling| ruling.limit().is_some() || ruling.watched().next().is_some();
        let mut rulings = rulings.into_iter().filter(counts).peekable();
        if rulings.peek().is_none() {
            return;
        }
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut note = |name: &str, outcome: Outcome| {
            if let Some(outcomes) = names.get_mut(name) {
                outcomes[outcome as usize] += 1;
            } else if names.len() < MAX_NAMES {
                let mut outcomes = Outcomes::default();
                outcomes[outcome as usize] = 1;
                names.insert(name.into(), outcomes);
            }
        };
        for ruling in rulings {
            if let Some(name) = ruling.limit() {
                note(name, Outcome::of(ruling));
            }
            for (name, decision) in ruling.watched() {
                note(name, if decision.is_allowed() { Outcome::ShadowAllowed } else { Outcome::ShadowDenied });
            }
        }
    }

    /// Adds what has been decided to a sum.
    pub(crate) fn add_to(&self, sums: &mut Sums) {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, outcomes) in names.iter() {
            let sum = sums.entry(name.clone()).or_default();
            for (sum, count) in sum.iter_mut().zip(outcomes) {
                *sum += count;
            }
        }
    }
}

//! What limits have decided, by their names.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, PoisonError};

use tollgate::Ruling;
use tollgate::http::Refusal;

/// Names come from rule files, and each that was ever in force is remembered. Whoever publishes rules with new names
/// all the time fills this and no more; from then on new names are not counted.
const MAX_NAMES: usize = 20_000;

/// The decisions of one worker. Nobody else locks it, but for whoever reads the metrics.
#[derive(Debug, Default)]
pub(in super::super) struct Limits(Mutex<HashMap<Box<str>, Outcomes, ahash::RandomState>>);

/// How often each outcome has come about.
pub(in super::super) type Outcomes = [u64; Outcome::ALL.len()];

/// What a limit made of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) enum Outcome {
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
    pub(in super::super) const ALL: [Self; 8] = [
        Self::Allowed,
        Self::Denied,
        Self::Banned,
        Self::Blocked,
        Self::KeyMissing,
        Self::StoreUnavailable,
        Self::ShadowAllowed,
        Self::ShadowDenied,
    ];

    pub(in super::super) fn of(ruling: &Ruling) -> Self {
        match ruling.refusal() {
            None => Self::Allowed,
            Some(Refusal::Banned { .. }) => Self::Banned,
            Some(Refusal::Blocked) => Self::Blocked,
            Some(Refusal::KeyMissing { .. }) => Self::KeyMissing,
            Some(Refusal::StoreUnavailable) => Self::StoreUnavailable,
            Some(_) => Self::Denied,
        }
    }

    pub(in super::super) const fn as_str(self) -> &'static str {
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

impl Limits {
    pub(super) fn note(&self, ruling: &Ruling) {
        let (limit, mut watched) = (ruling.limit(), ruling.watched().peekable());
        if limit.is_none() && watched.peek().is_none() {
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
        if let Some(name) = limit {
            note(name, Outcome::of(ruling));
        }
        for (name, decision) in watched {
            note(name, if decision.is_allowed() { Outcome::ShadowAllowed } else { Outcome::ShadowDenied });
        }
    }

    /// Adds what has been decided to a sum.
    pub(in super::super) fn add_to(&self, sums: &mut BTreeMap<Box<str>, Outcomes>) {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, outcomes) in names.iter() {
            let sum = sums.entry(name.clone()).or_default();
            for (sum, count) in sum.iter_mut().zip(outcomes) {
                *sum += count;
            }
        }
    }
}

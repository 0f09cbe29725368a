//! Denials that are certain: a key that was denied stays denied until its `retry_after`, for the same cost or a
//! higher one, unless something is given back. A flood against an exhausted key costs no trip.
//!
//! Only durations cross machines. An entry lasts from before the question was sent, so it never outlives the
//! denial; what it answers is counted from when the answer came, so a client that waits that long passes.

use std::sync::Mutex;

use super::script::{Ask, Seen};
use crate::decision::{Outcome, Verdict};
use crate::units::Timestamp;

/// Entries in one set. A new entry takes the place of the one that ends first.
const WAYS: usize = 8;
/// Sets: 65 536 entries in all, some ten megabytes when every one is taken.
const SETS: usize = 8192;

pub(super) struct Denials {
    sets: Box<[Mutex<Vec<Entry>>]>,
    hasher: ahash::RandomState,
}

struct Entry {
    fingerprint: u64,
    cost: u64,
    /// By Redis's clock, and by ours when it had answered.
    at: Timestamp,
    answered: Timestamp,
    /// By our clock.
    until: Timestamp,
    seen: Seen,
}

/// When a question was asked and answered, by our clock.
#[derive(Clone, Copy)]
pub(super) struct Times {
    pub(super) asked: Timestamp,
    pub(super) answered: Timestamp,
}

impl Denials {
    pub(super) fn new() -> Self {
        Self { sets: (0..SETS).map(|_| Mutex::default()).collect(), hasher: ahash::RandomState::new() }
    }

    fn fingerprint(&self, name: &[u8]) -> u64 {
        self.hasher.hash_one(name)
    }

    fn set(&self, fingerprint: u64) -> std::sync::MutexGuard<'_, Vec<Entry>> {
        let set = &self.sets[fingerprint as usize % SETS];
        set.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Remembers a denial.
    pub(super) fn remember(&self, ask: &Ask, seen: &Seen, at: Timestamp, retry_after: u64, times: Times) {
        let fingerprint = self.fingerprint(&ask.name);
        let until = Timestamp::from_micros(times.asked.as_micros().saturating_add(retry_after));
        if until <= times.answered {
            return;
        }
        let answered = times.answered;
        let entry = Entry { fingerprint, cost: ask.cost, at, answered, until, seen: seen.clone() };
        let mut set = self.set(fingerprint);
        if let Some(same) = set.iter_mut().find(|other| other.fingerprint == fingerprint) {
            *same = entry;
        } else if set.len() < WAYS {
            set.push(entry);
        } else if let Some(first) = set.iter_mut().min_by_key(|other| other.until) {
            *first = entry;
        }
    }

    /// The denial of this key and cost, if there is no doubt about it.
    pub(super) fn certain(&self, ask: &Ask, now: Timestamp) -> Option<(Verdict, Timestamp)> {
        let fingerprint = self.fingerprint(&ask.name);
        let mut set = self.set(fingerprint);
        let index = set.iter().position(|entry| entry.fingerprint == fingerprint)?;
        let entry = &set[index];
        if now >= entry.until {
            set.swap_remove(index);
            return None;
        }
        if ask.cost < entry.cost {
            return None;
        }
        let since = now.as_micros().saturating_sub(entry.answered.as_micros());
        let at = Timestamp::from_micros(entry.at.as_micros().saturating_add(since));
        let verdict = match &entry.seen {
            // A log's answer was computed by Redis: it ages by as much as the clock has moved.
            Seen::Verdict(verdict) if ask.cost == entry.cost => aged(*verdict, since),
            Seen::Verdict(_) => return None,
            seen => seen.verdict(&ask.terms, at, ask.cost),
        };
        (!verdict.is_allowed()).then_some((verdict, at))
    }

    /// Something was given back to that key.
    pub(super) fn forget(&self, name: &[u8]) {
        let fingerprint = self.fingerprint(name);
        self.set(fingerprint).retain(|entry| entry.fingerprint != fingerprint);
    }

    /// Nothing is certain any more.
    pub(super) fn clear(&self) {
        for set in &self.sets {
            set.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clear();
        }
    }
}

fn aged(verdict: Verdict, by: u64) -> Verdict {
    let outcome = match verdict.outcome {
        Outcome::Denied { retry_after } => Outcome::Denied { retry_after: retry_after.saturating_sub(by) },
        other => other,
    };
    Verdict { outcome, reset_after: verdict.reset_after.saturating_sub(by), ..verdict }
}

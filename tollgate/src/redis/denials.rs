//! Denial cache: remembers denials by Redis, so that a flood on a spent key costs it a trip a second at most.
//!
//! A key that was denied stays denied until its `retry_after`, for the same cost or a higher one, unless it is reset or
//! something is given back. Resets by any process and refunds by this one end an entry at once. Other processes' refunds,
//! and keys that someone deletes on Redis, are not announced: an entry has a maximum age, and then Redis is asked again.
//!
//! Only durations cross machines. An entry lasts from before the question was sent, so it never outlives the
//! denial; what it answers is counted from when the answer came, so a client that waits that long passes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Semaphore;

use super::script::{Ask, Seen, Terms};
use crate::decision::{Outcome, Verdict};
use crate::units::Timestamp;

/// Entries in one set. A new entry takes the place of the one that ends first.
const WAYS: usize = 8;
/// The longest that a denial is remembered without asking again. So long a refund by another process, or a `FLUSHALL`,
/// may go unnoticed.
const MAX_AGE: Duration = Duration::from_secs(1);
/// Sets: 65 536 entries in all, some ten megabytes when every one is taken.
const SETS: usize = 8192;

pub(super) struct Denials {
    sets: Box<[Mutex<Vec<Entry>>]>,
    /// How often something was given back to a key of the set: a denial that was decided before that is not certain.
    given_back: Box<[AtomicU64]>,
    hasher: ahash::RandomState,
}

struct Entry {
    fingerprint: u64,
    /// By which numbers: to a variant of the limit the same state may say something else.
    terms: Arc<Terms>,
    cost: u64,
    /// By Redis's clock, and by ours when it had answered.
    at: Timestamp,
    answered: Timestamp,
    /// By our clock: until when it answers, and from when Redis may be asked again, up to a trip later.
    until: Timestamp,
    ended: Timestamp,
    seen: Seen,
    /// Once it has ended, who asks the store what is true now. Closed when that is known.
    asking: Option<Arc<Semaphore>>,
}

/// What is known of a key before it is asked for.
pub(super) enum Known {
    /// It is denied, as of that time by the store's clock.
    Denied(Verdict, Timestamp),
    /// Nothing.
    Nothing,
    /// A denial ends just now, and who asks first asks for all, after so many microseconds: a trip at most.
    AskForAll(Arc<Semaphore>, u64),
    /// Someone is asking.
    Wait(Arc<Semaphore>),
}

/// When a question was asked and answered, by our clock.
#[derive(Clone, Copy)]
pub(super) struct Times {
    pub(super) asked: Timestamp,
    pub(super) answered: Timestamp,
    /// [`Denials::mark`] of the key before it was asked.
    pub(super) mark: u64,
}

/// The denials of every set of limits that is still in use: a denial by one set's numbers says nothing of another's,
/// but what is given back is given back to all.
#[derive(Default)]
pub(super) struct AllDenials(Mutex<Vec<Weak<Denials>>>);

impl AllDenials {
    /// No denials yet, for a set of limits.
    pub(super) fn begin(&self) -> Arc<Denials> {
        let denials = Arc::new(Denials::new());
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(Arc::downgrade(&denials));
        denials
    }

    /// Something was given back to that key.
    pub(super) fn forget(&self, name: &[u8]) {
        self.each(|denials| denials.forget(name));
    }

    /// Nothing is certain any more.
    pub(super) fn clear(&self) {
        self.each(Denials::clear);
    }

    fn each(&self, then: impl Fn(&Denials)) {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().filter_map(Weak::upgrade).for_each(|denials| then(&denials));
    }
}

impl Denials {
    fn new() -> Self {
        Self {
            sets: (0..SETS).map(|_| Mutex::default()).collect(),
            given_back: (0..SETS).map(|_| AtomicU64::new(0)).collect(),
            hasher: ahash::RandomState::new(),
        }
    }

    fn fingerprint(&self, name: &[u8]) -> u64 {
        self.hasher.hash_one(name)
    }

    fn set(&self, fingerprint: u64) -> std::sync::MutexGuard<'_, Vec<Entry>> {
        let set = &self.sets[fingerprint as usize % SETS];
        set.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// To be taken before a question is asked, and shown with its answer.
    pub(super) fn mark(&self, name: &[u8]) -> u64 {
        self.given_back[self.fingerprint(name) as usize % SETS].load(Ordering::SeqCst)
    }

    /// Remembers a denial.
    pub(super) fn remember(&self, ask: &Ask, seen: &Seen, at: Timestamp, retry_after: u64, times: Times) {
        let fingerprint = self.fingerprint(&ask.name);
        let answered = times.answered;
        let ends = times.asked.saturating_add(Duration::from_micros(retry_after));
        let expires = times.asked.saturating_add(MAX_AGE);
        // Once an entry has reached its age, there is nothing to wait for before Redis is asked again.
        let (until, ended) = match ends <= expires {
            true => (ends, answered.saturating_add(Duration::from_micros(retry_after))),
            false => (expires, expires),
        };
        let (terms, seen) = (ask.terms.clone(), seen.clone());
        let entry = Entry { fingerprint, terms, cost: ask.cost, at, answered, until, ended, seen, asking: None };
        let mut set = self.set(fingerprint);
        // Something was given back while the answer was on its way.
        if self.given_back[fingerprint as usize % SETS].load(Ordering::SeqCst) != times.mark {
            return;
        }
        if let Some(same) = set.iter_mut().find(|other| other.is_of(fingerprint, ask)) {
            *same = entry;
        } else if set.len() < WAYS {
            set.push(entry);
        } else if let Some(first) = set.iter_mut().min_by_key(|other| other.until) {
            *first = entry;
        }
    }

    /// Whether there is no doubt that this key and cost are denied.
    pub(super) fn known(&self, ask: &Ask, now: Timestamp) -> Known {
        let fingerprint = self.fingerprint(&ask.name);
        let mut set = self.set(fingerprint);
        let entry = set.iter_mut().find(|entry| entry.is_of(fingerprint, ask));
        let Some(entry) = entry.filter(|entry| ask.cost >= entry.cost) else { return Known::Nothing };
        if now >= entry.until {
            return match &entry.asking {
                Some(asking) => Known::Wait(asking.clone()),
                None => {
                    let asking = entry.asking.insert(Arc::new(Semaphore::new(0))).clone();
                    Known::AskForAll(asking, entry.ended.as_micros().saturating_sub(now.as_micros()))
                }
            };
        }
        entry.denial(ask, now).map_or(Known::Nothing, |(verdict, at)| Known::Denied(verdict, at))
    }

    /// The denial of this key and cost, if it is certain, as of that time by the store's clock.
    pub(super) fn certain(&self, ask: &Ask, now: Timestamp) -> Option<(Verdict, Timestamp)> {
        let fingerprint = self.fingerprint(&ask.name);
        let set = self.set(fingerprint);
        let entry = set.iter().find(|entry| entry.is_of(fingerprint, ask))?;
        if ask.cost >= entry.cost && now < entry.until { entry.denial(ask, now) } else { None }
    }

    /// Whoever asked for all knows: what ended without a new denial is forgotten.
    pub(super) fn asked_for_all(&self, name: &[u8], asking: &Arc<Semaphore>) {
        let fingerprint = self.fingerprint(name);
        let is_it = |entry: &Entry| entry.asking.as_ref().is_some_and(|other| Arc::ptr_eq(other, asking));
        self.set(fingerprint).retain(|entry| !is_it(entry));
        asking.close();
    }

    /// Something was given back to that key.
    fn forget(&self, name: &[u8]) {
        let fingerprint = self.fingerprint(name);
        let mut set = self.set(fingerprint);
        self.given_back[fingerprint as usize % SETS].fetch_add(1, Ordering::SeqCst);
        set.retain(|entry| entry.fingerprint != fingerprint);
    }

    /// Nothing is certain any more.
    fn clear(&self) {
        for (set, given_back) in self.sets.iter().zip(&self.given_back) {
            given_back.fetch_add(1, Ordering::SeqCst);
            set.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clear();
        }
    }
}

impl Entry {
    fn is_of(&self, fingerprint: u64, ask: &Ask) -> bool {
        self.fingerprint == fingerprint && Arc::ptr_eq(&self.terms, &ask.terms)
    }

    /// What it answers now, while it is certain.
    fn denial(&self, ask: &Ask, now: Timestamp) -> Option<(Verdict, Timestamp)> {
        let since = now.as_micros().saturating_sub(self.answered.as_micros());
        let at = Timestamp::from_micros(self.at.as_micros().saturating_add(since));
        let verdict = match &self.seen {
            // An answer that was computed then ages by as much as the clock has moved.
            Seen::Verdict(verdict) if ask.cost == self.cost => aged(*verdict, since),
            Seen::Verdict(_) => return None,
            seen => seen.verdict(&ask.terms, at, ask.cost),
        };
        (!verdict.is_allowed()).then_some((verdict, at))
    }
}

fn aged(verdict: Verdict, by: u64) -> Verdict {
    let outcome = match verdict.outcome {
        Outcome::Denied { retry_after } => Outcome::Denied { retry_after: retry_after.saturating_sub(by) },
        other => other,
    };
    Verdict { outcome, reset_after: verdict.reset_after.saturating_sub(by), ..verdict }
}

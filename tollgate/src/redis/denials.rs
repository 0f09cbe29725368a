//! Denial cache: remembers denials by Redis, so that a flood on a spent key costs about one round trip per second.
//!
//! A denied key stays denied until its `retry_after`, for the same cost or a higher one, unless it is reset or units
//! are given back. If a lower cost is admitted, the key stays denied for longer. Resets by any process, and refunds and
//! admissions by this one, end an entry at once. Refunds and admissions by other processes, and keys that are deleted on
//! Redis, are not announced: so an entry has a maximum age, after which Redis decides again. A settlement that charges
//! more than its estimate ends the entries of its key in its own process. In another one, a wait can be too short for
//! that long.
//!
//! The cache takes at most an eighth of the limiter's `max_memory`. Limiters before and after a change of limits share
//! it: an entry is valid only for the terms under which the key was denied.
//!
//! Only durations are exchanged between machines, never times. The lifetime of an entry begins before the request is
//! sent, so the entry never outlives the denial. The `retry_after` that it returns is counted from the arrival of the
//! reply, so a client that waits that long is allowed.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;

use super::script::{KeyState, ScriptHit, StoreIndex, Terms};
use crate::budget::Budget;
use crate::decision::{Admission, Verdict};
use crate::units::Timestamp;

/// Entries in one set. A new entry replaces the one that expires first.
const WAYS: usize = 8;
/// Maximum age of an entry. A refund by another process, or a `FLUSHALL`, may go unnoticed for this long.
const MAX_AGE: Duration = Duration::from_secs(1);
/// Maximum number of sets: 65,536 entries.
const MAX_SETS: usize = 8192;
/// Sets that are searched for expired entries when there is no memory for another set.
const SEARCHED: usize = 16;
/// Maximum number of costs of one key with their own entries, where only verdicts are kept. Further costs use the entry
/// of the next lower cost: they are denied for certain, and wait until the whole quota is back, which may be longer than
/// necessary.
const MAX_COSTS: usize = 4;
/// The share of the limiter's memory that the cache may take, as a divisor.
const SHARE_OF_MEMORY: usize = 8;
/// Maximum length of a state that is kept, so that an entry is valid for higher costs too. For a longer state, which is
/// that of a counter with many segments, only the verdict is kept.
const MAX_NUMBERS: usize = 8;
/// The memory of a set with entries, and of an empty set.
const SET_BYTES: usize = WAYS * (size_of::<Entry>() + MAX_NUMBERS * size_of::<u64>());
const EMPTY_SET_BYTES: usize = size_of::<Mutex<Vec<Entry>>>() + size_of::<AtomicU64>();

pub(super) struct Denials {
    sets: Box<[Mutex<Vec<Entry>>]>,
    /// Counts refunds, resets and admissions of the keys of each set. A denial that was decided before the latest one is
    /// not certain, or its wait is too short.
    generations: Box<[AtomicU64]>,
    hasher: ahash::RandomState,
    memory: Memory,
    /// The set that is searched next for expired entries.
    next_searched: AtomicUsize,
}

/// The memory of the cache.
struct Memory {
    budget: Budget,
    used: AtomicUsize,
    max: usize,
}

impl Memory {
    /// Reserves bytes, unless they exceed the share of the cache or the limiter's memory.
    fn take(&self, bytes: usize) -> bool {
        let within = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= self.max);
        if self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, within).is_err() {
            return false;
        }
        let is_reserved = self.budget.reserve(bytes);
        if !is_reserved {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
        is_reserved
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.release(bytes);
    }
}

struct Entry {
    fingerprint: u64,
    /// The terms of the denied hit. A variant of the limit may allow the same state.
    terms: Arc<Terms>,
    cost: u64,
    /// The time of the denial by Redis's clock, and of the arrival of the reply by ours.
    at: Timestamp,
    received_at: Timestamp,
    /// By our clock: the time until which the entry is valid, and the time from which Redis may decide again, up to a
    /// round trip later.
    until: Timestamp,
    ended: Timestamp,
    state: KeyState,
    /// Set once the entry has expired and a request refreshes it. Closed when the refresh ends.
    refresh: Option<Arc<Semaphore>>,
}

/// The content of the cache for a key and a cost.
pub(super) enum Known {
    /// Denied, as of that time by the store's clock.
    Denied(Verdict, Timestamp),
    /// No entry.
    Nothing,
    /// The entry has just expired, and the caller has to refresh it, after a pause in microseconds of at most a round
    /// trip.
    Refresh(Arc<Semaphore>, u64),
    /// Another request is refreshing the entry.
    Wait(Arc<Semaphore>),
}

/// The times of a request and its reply, by our clock.
#[derive(Clone, Copy)]
pub(super) struct Times {
    pub(super) sent_at: Timestamp,
    pub(super) received_at: Timestamp,
    /// The [generation](Denials::generation) of the key before the request was sent.
    pub(super) generation: u64,
}

impl Denials {
    /// Creates a cache that takes its memory from `budget`.
    pub(super) fn new(budget: Budget) -> Self {
        let max = budget.max() / SHARE_OF_MEMORY;
        let memory = Memory { budget, used: AtomicUsize::new(0), max };
        // As many sets as fit when all are full.
        let sets = (memory.max / (SET_BYTES + EMPTY_SET_BYTES)).clamp(1, MAX_SETS);
        // Without memory for empty sets there are none, and nothing is cached.
        let sets = if memory.take(sets * EMPTY_SET_BYTES) { sets } else { 0 };
        Self {
            sets: (0..sets).map(|_| Mutex::default()).collect(),
            generations: (0..sets).map(|_| AtomicU64::new(0)).collect(),
            hasher: ahash::RandomState::new(),
            memory,
            next_searched: AtomicUsize::new(0),
        }
    }

    pub(super) fn fingerprint(&self, name: &[u8]) -> u64 {
        self.hasher.hash_one(name)
    }

    /// Returns the set of a key and its generation. `None` if there is no memory for sets.
    fn set(&self, fingerprint: u64) -> Option<(MutexGuard<'_, Vec<Entry>>, &AtomicU64)> {
        let index = (fingerprint as usize).checked_rem(self.sets.len())?;
        let set = self.sets[index].lock().unwrap_or_else(PoisonError::into_inner);
        Some((set, &self.generations[index]))
    }

    /// Removes entries. The memory of a set is freed with its last entry.
    fn remove(&self, set: &mut Vec<Entry>, is_removed: impl Fn(&Entry) -> bool) {
        if set.is_empty() {
            return;
        }
        set.retain(|entry| !is_removed(entry));
        if set.is_empty() {
            *set = Vec::new();
            self.memory.give_back(SET_BYTES);
        }
    }

    /// Reserves the memory of a set, if necessary by freeing a set whose entries have expired.
    fn take_set(&self, now: Timestamp) -> bool {
        if self.memory.take(SET_BYTES) {
            return true;
        }
        for _ in 0..SEARCHED.min(self.sets.len()) {
            let index = self.next_searched.fetch_add(1, Ordering::Relaxed) % self.sets.len();
            // The caller holds the lock of another set: waiting here could deadlock.
            if let Ok(mut set) = self.sets[index].try_lock() {
                self.remove(&mut set, |entry| entry.ended <= now && entry.refresh.is_none());
            }
        }
        self.memory.take(SET_BYTES)
    }

    /// Returns the generation of a key, which changes when units of the key are given back or taken. Read it before a
    /// request is sent, and pass it to [`remember`](Self::remember) with the reply.
    pub(super) fn generation(&self, name: &[u8]) -> u64 {
        let index = (self.fingerprint(name) as usize).checked_rem(self.sets.len());
        index.map_or(0, |index| self.generations[index].load(Ordering::SeqCst))
    }

    /// Caches a denial.
    pub(super) fn remember(&self, hit: &ScriptHit, state: &KeyState, at: Timestamp, retry_after: u64, times: Times) {
        let fingerprint = self.fingerprint(&hit.name);
        let received_at = times.received_at;
        let ends = times.sent_at.saturating_add(Duration::from_micros(retry_after));
        let expires = times.sent_at.saturating_add(MAX_AGE);
        // An entry that reaches the maximum age needs no pause before Redis decides again.
        let (until, ended) = match ends <= expires {
            true => (ends, received_at.saturating_add(Duration::from_micros(retry_after))),
            false => (expires, expires),
        };
        let (terms, state) = (hit.terms.clone(), self.kept(hit, state, at));
        let entry = Entry { fingerprint, terms, cost: hit.cost, at, received_at, until, ended, state, refresh: None };
        let Some((mut set, generations)) = self.set(fingerprint) else { return };
        // Units were given back while the reply was in flight.
        if generations.load(Ordering::SeqCst) != times.generation {
            return;
        }
        let is_replaced = |other: &Entry| {
            let is_exact = !entry.is_verdict() || !other.is_verdict() || other.cost == entry.cost;
            other.is_of(fingerprint, hit) && (is_exact || other.until <= received_at)
        };
        self.remove(&mut set, is_replaced);
        if costs(&set, fingerprint, hit) >= MAX_COSTS {
            let of_key = set.iter_mut().filter(|other| other.is_of(fingerprint, hit));
            if let Some(highest) = of_key.max_by_key(|other| other.cost) {
                *highest = entry;
            }
        } else if set.len() == WAYS {
            if let Some(first) = set.iter_mut().min_by_key(|other| other.until) {
                *first = entry;
            }
        } else if !set.is_empty() || self.take_set(received_at) {
            if set.is_empty() {
                set.reserve_exact(WAYS);
            }
            set.push(entry);
        }
    }

    /// Returns the part of a state that is kept.
    fn kept(&self, hit: &ScriptHit, state: &KeyState, at: Timestamp) -> KeyState {
        match state {
            KeyState::Numbers(numbers) if numbers.len() > MAX_NUMBERS => {
                KeyState::Verdict(state.verdict(&hit.terms, at, hit.cost))
            }
            state => state.clone(),
        }
    }

    /// Looks up a key and a cost.
    pub(super) fn known(&self, hit: &ScriptHit, now: Timestamp) -> Known {
        let fingerprint = self.fingerprint(&hit.name);
        let Some((mut set, _)) = self.set(fingerprint) else { return Known::Nothing };
        let Some(entry) = valid_entry(&mut set, fingerprint, hit) else { return Known::Nothing };
        if now >= entry.until {
            return match &entry.refresh {
                Some(refresh) => Known::Wait(refresh.clone()),
                None => {
                    let refresh = entry.refresh.insert(Arc::new(Semaphore::new(0))).clone();
                    Known::Refresh(refresh, entry.ended.as_micros().saturating_sub(now.as_micros()))
                }
            };
        }
        entry.denial(hit, now).map_or(Known::Nothing, |(verdict, at)| Known::Denied(verdict, at))
    }

    /// Returns the cached denial of this key and cost, with its time by the store's clock. Does not start a refresh.
    pub(super) fn certain(&self, hit: &ScriptHit, now: Timestamp) -> Option<(Verdict, Timestamp)> {
        let fingerprint = self.fingerprint(&hit.name);
        let (mut set, _) = self.set(fingerprint)?;
        let entry = valid_entry(&mut set, fingerprint, hit)?;
        if now < entry.until { entry.denial(hit, now) } else { None }
    }

    /// Ends a refresh: wakes the waiting requests, and removes the entry unless there is a new denial.
    pub(super) fn end_refresh(&self, name: &[u8], refresh: &Arc<Semaphore>) {
        let fingerprint = self.fingerprint(name);
        let is_it = |entry: &Entry| entry.refresh.as_ref().is_some_and(|other| Arc::ptr_eq(other, refresh));
        if let Some((mut set, _)) = self.set(fingerprint) {
            self.remove(&mut set, is_it);
        }
        refresh.close();
    }

    /// Drops the denials of a key after a change of its state. Returns the generation before.
    pub(super) fn forget(&self, name: &[u8]) -> u64 {
        let fingerprint = self.fingerprint(name);
        let Some((mut set, generations)) = self.set(fingerprint) else { return 0 };
        self.remove(&mut set, |entry| entry.fingerprint == fingerprint);
        generations.fetch_add(1, Ordering::SeqCst)
    }

    /// Drops the denials of a key that a request has charged. Returns the times for a denial that follows from the
    /// state after the charge. It is not certain if the key has changed otherwise since the request was sent.
    pub(super) fn charged(&self, name: &[u8], times: Times) -> Times {
        let is_unchanged = self.forget(name) == times.generation;
        Times { generation: times.generation.wrapping_add(u64::from(is_unchanged)), ..times }
    }

    /// Drops all denials.
    pub(super) fn clear(&self) {
        self.clear_if(|_| true);
    }

    /// Drops all denials by one store, where resets may have been missed.
    pub(super) fn clear_store(&self, store: StoreIndex) {
        self.clear_if(|entry| entry.terms.store == store);
    }

    fn clear_if(&self, is_removed: impl Fn(&Entry) -> bool) {
        for (set, generations) in self.sets.iter().zip(&self.generations) {
            generations.fetch_add(1, Ordering::SeqCst);
            self.remove(&mut set.lock().unwrap_or_else(PoisonError::into_inner), &is_removed);
        }
    }
}

impl Drop for Denials {
    fn drop(&mut self) {
        self.clear();
        self.memory.give_back(self.sets.len() * EMPTY_SET_BYTES);
    }
}

impl Entry {
    fn is_of(&self, fingerprint: u64, hit: &ScriptHit) -> bool {
        self.fingerprint == fingerprint && Arc::ptr_eq(&self.terms, &hit.terms)
    }

    /// Returns whether the entry has only the verdict for its own cost.
    fn is_verdict(&self) -> bool {
        matches!(self.state, KeyState::Verdict(_))
    }

    /// Returns the denial as of now, with its time by the store's clock.
    fn denial(&self, hit: &ScriptHit, now: Timestamp) -> Option<(Verdict, Timestamp)> {
        let since = now.as_micros().saturating_sub(self.received_at.as_micros());
        let at = Timestamp::from_micros(self.at.as_micros().saturating_add(since));
        let verdict = match &self.state {
            // The script computed the verdict at that time: subtract the time that has passed.
            KeyState::Verdict(verdict) if hit.cost == self.cost => aged(*verdict, since),
            KeyState::Verdict(verdict) => aged(until_reset(*verdict), since),
            state => state.verdict(&hit.terms, at, hit.cost),
        };
        (!verdict.is_allowed()).then_some((verdict, at))
    }
}

/// Returns the number of costs of a key that have entries.
fn costs(set: &[Entry], fingerprint: u64, hit: &ScriptHit) -> usize {
    set.iter().filter(|entry| entry.is_of(fingerprint, hit)).count()
}

/// Returns the entry that is valid for a cost: among several, that of the highest cost.
fn valid_entry<'s>(set: &'s mut [Entry], fingerprint: u64, hit: &ScriptHit) -> Option<&'s mut Entry> {
    let costs = costs(set, fingerprint, hit);
    // A cost that never fits has no `retry_after`.
    let any_cost = || costs >= MAX_COSTS && hit.terms.compiled.largest_cost().is_some_and(|most| hit.cost <= most);
    let is_valid = |entry: &&mut Entry| {
        let is_lower = entry.is_of(fingerprint, hit) && entry.cost <= hit.cost;
        is_lower && (entry.cost == hit.cost || !entry.is_verdict() || any_cost())
    };
    set.iter_mut().filter(is_valid).max_by_key(|entry| entry.cost)
}

/// Returns the denial of a cost with the time after which any cost fits.
fn until_reset(verdict: Verdict) -> Verdict {
    Verdict { admission: Admission::Denied { retry_after: verdict.reset_after }, ..verdict }
}

fn aged(verdict: Verdict, by: u64) -> Verdict {
    let admission = match verdict.admission {
        Admission::Denied { retry_after } => Admission::Denied { retry_after: retry_after.saturating_sub(by) },
        other => other,
    };
    Verdict { admission, reset_after: verdict.reset_after.saturating_sub(by), ..verdict }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HOUR, Limit, SlidingWindowCounter};

    const NOW: Timestamp = Timestamp::from_micros(1_000_000_000_000_000);

    /// Caches a denial, if there is memory for it. Returns whether it was cached.
    fn remember(denials: &Denials, terms: &Arc<Terms>, key: usize) -> bool {
        remember_at(denials, terms, key, NOW)
    }

    fn remember_at(denials: &Denials, terms: &Arc<Terms>, key: usize, at: Timestamp) -> bool {
        let name: Arc<[u8]> = Arc::from(key.to_string().as_bytes());
        let hit = ScriptHit { terms: terms.clone(), siblings: Arc::from([]), name, cost: 1 };
        let segments = terms.compiled.parameters(1)[3] as usize;
        // All segments are full.
        let numbers = std::iter::once(at.as_micros()).chain(std::iter::repeat_n(100, segments + 1)).collect();
        let times = Times { sent_at: at, received_at: at, generation: denials.generation(&hit.name) };
        let state = KeyState::Numbers(numbers);
        denials.remember(&hit, &state, at, 1_000_000, times);
        let certain = denials.certain(&hit, at);
        let denial = (state.verdict(&hit.terms, at, hit.cost), at);
        assert!(!denial.0.is_allowed() && certain.is_none_or(|certain| certain == denial), "{certain:?}");
        certain.is_some()
    }

    #[test]
    fn denials_stay_within_an_eighth_of_the_memory_whatever_the_segments() {
        for (segments, keys) in [(1, 2_000), (6, 1_000), (7, 1_000), (1440, 50)] {
            let limit = Limit::new("l", SlidingWindowCounter::new(100, HOUR).segments(segments)).unwrap();
            let terms = Arc::new(Terms::new(limit.compiled(), 100, Vec::new()));
            for max in [0, 10_000, 1 << 20] {
                let budget = Budget::new(max);
                let denials = Denials::new(budget.clone());
                // A reload creates new terms for the same keys.
                for terms in [&terms, &Arc::new(Terms::new(limit.compiled(), 100, Vec::new()))] {
                    for key in 0..keys {
                        let _ = remember(&denials, terms, key);
                    }
                    for set in &denials.sets {
                        let set = set.lock().unwrap();
                        assert!(set.capacity() <= WAYS);
                        assert!(set.iter().all(|entry| entry.state.numbers().len() <= MAX_NUMBERS));
                    }
                    assert!(budget.used() <= max / SHARE_OF_MEMORY, "{} of {max}", budget.used());
                    assert!(max < 1 << 20 || budget.used() > SET_BYTES, "{} of {max}", budget.used());
                }
                drop(denials);
                assert_eq!(budget.used(), 0, "all is given back");
            }
        }
    }

    #[test]
    fn denials_leave_the_rest_of_the_memory_alone() {
        let limit = Limit::new("l", SlidingWindowCounter::new(100, HOUR)).unwrap();
        let terms = Arc::new(Terms::new(limit.compiled(), 100, Vec::new()));
        let budget = Budget::new(1 << 20);
        let of_keys = (1 << 20) - 20_000;
        assert!(budget.reserve(of_keys), "keys have taken nearly all");
        let denials = Denials::new(budget.clone());
        let cached = (0..1_000).filter(|key| remember(&denials, &terms, *key)).count();
        let full_sets = denials.sets.iter().filter(|set| !set.lock().unwrap().is_empty()).count();
        assert!(cached > 0 && full_sets < denials.sets.len(), "{cached} in {full_sets} sets");
        assert!(denials.sets.iter().all(|set| !set.lock().unwrap().is_empty() || set.lock().unwrap().capacity() == 0));
        let of_cache = denials.sets.len() * EMPTY_SET_BYTES + full_sets * SET_BYTES;
        assert_eq!(budget.used(), of_keys + of_cache, "every set with entries is counted");
        drop(denials);
        assert_eq!(budget.used(), of_keys);
    }

    #[test]
    fn ended_denials_make_room_for_others() {
        let limit = Limit::new("l", SlidingWindowCounter::new(100, HOUR)).unwrap();
        let terms = Arc::new(Terms::new(limit.compiled(), 100, Vec::new()));
        let budget = Budget::new(1 << 20);
        let denials = Denials::new(budget.clone());
        assert!(remember(&denials, &terms, 0));
        while budget.reserve(64) {}
        let set_of = |key: usize| denials.fingerprint(key.to_string().as_bytes()) as usize % denials.sets.len();
        let elsewhere = |at| (1..100).any(|key| set_of(key) != set_of(0) && remember_at(&denials, &terms, key, at));
        assert!(!elsewhere(NOW), "there is no memory for another set");
        assert!(elsewhere(NOW.saturating_add(2 * MAX_AGE)));
    }
}

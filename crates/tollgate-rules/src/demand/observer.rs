//! Observes the demand on one limit while it decides.
//!
//! A request of a client outside the sample costs one load. For a client in the sample, it takes the lock of a shard,
//! which clients with other hashes rarely share. Nothing allocates once the sample is full.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tollgate::Timestamp;
use tollgate::internal::whole_micros;

use super::meter::{Measure, Meter};
use super::needs::bucket;
use super::sample::contains;
use super::sketch::{MAX_CLIENTS, Record, Sketch, epoch_length, tick};

/// Shards of the sample, so that threads rarely wait for each other.
const SHARDS: usize = 16;

/// The most clients of a shard: some more than its share, because hashes are not spread evenly.
const MAX_IN_SHARD: usize = MAX_CLIENTS / SHARDS * 5 / 4;

/// The demand on one limit.
#[derive(Debug)]
pub struct Observer {
    measure: Measure,
    over: Duration,
    /// The seed of the hashes of keys on a shared store. It is the same on all nodes.
    seed: AtomicU64,
    /// The level of the sample.
    level: AtomicU32,
    shards: [Padded; SHARDS],
}

/// A shard on cache lines that no other shard uses.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Padded(Mutex<Shard>);

#[derive(Debug, Default)]
struct Shard {
    level: u32,
    epoch: u32,
    clients: HashMap<u64, Client, ahash::RandomState>,
}

#[derive(Debug)]
struct Client {
    meter: Meter,
    /// The largest need since the last commit.
    need: u16,
    record: Record,
}

/// A request on the limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Observation {
    /// A hash of the key, over all 64 bits.
    pub(crate) client: u64,
    pub(crate) cost: u64,
    pub(crate) at: Timestamp,
    /// Whether this limit denied the request.
    pub(crate) is_denied: bool,
    /// The need according to a store that other nodes use too, which is more than this node has seen.
    pub(crate) need_on_store: u64,
}

/// What becomes of the needs since the last commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// They count.
    Keep,
    /// They are forgotten: they may be those of an attack.
    Discard,
}

impl Observer {
    /// Creates an observer of a limit that learns from the last `over`.
    #[must_use]
    pub fn new(measure: Measure, over: Duration, seed: u64) -> Self {
        Self { measure, over, seed: seed.into(), level: AtomicU32::new(0), shards: Default::default() }
    }

    /// Returns whether the observations are those of a limit with this measure that learns from the last `over`.
    #[must_use]
    pub fn is_of(&self, measure: Measure, over: Duration) -> bool {
        (self.measure, self.over) == (measure, over)
    }

    pub(super) fn measured(&self) -> (Measure, Duration) {
        (self.measure, self.over)
    }

    /// Returns the seed of the hashes of keys on a shared store.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed.load(Ordering::Relaxed)
    }

    /// Hashes keys like the other nodes do from now on. Clients that were hashed with another seed are forgotten. Returns
    /// whether the seed is another one than before.
    pub fn adopt_seed(&self, seed: u64) -> bool {
        let is_new = self.seed.swap(seed, Ordering::Relaxed) != seed;
        if is_new {
            (0..SHARDS).for_each(|index| self.shard(index).clients.clear());
        }
        is_new
    }

    /// Returns the hash of a key on a shared store.
    #[cfg(feature = "redis")]
    pub(crate) fn hash(&self, key: &[u8]) -> u64 {
        let seed = self.seed();
        ahash::RandomState::with_seeds(seed, !seed, seed.rotate_left(32), 1).hash_one(key)
    }

    #[inline]
    pub(crate) fn observe(&self, seen: Observation) {
        if seen.cost > 0 && contains(self.level.load(Ordering::Relaxed), seen.client) {
            self.observe_sampled(seen);
        }
    }

    #[inline(never)]
    fn observe_sampled(&self, Observation { client, cost, at, is_denied, need_on_store }: Observation) {
        let mut shard = self.shard(client as usize % SHARDS);
        if !shard.clients.contains_key(&client) && shard.clients.len() >= MAX_IN_SHARD {
            let level = self.level.load(Ordering::Relaxed).max(shard.level + 1);
            self.level.fetch_max(level, Ordering::Relaxed);
            shard.raise_level(level);
            if shard.clients.len() >= MAX_IN_SHARD || !contains(level, client) {
                return;
            }
        }
        let new = || Client { meter: self.measure.meter(at), need: 0, record: Record::default() };
        let client = shard.clients.entry(client).or_insert_with(new);
        let need = client.meter.add(self.measure, cost, at).max(need_on_store);
        client.need = client.need.max(bucket(need));
        client.record.seen = tick(at);
        if is_denied {
            client.record.denied = tick(at);
        }
    }

    /// Returns a shard at the present level.
    fn shard(&self, index: usize) -> MutexGuard<'_, Shard> {
        let mut shard = self.shards[index % SHARDS].0.lock().unwrap_or_else(PoisonError::into_inner);
        let level = self.level.load(Ordering::Relaxed);
        if shard.level != level {
            shard.raise_level(level);
            shard.level = level;
        }
        shard
    }

    /// Returns the clients in the sample, with what was committed of their needs.
    #[must_use]
    pub fn sketch(&self) -> Sketch {
        let (mut level, mut epoch, mut clients) = (0, 0, Vec::new());
        for index in 0..SHARDS {
            let shard = self.shard(index);
            (level, epoch) = (level.max(shard.level), epoch.max(shard.epoch));
            clients.extend(shard.clients.iter().map(|(client, state)| (*client, state.record, shard.epoch)));
        }
        let advanced = |(client, mut record, before): (u64, Record, u32)| {
            record.advance(before, epoch);
            (client, record)
        };
        let mut sketch = Sketch { level, epoch, newest: 0, clients: clients.into_iter().map(advanced).collect() };
        sketch.trim();
        sketch
    }

    /// Ends an interval: keeps the needs since the last commit, or discards them.
    pub fn commit(&self, now: Timestamp, commit: Commit) {
        let length = whole_micros(epoch_length(self.over));
        let epoch = u32::try_from(now.as_micros() / length).unwrap_or(u32::MAX);
        let now = tick(now);
        for index in 0..SHARDS {
            let mut shard = self.shard(index);
            let before = shard.epoch;
            let epoch = epoch.max(before);
            for client in shard.clients.values_mut() {
                client.record.advance(before, epoch);
                let need = &mut client.record.needs[epoch as usize % client.record.needs.len()];
                if commit == Commit::Keep {
                    *need = (*need).max(client.need);
                }
                client.need = 0;
            }
            shard.clients.retain(|_, client| !client.record.is_idle(now));
            shard.epoch = epoch;
        }
    }

    /// Samples as many clients as a sketch that was merged with those of other nodes.
    pub fn follow_level(&self, sketch: &Sketch) {
        self.level.store(sketch.level, Ordering::Relaxed);
    }
}

impl Shard {
    fn raise_level(&mut self, level: u32) {
        if level > self.level {
            self.level = level;
            self.clients.retain(|client, _| contains(level, *client));
        }
    }
}

#[cfg(test)]
mod tests {
    use tollgate::{DAY, HOUR, MINUTE};

    use super::*;

    const START: Timestamp = Timestamp::from_secs(1_700_000_000);

    fn observer() -> Observer {
        Observer::new(Measure::fixed_window(MINUTE), DAY * 7, 0)
    }

    fn request(client: u64) -> Observation {
        Observation { client, cost: 1, at: START, is_denied: false, need_on_store: 0 }
    }

    fn spread(client: u64) -> u64 {
        client.wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    #[test]
    fn needs_count_once_committed_unless_discarded() {
        let observer = observer();
        (0..100).for_each(|client| observer.observe(request(spread(client))));
        assert_eq!(observer.sketch().needs().clients(), 0);
        observer.commit(START, Commit::Discard);
        assert_eq!(observer.sketch().needs().clients(), 0);
        (0..100).for_each(|client| observer.observe(request(spread(client))));
        observer.commit(START, Commit::Keep);
        assert_eq!(observer.sketch().needs().clients(), 0, "they have not returned yet");
        let later = START.saturating_add(DAY * 2);
        (0..100).for_each(|client| observer.observe(Observation { at: later, ..request(spread(client)) }));
        observer.commit(later, Commit::Keep);
        let needs = observer.sketch().needs();
        assert_eq!((needs.clients(), needs.max()), (100, Some(2)));
    }

    #[test]
    fn millions_of_clients_leave_a_bounded_sample_and_room_returns() {
        let observer = observer();
        (0..300_000).for_each(|client| observer.observe(request(spread(client))));
        let sketch = observer.sketch();
        assert!(
            sketch.clients.len() <= MAX_CLIENTS && sketch.clients.len() > MAX_CLIENTS / 4,
            "{}",
            sketch.clients.len()
        );
        // The attack was discarded, and an hour later nothing is left of it.
        observer.commit(START, Commit::Discard);
        let later = START.saturating_add(HOUR * 2);
        observer.commit(later, Commit::Keep);
        for _ in 0..20 {
            let mut sketch = observer.sketch();
            sketch.lower_level();
            observer.follow_level(&sketch);
        }
        (0..1000).for_each(|client| observer.observe(Observation { at: later, ..request(spread(client)) }));
        assert_eq!(observer.sketch().clients.len(), 1000);
    }

    #[test]
    fn clients_of_the_last_minutes_are_active() {
        let observer = observer();
        (0..10).for_each(|client| observer.observe(request(spread(client))));
        observer.observe(Observation { is_denied: true, ..request(spread(3)) });
        let activity = |now| {
            let activity = observer.sketch().activity(now);
            (activity.seen, activity.denied)
        };
        assert_eq!(activity(START), (10, 1));
        assert_eq!(activity(START.saturating_add(HOUR)), (0, 0));
    }
}

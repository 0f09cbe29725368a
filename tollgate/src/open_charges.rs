//! Units that requests in progress have taken and may give back: *pending* units.
//!
//! A denial that only these cause is no evidence that the key has spent its quota, and it can end much sooner than the
//! window. So a limiter that denies a request checks whether the request would be admitted without the open charges of
//! its key. Allowed requests look up no open charges.
//!
//! An open charge ends when it is settled, when its holder is dropped, and at its deadline. Then its units are spent.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use smallvec::SmallVec;

use crate::algorithm::Charge;

/// The most charges that are open at a time: about 10 MiB. Further ones count as spent.
const MOST: usize = 100_000;
const SHARDS: usize = 16;

type Shard = Mutex<HashMap<u64, SmallVec<[OpenCharge; 1]>>>;

/// The open charges of all keys of a limiter.
#[derive(Default)]
pub(crate) struct OpenCharges {
    shards: [Shard; SHARDS],
    count: AtomicUsize,
    next: AtomicU64,
}

#[derive(Clone, Copy)]
pub(crate) struct OpenCharge {
    id: u64,
    pub(crate) charge: Charge,
    /// The time at which it counts as spent.
    pub(crate) until: u64,
}

/// Identifies an open charge.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenId {
    key: u64,
    id: u64,
}

impl OpenCharges {
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Relaxed) == 0
    }

    /// Opens a charge of a key. `None` if too many are open.
    pub(crate) fn open(&self, key: u64, charge: Charge, until: u64) -> Option<OpenId> {
        if self.count.fetch_add(1, Ordering::Relaxed) >= MOST {
            self.count.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let mut shard = self.shard(key).lock().unwrap_or_else(PoisonError::into_inner);
        shard.entry(key).or_default().push(OpenCharge { id, charge, until });
        Some(OpenId { key, id })
    }

    /// Ends an open charge. Returns `false` if it has ended before.
    pub(crate) fn close(&self, OpenId { key, id }: OpenId) -> bool {
        let mut shard = self.shard(key).lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = shard.get_mut(&key) else { return false };
        let before = open.len();
        open.retain(|one| one.id != id);
        let closed = before - open.len();
        self.count.fetch_sub(closed, Ordering::Relaxed);
        if open.is_empty() {
            shard.remove(&key);
        }
        closed > 0
    }

    /// Ends all open charges of a key.
    pub(crate) fn close_all(&self, key: u64) {
        if self.is_empty() {
            return;
        }
        let closed = self.shard(key).lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        self.count.fetch_sub(closed.map_or(0, |open| open.len()), Ordering::Relaxed);
    }

    /// Returns a mark between the charges that were opened before and those that are opened from now on.
    #[cfg(feature = "redis")]
    pub(crate) fn mark(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }

    /// Ends the open charges of a key that were made until then, or opened before the mark.
    #[cfg(feature = "redis")]
    pub(crate) fn close_until(&self, key: u64, until: u64, mark: u64) {
        let mut shard = self.shard(key).lock().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = shard.get_mut(&key) else { return };
        let before = open.len();
        open.retain(|one| one.charge.at > until && one.id >= mark);
        self.count.fetch_sub(before - open.len(), Ordering::Relaxed);
        if open.is_empty() {
            shard.remove(&key);
        }
    }

    fn has(&self, OpenId { key, id }: OpenId) -> bool {
        let shard = self.shard(key).lock().unwrap_or_else(PoisonError::into_inner);
        shard.get(&key).is_some_and(|open| open.iter().any(|one| one.id == id))
    }

    /// Returns whether a key has open charges, or some that have ended at their deadline.
    #[cfg(feature = "redis")]
    pub(crate) fn has_any(&self, key: u64) -> bool {
        !self.is_empty() && self.shard(key).lock().unwrap_or_else(PoisonError::into_inner).contains_key(&key)
    }

    /// Returns the open charges of a key at `now`, the earliest deadline first.
    pub(crate) fn of(&self, key: u64, now: u64) -> SmallVec<[OpenCharge; 8]> {
        let shard = self.shard(key).lock().unwrap_or_else(PoisonError::into_inner);
        let open = shard.get(&key).into_iter().flatten().filter(|open| open.until > now);
        let mut open: SmallVec<[OpenCharge; 8]> = open.copied().collect();
        drop(shard);
        open.sort_unstable_by_key(|open| open.until);
        open
    }

    fn shard(&self, key: u64) -> &Shard {
        &self.shards[key as usize % SHARDS]
    }
}

/// Open charges that end when this is dropped, at the latest.
pub struct Held {
    of: Arc<OpenCharges>,
    /// By the position of the hit.
    each: SmallVec<[Option<OpenId>; 2]>,
}

impl Held {
    pub(crate) fn new(of: &Arc<OpenCharges>, each: impl Iterator<Item = Option<OpenId>>) -> Self {
        Self { of: of.clone(), each: each.collect() }
    }

    /// Ends the open charge of one hit. Returns `false` if a reset of the key has ended it: nothing of it counts any more.
    pub fn close(&self, hit: usize) -> bool {
        self.each.get(hit).copied().flatten().is_none_or(|id| self.of.close(id))
    }

    /// Returns whether all open charges are of this key.
    pub fn is_of(&self, key: u64) -> bool {
        self.each.iter().flatten().all(|id| id.key == key)
    }

    /// Returns `false` if resets have ended all open charges.
    pub fn is_open(&self) -> bool {
        let mut open = self.each.iter().flatten();
        open.clone().next().is_none() || open.any(|id| self.of.has(*id))
    }

    /// Ends all open charges. Returns `false` if resets have ended them before.
    pub fn close_all(&self) -> bool {
        let closed = self.each.iter().flatten().filter(|id| self.of.close(**id)).count();
        closed > 0 || self.each.iter().flatten().next().is_none()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.each.iter().flatten().for_each(|id| _ = self.of.close(*id));
    }
}

impl std::fmt::Debug for Held {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_tuple("Held").field(&self.each).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(at: u64) -> Charge {
        Charge { at, cost: 1 }
    }

    #[test]
    fn charges_end_when_closed_and_at_their_deadline() {
        let open = OpenCharges::default();
        let [first, second] = [30, 20].map(|until| open.open(7, charge(1), until).expect("there is room"));
        open.open(8, charge(1), 10).expect("there is room");
        let deadlines = |now| open.of(7, now).iter().map(|open| open.until).collect::<Vec<_>>();
        assert_eq!(deadlines(5), [20, 30]);
        assert_eq!(deadlines(20), [30]);
        assert!(open.close(first) && !open.close(first));
        assert_eq!(deadlines(5), [20]);
        assert!(open.close(second));
        assert!(deadlines(0).is_empty() && !open.is_empty());
        open.close_all(8);
        assert!(open.is_empty());
    }

    #[test]
    fn too_many_are_not_recorded() {
        let open = OpenCharges::default();
        let ids: Vec<_> = (0..MOST as u64).map(|key| open.open(key, charge(0), 9).expect("there is room")).collect();
        assert!(open.open(1, charge(0), 9).is_none());
        assert!(open.close(ids[5]));
        assert!(open.open(1, charge(0), 9).is_some());
    }
}

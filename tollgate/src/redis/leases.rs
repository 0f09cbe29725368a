//! Leases: slices of a busy key's quota, taken in advance and spent by this process. `algorithm/leased.rs` explains why
//! leases never exceed the limit.
//!
//! A key is leased once it is busy: requests for an idle key take one round trip each. The size of a slice follows the
//! recent demand. A slice lives for a horizon, which begins by this node's clock before the slice is requested, and is
//! renewed before it is spent. The rest of an expired slice is given back. If this node dies, its slices are missing
//! until the limit refills.
//!
//! A request with several limits holds the units that it took from slices until the other limits have decided. If one
//! of them denies, the units go back to their slices.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::{Notify, Semaphore};

use super::lease::{Granted, Lease, Leftover, SHARE, SliceRequest, SliceUnits};
use super::script::{ScriptHit, Terms};
use super::stores::StoreIndex;
use crate::units::Timestamp;

/// Maximum number of leased keys. The store decides for further keys.
const MAX_LEASES: usize = 16_384;
const SHARDS: usize = 16;
/// Units requested within a horizon from which a key is leased.
const MIN_DEMAND: u64 = 4;
/// Time between two sweeps for expired slices.
pub(super) const SWEEP_EVERY: Duration = Duration::from_millis(50);

/// The leases of each key, one for each of its terms: nearly always one.
type ByName = HashMap<Arc<[u8]>, SmallVec<[Lease; 1]>, ahash::RandomState>;

pub(super) struct Leases {
    shards: [Mutex<ByName>; SHARDS],
    hasher: ahash::RandomState,
    /// Notified when a lease is added, for the task that sweeps them.
    taken: Notify,
    /// Whether the subscription to resets is up, for each store. Without it, no slices are taken.
    is_subscribed: Box<[AtomicBool]>,
}

/// How a request spends from a lease.
#[derive(Clone, Copy)]
pub(super) struct Spending {
    pub(super) quota: u64,
    /// The lifetime of a slice in microseconds.
    pub(super) horizon: u64,
    pub(super) purpose: Purpose,
}

/// The use of the units that a request takes from a slice.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Spends them.
    Spend,
    /// Holds them until the other limits have decided, and then [keeps](Leases::keep) them or [gives them
    /// back](Leases::give_back).
    Hold,
}

/// Whether a request has tried before. Only the first attempt counts as demand.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    First,
    Again,
}

/// The result of an attempt to spend from a slice.
pub(super) enum SpendResult {
    /// The units were taken. If `renew` is set, the caller requests the next slice in the background.
    Spent { held: SliceUnits, remaining: u64, reset_after: u64, renew: Option<SliceRequest> },
    /// The caller requests a slice from the store.
    Renew(SliceRequest),
    /// A slice is being requested. The semaphore is closed when the reply arrives.
    Wait(Arc<Semaphore>),
    /// The store had no units a moment ago. A slice is requested again after `wait` microseconds.
    Exhausted { wait: u64 },
    /// The store decides.
    Exact,
}

/// The prospect of a hit on a lease.
pub(super) enum Outlook {
    /// It would spend from a slice, or request one from the store.
    Open,
    /// It would be denied: there are no units, and no slice is requested for `wait` microseconds.
    Exhausted { wait: u64 },
    /// The store decides.
    Exact,
}

impl Leases {
    pub(super) fn new(stores: usize) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            hasher: ahash::RandomState::new(),
            taken: Notify::new(),
            is_subscribed: (0..stores).map(|_| AtomicBool::new(false)).collect(),
        }
    }

    fn shard(&self, name: &[u8]) -> MutexGuard<'_, ByName> {
        let shard = &self.shards[self.hasher.hash_one(name) as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes units from a slice, or returns the alternative.
    pub(super) fn spend(&self, hit: &ScriptHit, spending: Spending, attempt: Attempt, now: Timestamp) -> SpendResult {
        let Spending { quota, horizon, purpose } = spending;
        // No slice is large enough, so this does not count as demand.
        if hit.cost > quota / SHARE {
            return SpendResult::Exact;
        }
        let mut shard = self.shard(&hit.name);
        // Read under the lock, so that no slice is taken after `subscription_lost` has processed this shard.
        let may_renew = self.is_subscribed_for(hit);
        if find(&mut shard, hit).is_none() {
            if !may_renew || shard.len() >= MAX_LEASES / SHARDS {
                return SpendResult::Exact;
            }
            shard.entry(hit.name.clone()).or_default().push(Lease::new(hit.clone(), horizon, now));
            self.taken.notify_one();
        }
        let Some(lease) = find(&mut shard, hit).filter(|lease| !lease.is_withdrawn()) else {
            return SpendResult::Exact;
        };
        if attempt == Attempt::First {
            lease.count(hit.cost, now);
        }
        if let Some(held) = lease.spend(hit.cost, now) {
            if purpose == Purpose::Hold {
                lease.hold();
            }
            let is_low = may_renew && lease.is_low(hit.cost, quota, now);
            let renew = is_low.then(|| lease.begin_renewing(hit.cost, quota, now));
            let (remaining, reset_after) = lease.remaining(now);
            return SpendResult::Spent { held, remaining, reset_after, renew };
        }
        if let Some(renewal) = lease.renewal() {
            return SpendResult::Wait(renewal.clone());
        }
        if !may_renew || lease.expected_demand() < MIN_DEMAND {
            return SpendResult::Exact;
        }
        match lease.exhausted_for(hit.cost, now) {
            0 => SpendResult::Renew(lease.begin_renewing(hit.cost, quota, now)),
            wait => SpendResult::Exhausted { wait },
        }
    }

    /// Predicts [`spend`](Self::spend). Only a denial counts as demand.
    pub(super) fn outlook(&self, hit: &ScriptHit, quota: u64, now: Timestamp) -> Outlook {
        if hit.cost > quota / SHARE {
            return Outlook::Exact;
        }
        let mut shard = self.shard(&hit.name);
        let Some(lease) = find(&mut shard, hit).filter(|lease| !lease.is_withdrawn()) else { return Outlook::Exact };
        if lease.can_spend(hit.cost, now) || lease.renewal().is_some() {
            return Outlook::Open;
        }
        if !self.is_subscribed_for(hit) || lease.expected_demand() < MIN_DEMAND {
            return Outlook::Exact;
        }
        match lease.exhausted_for(hit.cost, now) {
            0 => Outlook::Open,
            wait => {
                lease.count(hit.cost, now);
                Outlook::Exhausted { wait }
            }
        }
    }

    /// Keeps the units that a request held: all its limits allowed it.
    pub(super) fn keep(&self, hit: &ScriptHit) {
        if let Some(lease) = find(&mut self.shard(&hit.name), hit) {
            lease.keep();
        }
    }

    /// Puts the units that a request held back into their slice.
    pub(super) fn give_back(&self, hit: &ScriptHit, held: SliceUnits) {
        if let Some(lease) = find(&mut self.shard(&hit.name), hit) {
            lease.give_back(hit.cost, held);
        }
    }

    /// Puts the units of a request that was admitted back into their slice: see [`Lease::refund`].
    pub(super) fn refund(&self, hit: &ScriptHit, held: SliceUnits, now: Timestamp) -> bool {
        find(&mut self.shard(&hit.name), hit).is_some_and(|lease| lease.refund(hit.cost, held, now))
    }

    /// Ends a renewal: see [`Lease::renewed`].
    pub(super) fn renewed(&self, hit: &ScriptHit, granted: Option<Granted>, short: Option<(u64, Timestamp)>) {
        if let Some(lease) = find(&mut self.shard(&hit.name), hit) {
            lease.renewed(granted, short);
        }
    }

    /// Removes slices that have expired, and keys that have been quiet for long. Returns the unspent rest.
    pub(super) fn sweep(&self, now: Timestamp, all: bool) -> Vec<Leftover> {
        let mut leftovers = Vec::new();
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.retain(|_, leases| {
                leases.retain(|lease| lease.sweep(now, all, &mut leftovers));
                !leases.is_empty()
            });
        }
        leftovers
    }

    /// Returns the number of slices with units left, and the sum of these units.
    pub(super) fn held(&self, now: Timestamp) -> (u64, u64) {
        let shards = self.shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner));
        let of_shard = |shard: MutexGuard<'_, ByName>| {
            let held = shard.values().flatten().flat_map(|lease| lease.units_held(now));
            held.fold((0, 0), |(slices, sum), units| (slices + 1, sum + units))
        };
        shards.map(of_shard).fold((0, 0), |(slices, sum), (more, units)| (slices + more, sum + units))
    }

    /// Returns the renewals in flight.
    pub(super) fn renewals(&self) -> Vec<Arc<Semaphore>> {
        let shards = self.shards.iter().map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner));
        let renewals = |shard: MutexGuard<'_, ByName>| -> Vec<_> {
            shard.values().flatten().filter_map(|lease| lease.renewal().cloned()).collect()
        };
        shards.flat_map(renewals).collect()
    }

    /// Drops the slices of a key that is about to be reset.
    pub(super) fn drop_slices(&self, name: &[u8]) {
        self.shard(name).get_mut(name).into_iter().flatten().for_each(Lease::drop_slices);
    }

    /// Drops the slices of a key that were charged before it was reset: see [`Lease::forget`].
    pub(super) fn forget(&self, name: &[u8], reset_at: Option<Timestamp>) {
        self.shard(name).get_mut(name).into_iter().flatten().for_each(|lease| lease.forget(reset_at));
    }

    fn is_subscribed_for(&self, hit: &ScriptHit) -> bool {
        self.is_subscribed[hit.terms.store.position()].load(Ordering::Relaxed)
    }

    /// Allows slices from a store, because the subscription to its resets is up.
    pub(super) fn subscription_up(&self, store: StoreIndex) {
        self.is_subscribed[store.position()].store(true, Ordering::Relaxed);
    }

    /// Stops taking slices from a store, and giving them back, because the subscription to its resets is lost. Any key
    /// may be reset meanwhile, and the rest of a slice from before the reset would give back units that others have
    /// spent since.
    pub(super) fn subscription_lost(&self, store: StoreIndex) {
        self.is_subscribed[store.position()].store(false, Ordering::Relaxed);
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let of_store = shard.values_mut().flatten().filter(|lease| lease.hit.terms.store == store);
            of_store.for_each(Lease::subscription_lost);
        }
    }

    /// Ends all leases except those whose terms are kept. The next sweep gives their rest back.
    pub(super) fn withdraw_unless(&self, kept: impl Fn(&Arc<Terms>) -> bool) {
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.values_mut().flatten().filter(|lease| !kept(&lease.hit.terms)).for_each(Lease::withdraw);
        }
    }

    /// Waits until there are leases.
    pub(super) async fn taken(&self) {
        self.taken.notified().await;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).is_empty())
    }
}

/// Returns the lease of a key by the terms of a hit.
fn find<'a>(shard: &'a mut ByName, hit: &ScriptHit) -> Option<&'a mut Lease> {
    shard.get_mut(&hit.name)?.iter_mut().find(|lease| Arc::ptr_eq(&lease.hit.terms, &hit.terms))
}

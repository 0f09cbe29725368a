//! Slices of a busy key's quota, taken in advance and spent here: see `algorithm/leased.rs` for why that admits
//! nothing too much.
//!
//! A key is leased once it is busy: a quiet one is decided by the store, one trip each. A slice is sized by what
//! was asked of the key lately, lives for a horizon counted by this node's clock from before it was asked for,
//! and is renewed before it runs out. What is left when it dies is given back. If this node dies, what it had
//! taken is missing until the limit itself gives it back: at most one slice.
//!
//! A request with several limits holds the units that it took from slices until the others have decided. If one of them
//! denies, the units go back to their slices.

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

/// Keys leased at once. Beyond that the store decides.
const MAX_LEASES: usize = 16_384;
const SHARDS: usize = 16;
/// Units asked for within a horizon before a key is worth a slice.
const MIN_DEMAND: u64 = 4;
/// How often the dead slices are looked for.
pub(super) const SWEEP_EVERY: Duration = Duration::from_millis(50);

/// Of each name, a lease for every set of numbers by which it is asked for: nearly always one.
type ByName = HashMap<Arc<[u8]>, SmallVec<[Lease; 1]>, ahash::RandomState>;

pub(super) struct Leases {
    shards: [Mutex<ByName>; SHARDS],
    hasher: ahash::RandomState,
    /// Rung when there is a lease where there was none, for the one who looks after them.
    taken: Notify,
    /// Whether this process learns of resets by others, for each store. Without that, no slices are taken there.
    is_subscribed: Box<[AtomicBool]>,
}

/// How a request spends from a lease.
#[derive(Clone, Copy)]
pub(super) struct Spending {
    pub(super) quota: u64,
    /// How long a slice lives, in microseconds.
    pub(super) horizon: u64,
    pub(super) purpose: Purpose,
}

/// What a request does with the units that it takes from a slice.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Spends them.
    Spend,
    /// Holds them until its other limits have decided, and then either [keeps](Leases::keep) them or [gives them
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
    /// The units were taken. With a wish, the next slice is to be asked for meanwhile.
    Spent { held: SliceUnits, remaining: u64, reset_after: u64, renew: Option<SliceRequest> },
    /// Ask the store for a slice.
    Renew(SliceRequest),
    /// A slice is being asked for. Closed when the answer is there.
    Wait(Arc<Semaphore>),
    /// The store had nothing a moment ago. It is asked again after `wait` microseconds.
    Exhausted { wait: u64 },
    /// Let the store decide.
    Exact,
}

/// What a lease would do with a hit now.
pub(super) enum Outlook {
    /// Spend from a slice, or ask the store for one.
    Open,
    /// Deny: there are no units, and the store is not asked for `wait` microseconds.
    Exhausted { wait: u64 },
    /// Let the store decide.
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

    /// Takes units from a slice, or returns what to do instead.
    pub(super) fn spend(&self, hit: &ScriptHit, spending: Spending, attempt: Attempt, now: Timestamp) -> SpendResult {
        let Spending { quota, horizon, purpose } = spending;
        // No slice is large enough, so it is no demand for slices either.
        if hit.cost > quota / SHARE {
            return SpendResult::Exact;
        }
        let mut shard = self.shard(&hit.name);
        // Read under the lock, so that no slice is taken after `subscription_lost` has gone through this shard.
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

    /// Returns what [`spend`](Self::spend) would do. Only a denial counts as demand.
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

    /// Returns the renewals that are under way.
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

    /// Takes slices from a store from now on: this process learns of resets there.
    pub(super) fn subscription_up(&self, store: StoreIndex) {
        self.is_subscribed[store.position()].store(true, Ordering::Relaxed);
    }

    /// Takes no slices from a store until this process learns of resets there again, and gives none back. Any key may be
    /// reset meanwhile, and a slice from before the reset would give back units that others have spent since.
    pub(super) fn subscription_lost(&self, store: StoreIndex) {
        self.is_subscribed[store.position()].store(false, Ordering::Relaxed);
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let of_store = shard.values_mut().flatten().filter(|lease| lease.hit.terms.store == store);
            of_store.for_each(Lease::subscription_lost);
        }
    }

    /// Ends all leases except those by the terms that are kept. The next sweep returns what is left of them.
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

/// The lease of a key by those terms.
fn find<'a>(shard: &'a mut ByName, hit: &ScriptHit) -> Option<&'a mut Lease> {
    shard.get_mut(&hit.name)?.iter_mut().find(|lease| Arc::ptr_eq(&lease.hit.terms, &hit.terms))
}

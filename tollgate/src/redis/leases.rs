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
//!
//! The first part keeps the leases of all keys. The second spends their slices, renews them in time, and gives the rest
//! back.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, timeout, timeout_at};

use super::denials::{Known, Times};
use super::fallback::reported;
use super::lease::{Grant, Granted, Lease, Leftover, SHARE, SliceRequest, SliceUnits};
use super::script::{ScriptHit, ScriptRequest, StoreIndex, Terms};
use super::{Receipt, RedisHit, RedisHits, RedisLimiter, Shared, TakeFrom};
use crate::decision::{Admission, Decision, Source, Verdict};
use crate::units::Timestamp;

/// Maximum number of leased keys. The store decides for further keys.
const MAX_LEASES: usize = 16_384;
const SHARDS: usize = 16;
/// Units requested within a horizon from which a key is leased.
const MIN_DEMAND: u64 = 4;
/// Time between two sweeps for expired slices.
const SWEEP_EVERY: Duration = Duration::from_millis(50);

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
    purpose: Purpose,
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
    fn outlook(&self, hit: &ScriptHit, quota: u64, now: Timestamp) -> Outlook {
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

    /// Ends spending from the slices of a key that owes units: see [`Lease::owes_since`].
    pub(super) fn owes_since(&self, name: &[u8], at: Timestamp) {
        self.shard(name).get_mut(name).into_iter().flatten().for_each(|lease| lease.owes_since(at));
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

/// The decision of a lease on one hit.
enum FromLease {
    /// The units were taken from a slice.
    Taken(Decision, SliceUnits),
    Denied(Decision),
    /// The key is idle, or the cost too high for a slice: the store decides.
    UseStore,
}

/// Positions of hits in their request.
type Positions = SmallVec<[usize; 4]>;

/// The hits of a request, and the units of slices that it holds while its other limits decide. When it is dropped, the
/// units go back to their slices, even if the caller was cancelled.
struct HeldUnits<'a> {
    shared: &'a Shared,
    hits: &'a mut RedisHits,
    /// With the positions of their hits.
    held: SmallVec<[(usize, SliceUnits); 2]>,
}

impl HeldUnits<'_> {
    /// Keeps all of them: the request is admitted.
    fn keep(mut self) {
        self.shared.counts.leased.fetch_add(self.held.len() as u64, Ordering::Relaxed);
        for (index, held) in std::mem::take(&mut self.held) {
            self.shared.leases.keep(&self.hits[index].script_hit);
            self.hits[index].receipt = Receipt::Slice(held);
        }
    }
}

impl Drop for HeldUnits<'_> {
    fn drop(&mut self) {
        let Self { shared, hits, held } = self;
        held.drain(..).for_each(|(index, held)| shared.leases.give_back(&hits[index].script_hit, held));
    }
}

impl RedisLimiter {
    /// Takes all hits or none, from slices where a limit is leased, and writes the receipt of each hit.
    pub(super) async fn take_or_lease(&self, hits: &mut RedisHits, cost: u64) -> Decision {
        let deadline = self.deadline();
        let decision = self.take_anywhere(hits, cost, deadline).await;
        self.finish(hits, decision, deadline).await
    }

    async fn take_anywhere(&self, hits: &mut RedisHits, cost: u64, deadline: Instant) -> Decision {
        if hits.is_empty() {
            return Decision::without_limit(self.0.shared.clock.wall());
        }
        if let [hit] = &mut **hits {
            if let Some(spending) = self.spending(hit, Purpose::Spend) {
                match self.lease(hit, spending, deadline).await {
                    FromLease::Taken(decision, held) => {
                        hit.receipt = Receipt::Slice(held);
                        return decision;
                    }
                    FromLease::Denied(decision) => return decision,
                    FromLease::UseStore => {}
                }
            }
        } else if hits.iter().any(|hit| self.is_leased(hit)) {
            return self.take_beside_leases(hits, cost, deadline).await;
        }
        self.take(hits, cost, deadline).await
    }

    /// Takes from slices first, and then from the store for the other limits. If one of those denies, or its failure
    /// policy does, the units go back to their slices.
    async fn take_beside_leases(&self, hits: &mut RedisHits, cost: u64, deadline: Instant) -> Decision {
        let (leased, mut positions): (Positions, Positions) =
            (0..hits.len()).partition(|index| self.is_leased(&hits[*index]));
        let mut others: RedisHits = positions.iter().map(|index| hits[*index].clone()).collect();
        if let Some(denied) = self.certain_denial(&others) {
            return denied;
        }
        let mut held = HeldUnits { shared: &self.0.shared, hits, held: SmallVec::new() };
        let mut most_restrictive: Option<Decision> = None;
        for index in leased {
            let hit = &held.hits[index];
            let from_lease = match self.spending(hit, Purpose::Hold) {
                Some(spending) => self.lease(hit, spending, deadline).await,
                None => FromLease::UseStore,
            };
            match from_lease {
                FromLease::Taken(decision, units) => {
                    held.held.push((index, units));
                    most_restrictive =
                        Some(most_restrictive.map_or(decision, |other| other.most_restrictive(decision)));
                }
                FromLease::Denied(decision) => return decision,
                FromLease::UseStore => {
                    others.push(hit.clone());
                    positions.push(index);
                }
            }
        }
        let Some(leased) = most_restrictive else {
            drop(held);
            return self.take(hits, cost, deadline).await;
        };
        if others.is_empty() {
            held.keep();
            return Decision { cost, ..leased };
        }
        let decision = self.take(&mut others, cost, deadline).await;
        for (index, other) in positions.into_iter().zip(&others) {
            (held.hits[index].receipt, held.hits[index].decided) = (other.receipt, other.decided);
        }
        if decision.is_allowed() {
            held.keep();
        }
        Decision { cost, ..reported(leased, decision) }
    }

    /// Returns whether the units of a hit may be in a slice of this process.
    pub(super) fn is_leased(&self, hit: &RedisHit) -> bool {
        self.spending(hit, Purpose::Hold).is_some()
    }

    /// Returns how a hit spends from a lease, if its limit is leased.
    fn spending(&self, hit: &RedisHit, purpose: Purpose) -> Option<Spending> {
        let prepared = &self.0.limits[hit.limit.index()];
        let may_lease = hit.script_hit.cost > 0 && hit.take_from == TakeFrom::SliceOrStore;
        let horizon = prepared.horizon.filter(|_| may_lease)?;
        Some(Spending { quota: prepared.limit.quota(), horizon, purpose })
    }

    /// Decides one hit from a slice.
    async fn lease(&self, hit: &RedisHit, spending: Spending, deadline: Instant) -> FromLease {
        let inner = &*self.0;
        let (mut attempt, mut has_renewed) = (Attempt::First, false);
        loop {
            let now = inner.shared.clock.now_with_gaps();
            match inner.shared.leases.spend(&hit.script_hit, spending, attempt, now) {
                SpendResult::Exact => return FromLease::UseStore,
                SpendResult::Spent { held, remaining, reset_after, renew } => {
                    if let Some(request) = renew {
                        self.renew(&hit.script_hit, spending.horizon, request);
                    }
                    if spending.purpose == Purpose::Spend {
                        inner.shared.counts.leased.fetch_add(1, Ordering::Relaxed);
                    }
                    let verdict = Verdict { admission: Admission::Allowed { delay: 0 }, remaining, reset_after };
                    let decision = self.decision(hit, verdict, inner.shared.clock.wall(), Source::Lease);
                    return FromLease::Taken(decision, held);
                }
                SpendResult::Exhausted { wait } => {
                    let known = self.known_denial(hit, now);
                    return FromLease::Denied(known.unwrap_or_else(|| self.exhausted_denial(hit, wait)));
                }
                SpendResult::Renew(request) => {
                    // Cached denials are not consulted: other processes give slices back, which ends a denial early.
                    if has_renewed {
                        inner.shared.leases.renewed(&hit.script_hit, None, None);
                        return FromLease::UseStore;
                    }
                    has_renewed = true;
                    self.renew(&hit.script_hit, spending.horizon, request);
                }
                SpendResult::Wait(renewal) => {
                    // The semaphore has no permits: this waits until it is closed.
                    if timeout_at(deadline, renewal.acquire()).await.is_err() {
                        return FromLease::UseStore;
                    }
                }
            }
            attempt = Attempt::Again;
        }
    }

    /// Returns the prospect of a hit on its lease.
    pub(super) fn lease_outlook(&self, hit: &RedisHit, now: Timestamp) -> Outlook {
        match self.spending(hit, Purpose::Spend) {
            Some(spending) => self.0.shared.leases.outlook(&hit.script_hit, spending.quota, now),
            None => Outlook::Exact,
        }
    }

    /// Returns the denial by a lease without units, which requests a slice again after `wait` microseconds.
    pub(super) fn exhausted_denial(&self, hit: &RedisHit, wait: u64) -> Decision {
        let admission = Admission::Denied { retry_after: wait };
        let verdict = Verdict { admission, remaining: 0, reset_after: wait };
        self.decision(hit, verdict, self.0.shared.clock.wall(), Source::Lease)
    }

    fn known_denial(&self, hit: &RedisHit, now: Timestamp) -> Option<Decision> {
        match self.0.denials.known(&hit.script_hit, now) {
            Known::Denied(verdict, at) if self.0.shared.stores.is_subscribed_for(&hit.script_hit) => {
                self.0.shared.counts.cached_denials.fetch_add(1, Ordering::Relaxed);
                return Some(self.decision(hit, verdict, at, Source::DenialCache));
            }
            // No refresh is needed: only one request at a time renews a lease.
            Known::Refresh(refresh, _) => self.0.denials.end_refresh(&hit.script_hit.name, &refresh),
            _ => {}
        }
        None
    }

    fn renew(&self, script_hit: &ScriptHit, horizon: u64, request: SliceRequest) {
        let limiter = self.clone();
        let renewing =
            Renewing { limiter, script_hit: script_hit.clone(), horizon, request, granted: None, short: None };
        tokio::spawn(renewing.run());
    }

    /// Gives back the unspent slices of this process, and ends its registration among the [nodes](Self::fleet_nodes) that
    /// share local limits. Call it before the process ends: otherwise the units are missing until the limits refill, and
    /// a process that replaces this one counts in addition for some minutes.
    pub async fn leave(&self) {
        let shared = &*self.0.shared;
        let leaving = shared.stores.iter().map(|store| store.fleet.leave(&store.topology, shared.store_timeout));
        tokio::join!(join_all(leaving), self.return_leases());
    }

    /// Gives back the unspent slices of this process. Before the process ends, call [`leave`](Self::leave).
    pub async fn return_leases(&self) {
        let shared = &*self.0.shared;
        for renewal in shared.leases.renewals() {
            let _ = timeout(shared.store_timeout, renewal.acquire()).await;
        }
        shared.return_slices(true).await;
    }
}

impl Shared {
    /// Returns whether the connection on which a slice was charged is still open. After a reconnect, the server may
    /// have lost the charge, and a refund would give back units that others have spent.
    pub(super) fn is_still_charged(&self, script_hit: &ScriptHit, connection: Option<u64>) -> bool {
        connection.is_some() && connection == self.stores.of(script_hit).topology.connection_to(&script_hit.name)
    }

    async fn return_slices(&self, all: bool) {
        let leftovers = self.leases.sweep(self.clock.now_with_gaps(), all);
        let is_charged = |leftover: &Leftover| self.is_still_charged(&leftover.hit, leftover.connection);
        let leftovers = leftovers.into_iter().filter(is_charged);
        let given_back = leftovers.map(|leftover| self.undo(leftover.hit, leftover.at, leftover.before));
        // Units that cannot be given back are missing until the limit refills: too strict, never too lax.
        let returned = join_all(given_back).await.into_iter().filter(Result::is_ok).count();
        self.counts.leases_returned.fetch_add(returned as u64, Ordering::Relaxed);
    }
}

/// A renewal in its own task, so that a charged slice is not lost when the request is cancelled. Dropping it ends the
/// renewal, so that no request waits for one that was aborted.
struct Renewing {
    limiter: RedisLimiter,
    script_hit: ScriptHit,
    horizon: u64,
    request: SliceRequest,
    granted: Option<Granted>,
    short: Option<(u64, Timestamp)>,
}

impl Renewing {
    async fn run(mut self) {
        let inner = &*self.limiter.0;
        let (sent_at, choices) = (inner.shared.clock.now_with_gaps(), self.request.choices());
        let generation = inner.denials.generation(&self.script_hit.name);
        let topology = &inner.shared.stores.of(&self.script_hit).topology;
        let connection = topology.connection_to(&self.script_hit.name);
        let counts = &inner.shared.counts;
        let Ok(reply) = self.limiter.send(ScriptRequest::Slice(self.script_hit.clone(), choices.clone())).await else {
            counts.leases_failed.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let times = Times { sent_at, received_at: inner.shared.clock.now_with_gaps(), generation };
        let Some(state) = reply.states.first() else { return };
        let Some(units) = (reply.taken as usize).checked_sub(1).and_then(|index| choices.get(index)) else {
            counts.leases_refused.fetch_add(1, Ordering::Relaxed);
            let least = ScriptHit { cost: self.request.least, ..self.script_hit.clone() };
            self.limiter.remember_denial(&least, state, reply.at, times);
            self.short = Some((self.request.least, times.received_at));
            return;
        };
        inner.denials.charged(&self.script_hit.name, times);
        let lives = self.script_hit.terms.compiled.slice_lives(state.numbers(), reply.at.as_micros(), self.horizon);
        // Counted from before the request was sent: the store charged the slice later.
        let until = Timestamp::from_micros(sent_at.as_micros() + lives);
        let after = state.verdict(&self.script_hit.terms, reply.at, *units);
        let full_at = Timestamp::from_micros(times.received_at.as_micros().saturating_add(after.reset_after));
        let before = self.script_hit.terms.compiled.before(state.numbers(), reply.at.as_micros());
        counts.leases.fetch_add(1, Ordering::Relaxed);
        let is_same = |id: &u64| topology.connection_to(&self.script_hit.name) == Some(*id);
        let connection = connection.filter(is_same);
        let grant = Grant { units: *units, left: *units, until, at: reply.at, before, connection };
        self.granted = Some(Granted { grant, store_left: after.remaining, full_at });
        // Less than requested: the store is running out, so pause, and fetch returned units together.
        if *units < self.request.most {
            self.short = Some((self.request.least, times.received_at));
        }
    }
}

impl Drop for Renewing {
    fn drop(&mut self) {
        let granted = self.granted.take();
        self.limiter.0.shared.leases.renewed(&self.script_hit, granted, self.short);
    }
}

/// Gives back the rest of expired slices, until the limiter is dropped.
pub(super) async fn return_leftovers(leases: Arc<Leases>, limiter: Weak<Shared>) {
    loop {
        leases.taken().await;
        let mut every = tokio::time::interval(SWEEP_EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while !leases.is_empty() {
            every.tick().await;
            let Some(shared) = limiter.upgrade() else { return };
            shared.return_slices(false).await;
        }
    }
}

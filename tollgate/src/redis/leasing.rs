//! Decisions from leases: spends the slices of `leases.rs`, renews them in time, and gives the rest back.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::time::{Instant, timeout, timeout_at};

use super::denials::{Known, Times};
use super::fallback::reported;
use super::lease::{Grant, Granted, Leftover, SliceRequest, SliceUnits};
use super::leases::{Attempt, Leases, Outlook, Purpose, SWEEP_EVERY, SpendResult, Spending};
use super::script::{ScriptHit, ScriptRequest};
use super::{Receipt, RedisHit, RedisHits, RedisLimiter, Shared, TakeFrom};
use crate::decision::{Admission, Decision, Source, Verdict};
use crate::units::Timestamp;

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
        if hits.is_empty() {
            return Decision::without_limit(self.0.shared.clock.wall());
        }
        let deadline = self.deadline();
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
        } else if hits.iter().any(|hit| self.spending(hit, Purpose::Hold).is_some()) {
            return self.take_beside_leases(hits, cost, deadline).await;
        }
        self.take(hits, cost, deadline).await
    }

    /// Takes from slices first, and then from the store for the other limits. If one of those denies, or its failure
    /// policy does, the units go back to their slices.
    async fn take_beside_leases(&self, hits: &mut RedisHits, cost: u64, deadline: Instant) -> Decision {
        let is_leased = |hit: &RedisHit| self.spending(hit, Purpose::Hold).is_some();
        let (leased, mut positions): (Positions, Positions) =
            (0..hits.len()).partition(|index| is_leased(&hits[*index]));
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
        if decision.is_allowed() {
            for (index, other) in positions.into_iter().zip(&others) {
                held.hits[index].receipt = other.receipt;
            }
            held.keep();
        }
        Decision { cost, ..reported(leased, decision) }
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

    /// Gives back the unspent slices of this process. Call it before the process ends: otherwise the units are missing
    /// until the limits refill.
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

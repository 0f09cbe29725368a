//! Decisions out of slices: spends what `leases.rs` holds, asks for more in time, and gives back what is left.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::time::{Instant, timeout, timeout_at};

use super::denials::{Known, Times};
use super::fallback::reported;
use super::lease::{Grant, Granted, Held, Leftover, Wish};
use super::leases::{Attempt, Leases, Next, Outlook, Purpose, SWEEP_EVERY, Spending};
use super::script::{Ask, Question};
use super::{AllWanted, Receipt, RedisLimiter, Shared, TakeFrom, Wanted};
use crate::decision::{Admission, Decision, Source, Verdict};
use crate::units::Timestamp;

/// The answer of a lease to one hit.
enum FromLease {
    /// The units were taken from a slice.
    Taken(Decision, Held),
    Denied(Decision),
    /// The key is quiet, or the cost too high for a slice: the store decides.
    AskStore,
}

/// Positions of hits in their request.
type Positions = SmallVec<[usize; 4]>;

/// The hits of a request, and the units of slices that it holds while its other limits decide. Dropped, the units go back
/// to their slices, also when the caller has gone away.
struct HeldUnits<'a> {
    shared: &'a Shared,
    hits: &'a mut AllWanted,
    /// With the positions of their hits.
    held: SmallVec<[(usize, Held); 2]>,
}

impl HeldUnits<'_> {
    /// Keeps all of them: the request is admitted.
    fn keep(mut self) {
        self.shared.counts.leased.fetch_add(self.held.len() as u64, Ordering::Relaxed);
        for (index, held) in std::mem::take(&mut self.held) {
            self.shared.leases.keep(&self.hits[index].ask);
            self.hits[index].receipt = Receipt::Slice(held);
        }
    }
}

impl Drop for HeldUnits<'_> {
    fn drop(&mut self) {
        let Self { shared, hits, held } = self;
        held.drain(..).for_each(|(index, held)| shared.leases.give_back(&hits[index].ask, held));
    }
}

impl RedisLimiter {
    /// Takes all that is wanted or nothing, from slices where a limit is leased, and notes on each hit where that was.
    pub(super) async fn take_or_lease(&self, wanted: &mut AllWanted, cost: u64) -> Decision {
        if wanted.is_empty() {
            return Decision::without_limit(self.0.shared.clock.wall());
        }
        let deadline = self.deadline();
        if let [one] = &mut **wanted {
            if let Some(spending) = self.spending(one, Purpose::Spend) {
                match self.lease(one, spending, deadline).await {
                    FromLease::Taken(decision, held) => {
                        one.receipt = Receipt::Slice(held);
                        return decision;
                    }
                    FromLease::Denied(decision) => return decision,
                    FromLease::AskStore => {}
                }
            }
        } else if wanted.iter().any(|one| self.spending(one, Purpose::Hold).is_some()) {
            return self.take_beside_leases(wanted, cost, deadline).await;
        }
        self.take(wanted, cost, deadline).await
    }

    /// Takes from slices first, and asks the store for the limits that have none. If one of those denies, or fails with
    /// a policy that denies, the slices get their units back.
    async fn take_beside_leases(&self, wanted: &mut AllWanted, cost: u64, deadline: Instant) -> Decision {
        let is_leased = |one: &Wanted| self.spending(one, Purpose::Hold).is_some();
        let (leased, mut positions): (Positions, Positions) =
            (0..wanted.len()).partition(|index| is_leased(&wanted[*index]));
        let mut others: AllWanted = positions.iter().map(|index| wanted[*index].clone()).collect();
        if let Some(denied) = self.certain_denial(&others) {
            return denied;
        }
        let mut held = HeldUnits { shared: &self.0.shared, hits: wanted, held: SmallVec::new() };
        let mut most_restrictive: Option<Decision> = None;
        for index in leased {
            let one = &held.hits[index];
            let from_lease = match self.spending(one, Purpose::Hold) {
                Some(spending) => self.lease(one, spending, deadline).await,
                None => FromLease::AskStore,
            };
            match from_lease {
                FromLease::Taken(decision, units) => {
                    held.held.push((index, units));
                    most_restrictive =
                        Some(most_restrictive.map_or(decision, |other| other.most_restrictive(decision)));
                }
                FromLease::Denied(decision) => return decision,
                FromLease::AskStore => {
                    others.push(one.clone());
                    positions.push(index);
                }
            }
        }
        let Some(leased) = most_restrictive else {
            drop(held);
            return self.take(wanted, cost, deadline).await;
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
    fn spending(&self, one: &Wanted, purpose: Purpose) -> Option<Spending> {
        let prepared = &self.0.limits[one.limit.index()];
        let may_lease = one.ask.cost > 0 && one.take_from == TakeFrom::SliceOrStore;
        let horizon = prepared.horizon.filter(|_| may_lease)?;
        Some(Spending { quota: prepared.limit.quota(), horizon, purpose })
    }

    /// Decides one hit out of a slice.
    async fn lease(&self, one: &Wanted, spending: Spending, deadline: Instant) -> FromLease {
        let inner = &*self.0;
        let (mut attempt, mut has_asked) = (Attempt::First, false);
        loop {
            let now = inner.shared.clock.now_with_gaps();
            match inner.shared.leases.spend(&one.ask, spending, attempt, now) {
                Next::Exact => return FromLease::AskStore,
                Next::Spent { held, remaining, reset_after, renew } => {
                    if let Some(wish) = renew {
                        self.renew(&one.ask, spending.horizon, wish);
                    }
                    if spending.purpose == Purpose::Spend {
                        inner.shared.counts.leased.fetch_add(1, Ordering::Relaxed);
                    }
                    let verdict = Verdict { admission: Admission::Allowed { delay: 0 }, remaining, reset_after };
                    let decision = self.decision(one, verdict, inner.shared.clock.wall(), Source::Lease);
                    return FromLease::Taken(decision, held);
                }
                Next::Dry { wait } => {
                    let known = self.known_denial(one, now);
                    return FromLease::Denied(known.unwrap_or_else(|| self.dry_denial(one, wait)));
                }
                Next::Renew(wish) => {
                    // Remembered denials are not consulted: other processes give slices back, which ends a denial early.
                    if has_asked {
                        inner.shared.leases.renewed(&one.ask, None, None);
                        return FromLease::AskStore;
                    }
                    has_asked = true;
                    self.renew(&one.ask, spending.horizon, wish);
                }
                Next::Wait(renewal) => {
                    // It has no permits to give: this waits until it is closed.
                    if timeout_at(deadline, renewal.acquire()).await.is_err() {
                        return FromLease::AskStore;
                    }
                }
            }
            attempt = Attempt::Again;
        }
    }

    /// Returns what a lease would do with a hit.
    pub(super) fn lease_outlook(&self, one: &Wanted, now: Timestamp) -> Outlook {
        match self.spending(one, Purpose::Spend) {
            Some(spending) => self.0.shared.leases.outlook(&one.ask, spending.quota, now),
            None => Outlook::Exact,
        }
    }

    /// The denial of a lease without units. Its process asks the store again after `wait` microseconds.
    pub(super) fn dry_denial(&self, one: &Wanted, wait: u64) -> Decision {
        let admission = Admission::Denied { retry_after: wait };
        let verdict = Verdict { admission, remaining: 0, reset_after: wait };
        self.decision(one, verdict, self.0.shared.clock.wall(), Source::Lease)
    }

    fn known_denial(&self, one: &Wanted, now: Timestamp) -> Option<Decision> {
        match self.0.denials.known(&one.ask, now) {
            Known::Denied(verdict, at) if self.0.shared.stores.hears_resets_of(&one.ask) => {
                self.0.shared.counts.cached_denials.fetch_add(1, Ordering::Relaxed);
                return Some(self.decision(one, verdict, at, Source::DenialCache));
            }
            // A slice is asked for by one at a time anyway.
            Known::AskForAll(asking, _) => self.0.denials.asked_for_all(&one.ask.name, &asking),
            _ => {}
        }
        None
    }

    fn renew(&self, ask: &Ask, horizon: u64, wish: Wish) {
        let limiter = self.clone();
        let renewing = Renewing { limiter, ask: ask.clone(), horizon, wish, granted: None, short: None };
        tokio::spawn(renewing.run());
    }

    /// Gives back the slices that this process has taken and not spent, before it ends. Without it they are
    /// missing until the limits give them back by themselves.
    pub async fn return_leases(&self) {
        let shared = &*self.0.shared;
        for renewal in shared.leases.renewals() {
            let _ = timeout(shared.store_timeout, renewal.acquire()).await;
        }
        shared.return_slices(true).await;
    }
}

impl Shared {
    /// Returns whether the connection on which a slice was charged is still there. On a server that was connected to anew
    /// the charge may be lost, and to give it back would give back what others have spent.
    pub(super) fn is_still_charged(&self, ask: &Ask, connection: Option<u64>) -> bool {
        connection.is_some() && connection == self.stores.of(ask).topology.connection_to(&ask.name)
    }

    async fn return_slices(&self, all: bool) {
        let leftovers = self.leases.sweep(self.clock.now_with_gaps(), all);
        let is_charged = |leftover: &Leftover| self.is_still_charged(&leftover.ask, leftover.connection);
        let leftovers = leftovers.into_iter().filter(is_charged);
        let given_back = leftovers.map(|leftover| self.undo(leftover.ask, leftover.at, leftover.before));
        // What cannot be given back is missing until the limit gives it back: too strict, never too lax.
        let _ = join_all(given_back).await;
    }
}

/// A slice that is asked for, in a task of its own: who wants it may go away, and what was charged must not be
/// lost with them. Ends however it ends, so that nobody waits for one that was dropped.
struct Renewing {
    limiter: RedisLimiter,
    ask: Ask,
    horizon: u64,
    wish: Wish,
    granted: Option<Granted>,
    short: Option<(u64, Timestamp)>,
}

impl Renewing {
    async fn run(mut self) {
        let inner = &*self.limiter.0;
        let (asked, choices) = (inner.shared.clock.now_with_gaps(), self.wish.choices());
        let mark = inner.denials.mark(&self.ask.name);
        let topology = &inner.shared.stores.of(&self.ask).topology;
        let connection = topology.connection_to(&self.ask.name);
        let Ok(answer) = self.limiter.ask(Question::Slice(self.ask.clone(), choices.clone())).await else { return };
        let times = Times { asked, answered: inner.shared.clock.now_with_gaps(), mark };
        let Some(seen) = answer.seen.first() else { return };
        let Some(units) = (answer.taken as usize).checked_sub(1).and_then(|index| choices.get(index)) else {
            let least = Ask { cost: self.wish.least, ..self.ask.clone() };
            self.limiter.remember_denial(&least, seen, answer.at, times);
            self.short = Some((self.wish.least, times.answered));
            return;
        };
        let lives = self.ask.terms.compiled.slice_lives(seen.numbers(), answer.at.as_micros(), self.horizon);
        // Counted from before it was asked for: the store charged it later than that.
        let until = Timestamp::from_micros(asked.as_micros() + lives);
        let after = seen.verdict(&self.ask.terms, answer.at, *units);
        let full_at = Timestamp::from_micros(times.answered.as_micros().saturating_add(after.reset_after));
        let before = self.ask.terms.compiled.before(seen.numbers(), answer.at.as_micros());
        inner.shared.counts.leases.fetch_add(1, Ordering::Relaxed);
        let is_same = |id: &u64| topology.connection_to(&self.ask.name) == Some(*id);
        let connection = connection.filter(is_same);
        let grant = Grant { units: *units, left: *units, until, at: answer.at, before, connection };
        self.granted = Some(Granted { grant, store_left: after.remaining, full_at });
        // Less than was wished for: the store is running out, and what comes back is better fetched at once.
        if *units < self.wish.most {
            self.short = Some((self.wish.least, times.answered));
        }
    }
}

impl Drop for Renewing {
    fn drop(&mut self) {
        let granted = self.granted.take();
        self.limiter.0.shared.leases.renewed(&self.ask, granted, self.short);
    }
}

/// Gives back what is left of slices that were not spent in time.
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

//! Decisions out of slices: spends what `leases.rs` holds, asks for more in time, and gives back what is left.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use futures_util::future::join_all;
use smallvec::SmallVec;
use tokio::time::{Instant, timeout, timeout_at};

use super::denials::{Known, Times};
use super::leases::{Leases, Next, SWEEP_EVERY, Wish};
use super::script::{Ask, Question};
use super::{RedisLimiter, Shared, Wanted};
use crate::decision::{Decision, Outcome, Source, Verdict};
use crate::units::Timestamp;

impl RedisLimiter {
    /// Decides out of a slice; `None` leaves it to the store.
    pub(super) async fn lease(&self, one: &Wanted, horizon: u64, deadline: Instant) -> Option<Decision> {
        let inner = &*self.0;
        let quota = inner.limits[one.limit.index()].limit.quota();
        let (mut first_try, mut has_asked) = (true, false);
        loop {
            let now = inner.shared.clock.now_with_gaps();
            match inner.shared.leases.spend(&one.ask, quota, horizon, now, first_try) {
                Next::Exact => return None,
                Next::Spent { left, renew } => {
                    if let Some(wish) = renew {
                        self.renew(&one.ask, horizon, wish);
                    }
                    inner.shared.counts.leased.fetch_add(1, Ordering::Relaxed);
                    let verdict = Verdict { outcome: Outcome::Allowed { delay: 0 }, remaining: left, reset_after: 0 };
                    return Some(self.decision(one, verdict, inner.shared.clock.wall(), Source::Lease));
                }
                Next::Dry { wait } => {
                    return Some(self.known_denial(one, now).unwrap_or_else(|| {
                        let outcome = Outcome::Denied { retry_after: wait };
                        let verdict = Verdict { outcome, remaining: 0, reset_after: wait };
                        self.decision(one, verdict, inner.shared.clock.wall(), Source::Lease)
                    }));
                }
                Next::Renew(wish) => {
                    let denied = self.known_denial(one, now);
                    if denied.is_some() || has_asked {
                        inner.shared.leases.renewed(&one.ask, wish.resets, None, None);
                        return denied;
                    }
                    has_asked = true;
                    self.renew(&one.ask, horizon, wish);
                }
                Next::Wait(renewal) => {
                    // It has no permits to give: this waits until it is closed.
                    if timeout_at(deadline, renewal.acquire()).await.is_err() {
                        return None;
                    }
                }
            }
            first_try = false;
        }
    }

    fn known_denial(&self, one: &Wanted, now: Timestamp) -> Option<Decision> {
        match self.0.denials.known(&one.ask, now) {
            Known::Denied(verdict, at) if self.0.shared.hears.load(Ordering::Relaxed) => {
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
        let renewing = Renewing { limiter, ask: ask.clone(), horizon, wish, granted: None, dry: None };
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
    async fn return_slices(&self, all: bool) {
        let leftovers = self.leases.sweep(self.clock.now_with_gaps(), all);
        let given_back = leftovers
            .into_iter()
            .map(|leftover| self.ask(Question::Refund(SmallVec::from_iter([leftover.ask]), leftover.at)));
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
    granted: Option<(u64, Timestamp, Timestamp)>,
    dry: Option<(u64, Timestamp)>,
}

impl Renewing {
    async fn run(mut self) {
        let inner = &*self.limiter.0;
        let (asked, choices) = (inner.shared.clock.now_with_gaps(), self.wish.choices());
        let mark = inner.denials.mark(&self.ask.name);
        let Ok(answer) = self.limiter.ask(Question::Slice(self.ask.clone(), choices.clone())).await else { return };
        let times = Times { asked, answered: inner.shared.clock.now_with_gaps(), mark };
        let Some(seen) = answer.seen.first() else { return };
        let Some(units) = (answer.taken as usize).checked_sub(1).and_then(|index| choices.get(index)) else {
            let least = Ask { cost: self.wish.least, ..self.ask.clone() };
            self.limiter.remember_denial(&least, seen, answer.at, times);
            self.dry = Some((self.wish.least, times.answered));
            return;
        };
        let lives = self.ask.terms.compiled.slice_lives(seen.numbers(), answer.at.as_micros(), self.horizon);
        // Counted from before it was asked for: the store charged it later than that.
        let until = Timestamp::from_micros(asked.as_micros() + lives);
        self.granted = Some((*units, answer.at, until));
        // Less than was wished for: the store is running out, and what comes back is better fetched at once.
        if *units < self.wish.most {
            self.dry = Some((self.wish.least, times.answered));
        }
    }
}

impl Drop for Renewing {
    fn drop(&mut self) {
        self.limiter.0.shared.leases.renewed(&self.ask, self.wish.resets, self.granted, self.dry);
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

//! Token bucket: bursts up to a capacity, then the refill rate.

use std::time::Duration;

use super::arithmetic::Pair;
#[cfg(feature = "redis")]
use super::share;
use super::{
    Algorithm, Charge, Compiled, LimitAlgorithm, MAX_COUNTED, Owed, StateWords, Step, allowed, checked, denied, meter,
    never_fits,
};
use crate::error::InvalidLimit;
use crate::rate::Rate;
use crate::units::{MAX_SPAN, Timestamp, WallOffset, whole_micros};

/// A bucket of tokens that refills at a steady rate. A request takes as many tokens as it costs.
///
/// In any period `t` it admits at most `capacity + rate × t`. The default is 10 tokens, refilled at one per second.
///
/// ```
/// use tollgate::{Limit, Limiter, Rate, TokenBucket};
///
/// let limiter = Limiter::new(Limit::new("burst", TokenBucket::new(2, Rate::per_minute(1)))?);
/// assert!(limiter.check("ann").is_allowed());
/// assert!(limiter.check("ann").is_allowed());
/// assert!(!limiter.check("ann").is_allowed());
/// # Ok::<(), tollgate::InvalidLimit>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    pub(super) capacity: u64,
    refill: Rate,
    mode: Refill,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refill {
    Smooth,
    Interval,
}

impl Default for TokenBucket {
    fn default() -> Self {
        Self::new(10, Rate::per_second(1))
    }
}

impl TokenBucket {
    /// Returns the strictest of each number of both.
    pub(super) fn strictest(self, other: Self) -> Self {
        let (capacity, refill) = (self.capacity.min(other.capacity), self.refill.slower(other.refill));
        Self { capacity, refill, ..self }
    }

    /// Creates a bucket of `capacity` tokens that refills smoothly: at `10/s`, one token every 100 ms.
    #[must_use]
    pub const fn new(capacity: u64, refill: Rate) -> Self {
        Self { capacity, refill, mode: Refill::Smooth }
    }

    /// Refills in whole portions at the end of each period instead: at `600/m`, 600 tokens at every full minute of the
    /// clock.
    #[must_use]
    pub const fn interval(self) -> Self {
        Self { mode: Refill::Interval, ..self }
    }

    /// Returns the rate of refill.
    #[doc(hidden)]
    pub const fn rate(&self) -> Rate {
        self.refill
    }

    /// Returns whether the bucket refills in whole portions.
    #[doc(hidden)]
    pub const fn is_interval(&self) -> bool {
        matches!(self.mode, Refill::Interval)
    }

    /// Returns the share for one of `nodes` processes.
    #[cfg(feature = "redis")]
    pub(super) fn share(&self, nodes: u32) -> Self {
        let refill = match self.mode {
            Refill::Smooth => share::rate(self.refill, nodes),
            Refill::Interval => Rate::new(share::quota(self.refill.count(), nodes), self.refill.period()),
        };
        Self { capacity: share::quota(self.capacity, nodes), refill, ..*self }
    }

    /// Returns the time in which an empty bucket fills. The last portion counts as a full period.
    pub(super) fn window(&self) -> Duration {
        match self.mode {
            Refill::Smooth => checked::full_refill_time(self.capacity, self.refill),
            Refill::Interval => {
                let periods = self.capacity.div_ceil(self.refill.count().max(1));
                Duration::from_micros(periods.saturating_mul(whole_micros(self.refill.period())))
            }
        }
    }

    pub(super) fn refill(&self) -> super::refill::Refill {
        let (units, micros) = (self.refill.count(), whole_micros(self.refill.period()));
        match self.mode {
            Refill::Smooth => super::refill::Refill::Smooth { units, micros },
            Refill::Interval => super::refill::Refill::Portions { units, micros },
        }
    }

    pub(super) fn compile(&self) -> Result<Compiled, InvalidLimit> {
        let capacity = checked::quota("capacity", self.capacity)?;
        let (count, period) = checked::rate("refill", self.refill)?;
        checked::full_refill("refill", capacity, count, period)?;
        Ok(match self.mode {
            Refill::Smooth => meter::compile(capacity, count, period, None),
            Refill::Interval => Compiled::Interval(Interval::new(capacity, count, period)),
        })
    }
}

impl From<TokenBucket> for Algorithm {
    fn from(spec: TokenBucket) -> Self {
        Self::TokenBucket(spec)
    }
}

/// Interval refill: the spent tokens, and the period in which they were counted. Periods are counted from the Unix
/// epoch, so that every node agrees when one ends.
///
/// A clock that steps back holds the bucket in the later period, at most the one after the current: no period ends
/// twice, and no key waits for a period that is far away. When the wall clock is stepped, the ends of periods move by
/// less than a period, so each step refills at most one portion early.
#[derive(Clone, Debug)]
pub(crate) struct Interval {
    pub(super) capacity: u64,
    pub(super) portion: u64,
    pub(super) period: u64,
    pub(super) packing: Pair,
    /// Offset of the wall clock, at whose full periods the bucket is refilled, from the times that the methods get.
    pub(super) wall: WallOffset,
}

#[derive(Clone, Copy)]
pub(crate) struct Spent {
    pub(super) period: u64,
    pub(super) tokens: u64,
}

impl Interval {
    fn new(capacity: u64, portion: u64, period: u64) -> Self {
        let latest = Timestamp::MAX.as_micros() / period + 1;
        Self { capacity, portion, period, packing: Pair::new(latest, capacity), wall: WallOffset::default() }
    }

    /// Returns a time moved forward by less than a period, so that its periods end at full periods of the wall clock.
    pub(super) fn aligned(&self, moment: u64) -> u64 {
        match self.wall.get() {
            0 => moment,
            ahead => {
                let shift = i128::from(ahead).rem_euclid(i128::from(self.period)) as u64;
                Timestamp::from_micros(moment.saturating_add(shift)).as_micros()
            }
        }
    }

    /// Returns the tokens spent at `now`, and whether they differ from the stored ones because the clock stepped back.
    /// They may exceed the capacity, if that was larger before.
    pub(super) fn spent(&self, cells: &impl StateWords, now: u64) -> (Spent, bool) {
        let (period, tokens) = self.packing.load(cells);
        let current = now / self.period;
        if period <= current {
            let refilled = self.portion.saturating_mul(current - period);
            return (Spent { period: current, tokens: tokens.saturating_sub(refilled) }, false);
        }
        (Spent { period: period.min(current + 1), tokens }, period > current + 1)
    }

    /// Returns as many tokens as are refilled in the longest window: a key owes no more.
    pub(super) fn most_tokens(&self) -> u64 {
        let longest = (MAX_SPAN.as_micros() as u64 / self.period).saturating_mul(self.portion);
        longest.max(self.capacity)
    }

    /// Returns the time until `tokens` more are refilled.
    fn wait_for(&self, spent: Spent, tokens: u64, now: u64) -> u64 {
        match tokens {
            0 => 0,
            _ => (spent.period + tokens.div_ceil(self.portion)) * self.period - now,
        }
    }
}

impl LimitAlgorithm for Interval {
    type Edit = Spent;

    fn words(&self) -> usize {
        self.packing.words()
    }

    fn free_bits(&self) -> u32 {
        self.packing.free_bits()
    }

    fn decide(&self, cells: &impl StateWords, now: u64, cost: u64) -> Step<Spent> {
        let now = self.aligned(now);
        let (spent, stepped_back) = self.spent(cells, now);
        let remaining = self.capacity.saturating_sub(spent.tokens);
        let reset_after = self.wait_for(spent, spent.tokens, now);
        let edit = stepped_back.then_some(spent);
        if cost > self.capacity {
            return Step { verdict: never_fits(remaining, reset_after), edit };
        }
        if cost > remaining {
            let retry_after = self.wait_for(spent, spent.tokens + cost - self.capacity, now);
            return Step { verdict: denied(retry_after, remaining, reset_after), edit };
        }
        let after = Spent { tokens: spent.tokens + cost, ..spent };
        let verdict = allowed(remaining - cost, self.wait_for(after, after.tokens, now));
        Step { verdict, edit: if cost > 0 { Some(after) } else { edit } }
    }

    /// Gives back the part of a charge that has not been refilled since, as with smooth refill.
    fn refund(&self, cells: &impl StateWords, now: u64, charge: Charge) -> Option<Spent> {
        if now < charge.at {
            return None;
        }
        let (spent, _) = self.spent(cells, self.aligned(now));
        let charged_in = self.aligned(charge.at) / self.period;
        let came_back = self.portion.saturating_mul(spent.period.saturating_sub(charged_in));
        let owed = charge.cost.saturating_sub(came_back).min(spent.tokens);
        (owed > 0).then_some(Spent { tokens: spent.tokens - owed, ..spent })
    }

    fn owe(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<Owed<Spent>> {
        let (spent, _) = self.spent(cells, self.aligned(now));
        let counted = units.min(self.most_tokens().min(MAX_COUNTED).saturating_sub(spent.tokens));
        let tokens = spent.tokens + counted;
        self.packing.holds(tokens).then_some(Owed { edit: Spent { tokens, ..spent }, counted, ceiling: tokens })
    }

    /// If the clock has stepped back, the newest period is after `now`, and its units have not come back.
    fn credit(&self, cells: &impl StateWords, now: u64, units: u64) -> Option<(Spent, u64)> {
        let (spent, _) = self.spent(cells, self.aligned(now));
        (spent.tokens > 0).then(|| (Spent { tokens: spent.tokens.saturating_sub(units), ..spent }, units))
    }

    fn apply(&self, cells: &impl StateWords, edit: Spent) {
        self.packing.store(cells, edit.period, edit.tokens);
    }

    fn is_idle(&self, cells: &impl StateWords, now: u64) -> bool {
        self.spent(cells, self.aligned(now)).0.tokens == 0
    }

    /// Takes the larger number of spent tokens. Both belong to the same period, unless the clock has stepped back.
    fn cover(&self, floor: &impl StateWords, state: &impl StateWords, now: u64) -> bool {
        let now = self.aligned(now);
        let [one, other] = [self.spent(floor, now).0, self.spent(state, now).0];
        let spent = Spent { period: one.period.max(other.period), tokens: one.tokens.max(other.tokens) };
        let is_covered = spent.period == now / self.period && spent.tokens * 2 < self.capacity;
        if is_covered {
            self.apply(floor, spent);
        }
        is_covered
    }
}

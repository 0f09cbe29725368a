//! What is taken now and given back or corrected later.

use std::time::Duration;

use smallvec::SmallVec;

use super::script::{Ask, Question};
use super::{AllWanted, RedisLimiter, StoreError, Wanted};
use crate::decision::{Decision, Denied};
use crate::key::Key;
use crate::limiter::Hit;
use crate::reservation::Settlement;
use crate::units::Timestamp;

/// How often to take what was seen to be left, when others take it first.
const TRIES: usize = 4;

/// What was taken and may be given back or corrected; see [`RedisLimiter::reserve`].
///
/// It can be settled or refunded once, because that consumes it. Dropped, it stands: what was taken stays taken.
#[must_use = "what a reservation took stays taken until it is settled"]
pub struct RedisReservation {
    /// Whose limits took it: they may have been changed by the time it is settled.
    limiter: RedisLimiter,
    wanted: AllWanted,
    decision: Decision,
    expires_at: Timestamp,
}

impl RedisReservation {
    /// The decision that took it.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }
}

impl std::fmt::Debug for RedisReservation {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("RedisReservation").field("decision", &self.decision).finish_non_exhaustive()
    }
}

impl RedisLimiter {
    /// Takes `cost` units now, to be given back or corrected later: see [`Limiter::reserve`](crate::Limiter::reserve). A
    /// reservation that is not settled in time keeps what it took.
    ///
    /// # Errors
    ///
    /// The denial, when the cost does not fit.
    pub async fn reserve<'k>(
        &self,
        key: impl Into<Key<'k>>,
        cost: u64,
        expires_after: Duration,
    ) -> Result<RedisReservation, Denied> {
        let wanted = self.want_all(key.into(), cost);
        self.reserve_wanted(wanted, cost, expires_after).await
    }

    /// Takes what every hit asks for, or nothing, to be given back or corrected later: see [`reserve`](Self::reserve).
    ///
    /// # Errors
    ///
    /// The denial, when one of them does not fit.
    pub async fn reserve_hits(&self, hits: &[Hit<'_>], expires_after: Duration) -> Result<RedisReservation, Denied> {
        let cost = hits.iter().map(|hit| hit.parts().2).max().unwrap_or(0);
        match self.want_hits(hits) {
            Some(wanted) => self.reserve_wanted(wanted, cost, expires_after).await,
            None => Err(Denied(self.no_such_limit(cost))),
        }
    }

    async fn reserve_wanted(
        &self,
        mut wanted: AllWanted,
        cost: u64,
        expires_after: Duration,
    ) -> Result<RedisReservation, Denied> {
        let expires_at = self.0.shared.clock.now_with_gaps().saturating_add(expires_after);
        let decision = self.take(&mut wanted, cost, self.deadline()).await;
        if !decision.is_allowed() {
            return Err(Denied(decision));
        }
        Ok(RedisReservation { limiter: self.clone(), wanted, decision, expires_at })
    }

    /// Brings a reservation to its actual cost: gives back what was too much, or takes what was too little, as
    /// far as there is any. Of several hits, each is brought to this cost. If the limits have changed since, it is settled
    /// by those that took it.
    ///
    /// # Errors
    ///
    /// When the store cannot be reached in time: then what was taken stays taken.
    pub async fn settle(&self, reservation: RedisReservation, actual: u64) -> Result<Settlement, StoreError> {
        let RedisReservation { limiter, wanted, expires_at, .. } = reservation;
        if limiter.0.shared.clock.now_with_gaps() >= expires_at {
            return Ok(Settlement::Expired);
        }
        limiter.settle_wanted(&wanted, actual).await
    }

    /// Gives back what a reservation took, as far as [`Limiter::refund`](crate::Limiter::refund) would.
    ///
    /// # Errors
    ///
    /// When the store cannot be reached in time: then what was taken stays taken.
    pub async fn refund(&self, reservation: RedisReservation) -> Result<Settlement, StoreError> {
        self.settle(reservation, 0).await
    }

    /// Brings hits that were taken to their actual cost, as far as that can be, each where it was taken.
    pub(crate) async fn settle_wanted(&self, wanted: &[Wanted], actual: u64) -> Result<Settlement, StoreError> {
        let owed = wanted.iter().filter(|one| one.ask.cost > actual);
        let mut owed: AllWanted = owed
            .map(|one| Wanted { ask: Ask { cost: one.ask.cost - actual, ..one.ask.clone() }, ..one.clone() })
            .collect();
        if !owed.is_empty() {
            owed.iter_mut().for_each(|one| self.add_later_terms(one));
            self.give_back(&owed).await?;
        }
        let mut missing = 0;
        for one in wanted.iter().filter(|one| one.ask.cost < actual) {
            let cost = actual - one.ask.cost;
            let is_on_store = one.receipt.is_on_store();
            missing = missing.max(if is_on_store { self.take_up_to(one, cost).await? } else { cost });
        }
        Ok(if missing == 0 { Settlement::Settled } else { Settlement::Short { missing } })
    }

    /// Takes what there is of a cost that has been spent already, and says how much there was not.
    async fn take_up_to(&self, one: &Wanted, cost: u64) -> Result<u64, StoreError> {
        // Someone else may take some meanwhile, or some may come back: a few tries, and what is left is missing.
        for _ in 0..TRIES {
            let ask = |cost: u64| SmallVec::from_iter([Ask { cost, ..one.ask.clone() }]);
            let looked = self.ask(Question::Look(ask(0))).await?;
            let left = looked.seen.first().map_or(0, |seen| seen.verdict(&one.ask.terms, looked.at, 0).remaining);
            let left = left.min(cost);
            let taken = self.ask(Question::Take(ask(left))).await?;
            if taken.taken > 0 {
                return Ok(cost - left);
            }
        }
        Ok(cost)
    }
}

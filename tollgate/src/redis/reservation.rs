//! What is taken now and given back or corrected later.

use std::time::Duration;

use smallvec::SmallVec;

use super::script::{ScriptHit, ScriptRequest};
use super::{RedisHit, RedisHits, RedisLimiter, StoreError};
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
    hits: RedisHits,
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
        let hits = self.hits_for_key(key.into(), cost);
        self.reserve_prepared(hits, cost, expires_after).await
    }

    /// Takes what every hit asks for, or nothing, to be given back or corrected later: see [`reserve`](Self::reserve).
    ///
    /// # Errors
    ///
    /// The denial, when one of them does not fit.
    pub async fn reserve_hits(&self, hits: &[Hit<'_>], expires_after: Duration) -> Result<RedisReservation, Denied> {
        let cost = hits.iter().map(|hit| hit.parts().2).max().unwrap_or(0);
        match self.prepare_hits(hits) {
            Some(hits) => self.reserve_prepared(hits, cost, expires_after).await,
            None => Err(Denied(self.no_such_limit(cost))),
        }
    }

    async fn reserve_prepared(
        &self,
        mut hits: RedisHits,
        cost: u64,
        expires_after: Duration,
    ) -> Result<RedisReservation, Denied> {
        let expires_at = self.0.shared.clock.now_with_gaps().saturating_add(expires_after);
        let decision = self.take(&mut hits, cost, self.deadline()).await;
        if !decision.is_allowed() {
            return Err(Denied(decision));
        }
        Ok(RedisReservation { limiter: self.clone(), hits, decision, expires_at })
    }

    /// Brings a reservation to its actual cost: gives back what was too much, or takes what was too little, as
    /// far as there is any. Of several hits, each is brought to this cost. If the limits have changed since, it is settled
    /// by those that took it.
    ///
    /// # Errors
    ///
    /// When the store cannot be reached in time: then what was taken stays taken.
    pub async fn settle(&self, reservation: RedisReservation, actual: u64) -> Result<Settlement, StoreError> {
        let RedisReservation { limiter, hits, expires_at, .. } = reservation;
        if limiter.0.shared.clock.now_with_gaps() >= expires_at {
            return Ok(Settlement::Expired);
        }
        limiter.settle_hits(&hits, actual).await
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
    pub(crate) async fn settle_hits(&self, hits: &[RedisHit], actual: u64) -> Result<Settlement, StoreError> {
        let owed = hits.iter().filter(|hit| hit.script_hit.cost > actual);
        let mut owed: RedisHits = owed
            .map(|hit| RedisHit {
                script_hit: ScriptHit { cost: hit.script_hit.cost - actual, ..hit.script_hit.clone() },
                ..hit.clone()
            })
            .collect();
        if !owed.is_empty() {
            owed.iter_mut().for_each(|hit| self.add_later_terms(hit));
            self.give_back(&owed).await?;
        }
        let mut missing = 0;
        for hit in hits.iter().filter(|hit| hit.script_hit.cost < actual) {
            let cost = actual - hit.script_hit.cost;
            let is_on_store = hit.receipt.is_on_store();
            missing = missing.max(if is_on_store { self.take_up_to(hit, cost).await? } else { cost });
        }
        Ok(if missing == 0 { Settlement::Settled } else { Settlement::Short { missing } })
    }

    /// Takes what there is of a cost that has been spent already, and says how much there was not.
    async fn take_up_to(&self, hit: &RedisHit, cost: u64) -> Result<u64, StoreError> {
        // Someone else may take some meanwhile, or some may come back: a few tries, and what is left is missing.
        for _ in 0..TRIES {
            let at_cost = |cost: u64| SmallVec::from_iter([ScriptHit { cost, ..hit.script_hit.clone() }]);
            let peeked = self.send(ScriptRequest::Peek(at_cost(0))).await?;
            let left =
                peeked.states.first().map_or(0, |state| state.verdict(&hit.script_hit.terms, peeked.at, 0).remaining);
            let left = left.min(cost);
            let taken = self.send(ScriptRequest::Take(at_cost(left))).await?;
            if taken.taken > 0 {
                return Ok(cost - left);
            }
        }
        Ok(cost)
    }
}

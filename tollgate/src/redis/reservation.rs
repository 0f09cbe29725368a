//! Reservations: units that are taken now, and given back or corrected later.
//!
//! Receipts record where each hit of a request took its units, and when. Refunds and corrections go back there.
//!
//! The limits of one request may take their units in different places: from the store, whose servers have different
//! clocks, from slices that were charged earlier, and from this process's memory while a server fails.

use std::time::Duration;

use futures_util::future::{join, join_all};
use smallvec::SmallVec;

use super::lease::SliceUnits;
use super::script::{ScriptHit, ScriptRequest};
use super::{RedisHit, RedisHits, RedisLimiter, StoreError};
use crate::decision::{Decision, Denied};
use crate::key::Key;
use crate::limiter::Hit;
use crate::limiter::reservation::Settlement;
#[cfg(feature = "rules")]
use crate::limiter::reservation::{ReservationId, Settled};
use crate::units::Timestamp;

/// Maximum number of attempts to take the rest of a quota, if others take it first.
const TRIES: usize = 4;

/// Units that were taken and may be given back or corrected: see [`RedisLimiter::reserve`].
///
/// It can be settled or refunded once, which consumes it. If it is dropped, its units stay taken.
#[must_use = "the units of a reservation stay taken until it is settled"]
pub struct RedisReservation {
    /// The limiter that took the units. Its limits may have been replaced by the time of the settlement.
    limiter: RedisLimiter,
    hits: RedisHits,
    decision: Decision,
    expires_at: Timestamp,
}

impl RedisReservation {
    /// Returns the decision by which the units were taken.
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
    /// Takes `cost` units now, to be given back or corrected later: see [`Limiter::reserve`](crate::Limiter::reserve).
    /// The units of a reservation that is not settled in time stay taken.
    ///
    /// # Errors
    ///
    /// If a limit denies the cost. The error is the denial.
    pub async fn reserve<'k>(
        &self,
        key: impl Into<Key<'k>>,
        cost: u64,
        expires_after: Duration,
    ) -> Result<RedisReservation, Denied> {
        let hits = self.hits_for_key(key.into(), cost);
        self.reserve_prepared(hits, cost, expires_after).await
    }

    /// Takes the cost of every hit, or of none, to be given back or corrected later: see [`reserve`](Self::reserve).
    ///
    /// # Errors
    ///
    /// If a limit denies its hit. The error is the denial.
    pub async fn reserve_hits(&self, hits: &[Hit<'_>], expires_after: Duration) -> Result<RedisReservation, Denied> {
        let cost = hits.iter().map(|hit| hit.parts().2).max().unwrap_or(0);
        match self.prepare_hits(hits) {
            Ok(hits) => self.reserve_prepared(hits, cost, expires_after).await,
            Err(mistake) => Err(Denied(self.deny_invalid(mistake, cost))),
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

    /// Settles a reservation at its actual cost: gives back units that are too many, or takes missing units as far as
    /// there are any. Each of several hits is settled at this cost. If the limits have changed since, those that took
    /// the units settle it.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error. The units then stay taken.
    pub async fn settle(&self, reservation: RedisReservation, actual: u64) -> Result<Settlement, StoreError> {
        let RedisReservation { limiter, hits, expires_at, .. } = reservation;
        if limiter.0.shared.clock.now_with_gaps() >= expires_at {
            return Ok(Settlement::Expired);
        }
        limiter.settle_hits(&hits, actual).await
    }

    /// Gives back the units of a reservation, as [`Limiter::refund`](crate::Limiter::refund) does.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error. The units then stay taken.
    pub async fn refund(&self, reservation: RedisReservation) -> Result<Settlement, StoreError> {
        self.settle(reservation, 0).await
    }

    /// Settles charged hits at their actual cost as far as possible, each where it was charged.
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

    /// Settles a charged hit at its actual cost, where it was charged: gives back the surplus, as far as it still counts,
    /// and counts the excess in full. A hit is settled once.
    #[cfg(feature = "rules")]
    #[allow(dead_code, reason = "the next commits use it")]
    pub(crate) async fn settle_open(&self, hit: &RedisHit, actual: u64) -> Result<Settled, StoreError> {
        let settlement = self.settle_hits(std::slice::from_ref(hit), actual).await?;
        Ok(Settled { settlement, left: None })
    }

    /// Counts units that were spent already, whatever is left.
    #[cfg(feature = "rules")]
    #[allow(dead_code, reason = "the next commits use it")]
    pub(crate) async fn charge_hit(&self, hit: &RedisHit) -> Result<Settled, StoreError> {
        let missing = self.take_up_to(hit, hit.script_hit.cost).await?;
        let settlement = if missing > 0 { Settlement::Short { missing } } else { Settlement::Settled };
        Ok(Settled { settlement, left: None })
    }

    /// Returns the time until the key of each hit owes nothing: the longest, or `None` if none owes anything.
    #[cfg(feature = "rules")]
    #[allow(dead_code, reason = "the next commits use it")]
    pub(crate) async fn owes_hits(&self, hits: &[RedisHit]) -> Result<Option<Duration>, StoreError> {
        let _ = hits;
        Ok(None)
    }

    /// Takes as many units as are left of a cost that was spent already. Returns the number of missing units.
    pub(super) async fn take_up_to(&self, hit: &RedisHit, cost: u64) -> Result<u64, StoreError> {
        // Others may take or return units between the two calls: after a few attempts, the cost is missing.
        for _ in 0..TRIES {
            let at_cost = |cost: u64| SmallVec::from_iter([ScriptHit { cost, ..hit.script_hit.clone() }]);
            let peeked = self.send(ScriptRequest::Peek(at_cost(0))).await?;
            let left =
                peeked.states.first().map_or(0, |state| state.verdict(&hit.script_hit.terms, peeked.at, 0).remaining);
            let left = left.min(cost);
            let taken = self.send(ScriptRequest::Take(at_cost(left))).await?;
            if taken.taken > 0 {
                self.0.denials.forget(&hit.script_hit.name);
                return Ok(cost - left);
            }
        }
        Ok(cost)
    }
}

/// Where the units of a hit were taken, and when.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum Receipt {
    /// Nothing was taken: the request was denied, or the failure policy allowed it without counting.
    #[default]
    Nothing,
    /// The store took them, at this time by its clock.
    Store { at: Timestamp },
    /// They were taken from a slice of this process.
    Slice(SliceUnits),
    /// They were counted in this process's memory while the store failed.
    Local { at: Timestamp, wall_offset: i64 },
}

impl Receipt {
    /// Returns whether the store counts the units.
    fn is_on_store(&self) -> bool {
        matches!(self, Self::Store { .. } | Self::Slice(_))
    }
}

impl RedisLimiter {
    /// Gives the cost of each hit back where it was taken, as far as it still counts there.
    pub(super) async fn give_back(&self, hits: &[RedisHit]) -> Result<(), StoreError> {
        // Hits that were charged together are refunded together.
        let mut charges: SmallVec<[(Timestamp, RedisHits); 1]> = SmallVec::new();
        for hit in hits {
            match hit.receipt {
                Receipt::Store { at } => match charges.iter_mut().find(|(charged_at, _)| *charged_at == at) {
                    Some((_, together)) => together.push(hit.clone()),
                    None => charges.push((at, SmallVec::from_iter([hit.clone()]))),
                },
                Receipt::Local { at, wall_offset } => {
                    self.give_back_locally(hit, at, wall_offset);
                }
                Receipt::Slice(_) | Receipt::Nothing => {}
            }
        }
        let at_store = charges
            .iter()
            .map(|(at, hits)| self.send_each(hits, |script_hits| ScriptRequest::Refund(script_hits, *at)));
        let to_slices = hits.iter().filter_map(|hit| match hit.receipt {
            Receipt::Slice(held) => Some(self.give_back_to_slice(hit, held)),
            _ => None,
        });
        let (at_store, to_slices) = join(join_all(at_store), join_all(to_slices)).await;
        at_store.into_iter().chain(to_slices).collect()
    }

    /// Puts units back into their slice. The units of a slice that has expired go to the store, by the time at which
    /// the slice was charged: units that a bucket has refilled since then are not given back a second time.
    async fn give_back_to_slice(&self, hit: &RedisHit, held: SliceUnits) -> Result<(), StoreError> {
        let shared = &*self.0.shared;
        if shared.leases.refund(&hit.script_hit, held, shared.clock.now_with_gaps()) {
            return Ok(());
        }
        if !shared.is_still_charged(&hit.script_hit, held.connection()) {
            return Ok(());
        }
        let (at, before) = held.charge();
        shared.undo(hit.script_hit.clone(), at, before).await
    }
}

/// A request to record the charges of an allowed request as open until they are settled.
#[cfg(feature = "rules")]
#[allow(dead_code, reason = "the next commits use it")]
#[derive(Clone, Debug)]
pub(crate) struct Opening {
    pub(crate) id: ReservationId,
    pub(crate) expires_after: Duration,
    /// Of each hit, in their order.
    pub(crate) each: SmallVec<[OpeningKind; 2]>,
}

#[cfg(feature = "rules")]
#[allow(dead_code, reason = "the next commits use it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpeningKind {
    /// Somebody may settle the charge.
    Tracked,
    Untracked,
    /// The cost is checked and not taken: it is counted by the response.
    CheckOnly,
}

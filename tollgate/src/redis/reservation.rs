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
use super::script::{ScriptHit, ScriptReply, ScriptRequest};
use super::{RedisHit, RedisHits, RedisLimiter, StoreError};
use crate::decision::{Decision, Denied};
use crate::key::Key;
use crate::limiter::Hit;
use crate::limiter::reservation::Settlement;
use crate::open_charges::Held;
use crate::units::Timestamp;

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
    /// The units are pending while this is held.
    open: Held,
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
        let deadline = self.deadline();
        let decision = self.take(&mut hits, cost, deadline).await;
        let decision = self.finish(&mut hits, decision, deadline).await;
        if !decision.is_allowed() {
            return Err(Denied(decision));
        }
        let open = self.open(&hits, expires_after, |_| true);
        Ok(RedisReservation { limiter: self.clone(), hits, decision, expires_at, open })
    }

    /// Settles a reservation at its actual cost: gives back units that are too many, or counts further units in full.
    /// Those that do not fit into the remaining quota are [owed](Settlement::Owed): the key is denied until they have come
    /// back. Each of several hits is settled at this cost. If the limits have changed since, those that took the units
    /// settle it.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error. The estimate then stays taken, and further units may
    /// not be counted.
    pub async fn settle(&self, reservation: RedisReservation, actual: u64) -> Result<Settlement, StoreError> {
        let RedisReservation { limiter, hits, expires_at, open, .. } = reservation;
        if limiter.0.shared.clock.now_with_gaps() >= expires_at {
            return Ok(Settlement::Expired);
        }
        limiter.settle_hits(&hits, actual, |hit| open.close(hit)).await
    }

    /// Gives back the units of a reservation, as [`Limiter::refund`](crate::Limiter::refund) does.
    ///
    /// # Errors
    ///
    /// If the store does not reply in time, or replies with an error. The units then stay taken.
    pub async fn refund(&self, reservation: RedisReservation) -> Result<Settlement, StoreError> {
        self.settle(reservation, 0).await
    }

    /// Settles charged hits at their actual cost, each where it was charged. One that does not count any more gives nothing
    /// back.
    #[doc(hidden)]
    pub async fn settle_hits(
        &self,
        hits: &[RedisHit],
        actual: u64,
        still_counts: impl Fn(usize) -> bool,
    ) -> Result<Settlement, StoreError> {
        let still_count: SmallVec<[bool; 2]> = (0..hits.len()).map(still_counts).collect();
        let surplus = hits.iter().zip(still_count).filter(|(hit, counts)| *counts && hit.script_hit.cost > actual);
        let mut surplus: RedisHits = surplus
            .map(|(hit, _)| RedisHit {
                script_hit: ScriptHit { cost: hit.script_hit.cost - actual, ..hit.script_hit.clone() },
                ..hit.clone()
            })
            .collect();
        surplus.iter_mut().for_each(|hit| self.add_later_terms(hit));
        let excess = hits.iter().filter(|hit| hit.script_hit.cost < actual);
        let charging = join_all(excess.map(|hit| self.charge_excess(hit, actual - hit.script_hit.cost)));
        // One that fails does not keep the other from being counted.
        let (given_back, charged) = join(self.give_back(&surplus), charging).await;
        given_back?;
        charged.into_iter().try_fold(Settlement::Settled, |worst, settlement| Ok(worst.worse(settlement?)))
    }

    /// Counts units that were spent beyond the cost of a charged hit, where it was charged.
    async fn charge_excess(&self, hit: &RedisHit, units: u64) -> Result<Settlement, StoreError> {
        match hit.receipt {
            Receipt::Store { .. } | Receipt::Slice(_) => self.owe(&hit.script_hit, units).await,
            Receipt::Local { .. } => Ok(self.charge_locally(hit, units)),
            Receipt::Nothing => Ok(Settlement::Short { missing: units }),
        }
    }

    /// Counts units that were spent already, whatever is left.
    #[doc(hidden)]
    pub async fn charge_hit(&self, hit: &RedisHit) -> Result<Settlement, StoreError> {
        self.owe(&hit.script_hit, hit.script_hit.cost).await
    }

    /// Returns the time until the key of each hit owes nothing: the longest, or `None` if none owes anything.
    #[doc(hidden)]
    pub async fn owes_hits(&self, hits: &[RedisHit]) -> Result<Option<Duration>, StoreError> {
        let limits = hits.iter().filter(|hit| !hit.script_hit.terms.counts_strikes());
        let beyond_quota = limits.map(|hit| {
            let terms = hit.script_hit.terms.with_one_more().clone();
            RedisHit { script_hit: ScriptHit { terms, cost: 1, ..hit.script_hit.clone() }, ..hit.clone() }
        });
        let beyond_quota: RedisHits = beyond_quota.collect();
        Ok(self.peek_at(&beyond_quota).await?.retry_after())
    }

    /// Counts units on the store that were spent already, whatever is left.
    async fn owe(&self, script_hit: &ScriptHit, units: u64) -> Result<Settlement, StoreError> {
        if units == 0 || script_hit.terms.counts_strikes() {
            return Ok(Settlement::Settled);
        }
        let charged = ScriptHit { cost: units, ..script_hit.clone() };
        let reply = self.send(ScriptRequest::Owe(charged.clone())).await;
        // The `retry_after` of a cached denial is too short now.
        self.0.shared.denials.forget(&script_hit.name);
        Ok(self.settlement_of(&charged, &reply?))
    }

    /// Returns the result of a charge. If the key owes units now, the slices that this process has of it are given back:
    /// they would admit requests while others wait.
    pub(super) fn settlement_of(&self, charged: &ScriptHit, reply: &ScriptReply) -> Settlement {
        let settlement = reply.settlement(charged);
        if settlement != Settlement::Settled {
            self.0.shared.leases.owes_since(&charged.name, reply.at);
        }
        settlement
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

#[cfg(all(test, not(loom)))]
mod tests {
    use testkit::redis::RedisServer;

    use super::*;
    use crate::limiter::reservation::debts_of_490::{MICRO, START, limits};
    use crate::units::{MINUTE, SECOND};
    use crate::{Limit, ManualClock, SlidingWindowLog};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_key_owes_until_it_counts_no_more_than_its_quota() {
        let server = RedisServer::start();
        for (number, (algorithm, wait)) in limits().into_iter().enumerate() {
            let clock = ManualClock::at(START);
            let limit = Limit::new(format!("limit {number}"), algorithm).unwrap();
            let limiter = RedisLimiter::builder(server.url()).limit(limit).store_timeout(20 * SECOND);
            let limiter = limiter.clock(clock.clone()).connect().await.unwrap();
            let hits = limiter.hits_for_key("key".into(), 0);
            assert_eq!(limiter.owes_hits(&hits).await, Ok(None), "{algorithm:?}");
            let Ok(reserved) = limiter.reserve("key", 10, MINUTE).await else { panic!("{algorithm:?}") };
            assert_eq!(limiter.owes_hits(&hits).await, Ok(None), "{algorithm:?}: the quota is not a debt");
            assert_eq!(limiter.settle(reserved, 500).await, Ok(Settlement::Owed { units: 490 }), "{algorithm:?}");
            assert_eq!(limiter.owes_hits(&hits).await, Ok(Some(wait)), "{algorithm:?}");
            clock.set(START.saturating_add(wait - MICRO));
            assert_eq!(limiter.owes_hits(&hits).await, Ok(Some(MICRO)), "{algorithm:?}");
            clock.set(START.saturating_add(wait));
            assert_eq!(limiter.owes_hits(&hits).await, Ok(None), "{algorithm:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_log_of_charges_beyond_the_quota_stays_short() {
        let server = RedisServer::start();
        let clock = ManualClock::at(START);
        let limit = Limit::new("limit", SlidingWindowLog::new(10, MINUTE)).unwrap();
        let limiter = RedisLimiter::builder(server.url()).limit(limit).store_timeout(20 * SECOND);
        let limiter = limiter.clock(clock.clone()).connect().await.unwrap();
        let hits = limiter.hits_for_key("key".into(), 1);
        for _ in 0..1_000 {
            clock.advance(SECOND / 1_000);
            let settled = limiter.charge_hit(&hits[0]).await.unwrap();
            assert!(matches!(settled, Settlement::Settled | Settlement::Owed { units: 1 }), "{settled:?}");
        }
        let length: u64 = redis::cmd("STRLEN").arg("rate_limit:{limit|key}").query(&mut server.connection()).unwrap();
        assert!(length < 4_000, "{length} bytes");
        // The last ten entries decide.
        let denied = limiter.check("key").await;
        assert_eq!(denied.retry_after(), Some(MINUTE - SECOND * 9 / 1_000));
    }
}

//! Prepared hits, for rules.

use super::script::ScriptRequest;
use super::{RedisHit, RedisHits, RedisLimiter, StoreError, TakeFrom};
use crate::decision::Decision;
use crate::limit::LimitId;
use crate::limiter::Hit;

impl RedisLimiter {
    /// Returns the wall-clock time of this process.
    #[cfg(feature = "rules")]
    pub(crate) fn now(&self) -> crate::units::Timestamp {
        self.0.shared.clock.wall()
    }

    /// Prepares hits for Redis. The limits must belong to this limiter.
    pub(crate) fn redis_hits(&self, hits: &[Hit<'_>]) -> RedisHits {
        self.prepare_hits(hits).unwrap_or_default()
    }

    /// Takes all hits, or none. Returns the hits with their receipts, for [`settle_hits`](Self::settle_hits).
    pub(crate) async fn decide_hits(self, mut hits: RedisHits) -> (Decision, RedisHits) {
        let cost = hits.iter().map(|hit| hit.script_hit.cost).max().unwrap_or(0);
        let decision = self.take_or_lease(&mut hits, cost).await;
        (decision, hits)
    }

    /// Gives back the cost of each hit, from the newest charges of its key.
    pub(crate) async fn credit_hits(&self, hits: &RedisHits) -> Result<(), StoreError> {
        self.send_each(hits, ScriptRequest::Credit).await
    }

    /// Returns what [`decide_hits`](Self::decide_hits) would, and takes nothing.
    pub(crate) async fn peek_hits(&self, hits: &RedisHits) -> Result<Decision, StoreError> {
        self.peek_at(hits).await
    }
}

/// Charges these limits to the store only, because their cost may be corrected later.
pub(crate) fn take_from_store(hits: &mut RedisHits, may_change: impl Fn(LimitId) -> bool) {
    hits.iter_mut().filter(|hit| may_change(hit.limit)).for_each(|hit| hit.take_from = TakeFrom::Store);
}

/// Returns the hits on one limit, at another cost.
pub(crate) fn only(hits: &RedisHits, limit: LimitId, cost: u64) -> RedisHits {
    let same = hits.iter().filter(|hit| hit.limit == limit).cloned();
    same.map(|mut hit| {
        hit.script_hit.cost = cost;
        hit
    })
    .collect()
}

/// Returns the limit and the cost of a hit.
#[cfg(feature = "rules")]
pub(crate) fn cost(hit: &RedisHit) -> (LimitId, u64) {
    (hit.limit, hit.script_hit.cost)
}

//! Questions that were made ready before, for rules.

use super::{RedisHit, RedisHits, RedisLimiter, StoreError, TakeFrom};
use crate::decision::Decision;
use crate::limit::LimitId;
use crate::limiter::Hit;

impl RedisLimiter {
    /// Returns the wall clock's time, as this process knows it.
    #[cfg(feature = "rules")]
    pub(crate) fn now(&self) -> crate::units::Timestamp {
        self.0.shared.clock.wall()
    }

    /// The hits as they are asked. The limits are this limiter's own.
    pub(crate) fn redis_hits(&self, hits: &[Hit<'_>]) -> RedisHits {
        self.prepare_hits(hits).unwrap_or_default()
    }

    /// Takes all that is wanted, or nothing. The hits that come back have their receipts, for
    /// [`settle_hits`](Self::settle_hits).
    pub(crate) async fn decide_hits(self, mut hits: RedisHits) -> (Decision, RedisHits) {
        let cost = hits.iter().map(|hit| hit.script_hit.cost).max().unwrap_or(0);
        let decision = self.take_or_lease(&mut hits, cost).await;
        (decision, hits)
    }

    /// What would be decided, taking nothing.
    pub(crate) async fn peek_hits(&self, hits: &RedisHits) -> Result<Decision, StoreError> {
        self.peek_at(hits).await
    }
}

/// Takes these limits from the store alone, because their cost may be corrected later.
pub(crate) fn take_from_store(hits: &mut RedisHits, may_change: impl Fn(LimitId) -> bool) {
    hits.iter_mut().filter(|hit| may_change(hit.limit)).for_each(|hit| hit.take_from = TakeFrom::Store);
}

/// One of the limits alone, at another cost.
pub(crate) fn only(hits: &RedisHits, limit: LimitId, cost: u64) -> RedisHits {
    let same = hits.iter().filter(|hit| hit.limit == limit).cloned();
    same.map(|mut hit| {
        hit.script_hit.cost = cost;
        hit
    })
    .collect()
}

/// The limit that is asked, and the cost.
#[cfg(feature = "rules")]
pub(crate) fn cost(hit: &RedisHit) -> (LimitId, u64) {
    (hit.limit, hit.script_hit.cost)
}

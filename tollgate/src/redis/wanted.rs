//! Questions that were made ready before, for rules.

use super::{AllWanted, RedisLimiter, StoreError, TakeFrom, Wanted};
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
    pub(crate) fn want(&self, hits: &[Hit<'_>]) -> AllWanted {
        self.want_hits(hits).unwrap_or_default()
    }

    /// Takes all that is wanted, or nothing. The hits that come back have their receipts, for
    /// [`settle_wanted`](Self::settle_wanted).
    pub(crate) async fn decide_wanted(self, mut wanted: AllWanted) -> (Decision, AllWanted) {
        let cost = wanted.iter().map(|one| one.ask.cost).max().unwrap_or(0);
        let decision = self.take_or_lease(&mut wanted, cost).await;
        (decision, wanted)
    }

    /// What would be decided, taking nothing.
    pub(crate) async fn look_wanted(&self, wanted: &AllWanted) -> Result<Decision, StoreError> {
        self.look(wanted).await
    }
}

/// Takes these limits from the store alone, because their cost may be corrected later.
pub(crate) fn take_from_store(wanted: &mut AllWanted, may_change: impl Fn(LimitId) -> bool) {
    wanted.iter_mut().filter(|one| may_change(one.limit)).for_each(|one| one.take_from = TakeFrom::Store);
}

/// One of the limits alone, at another cost.
pub(crate) fn only(wanted: &AllWanted, limit: LimitId, cost: u64) -> AllWanted {
    let same = wanted.iter().filter(|one| one.limit == limit).cloned();
    same.map(|mut one| {
        one.ask.cost = cost;
        one
    })
    .collect()
}

/// The limit that is asked, and the cost.
#[cfg(feature = "rules")]
pub(crate) fn cost(wanted: &Wanted) -> (LimitId, u64) {
    (wanted.limit, wanted.ask.cost)
}

//! Questions that were made ready before, for rules.

use super::{AllWanted, RedisLimiter, StoreError, Wanted};
use crate::decision::{AskedBy, Decision};
use crate::limit::LimitId;
use crate::limiter::Hit;

/// Where quota may be taken from.
pub(crate) enum TakeFrom {
    /// A slice that this node has, if the limit is leased.
    SliceOrStore,
    /// The store alone: what came out of a slice cannot be given back.
    Store,
}

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

    /// Takes all that is wanted, or nothing. Returns the hits too if several slots of a cluster were charged: each then has
    /// the time of its slot, for [`settle_wanted`](Self::settle_wanted).
    pub(crate) async fn decide_wanted(self, mut wanted: AllWanted, from: TakeFrom) -> (Decision, Option<AllWanted>) {
        let cost = wanted.iter().map(|one| one.ask.cost).max().unwrap_or(0);
        match from {
            // Nothing of it is ever given back.
            TakeFrom::SliceOrStore => (self.take_or_lease(wanted, cost, AskedBy::Hits).await, None),
            TakeFrom::Store => {
                let decision = self.take(&mut wanted, cost, AskedBy::Hits, self.deadline()).await;
                let is_by_slot = wanted.iter().any(|one| one.charged_at.is_some());
                (decision, is_by_slot.then_some(wanted))
            }
        }
    }

    /// What would be decided, taking nothing.
    pub(crate) async fn look_wanted(&self, wanted: &AllWanted) -> Result<Decision, StoreError> {
        self.look(wanted).await
    }
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

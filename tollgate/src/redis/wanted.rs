//! Questions that were made ready before, for rules: asked, looked at, and brought to their actual cost.

use super::{AllWanted, RedisLimiter, StoreError, Wanted};
use crate::decision::{AskedBy, Decision, Source};
use crate::limit::LimitId;
use crate::limiter::Hit;
use crate::reservation::{Costs, Settlement};

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

    /// Takes all that is wanted, or nothing.
    pub(crate) async fn decide_wanted(self, wanted: AllWanted, from: TakeFrom) -> Decision {
        let cost = wanted.iter().map(|one| one.ask.cost).max().unwrap_or(0);
        match from {
            TakeFrom::SliceOrStore => self.take_or_lease(wanted, cost, AskedBy::Hits).await,
            TakeFrom::Store => self.take(&wanted, cost, AskedBy::Hits, self.deadline()).await,
        }
    }

    /// What would be decided, taking nothing.
    pub(crate) async fn look_wanted(&self, wanted: &AllWanted) -> Result<Decision, StoreError> {
        self.look(wanted).await
    }

    /// Brings what a decision has taken to its actual cost, as far as that can be.
    pub(crate) async fn settle_wanted(
        &self,
        wanted: &AllWanted,
        decision: &Decision,
        costs: Costs,
    ) -> Result<Settlement, StoreError> {
        let Costs { charged, actual } = costs;
        // What this node's memory or the policy let through is not on the store. What came out of a slice is.
        if !matches!(decision.source, Source::Store | Source::Lease) && actual > charged {
            return Ok(Settlement::Short { missing: actual - charged });
        }
        if actual <= charged {
            let mut owed = wanted.clone();
            owed.iter_mut().for_each(|one| one.ask.cost = charged - actual);
            self.give_back(&owed, decision).await?;
            return Ok(Settlement::Settled);
        }
        let mut missing = 0;
        for one in wanted {
            missing = missing.max(self.take_up_to(one, actual - charged).await?);
        }
        Ok(if missing == 0 { Settlement::Settled } else { Settlement::Short { missing } })
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

/// The hit of that position alone, at another cost.
pub(crate) fn nth(wanted: &AllWanted, index: usize, cost: u64) -> AllWanted {
    wanted
        .get(index)
        .map(|one| Wanted { limit: one.limit, ask: super::Ask { cost, ..one.ask.clone() } })
        .into_iter()
        .collect()
}

/// The limit that is asked, and the cost.
#[cfg(feature = "rules")]
pub(crate) fn cost(wanted: &Wanted) -> (LimitId, u64) {
    (wanted.limit, wanted.ask.cost)
}

//! Questions that were made ready before, for rules.

use smallvec::SmallVec;

use super::{Hit, Limiter};
use crate::decision::Decision;
use crate::limit::LimitId;
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

/// What the rules ask that a request meets. They travel with it, so there is no more room than most need.
pub(crate) type FewHits = SmallVec<[HashedHit; 3]>;

impl Limiter {
    /// A hit as it is asked. Whoever gathers several sees to it that no two are of one key.
    #[inline]
    pub(crate) fn hash_hit(&self, hit: &Hit<'_>) -> HashedHit {
        HashedHit { limit: hit.limit, fingerprint: self.0.store.fingerprint(hit.key), cost: hit.cost }
    }

    /// Returns the wall clock's time.
    pub(crate) fn wall_now(&self) -> Timestamp {
        self.now().offset_by(self.0.clock.wall_offset_micros())
    }

    /// Decides one hit.
    #[cfg(feature = "tower")]
    #[inline(always)]
    pub(crate) fn decide_one_hashed(&self, hit: HashedHit) -> Decision {
        // The processor reads its counter once all that went before is done, so not after a cache miss.
        let now = self.now();
        let inner = &*self.0;
        self.with_wall_time(inner.store.decide_one(&inner.limits, hit, now))
    }

    /// The denial, if one of the limits denies. Otherwise nothing has changed.
    pub(crate) fn find_denial(&self, hits: &[HashedHit]) -> Option<Decision> {
        let inner = &*self.0;
        let denied = inner.store.find_denial(&inner.limits, hits, self.now())?;
        Some(self.with_wall_time(denied))
    }

    /// What would be decided, taking nothing.
    pub(crate) fn peek_hashed(&self, hits: &[HashedHit]) -> Decision {
        self.with_wall_time(self.0.store.peek(&self.0.limits, hits, self.now()))
    }
}

/// One of the limits alone, at another cost.
pub(crate) fn hits_of_limit(hits: &[HashedHit], limit: LimitId, cost: u64) -> FewHits {
    hits.iter().filter(|hit| hit.limit == limit).map(|hit| HashedHit { cost, ..*hit }).collect()
}

//! Questions that were made ready before, for rules.

use smallvec::SmallVec;

use super::{Hit, Limiter};
use crate::decision::Decision;
use crate::limit::LimitId;
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

/// What the rules ask that a request meets. They travel with it, so there is no more room than most need.
pub(crate) type FewAsked = SmallVec<[HashedHit; 3]>;

impl Limiter {
    /// A hit as it is asked. Whoever gathers several sees to it that no two are of one key.
    #[inline]
    pub(crate) fn ask_hit(&self, hit: &Hit<'_>) -> HashedHit {
        HashedHit { limit: hit.limit, fingerprint: self.0.store.fingerprint(hit.key), cost: hit.cost }
    }

    /// Returns the wall clock's time.
    pub(crate) fn wall_now(&self) -> Timestamp {
        self.now().offset_by(self.0.clock.wall_offset_micros())
    }

    /// Decides one hit.
    #[cfg(feature = "tower")]
    #[inline(always)]
    pub(crate) fn decide_one_asked(&self, asked: HashedHit) -> Decision {
        // The processor reads its counter once all that went before is done, so not after a cache miss.
        let now = self.now();
        let inner = &*self.0;
        self.dated(inner.store.decide_one(&inner.limits, asked, now))
    }

    /// The denial, if one of the limits denies. Otherwise nothing has changed.
    pub(crate) fn refuse_asked(&self, asked: &[HashedHit]) -> Option<Decision> {
        let inner = &*self.0;
        let denied = inner.store.refuse(&inner.limits, asked, self.now())?;
        Some(self.dated(denied))
    }

    /// What would be decided, taking nothing.
    pub(crate) fn look_asked(&self, asked: &[HashedHit]) -> Decision {
        self.dated(self.0.store.look(&self.0.limits, asked, self.now()))
    }
}

/// One of the limits alone, at another cost.
pub(crate) fn only(asked: &[HashedHit], limit: LimitId, cost: u64) -> FewAsked {
    asked.iter().filter(|one| one.limit == limit).map(|one| HashedHit { cost, ..*one }).collect()
}

//! Operations on hits whose keys are already hashed, for rules.
//!
//! A request that several rules match hashes each key once, and uses the hits for the check and for the settlement.

use std::time::Duration;

use smallvec::SmallVec;

use super::{CombinedHits, HashedHits, Limiter};
use crate::decision::{CombinedDecision, Decision, LimitId};
use crate::limiter::reservation::Settlement;
use crate::store::memory::HashedHit;
use crate::units::Timestamp;

/// The hits of one request. They are kept with the request, so there is inline room for as many as most requests have.
pub type FewHits = SmallVec<[HashedHit; 3]>;

impl Limiter {
    /// Returns the wall clock's time.
    #[doc(hidden)]
    #[inline]
    pub fn wall_now(&self) -> Timestamp {
        self.now().offset_by(self.0.clock.wall_offset_micros())
    }

    /// Returns the denial, if one of the limits denies. Otherwise nothing changes.
    #[doc(hidden)]
    #[inline]
    pub fn find_denial(&self, hits: &[HashedHit]) -> Option<Decision> {
        let inner = &*self.0;
        let denied = inner.store.find_denial(&inner.limits, hits, self.now())?;
        Some(self.finish(hits, denied, &[]))
    }

    /// Gives back the cost of each hit, from the newest charges of its key. Returns no more than the key has spent.
    #[doc(hidden)]
    pub fn credit_hashed(&self, hits: &[HashedHit]) {
        let now = self.now();
        hits.iter().for_each(|hit| self.0.store.credit(&self.0.limits, *hit, now));
    }

    /// Gives the key of each hit its whole quota back.
    #[doc(hidden)]
    pub fn reset_hashed(&self, hits: &[HashedHit]) {
        let now = self.now();
        hits.iter().for_each(|hit| self.reset_at(*hit, now));
    }

    /// Counts units that were spent already, whatever is left.
    #[doc(hidden)]
    pub fn charge_hashed(&self, hit: HashedHit) -> Settlement {
        self.charge_at(hit, self.now())
    }

    /// Returns the time until the key of a hit owes nothing, or `None` if it owes nothing now.
    #[doc(hidden)]
    pub fn owes_for(&self, hit: HashedHit) -> Option<Duration> {
        let inner = &*self.0;
        inner.store.owes_for(&inner.limits, hit, self.now()).map(Duration::from_micros)
    }

    /// Returns the decision on the hits, taking nothing.
    #[doc(hidden)]
    pub fn peek_hashed(&self, hits: &[HashedHit]) -> Decision {
        self.peek_hits(hits, self.now())
    }

    /// Takes all hits, or none. Returns the decision of each hit, and then of each variant. A hit that is allowed while
    /// another one is denied shows the quota that is left.
    #[doc(hidden)]
    pub fn decide_each(&self, combined: &CombinedHits<HashedHits, HashedHit>) -> CombinedDecision {
        let CombinedHits { hits, variants } = combined;
        // Other variants are not charged, so they are checked before.
        if variants.iter().any(|hit| !self.peek_one(*hit, self.now()).is_allowed()) {
            return self.peek_each(combined);
        }
        let decision = self.decide_hashed(hits);
        if !decision.is_allowed() {
            let mut peeked = self.peek_each(combined);
            // Another thread may have ended the denial meanwhile; the request was denied nevertheless.
            if peeked.each.iter().flatten().all(Decision::is_allowed)
                && let Some(denied) = hits.iter().position(|hit| decision.limit() == Some(hit.limit))
            {
                peeked.each[denied] = Some(decision);
            }
            return peeked;
        }
        let now = self.now();
        let each = hits.iter().chain(variants);
        let each = each.map(|hit| Some(self.peek_one(HashedHit { cost: 0, ..*hit }, now))).collect();
        CombinedDecision { is_taken: true, delay: decision.delay(), each }
    }

    /// Returns the decision of each hit, and then of each variant, taking nothing. A hit that is allowed shows the quota
    /// that is left.
    #[doc(hidden)]
    pub fn peek_each(&self, combined: &CombinedHits<HashedHits, HashedHit>) -> CombinedDecision {
        let now = self.now();
        let each = combined.hits.iter().chain(&combined.variants).map(|hit| {
            let peeked = self.peek_one(*hit, now);
            Some(if peeked.is_allowed() { self.peek_one(HashedHit { cost: 0, ..*hit }, now) } else { peeked })
        });
        CombinedDecision { is_taken: false, delay: Duration::ZERO, each: each.collect() }
    }

    /// Returns the decision of one limit of a request that was allowed or denied: the quota that is left, or its denial.
    #[doc(hidden)]
    pub fn own_decision(&self, hit: HashedHit, is_taken: bool) -> Decision {
        let now = self.now();
        let denied = (!is_taken).then(|| self.peek_one(hit, now)).filter(|own| !own.is_allowed());
        denied.unwrap_or_else(|| self.peek_one(HashedHit { cost: 0, ..hit }, now))
    }

    fn peek_one(&self, hit: HashedHit, now: Timestamp) -> Decision {
        self.peek_hits(&[hit], now)
    }
}

/// Returns the first hit of one limit, with another cost. Further hits are those of other readings of a path.
#[inline]
pub fn hit_of_limit(hits: &[HashedHit], limit: LimitId, cost: u64) -> FewHits {
    hits.iter().find(|hit| hit.limit == limit).map(|hit| HashedHit { cost, ..*hit }).into_iter().collect()
}

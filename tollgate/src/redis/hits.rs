//! Prepared hits, for rules.

use std::time::Duration;

use smallvec::SmallVec;

use super::script::ScriptRequest;
use super::{RedisHit, RedisHits, RedisLimiter, StoreError, TakeFrom};
use crate::decision::{CombinedDecision, Decision, LimitId, Source};
use crate::limiter::{CombinedHits, Hit, Place};
use crate::store::memory::Positions;

impl RedisLimiter {
    /// Returns the wall-clock time of this process.
    #[doc(hidden)]
    pub fn now(&self) -> crate::units::Timestamp {
        self.0.shared.clock.wall()
    }

    /// Prepares a hit for Redis. Its limit must belong to this limiter.
    #[doc(hidden)]
    pub fn redis_hit(&self, hit: &Hit<'_>) -> RedisHit {
        let (limit, key, cost) = hit.parts();
        debug_assert!(self.limit(limit).is_some(), "rules and their limiter have the same ids");
        self.0.limits[limit.index()].hit(limit, key, cost)
    }

    /// Takes all hits, or none. Returns the hits with their receipts, for [`settle_hits`](Self::settle_hits).
    #[doc(hidden)]
    pub async fn decide_hits(self, mut hits: RedisHits) -> (Decision, RedisHits) {
        let cost = hits.iter().map(|hit| hit.script_hit.cost).max().unwrap_or(0);
        let decision = self.take_or_lease(&mut hits, cost).await;
        (decision, hits)
    }

    /// Decides the hits as if the store had failed. Takes all of them, or none.
    #[doc(hidden)]
    pub fn decide_without_store(&self, mut hits: RedisHits) -> (Decision, RedisHits) {
        let cost = hits.iter().map(|hit| hit.script_hit.cost).max().unwrap_or(0);
        let decision = self.by_policy(&mut hits.iter_mut().collect::<SmallVec<[&mut RedisHit; 2]>>());
        (Decision { cost, ..decision }, hits)
    }

    /// Gives back the cost of each hit, from the newest charges of its key.
    #[doc(hidden)]
    pub async fn credit_hits(&self, hits: &RedisHits) -> Result<(), StoreError> {
        self.send_each(hits, ScriptRequest::Credit).await
    }

    /// Returns the decision of each hit, and then of each variant, taking nothing. A hit that is allowed shows the quota
    /// that is left.
    #[doc(hidden)]
    pub async fn peek_each(&self, combined: &CombinedHits<RedisHits, RedisHit>) -> CombinedDecision {
        let hits: Vec<RedisHit> = combined.hits.iter().chain(&combined.variants).cloned().collect();
        let peeked = self.peek_each_on_store(&hits).await.into_iter().zip(&hits).map(|(own, hit)| {
            own.map(|own| if own.is_allowed() { own.with_more_remaining(hit.script_hit.cost) } else { own })
        });
        CombinedDecision { is_taken: false, delay: Duration::ZERO, each: peeked.collect() }
    }

    /// Takes all hits, or none. Returns the decision of each hit, and then of each variant, and the hits with their
    /// receipts. A hit that is allowed while another one is denied shows the quota that is left.
    #[doc(hidden)]
    pub async fn decide_each(self, combined: CombinedHits<RedisHits, RedisHit>) -> (CombinedDecision, RedisHits) {
        let CombinedHits { hits, variants } = combined;
        // Other variants are not charged, so they are checked before.
        let of_variants = self.peek_each_on_store(&variants).await;
        if of_variants.iter().flatten().any(|own| !own.is_allowed()) {
            let combined = CombinedHits { hits, variants };
            return (self.peek_each(&combined).await, combined.hits);
        }
        let (decision, hits) = self.clone().decide_hits(hits).await;
        let each = hits.iter().map(|hit| match hit.decided {
            // Nothing was taken.
            Some(allowed) if allowed.is_allowed() && !decision.is_allowed() => {
                Some(allowed.with_more_remaining(hit.script_hit.cost))
            }
            Some(decided) => Some(decided),
            None => (decision.limit() == Some(hit.limit)).then_some(decision),
        });
        let mut each: Vec<Option<Decision>> = each.chain(of_variants).collect();
        if !decision.is_allowed() && is_known_here(&decision) {
            self.read_unknown(&hits, &mut each).await;
        }
        // A denial never gets lost, whichever part of this process made it.
        if !decision.is_allowed() && each.iter().flatten().all(Decision::is_allowed) {
            each.fill(Some(decision));
        }
        (CombinedDecision { is_taken: decision.is_allowed(), delay: decision.delay(), each }, hits)
    }

    /// Reads what is left under the limits of a request that this process denied without a call.
    #[doc(hidden)]
    pub async fn read_undecided(&self, hits: &mut RedisHits, denied: &Decision) {
        if !denied.is_allowed() && is_known_here(denied) {
            let own = |hit: &RedisHit| hit.decided.or_else(|| (denied.limit() == Some(hit.limit)).then_some(*denied));
            let mut each: SmallVec<[Option<Decision>; 4]> = hits.iter().map(own).collect();
            self.read_unknown(hits, &mut each).await;
            set_decided(hits, &each);
        }
    }

    /// Reads what is left under the limits of a denied request that nobody has looked at: this process knew without a call
    /// that another one denies it.
    #[doc(hidden)]
    pub async fn read_unknown(&self, hits: &RedisHits, each: &mut [Option<Decision>]) {
        let unknown: RedisHits =
            each.iter().zip(hits).filter(|(own, _)| own.is_none()).map(|(_, hit)| hit.clone()).collect();
        if unknown.is_empty() || !self.0.shared.reads.take(self.now()) {
            return;
        }
        let read = self.peek_each_on_store(&unknown).await;
        for (own, (hit, read)) in each.iter_mut().filter(|own| own.is_none()).zip(unknown.iter().zip(read)) {
            *own =
                read.map(|read| if read.is_allowed() { read.with_more_remaining(hit.script_hit.cost) } else { read });
        }
    }

    /// Combines hits: two on the same key count as one, with the sum of the costs, which is charged to the store only.
    /// Reports the place of each among the combined hits.
    #[doc(hidden)]
    pub fn combine_hits<'h>(
        hits: impl Iterator<Item = &'h RedisHit>,
        mut place_of_next: impl FnMut(Place),
    ) -> CombinedHits<RedisHits, RedisHit> {
        let (mut all, mut positions) = (RedisHits::new(), Positions::default());
        let mut variants: Vec<(usize, RedisHit)> = Vec::new();
        for hit in hits {
            let is_same = |other: &RedisHit| other.script_hit.name == hit.script_hit.name;
            match positions.of(&all, is_same, || hit.script_hit.name.clone()) {
                Some(same) => {
                    let combined: &mut RedisHit = &mut all[same];
                    combined.script_hit.cost = combined.script_hit.cost.saturating_add(hit.script_hit.cost);
                    combined.take_from = TakeFrom::Store;
                    let is_variant = combined.limit != hit.limit;
                    place_of_next(Place::new(
                        same,
                        is_variant.then(|| position_of_variant(&mut variants, (same, hit))),
                    ));
                }
                None => {
                    all.push(hit.clone());
                    positions.added(&all, |hit| hit.script_hit.name.clone());
                    place_of_next(Place::new(all.len() - 1, None));
                }
            }
        }
        variants.iter_mut().for_each(|(charged, hit)| hit.script_hit.cost = all[*charged].script_hit.cost);
        let variants = variants.into_iter().map(|(_, hit)| hit).collect();
        CombinedHits { hits: all, variants }
    }

    /// Returns what [`decide_hits`](Self::decide_hits) would, and takes nothing.
    #[doc(hidden)]
    pub async fn peek_hits(&self, hits: &RedisHits) -> Result<Decision, StoreError> {
        let deadline = self.deadline();
        let decision = self.peek_at(hits).await?;
        Ok(self.finish(&mut hits.clone(), decision, deadline).await)
    }
}

/// Returns whether this process made a decision without a call, while the store is available.
fn is_known_here(decision: &Decision) -> bool {
    matches!(decision.source(), Source::DenialCache | Source::Lease)
}

/// Returns the position of a hit among the variants, and adds it if it is new. Each comes with the position of the hit that
/// charges its key.
fn position_of_variant(variants: &mut Vec<(usize, RedisHit)>, (charged, hit): (usize, &RedisHit)) -> usize {
    let is_same = |(other, one): &(usize, RedisHit)| (*other, one.limit) == (charged, hit.limit);
    variants.iter().position(is_same).unwrap_or_else(|| {
        variants.push((charged, hit.clone()));
        variants.len() - 1
    })
}

/// Charges these limits to the store only, because their cost may be corrected later.
pub fn take_from_store(hits: &mut RedisHits, may_change: impl Fn(LimitId) -> bool) {
    hits.iter_mut().filter(|hit| may_change(hit.limit)).for_each(|hit| hit.take_from = TakeFrom::Store);
}

/// Returns the first hit on one limit, at another cost. Further hits are those of other readings of a path.
pub fn only(hits: &[RedisHit], limit: LimitId, cost: u64) -> RedisHits {
    let first = hits.iter().find(|hit| hit.limit == limit).cloned();
    first
        .map(|mut hit| {
            hit.script_hit.cost = cost;
            hit
        })
        .into_iter()
        .collect()
}

/// Returns hits on the same keys that cost nothing, without those on some limits.
pub fn looks(hits: &[RedisHit], leave_out: impl Fn(LimitId) -> bool) -> RedisHits {
    let looks = hits.iter().filter(|hit| !leave_out(hit.limit)).cloned();
    looks
        .map(|mut hit| {
            hit.script_hit.cost = 0;
            hit
        })
        .collect()
}

/// Sets the cost of a hit.
pub fn set_cost(hit: &mut RedisHit, cost: u64) {
    hit.script_hit.cost = cost;
}

/// Returns the limit and the cost of a hit.
pub fn cost(hit: &RedisHit) -> (LimitId, u64) {
    (hit.limit, hit.script_hit.cost)
}

/// Returns the name of the key of a hit on Redis.
pub fn key_name(hit: &RedisHit) -> &[u8] {
    &hit.script_hit.name
}

/// Returns the parts of the key that a name on Redis contains. A key that is too long for a name is its SHA-256.
pub fn key_parts(name: &[u8]) -> Vec<String> {
    super::names::parts_in(name)
}

/// Returns whether pending units may have caused the denial of a hit, which nobody has looked at.
pub fn may_be_pending(hit: &RedisHit) -> bool {
    hit.may_be_pending
}

/// Returns the decision of the limit of a hit alone, if the store made it.
pub fn decided(hit: &RedisHit) -> Option<&Decision> {
    hit.decided.as_ref()
}

/// Sets the decisions of single hits, which several checks made together. Ignores a decision on another limit.
pub fn set_decided(hits: &mut RedisHits, each: &[Option<Decision>]) {
    for (hit, own) in hits.iter_mut().zip(each) {
        hit.decided = own.filter(|own| own.limit() == Some(hit.limit));
    }
}

/// Sets the receipts of hits to those of the combined hits at these places.
pub fn set_receipts(hits: &mut RedisHits, combined: &RedisHits, places: &[Place]) {
    for (hit, place) in hits.iter_mut().zip(places) {
        if let Some(combined) = combined.get(place.hit) {
            (hit.receipt, hit.may_be_pending) = (combined.receipt, combined.may_be_pending);
        }
    }
}

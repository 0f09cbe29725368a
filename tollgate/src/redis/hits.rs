//! Prepared hits, for rules.

use super::script::ScriptRequest;
use super::{RedisHit, RedisHits, RedisLimiter, StoreError, TakeFrom};
use crate::decision::CombinedDecision;
use crate::decision::{Decision, LimitId};
use crate::limiter::Hit;
use crate::store::memory::Positions;

impl RedisLimiter {
    /// Returns the wall-clock time of this process.
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

    /// Takes all hits, or none. Returns the decision of each hit, and the hits with their receipts. A hit that is
    /// allowed while another one is denied shows the quota that is left, unless this process denied without a call:
    /// then it has no decision.
    pub(crate) async fn decide_each(self, hits: RedisHits) -> (CombinedDecision, RedisHits) {
        let (decision, hits) = self.decide_hits(hits).await;
        let each = hits.iter().map(|hit| match hit.decided {
            // Nothing was taken.
            Some(allowed) if allowed.is_allowed() && !decision.is_allowed() => {
                Some(allowed.with_more_remaining(hit.script_hit.cost))
            }
            Some(decided) => Some(decided),
            None => (decision.limit() == Some(hit.limit)).then_some(decision),
        });
        let mut each: Vec<Option<Decision>> = each.collect();
        // A denial never gets lost, whichever part of this process made it.
        if !decision.is_allowed() && each.iter().flatten().all(Decision::is_allowed) {
            each.fill(Some(decision));
        }
        (CombinedDecision { is_taken: decision.is_allowed(), delay: decision.delay(), each }, hits)
    }

    /// Combines hits: two on the same key count as one, with the sum of the costs, which is charged to the store only.
    /// Reports the position of each among the combined hits.
    pub(crate) fn combine_hits<'h>(
        hits: impl Iterator<Item = &'h RedisHit>,
        mut position_of_next: impl FnMut(usize),
    ) -> RedisHits {
        let (mut all, mut positions) = (RedisHits::new(), Positions::default());
        for hit in hits {
            let is_same = |other: &RedisHit| other.script_hit.name == hit.script_hit.name;
            match positions.of(&all, is_same, || hit.script_hit.name.clone()) {
                Some(same) => {
                    let combined: &mut RedisHit = &mut all[same];
                    combined.script_hit.cost = combined.script_hit.cost.saturating_add(hit.script_hit.cost);
                    combined.take_from = TakeFrom::Store;
                    position_of_next(same);
                }
                None => {
                    all.push(hit.clone());
                    positions.added(&all, |hit| hit.script_hit.name.clone());
                    position_of_next(all.len() - 1);
                }
            }
        }
        all
    }

    /// Returns the decision of each hit by itself, and takes nothing. A denial that is certain needs no call. The
    /// decision is `None` where the store does not reply.
    pub(crate) async fn peek_each(&self, hits: &RedisHits) -> Vec<Option<Decision>> {
        let mut each: Vec<Option<Decision>> = hits.iter().map(|hit| self.certain_denial_of(hit)).collect();
        let open: Vec<usize> = (0..hits.len()).filter(|position| each[*position].is_none()).collect();
        let open_hits: RedisHits = open.iter().map(|position| hits[*position].clone()).collect();
        for (position, own) in open.into_iter().zip(self.peek_each_on_store(&open_hits).await) {
            each[position] = own;
        }
        each
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

/// Returns the first hit on one limit, at another cost. Further hits are those of other readings of a path.
pub(crate) fn only(hits: &[RedisHit], limit: LimitId, cost: u64) -> RedisHits {
    let first = hits.iter().find(|hit| hit.limit == limit).cloned();
    first
        .map(|mut hit| {
            hit.script_hit.cost = cost;
            hit
        })
        .into_iter()
        .collect()
}

/// Returns the limit and the cost of a hit.
pub(crate) fn cost(hit: &RedisHit) -> (LimitId, u64) {
    (hit.limit, hit.script_hit.cost)
}

/// Returns the name of the key of a hit on Redis.
#[cfg(feature = "file")]
pub(crate) fn key_name(hit: &RedisHit) -> &[u8] {
    &hit.script_hit.name
}

/// Returns the parts of the key that a name on Redis contains. A key that is too long for a name is its SHA-256.
#[cfg(feature = "file")]
pub(crate) fn key_parts(name: &[u8]) -> Vec<String> {
    super::names::parts_in(name)
}

/// Returns the decision of the limit of a hit alone, if the store made it.
pub(crate) fn decided(hit: &RedisHit) -> Option<&Decision> {
    hit.decided.as_ref()
}

/// Sets the decisions of single hits, which several checks together have got. A decision on another limit is none of the
/// hit.
pub(crate) fn set_decided(hits: &mut RedisHits, each: &[Option<Decision>]) {
    for (hit, own) in hits.iter_mut().zip(each) {
        hit.decided = own.filter(|own| own.limit() == Some(hit.limit));
    }
}

/// Sets the receipts of hits to those of the combined hits at these positions.
pub(crate) fn set_receipts(hits: &mut RedisHits, combined: &RedisHits, positions: &[usize]) {
    for (hit, position) in hits.iter_mut().zip(positions) {
        if let Some(combined) = combined.get(*position) {
            hit.receipt = combined.receipt;
        }
    }
}

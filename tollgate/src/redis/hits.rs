//! Prepared hits, for rules, and the reservations that any node settles: see `gate/reservation.rs`.

use smallvec::SmallVec;

use super::script::{Claim, ScriptHit, ScriptRequest};
use super::{Receipt, RedisHit, RedisHits, RedisLimiter, StoreError, TakeFrom, names};
#[cfg(feature = "rules")]
use crate::decision::CombinedDecision;
use crate::decision::{Decision, LimitId};
use crate::limiter::Hit;
use crate::limiter::reservation::{ReservedCharge, Settlement};
#[cfg(feature = "rules")]
use crate::store::memory::Positions;
use crate::units::Timestamp;

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

    /// Takes all hits, or none. Returns the decision of each hit, and the hits with their receipts. A hit that is
    /// allowed while another one is denied shows the quota that is left, unless this process denied without a call:
    /// then it has no decision.
    #[cfg(feature = "rules")]
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
    #[cfg(feature = "rules")]
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
#[cfg(feature = "file")]
pub(crate) fn decided(hit: &RedisHit) -> Option<&Decision> {
    hit.decided.as_ref()
}

/// Sets the receipts of hits to those of the combined hits at these positions.
#[cfg(feature = "rules")]
pub(crate) fn set_receipts(hits: &mut RedisHits, combined: &RedisHits, positions: &[usize]) {
    for (hit, position) in hits.iter_mut().zip(positions) {
        if let Some(combined) = combined.get(*position) {
            hit.receipt = combined.receipt;
        }
    }
}

/// The key of the signing secret, after `rate_limit:`.
const SECRET_KEY: &str = "{reservations}";

/// Returns the stored secret, or stores the proposed one.
const SECRET: &str = r"
local secret = redis.call('MGET', KEYS[1])[1]
if secret then return secret end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
";

impl RedisLimiter {
    /// Returns the secret that signs reservations, on the default store. If the store has no secret yet, `proposal`
    /// becomes the secret.
    pub(crate) async fn reservation_secret(&self, proposal: &[u8; 32]) -> Result<[u8; 32], StoreError> {
        let shared = &*self.0.shared;
        let topology = &shared.stores.default_store().topology;
        let key = topology.names().of(SECRET_KEY);
        let mut command = redis::cmd("EVAL");
        command.arg(SECRET).arg(1).arg(&key).arg(&proposal[..]);
        let reply = topology.run(key.as_bytes(), &command, shared.deadline()).await?;
        let secret = redis::from_redis_value::<Vec<u8>>(reply).ok().and_then(|secret| secret.try_into().ok());
        secret.ok_or_else(|| StoreError::unavailable("the secret of reservations on Redis is not in the expected form"))
    }

    /// Returns the units that the store took for the first of these hits that is not a ban.
    pub(crate) fn reserved_charge(
        &self,
        hits: &[RedisHit],
        is_ban: impl Fn(LimitId) -> bool,
    ) -> Option<ReservedCharge> {
        let hit = hits.iter().find(|hit| !is_ban(hit.limit))?;
        let Receipt::Store { at } = hit.receipt else { return None };
        let prepared = &self.0.limits[hit.limit.index()];
        Some(ReservedCharge {
            limit: prepared.limit.name().to_owned(),
            variant: prepared.limit.variant().map(str::to_owned),
            key: prepared.key_in(&hit.script_hit.name).to_vec(),
            units: hit.script_hit.cost,
            at: at.as_micros(),
        })
    }

    /// Settles reserved units at their actual cost, once. Units are given back in the call that marks the reservation
    /// as settled.
    pub(crate) async fn settle_reserved(
        &self,
        charge: &ReservedCharge,
        id: &[u8; 16],
        expires_at: Timestamp,
        actual: u64,
    ) -> Result<Settlement, StoreError> {
        let variant = charge.variant.as_deref().and_then(|variant| self.variant(&charge.limit, variant));
        // A limit that was removed counts nothing any more.
        let Some(limit) = variant.or_else(|| self.id(&charge.limit)) else { return Ok(Settlement::Settled) };
        let mut hit = self.0.limits[limit.index()].hit_named(limit, &charge.key, charge.units);
        self.add_later_terms(&mut hit);
        let shared = &*self.0.shared;
        let names = shared.stores.of(&hit.script_hit).topology.names();
        let claim = Claim { marker: names::settled(&names.of("settled:"), &hit.script_hit.name, id), expires_at };
        let owed = ScriptHit { cost: charge.units.saturating_sub(actual), ..hit.script_hit.clone() };
        let at = Timestamp::from_micros(charge.at);
        let request = ScriptRequest::Settle(SmallVec::from_iter([owed]), at, claim);
        let reply = self.send(request).await?;
        shared.denials.forget(&hit.script_hit.name);
        match reply.taken {
            0 => return Ok(Settlement::AlreadySettled),
            2 => return Ok(Settlement::Expired),
            _ => {}
        }
        let missing = match actual.checked_sub(charge.units) {
            Some(cost @ 1..) => self.take_up_to(&hit, cost).await?,
            _ => 0,
        };
        Ok(if missing == 0 { Settlement::Settled } else { Settlement::Short { missing } })
    }
}

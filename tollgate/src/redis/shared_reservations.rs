//! Reservations that any node settles: see `gate/reservation.rs`.

use super::script::{Claim, Correction, ScriptHit, ScriptRequest};
use super::{Receipt, RedisHit, RedisLimiter, StoreError, names};
use crate::decision::LimitId;
use crate::limiter::reservation::{ReservedCharge, Settlement};
use crate::units::Timestamp;

/// The key of the signing secret, after `rate_limit:`.
const SECRET_KEY: &str = "{reservations}";

/// Returns the stored secret, or stores the proposed one. Of other data, it returns no more than shows that it is too long.
const SECRET: &str = r"
local secret = redis.call('MGET', KEYS[1])[1]
if secret then return string.sub(secret, 1, 33) end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
";

impl RedisLimiter {
    /// Returns the secret that signs reservations, on the default store. If the store has no secret yet, `proposal`
    /// becomes the secret.
    #[doc(hidden)]
    pub async fn reservation_secret(&self, proposal: &[u8; 32]) -> Result<[u8; 32], StoreError> {
        let shared = &*self.0.shared;
        let topology = &shared.stores.default_store().topology;
        let key = topology.names().of(SECRET_KEY);
        let mut command = redis::cmd("EVAL");
        command.arg(SECRET).arg(1).arg(&key).arg(&proposal[..]);
        let reply = topology.run(key.as_bytes(), &command, shared.deadline()).await?;
        read_secret(reply)
    }

    /// Returns the units that the store took for the first of these hits that is not a ban.
    #[doc(hidden)]
    pub fn reserved_charge(&self, hits: &[RedisHit], is_ban: impl Fn(LimitId) -> bool) -> Option<ReservedCharge> {
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

    /// Settles reserved units at their actual cost, once. The call that marks the reservation as settled gives units back,
    /// or counts the excess.
    #[doc(hidden)]
    pub async fn settle_reserved(
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
        let name = &hit.script_hit.name;
        let claim = Claim {
            marker: names::settled(&names.of("settled:"), name, id),
            reset: names::reset(&names.of("reset:"), name),
            expires_at,
        };
        let of_cost = |cost: u64| ScriptHit { cost, ..hit.script_hit.clone() };
        let excess = actual.checked_sub(charge.units).filter(|excess| *excess > 0).map(of_cost);
        let correction = match &excess {
            Some(excess) => Correction::Owe(excess.clone()),
            None => Correction::GiveBack(of_cost(charge.units - actual), Timestamp::from_micros(charge.at)),
        };
        let reply = self.send(ScriptRequest::Settle(claim, correction)).await;
        shared.denials.forget(&hit.script_hit.name);
        let reply = reply?;
        Ok(match (reply.taken, excess) {
            (0, _) => Settlement::AlreadySettled,
            (2, _) => Settlement::Expired,
            (_, Some(excess)) => self.settlement_of(&excess, &reply),
            (_, None) => Settlement::Settled,
        })
    }
}

/// Reads the reply of [`SECRET`].
pub(super) fn read_secret(reply: redis::Value) -> Result<[u8; 32], StoreError> {
    let secret = redis::from_redis_value::<Vec<u8>>(reply).ok().and_then(|secret| secret.try_into().ok());
    secret.ok_or_else(|| StoreError::unavailable("the secret of reservations on Redis is not in the expected form"))
}

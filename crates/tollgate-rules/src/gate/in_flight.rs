//! Limits on requests in flight, per key, in this process.
//!
//! A request takes a permit before any store is used, so a request that gets no permit spends nothing. It returns the
//! permit when it ends, or at once if a rate limit denies it.
//!
//! Not here: a queue for requests that get no permit, and counts shared between processes, because the permits of a
//! crashed process could not be taken back.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use smallvec::SmallVec;
use tollgate::internal::{Admission, Verdict};
use tollgate::{Decision, Key, LimitId};

use super::State;
use crate::{Mode, RuleHit, RuleSet};

/// Enough shards that threads serving different keys rarely contend.
const SHARDS: usize = 16;
/// Shards with at most this capacity are not shrunk.
const SMALL_SHARD: usize = 64;
/// We cannot predict when a permit becomes free, so this is the shortest wait that `Retry-After` can express.
const RETRY_AFTER_MICROS: u64 = 1_000_000;

/// The requests in flight of every rule that limits them.
pub(super) struct InFlight {
    /// The hash key. It is random, so that clients cannot construct collisions.
    secret: ahash::RandomState,
    /// One table per rule, by rule number; empty if no rule limits requests in flight.
    tables: Box<[Option<Arc<Table>>]>,
}

/// Requests in flight by key. A key without any is not in the table.
#[derive(Default)]
struct Table {
    shards: [Mutex<HashMap<u64, u64, ahash::RandomState>>; SHARDS],
}

/// A permit that a request needs.
pub(super) struct PermitRequest {
    rule: u32,
    limit: LimitId,
    mode: Mode,
    fingerprint: u64,
}

/// Most requests need no permit, and nearly all others need one.
pub(super) type PermitRequests = SmallVec<[PermitRequest; 2]>;

/// The limits on requests in flight that a request matched.
pub(super) type InFlightLimits = SmallVec<[LimitId; 2]>;

/// Decisions of shadow rules, with the numbers of the rules.
pub(super) type ShadowDecisions = Vec<(u32, Decision)>;

/// The permits of a request, and the decisions of shadow rules about it.
pub(super) struct TakenPermits {
    pub(super) permit: InFlightPermit,
    pub(super) shadow_decisions: ShadowDecisions,
}

/// A denial: all permits of a key are taken.
pub(super) struct Full {
    pub(super) decision: Decision,
    /// The hash of the key.
    pub(super) fingerprint: u64,
}

/// A request's permits, one for each limit on requests in flight that applies to it. Keep it while the request is
/// served; dropping it returns the permits.
#[must_use = "dropping the permit frees it for the next request"]
pub struct InFlightPermit(SmallVec<[HeldPermit; 2]>);

struct HeldPermit {
    table: Arc<Table>,
    fingerprint: u64,
}

impl InFlight {
    /// Creates the tables for `rules`. A limit that existed before, by name, keeps its table.
    pub(super) fn after(rules: &RuleSet, before: Option<(&RuleSet, &Self)>) -> Self {
        let secret = before.map_or_else(ahash::RandomState::new, |(_, before)| before.secret.clone());
        if !rules.limit_in_flight() {
            return Self { secret, tables: Box::default() };
        }
        let known = |name: &str| {
            let (rules, before) = before?;
            before.tables.get(rules.number(name)? as usize)?.clone()
        };
        let table = |rule: u32| rules.is_in_flight(rule).then(|| known(rules.name(rule)).unwrap_or_default());
        Self { secret, tables: (0..rules.len()).map(table).collect() }
    }

    pub(super) fn request_permit(&self, rule_hit: &RuleHit, key: Key<'_>) -> PermitRequest {
        let RuleHit { rule, limit, mode, .. } = *rule_hit;
        PermitRequest { rule, limit, mode, fingerprint: self.fingerprint(key) }
    }

    /// Returns the number of requests of a key that are in flight.
    pub(super) fn count(&self, rule: u32, key: Key<'_>) -> u64 {
        self.table(rule).map_or(0, |table| table.count(self.fingerprint(key)))
    }

    /// Returns the hash of a key, which stays the same when rules are replaced.
    pub(super) fn fingerprint(&self, key: Key<'_>) -> u64 {
        let mut hasher = self.secret.build_hasher();
        match key.whole() {
            Some(bytes) => bytes.hash(&mut hasher),
            None => key.several().for_each(|part| part.hash(&mut hasher)),
        }
        hasher.finish()
    }

    fn table(&self, rule: u32) -> Option<&Arc<Table>> {
        self.tables.get(rule as usize)?.as_ref()
    }
}

impl Table {
    fn shard(&self, fingerprint: u64) -> MutexGuard<'_, HashMap<u64, u64, ahash::RandomState>> {
        let shard = &self.shards[fingerprint as usize % SHARDS];
        // A panic cannot leave a count half changed, so a poisoned lock is fine.
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self, fingerprint: u64) -> u64 {
        self.shard(fingerprint).get(&fingerprint).copied().unwrap_or(0)
    }

    /// Takes a permit and returns it with the new count, or `None` if `max` are taken.
    fn take(self: &Arc<Self>, fingerprint: u64, max: u64) -> Option<(HeldPermit, u64)> {
        let mut shard = self.shard(fingerprint);
        let taken = shard.get(&fingerprint).copied().unwrap_or(0) + 1;
        if taken > max {
            return None;
        }
        shard.insert(fingerprint, taken);
        Some((HeldPermit { table: self.clone(), fingerprint }, taken))
    }

    fn release(&self, fingerprint: u64) {
        let mut shard = self.shard(fingerprint);
        match shard.get_mut(&fingerprint) {
            Some(taken) if *taken > 1 => *taken -= 1,
            _ => _ = shard.remove(&fingerprint),
        }
        // Release the memory that a burst needed.
        if shard.capacity() > SMALL_SHARD && shard.len() * 8 < shard.capacity() {
            let enough = shard.len() * 2;
            shard.shrink_to(enough);
        }
    }
}

impl Drop for HeldPermit {
    fn drop(&mut self) {
        self.table.release(self.fingerprint);
    }
}

impl InFlightPermit {
    /// Adds the permits of another one.
    pub(super) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }
}

impl std::fmt::Debug for InFlightPermit {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("InFlightPermit").field("limits", &self.0.len()).finish()
    }
}

/// Takes all requested permits, or none.
pub(super) fn take(state: &State, requests: &[PermitRequest]) -> Result<TakenPermits, Full> {
    let mut taken = TakenPermits { permit: InFlightPermit(SmallVec::new()), shadow_decisions: ShadowDecisions::new() };
    for one in requests {
        let Some(table) = state.in_flight.table(one.rule) else { continue };
        let max = state.rules.max_in_flight(one.limit);
        let held = table.take(one.fingerprint, max);
        let before = held.as_ref().map_or(max, |(_, taken)| taken - 1);
        match (held, one.mode) {
            (None, Mode::Enforced) => {
                return Err(Full { decision: decision(state, one.limit, before), fingerprint: one.fingerprint });
            }
            (held, mode) => {
                taken.permit.0.extend(held.map(|(held, _)| held));
                if mode == Mode::Shadow {
                    taken.shadow_decisions.push((one.rule, decision(state, one.limit, before)));
                }
            }
        }
    }
    Ok(taken)
}

/// Returns the decision on one more request of a key that has `in_flight` requests in flight.
pub(super) fn decision(state: &State, limit: LimitId, in_flight: u64) -> Decision {
    let max = state.rules.max_in_flight(limit);
    let verdict = match max.saturating_sub(in_flight) {
        0 => Verdict {
            admission: Admission::Denied { retry_after: RETRY_AFTER_MICROS },
            remaining: 0,
            reset_after: RETRY_AFTER_MICROS,
        },
        free => Verdict { admission: Admission::Allowed { delay: 0 }, remaining: free - 1, reset_after: 0 },
    };
    let unlimited = Decision::without_limit(state.store.now());
    Decision { limit: Some(limit), quota: max, cost: 1, verdict, ..unlimited }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_shrinks_when_requests_end() {
        let table = Arc::new(Table::default());
        let held: Vec<_> = (0..100_000).map(|key| table.take(key, 1).unwrap().0).collect();
        assert!(table.take(7, 1).is_none());
        drop(held);
        let room: usize = table.shards.iter().map(|shard| shard.lock().unwrap().capacity()).sum();
        assert!(table.shards.iter().all(|shard| shard.lock().unwrap().is_empty()));
        assert!(room <= SHARDS * 2 * SMALL_SHARD, "{room}");
    }
}

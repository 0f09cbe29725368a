//! Limits prepared for Redis, and what they keep when limits change while in use.
//!
//! State on Redis records the configuration that wrote it, and the script converts it to that of the request. State of
//! this process (cached denials and leases) belongs to terms, which are a limit's configuration as sent to Redis. A
//! limit that did not change keeps its terms, and so its leases.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::names::Hashes;
use super::script::{ScriptHit, Terms};
use super::stores::Stores;
use super::{Fallback, Inner, Receipt, RedisHit, RedisLimiter, TakeFrom, names};
use crate::algorithm::succession::Signature;
use crate::algorithm::{Algorithm, Compiled};
use crate::decision::LimitId;
use crate::error::InvalidLimit;
use crate::key::Key;
use crate::limit::{Consistency, Limit};
use crate::limit_set::{Checked, LimitSet};
use crate::limiter::Limiter;
use crate::units::WallOffset;

/// A limit, prepared for Redis.
pub(super) struct PreparedLimit {
    pub(super) limit: Limit,
    prefix: String,
    /// The hashes that have the keys, in the compact layout.
    hashes: Option<Hashes>,
    terms: Arc<Terms>,
    /// The largest quota that the limit has or had, in any of its variants.
    ceiling: u64,
    /// The other terms that the limit has or had, the latest first.
    siblings: Arc<[Arc<Terms>]>,
    /// The lifetime of a slice in microseconds, if the limit is leased.
    pub(super) horizon: Option<u64>,
}

impl RedisLimiter {
    /// Returns a limiter with other limits, on the same connections and with the same keys. This one continues to work,
    /// and both count together, so that one can replace the other while requests are decided.
    ///
    /// The new numbers apply from the next decision on. State on Redis is found by the name of a limit and converted to
    /// its new numbers, as [`Limiter::with_limits`](crate::Limiter::with_limits) describes: the units that a key has
    /// spent stay spent. A limit that moves to [another store](Limit::with_store) uses the state on that store.
    ///
    /// Cached denials are dropped. Leases of unchanged limits are kept, and those of other limits are given back. A
    /// [reservation](Self::reserve) is settled by the limits that took it.
    ///
    /// # Errors
    ///
    /// If there is no limit or there are more than 10 000, if two have the same name, if a variant has no limit of its
    /// name and algorithm, if a sliding window log has a quota above 100 000, or if a limit chooses a store that this
    /// limiter does not have. Nothing changes then.
    pub fn with_limits(&self, limits: impl Into<LimitSet>) -> Result<Self, InvalidLimit> {
        let inner = &*self.0;
        let limits = limits.into().with_generation();
        let Checked { limits: checked, base_count, .. } = limits.clone().checked()?;
        check(&checked)?;
        inner.shared.stores.check(&checked, base_count)?;
        let catalogue = inner.catalogue.with_limits(limits.clone())?;
        let (limits, fallback) = (checked, Fallback::new(limits));
        let shared = inner.shared.clone();
        shared.stores.join_fleets(&limits, shared.on_store_failure);
        let limits = PreparedLimit::all(limits, &inner.limits, &catalogue, &shared.stores);
        let kept: HashSet<*const Terms> = limits.iter().map(|prepared| Arc::as_ptr(&prepared.terms)).collect();
        shared.leases.withdraw_unless(|terms| kept.contains(&Arc::as_ptr(terms)));
        let denials = inner.denials.clone();
        denials.clear();
        Ok(Self(Arc::new(Inner { limits, catalogue, fallback, denials, shared })))
    }
}

impl RedisLimiter {
    /// Adds the terms that the limit of a hit has had since this limiter was created. A charge may have been counted
    /// under them, so a refund gives back no more than they still count.
    pub(super) fn add_later_terms(&self, hit: &mut RedisHit) {
        let (ceiling, configurations) = self.0.catalogue.configurations(hit.limit);
        let ScriptHit { terms, siblings, .. } = &hit.script_hit;
        let known = || siblings.iter().chain([terms]);
        let is_later = |other: &&Compiled| known().all(|known| *known.signature() != other.meaning().signature());
        let later = configurations.iter().filter(is_later);
        let later: Vec<Arc<Terms>> = later.map(|other| Arc::new(Terms::new(other, ceiling, Vec::new()))).collect();
        if !later.is_empty() {
            hit.script_hit.siblings = later.into_iter().chain(siblings.iter().cloned()).collect();
        }
    }
}

/// Checks that Redis can store all of the limits.
pub(super) fn check(limits: &[Limit]) -> Result<(), InvalidLimit> {
    let check = |limit: &Limit| limit.compiled().check_shared().map_err(|error| error.of_limit(limit.name()));
    limits.iter().try_for_each(check)
}

/// Returns the configuration by which Redis counts a limit, and the lifetime of a slice if the limit is leased.
///
/// A limit with a ban is never leased. A lease may deny a request because another process holds the units, and such a
/// denial must not count towards a ban.
fn stored(limit: &Limit, has_ban: bool) -> (Compiled, Option<u64>) {
    let leased = match limit.consistency() {
        Consistency::Leased if !has_ban => limit.compiled().leased(),
        Consistency::Leased | Consistency::Exact => None,
    };
    match leased {
        Some(leased) => (leased.stored, Some(leased.horizon)),
        None => (limit.compiled().clone(), None),
    }
}

/// Maximum number of earlier configurations of a limit: more than a rule file has plans, and more than are in use at
/// once.
const MAX_SIBLINGS: usize = 16;

impl PreparedLimit {
    /// Prepares limits that replace others. The catalogue has their earlier configurations.
    pub(super) fn all(mut limits: Vec<Limit>, before: &[Self], catalogue: &Limiter, stores: &Stores) -> Box<[Self]> {
        // Redis uses the wall clock, even for limits that were part of an in-memory limiter.
        limits.iter_mut().for_each(|limit| limit.follow_wall_clock(&WallOffset::default()));
        let mut by_name: HashMap<&str, Vec<&Self>> = HashMap::new();
        for prepared in before {
            by_name.entry(prepared.limit.name()).or_default().push(prepared);
        }
        let related_before = |limit: &Limit| {
            let named = by_name.get(limit.name()).into_iter().flatten().copied();
            named.filter(|old| old.limit.shares_keys_with(limit)).collect::<Vec<&Self>>()
        };
        let mut variants: HashMap<(&str, bool), Vec<Signature>> = HashMap::new();
        let family = |limit: &'_ Limit| matches!(limit.algorithm(), Algorithm::Ban(_));
        let banned: HashSet<&str> = limits.iter().filter(|limit| family(limit)).map(Limit::name).collect();
        let has_ban = |limit: &Limit| banned.contains(limit.name());
        let stored: Vec<(Compiled, Option<u64>)> = limits.iter().map(|limit| stored(limit, has_ban(limit))).collect();
        for (limit, (compiled, _)) in limits.iter().zip(&stored) {
            let signatures = variants.entry((limit.name(), family(limit))).or_default();
            let signature = compiled.meaning().signature();
            if !signatures.contains(&signature) {
                signatures.push(signature);
            }
        }
        // Variants of a limit share its keys, so all of them have one layout.
        let stays_plain = |(limit, (compiled, _)): (&Limit, &(Compiled, _))| {
            (!compiled.fits_listpack()).then(|| (limit.name().to_owned(), family(limit)))
        };
        let plain: HashSet<(String, bool)> = limits.iter().zip(&stored).filter_map(stays_plain).collect();
        let ids = catalogue.ids().chain(catalogue.variants());
        let prepared = ids.zip(&limits).zip(stored).map(|((id, limit), (compiled, horizon))| {
            let signatures = variants.get(&(limit.name(), family(limit))).filter(|signatures| signatures.len() > 1);
            let signatures = signatures.map_or(&[][..], Vec::as_slice);
            let (before, (ceiling, configurations)) = (related_before(limit), catalogue.configurations(id));
            let store = stores.chosen_by(limit).unwrap_or_default();
            let names = stores.at(store).topology.names();
            let hashes = names.hashes().filter(|_| !plain.contains(&(limit.name().to_owned(), family(limit))));
            // An unchanged limit keeps its terms, and with them its leases.
            let same = before.iter().find(|old| {
                let is_same = old.ceiling == ceiling && old.terms.has_variants(signatures) && old.terms.store == store;
                let is_same = is_same && old.terms.is_compact == hashes.is_some();
                // The lifetime of a slice determines the configuration on Redis.
                is_same && old.limit.algorithm() == limit.algorithm() && old.horizon == horizon
            });
            let new = || Arc::new(Terms::new(&compiled, ceiling, signatures.to_vec()).on(store, hashes.is_some()));
            let terms = same.map_or_else(new, |old| old.terms.clone());
            let mut siblings: Vec<Arc<Terms>> = Vec::new();
            let then = before.iter().flat_map(|old| std::iter::once(&old.terms).chain(old.siblings.iter())).cloned();
            let known = configurations.iter().map(|other| Arc::new(Terms::new(other, ceiling, Vec::new())));
            for other in known.chain(then) {
                let is_known = siblings.iter().chain([&terms]).any(|known| known.signature() == other.signature());
                if !is_known && siblings.len() < MAX_SIBLINGS {
                    siblings.push(other);
                }
            }
            let (prefix, hashes) = (names.before_key(limit), hashes.cloned());
            Self { limit: limit.clone(), prefix, hashes, terms, ceiling, siblings: siblings.into(), horizon }
        });
        prepared.collect()
    }

    /// Returns the key in the name of a key of this limit. In the compact layout, the name does not have it, and this
    /// is what the name has in its place.
    #[cfg(feature = "file")]
    pub(super) fn key_in<'n>(&self, name: &'n [u8]) -> &'n [u8] {
        match self.hashes {
            Some(_) => name.get(self.prefix.len()..).unwrap_or_default(),
            None => names::key_in(&self.prefix, name),
        }
    }

    /// Returns a hit on the key that [`key_in`](Self::key_in) returned, perhaps before the layout changed.
    #[cfg(feature = "file")]
    pub(super) fn hit_named(&self, limit: LimitId, key: &[u8], cost: u64) -> RedisHit {
        let name = match &self.hashes {
            Some(_) if names::is_of_hash(key) => [self.prefix.as_bytes(), key].concat().into(),
            _ => self.name(names::name_of_key_in(&self.prefix, key)),
        };
        self.hit_on(limit, name, cost)
    }

    pub(super) fn hit(&self, limit: LimitId, key: Key<'_>, cost: u64) -> RedisHit {
        self.hit_on(limit, self.name(names::name(&self.prefix, key)), cost)
    }

    /// Returns the name of a key in the layout of this limit, from that in the plain layout.
    fn name(&self, plain: Arc<[u8]>) -> Arc<[u8]> {
        match &self.hashes {
            Some(hashes) => hashes.name(&self.prefix, &plain),
            None => plain,
        }
    }

    fn hit_on(&self, limit: LimitId, name: Arc<[u8]>, cost: u64) -> RedisHit {
        let (terms, siblings) = (self.terms.clone(), self.siblings.clone());
        let script_hit = ScriptHit { terms, siblings, name, cost };
        RedisHit { limit, script_hit, take_from: TakeFrom::default(), receipt: Receipt::Nothing, decided: None }
    }
}

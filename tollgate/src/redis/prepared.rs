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
use crate::algorithm::Compiled;
use crate::algorithm::succession::Signature;
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
        let changed = self.with_limits_beside(limits)?;
        let Inner { limits, denials, shared, .. } = &*changed.0;
        let kept: HashSet<*const Terms> = limits.iter().map(|prepared| Arc::as_ptr(&prepared.terms)).collect();
        shared.leases.withdraw_unless(|terms| kept.contains(&Arc::as_ptr(terms)));
        denials.clear();
        Ok(changed)
    }

    /// Returns a limiter with other limits, as [`with_limits`](Self::with_limits) does, but beside this one: the leases and
    /// cached denials of this one stay. For limits that are decided exactly, and whose numbers clients choose.
    #[doc(hidden)]
    pub fn with_limits_beside(&self, limits: impl Into<LimitSet>) -> Result<Self, InvalidLimit> {
        let inner = &*self.0;
        let limits = limits.into().with_generation();
        let Checked { limits: checked, base_count, .. } = limits.clone().checked()?;
        check(&checked)?;
        inner.shared.stores.check(&checked, base_count)?;
        let catalogue = inner.catalogue.with_limits(limits.clone())?;
        let (limits, fallback) = (checked, Fallback::new(limits));
        let (denials, shared) = (inner.denials.clone(), inner.shared.clone());
        shared.stores.join_fleets(&limits, shared.on_store_failure);
        let limits = PreparedLimit::all(limits, &inner.limits, &catalogue, &shared.stores);
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

/// The name of a limit or of a ban. Limits of one name share keys, even if the algorithm was changed.
type Name<'a> = (&'a str, bool);

fn name(limit: &Limit) -> Name<'_> {
    (limit.name(), limit.is_ban())
}

/// A limit and its variants, which share keys. A client may choose the numbers of a variant, so the work for a set of
/// variants grows with their number, and not with its square.
struct Group<'a> {
    /// The signatures of the variants; empty if all have the same.
    signatures: Arc<[Signature]>,
    /// The signatures of the variants so far.
    seen: IndexedSignatures,
    /// Whether a variant does not fit into the compact layout. Variants share keys, so all of them have one layout.
    is_plain: bool,
    /// The largest quota that the limit has or had.
    ceiling: u64,
    /// Terms that the limit has or had, the latest first: one more than a variant has siblings.
    known: Vec<Arc<Terms>>,
    /// The limits of this name before.
    before: Vec<&'a PreparedLimit>,
    /// Those whose terms may still apply, also by the names of their variants.
    unchanged: Vec<&'a PreparedLimit>,
    unchanged_by_variant: HashMap<Option<&'a str>, &'a PreparedLimit>,
}

#[derive(Default)]
struct IndexedSignatures {
    in_order: Vec<Signature>,
    known: HashSet<Signature>,
}

impl<'a> Group<'a> {
    /// Creates the group of a limit of the catalogue.
    fn new(catalogue: &Limiter, limit: LimitId) -> Self {
        let (ceiling, configurations) = catalogue.configurations(limit);
        let known = configurations.iter().map(|other| Arc::new(Terms::new(other, ceiling, Vec::new()))).collect();
        Self {
            signatures: Arc::default(),
            seen: IndexedSignatures::default(),
            is_plain: false,
            ceiling,
            known,
            before: Vec::new(),
            unchanged: Vec::new(),
            unchanged_by_variant: HashMap::new(),
        }
    }

    /// Adds the configuration of a variant.
    fn add(&mut self, compiled: &Compiled) {
        self.is_plain |= !compiled.fits_listpack();
        let signature = compiled.meaning().signature();
        if self.seen.known.insert(signature.clone()) {
            self.seen.in_order.push(signature);
        }
    }

    /// Compares the group with the limits before, once all variants are added.
    fn complete(&mut self) {
        let Self { ceiling, before, known, .. } = self;
        let signatures = std::mem::take(&mut self.seen).in_order;
        let signatures: Arc<[Signature]> = if signatures.len() > 1 { signatures.into() } else { Arc::default() };
        // Equal lists are one, so that they are compared by their address.
        let earlier = before.iter().map(|old| &old.terms.variants).find(|earlier| ***earlier == *signatures);
        self.signatures = earlier.cloned().unwrap_or(signatures);
        let is_unchanged = |old: &&&PreparedLimit| old.ceiling == *ceiling && old.terms.has_variants(&self.signatures);
        self.unchanged = before.iter().filter(is_unchanged).copied().collect();
        self.unchanged_by_variant = self.unchanged.iter().map(|old| (old.limit.variant(), *old)).collect();
        let then = before.iter().flat_map(|old| std::iter::once(&old.terms).chain(old.siblings.iter()));
        for other in then {
            if known.len() > MAX_SIBLINGS {
                break;
            }
            if known.iter().all(|known| known.signature() != other.signature()) {
                known.push(other.clone());
            }
        }
    }
}

impl PreparedLimit {
    /// Prepares limits that replace others. The catalogue has their earlier configurations.
    pub(super) fn all(mut limits: Vec<Limit>, before: &[Self], catalogue: &Limiter, stores: &Stores) -> Box<[Self]> {
        // Redis uses the wall clock, even for limits that were part of an in-memory limiter.
        limits.iter_mut().for_each(|limit| limit.follow_wall_clock(&WallOffset::default()));
        let mut groups: HashMap<Name<'_>, Group<'_>> = HashMap::new();
        let bans: HashSet<&str> = limits.iter().filter(|limit| name(limit).1).map(Limit::name).collect();
        let has_ban = |limit: &Limit| bans.contains(limit.name());
        let stored: Vec<(Compiled, Option<u64>)> = limits.iter().map(|limit| stored(limit, has_ban(limit))).collect();
        for ((id, limit), (compiled, _)) in catalogue.ids().chain(catalogue.variants()).zip(&limits).zip(&stored) {
            groups.entry(name(limit)).or_insert_with(|| Group::new(catalogue, id)).add(compiled);
        }
        for old in before {
            if let Some(group) = groups.get_mut(&name(&old.limit)) {
                group.before.push(old);
            }
        }
        groups.values_mut().for_each(Group::complete);
        let prepared = limits.iter().zip(stored).map(|(limit, (compiled, horizon))| {
            let group = &groups[&name(limit)];
            let store = stores.chosen_by(limit).unwrap_or_default();
            let names = stores.at(store).topology.names();
            let hashes = names.hashes().filter(|_| !group.is_plain);
            // An unchanged limit keeps its terms, and with them its leases.
            let is_same = |old: &&&Self| {
                let is_same = old.terms.store == store && old.terms.is_compact == hashes.is_some();
                // The lifetime of a slice determines the configuration on Redis.
                is_same && old.limit.algorithm() == limit.algorithm() && old.horizon == horizon
            };
            let namesake = group.unchanged_by_variant.get(&limit.variant()).filter(is_same);
            let new = || Terms::new(&compiled, group.ceiling, group.signatures.clone());
            let terms = match namesake.or_else(|| group.unchanged.iter().find(is_same)) {
                Some(old) => old.terms.clone(),
                None => Arc::new(new().on(store, hashes.is_some())),
            };
            let others = group.known.iter().filter(|other| other.signature() != terms.signature());
            let siblings = others.take(MAX_SIBLINGS).cloned().collect();
            let (prefix, hashes) = (names.before_key(limit), hashes.cloned());
            Self { limit: limit.clone(), prefix, hashes, terms, ceiling: group.ceiling, siblings, horizon }
        });
        prepared.collect()
    }

    /// Returns the key in the name of a key of this limit. In the compact layout, the name does not have it, and this
    /// is what the name has in its place.
    pub(super) fn key_in<'n>(&self, name: &'n [u8]) -> &'n [u8] {
        match self.hashes {
            Some(_) => name.get(self.prefix.len()..).unwrap_or_default(),
            None => names::key_in(&self.prefix, name),
        }
    }

    /// Returns a hit on the key that [`key_in`](Self::key_in) returned, perhaps before the layout changed.
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
        RedisHit {
            limit,
            script_hit,
            take_from: TakeFrom::default(),
            receipt: Receipt::Nothing,
            decided: None,
            may_be_pending: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Rate;
    use crate::TokenBucket;

    /// A client chooses the numbers of `CL.THROTTLE`, so what is kept for a set of variants grows with their number only.
    #[test]
    fn variants_share_the_list_of_their_signatures_and_few_earlier_terms() {
        let bucket = |millis| TokenBucket::new(10, Rate::new(1, Duration::from_millis(millis)));
        let limits: Vec<Limit> = (1..=100).map(|rate| Limit::new("one", bucket(rate)).expect("valid")).collect();
        let limiter = Limiter::builder().limit(limits[0].clone()).build().expect("valid");
        let id = limiter.ids().next().expect("a limit");
        let mut group = Group::new(&limiter, id);
        limits.iter().chain(&limits).for_each(|limit| group.add(limit.compiled()));
        group.complete();
        assert_eq!(group.signatures.len(), limits.len());
        let prepared = |limit: &Limit| PreparedLimit {
            limit: limit.clone(),
            prefix: String::new(),
            hashes: None,
            terms: Arc::new(Terms::new(limit.compiled(), group.ceiling, group.signatures.clone())),
            ceiling: group.ceiling,
            siblings: group.known.clone().into(),
            horizon: None,
        };
        let before: Vec<PreparedLimit> = limits.iter().map(prepared).collect();
        let mut next = Group::new(&limiter, id);
        limits.iter().for_each(|limit| next.add(limit.compiled()));
        next.before = before.iter().collect();
        next.complete();
        assert!(Arc::ptr_eq(&next.signatures, &group.signatures), "an equal list is the same");
        assert_eq!((next.unchanged.len(), next.known.len()), (limits.len(), MAX_SIBLINGS + 1));
    }
}

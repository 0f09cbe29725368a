//! The plan that each key last used, so that operations by name agree with requests.
//!
//! A request names its plan; a caller that names a limit and a key may not know it. The table has a fixed size and
//! may forget any key when others take its place: then the own numbers of the limit apply, as for a key that no request
//! has used. Other processes have tables of their own.

use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use tollgate::LimitId;

use super::{Inner, RuleSet};
use crate::key_part::Piece;

/// Keys of one set: those of a cache line.
const WAYS: usize = 8;
/// Half a megabyte in all.
const SETS: usize = 1 << 13;
/// The low bits of a place are the number of a limit, counted from 1; the others are from the hash of the key. All are 0
/// if it is empty.
const LIMIT_BITS: u32 = 20;
const LIMIT_MASK: u64 = (1 << LIMIT_BITS) - 1;

pub(super) struct LastPlans(Box<[AtomicU64]>);

impl Default for LastPlans {
    fn default() -> Self {
        Self((0..SETS * WAYS).map(|_| AtomicU64::new(0)).collect())
    }
}

/// Hashes a key with a secret. It is the same for all tables, so that a place means the same in the next one.
fn hash(rule: &str, key: &[Piece<'_>]) -> u64 {
    static HASHER: OnceLock<ahash::RandomState> = OnceLock::new();
    let mut hasher = HASHER.get_or_init(ahash::RandomState::new).build_hasher();
    rule.hash(&mut hasher);
    key.iter().for_each(|piece| piece.as_bytes().hash(&mut hasher));
    hasher.finish()
}

fn entry(hash: u64, limit: LimitId) -> Option<u64> {
    let number = limit.index() as u64 + 1;
    (number <= LIMIT_MASK).then_some(hash & !LIMIT_MASK | number)
}

/// Returns the number of the limit in an entry, if it is not empty.
fn limit_in(entry: u64) -> Option<usize> {
    ((entry & LIMIT_MASK) as usize).checked_sub(1)
}

impl LastPlans {
    fn set_of(&self, hash: u64) -> &[AtomicU64] {
        let first = hash as usize % SETS * WAYS;
        &self.0[first..first + WAYS]
    }

    /// Returns the place of a key, and the number of its limit.
    fn find(&self, hash: u64) -> Option<(&AtomicU64, usize)> {
        self.set_of(hash).iter().find_map(|place| {
            let entry = place.load(Ordering::Relaxed);
            let limit = limit_in(entry).filter(|_| entry >> LIMIT_BITS == hash >> LIMIT_BITS)?;
            Some((place, limit))
        })
    }

    /// Returns the place for a new key. If all are taken, it takes that of another.
    fn place_for(&self, hash: u64) -> &AtomicU64 {
        let set = self.set_of(hash);
        let empty = set.iter().find(|place| place.load(Ordering::Relaxed) == 0);
        empty.unwrap_or_else(|| &set[(hash >> SETS.ilog2()) as usize % WAYS])
    }
}

impl RuleSet {
    /// Remembers the limit of the plan that a request of a key had.
    pub(super) fn note_plan(&self, number: u32, limit: LimitId, key: &[Piece<'_>]) {
        let compiled = &self.0.rules[number as usize];
        let Some(plans) = self.0.last_plans.as_ref().filter(|_| !compiled.by_plan.is_empty()) else { return };
        let hash = hash(compiled.rule.name(), key);
        let place = match plans.find(hash) {
            Some((_, known)) if known == limit.index() => return,
            Some((place, _)) => place,
            // Most keys without a plan have never had one.
            None if limit == compiled.limit => return,
            None => plans.place_for(hash),
        };
        if let Some(entry) = entry(hash, limit) {
            place.store(entry, Ordering::Relaxed);
        }
    }

    /// Returns the limit of the plan that the last request of a key had, if it is remembered.
    pub(crate) fn last_plan(&self, number: u32, key: &[Piece<'_>]) -> Option<LimitId> {
        let compiled = &self.0.rules[number as usize];
        let plans = self.0.last_plans.as_ref().filter(|_| !compiled.by_plan.is_empty())?;
        let (_, limit) = plans.find(hash(compiled.rule.name(), key))?;
        // Keys of two rules may have equal hashes.
        let is_of_rule = self.0.owners.get(limit) == Some(&number);
        is_of_rule.then(|| LimitId::new(limit as u32, self.0.generation))
    }

    /// Remembers the plans that keys used under the rules that these replace, as far as there are such plans.
    pub(crate) fn adopt_last_plans(&self, before: &Self) {
        let Some(plans) = self.0.last_plans.as_ref().filter(|_| !Arc::ptr_eq(&self.0, &before.0)) else { return };
        let limits = self.0.same_plans(&before.0);
        for (index, place) in plans.0.iter().enumerate() {
            let known = before.0.last_plans.as_ref().map_or(0, |former| former.0[index].load(Ordering::Relaxed));
            let limit = limit_in(known).and_then(|limit| *limits.get(limit)?);
            place.store(limit.and_then(|limit| entry(known, limit)).unwrap_or(0), Ordering::Relaxed);
        }
    }
}

impl Inner {
    /// Maps each limit of `other` to the limit of the same plan in these rules. A limit maps to `None` if its plan is gone, or
    /// if it served several plans that have different limits now.
    fn same_plans(&self, other: &Self) -> Vec<Option<LimitId>> {
        let mut limits: Vec<Option<Option<LimitId>>> = vec![None; other.owners.len()];
        for former in &other.rules {
            let now = self.numbers.get(former.rule.name()).map(|number| &self.rules[*number as usize]);
            let plans = former.by_plan.iter().map(|(plan, limit)| (limit, now.and_then(|now| now.by_plan.get(plan))));
            let own = std::iter::once((&former.limit, now.map(|now| &now.limit)));
            for (limit, same) in plans.chain(own).map(|(limit, same)| (limit, same.copied())) {
                if let Some(known) = limits.get_mut(limit.index()) {
                    *known = Some(known.map_or(same, |other| other.filter(|other| Some(*other) == same)));
                }
            }
        }
        limits.into_iter().map(Option::flatten).collect()
    }
}

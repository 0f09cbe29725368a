//! The plan that each key last used, so that operations by name agree with requests.
//!
//! A request tells its plan; a program that names a limit and a key may not know it. The table has a fixed size and
//! forgets a key when another takes its place: then the own numbers of the limit apply, as for a key that no request
//! has used. Other processes have tables of their own.

use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Inner, RuleSet};
use crate::decision::LimitId;
use crate::rules::key_part::Piece;

/// Keys whose plan is remembered: half a megabyte.
const PLACES: usize = 1 << 16;

/// For each place, the upper half of the hash of a key, and the number of a limit, counted from 1; 0 if it is empty.
pub(super) struct LastPlans {
    places: Box<[AtomicU64]>,
}

impl Default for LastPlans {
    fn default() -> Self {
        Self { places: (0..PLACES).map(|_| AtomicU64::new(0)).collect() }
    }
}

/// The hasher of all tables, so that a place means the same in the next one.
fn hasher() -> &'static ahash::RandomState {
    static HASHER: OnceLock<ahash::RandomState> = OnceLock::new();
    HASHER.get_or_init(ahash::RandomState::new)
}

impl LastPlans {
    fn place(&self, hash: u64) -> &AtomicU64 {
        &self.places[hash as usize % PLACES]
    }

    /// Returns the number of a key's limit.
    fn get(&self, hash: u64) -> Option<u32> {
        let entry = self.place(hash).load(Ordering::Relaxed);
        limit_in(entry).filter(|_| entry >> 32 == hash >> 32)
    }
}

fn hash(rule: &str, key: &[Piece<'_>]) -> u64 {
    let mut hasher = hasher().build_hasher();
    rule.hash(&mut hasher);
    key.iter().for_each(|piece| piece.as_bytes().hash(&mut hasher));
    hasher.finish()
}

fn entry(hash: u64, limit: LimitId) -> u64 {
    hash >> 32 << 32 | (limit.index() as u64 + 1)
}

fn limit_in(entry: u64) -> Option<u32> {
    (entry as u32).checked_sub(1)
}

impl RuleSet {
    /// Remembers the limit that a request of a key was counted by.
    #[inline]
    pub(super) fn note_plan(&self, number: u32, limit: LimitId, key: &[Piece<'_>]) {
        let compiled = &self.0.rules[number as usize];
        if let Some(plans) = &self.0.last_plans
            && !compiled.by_plan.is_empty()
        {
            let hash = hash(compiled.rule.name(), key);
            let before = plans.get(hash).map(|before| before as usize);
            // Most keys without a plan have never had one.
            if before != Some(limit.index()) && (before.is_some() || limit != compiled.limit) {
                plans.place(hash).store(entry(hash, limit), Ordering::Relaxed);
            }
        }
    }

    /// Returns the limit that the last request of a key was counted by, if it is remembered.
    pub(in crate::rules) fn last_plan(&self, number: u32, key: &[Piece<'_>]) -> Option<LimitId> {
        let compiled = &self.0.rules[number as usize];
        let plans = self.0.last_plans.as_ref().filter(|_| !compiled.by_plan.is_empty())?;
        let number = plans.get(hash(compiled.rule.name(), key))?;
        Some(LimitId::new(number, self.0.generation))
    }

    /// Remembers the plans that keys used under the rules that these replace, as far as there are such plans.
    pub(crate) fn adopt_last_plans(&self, before: &Self) {
        let (Some(plans), Some(former)) = (&self.0.last_plans, &before.0.last_plans) else { return };
        let limits: Vec<_> = (0..before.0.owners.len()).map(|number| self.0.same_plan(&before.0, number)).collect();
        for (place, from) in plans.places.iter().zip(&former.places) {
            let known = from.load(Ordering::Relaxed);
            if let Some(limit) = limit_in(known).and_then(|number| *limits.get(number as usize)?) {
                place.store(entry(known, limit), Ordering::Relaxed);
            }
        }
    }
}

impl Inner {
    /// Returns the limit of the plan that a limit of other rules is for. `None` if plans shared that one and differ now.
    fn same_plan(&self, other: &Self, number: usize) -> Option<LimitId> {
        let former = &other.rules[*other.owners.get(number)? as usize];
        let now = &self.rules[*self.numbers.get(former.rule.name())? as usize];
        let plans = former.by_plan.iter().filter(|(_, limit)| limit.index() == number);
        let mut limits = plans.map(|(plan, _)| now.by_plan.get(plan).copied());
        let first = limits.next()??;
        limits.all(|other| other == Some(first)).then_some(first)
    }
}

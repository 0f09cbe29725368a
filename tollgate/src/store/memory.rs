//! The memory store: every key of every limit in this process's memory, within a bound.
//!
//! Each limit has a table. It shares the table only with limits of its name whose words have the same meaning: its
//! variants, and its former configurations. Limits of its name with another meaning have other tables, and keys are
//! converted when they move between tables: see `family.rs`. A key is identified by a 64-bit fingerprint, hashed with a
//! secret of the process, so an attacker cannot construct collisions (ADR 38). Among ten million keys of a limit, the
//! probability of any collision is about 3 in a million (n² / 2^65).
//!
//! A single limit is decided by one compare-and-swap. For several limits, all words but one are sealed for a few
//! nanoseconds, so a request takes from all of them or from none, and other threads see no intermediate state.

#[cfg(all(test, not(loom)))]
mod churn_tests;
mod claim;
mod debts;
mod decide;
mod family;
mod growth;
#[cfg(all(test, loom))]
mod loom_models;
mod multi_key;
mod owes;
mod slow_path;
mod snapshot;
mod table;
mod tables;
mod without;

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;

use smallvec::SmallVec;

use self::claim::HeldBuckets;
pub(crate) use self::debts::Charged;
pub(crate) use self::family::Family;
use self::family::{FamilyView, HeldSlot, Members, Usage};
pub(crate) use self::snapshot::SectionHead;
use self::table::{Busy, Table, pause};
use self::tables::{Chosen, Families};
use crate::algorithm::{Charge, Compiled, LimitAlgorithm, with_algorithm};
use crate::budget::Budget;
use crate::decision::{Admission, Decision, LimitId, Source, Verdict};
use crate::error::InvalidLimit;
use crate::key::Key;
use crate::limit::Limit;
use crate::sync::Ordering;
use crate::units::Timestamp;

pub(crate) struct MemoryStore {
    /// The table of each limit, in the order of the limits.
    tables: Box<[Arc<Table>]>,
    /// The first table, with one indirection less: most limiters have only one.
    first: Option<Arc<Table>>,
    /// The family of each limit, in the same order.
    limit_families: Box<[Arc<Family>]>,
    /// Keeps the tables in use.
    usages: Box<[Arc<Usage>]>,
    families: Arc<Families>,
    secret: ahash::RandomState,
    /// The seed of the secret.
    seed: [u64; 4],
    budget: Budget,
}

/// A hit with its key hashed.
#[derive(Clone, Copy, Debug)]
pub struct HashedHit {
    /// The limit.
    pub limit: LimitId,
    /// The hash of the key with the secret of the store.
    pub fingerprint: u64,
    /// The units to take.
    pub cost: u64,
}

/// How often a limit has lacked memory for its keys: see [`Limiter::overflow`](crate::Limiter::overflow).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overflow {
    /// Keys that lost their slot before they had their whole quota back. Only keys that came when memory was used up can
    /// lose it.
    ///
    /// When such a key returns, it is charged as much as any key that lost its slot in the same bucket: never less than
    /// it has spent, and less than half of its quota, unless requests were counted without a slot.
    pub evicted: u64,
    /// Requests denied because their key had no slot and other keys without a slot had spent the shared quota.
    pub denied: u64,
    /// Denials that were to be strikes of a [`Ban`](crate::Ban), and were not counted: all slots of the ban had keys with
    /// strikes or bans, which are never evicted.
    pub lost_strikes: u64,
}

/// The memory for the keys of a limit: see [`Limiter::occupancy`](crate::Limiter::occupancy).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Occupancy {
    /// Slots that hold a key. Keys that have their whole quota back are included until their slot is needed.
    pub keys: usize,
    /// All slots. More are added when four fifths of them hold keys that have not their whole quota back.
    pub slots: usize,
    /// The bytes that the slots take, out of [`max_memory`](crate::LimiterBuilder::max_memory).
    pub bytes: usize,
}

/// Which changes a check may write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// All changes of the decision.
    Take,
    /// Only the changes of a denial: it takes nothing, but a log may count it.
    DenyOnly,
    /// No changes.
    Peek,
}

impl Mode {
    fn writes(self, verdict: &Verdict) -> bool {
        match self {
            Self::Take => true,
            Self::DenyOnly => !verdict.is_allowed(),
            Self::Peek => false,
        }
    }
}

impl MemoryStore {
    /// Creates a store for these limits. Limits that share a table adopt its layout.
    pub(crate) fn new(limits: &mut [Limit], max_bytes: usize) -> Result<Self, InvalidLimit> {
        let (budget, families) = (Budget::new(max_bytes), Arc::new(Families::default()));
        let chosen = tables::choose(limits, &families, &budget, Timestamp::EPOCH.as_micros())?;
        Ok(Self::of(chosen, families, random_seed(), budget))
    }

    /// Hashes keys with this secret instead of a random one. The store must not have keys yet.
    pub(crate) fn with_secret(self, seed: [u64; 4]) -> Self {
        Self { secret: secret_of(seed), seed, ..self }
    }

    /// Returns the seed of the secret.
    pub(crate) fn seed(&self) -> [u64; 4] {
        self.seed
    }

    /// Returns a store for other limits with the same keys and memory. Both stores share the state, whatever the
    /// numbers of the limits are.
    pub(crate) fn successor(&self, limits: &mut [Limit], now: Timestamp) -> Result<Self, InvalidLimit> {
        let chosen = tables::choose(limits, &self.families, &self.budget, now.as_micros())?;
        Ok(Self::of(chosen, self.families.clone(), self.seed, self.budget.clone()))
    }

    /// Returns a store for other limits with separate keys and the same memory.
    #[cfg(feature = "redis")]
    pub(crate) fn with_other_keys(&self, limits: &mut [Limit], now: Timestamp) -> Result<Self, InvalidLimit> {
        let families = Arc::new(Families::default());
        let chosen = tables::choose(limits, &families, &self.budget, now.as_micros())?;
        Ok(Self::of(chosen, families, self.seed, self.budget.clone()))
    }

    fn of(chosen: Chosen, families: Arc<Families>, seed: [u64; 4], budget: Budget) -> Self {
        let (Chosen { tables, families: limit_families, usages }, secret) = (chosen, secret_of(seed));
        Self { first: tables.first().cloned(), tables, limit_families, usages, families, secret, seed, budget }
    }

    /// Returns a value that is equal for limits that share keys: variants of one limit. A limit of another limiter
    /// equals only itself.
    pub(crate) fn identity(&self, limit: LimitId) -> Result<usize, LimitId> {
        self.limit_families.get(limit.index()).map(|family| Arc::as_ptr(family).addr()).ok_or(limit)
    }

    /// Returns the family of a limit.
    #[cfg(feature = "redis")]
    pub(crate) fn family(&self, limit: LimitId) -> Option<&Family> {
        self.limit_families.get(limit.index()).map(|family| &**family)
    }

    #[cfg(feature = "redis")]
    pub(crate) fn budget(&self) -> Budget {
        self.budget.clone()
    }

    pub(crate) fn memory_used(&self) -> usize {
        self.budget.used()
    }

    /// Returns how often a limit and its variants have lacked memory for their keys.
    pub(crate) fn overflow(&self, limit: LimitId) -> Overflow {
        self.limit_families.get(limit.index()).map_or_else(Overflow::default, |family| Overflow {
            evicted: family.overflow.evicted.load(Ordering::Relaxed),
            denied: family.overflow.denied.load(Ordering::Relaxed),
            lost_strikes: family.overflow.lost.load(Ordering::Relaxed),
        })
    }

    /// Returns the memory for the keys of a limit and its variants, without a visit to the keys.
    pub(crate) fn occupancy(&self, limit: LimitId) -> Occupancy {
        let Some(family) = self.limit_families.get(limit.index()) else { return Occupancy::default() };
        let members = family.members();
        members.tables.iter().fold(Occupancy::default(), |sum, member| Occupancy {
            keys: sum.keys + member.table.occupied.load(Ordering::Relaxed),
            slots: sum.slots + member.table.slots(),
            bytes: sum.bytes + member.table.bytes(),
        })
    }

    /// Returns the bound of the memory for all keys.
    pub(crate) fn max_memory(&self) -> usize {
        self.budget.max()
    }

    /// Counts the keys of a limit that are not at rest.
    pub(crate) fn live_keys(&self, limits: &[Limit], limit: LimitId, now: Timestamp) -> usize {
        let Some(view) = self.family_view(limits, limit) else { return 0 };
        let (replaced, now) = (view.replaced(), now.as_micros());
        let count = |table: &Table| with_algorithm!(view.algorithm, algorithm => table.live_keys(algorithm, now));
        count(view.table) + replaced.as_deref().map_or(0, count) + view.debtors(now)
    }

    #[inline(always)]
    pub(crate) fn fingerprint(&self, key: Key<'_>) -> u64 {
        let mut hasher = self.secret.build_hasher();
        let hash = match key.whole() {
            Some(bytes) => {
                hasher.write(bytes);
                hasher.finish()
            }
            None => {
                // Lengths separate the parts, and inverted bits separate them from a key of one part with the same
                // bytes.
                for part in key.several() {
                    hasher.write_usize(part.len());
                    hasher.write(part);
                }
                !hasher.finish()
            }
        };
        // 0 is the fingerprint of an empty slot.
        hash.max(1)
    }

    /// Decides all hits: all are allowed and taken, or none.
    pub(crate) fn decide(&self, limits: &[Limit], hits: &[HashedHit], now: Timestamp) -> Decision {
        match hits {
            [] => Decision::without_limit(now),
            [hit] => self.decide_one(limits, *hit, now),
            several => self.decide_several(limits, several, now),
        }
    }

    fn decide_one(&self, limits: &[Limit], hit: HashedHit, now: Timestamp) -> Decision {
        self.decide_one_fast(limits, hit, now).unwrap_or_else(|| self.decide_one_slow(limits, hit, now))
    }

    /// Decides one hit, if that needs no lock and its limit is a bucket. Most limits are buckets, and their code is short.
    /// Inlining all algorithms would cost them registers.
    #[inline(always)]
    pub(crate) fn decide_one_fast(&self, limits: &[Limit], hit: HashedHit, now: Timestamp) -> Option<Decision> {
        let (table, limit) = (self.table(hit.limit)?, limits.get(hit.limit.index())?);
        let Compiled::Meter(algorithm) = limit.compiled() else { return None };
        let HashedHit { fingerprint, cost, .. } = hit;
        let verdict = table.decide_fast(algorithm, fingerprint, now.as_micros(), cost, Mode::Take)?;
        Some(self.decision(limits, hit, now, verdict))
    }

    /// Decides one hit in all other cases.
    pub(crate) fn decide_one_slow(&self, limits: &[Limit], hit: HashedHit, now: Timestamp) -> Decision {
        let verdict = self.check(limits, hit, now, Mode::Take);
        self.decision(limits, hit, now, verdict)
    }

    #[inline(always)]
    fn table(&self, limit: LimitId) -> Option<&Table> {
        let table = if limit.index() == 0 { self.first.as_ref() } else { self.tables.get(limit.index()) };
        table.map(|table| &**table)
    }

    /// Returns the decision, taking nothing.
    pub(crate) fn peek(&self, limits: &[Limit], hits: &[HashedHit], now: Timestamp) -> Decision {
        let answers =
            hits.iter().map(|hit| self.decision(limits, *hit, now, self.check(limits, *hit, now, Mode::Peek)));
        answers.reduce(Decision::most_restrictive).unwrap_or_else(|| Decision::without_limit(now))
    }

    /// Returns the denial, if one of the limits denies. A log that counts denials counts it. Otherwise nothing changes.
    pub(crate) fn find_denial(&self, limits: &[Limit], hits: &[HashedHit], now: Timestamp) -> Option<Decision> {
        let verdicts = hits.iter().map(|hit| (*hit, self.check(limits, *hit, now, Mode::DenyOnly)));
        let denied = verdicts.filter(|(_, verdict)| !verdict.is_allowed());
        denied.map(|(hit, verdict)| self.decision(limits, hit, now, verdict)).reduce(Decision::most_restrictive)
    }

    #[inline(never)]
    fn decide_several(&self, limits: &[Limit], hits: &[HashedHit], now: Timestamp) -> Decision {
        match self.decide_several_fast(limits, hits, now) {
            Some(decision) => decision,
            None => self.decide_several_slow(limits, hits, now),
        }
    }

    /// The slow path for several limits, which handles every case.
    #[inline(never)]
    fn decide_several_slow(&self, limits: &[Limit], hits: &[HashedHit], now: Timestamp) -> Decision {
        // Prefetch all buckets before reading any, so that their cache misses overlap.
        for hit in hits {
            if let Some(table) = self.tables.get(hit.limit.index()) {
                std::hint::black_box(table.prefetch(hit.fingerprint).1);
            }
        }
        // Most denials are found without locks, and the buckets are in the cache afterwards. Hits of cost 0 are
        // complete after this: they need no slot.
        let (mut denied, mut looked) = (None::<Decision>, None::<Decision>);
        let mut taking: SmallVec<[HashedHit; 8]> = SmallVec::new();
        for hit in hits {
            let verdict = self.check(limits, *hit, now, Mode::DenyOnly);
            if verdict.is_allowed() && hit.cost > 0 {
                taking.push(*hit);
                continue;
            }
            let decision = self.decision(limits, *hit, now, verdict);
            let before = if verdict.is_allowed() { &mut looked } else { &mut denied };
            *before = Some(before.map_or(decision, |other| other.most_restrictive(decision)));
        }
        if let Some(denied) = denied {
            return denied;
        }
        let taken = match &*taking {
            [] => None,
            [hit] => Some(self.decide_one(limits, *hit, now)),
            several => Some(self.take_several(limits, several, now)),
        };
        // Of equal decisions, the first hit's is reported, as on every store.
        let word_ref = |decision: &Decision| hits.iter().position(|hit| Some(hit.limit) == decision.limit());
        match (looked, taken) {
            (Some(looked), Some(taken)) if word_ref(&taken) < word_ref(&looked) => taken.most_restrictive(looked),
            (looked, taken) => looked
                .into_iter()
                .chain(taken)
                .reduce(Decision::most_restrictive)
                .unwrap_or_else(|| Decision::without_limit(now)),
        }
    }

    fn take_several(&self, limits: &[Limit], hits: &[HashedHit], now: Timestamp) -> Decision {
        let mut attempts = 0;
        loop {
            match self.take_all(limits, hits, now) {
                Ok(decision) => {
                    for hit in hits {
                        self.with_table(limits, hit.limit, |table, limit| {
                            with_algorithm!(limit.compiled(), algorithm => table.maintain(algorithm, now.as_micros()));
                        });
                    }
                    return decision;
                }
                Err((hit, busy)) => {
                    if let Some(view) = self.family_view(limits, hit.limit) {
                        view.make_room(&busy, hit.fingerprint, now.as_micros());
                    }
                }
            }
            attempts = pause(attempts);
        }
    }

    /// Locks every key's slot, then takes from all of them or from none.
    fn take_all(&self, limits: &[Limit], hits: &[HashedHit], now: Timestamp) -> Result<Decision, (HashedHit, Busy)> {
        let members: SmallVec<[Option<Arc<Members>>; 8]> =
            hits.iter().map(|hit| self.limit_families.get(hit.limit.index())?.if_several()).collect();
        let mut holds = HeldBuckets::default();
        // With whether each hit is allowed.
        let mut slots: SmallVec<[(HashedHit, HeldSlot<'_>, bool); 8]> = SmallVec::new();
        let mut positions = Positions::default();
        for (hit, members) in hits.iter().zip(&members) {
            let Some(view) = self.family_view(limits, hit.limit) else {
                return Ok(self.decision(limits, *hit, now, NO_SUCH_LIMIT));
            };
            let slot = view.hold_slot(&mut holds, members.as_ref(), hit.fingerprint, now.as_micros());
            let Some(slot) = slot.map_err(|busy| (*hit, busy))? else {
                if with_algorithm!(view.algorithm, algorithm => algorithm.has_floor()) {
                    view.family.overflow.count_denial();
                    return Ok(self.decision(limits, *hit, now, family::NO_ROOM));
                }
                view.family.overflow.count_lost();
                continue;
            };
            // The costs of two keys that share a slot are added.
            let slot_ref = slot.slot_ref;
            match positions.of(&slots, |(_, other, _)| other.slot_ref.is(slot_ref), || slot_ref.address()) {
                Some(same) => slots[same].0.cost = slots[same].0.cost.saturating_add(hit.cost),
                None => {
                    slots.push((*hit, slot, false));
                    positions.added(&slots, |(_, slot, _)| slot.slot_ref.address());
                }
            }
        }
        let mut most_restrictive = None::<Decision>;
        for (hit, HeldSlot { table, algorithm, slot_ref }, passes) in &mut slots {
            let verdict = with_algorithm!(&**algorithm, algorithm => {
                algorithm.decide(&holds.cells(table, *slot_ref), now.as_micros(), hit.cost).verdict
            });
            let verdict = table.verdict_at(*slot_ref, verdict);
            *passes = verdict.is_allowed();
            let decision = self.decision(limits, *hit, now, verdict);
            most_restrictive = Some(most_restrictive.map_or(decision, |other| other.most_restrictive(decision)));
        }
        let all_pass = slots.iter().all(|(.., passes)| *passes);
        for (hit, HeldSlot { table, algorithm, slot_ref }, passes) in &slots {
            if all_pass || !passes {
                with_algorithm!(&**algorithm, algorithm => {
                    let step = algorithm.decide(&holds.cells(table, *slot_ref), now.as_micros(), hit.cost);
                    if let Some(edit) = step.edit {
                        table.apply(algorithm, &mut holds, *slot_ref, edit, now.as_micros());
                    }
                });
            }
        }
        Ok(most_restrictive.unwrap_or_else(|| Decision::without_limit(now)))
    }

    /// Gives back the units of a decision, as far as they still count. An evicted key gets a slot again, and the charge
    /// is subtracted from the floor.
    pub(crate) fn refund(&self, limits: &[Limit], hit: HashedHit, charged_at: Timestamp, now: Timestamp) {
        let charge = Charge { at: charged_at.as_micros(), cost: hit.cost };
        let Some(view) = self.family_view(limits, hit.limit) else { return };
        let is_changed = view.family.is_alone()
            && with_algorithm!(view.algorithm, algorithm => {
                view.table.change(algorithm, Some(view.family), hit.fingerprint, now.as_micros(), |cells| {
                    if let Some(edit) = algorithm.refund(cells, now.as_micros(), charge) {
                        algorithm.apply(cells, edit);
                    }
                })
            });
        if !is_changed {
            family::retry_until_done(view, hit.fingerprint, now.as_micros(), |members| {
                view.with_members(members).refund(members, hit.fingerprint, charge, now.as_micros())
            });
        }
    }

    /// Gives back as many units as the cost of the hit, from the newest charges of the key, whenever they were made. An
    /// evicted key gets a slot again, and the units are subtracted from the floor.
    pub(crate) fn credit(&self, limits: &[Limit], hit: HashedHit, now: Timestamp) {
        let now = now.as_micros();
        let Some(view) = self.family_view(limits, hit.limit) else { return };
        let is_changed = view.family.is_alone()
            && with_algorithm!(view.algorithm, algorithm => {
                view.table.change(algorithm, Some(view.family), hit.fingerprint, now, |cells| {
                    let mut left = hit.cost;
                    while left > 0 && let Some((edit, given)) = algorithm.credit(cells, now, left) {
                        algorithm.apply(cells, edit);
                        left -= given;
                    }
                })
            });
        if !is_changed {
            family::retry_until_done(view, hit.fingerprint, now, |members| {
                view.with_members(members).credit(members, hit, now)
            });
        }
    }

    /// Gives a key its whole quota back. A key without a slot gets one, and keeps it until another key needs it.
    pub(crate) fn reset(&self, limits: &[Limit], limit: LimitId, fingerprint: u64, now: Timestamp) {
        let now = now.as_micros();
        let Some(view) = self.family_view(limits, limit) else { return };
        let is_changed = view.family.is_alone()
            && with_algorithm!(view.algorithm, algorithm => {
                view.table.change(algorithm, Some(view.family), fingerprint, now, |cells| algorithm.clear(cells))
            });
        if !is_changed {
            family::retry_until_done(view, fingerprint, now, |members| {
                view.with_members(members).reset(members, fingerprint, now)
            });
        }
    }

    #[inline(never)]
    fn check(&self, limits: &[Limit], hit: HashedHit, now: Timestamp, mode: Mode) -> Verdict {
        let Some(view) = self.family_view(limits, hit.limit) else {
            return NO_SUCH_LIMIT;
        };
        let now = now.as_micros();
        with_algorithm!(view.algorithm, algorithm => view.table.decide(algorithm, Some(view), hit, now, mode))
    }

    #[inline]
    fn family_view<'a>(&'a self, limits: &'a [Limit], limit: LimitId) -> Option<FamilyView<'a>> {
        let index = limit.index();
        let (table, family, limit) = (self.tables.get(index)?, self.limit_families.get(index)?, limits.get(index)?);
        Some(FamilyView { family, table, algorithm: limit.compiled(), tables: &self.tables })
    }

    fn with_table(&self, limits: &[Limit], limit: LimitId, then: impl FnOnce(&Table, &Limit)) {
        if let (Some(table), Some(limit)) = (self.tables.get(limit.index()), limits.get(limit.index())) {
            then(table, limit);
        }
    }

    #[inline(always)]
    fn decision(&self, limits: &[Limit], hit: HashedHit, now: Timestamp, verdict: Verdict) -> Decision {
        let quota = limits.get(hit.limit.index()).map_or(0, Limit::quota);
        let HashedHit { limit, cost, .. } = hit;
        // The limiter adds the wall clock.
        Decision { limit: Some(limit), quota, cost, at: now, wall_offset: 0, source: Source::Store, verdict }
    }
}

fn secret_of([first, second, third, fourth]: [u64; 4]) -> ahash::RandomState {
    ahash::RandomState::with_seeds(first, second, third, fourth)
}

/// Returns a seed from the system's randomness, through the standard library's hash maps.
fn random_seed() -> [u64; 4] {
    let random = std::hash::RandomState::new();
    [0_u64, 1, 2, 3].map(|part| random.hash_one(part))
}

/// The verdict on a limit of another limiter: denied.
const NO_SUCH_LIMIT: Verdict = Verdict { admission: Admission::NeverFits, remaining: 0, reset_after: 0 };

/// Up to this many items are compared one by one, which is faster than a hash map.
const FEW: usize = 16;

/// Positions by key, maintained once there are more than a few items. Without it, the cost of a request would be
/// quadratic in its hits.
#[expect(clippy::box_collection, reason = "most requests have none, and every slow decision would clear its room")]
pub(crate) struct Positions<K>(Option<Box<HashMap<K, usize>>>);

impl<K> Default for Positions<K> {
    fn default() -> Self {
        Self(None)
    }
}

impl<K: Eq + Hash> Positions<K> {
    /// Returns the position of the item with this key. Among a few items it is the last one that `is_it` accepts.
    pub(crate) fn of<T>(&self, items: &[T], is_it: impl Fn(&T) -> bool, key: impl FnOnce() -> K) -> Option<usize> {
        match &self.0 {
            None => items.iter().rposition(is_it),
            Some(positions) => positions.get(&key()).copied(),
        }
    }

    /// Records the last item, after it was added.
    pub(crate) fn added<T>(&mut self, items: &[T], key: impl Fn(&T) -> K) {
        match &mut self.0 {
            None if items.len() <= FEW => {}
            None => self.0 = Some(Box::new(items.iter().map(key).zip(0..).collect())),
            Some(positions) => positions.extend(items.last().map(|item| (key(item), items.len() - 1))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(not(loom))]
    use crate::{FixedWindow, HOUR, SlidingWindowLog};

    /// Keys without a slot have a log of many entries together. A reload that adds a variant makes one entry of them.
    #[cfg(not(loom))]
    #[test]
    fn a_shared_log_is_freed_when_it_is_replaced() {
        let log = Limit::new("limit", SlidingWindowLog::new(10_000, HOUR)).expect("a valid limit");
        let layout = table::Layout::new(log.compiled().words(), log.compiled().free_bits());
        // There is room for entries, but not for twice as many buckets.
        let max_bytes = Table::first_words(layout) * size_of::<u64>() * 3 / 2;
        let mut limits = [log.clone()];
        let store = MemoryStore::new(&mut limits, max_bytes).expect("enough memory");
        let hit = |key: u64| HashedHit {
            limit: LimitId::first(),
            fingerprint: key.wrapping_mul(0x9e37_79b9_7f4a_7c15),
            cost: 1,
        };
        let at = |micros: u64| Timestamp::from_micros(1_700_000_000_000_000 + micros);
        for key in 1..2_000 {
            assert!(store.decide_one(&limits, hit(key), at(key)).is_allowed());
        }
        let without_slot = (1..2_000).map(hit).find(|hit| store.tables[0].find(hit.fingerprint).is_none());
        let without_slot = without_slot.expect("there are fewer slots");
        for micros in 0..500 {
            assert!(store.decide_one(&limits, without_slot, at(3_000 + micros)).is_allowed());
        }
        let before = store.tables[0].spill.bytes_in_use();
        let mut limits = [log, Limit::new("limit", FixedWindow::new(10_000, HOUR)).expect("a valid limit")];
        let store = store.successor(&mut limits, at(4_000)).expect("enough memory");
        assert!(store.decide_one(&limits, without_slot, at(4_000)).is_allowed());
        let after = store.tables[0].spill.bytes_in_use();
        assert!(after < before, "{after} bytes of {before}");
    }

    #[test]
    fn items_are_found_among_a_few_and_among_many() {
        let mut items: Vec<usize> = Vec::new();
        let mut positions = Positions::default();
        for item in 0..4 * FEW {
            items.push(item * 7);
            positions.added(&items, |item| *item);
            let position_of = |sought: usize| positions.of(&items, |item| *item == sought, || sought);
            assert!((0..=item).all(|item| position_of(item * 7) == Some(item)));
            assert_eq!(position_of(item * 7 + 1), None);
        }
    }
}

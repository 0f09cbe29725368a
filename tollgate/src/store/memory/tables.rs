//! Assigning a table to each limit: an existing one of the same meaning, or a new one in its family.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use super::claim::HeldBuckets;
use super::family::{Family, FamilyView, Frozen, Member, Members, Usage};
use super::table::{Bucket, EMPTY, LOCKED, Layout, Table, pause, unchanged};
use crate::algorithm::succession::Meaning;
use crate::algorithm::{Compiled, LimitAlgorithm, with_algorithm};
use crate::budget::Budget;
use crate::error::InvalidLimit;
use crate::limit::Limit;
use crate::sync::{Mutex, Ordering, fence};

/// Most tables of one limit. When a reload needs more, unused ones are emptied into the newest, because a key that is
/// not found is searched in all of them.
const MAX_TABLES: usize = 8;
/// Configurations of one limit that are kept for refunds: more than a rule file has plans.
const MAX_CONFIGURATIONS: usize = 16;

/// With bans, one part in this many of the memory is kept for them: a flood of keys that are allowed must not keep those
/// that are denied from being banned.
const KEPT_FOR_BANS: usize = 16;

/// The families of all limits that a store and those before it have had.
#[derive(Default)]
pub(crate) struct Families(pub(super) Mutex<HashMap<Name, Arc<Family>>>);

/// A limit and a ban may have the same name.
pub(super) type Name = (String, bool);

pub(super) fn name_of(limit: &Limit) -> Name {
    (limit.name().to_owned(), limit.is_ban())
}

/// The table, family and usage of each limit, in their order.
pub(super) struct Chosen {
    pub(super) tables: Box<[Arc<Table>]>,
    pub(super) families: Box<[Arc<Family>]>,
    pub(super) usages: Box<[Arc<Usage>]>,
}

/// The family of a table, and the usage of its limit.
type Owner = (Arc<Family>, Arc<Usage>);

/// A family, and the members that it will have.
struct PlannedMembers {
    family: Arc<Family>,
    members: Members,
    /// The largest quota that the limit will have had.
    ceiling: u64,
    by_meaning: ByMeaning,
    frozen: Frozen,
}

/// The positions of the tables of each meaning, in their order. A limit with hundreds of variants has as many tables.
#[derive(Default)]
struct ByMeaning(HashMap<Meaning, SmallVec<[usize; 1]>>);

impl ByMeaning {
    fn of(members: &Members) -> Self {
        let mut by_meaning = Self::default();
        for (position, member) in members.tables.iter().enumerate() {
            by_meaning.add(&member.algorithm, position);
        }
        by_meaning
    }

    fn add(&mut self, algorithm: &Compiled, position: usize) {
        self.0.entry(algorithm.meaning()).or_default().push(position);
    }

    fn positions(&self, algorithm: &Compiled) -> &[usize] {
        self.0.get(&algorithm.meaning()).map_or(&[], SmallVec::as_slice)
    }
}

/// Chooses a table for every limit. A limit that shares a table adopts its layout. If it fails, nothing changes.
pub(super) fn choose(
    limits: &mut [Limit],
    families: &Families,
    budget: &Budget,
    now: u64,
) -> Result<Chosen, InvalidLimit> {
    let mut known = families.0.lock();
    let mut planned: HashMap<Name, PlannedMembers> = HashMap::new();
    for limit in &*limits {
        let name = name_of(limit);
        let draft = planned.entry(name.clone()).or_insert_with(|| {
            let family = known.get(&name).cloned().unwrap_or_else(|| Arc::new(Family::new()));
            let (members, frozen) = family.freeze();
            let ceiling = family.ceiling();
            PlannedMembers { family, members, ceiling, by_meaning: ByMeaning::default(), frozen }
        });
        draft.ceiling = draft.ceiling.max(limit.quota());
    }
    for PlannedMembers { family, members, ceiling, by_meaning, .. } in planned.values_mut() {
        members.retire(now, *ceiling);
        for member in &mut members.tables {
            member.algorithm = member.algorithm.raised_to(*ceiling).watching_ceiling(&family.ceiling);
        }
        *by_meaning = ByMeaning::of(members);
    }
    let mut tables: Vec<Option<(Arc<Table>, Owner)>> = vec![None; limits.len()];
    // The largest quota first: a table with room for it has room for its variants.
    let mut order: Vec<usize> = (0..limits.len()).collect();
    order.sort_by_key(|index| Reverse(limits[*index].quota()));
    let (mut first_words, count) = (0, limits.len());
    let has_bans = limits.iter().any(Limit::is_ban);
    let of_limits = if has_bans { budget.keeping_one_in(KEPT_FOR_BANS) } else { budget.clone() };
    for index in order {
        let found = planned.get_mut(&name_of(&limits[index]));
        let Some(PlannedMembers { family, members, ceiling, by_meaning, .. }) = found else { continue };
        let compiled = limits[index].compiled().with_ceiling(*ceiling).watching_ceiling(&family.ceiling);
        let (compiled, table, usage) = match members.shared_by(&compiled, by_meaning.positions(&compiled), *ceiling) {
            Some(shared) => shared,
            None => {
                let layout = Layout::new(compiled.words(), compiled.free_bits());
                first_words += Table::first_words(layout);
                let table = (first_words * size_of::<u64>() <= budget.max())
                    .then(|| {
                        let budget = if limits[index].is_ban() { budget } else { &of_limits };
                        Table::new(layout, budget.clone())
                    })
                    .flatten();
                let mut table = table.ok_or_else(|| too_little(budget, count))?;
                table.overflow = Arc::clone(&family.overflow);
                let table = Arc::new(table);
                by_meaning.add(&compiled, members.tables.len());
                members.add(&compiled, table)
            }
        };
        members.remember(&compiled);
        limits[index] = limits[index].with_compiled(compiled);
        tables[index] = Some((table, (family.clone(), usage)));
    }
    // No list stays frozen while keys are moved: decisions on some keys wait for it.
    let changed: Vec<_> = planned
        .into_iter()
        .map(|(name, PlannedMembers { family, members, ceiling, frozen, .. })| {
            family.raise_ceiling(ceiling);
            family.set(members);
            drop(frozen);
            (name, family)
        })
        .collect();
    for (name, family) in changed {
        merge_retired(&family, now);
        known.insert(name, family);
    }
    // Keep removed limits while they have live keys.
    known.retain(|_, family| {
        family.drop_retired(now);
        !family.members().tables.is_empty()
    });
    let (tables, owners): (Vec<_>, Vec<Owner>) = tables.into_iter().flatten().unzip();
    let (families, usages): (Vec<_>, Vec<_>) = owners.into_iter().unzip();
    Ok(Chosen { tables: tables.into(), families: families.into(), usages: usages.into() })
}

fn too_little(budget: &Budget, limits: usize) -> InvalidLimit {
    let problem = format!("max_memory {} is too little for {limits} limits", budget.max());
    InvalidLimit::new("max_memory", problem, "allow more memory or use fewer limits")
}

impl Members {
    /// Returns a table whose words have the same meaning, and the configuration in its layout. The tables of this meaning
    /// are at these positions.
    fn shared_by(
        &mut self,
        compiled: &Compiled,
        positions: &[usize],
        ceiling: u64,
    ) -> Option<(Compiled, Arc<Table>, Arc<Usage>)> {
        // The newest first: it may have replaced an older one of the same meaning. Tables for debts are wide, and slower.
        positions.iter().rev().find_map(|position| {
            let member = self.tables.get_mut(*position).filter(|member| member.debts_until.is_none())?;
            let compiled = compiled.laid_out_as(&member.algorithm, ceiling)?;
            let usage = member.usage.upgrade().unwrap_or_else(|| Arc::new(Usage));
            (member.usage, member.retired_at) = (Arc::downgrade(&usage), None);
            Some((compiled, member.table.clone(), usage))
        })
    }

    fn add(&mut self, compiled: &Compiled, table: Arc<Table>) -> (Compiled, Arc<Table>, Arc<Usage>) {
        let usage = Arc::new(Usage);
        self.tables.push(Member::new(&table, compiled, &usage));
        (compiled.clone(), table, usage)
    }

    fn remember(&mut self, compiled: &Compiled) {
        self.configurations.retain(|known| known.meaning() != compiled.meaning());
        self.configurations.insert(0, compiled.clone());
        self.configurations.truncate(MAX_CONFIGURATIONS);
    }
}

/// Empties tables that no store uses any more into the newest one that is used, if there are too many of them.
fn merge_retired(family: &Family, now: u64) {
    loop {
        let members = family.members();
        if members.tables.len() <= MAX_TABLES {
            return;
        }
        // An unused table could be dropped before the keys moved there are at rest.
        let Some(newest) = members.tables.iter().rev().find(|member| member.is_in_use()) else { return };
        let mut others = members.tables.iter().filter(|member| !Arc::ptr_eq(&member.table, &newest.table));
        let Some(oldest) = others.find(|member| member.can_be_emptied(now)) else { return };
        // If there is no room, the table stays until its keys are at rest.
        if !empty(family, oldest, newest, now) {
            return;
        }
    }
}

/// Moves all live keys of an unused table to another one, and drops it. Returns false if there is no room for them.
pub(super) fn empty(family: &Family, from: &Member, to: &Member, now: u64) -> bool {
    let keys = with_algorithm!(&from.algorithm, algorithm => from.table.live_fingerprints(algorithm, now));
    let is_empty = keys.into_iter().all(|fingerprint| move_key(family, to, fingerprint, now));
    if is_empty {
        family.remove(&from.table);
    }
    is_empty
}

impl Member {
    /// Returns whether no store uses the table and its floors are idle: floors cannot be moved.
    pub(super) fn can_be_emptied(&self, now: u64) -> bool {
        let is_unused = !self.is_in_use() && self.debts_until.is_none();
        // Reads from here on see everything that the last user wrote.
        fence(Ordering::Acquire);
        is_unused && with_algorithm!(&self.algorithm, algorithm => self.table.has_idle_floors(algorithm, now))
    }
}

fn move_key(family: &Family, to: &Member, fingerprint: u64, now: u64) -> bool {
    let view = FamilyView { family, table: &to.table, algorithm: &to.algorithm, tables: &[] };
    let mut attempts = 0;
    loop {
        // Load it each time: a decision may have dropped a table that is at rest.
        let members = family.members();
        let mut holds = HeldBuckets::default();
        match view.with_members(&members).hold_slot(&mut holds, Some(&members), fingerprint, now) {
            Ok(slot_ref) => return slot_ref.is_some(),
            Err(busy) => {
                drop(holds);
                view.make_room(&busy, fingerprint, now);
            }
        }
        attempts = pause(attempts);
    }
}

impl Table {
    /// Returns the fingerprints of all live keys. No thread adds keys.
    fn live_fingerprints<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) -> Vec<u64> {
        let live = |bucket: Bucket<'_>| {
            let header = bucket.header().load(Ordering::Acquire);
            let keys = |is_live: &dyn Fn(usize) -> bool| {
                let slots = (0..self.layout.slots).filter(|slot| is_live(*slot));
                slots.map(|slot| bucket.fingerprint(slot)).collect::<SmallVec<[u64; 8]>>()
            };
            let live = keys(&|slot| self.is_live(algorithm, bucket, slot, now));
            // Words that are being changed may look idle.
            let is_certain = header & LOCKED == 0 && unchanged(bucket, header);
            if is_certain { live } else { keys(&|slot| bucket.fingerprint(slot) != EMPTY) }
        };
        self.buckets().flat_map(live).collect()
    }

    pub(super) fn has_idle_floors<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) -> bool {
        self.buckets().all(|bucket| algorithm.is_idle(&self.shared(bucket), now))
    }

    /// Returns all buckets, including those that were split early.
    pub(super) fn buckets(&self) -> impl Iterator<Item = Bucket<'_>> {
        (0..).take_while(|index| self.has_bucket(*index)).map(|index| self.bucket(index))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::Rate;
    use crate::TokenBucket;

    /// A client chooses the numbers of `CL.THROTTLE`, so a limit is compared with few of its tables.
    #[test]
    fn a_limit_is_compared_only_with_the_tables_of_its_meaning() {
        let (families, budget) = (Families::default(), Budget::new(64 << 20));
        let rates = 1..=100;
        let bucket = |millis| TokenBucket::new(10, Rate::new(1, Duration::from_millis(millis)));
        let mut limits: Vec<Limit> =
            rates.clone().map(|rate| Limit::new("one", bucket(rate)).expect("valid")).collect();
        let chosen = choose(&mut limits, &families, &budget, 0).expect("there is room");
        let members = chosen.families[0].members();
        let by_meaning = ByMeaning::of(&members);
        for (limit, table) in limits.iter().zip(&chosen.tables) {
            let [position] = by_meaning.positions(limit.compiled()) else { panic!("each rate has one table") };
            assert!(Arc::ptr_eq(&members.tables[*position].table, table));
        }
        // The same rates again.
        let again = choose(&mut limits.clone(), &families, &budget, 0).expect("there is room");
        assert!(again.tables.iter().zip(&chosen.tables).all(|(table, before)| Arc::ptr_eq(table, before)));
    }
}

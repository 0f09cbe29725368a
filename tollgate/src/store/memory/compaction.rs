//! Compaction: frees the memory of a burst of keys once they are at rest.
//!
//! Decisions do not register as readers of a table's segments, so a table can only be freed as a whole, when no store
//! uses it. Compaction is a change of tables like that of a reload: a new store has a smaller table in the place of
//! each one that is mostly empty, both tables are in the family of the limit, and decisions move keys from one to the
//! other. Once no store uses the larger table, the next compaction moves the keys that are left, and frees it. The
//! fast path is unaware of this.
//!
//! Deliberately not here: when to compact. That is for the owner of the limiter.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use super::MemoryStore;
use super::bucket::{Layout, header_at};
use super::family::{Family, FamilyView, Member, Usage};
use super::table::Table;
use super::tables;
use crate::algorithm::{LimitAlgorithm, with_algorithm};
use crate::budget::Budget;
use crate::sync::Ordering;
use crate::units::Timestamp;

/// A table is replaced by one that takes at most this part of its memory. It grows when it is four fifths full, so a
/// number of keys that rises and falls by less than that changes nothing.
const PART: usize = 4;
/// Slots of a new table for each key: it is at most half full.
const SLOTS_PER_KEY: usize = 2;
/// A full budget does not keep a table from being replaced, as long as the new one takes at most this part of it: the
/// memory of the old one comes back soon.
const BEYOND: usize = 16;
/// Buckets to sample for an estimate of the number of keys.
const SAMPLE: usize = 1 << 10;

impl MemoryStore {
    /// Returns a store with the same limits and keys, and smaller tables instead of those that are mostly empty, or
    /// `None` if there are none. Frees replaced tables that no store uses any more.
    pub(crate) fn compacted(&self, now: Timestamp) -> Option<Self> {
        let now = now.as_micros();
        // A reload would choose from the same tables.
        let families = self.families.0.lock();
        for family in families.values() {
            family.drop_retired(now);
            free_replaced(family, now);
        }
        let (mut tables, mut usages) = (self.tables.clone(), self.usages.clone());
        let mut is_changed = false;
        let mut looked_at: HashSet<*const Table> = HashSet::new();
        for (index, family) in self.limit_families.iter().enumerate() {
            if !looked_at.insert(Arc::as_ptr(&self.tables[index])) {
                continue;
            }
            let Some((table, usage)) = replacement(family, &self.tables[index], &self.budget, now) else { continue };
            is_changed = true;
            // Variants may share the table.
            for (other, usage_of_other) in tables.iter_mut().zip(&mut usages) {
                if Arc::ptr_eq(other, &self.tables[index]) {
                    (*other, *usage_of_other) = (table.clone(), usage.clone());
                }
            }
        }
        drop(families);
        is_changed.then(|| Self {
            first: tables.first().cloned(),
            tables,
            limit_families: self.limit_families.clone(),
            usages,
            families: self.families.clone(),
            secret: self.secret.clone(),
            seed: self.seed,
            budget: self.budget.clone(),
        })
    }
}

/// Adds a smaller table of the same meaning to the family, if the table is mostly empty.
fn replacement(family: &Family, table: &Arc<Table>, budget: &Budget, now: u64) -> Option<(Arc<Table>, Arc<Usage>)> {
    let members = family.members();
    let member = members.tables.iter().find(|member| Arc::ptr_eq(&member.table, table))?;
    // One replacement at a time: otherwise a store that is never dropped could keep any number of tables.
    if member.replaces.is_some() || members.tables.iter().any(|other| other.replaces(table)) {
        return None;
    }
    let smaller = with_algorithm!(&member.algorithm, algorithm => table.smaller(algorithm, budget, now))?;
    let (smaller, usage) = (Arc::new(smaller), Arc::new(Usage));
    let mut member = Member::new(&smaller, &member.algorithm, &usage);
    member.replaces = Some(Arc::downgrade(table));
    family.add(member);
    Some((smaller, usage))
}

/// Frees the table that another one of the family replaces, unless a store still uses it or there is no room for its
/// keys.
fn free_replaced(family: &Family, now: u64) {
    let members = family.members();
    for new in members.tables.iter().filter(|member| member.is_in_use()) {
        let old = members.tables.iter().find(|old| new.replaces(&old.table) && old.can_be_emptied(now));
        if let Some(old) = old {
            // If there is no room, it stays until its keys are at rest.
            let _ = tables::empty(family, old, new, now);
        }
    }
}

impl FamilyView<'_> {
    /// Returns the table that this one replaces, while that has keys.
    pub(super) fn replaced(self) -> Option<Arc<Table>> {
        let members = self.family.if_several()?;
        let member = members.tables.iter().find(|member| std::ptr::eq(&*member.table, self.table))?;
        member.replaces.as_ref().and_then(Weak::upgrade)
    }
}

impl Table {
    /// Returns an empty table with room for the live keys of this one, if it takes much less memory.
    fn smaller<R: LimitAlgorithm>(&self, algorithm: &R, budget: &Budget, now: u64) -> Option<Self> {
        self.smaller_level(self.estimated_keys(algorithm, now))?;
        let level = self.smaller_level(self.live_keys(algorithm, now))?;
        // Keys without a slot are charged to floors, whose buckets differ in a table of another size.
        if !self.has_idle_floors(algorithm, now) {
            return None;
        }
        let mut table = Self::of_level(self.layout, level, budget)?;
        table.overflow = self.overflow.clone();
        Some(table)
    }

    /// Returns the level of a table for `keys` keys, if it takes much less memory than this one.
    fn smaller_level(&self, keys: usize) -> Option<u32> {
        let level = self.level_for(keys);
        let segments = self.buckets_at(level) * self.layout.stride() * size_of::<u64>();
        // Until the next sweep, keys at rest have log entries too.
        let occupied = self.occupied.load(Ordering::Relaxed).max(1);
        let entries = self.spill.bytes_in_use() / occupied * keys;
        (segments.saturating_add(entries) <= self.bytes() / PART).then_some(level)
    }

    /// Returns the level at which a table has enough slots for `keys` keys.
    fn level_for(&self, keys: usize) -> u32 {
        let slots = self.layout.slots << self.layout.block_bits;
        let blocks = keys.saturating_mul(SLOTS_PER_KEY).div_ceil(slots);
        blocks.next_power_of_two().ilog2()
    }

    /// Estimates the number of keys that are not at rest from a sample of buckets.
    fn estimated_keys<R: LimitAlgorithm>(&self, algorithm: &R, now: u64) -> usize {
        let (level, split) = self.extent();
        let buckets = self.buckets_at(level) + split;
        let step = (buckets / SAMPLE).max(1);
        let sample = (0..buckets).step_by(step).map(|index| self.live_in(algorithm, self.bucket(index), now));
        sample.sum::<usize>() * step
    }

    /// Creates an empty table of a level, if the budget has the memory or it is a small part of the budget.
    fn of_level(layout: Layout, level: u32, budget: &Budget) -> Option<Self> {
        let words = Self::first_words(layout) << level;
        if !budget.has(words) && words * size_of::<u64>() > budget.max() / BEYOND {
            return None;
        }
        let table = Self::new(layout, budget.clone())?;
        for segment in 1..=level as usize {
            let _ = table.segments[segment].set(budget.take_anyway(table.words_in(segment))?);
        }
        let header = header_at(level);
        table.buckets().for_each(|bucket| bucket.header().store(header, Ordering::Relaxed));
        table.extent.store(u64::from(level) << 32, Ordering::Release);
        Some(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_room_for_twice_its_keys() {
        let budget = Budget::new(1 << 20);
        let table = Table::new(Layout::new(1, 2), budget.clone()).expect("enough memory");
        let slots = 64 * Layout::SHORT_SLOTS;
        let levels = [0, 1, slots / 2, slots / 2 + 1, slots, 8 * slots].map(|keys| table.level_for(keys));
        assert_eq!(levels, [0, 0, 0, 1, 1, 4]);
        let table = Table::of_level(table.layout, 3, &budget).expect("enough memory");
        assert_eq!((table.extent(), table.buckets().count()), ((3, 0), 512));
        assert!(table.buckets().all(|bucket| table.home(bucket.index as u64).0.is(bucket)));
        assert!(Table::of_level(table.layout, 10, &budget).is_none(), "the budget has no room for it");
        assert_eq!(budget.used(), 9 * 64 * 128);
    }
}

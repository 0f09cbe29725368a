//! Reads the keys of all tables for a snapshot, and puts keys from a snapshot into tables.
//!
//! Reading holds one bucket at a time, and no bucket at all where keys have one word each, so decisions go on. Tables
//! of former configurations are read first, so a key that moves to the current table in the meantime is read twice
//! rather than never: restoring keeps the later record. A key that moves between the tables of two variants may be
//! missed. A snapshot is exact if nothing is decided while it is made.
//!
//! Deliberately not here: the shared words of keys without a slot. Their buckets in a table of another size are
//! unknown.

use std::collections::HashSet;
use std::sync::Arc;

use super::claim::HeldBuckets;
use super::decide::{Copied, SEAL, WordsView};
use super::family::{Converted, Family, HeldSlot};
use super::table::{Bucket, EMPTY, Table, header_within_bound, hold_unchanged, pause, unchanged};
use super::{MemoryStore, tables};
use crate::algorithm::record::{Numbers, Record, RecordedAt};
use crate::algorithm::{Algorithm, Compiled, Fit, with_algorithm};
use crate::budget::Budget;
use crate::decision::LimitId;
use crate::error::InvalidLimit;
use crate::limit::Limit;
use crate::sync::Ordering;
use crate::units::Timestamp;

/// The keys of one limit, or of its variants that count the same units.
pub(crate) struct Section<'a> {
    pub(crate) limit: &'a Limit,
    /// The largest quota that the limit has or had.
    pub(crate) ceiling: u64,
    table: &'a Arc<Table>,
    family: &'a Family,
    /// Tables of former configurations, with the algorithm that reads their words.
    former: Vec<(Arc<Table>, Compiled)>,
}

/// A limit as a snapshot describes it.
pub(crate) struct SectionHead {
    pub(crate) name: String,
    pub(crate) numbers: Numbers,
    pub(crate) ceiling: u64,
}

impl SectionHead {
    /// Returns the limit, if its numbers make sense.
    pub(crate) fn limit(&self) -> Option<Limit> {
        Limit::new(self.name.as_str(), Algorithm::of_numbers(self.numbers)?).ok()
    }
}

impl MemoryStore {
    /// Returns the keys of these limits, by table.
    pub(crate) fn sections<'a>(&'a self, limits: &'a [Limit]) -> Vec<Section<'a>> {
        let in_use: HashSet<usize> = self.tables.iter().map(|table| Arc::as_ptr(table).addr()).collect();
        let (mut tables, mut families) = (HashSet::new(), HashSet::new());
        let mut sections = Vec::new();
        for ((limit, table), family) in limits.iter().zip(&self.tables).zip(&self.limit_families) {
            if !tables.insert(Arc::as_ptr(table).addr()) {
                continue;
            }
            let members = family.members();
            let is_first = families.insert(Arc::as_ptr(family).addr());
            let former = members.tables.iter().filter(|member| !in_use.contains(&Arc::as_ptr(&member.table).addr()));
            let former = former.filter(|_| is_first).map(|member| (member.table.clone(), member.algorithm.clone()));
            sections.push(Section { limit, ceiling: family.ceiling(), table, family, former: former.collect() });
        }
        sections
    }

    /// Returns a store for the limits of a snapshot, which hashes keys with the secret that they were hashed with.
    pub(crate) fn of_sections(
        sections: &[SectionHead],
        limits: &mut [Limit],
        max_bytes: usize,
        seed: [u64; 4],
    ) -> Result<Self, InvalidLimit> {
        let (budget, families) = (Budget::new(max_bytes), Arc::new(tables::Families::default()));
        for (section, limit) in sections.iter().zip(&*limits) {
            families.raise(limit, section.ceiling);
        }
        let chosen = tables::choose(limits, &families, &budget, Timestamp::EPOCH.as_micros())?;
        Ok(Self::of(chosen, families, seed, budget))
    }

    /// Replaces the state of a key by a record. Returns false if there is no room for the key.
    pub(crate) fn restore(
        &self,
        limits: &[Limit],
        (limit, fingerprint): (LimitId, u64),
        record: &[(u64, u64)],
        recorded: RecordedAt,
        now: Timestamp,
    ) -> bool {
        let Some(view) = self.family_view(limits, limit).filter(|_| fingerprint != EMPTY) else { return false };
        let now = now.as_micros();
        let mut attempts = 0;
        loop {
            let members = view.family.if_several();
            let view = members.as_ref().map_or(view, |members| view.with_members(members));
            let mut holds = HeldBuckets::default();
            match view.hold_slot(&mut holds, members.as_ref(), fingerprint, now) {
                Ok(Some(HeldSlot { table, algorithm, slot_ref })) if slot_ref.slot < table.layout.slots => {
                    holds.write(slot_ref.bucket);
                    let cells = holds.cells(table, slot_ref);
                    with_algorithm!(&*algorithm, algorithm => crate::algorithm::LimitAlgorithm::clear(algorithm, &cells));
                    let fit = algorithm.restore(&cells, record, recorded);
                    drop(holds);
                    with_algorithm!(view.algorithm, algorithm => view.table.maintain(algorithm, now));
                    return fit == Fit::Whole || self.restore_debtor(view, fingerprint, record, recorded, now);
                }
                Ok(_) => return false,
                Err(busy) => {
                    drop(holds);
                    view.make_room(&busy, fingerprint, now);
                }
            }
            attempts = pause(attempts);
        }
    }
}

impl Section<'_> {
    /// Calls `see` with the fingerprint and the record of every key that is not at rest.
    pub(crate) fn visit<E>(
        &self,
        now: Timestamp,
        wall_offset: i64,
        mut see: impl FnMut(u64, &Record) -> Result<(), E>,
    ) -> Result<(), E> {
        let (now, algorithm) = (now.as_micros(), self.limit.compiled());
        // Keys move from former tables to this one: a key that moves in the meantime is read twice, and the later
        // record counts.
        for (table, before) in &self.former {
            self.visit_other(table, before, (now, wall_offset), &mut see)?;
        }
        self.table.visit(|cells| algorithm.record(cells, now, wall_offset), &mut see)?;
        // A smaller table may replace this one, and keys move there in the meantime.
        let members = self.family.members();
        let mut replacing = members.tables.iter().filter(|member| member.replaces(self.table));
        replacing
            .try_for_each(|member| self.visit_other(&member.table, &member.algorithm, (now, wall_offset), &mut see))
    }

    /// Visits the keys of another table of the limit, converted to this configuration.
    fn visit_other<E>(
        &self,
        table: &Table,
        before: &Compiled,
        (now, wall_offset): (u64, i64),
        see: &mut impl FnMut(u64, &Record) -> Result<(), E>,
    ) -> Result<(), E> {
        let algorithm = self.limit.compiled();
        let converted = |cells: &WordsView<'_, '_>| {
            // The layout of this limit may have no room for a debt.
            if before.meaning() == algorithm.meaning() {
                return before.record(cells, now, wall_offset);
            }
            let copy = Converted::of(algorithm, &self.table.spill);
            let _ = algorithm.convert(&copy, before, cells, now);
            algorithm.record(&copy, now, wall_offset)
        };
        table.visit(converted, see)
    }
}

impl Table {
    fn visit<E>(
        &self,
        record: impl Fn(&WordsView<'_, '_>) -> Record,
        see: &mut impl FnMut(u64, &Record) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut keys = Vec::new();
        // Segments that are added in the meantime are visited too: keys only move up.
        let buckets = (0..).take_while(|index| self.has_bucket(*index));
        for index in buckets {
            let mut attempts = 0;
            while !self.read_bucket(self.bucket(index), &record, &mut keys) {
                attempts = pause(attempts);
            }
            // No lock is held here: `see` may wait for a disk.
            for (fingerprint, record) in keys.drain(..).filter(|(_, record)| !record.is_empty()) {
                see(fingerprint, &record)?;
            }
        }
        Ok(())
    }

    /// Reads all keys of a bucket. Returns false if another thread interfered; nothing is read then.
    fn read_bucket(
        &self,
        bucket: Bucket<'_>,
        record: impl Fn(&WordsView<'_, '_>) -> Record,
        keys: &mut Vec<(u64, Record)>,
    ) -> bool {
        keys.clear();
        let Ok(header) = header_within_bound(bucket) else { return false };
        let (slots, tags) = (self.layout.slots, self.layout.tags);
        let held = if tags == 0 { hold_unchanged(bucket, header) } else { None };
        if tags == 0 && held.is_none() {
            return false;
        }
        for slot in 0..slots {
            let fingerprint = bucket.fingerprint(slot);
            if fingerprint == EMPTY {
                continue;
            }
            if tags == 0 {
                keys.push((fingerprint, record(&WordsView::Words(self.slot(bucket, slot)))));
                continue;
            }
            let word = bucket.words_of(slot, self.layout)[0].load(Ordering::Acquire);
            if word == SEAL {
                return false;
            }
            keys.push((fingerprint, record(&WordsView::Copy(&Copied::new(word & !tags, &self.spill)))));
        }
        held.is_some() || unchanged(bucket, header)
    }
}

impl tables::Families {
    /// Raises the ceiling of a limit for keys that may have spent up to `ceiling` units.
    fn raise(&self, limit: &Limit, ceiling: u64) {
        let mut known = self.0.lock();
        let family = known.entry(tables::name_of(limit)).or_insert_with(|| Arc::new(Family::new()));
        family.raise_ceiling(ceiling);
    }
}

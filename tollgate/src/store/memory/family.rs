//! The tables of one limit: one for each meaning that the words of its keys have or had.
//!
//! Variants of a limit may count by other windows or rates, and a reload may change either. Words that mean different
//! things cannot be in one table, so a limit is a family of tables, and a key has a slot in at most one of them. A
//! decision that finds the key in the table of its own configuration looks no further: that is the fast path, and it
//! is unaware of families. A decision that does not find it there locks the home buckets of the key in all tables of
//! the family. If the key has a slot in another table, its state is converted.
//!
//! A decision that charges the key moves it. A denial moves it too, so that its `retry_after` is that of the new
//! configuration, unless both are variants of one limit: a client that alternates between two plans would otherwise
//! have its charges dated to now again and again, and they would never expire. Such a denial uses a copy.
//!
//! A key is added with all of its home buckets locked, and a table is added to a family before it is used. So if the
//! list of tables is unchanged once the buckets are locked, no other thread adds the key elsewhere.
//!
//! Keys without a slot share words of their home bucket, separately in each table. A key that has no slot in any table
//! is charged the sum of these words.
//!
//! If a key cannot be moved, because the table is full or has no room for what the key has spent, it is denied: it
//! keeps its state where it is.

use std::borrow::Cow;
use std::sync::{Arc, Weak};

use smallvec::{SmallVec, smallvec};

use super::claim::{HeldBuckets, SlotRef};
use super::debts::HeldDebtor;
use super::decide::WordsView;
use super::table::{Bucket, Busy, OverflowCounts, Table, pause};
use super::{HashedHit, Mode};
use crate::algorithm::spill::Spill;
use crate::algorithm::{Charge, Compiled, LimitAlgorithm, StateWords, Step, with_algorithm};
use crate::algorithm::{Fit, Spent};
use crate::decision::{Admission, Verdict};
use crate::sync::{AtomicBool, AtomicU64, Mutex, Ordering};

/// All tables of a limit. Stores that were made from one another share it.
pub(crate) struct Family {
    members: Mutex<Arc<Members>>,
    /// Whether there is more than one table. A value read with a bucket locked stays valid for the keys of that bucket
    /// until it is unlocked.
    has_several: AtomicBool,
    /// Set while a copy of the list is changed that will replace it. Written with the list locked.
    is_frozen: AtomicBool,
    /// The largest quota that the limit has or had, and the largest debt of a key that no quota explains. Buckets of stores that
    /// were made before it was raised read it too.
    pub(super) ceiling: Arc<std::sync::atomic::AtomicU64>,
    /// How often keys of any table have lacked a slot.
    pub(super) overflow: Arc<OverflowCounts>,
    /// Held while a table for debts is added: two threads would each take memory for one.
    pub(super) adding_debts: Mutex<()>,
}

/// The tables at one time. Replaced as a whole.
#[derive(Clone, Default)]
pub(super) struct Members {
    pub(super) tables: Vec<Member>,
    /// Configurations that the limit has or had, one of each meaning, the latest first.
    pub(super) configurations: Vec<Compiled>,
}

#[derive(Clone)]
pub(super) struct Member {
    pub(super) table: Arc<Table>,
    /// A configuration by which the table's words are read.
    pub(super) algorithm: Compiled,
    /// Dropped once no store uses the table.
    pub(super) usage: Weak<Usage>,
    /// Time at which the table was found to be unused.
    pub(super) retired_at: Option<u64>,
    /// The table of the same meaning that this one replaces, until that is empty.
    pub(super) replaces: Option<Weak<Table>>,
    /// The latest time at which a key was charged here, if the table is for [debts](super::debts).
    pub(super) debts_until: Option<Arc<AtomicU64>>,
}

impl Member {
    pub(super) fn new(table: &Arc<Table>, algorithm: &Compiled, usage: &Arc<Usage>) -> Self {
        let usage = Arc::downgrade(usage);
        Self {
            table: table.clone(),
            algorithm: algorithm.clone(),
            usage,
            retired_at: None,
            replaces: None,
            debts_until: None,
        }
    }

    /// Returns whether all keys are at rest, if the table is for debts.
    fn debts_are_paid(&self, now: u64, ceiling: u64) -> Option<bool> {
        let latest = self.debts_until.as_ref()?.load(Ordering::Acquire);
        Some(now >= latest.saturating_add(self.algorithm.settles_within(ceiling)))
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.usage.strong_count() > 0
    }

    pub(super) fn replaces(&self, table: &Arc<Table>) -> bool {
        self.replaces.as_ref().is_some_and(|replaced| std::ptr::eq(replaced.as_ptr(), Arc::as_ptr(table)))
    }
}

/// Held by every store that uses a table.
pub(crate) struct Usage;

/// A configuration with its table and family.
#[derive(Clone, Copy)]
pub(super) struct FamilyView<'a> {
    pub(super) family: &'a Family,
    pub(super) table: &'a Table,
    pub(super) algorithm: &'a Compiled,
    /// The tables of all limits of the store, among them those of variants.
    pub(super) tables: &'a [Arc<Table>],
}

/// A locked slot of a key: in its own table or, if the key owes more than that has room for, in the table for debts.
pub(super) struct HeldSlot<'a> {
    pub(super) table: &'a Table,
    pub(super) algorithm: Cow<'a, Compiled>,
    pub(super) slot_ref: SlotRef<'a>,
}

/// The location of a key whose buckets are locked.
pub(super) enum KeyLocation<'a> {
    Here(SlotRef<'a>),
    There(&'a Member, SlotRef<'a>),
    Nowhere,
}

impl Family {
    pub(super) fn new() -> Self {
        Self {
            members: Mutex::new(Arc::default()),
            has_several: AtomicBool::new(false),
            is_frozen: AtomicBool::new(false),
            ceiling: Arc::default(),
            overflow: Arc::default(),
            adding_debts: Mutex::new(()),
        }
    }

    #[inline]
    pub(super) fn is_alone(&self) -> bool {
        !self.has_several.load(Ordering::Acquire)
    }

    pub(super) fn members(&self) -> Arc<Members> {
        self.members.lock().clone()
    }

    /// Returns the largest quota that the limit has or had, and its configurations.
    #[cfg(feature = "redis")]
    pub(crate) fn configurations(&self) -> (u64, Vec<Compiled>) {
        (self.ceiling(), self.members().configurations.clone())
    }

    pub(super) fn set(&self, members: Members) {
        self.change(|current| *current = members);
    }

    /// Makes a quota or a debt of this many units known, before a key has it.
    pub(super) fn raise_ceiling(&self, units: u64) {
        self.ceiling.fetch_max(units, std::sync::atomic::Ordering::AcqRel);
    }

    pub(super) fn ceiling(&self) -> u64 {
        self.ceiling.load(std::sync::atomic::Ordering::Acquire)
    }

    /// Changes the list of tables.
    fn change(&self, change: impl FnOnce(&mut Members)) {
        let mut current = self.members.lock();
        let mut members = Members::clone(&current);
        change(&mut members);
        self.has_several.store(members.tables.len() > 1, Ordering::Release);
        let before = std::mem::replace(&mut *current, Arc::new(members));
        drop(current);
        // After the lock is released: freeing a large table takes long.
        drop(before);
    }

    /// Copies the list of tables. Until the guard is dropped, decisions drop no table, so that the copy can replace the
    /// list.
    pub(super) fn freeze(self: &Arc<Self>) -> (Members, Frozen) {
        let current = self.members.lock();
        self.is_frozen.store(true, Ordering::Relaxed);
        (Members::clone(&current), Frozen(self.clone()))
    }

    pub(super) fn add(&self, member: Member) {
        self.change(|members| members.tables.push(member));
    }

    /// Adds a table for debts, unless there is one of its meaning, or the list is about to be replaced.
    pub(super) fn add_for_debts(&self, member: Member) {
        // Read with the lock held.
        self.change(|members| {
            if !self.is_frozen() && members.debts(&member.algorithm).is_none() {
                members.tables.push(member);
            }
        });
    }

    pub(super) fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::Relaxed)
    }

    /// Returns the members, if there are several tables.
    pub(super) fn if_several(&self) -> Option<Arc<Members>> {
        (!self.is_alone()).then(|| self.members())
    }

    pub(super) fn is_still(&self, members: &Arc<Members>) -> bool {
        Arc::ptr_eq(&self.members.lock(), members)
    }

    /// Drops a table whose keys were all moved to others.
    pub(super) fn remove(&self, table: &Arc<Table>) {
        self.change(|members| members.retain(|member| !Arc::ptr_eq(&member.table, table)));
    }

    /// Drops tables that no store uses and whose keys are all at rest.
    pub(super) fn drop_retired(&self, now: u64) {
        // While the list is frozen, it is not replaced by an equal one either: decisions start over when it changes.
        let is_frozen = || self.is_frozen.load(Ordering::Relaxed);
        let changes = {
            let members = self.members.lock();
            !is_frozen() && members.changes_at(now, self.ceiling())
        };
        if changes {
            // It may have been frozen in the meantime. Read and written with the lock held.
            self.change(|members| {
                if !is_frozen() {
                    members.retire(now, self.ceiling());
                }
            });
        }
    }
}

/// Keeps the tables of a family in their list.
pub(super) struct Frozen(Arc<Family>);

impl Drop for Frozen {
    fn drop(&mut self) {
        let _members = self.0.members.lock();
        self.0.is_frozen.store(false, Ordering::Relaxed);
    }
}

impl Members {
    /// Returns whether a table has become unused since the last call, or can be dropped.
    fn changes_at(&self, now: u64, ceiling: u64) -> bool {
        self.tables.iter().any(|member| match (member.debts_are_paid(now, ceiling), member.retired_at) {
            (Some(are_paid), _) => are_paid,
            (None, None) => !member.is_in_use(),
            (None, Some(since)) => {
                member.is_in_use() || now >= since.saturating_add(member.algorithm.settles_within(ceiling))
            }
        })
    }

    fn retain(&mut self, is_kept: impl FnMut(&mut Member) -> bool) {
        self.tables.retain_mut(is_kept);
        let kept: SmallVec<[*const Table; 8]> = self.tables.iter().map(|member| Arc::as_ptr(&member.table)).collect();
        for member in &mut self.tables {
            member.replaces = member.replaces.take().filter(|replaced| kept.contains(&replaced.as_ptr()));
        }
    }

    /// Marks tables that are no longer used, and drops those whose keys are all at rest.
    pub(super) fn retire(&mut self, now: u64, ceiling: u64) {
        self.retain(|member| {
            if let Some(are_paid) = member.debts_are_paid(now, ceiling) {
                return !are_paid;
            }
            if member.is_in_use() {
                member.retired_at = None;
                return true;
            }
            let since = *member.retired_at.get_or_insert(now);
            now < since.saturating_add(member.algorithm.settles_within(ceiling))
        });
    }
}

impl<'a> FamilyView<'a> {
    /// Returns this view for the lifetime of `members`.
    pub(super) fn with_members<'b>(self, _: &'b Arc<Members>) -> FamilyView<'b>
    where
        'a: 'b,
    {
        self
    }

    /// Reads the state of a key, in whichever table it is, with the configuration of its words. `None` if it has no slot.
    pub(super) fn read_key<R>(
        self,
        fingerprint: u64,
        read: impl Fn(&Members, &Compiled, &WordsView<'_, '_>) -> R,
    ) -> Option<R> {
        let mut attempts = 0;
        loop {
            let members = self.family.members();
            let view = self.with_members(&members);
            let mut holds = HeldBuckets::default();
            let (table, held, slot_ref) = match view.find(&mut holds, &members, fingerprint) {
                Ok(KeyLocation::Here(slot_ref)) => (view.table, view.algorithm, slot_ref),
                Ok(KeyLocation::There(member, slot_ref)) => (&*member.table, &member.algorithm, slot_ref),
                Ok(KeyLocation::Nowhere) => return None,
                Err(_) => {
                    drop(holds);
                    attempts = pause(attempts);
                    continue;
                }
            };
            return Some(read(&members, held, &holds.cells(table, slot_ref)));
        }
    }

    /// Decides on a key without a slot in its own table. `None` if it has one by now, or if another thread held a
    /// bucket.
    pub(super) fn decide(self, members: &'a Arc<Members>, hit: HashedHit, now: u64, mode: Mode) -> Option<Verdict> {
        let mut holds = HeldBuckets::default();
        match self.decide_held(&mut holds, members, hit, now, mode) {
            Ok(verdict) => verdict,
            Err(busy) => {
                drop(holds);
                self.make_room(&busy, hit.fingerprint, now);
                None
            }
        }
    }

    /// Makes room for a key in the table that is crowded, if one is.
    pub(super) fn make_room(self, busy: &Busy, fingerprint: u64, now: u64) {
        match busy {
            Busy::Held => {}
            Busy::Crowded => {
                with_algorithm!(self.algorithm, algorithm => self.table.make_room(algorithm, fingerprint, now));
            }
            Busy::CrowdedDebts => self.make_room_for_debtor(fingerprint, now),
        }
    }

    fn decide_held(
        self,
        holds: &mut HeldBuckets<'a>,
        members: &'a Arc<Members>,
        hit: HashedHit,
        now: u64,
        mode: Mode,
    ) -> Result<Option<Verdict>, Busy> {
        let HashedHit { fingerprint, cost, .. } = hit;
        let location = self.find(holds, members, fingerprint)?;
        if let KeyLocation::Here(_) = location {
            return Ok(None);
        }
        let (copy, fit) = self.copy(holds, members, &location, fingerprint, now)?;
        if let Some(place) = self.stays(&location, fit) {
            return self.decide_there(holds, members, place, hit, now, mode).map(Some);
        }
        if fit == Fit::Cut
            && let KeyLocation::There(member, slot_ref) = &location
        {
            // A debt of other limits that has no room here. It moves to the table for debts, or else it stays where it is, and
            // the key is decided on by it.
            let wide = self.algorithm.wide();
            let copy = Converted::of(&wide, &self.table.spill);
            let _ = wide.convert(&copy, &member.algorithm, &holds.cells(&member.table, *slot_ref), now);
            let verdict = with_algorithm!(&wide, algorithm => algorithm.decide(&copy, now, cost).verdict);
            if mode == Mode::Peek || cost == 0 {
                return Ok(Some(verdict));
            }
            let converts = match verdict.is_allowed() {
                true => mode.writes(&verdict),
                false => self.is_replaced_by_this(members, &location),
            };
            if converts && self.move_debtor(holds, members, (member, *slot_ref), fingerprint, now)? {
                return Err(Busy::Held);
            }
            if !verdict.is_allowed() {
                note_step_back(holds, &location, now);
                return Ok(Some(verdict));
            }
        }
        let verdict = with_algorithm!(self.algorithm, algorithm => {
            let Step { verdict, edit } = algorithm.decide(&copy, now, cost);
            let edit = edit.filter(|_| mode.writes(&verdict));
            let verdict = match location {
                KeyLocation::Nowhere => verdict.of_shared_words(),
                KeyLocation::Here(_) | KeyLocation::There(..) => verdict,
            };
            let is_denied = !verdict.is_allowed() && mode != Mode::Peek && cost > 0;
            let lacks_slot = is_denied && matches!(verdict.admission, Admission::NoRoom { .. });
            if edit.is_none() && !(is_denied && self.is_replaced_by_this(members, &location)) {
                if is_denied {
                    note_step_back(holds, &location, now);
                }
                if lacks_slot {
                    self.family.overflow.count_denial();
                }
                return Ok(Some(verdict));
            }
            let slot_ref = match fit {
                Fit::Whole => self.claim_slot(holds, members, &location, fingerprint, now)?,
                Fit::Cut => None,
            };
            let Some(slot_ref) = slot_ref else {
                if !algorithm.has_floor() {
                    self.family.overflow.count_lost();
                    return Ok(Some(algorithm.decide(&copy, now, 0).verdict));
                }
                if verdict.is_allowed() || lacks_slot {
                    self.family.overflow.count_denial();
                }
                return Ok(Some(without_room(&verdict)));
            };
            self.fill(holds, slot_ref, &copy);
            if let Some(edit) = edit {
                self.table.apply(algorithm, holds, slot_ref, edit, now);
            }
            verdict
        });
        self.remove_from_old_table(holds, location);
        Ok(Some(verdict))
    }

    /// Returns whether the key is in the table of a former configuration, rather than of a variant. A table that
    /// replaces another for compaction belongs to the same configuration.
    pub(super) fn is_replaced_by_this(self, members: &Members, location: &KeyLocation<'a>) -> bool {
        let KeyLocation::There(member, _) = location else { return false };
        let is_ours = |table: &Arc<Table>| self.tables.iter().any(|own| Arc::ptr_eq(own, table));
        let mut replacing = members.tables.iter().filter(|other| other.replaces(&member.table));
        let is_variant = is_ours(&member.table)
            || replacing.any(|other| is_ours(&other.table))
            || self.tables.iter().any(|own| member.replaces(own));
        !is_variant
    }

    /// Locks the slot of a key in its own table, and claims one if it has none. `None` if no slot is available: the key
    /// must then be denied, or its change is lost if the algorithm has no floor. Without `members`, the table is the only one.
    pub(super) fn hold_slot(
        self,
        holds: &mut HeldBuckets<'a>,
        members: Option<&'a Arc<Members>>,
        fingerprint: u64,
        now: u64,
    ) -> Result<Option<HeldSlot<'a>>, Busy> {
        let here = |slot_ref| HeldSlot { table: self.table, algorithm: Cow::Borrowed(self.algorithm), slot_ref };
        let Some(members) = members else {
            holds.hold_home(self.table, fingerprint)?;
            if !self.family.is_alone() {
                return Err(Busy::Held);
            }
            let slot_ref =
                with_algorithm!(self.algorithm, algorithm => self.table.hold_slot(algorithm, holds, fingerprint, now));
            return Ok(slot_ref?.map(here));
        };
        let location = self.find(holds, members, fingerprint)?;
        if let KeyLocation::Here(slot_ref) = location {
            return Ok(Some(here(slot_ref)));
        }
        let (copy, fit) = self.copy(holds, members, &location, fingerprint, now)?;
        if let Some(place) = self.stays(&location, fit) {
            self.family.charges_debtor(members, place.member, now)?;
            let HeldDebtor { member, algorithm, slot_ref } = place;
            return Ok(Some(HeldSlot { table: &member.table, algorithm: Cow::Owned(algorithm), slot_ref }));
        }
        if let (Fit::Cut, KeyLocation::There(member, slot_ref)) = (fit, &location)
            && self.move_debtor(holds, members, (member, *slot_ref), fingerprint, now)?
        {
            return Err(Busy::Held);
        }
        let slot_ref = match fit {
            Fit::Whole => self.claim_slot(holds, members, &location, fingerprint, now)?,
            Fit::Cut => None,
        };
        if let Some(slot_ref) = slot_ref {
            self.fill(holds, slot_ref, &copy);
            self.remove_from_old_table(holds, location);
        }
        Ok(slot_ref.map(here))
    }

    /// Gives back a charge, in whichever table the key is.
    pub(super) fn refund(
        self,
        members: &'a Arc<Members>,
        fingerprint: u64,
        charge: Charge,
        now: u64,
    ) -> Result<(), Busy> {
        let mut holds = HeldBuckets::default();
        let Some((table, held, slot_ref)) = self.find_or_add(&mut holds, members, fingerprint, now)? else {
            return Ok(());
        };
        let Some(charge) = self.still_counted(members, held, charge, now) else { return Ok(()) };
        with_algorithm!(held, algorithm => {
            if let Some(edit) = algorithm.refund(&holds.cells(table, slot_ref), now, charge) {
                table.apply(algorithm, &mut holds, slot_ref, edit, now);
            }
        });
        Ok(())
    }

    /// Returns the part of a charge that counts under all configurations that may have counted it, for a state written under
    /// `held`. `None` if there is nothing to give back.
    pub(super) fn still_counted(self, members: &Members, held: &Compiled, charge: Charge, now: u64) -> Option<Charge> {
        let others = members.configurations.iter().chain([self.algorithm]);
        let others = others.filter(|other| other.meaning() != held.meaning());
        let cost = others.map(|other| other.still_counts(charge, now)).fold(charge.cost, u64::min);
        (cost > 0 && !self.algorithm.is_queue()).then_some(Charge { cost, ..charge })
    }

    /// Gives back units of the newest charges, in whichever table the key is.
    pub(super) fn credit(self, members: &'a Arc<Members>, hit: HashedHit, now: u64) -> Result<(), Busy> {
        let mut holds = HeldBuckets::default();
        let Some((table, held, slot_ref)) = self.find_or_add(&mut holds, members, hit.fingerprint, now)? else {
            return Ok(());
        };
        if self.algorithm.is_queue() {
            return Ok(());
        }
        with_algorithm!(held, algorithm => {
            let mut left = hit.cost;
            while left > 0
                && let Some((edit, given)) = algorithm.credit(&holds.cells(table, slot_ref), now, left)
            {
                table.apply(algorithm, &mut holds, slot_ref, edit, now);
                left -= given;
            }
        });
        Ok(())
    }

    /// Gives a key its whole quota back, in whichever table it is.
    pub(super) fn reset(self, members: &'a Arc<Members>, fingerprint: u64, now: u64) -> Result<(), Busy> {
        let mut holds = HeldBuckets::default();
        let Some((table, algorithm, slot_ref)) = self.find_or_add(&mut holds, members, fingerprint, now)? else {
            return Ok(());
        };
        holds.write(slot_ref.bucket);
        with_algorithm!(algorithm, algorithm => algorithm.clear(&holds.cells(table, slot_ref)));
        Ok(())
    }

    /// Locks the slot of a key, in whichever table it is. A key without a slot gets one here, unless its floors are
    /// idle. `None` if there is nothing to change, or no slot is available.
    fn find_or_add(
        self,
        holds: &mut HeldBuckets<'a>,
        members: &'a Arc<Members>,
        fingerprint: u64,
        now: u64,
    ) -> Result<Option<(&'a Table, &'a Compiled, SlotRef<'a>)>, Busy> {
        let location = self.find(holds, members, fingerprint)?;
        match location {
            KeyLocation::Here(slot_ref) => Ok(Some((self.table, self.algorithm, slot_ref))),
            KeyLocation::There(member, slot_ref) => Ok(Some((&*member.table, &member.algorithm, slot_ref))),
            KeyLocation::Nowhere => {
                let (copy, fit) = self.copy(holds, members, &location, fingerprint, now)?;
                let is_idle = with_algorithm!(self.algorithm, algorithm => algorithm.is_idle(&copy, now));
                if is_idle || fit == Fit::Cut {
                    return Ok(None);
                }
                let slot_ref = self.claim_slot(holds, members, &location, fingerprint, now)?;
                let Some(slot_ref) = slot_ref.filter(|slot_ref| slot_ref.slot < self.table.layout.slots) else {
                    return Ok(None);
                };
                self.fill(holds, slot_ref, &copy);
                Ok(Some((self.table, self.algorithm, slot_ref)))
            }
        }
    }

    /// Locks the home buckets of a key in all tables, and finds its location.
    pub(super) fn find(
        self,
        holds: &mut HeldBuckets<'a>,
        members: &'a Arc<Members>,
        fingerprint: u64,
    ) -> Result<KeyLocation<'a>, Busy> {
        for member in &members.tables {
            holds.hold_home(&member.table, fingerprint)?;
        }
        let home = holds.hold_home(self.table, fingerprint)?;
        if !self.family.is_still(members) {
            return Err(Busy::Held);
        }
        if let Some(slot_ref) = self.table.find_in_run(holds, home, fingerprint)? {
            holds.keep_for_key(slot_ref.bucket, slot_ref.slot);
            return Ok(KeyLocation::Here(slot_ref));
        }
        for member in self.others(members) {
            let home = holds.hold_home(&member.table, fingerprint)?;
            if let Some(slot_ref) = member.table.find_in_run(holds, home, fingerprint)? {
                holds.keep_for_key(slot_ref.bucket, slot_ref.slot);
                return Ok(KeyLocation::There(member, slot_ref));
            }
        }
        Ok(KeyLocation::Nowhere)
    }

    pub(super) fn others(self, members: &'a Arc<Members>) -> impl Iterator<Item = &'a Member> {
        members.tables.iter().filter(move |member| !std::ptr::eq(&*member.table, self.table))
    }

    /// Returns a copy of the state of a key, converted to this configuration.
    pub(super) fn copy(
        self,
        holds: &mut HeldBuckets<'a>,
        members: &'a Arc<Members>,
        location: &KeyLocation<'a>,
        fingerprint: u64,
        now: u64,
    ) -> Result<(Converted<'a>, Fit), Busy> {
        let copy = Converted::of(self.algorithm, &self.table.spill);
        match location {
            KeyLocation::There(member, slot_ref) => {
                let cells = holds.cells(&member.table, *slot_ref);
                let fit = self.algorithm.convert(&copy, &member.algorithm, &cells, now);
                if fit == Fit::Cut && self.algorithm.is_bucket() {
                    // A bucket has room for every debt up to the ceiling.
                    let units = member.algorithm.spent(&cells, now).units;
                    if units > self.family.ceiling() {
                        self.family.raise_ceiling(units);
                        return Err(Busy::Held);
                    }
                }
                Ok((copy, fit))
            }
            KeyLocation::Here(_) | KeyLocation::Nowhere => {
                let home = holds.hold_home(self.table, fingerprint)?;
                let shared = self.table.shared(home);
                let elsewhere = self.shared_elsewhere(holds, members, fingerprint, now)?;
                if elsewhere.units == 0 {
                    with_algorithm!(self.algorithm, algorithm => {
                        algorithm.inherit(&copy, &shared);
                        algorithm.shared(&copy, now);
                    });
                    return Ok((copy, Fit::Whole));
                }
                let here = self.algorithm.spent(&shared, now);
                let units = here.units.saturating_add(elsewhere.units);
                let fit = self.algorithm.charge(&copy, Spent { at: here.at.max(elsewhere.at), units }, now);
                Ok((copy, fit))
            }
        }
    }

    /// Returns the units that keys without a slot have spent in the other tables.
    fn shared_elsewhere(
        self,
        holds: &mut HeldBuckets<'a>,
        members: &'a Arc<Members>,
        fingerprint: u64,
        now: u64,
    ) -> Result<Spent, Busy> {
        let mut sum = Spent { at: now, units: 0 };
        for member in self.others(members) {
            let home = holds.hold_home(&member.table, fingerprint)?;
            let spent = member.algorithm.spent(&member.table.shared(home), now);
            sum = Spent { at: sum.at.max(spent.at), units: sum.units.saturating_add(spent.units) };
        }
        Ok(sum)
    }

    /// Claims a slot in the key's own table for the caller to fill. `None` if none is available.
    pub(super) fn claim_slot(
        self,
        holds: &mut HeldBuckets<'a>,
        members: &'a Arc<Members>,
        location: &KeyLocation<'a>,
        fingerprint: u64,
        now: u64,
    ) -> Result<Option<SlotRef<'a>>, Busy> {
        let home: Bucket<'a> = holds.hold_home(self.table, fingerprint)?;
        with_algorithm!(self.algorithm, algorithm => {
            if let Some(slot_ref) = self.table.free_slot(algorithm, holds, home, now)? {
                self.table.clear_slot(algorithm, holds, slot_ref);
                holds.reassign(self.table, slot_ref, fingerprint);
                // A key that moves here came before.
                holds.set_late(slot_ref, matches!(location, KeyLocation::Nowhere) && self.table.is_full());
                holds.keep_for_key(slot_ref.bucket, slot_ref.slot);
                return Ok(Some(slot_ref));
            }
        });
        if self.table.can_grow() {
            return Err(Busy::Crowded);
        }
        // The shared words count for a key only if it has no state anywhere else.
        let has_floor = with_algorithm!(self.algorithm, algorithm => algorithm.has_floor());
        let is_alone = has_floor
            && matches!(location, KeyLocation::Nowhere)
            && self.shared_elsewhere(holds, members, fingerprint, now)?.units == 0;
        is_alone.then(|| holds.lock_slot(self.table, home, self.table.layout.slots)).transpose()
    }

    /// Moves the state of a key to a slot that was claimed for it, or to the floor that counts for it.
    pub(super) fn fill(self, holds: &mut HeldBuckets<'a>, slot_ref: SlotRef<'a>, state: &Converted<'a>) {
        let is_floor = slot_ref.slot == self.table.layout.slots;
        if is_floor {
            // The state includes the floor's. What the floor has in chunks would be lost.
            with_algorithm!(self.algorithm, algorithm => algorithm.clear(&holds.cells(self.table, slot_ref)));
            holds.write(slot_ref.bucket);
        }
        state.move_to(&holds.cells(self.table, slot_ref));
    }

    /// Removes the key from the table that it was found in.
    pub(super) fn remove_from_old_table(self, holds: &mut HeldBuckets<'a>, location: KeyLocation<'a>) {
        if let KeyLocation::There(member, slot_ref) = location {
            with_algorithm!(&member.algorithm, algorithm => algorithm.clear(&holds.cells(&member.table, slot_ref)));
            member.table.remove_from_old_table(holds, slot_ref);
        }
    }
}

/// Records in the state that the clock has stepped back, so that the key does not wait for the clock to catch up.
fn note_step_back<'a>(holds: &mut HeldBuckets<'a>, location: &KeyLocation<'a>, now: u64) {
    if let KeyLocation::There(member, slot_ref) = location {
        with_algorithm!(&member.algorithm, algorithm => {
            if let Some(edit) = algorithm.decide(&holds.cells(&member.table, *slot_ref), now, 0).edit {
                member.table.apply(algorithm, holds, *slot_ref, edit, now);
            }
        });
    }
}

/// The denial of a key without room, for a request with several keys.
pub(super) const NO_ROOM: Verdict =
    Verdict { admission: Admission::NoRoom { retry_after: 1_000_000 }, remaining: 0, reset_after: 1_000_000 };

/// Returns the denial of a key that would be allowed, but has no room.
fn without_room(verdict: &Verdict) -> Verdict {
    match verdict.admission {
        Admission::Allowed { .. } => {
            let retry_after = verdict.reset_after.max(1);
            Verdict { admission: Admission::NoRoom { retry_after }, remaining: 0, reset_after: verdict.reset_after }
        }
        _ => *verdict,
    }
}

/// Decides on a key that is not in its own table. `None` if the caller must retry.
#[cold]
#[inline(never)]
pub(super) fn decide(view: FamilyView<'_>, hit: HashedHit, now: u64, mode: Mode) -> Option<Verdict> {
    view.family.drop_retired(now);
    let members = view.family.members();
    view.with_members(&members).decide(&members, hit, now, mode)
}

/// Repeats `attempt` until no other thread interferes, and makes room for the key where it needs a slot.
pub(super) fn retry_until_done(
    view: FamilyView<'_>,
    fingerprint: u64,
    now: u64,
    mut attempt: impl FnMut(&Arc<Members>) -> Result<(), Busy>,
) {
    let mut attempts = 0;
    while let Err(busy) = attempt(&view.family.members()) {
        view.make_room(&busy, fingerprint, now);
        attempts = pause(attempts);
    }
}

/// Converted words that are not in a table yet. Their chunks are freed on drop, unless the words were moved to a slot.
pub(super) struct Converted<'a> {
    words: SmallVec<[std::cell::Cell<u64>; 8]>,
    algorithm: &'a Compiled,
    spill: &'a Spill,
}

impl<'a> Converted<'a> {
    pub(super) fn of(algorithm: &'a Compiled, spill: &'a Spill) -> Self {
        Self { words: smallvec![std::cell::Cell::new(0); algorithm.words()], algorithm, spill }
    }

    pub(super) fn algorithm(&self) -> &'a Compiled {
        self.algorithm
    }

    /// Moves the words to a slot.
    fn move_to(&self, slot: &impl StateWords) {
        for (index, word) in self.words.iter().enumerate() {
            slot.set(index, word.replace(0));
        }
    }
}

impl Drop for Converted<'_> {
    fn drop(&mut self) {
        if self.words.iter().any(|word| word.get() != 0) {
            with_algorithm!(self.algorithm, algorithm => algorithm.clear(&*self));
        }
    }
}

impl StateWords for Converted<'_> {
    fn get(&self, index: usize) -> u64 {
        self.words[index].get()
    }

    fn set(&self, index: usize, word: u64) {
        self.words[index].set(word);
    }

    fn spill(&self) -> &Spill {
        self.spill
    }
}

//! Charges of units that were spent already, whatever the quota is.
//!
//! The words of a key have room for its quota and, mostly, for some multiple of it. A key that owes more moves to a
//! table for debts: one of the same meaning, whose words have room for the largest debt (ADR 42). It is decided on in
//! that table, until its state fits into its own table again and a decision moves it back. So debts cost keys without
//! debts nothing.
//!
//! A table for debts is created with the first debt that needs it, and dropped once all of its keys are at rest. A debt that is
//! converted to other numbers needs one of their meaning.
//!
//! Keys without a slot share their words, and a debt there would deny all of them. They are charged as much as is left.

use std::borrow::Cow;
use std::sync::Arc;

use super::claim::{HeldBuckets, SlotRef};
use super::family::{Converted, Family, FamilyView, HeldSlot, KeyLocation, Member, Members, Usage};
use super::table::{Busy, Layout, Table, pause};
use super::{HashedHit, MemoryStore};
use crate::algorithm::record::RecordedAt;
use crate::algorithm::{Compiled, Fit, LimitAlgorithm, Owed, StateWords, with_algorithm};
use crate::budget::Budget;
use crate::limit::Limit;
use crate::sync::{AtomicU64, Ordering};
use crate::units::Timestamp;

/// The result of a charge of units that were spent already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Charged {
    /// Units that count against the key now.
    pub(crate) counted: u64,
    /// Of these, the units beyond what was left: the key owes them.
    pub(crate) owed: u64,
}

/// A key that stays in the table for debts, and the configuration to decide on it there.
pub(super) struct HeldDebtor<'a> {
    pub(super) member: &'a Member,
    pub(super) algorithm: Compiled,
    pub(super) slot_ref: SlotRef<'a>,
}

/// A key's table, the configuration of its words, and its slot.
type Source<'s, 'a> = (&'a Table, &'s Compiled, SlotRef<'a>);

/// Why a key was not charged.
enum Obstacle {
    /// Another thread interfered, or the table that the key needs a slot in is crowded.
    Busy(Busy),
    /// The family lacks a table for the debts of keys with words of this configuration.
    NoDebtTable(Box<Compiled>),
}

impl From<Busy> for Obstacle {
    fn from(busy: Busy) -> Self {
        Self::Busy(busy)
    }
}

/// How to charge a key if there is no table for debts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum WithoutRoom {
    AddTable,
    /// There is no memory for one: the key is charged as much as is left.
    TakeTheRest,
}

impl MemoryStore {
    /// Charges a key with the cost of the hit, whatever is left.
    pub(crate) fn charge(&self, limits: &[Limit], hit: HashedHit, now: Timestamp) -> Charged {
        let now = now.as_micros();
        let Some(view) = self.family_view(limits, hit.limit) else { return Charged::default() };
        let (mut attempts, mut without_room) = (0, WithoutRoom::AddTable);
        loop {
            let members = view.family.members();
            match view.with_members(&members).charge(&members, hit, now, without_room) {
                Ok(charged) => return charged,
                Err(Obstacle::Busy(busy)) => view.make_room(&busy, hit.fingerprint, now),
                Err(Obstacle::NoDebtTable(of)) => {
                    if !view.add_debt_table(&of, now) {
                        without_room = WithoutRoom::TakeTheRest;
                    }
                }
            }
            attempts = pause(attempts);
        }
    }

    /// Replaces the state of a key that has a slot by a record that its own table has no room for. Returns false if there
    /// is no room for a table for debts.
    pub(super) fn restore_debtor(
        &self,
        view: FamilyView<'_>,
        fingerprint: u64,
        record: &[(u64, u64)],
        recorded: RecordedAt,
        now: u64,
    ) -> bool {
        let mut attempts = 0;
        loop {
            let members = view.family.members();
            let view = view.with_members(&members);
            let mut holds = HeldBuckets::default();
            let restored = view.find(&mut holds, &members, fingerprint).map_err(Obstacle::from).and_then(|location| {
                let KeyLocation::Here(slot_ref) = location else { return Ok(None) };
                let from = (view.table, view.algorithm, slot_ref);
                view.move_to_debts(&mut holds, &members, (from, view.algorithm), fingerprint, now, |copy| {
                    with_algorithm!(copy.algorithm(), algorithm => algorithm.clear(copy));
                    let _ = copy.algorithm().restore(copy, record, recorded);
                })
            });
            drop(holds);
            match restored {
                Ok(restored) => return restored.is_some(),
                Err(Obstacle::Busy(busy)) => view.make_room(&busy, fingerprint, now),
                Err(Obstacle::NoDebtTable(of)) if !view.add_debt_table(&of, now) => return false,
                Err(Obstacle::NoDebtTable(_)) => {}
            }
            attempts = pause(attempts);
        }
    }
}

impl Members {
    /// Returns the table for debts of this meaning.
    pub(super) fn debts(&self, algorithm: &Compiled) -> Option<&Member> {
        let mut debts = self.tables.iter().filter(|member| member.debts_until.is_some());
        debts.find(|member| member.algorithm.meaning() == algorithm.meaning())
    }
}

impl Family {
    /// Adds a table for debts, unless there is one of its meaning, or the list of tables is about to be replaced. Returns false
    /// if there is no memory for it.
    fn add_debt_table(&self, of: &Compiled, budget: &Budget, now: u64) -> bool {
        let _adding = self.adding_debts.lock();
        if self.is_frozen() || self.members().debts(of).is_some() {
            return true;
        }
        let algorithm = of.wide();
        let layout = Layout::new(algorithm.words(), algorithm.free_bits());
        let has_memory = budget.has(Table::first_words(layout));
        let Some(mut table) = has_memory.then(|| Table::new(layout, budget.clone())).flatten() else { return false };
        table.overflow = Arc::clone(&self.overflow);
        let mut member = Member::new(&Arc::new(table), &algorithm, &Arc::new(Usage));
        member.debts_until = Some(Arc::new(AtomicU64::new(now)));
        self.add_for_debts(member);
        true
    }

    /// Keeps a table for debts for a charge that is about to be made. The bucket of the key is locked.
    pub(super) fn charges_debtor(&self, members: &Arc<Members>, member: &Member, now: u64) -> Result<(), Busy> {
        let Some(debts_until) = &member.debts_until else { return Ok(()) };
        debts_until.fetch_max(now, Ordering::AcqRel);
        // The list is compared with its lock held. If the table is still in it, a thread that drops the table later sees
        // the new time.
        if self.is_still(members) { Ok(()) } else { Err(Busy::Held) }
    }
}

impl<'a> FamilyView<'a> {
    /// Returns a key in another table of the same meaning if its own has no room for its state.
    pub(super) fn stays(self, location: &KeyLocation<'a>, fit: Fit) -> Option<HeldDebtor<'a>> {
        let KeyLocation::There(member, slot_ref) = location else { return None };
        if fit == Fit::Whole || member.algorithm.meaning() != self.algorithm.meaning() {
            return None;
        }
        let algorithm = self.algorithm.laid_out_as(&member.algorithm, self.family.ceiling())?;
        Some(HeldDebtor { member, algorithm, slot_ref: *slot_ref })
    }

    /// Moves a key whose debt has no room in its own table from the table of another meaning to that for debts. Returns false
    /// if there is no room for it.
    pub(super) fn move_debtor(
        self,
        holds: &mut HeldBuckets<'a>,
        members: &'a Arc<Members>,
        (member, slot_ref): (&'a Member, SlotRef<'a>),
        fingerprint: u64,
        now: u64,
    ) -> Result<bool, Busy> {
        if member.algorithm.meaning() == self.algorithm.meaning() {
            return Ok(false);
        }
        self.family.raise_ceiling(member.algorithm.spent(&holds.cells(&member.table, slot_ref), now).units);
        let from = (&*member.table, &member.algorithm, slot_ref);
        match self.move_to_debts(holds, members, (from, self.algorithm), fingerprint, now, |_| {}) {
            Ok(moved) => Ok(moved.is_some()),
            Err(Obstacle::Busy(busy)) => Err(busy),
            Err(Obstacle::NoDebtTable(of)) if self.add_debt_table(&of, now) => Err(Busy::Held),
            Err(Obstacle::NoDebtTable(_)) => Ok(false),
        }
    }

    fn add_debt_table(self, of: &Compiled, now: u64) -> bool {
        self.family.add_debt_table(of, &self.table.budget, now)
    }

    /// Decides on a key that stays in the table for debts.
    pub(super) fn decide_there(
        self,
        holds: &mut HeldBuckets<'a>,
        members: &'a Arc<Members>,
        place: HeldDebtor<'a>,
        hit: HashedHit,
        now: u64,
        mode: super::Mode,
    ) -> Result<crate::decision::Verdict, Busy> {
        let HeldDebtor { member, algorithm, slot_ref } = place;
        with_algorithm!(&algorithm, algorithm => {
            let step = algorithm.decide(&holds.cells(&member.table, slot_ref), now, hit.cost);
            if let Some(edit) = step.edit.filter(|_| mode.writes(&step.verdict)) {
                self.family.charges_debtor(members, member, now)?;
                member.table.apply(algorithm, holds, slot_ref, edit, now);
            }
            Ok(step.verdict)
        })
    }

    /// Returns the number of keys in the table for debts that are not at rest.
    pub(super) fn debtors(self, now: u64) -> usize {
        let Some(members) = self.family.if_several() else { return 0 };
        let live =
            |member: &Member| with_algorithm!(&member.algorithm, algorithm => member.table.live_keys(algorithm, now));
        members.debts(self.algorithm).map_or(0, live)
    }

    pub(super) fn make_room_for_debtor(self, fingerprint: u64, now: u64) {
        for member in self.family.members().tables.iter().filter(|member| member.debts_until.is_some()) {
            with_algorithm!(&member.algorithm, algorithm => member.table.make_room(algorithm, fingerprint, now));
        }
    }

    fn charge(
        self,
        members: &'a Arc<Members>,
        hit: HashedHit,
        now: u64,
        without_room: WithoutRoom,
    ) -> Result<Charged, Obstacle> {
        let HashedHit { fingerprint, cost: units, .. } = hit;
        let mut holds = HeldBuckets::default();
        let location = self.find(&mut holds, members, fingerprint)?;
        let is_same = |member: &Member| member.algorithm.meaning() == self.algorithm.meaning();
        // The quota that is left by the numbers of this limit.
        let mut left = None;
        let slot = match location {
            KeyLocation::There(member, slot_ref) if is_same(member) => {
                self.family.charges_debtor(members, member, now)?;
                let algorithm = self.algorithm.laid_out_as(&member.algorithm, self.family.ceiling());
                let algorithm = algorithm.unwrap_or_else(|| {
                    left = Some(self.left_of(&member.algorithm, &holds.cells(&member.table, slot_ref), now));
                    member.algorithm.clone()
                });
                HeldSlot { table: &member.table, algorithm: Cow::Owned(algorithm), slot_ref }
            }
            // Limits that are in force use this table. The limits of this view may be former ones that took a reservation.
            KeyLocation::There(member, slot_ref)
                if member.is_in_use() && !self.is_replaced_by_this(members, &location) =>
            {
                left = Some(self.left_of(&member.algorithm, &holds.cells(&member.table, slot_ref), now));
                HeldSlot { table: &member.table, algorithm: Cow::Borrowed(&member.algorithm), slot_ref }
            }
            location => match (self.hold_slot(&mut holds, Some(members), fingerprint, now)?, location) {
                (Some(slot), _) => slot,
                // The key cannot be moved, so it is charged where it is.
                (None, KeyLocation::There(member, slot_ref)) => {
                    left = Some(self.left_of(&member.algorithm, &holds.cells(&member.table, slot_ref), now));
                    HeldSlot { table: &member.table, algorithm: Cow::Borrowed(&member.algorithm), slot_ref }
                }
                (None, _) => return Ok(Charged::default()),
            },
        };
        let HeldSlot { table, algorithm, slot_ref } = slot;
        let is_shared = slot_ref.slot == table.layout.slots;
        let left = with_algorithm!(&*algorithm, algorithm => {
            let cells = holds.cells(table, slot_ref);
            let left = left.unwrap_or_else(|| algorithm.decide(&cells, now, 0).verdict.remaining);
            let owed = if is_shared { None } else { algorithm.owe(&cells, now, units) };
            if let Some(Owed { edit, counted, ceiling }) = owed {
                self.family.raise_ceiling(ceiling);
                table.apply(algorithm, &mut holds, slot_ref, edit, now);
                return Ok(Charged { counted, owed: counted.saturating_sub(left) });
            }
            left
        });
        if !is_shared && without_room == WithoutRoom::AddTable {
            let mut counted = 0;
            let from = (table, &*algorithm, slot_ref);
            let moved = self.move_to_debts(&mut holds, members, (from, &algorithm), fingerprint, now, |copy| {
                with_algorithm!(copy.algorithm(), algorithm => {
                    if let Some(owed) = algorithm.owe(copy, now, units) {
                        self.family.raise_ceiling(owed.ceiling);
                        counted = owed.counted;
                        algorithm.apply(copy, owed.edit);
                    }
                });
            })?;
            if moved.is_some() {
                return Ok(Charged { counted, owed: counted.saturating_sub(left) });
            }
        }
        // There is no memory for the debt: take as many units as are left.
        let counted = units.min(left);
        with_algorithm!(&*algorithm, algorithm => {
            if let Some(edit) = algorithm.decide(&holds.cells(table, slot_ref), now, counted).edit {
                table.apply(algorithm, &mut holds, slot_ref, edit, now);
            }
        });
        Ok(Charged { counted, owed: 0 })
    }

    /// Returns the quota that is left by the numbers of this limit, for a state written under `held`.
    fn left_of(self, held: &Compiled, cells: &impl StateWords, now: u64) -> u64 {
        let wide = self.algorithm.wide();
        let copy = Converted::of(&wide, &self.table.spill);
        let _ = wide.convert(&copy, held, cells, now);
        with_algorithm!(&wide, algorithm => algorithm.decide(&copy, now, 0).verdict.remaining)
    }

    /// Moves a key from another table to the table for debts of the meaning of `to`, and changes its state there. `None` if
    /// there is no room for it.
    fn move_to_debts(
        self,
        holds: &mut HeldBuckets<'a>,
        members: &'a Arc<Members>,
        (from, to): (Source<'_, 'a>, &Compiled),
        fingerprint: u64,
        now: u64,
        change: impl FnOnce(&Converted<'a>),
    ) -> Result<Option<()>, Obstacle> {
        let (table, algorithm, slot_ref) = from;
        let member = members.debts(to).ok_or_else(|| Obstacle::NoDebtTable(Box::new(to.clone())))?;
        self.family.charges_debtor(members, member, now)?;
        let copy = Converted::of(&member.algorithm, &member.table.spill);
        let fit = member.algorithm.convert(&copy, algorithm, &holds.cells(table, slot_ref), now);
        if fit == Fit::Cut && member.algorithm.meaning() != algorithm.meaning() {
            // It would take too long to be paid.
            return Ok(None);
        }
        let debts = FamilyView { table: &member.table, algorithm: &member.algorithm, ..self };
        let claimed = debts.claim_slot(holds, members, &KeyLocation::Here(slot_ref), fingerprint, now);
        let claimed = claimed.map_err(|busy| match busy {
            Busy::Crowded => Busy::CrowdedDebts,
            other => other,
        })?;
        let Some(new) = claimed else { return Ok(None) };
        change(&copy);
        debts.fill(holds, new, &copy);
        with_algorithm!(algorithm, algorithm => algorithm.clear(&holds.cells(table, slot_ref)));
        table.remove_from_old_table(holds, slot_ref);
        Ok(Some(()))
    }
}

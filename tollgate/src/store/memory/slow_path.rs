//! The slow path of a table: keys without a slot, keys of several words, and changes that are not decisions.

use super::claim::HeldBuckets;
use super::decide::{Copied, WordsView};
use super::family::{self, Family, FamilyView};
use super::table::{Busy, Found, Table, hold_unchanged, pause, unchanged};
use super::{HashedHit, Mode};
use crate::algorithm::{LimitAlgorithm, Step};
use crate::decision::{Admission, Verdict};
use crate::sync::Ordering;

impl Table {
    /// Decides on a key. `view` has the other tables of the limit, if any.
    #[inline(always)]
    pub(super) fn decide<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        view: Option<FamilyView<'_>>,
        hit: HashedHit,
        now: u64,
        mode: Mode,
    ) -> Verdict {
        match self.decide_fast(algorithm, hit.fingerprint, now, hit.cost, mode) {
            Some(verdict) => verdict,
            None => self.decide_slow(algorithm, view, hit, now, mode),
        }
    }

    fn decide_slow<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        view: Option<FamilyView<'_>>,
        hit: HashedHit,
        now: u64,
        mode: Mode,
    ) -> Verdict {
        let HashedHit { fingerprint, cost, .. } = hit;
        let mut sought = self.find(fingerprint);
        let mut attempts = 0;
        // After a lost race, lock first and then compute, so as not to lose the next race too.
        let mut claim_first = algorithm.must_lock();
        loop {
            let decided = match (sought, view) {
                (Some(found), _) => self.decide_found(algorithm, found, now, cost, mode, &mut claim_first),
                (None, Some(view)) if !view.family.is_alone() => {
                    let decided = family::decide(view, hit, now, mode);
                    self.maintain(algorithm, now);
                    decided
                }
                (None, view) => self.decide_without_slot(algorithm, view, fingerprint, now, cost, mode),
            };
            if let Some(verdict) = decided {
                return verdict;
            }
            attempts = pause(attempts);
            sought = self.find(fingerprint);
        }
    }

    /// Decides on a key that was found. `None` if its bucket has changed in the meantime.
    #[inline(always)]
    fn decide_found<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        found: Found<'_>,
        now: u64,
        cost: u64,
        mode: Mode,
        claim_first: &mut bool,
    ) -> Option<Verdict> {
        if self.layout.tags != 0 {
            let word_ref = self.word_ref(found);
            return self.decide_word(algorithm, word_ref, word_ref.word.load(Ordering::Relaxed), now, cost, mode).ok();
        }
        let Found { bucket, slot, header } = found;
        let cells = self.slot(bucket, slot);
        if *claim_first {
            let mut held = hold_unchanged(bucket, header)?;
            let Step { verdict, edit } = algorithm.decide(&cells, now, cost);
            if let Some(edit) = edit.filter(|_| mode.writes(&verdict)) {
                held.mark_written();
                algorithm.apply(&cells, edit);
            }
            return Some(verdict);
        }
        let Step { verdict, edit } = algorithm.decide(&cells, now, cost);
        match edit.filter(|_| mode.writes(&verdict)) {
            None => unchanged(bucket, header).then_some(verdict),
            Some(edit) => {
                *claim_first = true;
                let mut held = hold_unchanged(bucket, header)?;
                held.mark_written();
                algorithm.apply(&cells, edit);
                Some(verdict)
            }
        }
    }

    /// Decides on a key without a slot. `None` if the family has other tables by now, which may have the key.
    #[cold]
    #[inline(never)]
    fn decide_without_slot<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        view: Option<FamilyView<'_>>,
        fingerprint: u64,
        now: u64,
        cost: u64,
        mode: Mode,
    ) -> Option<Verdict> {
        let mut attempts = 0;
        while view.is_none_or(|view| view.family.is_alone()) {
            let verdict = self.peek_without_slot(algorithm, fingerprint, now, cost);
            if matches!(verdict.admission, Admission::NoRoom { .. }) && mode != Mode::Peek {
                self.overflow.count_denial();
            }
            if mode != Mode::Take || cost == 0 || !verdict.is_allowed() {
                return Some(verdict);
            }
            match self.claim_and_take(algorithm, view, fingerprint, now, cost) {
                Ok(verdict) => {
                    self.maintain(algorithm, now);
                    return Some(verdict);
                }
                Err(Busy::Crowded) => self.make_room(algorithm, fingerprint, now),
                // The only table of its limit is not for debts.
                Err(Busy::Held | Busy::CrowdedDebts) => {}
            }
            attempts = pause(attempts);
        }
        None
    }

    fn claim_and_take<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        view: Option<FamilyView<'_>>,
        fingerprint: u64,
        now: u64,
        cost: u64,
    ) -> Result<Verdict, Busy> {
        let mut holds = HeldBuckets::default();
        let home = holds.hold_home(self, fingerprint)?;
        // With the home bucket locked, no thread adds the key to another table.
        if view.is_some_and(|view| !view.family.is_alone()) {
            return Err(Busy::Held);
        }
        let Some(slot_ref) = self.hold_slot(algorithm, &mut holds, fingerprint, now)? else {
            return Ok(self.lose_change(algorithm, home, now));
        };
        let Step { verdict, edit } = algorithm.decide(&holds.cells(self, slot_ref), now, cost);
        if let Some(edit) = edit {
            self.apply(algorithm, &mut holds, slot_ref, edit, now);
        }
        Ok(self.verdict_at(slot_ref, verdict))
    }

    /// Changes the words of a key. A key without a slot gets one first, unless its floor is idle. Returns false if the
    /// family has other tables by now, which may have the key.
    pub(super) fn change<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        family: Option<&Family>,
        fingerprint: u64,
        now: u64,
        change: impl Fn(&WordsView<'_, '_>),
    ) -> bool {
        let mut attempts = 0;
        loop {
            let is_changed = match self.find(fingerprint) {
                Some(found) if self.layout.tags == 0 => self.change_held(found, &change),
                Some(found) => self.change_word(found, &change),
                None if family.is_some_and(|family| !family.is_alone()) => return false,
                None => self.change_in_new_slot(algorithm, family, fingerprint, now, &change),
            };
            if is_changed {
                return true;
            }
            attempts = pause(attempts);
        }
    }

    /// Gives a slot to a key and changes its words there. If no slot is available, nothing changes.
    #[cold]
    fn change_in_new_slot<R: LimitAlgorithm>(
        &self,
        algorithm: &R,
        family: Option<&Family>,
        fingerprint: u64,
        now: u64,
        change: impl Fn(&WordsView<'_, '_>),
    ) -> bool {
        let mut holds = HeldBuckets::default();
        let slot_ref = holds.hold_home(self, fingerprint).and_then(|home| {
            // With the home bucket locked, no thread adds the key to another table.
            if family.is_some_and(|family| !family.is_alone()) {
                return Err(Busy::Held);
            }
            let is_idle = algorithm.is_idle(&self.shared(home), now);
            // A key without a slot whose floor is idle is at rest.
            if is_idle { Ok(None) } else { self.hold_slot(algorithm, &mut holds, fingerprint, now) }
        });
        match slot_ref {
            Ok(Some(slot_ref)) if slot_ref.slot < self.layout.slots => {
                holds.write(slot_ref.bucket);
                change(&holds.cells(self, slot_ref));
                true
            }
            Ok(_) => true,
            Err(Busy::Held | Busy::CrowdedDebts) => false,
            Err(Busy::Crowded) => {
                drop(holds);
                self.make_room(algorithm, fingerprint, now);
                false
            }
        }
    }

    fn change_held(&self, found: Found<'_>, change: impl Fn(&WordsView<'_, '_>)) -> bool {
        let Some(mut held) = hold_unchanged(found.bucket, found.header) else {
            return false;
        };
        held.mark_written();
        change(&WordsView::Words(self.slot(found.bucket, found.slot)));
        true
    }

    /// Seals the word before changing it: a refund to a key that has just got the slot would create quota.
    fn change_word(&self, found: Found<'_>, change: impl Fn(&WordsView<'_, '_>)) -> bool {
        let (word_ref, tags) = (self.word_ref(found), self.layout.tags);
        let old = word_ref.word.load(Ordering::Relaxed);
        let copied = Copied::new(old & !tags, &self.spill);
        change(&WordsView::Copy(&copied));
        let is_sealed = word_ref.seal(old);
        if is_sealed {
            word_ref.unseal(old & tags | copied.state.get());
        }
        is_sealed
    }
}

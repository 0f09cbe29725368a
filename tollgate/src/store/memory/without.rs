//! Decisions on a key as if its open charges were given back.

use super::family::{Converted, FamilyView, Members};
use super::{HashedHit, MemoryStore};
use crate::algorithm::{Charge, Compiled, LimitAlgorithm, StateWords, with_algorithm};
use crate::limit::Limit;
use crate::units::Timestamp;

impl MemoryStore {
    /// Returns whether a hit would be admitted if these charges of its key were given back. Nothing changes.
    pub(crate) fn admits_without(&self, limits: &[Limit], hit: HashedHit, now: Timestamp, released: &[Charge]) -> bool {
        let Some(view) = self.family_view(limits, hit.limit) else { return false };
        let admits = view.read_key(hit.fingerprint, |members, held, cells| {
            view.admits(members, (held, cells), hit.cost, now.as_micros(), released)
        });
        // The units of a key without a slot are among those of other such keys.
        admits.unwrap_or(false)
    }
}

impl FamilyView<'_> {
    /// Decides on a copy of a state, written under `held`, from which charges are given back.
    fn admits(
        self,
        members: &Members,
        (held, cells): (&Compiled, &impl StateWords),
        cost: u64,
        now: u64,
        released: &[Charge],
    ) -> bool {
        let spill = &self.table.spill;
        let wide = self.algorithm.wide();
        // Given back under the configuration that counts them, as a refund is.
        let copy = Converted::of(held, spill);
        let _ = held.convert(&copy, held, cells, now);
        let released = released.iter().filter_map(|charge| self.still_counted(members, held, *charge, now));
        with_algorithm!(held, algorithm => for charge in released {
            if let Some(edit) = algorithm.refund(&copy, now, charge) {
                algorithm.apply(&copy, edit);
            }
        });
        let converted = Converted::of(&wide, spill);
        let _ = wide.convert(&converted, held, &copy, now);
        with_algorithm!(&wide, algorithm => algorithm.decide(&converted, now, cost).verdict.is_allowed())
    }
}

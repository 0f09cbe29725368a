//! Keys that owe units: they count more than their quota, because a cost that was known only afterwards was counted in
//! full.

use super::family::{Converted, FamilyView};
use super::{HashedHit, MemoryStore};
use crate::algorithm::{Compiled, LimitAlgorithm, StateWords, with_algorithm};
use crate::decision::{Admission, Verdict};
use crate::limit::Limit;
use crate::units::Timestamp;

impl MemoryStore {
    /// Returns the microseconds until the key of a hit owes nothing, or `None` if it owes nothing now.
    pub(crate) fn owes_for(&self, limits: &[Limit], hit: HashedHit, now: Timestamp) -> Option<u64> {
        let view = self.family_view(limits, hit.limit)?;
        view.read_key(hit.fingerprint, |_, held, cells| view.wait_for_quota(held, cells, now.as_micros())).flatten()
    }
}

impl FamilyView<'_> {
    /// Decides on a copy of a state, written under `held`. With a quota of one unit more, a request of one unit is denied
    /// exactly while the key owes.
    fn wait_for_quota(self, held: &Compiled, cells: &impl StateWords, now: u64) -> Option<u64> {
        let larger = self.algorithm.wide().with_one_more();
        let copy = Converted::of(&larger, &self.table.spill);
        let _ = larger.convert(&copy, held, cells, now);
        let verdict: Verdict = with_algorithm!(&larger, algorithm => algorithm.decide(&copy, now, 1).verdict);
        match verdict.admission {
            Admission::Denied { retry_after } => Some(retry_after),
            _ => None,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::limiter::reservation::Settlement;
    use crate::limiter::reservation::debts_of_490::{MICRO, START, limits};
    use crate::units::MINUTE;
    use crate::{Hit, Limit, Limiter, ManualClock};

    #[test]
    fn a_key_owes_until_it_counts_no_more_than_its_quota() {
        for (algorithm, wait) in limits() {
            let clock = ManualClock::at(START);
            let limit = Limit::new("limit", algorithm).unwrap();
            let limiter = Limiter::builder().limit(limit).clock(clock.clone()).build().unwrap();
            let id = limiter.id("limit").unwrap();
            let owes = || limiter.owes_for(limiter.hash_hit(&Hit::new(id, "key")));
            assert_eq!(owes(), None, "{algorithm:?}");
            let reserved = limiter.reserve("key", 10, MINUTE).unwrap();
            assert_eq!(owes(), None, "{algorithm:?}: the quota is not a debt");
            assert_eq!(limiter.settle(reserved, 500), Settlement::Owed { units: 490 }, "{algorithm:?}");
            assert_eq!(owes(), Some(wait), "{algorithm:?}");
            clock.set(START.saturating_add(wait - MICRO));
            assert_eq!(owes(), Some(MICRO), "{algorithm:?}");
            clock.set(START.saturating_add(wait));
            assert_eq!(owes(), None, "{algorithm:?}");
        }
    }
}

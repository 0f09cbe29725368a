//! Whether a key owes units: it counts more than its quota, because a cost that was known only afterwards was counted in
//! full.

use super::claim::HeldBuckets;
use super::family::{Converted, FamilyView, KeyLocation};
use super::table::pause;
use super::{HashedHit, MemoryStore};
use crate::algorithm::{Compiled, LimitAlgorithm, StateWords, with_algorithm};
use crate::decision::{Admission, Verdict};
use crate::limit::Limit;
use crate::units::Timestamp;

impl MemoryStore {
    /// Returns the microseconds until the key of a hit counts no more than its quota, or `None` if it does not now.
    pub(crate) fn owes_for(&self, limits: &[Limit], hit: HashedHit, now: Timestamp) -> Option<u64> {
        let view = self.family_view(limits, hit.limit)?;
        let mut attempts = 0;
        loop {
            let members = view.family.members();
            let view = view.with_members(&members);
            let mut holds = HeldBuckets::default();
            let location = view.find(&mut holds, &members, hit.fingerprint);
            let wait = location.map(|location| match location {
                KeyLocation::Here(slot_ref) => {
                    view.wait_for_quota(view.algorithm, &holds.cells(view.table, slot_ref), now.as_micros())
                }
                KeyLocation::There(member, slot_ref) => {
                    view.wait_for_quota(&member.algorithm, &holds.cells(&member.table, slot_ref), now.as_micros())
                }
                KeyLocation::Nowhere => None,
            });
            if let Ok(wait) = wait {
                return wait;
            }
            attempts = pause(attempts);
        }
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
    use std::time::Duration;

    use crate::limiter::reservation::Settlement;
    use crate::units::{MINUTE, SECOND};
    use crate::{
        Algorithm, FixedWindow, Hit, LeakyBucket, Limit, Limiter, ManualClock, Rate, SlidingWindowCounter,
        SlidingWindowLog, Timestamp, TokenBucket,
    };

    /// A whole hour.
    const START: Timestamp = Timestamp::from_secs(1_700_000_040 - 1_700_000_040 % 3600);

    const MICRO: Duration = Duration::from_micros(1);

    #[test]
    fn a_key_owes_until_it_counts_no_more_than_its_quota() {
        let rate = Rate::new(10, MINUTE);
        let limits: [(Algorithm, Duration); 9] = [
            (TokenBucket::new(10, rate).into(), 490 * 6 * SECOND),
            (TokenBucket::new(10, rate).interval().into(), 49 * MINUTE),
            (LeakyBucket::new(10, rate).into(), 490 * 6 * SECOND),
            (LeakyBucket::new(10, rate).queue(MINUTE).into(), 490 * 6 * SECOND),
            (FixedWindow::new(10, MINUTE).into(), MINUTE),
            (FixedWindow::new(10, MINUTE).from_first_request().into(), MINUTE),
            (SlidingWindowLog::new(10, MINUTE).into(), MINUTE),
            (SlidingWindowLog::new(10, MINUTE).count_denied().into(), MINUTE),
            // Less than 11 units of the segment of 20 seconds are left: 500 × 20 s × 44 / 1000 s.
            (SlidingWindowCounter::new(10, MINUTE).segments(3).into(), 79 * SECOND + SECOND * 14 / 25 + MICRO),
        ];
        for (algorithm, wait) in limits {
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

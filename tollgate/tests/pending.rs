//! Units that are reserved and not settled yet: a denial that only they cause is pending, and ends with their deadline.

mod common;

use common::Rig;
use proptest::prelude::*;
use tollgate::{
    Algorithm, DenialReason, FixedWindow, HOUR, Hit, LeakyBucket, Limit, Limiter, MINUTE, ManualClock, Rate, SECOND,
    Settlement, SlidingWindowCounter, SlidingWindowLog, Timestamp, TokenBucket,
};

fn algorithms() -> Vec<Algorithm> {
    let rate = Rate::new(10, HOUR);
    vec![
        TokenBucket::new(10, rate).into(),
        TokenBucket::new(10, rate).interval().into(),
        LeakyBucket::new(10, rate).into(),
        FixedWindow::new(10, HOUR).into(),
        FixedWindow::new(10, HOUR).from_first_request().into(),
        SlidingWindowLog::new(10, HOUR).into(),
        SlidingWindowLog::new(10, HOUR).count_denied().into(),
        SlidingWindowCounter::new(10, HOUR).into(),
        SlidingWindowCounter::new(10, HOUR).segments(6).into(),
    ]
}

#[test]
fn a_denial_for_pending_units_waits_for_their_deadline() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        let reservation = rig.limiter.reserve("ann", 10, MINUTE).expect("the whole quota is left");
        rig.clock.advance(20 * SECOND);
        let denied = rig.limiter.check("ann");
        assert_eq!(denied.reason(), Some(DenialReason::Pending), "{algorithm:?}");
        assert_eq!(denied.retry_after(), Some(40 * SECOND), "{algorithm:?}");
        assert_eq!(denied.remaining(), 0, "{algorithm:?}");
        assert!(rig.limiter.check("bob").is_allowed(), "{algorithm:?}");
        if algorithm != SlidingWindowLog::new(10, HOUR).count_denied().into() {
            assert_eq!(rig.limiter.settle(reservation, 9), Settlement::Settled);
            assert!(rig.limiter.check("ann").is_allowed(), "{algorithm:?}");
            assert_eq!(rig.limiter.check("ann").reason(), Some(DenialReason::Limited), "{algorithm:?}");
        }
    }
}

#[test]
fn units_are_spent_after_the_deadline_and_when_the_reservation_is_dropped() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        let held = rig.limiter.reserve("ann", 10, MINUTE).expect("the whole quota is left");
        let dropped = rig.limiter.reserve("bob", 10, MINUTE).expect("the whole quota is left");
        drop(dropped);
        assert_eq!(rig.limiter.check("bob").reason(), Some(DenialReason::Limited), "{algorithm:?}");
        assert!(rig.limiter.check("bob").retry_after().unwrap() > 2 * MINUTE, "{algorithm:?}");
        rig.clock.advance(MINUTE);
        assert_eq!(rig.limiter.check("ann").reason(), Some(DenialReason::Limited), "{algorithm:?}");
        drop(held);
    }
}

#[test]
fn a_cost_that_does_not_fit_without_the_pending_units_either_is_limited() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        assert!(rig.limiter.check_n("ann", 5).is_allowed());
        let reservation = rig.limiter.reserve("ann", 5, MINUTE).expect("5 of 10 are left");
        let reason =
            |cost| rig.limiter.decide_now(&[Hit::new(rig.limiter.id("limit").unwrap(), "ann").cost(cost)]).reason();
        assert_eq!(reason(6), Some(DenialReason::Limited), "{algorithm:?}");
        if algorithm != SlidingWindowLog::new(10, HOUR).count_denied().into() {
            assert_eq!(reason(5), Some(DenialReason::Pending), "{algorithm:?}");
        }
        assert_eq!(reason(11), Some(DenialReason::NeverFits), "{algorithm:?}");
        drop(reservation);
    }
}

#[test]
fn the_wait_ends_with_the_first_deadlines_that_suffice() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        let _held = [(4, 30), (3, 10), (3, 20)]
            .map(|(cost, seconds)| rig.limiter.reserve("ann", cost, seconds * SECOND).expect("there is enough left"));
        for (cost, seconds) in [(3, 10), (4, 20), (6, 20), (7, 30), (10, 30)] {
            let denied = rig.limiter.decide_now(&[Hit::new(rig.limiter.id("limit").unwrap(), "ann").cost(cost)]);
            if algorithm != SlidingWindowLog::new(10, HOUR).count_denied().into() {
                assert_eq!(denied.retry_after(), Some(seconds * SECOND), "{algorithm:?} {cost}");
            }
        }
    }
}

#[test]
fn a_key_that_owes_is_limited_although_units_are_pending() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        let [_held, other] = [1, 1].map(|cost| rig.limiter.reserve("ann", cost, MINUTE).expect("there is enough left"));
        assert_eq!(rig.limiter.settle(other, 1000), Settlement::Owed { units: 991 });
        assert_eq!(rig.limiter.check("ann").reason(), Some(DenialReason::Limited), "{algorithm:?}");
    }
}

#[test]
fn the_denial_of_a_spent_limit_goes_before_that_of_pending_units() {
    let limit = |name, window| Limit::new(name, FixedWindow::new(2, window)).expect("a valid limit");
    let clock = ManualClock::at(Timestamp::from_secs(1_700_000_040));
    let limiter = Limiter::builder().limit(limit("pending", HOUR)).limit(limit("spent", HOUR)).clock(clock);
    let limiter = limiter.build().expect("a valid limiter");
    let (pending, spent) = (limiter.id("pending").unwrap(), limiter.id("spent").unwrap());
    let _held = limiter.reserve_hits(&[Hit::new(pending, "ann").cost(2)], MINUTE).expect("it fits");
    let both = || limiter.decide_now(&[Hit::new(pending, "ann"), Hit::new(spent, "ann")]);
    assert_eq!((both().limit(), both().reason()), (Some(pending), Some(DenialReason::Pending)));
    assert!(limiter.decide_now(&[Hit::new(spent, "ann").cost(2)]).is_allowed());
    assert_eq!((both().limit(), both().reason()), (Some(spent), Some(DenialReason::Limited)));
}

#[test]
fn a_reload_keeps_units_pending() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        let reservation = rig.limiter.reserve("ann", 10, MINUTE).expect("the whole quota is left");
        for other in algorithms() {
            let limits = vec![Limit::new("limit", other).expect("a valid limit")];
            let changed = rig.limiter.with_limits(limits).expect("a valid limiter");
            let denied = changed.check("ann");
            assert!(!denied.is_allowed());
        }
        let same = rig.limiter.with_limits(vec![Limit::new("limit", algorithm).unwrap()]).expect("a valid limiter");
        assert_eq!(same.check("ann").reason(), Some(DenialReason::Pending), "{algorithm:?}");
        assert_eq!(same.settle(reservation, 0), Settlement::Settled);
    }
}

/// Reserve 5, reset, take 3, settle the reservation: the 3 stay spent.
#[test]
fn a_reservation_from_before_a_reset_gives_nothing_back() {
    for algorithm in algorithms() {
        let rig = Rig::of(algorithm);
        let reservation = rig.limiter.reserve("ann", 5, MINUTE).expect("5 of 10 are left");
        rig.limiter.reset("ann");
        assert!(rig.limiter.check_n("ann", 3).is_allowed());
        assert_eq!(rig.limiter.settle(reservation, 0), Settlement::Settled);
        assert_eq!(rig.limiter.peek("ann").remaining(), 7, "{algorithm:?}");
    }
}

proptest! {
    /// Nothing is minted: whether units are pending changes the reason and the wait of a denial, and nothing else.
    #[test]
    fn pending_units_change_no_decision(costs in prop::collection::vec((0..=6_u64, any::<bool>(), 0..=900_u64), 1..40)) {
        for algorithm in algorithms() {
            let (with, without) = (Rig::of(algorithm), Rig::of(algorithm));
            let mut held = Vec::new();
            for &(cost, is_held, seconds) in &costs {
                let one = with.limiter.reserve("ann", cost, HOUR);
                let other = without.limiter.reserve("ann", cost, HOUR);
                prop_assert_eq!(one.is_ok(), other.is_ok());
                if is_held {
                    held.extend(one);
                }
                let (one, other) = (with.limiter.peek("ann"), without.limiter.peek("ann"));
                prop_assert_eq!((one.remaining(), one.reset_after()), (other.remaining(), other.reset_after()));
                with.clock.advance(SECOND * seconds as u32);
                without.clock.advance(SECOND * seconds as u32);
            }
        }
    }
}

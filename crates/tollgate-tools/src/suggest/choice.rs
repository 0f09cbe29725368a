//! Chooses the numbers of a bucket and of a window from the demand of the clients.
//!
//! A bucket has two numbers, and each refill has a smallest capacity that leaves the wanted share of the clients
//! untouched: the slower the refill, the larger the capacity. All these pairs are equally good for the clients, so the
//! choice is the one that admits least from a client that takes all it can get: the least `capacity + refill`, which is
//! the most that a bucket admits in one window. Refills so slow that a bucket takes longer than ten windows to be full
//! again are left out. They fit clients that the log shows once, and deny the same clients when they come back.

use tollgate_rules::internal::demand::{Cover, Demand};

/// The most windows that an empty bucket takes to be full again.
pub(super) const MAX_REFILL_WINDOWS: u32 = 10;

/// The refills of a decade. Neighbours differ by about 60 %, and the sum of capacity and refill by much less.
const STEPS: [u64; 5] = [10, 15, 25, 40, 60];
/// From 1 to 600,000 in a window.
const DECADES: u32 = 6;

/// The numbers of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Bucket {
    /// The tokens of a full bucket.
    pub capacity: u64,
    /// Units in each window.
    pub refill: u64,
}

/// The chosen numbers.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The token bucket.
    pub bucket: Bucket,
    /// The limit of a sliding window.
    pub window: u64,
    /// The capacity that each refill needs, slowest first.
    pub curve: Vec<Bucket>,
}

/// Returns the refills that are compared, in units per window, slowest first.
pub(super) fn refills() -> impl Iterator<Item = u64> {
    // Rounded up in the first decade: 1, 2, 3, 4, 6.
    (0..DECADES).flat_map(|decade| STEPS.map(|step| (step * 10u64.pow(decade)).div_ceil(10)))
}

impl Choice {
    /// Chooses numbers by a demand that was measured for a bucket of each of [`refills`], and then for a window.
    pub(super) fn of(demand: &Demand, cover: Cover) -> Self {
        let needed = |index: usize| demand.needs(index).quantile(cover).unwrap_or(1).max(1);
        let curve = refills().enumerate().map(|(index, refill)| Bucket { capacity: needed(index), refill });
        let mut curve: Vec<Bucket> = curve.collect();
        let window = rounded_up(needed(curve.len()));
        let bucket = best(&curve);
        // Beyond this refill, capacity does not get smaller.
        if let Some(least) = curve.last().map(|last| last.capacity) {
            let enough = curve.iter().position(|pair| pair.capacity == least).unwrap_or_default();
            curve.truncate(enough + 1);
        }
        Self { bucket: Bucket { capacity: rounded_up(bucket.capacity), ..bucket }, window, curve }
    }
}

/// Returns the pair with the least sum whose refill is not too slow. Of equal sums, the smaller capacity.
fn best(curve: &[Bucket]) -> Bucket {
    let is_fast_enough = |pair: &&Bucket| pair.capacity <= pair.refill * u64::from(MAX_REFILL_WINDOWS);
    let best = curve.iter().filter(is_fast_enough).min_by_key(|pair| (pair.capacity + pair.refill, pair.capacity));
    best.or(curve.last()).copied().unwrap_or(Bucket { capacity: 1, refill: 1 })
}

/// Rounds up to two digits, which people can remember.
fn rounded_up(number: u64) -> u64 {
    let unit = 10u64.pow(number.checked_ilog10().unwrap_or(0).saturating_sub(1));
    number.div_ceil(unit) * unit
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tollgate::{MINUTE, Rate, Timestamp};
    use tollgate_rules::internal::demand::Measure;

    use super::*;

    fn demand() -> Demand {
        let buckets = refills().map(|refill| Measure::bucket(Rate::new(refill, MINUTE)));
        Demand::new(buckets.chain([Measure::sliding_window(MINUTE)]), 10_000)
    }

    fn cover() -> Cover {
        Cover::new(0.99).unwrap()
    }

    #[test]
    fn refills_are_distinct_and_ascending() {
        let refills: Vec<u64> = refills().collect();
        assert!(refills.is_sorted_by(|a, b| a < b), "{refills:?}");
        assert_eq!((refills[0], refills[refills.len() - 1]), (1, 600_000));
    }

    #[test]
    fn numbers_are_rounded_up_to_two_digits() {
        for (number, rounded) in [(1, 1), (9, 9), (10, 10), (99, 99), (100, 100), (101, 110), (1234, 1300)] {
            assert_eq!(rounded_up(number), rounded);
        }
    }

    #[test]
    fn steady_clients_get_a_small_capacity() {
        let mut demand = demand();
        for client in 0..100u64 {
            for second in 0..3600 {
                demand.observe(client << 40, 1, Timestamp::from_secs(second));
            }
        }
        // A counter has the whole window before, and the first request of this one, at each boundary.
        let choice = Choice::of(&demand, cover());
        assert_eq!((choice.bucket, choice.window), (Bucket { capacity: 1, refill: 60 }, 61));
    }

    #[test]
    fn clients_that_come_in_bursts_get_a_capacity() {
        let mut demand = demand();
        for client in 0..100u64 {
            for minute in 0..60 {
                demand.observe(client << 40, 30, Timestamp::from_secs(minute * 60 * 5));
            }
        }
        // Thirty at once every five minutes: six in a minute on average.
        let choice = Choice::of(&demand, cover());
        assert_eq!((choice.bucket, choice.window), (Bucket { capacity: 30, refill: 6 }, 30));
    }

    #[test]
    fn clients_seen_once_do_not_get_a_bucket_that_takes_hours_to_refill() {
        let mut demand = demand();
        (0..100u64).for_each(|client| demand.observe(client << 40, 500, Timestamp::from_secs(client)));
        // Needs of 500 are rounded up to the bounds of the histogram, and then to two digits.
        assert_eq!(Choice::of(&demand, cover()).bucket, Bucket { capacity: 510, refill: 60 });
    }

    proptest! {
        /// Capacities fall as refills rise, and the chosen pair is on the curve or above it.
        #[test]
        fn the_choice_is_on_the_curve(requests in prop::collection::vec((0u64..50, 0u64..7200, 1u64..40), 1..200)) {
            let mut demand = demand();
            let mut requests = requests;
            requests.sort_by_key(|(_, second, _)| *second);
            for (client, second, cost) in requests {
                demand.observe(client << 40, cost, Timestamp::from_secs(second));
            }
            let choice = Choice::of(&demand, cover());
            prop_assert!(choice.curve.is_sorted_by(|a, b| a.refill < b.refill && a.capacity >= b.capacity));
            let needed = choice.curve.iter().rev().find(|pair| pair.refill <= choice.bucket.refill);
            prop_assert!(needed.is_none_or(|needed| needed.capacity <= choice.bucket.capacity));
        }
    }
}

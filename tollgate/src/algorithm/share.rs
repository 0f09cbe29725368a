//! The share of a limit for one of several processes that count by themselves.
//!
//! Quotas are divided and rounded up, so that every node admits something: n nodes together admit at most n - 1 units
//! more than the limit. Rates of buckets are divided exactly, so this surplus does not grow with time. Limits per
//! window or per refill interval have the surplus in each window or interval.

use super::Algorithm;
use crate::rate::Rate;
use crate::units::{MAX_SPAN, whole_micros};

impl Algorithm {
    /// Returns the share for one of `nodes` processes. A ban is not divided: every process counts the strikes that it
    /// sees.
    pub(crate) fn share(&self, nodes: u32) -> Self {
        let mut share = *self;
        match &mut share {
            Self::TokenBucket(spec) => *spec = spec.share(nodes),
            Self::LeakyBucket(spec) => *spec = spec.share(nodes),
            Self::FixedWindow(spec) => spec.limit = quota(spec.limit, nodes),
            Self::SlidingWindowLog(spec) => spec.limit = quota(spec.limit, nodes),
            Self::SlidingWindowCounter(spec) => spec.limit = quota(spec.limit, nodes),
            Self::Ban(_) => {}
        }
        // With its capacity rounded up, a bucket of decades may take longer to fill than is allowed.
        if share.compile().is_err() {
            match &mut share {
                Self::TokenBucket(spec) => spec.capacity = 1,
                Self::LeakyBucket(spec) => spec.capacity = 1,
                _ => {}
            }
        }
        share
    }
}

pub(super) fn quota(quota: u64, nodes: u32) -> u64 {
    quota.div_ceil(u64::from(nodes.max(1)))
}

/// Returns an exact fraction of a rate. If its period would exceed the longest allowed one, the result is at most one
/// unit per longest period too high.
pub(super) fn rate(rate: Rate, nodes: u32) -> Rate {
    let period = rate.period().saturating_mul(nodes.max(1));
    if period <= MAX_SPAN {
        return Rate::new(rate.count(), period);
    }
    let count = u128::from(rate.count()) * u128::from(whole_micros(MAX_SPAN)) / period.as_micros().max(1);
    Rate::new(u64::try_from(count).unwrap_or(u64::MAX).max(1), MAX_SPAN)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::{DAY, LeakyBucket, Limit, SECOND, SlidingWindowCounter, SlidingWindowLog, TokenBucket};

    #[test]
    fn quotas_are_rounded_up_and_rates_are_exact() {
        let bucket = Algorithm::from(TokenBucket::new(10, Rate::per_second(100)));
        assert_eq!(bucket.share(3), TokenBucket::new(4, Rate::new(100, 3 * SECOND)).into());
        let portions = Algorithm::from(TokenBucket::new(10, Rate::per_second(7)).interval());
        assert_eq!(portions.share(3), TokenBucket::new(4, Rate::per_second(3)).interval().into());
        let queue = Algorithm::from(LeakyBucket::new(9, Rate::per_second(1)).queue(DAY));
        assert_eq!(queue.share(3), LeakyBucket::new(3, Rate::new(1, 3 * SECOND)).queue(DAY).into());
        let log = Algorithm::from(SlidingWindowLog::new(2, DAY).count_denied());
        assert_eq!(log.share(3), SlidingWindowLog::new(1, DAY).count_denied().into());
        let counter = Algorithm::from(SlidingWindowCounter::new(7, DAY).segments(6));
        assert_eq!(counter.share(2), SlidingWindowCounter::new(4, DAY).segments(6).into());
    }

    proptest! {
        #[test]
        fn every_share_is_a_valid_limit_and_together_they_are_little_more_than_the_whole(
            capacity in 1_u64..=1 << 32, count in 1_u64..=1 << 32, period in 1_000_u64..=whole_micros(MAX_SPAN),
            nodes in 1_u32..=10_000,
        ) {
            let rate = Rate::new(count, Duration::from_micros(period));
            let bucket = TokenBucket::new(capacity, rate);
            for whole in [bucket.into(), bucket.interval().into(), Algorithm::from(LeakyBucket::new(capacity, rate))] {
                if Limit::new("whole", whole).is_ok() {
                    let share = Limit::new("share", whole.share(nodes)).expect("a share of a valid limit is valid");
                    prop_assert!(share.quota() * u64::from(nodes) < capacity + u64::from(nodes));
                }
            }
        }
    }
}

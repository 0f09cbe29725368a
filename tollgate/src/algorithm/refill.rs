//! The time until more quota is available, computed from a decision instead of the state.
//!
//! Decisions already contain the time until the whole quota is back. The time until the next unit needs a division, and
//! only some responses contain it, so it is computed on demand.

use super::{Algorithm, mul_div};
use crate::decision::Decision;

/// How the quota of a limit comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refill {
    /// Unit by unit, at a steady rate of `units` per `micros`.
    Smooth {
        /// The units that come back in each period.
        units: u64,
        /// The period in microseconds.
        micros: u64,
    },
    /// In portions, one at the end of each period.
    Portions {
        /// The units of a portion.
        units: u64,
        /// The period in microseconds.
        micros: u64,
    },
    /// All of it at one moment.
    AtOnce,
    /// As spent units leave a sliding window of this many microseconds.
    Sliding {
        /// The window in microseconds.
        window: u64,
    },
}

impl Refill {
    /// Returns how the quota of an algorithm comes back.
    pub fn of(algorithm: &Algorithm) -> Self {
        match algorithm {
            Algorithm::TokenBucket(spec) => spec.refill(),
            Algorithm::LeakyBucket(spec) => spec.refill(),
            Algorithm::FixedWindow(_) | Algorithm::Ban(_) => Self::AtOnce,
            Algorithm::SlidingWindowLog(_) | Algorithm::SlidingWindowCounter(_) => {
                Self::Sliding { window: crate::units::whole_micros(algorithm.window()) }
            }
        }
    }

    /// Returns the time in microseconds until more than `decision.remaining()` is available, or for a sliding window a
    /// time within which no more than that should be used. It is exact, but for a bucket it may be a microsecond late.
    pub fn more_after(self, decision: &Decision) -> u64 {
        let spent = decision.quota().saturating_sub(decision.remaining());
        let full_after = decision.verdict.reset_after;
        // The time from the next unit or portion until the whole quota is back.
        let later = match self {
            Self::Smooth { units, micros } => mul_div(spent.saturating_sub(1), micros, units),
            Self::Portions { units, micros } => spent.div_ceil(units).saturating_sub(1).saturating_mul(micros),
            Self::AtOnce => 0,
            Self::Sliding { window } => return full_after.min(window),
        };
        full_after.saturating_sub(later)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::{FixedWindow, LeakyBucket, Limit, Limiter, ManualClock, Rate, Timestamp, TokenBucket};

    fn algorithms() -> impl Strategy<Value = Algorithm> {
        let numbers = (1_u64..50, 1_u64..40, 1_u64..5_000);
        (0..4, numbers).prop_map(|(kind, (quota, count, millis))| {
            let rate = Rate::new(count, Duration::from_millis(millis));
            match kind {
                0 => TokenBucket::new(quota, rate).into(),
                1 => TokenBucket::new(quota, rate).interval().into(),
                2 => LeakyBucket::new(quota, rate).into(),
                _ => FixedWindow::new(quota, Duration::from_millis(millis)).into(),
            }
        })
    }

    proptest! {
        /// The next unit is available after exactly that time, according to the limiter itself.
        #[test]
        fn more_is_available_then_and_not_before(
            algorithm in algorithms(),
            requests in prop::collection::vec((0_u64..2_000_000, 1_u64..6), 1..20),
        ) {
            let refill = Refill::of(&algorithm);
            let clock = ManualClock::at(Timestamp::from_secs(1_700_000_000));
            let limit = Limit::new("limit", algorithm).unwrap();
            let quota = limit.quota();
            let limiter = Limiter::builder().limit(limit).clock(clock.clone()).build().unwrap();
            for (micros, cost) in requests {
                clock.advance(Duration::from_micros(micros));
                let decision = limiter.check_n("key", cost);
                if !decision.is_allowed() || decision.remaining() == quota {
                    continue;
                }
                // Denied, so it takes nothing.
                let exact = limiter.check_n("key", decision.remaining() + 1).retry_after().unwrap();
                let exact = u64::try_from(exact.as_micros()).unwrap();
                let derived = refill.more_after(&decision);
                prop_assert!(derived == exact || derived == exact + 1, "{derived} instead of {exact}");
            }
        }
    }
}

//! Rates are exact ratios: after any number of decisions, the count is exact to the unit.

use std::time::Duration;

use tollgate::{Algorithm, LeakyBucket, Rate, TokenBucket};

use crate::common::{Rig, START_US};

/// Takes everything that is left every `gap_us`, until `decisions` decisions are made. The sum must be the whole part
/// of `capacity + rate × time` at every moment.
fn admits_the_ideal_count(algorithm: impl Into<Algorithm>, capacity: u64, rate: Rate, gap_us: u64, decisions: u64) {
    let rig = Rig::of(algorithm);
    let (mut elapsed, mut admitted, mut made) = (0_u64, 0_u64, 0_u64);
    while made < decisions {
        while rig.ask(START_US + elapsed, 1).allowed {
            admitted += 1;
            made += 1;
        }
        made += 1;
        let came = u128::from(elapsed) * u128::from(rate.count()) / rate.period().as_micros();
        assert_eq!(u128::from(admitted), u128::from(capacity) + came, "{rate} after {elapsed} µs");
        elapsed += gap_us;
    }
}

#[test]
fn seven_a_second_is_seven_a_second_after_a_million_decisions() {
    let rate = Rate::per_second(7);
    // A little over eight units are refilled in a gap, so a bucket of twenty is never full and loses none.
    admits_the_ideal_count(TokenBucket::new(20, rate), 20, rate, 1_234_567, 400_000);
    admits_the_ideal_count(LeakyBucket::new(20, rate), 20, rate, 1_234_567, 400_000);
    admits_the_ideal_count(TokenBucket::new(20, rate), 20, rate, 997, 400_000);
}

#[test]
fn rates_that_divide_nothing_do_not_drift() {
    let rates = [
        (Rate::new(1, Duration::from_secs(3)), 1_000_003),
        (Rate::per_second(999_983), 17),
        (Rate::per_hour(4_294_967_291), 13),
        (Rate::per_day(1_000_003), 86_413),
    ];
    for (rate, gap_us) in rates {
        admits_the_ideal_count(TokenBucket::new(100, rate), 100, rate, gap_us, 100_000);
        admits_the_ideal_count(LeakyBucket::new(100, rate), 100, rate, gap_us, 100_000);
    }
}

//! Records: the state of a key for snapshots, as spent units and their times.
//!
//! A record does not depend on the layout of words or on the time of its limiter: its times are those of the wall
//! clock. So another process with another version of the layout can read it.
//!
//! Deliberately not here: the file format, and conversion to other numbers. A record is read with the numbers it was
//! written with; then `conversion.rs` applies.

use std::time::Duration;

use smallvec::{SmallVec, smallvec};

use super::arithmetic::{Fit, Spent};
use super::sliding_window_log::Counted;
use super::{
    Algorithm, Ban, Compiled, FixedWindow, LeakyBucket, LimitAlgorithm, SlidingWindowCounter, SlidingWindowLog,
    StateWords, TokenBucket,
};
use crate::rate::Rate;
use crate::units::{MIN_SPAN, Timestamp};

/// Pairs of a time and the units spent then. For a bucket, the high and low half of its debt instead.
pub(crate) type Record = SmallVec<[(u64, u64); 2]>;

/// Most units at one time in a record. A file may claim any number.
const MOST_UNITS: u64 = 1 << 48;

/// The algorithm of a limit and its numbers, as stored in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Numbers {
    pub(crate) kind: u8,
    pub(crate) values: [u64; 4],
}

/// The time at which records were written, in the time of the limiter that reads them, and the offset of that time from
/// the wall clock of the records.
#[derive(Clone, Copy)]
pub(crate) struct RecordedAt {
    pub(crate) now: u64,
    pub(crate) shift: i64,
}

impl Compiled {
    /// Returns the numbers of this limit.
    pub(crate) fn numbers(&self) -> Numbers {
        let (kind, values) = match self {
            Self::Meter(_) | Self::WideMeter(_) => match self.bucket() {
                Some(bucket) => match bucket.max_wait {
                    None => (1, [bucket.units, bucket.micros, bucket.capacity, 0]),
                    Some(max_wait) => (8, [bucket.units, bucket.micros, bucket.capacity, max_wait]),
                },
                None => (0, [0; 4]),
            },
            Self::Interval(algorithm) => (2, [algorithm.portion, algorithm.period, algorithm.capacity, 0]),
            Self::ClockWindow(algorithm) => (3, [algorithm.window, algorithm.limit, 0, 0]),
            Self::OpenedWindow(algorithm) => (4, [algorithm.window, algorithm.limit, 0, 0]),
            Self::Log(algorithm) => {
                (5, [algorithm.window, algorithm.limit, u64::from(algorithm.counted == Counted::All), 0])
            }
            Self::Counter(algorithm) => (6, [algorithm.window, algorithm.segments, algorithm.limit, 0]),
            Self::Strikes(algorithm) => (7, [algorithm.after, algorithm.within, algorithm.lasts, 0]),
        };
        Numbers { kind, values }
    }

    /// Returns the charges of a key that still count at `now`. `wall_offset` is how far the wall clock is ahead.
    pub(crate) fn record(&self, cells: &impl StateWords, now: u64, wall_offset: i64) -> Record {
        let mut record: Record = match self {
            Self::Meter(_) | Self::WideMeter(_) => {
                let debt = self.debt_at(cells, now);
                return if debt == 0 { Record::new() } else { smallvec![((debt >> 64) as u64, debt as u64)] };
            }
            Self::Interval(_) | Self::ClockWindow(_) => {
                let Spent { at, units } = self.spent(cells, now);
                smallvec![(at, units)]
            }
            Self::OpenedWindow(algorithm) => {
                let (count, _) = algorithm.count(cells, now);
                smallvec![(count.window, count.units)]
            }
            Self::Log(algorithm) => algorithm.entries(cells, now),
            Self::Counter(algorithm) => algorithm.counts(cells, now),
            Self::Strikes(algorithm) if algorithm.is_idle(cells, now) => Record::new(),
            Self::Strikes(algorithm) => smallvec![algorithm.packing.load(cells)],
        };
        record.retain(|(_, units)| *units > 0);
        for (at, _) in &mut record {
            *at = Timestamp::from_micros(*at).offset_by(wall_offset).as_micros();
        }
        record
    }

    /// Charges a key at rest with a record of the same numbers.
    pub(crate) fn restore(&self, cells: &impl StateWords, record: &[(u64, u64)], recorded: RecordedAt) -> Fit {
        let RecordedAt { now, shift } = recorded;
        if let (true, Some((high, low))) = (self.bucket().is_some(), record.first()) {
            return self.set_debt(cells, u128::from(*high) << 64 | u128::from(*low), now);
        }
        let charge = |(at, units): &(u64, u64)| {
            (Timestamp::from_micros(*at).offset_by(shift).as_micros(), (*units).min(MOST_UNITS))
        };
        let mut charges: Record = record.iter().map(charge).collect();
        charges.sort_unstable();
        match (self, charges.last()) {
            (_, None) => Fit::Whole,
            (Self::Log(algorithm), Some(newest)) => algorithm.restore(cells, &charges, now.max(newest.0)),
            (Self::Counter(algorithm), Some(newest)) => algorithm.restore(cells, &charges, now.max(newest.0)),
            (Self::Strikes(algorithm), Some((since, marks))) => algorithm.packing.store_at_most(cells, *since, *marks),
            (_, Some((at, units))) => self.charge(cells, Spent { at: *at, units: *units }, now),
        }
    }
}

impl Algorithm {
    /// Returns the algorithm with these numbers, or `None` if no algorithm is of that kind. The numbers may be invalid.
    pub(crate) fn of_numbers(numbers: Numbers) -> Option<Self> {
        let Numbers { kind, values: [first, second, third, fourth] } = numbers;
        let span = Duration::from_micros;
        // The rate of a bucket is reduced, and its period must be at least a millisecond.
        let factor = (MIN_SPAN.as_micros() as u64).div_ceil(second.max(1));
        let rate = || Rate::new(first.saturating_mul(factor), span(second.saturating_mul(factor)));
        Some(match kind {
            1 => TokenBucket::new(third, rate()).into(),
            2 => TokenBucket::new(third, Rate::new(first, span(second))).interval().into(),
            3 => FixedWindow::new(second, span(first)).into(),
            4 => FixedWindow::new(second, span(first)).from_first_request().into(),
            5 if third == 0 => SlidingWindowLog::new(second, span(first)).into(),
            5 => SlidingWindowLog::new(second, span(first)).count_denied().into(),
            6 => SlidingWindowCounter::new(third, span(first)).segments(u32::try_from(second).ok()?).into(),
            7 => Ban { after: first, within: span(second), for_: span(third) }.into(),
            8 => LeakyBucket::new(third, rate()).queue(span(fourth)).into(),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {

    use proptest::prelude::*;

    use super::super::test_words::Words;
    use super::super::{Step, with_algorithm};
    use super::*;
    use crate::units::{MINUTE, SECOND};

    fn algorithms() -> Vec<Algorithm> {
        vec![
            TokenBucket::new(10, Rate::new(3, SECOND)).into(),
            TokenBucket::new(1 << 32, Rate::new(40_000, SECOND)).into(),
            TokenBucket::new(10, Rate::new(3, SECOND)).interval().into(),
            LeakyBucket::new(10, Rate::new(7, SECOND)).into(),
            LeakyBucket::new(10, Rate::new(7, SECOND)).queue(MINUTE).into(),
            FixedWindow::new(10, SECOND).into(),
            FixedWindow::new(10, SECOND).from_first_request().into(),
            SlidingWindowLog::new(10, SECOND).into(),
            SlidingWindowLog::new(100, SECOND).into(),
            SlidingWindowLog::new(10, SECOND).count_denied().into(),
            SlidingWindowCounter::new(10, SECOND).into(),
            SlidingWindowCounter::new(10, SECOND).segments(6).into(),
            Ban { after: 3, within: SECOND, for_: 2 * SECOND }.into(),
        ]
    }

    #[test]
    fn numbers_of_every_algorithm_are_read_as_they_were_written() {
        for algorithm in algorithms() {
            let compiled = algorithm.compile().unwrap();
            let read = Algorithm::of_numbers(compiled.numbers()).unwrap().compile().unwrap();
            assert_eq!(read.numbers(), compiled.numbers(), "{algorithm:?}");
            assert_eq!(read.meaning(), compiled.meaning(), "{algorithm:?}");
        }
    }

    fn ask(compiled: &Compiled, words: &Words, now: u64, cost: u64) -> crate::decision::Verdict {
        with_algorithm!(compiled, algorithm => {
            let Step { verdict, edit } = algorithm.decide(words, now, cost);
            if let Some(edit) = edit {
                algorithm.apply(words, edit);
            }
            verdict
        })
    }

    const START: u64 = 1_700_000_000_123_456;

    proptest! {
        /// Without a clock change, a restored key is decided exactly like the recorded one, at every later time.
        #[test]
        fn a_restored_key_is_judged_as_before(
            which in 0..algorithms().len(),
            spent in proptest::collection::vec((0_u64..700_000, 1_u64..5), 1..40),
            later in proptest::collection::vec((0_u64..400_000, 0_u64..4), 1..20),
        ) {
            let compiled = algorithms()[which].compile().unwrap();
            let (before, after) = (Words::new(32), Words::new(32));
            let mut now = START;
            for (gap, cost) in spent {
                now += gap;
                let _ = ask(&compiled, &before, now, cost);
            }
            let record = compiled.record(&before, now, 0);
            prop_assert_eq!(compiled.restore(&after, &record, RecordedAt { now, shift: 0 }), Fit::Whole);
            for (gap, cost) in later {
                now += gap;
                prop_assert_eq!(ask(&compiled, &before, now, cost), ask(&compiled, &after, now, cost));
            }
        }

        /// If the wall clock was set in the meantime, buckets, logs and windows from the first request wait as long as
        /// before. The boundaries of segments move, so counters may wait longer.
        #[test]
        fn a_key_that_is_restored_to_another_time_has_no_more_left(
            which in 0..algorithms().len(),
            spent in proptest::collection::vec((0_u64..700_000, 1_u64..5), 1..40),
            offset in -(1_i64 << 40)..1 << 40,
        ) {
            let compiled = algorithms()[which].compile().unwrap();
            let (before, after) = (Words::new(32), Words::new(32));
            let mut now = START;
            for (gap, cost) in spent {
                now += gap;
                let _ = ask(&compiled, &before, now, cost);
            }
            let record = compiled.record(&before, now, offset);
            // The time of the wall clock is used as the limiter's time.
            let then = now.saturating_add_signed(offset);
            let _ = compiled.restore(&after, &record, RecordedAt { now: then, shift: 0 });
            // Windows of the clock already use the wall clock's time. Here they would be shifted a second time.
            if !matches!(compiled, Compiled::ClockWindow(_) | Compiled::Interval(_) | Compiled::Strikes(_)) {
                let (before, after) = (ask(&compiled, &before, now, 0), ask(&compiled, &after, then, 0));
                prop_assert!(after.remaining <= before.remaining, "{} > {}", after.remaining, before.remaining);
            }
        }

        #[test]
        fn any_record_is_read_without_a_panic(
            which in 0..algorithms().len(),
            record in proptest::collection::vec((any::<u64>(), any::<u64>()), 0..20),
            now in 0..=Timestamp::MAX.as_micros(),
            shift in any::<i64>(),
            later in 0..=Timestamp::MAX.as_micros(),
        ) {
            let compiled = algorithms()[which].compile().unwrap();
            let words = Words::new(32);
            let _ = compiled.restore(&words, &record, RecordedAt { now, shift });
            let _ = ask(&compiled, &words, later, 1);
        }
    }
}

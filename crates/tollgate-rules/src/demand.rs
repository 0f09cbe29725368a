//! Demand: how large a limit would have to be so that a client is never denied.
//!
//! Each client has a meter: the arithmetic of an algorithm without its limit. The highest level that the meter
//! reaches is the smallest limit that would have denied the client nothing, its *need*. Needs of many clients go into a
//! histogram ([`Needs`]), and the number that leaves a share of the clients untouched is a quantile of it.
//!
//! A client counts once, however much it sends, so a single client cannot move a quantile. Memory is bounded by a sample
//! of the clients: `sample.rs` keeps those whose hash is small. With a secret hash, no client can choose to be in
//! it.
//!
//! Nothing here reads a clock or decides requests, and all arithmetic is on integers.

mod learner;
mod learning;
mod meter;
mod needs;
mod observer;
mod sample;
mod sketch;

pub use self::learner::{Evaluation, LearnSettings, LearnedState, Learner, Phase};
pub use self::learning::Learning;
pub use self::meter::Measure;
pub use self::needs::{Cover, Needs};
pub(crate) use self::observer::Observation;
pub use self::observer::{Commit, Observer};
pub use self::sketch::{Activity, Sketch, TICK};

use std::collections::BTreeMap;
use std::sync::Arc;

use tollgate::{MINUTE, Rate, SECOND, Timestamp};

use self::meter::Meter;
use self::sample::Sample;

/// The needs of a bounded sample of clients, by one or several measures.
///
/// Several measures answer how large a bucket has to be at each of several rates:
///
/// ```
/// use tollgate_rules::internal::demand::{Cover, Demand, Measure};
/// use tollgate::{Rate, Timestamp};
///
/// let rates = [Rate::per_second(1), Rate::per_second(10)];
/// let mut demand = Demand::new(rates.map(Measure::bucket), 1000);
/// for client in 0..10 {
///     for second in 0..3 {
///         demand.observe(client, 5, Timestamp::from_secs(second));
///     }
/// }
/// let cover = Cover::new(0.99).unwrap();
/// assert_eq!(demand.needs(0).quantile(cover), Some(13));
/// assert_eq!(demand.needs(1).quantile(cover), Some(5));
/// ```
#[derive(Clone, Debug)]
pub struct Demand {
    measures: Box<[Measure]>,
    clients: Sample<Box<[Metered]>>,
}

/// A client by one measure.
#[derive(Clone, Copy, Debug)]
struct Metered {
    meter: Meter,
    need: u64,
}

impl Demand {
    /// Creates a demand without clients. At most `max_clients` are kept; each takes about 100 bytes per measure.
    #[must_use]
    pub fn new(measures: impl IntoIterator<Item = Measure>, max_clients: usize) -> Self {
        Self { measures: measures.into_iter().collect(), clients: Sample::new(max_clients) }
    }

    /// Adds a request of `cost` units. `client` is a hash of the client's key, over all 64 bits. Requests of a client
    /// should come in the order of their times; an earlier time counts as the latest one.
    pub fn observe(&mut self, client: u64, cost: u64, now: Timestamp) {
        let measures = &self.measures;
        let new = || measures.iter().map(|measure| Metered { meter: measure.meter(now), need: 0 }).collect();
        let Some(client) = self.clients.get_or_insert_with(client, new) else { return };
        for (measure, Metered { meter, need }) in measures.iter().zip(client) {
            *need = (*need).max(meter.add(*measure, cost, now));
        }
    }

    /// Returns the measures, in the order of [`needs`](Self::needs).
    #[must_use]
    pub fn measures(&self) -> &[Measure] {
        &self.measures
    }

    /// Returns the number of clients in the sample.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.clients.len()
    }

    /// Returns how many clients each client of the sample stands for: 1 if all were kept, or a power of two.
    #[must_use]
    pub fn clients_per_sampled(&self) -> u64 {
        1 << self.clients.level()
    }

    /// Returns the needs by the measure at `index`. They are empty if there is no such measure.
    #[must_use]
    pub fn needs(&self, index: usize) -> Needs {
        self.clients.iter().filter_map(|(_, measured)| Some(measured.get(index)?.need)).collect()
    }
}

/// The limits that learn, by their names.
pub type LearningLimits = BTreeMap<String, LearningLimit>;

/// A limit that learns.
#[derive(Clone, Debug)]
pub struct LearningLimit {
    /// The number in force.
    pub quota: u64,
    /// The observer of the demand.
    pub observer: Arc<Observer>,
}

/// Returns rates to compare when capacity and rate are chosen together: 1, 2 and 5 times each power of ten, from one per
/// minute to 10,000 per second, slowest first.
pub fn candidate_rates() -> impl Iterator<Item = Rate> {
    let steps = |powers: u32, period| {
        (0..powers).flat_map(move |power| [1, 2, 5].map(|step| (step * 10u64.pow(power), period)))
    };
    let per_minute = steps(2, MINUTE);
    let per_second = steps(5, SECOND).take(13);
    per_minute.chain(per_second).map(|(count, period)| Rate::new(count, period))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tollgate::{
        Algorithm, FixedWindow, LeakyBucket, Limit, Limiter, ManualClock, SlidingWindowCounter, SlidingWindowLog,
        TokenBucket,
    };

    use super::*;

    fn algorithms(quota: u64) -> [Algorithm; 8] {
        let window = SECOND * 10;
        [
            TokenBucket::new(quota, Rate::new(3, SECOND * 2)).into(),
            TokenBucket::new(quota, Rate::new(3, SECOND * 2)).interval().into(),
            LeakyBucket::new(quota, Rate::per_second(2)).into(),
            FixedWindow::new(quota, window).into(),
            FixedWindow::new(quota, window).from_first_request().into(),
            SlidingWindowLog::new(quota, window).into(),
            SlidingWindowCounter::new(quota, window).into(),
            SlidingWindowCounter::new(quota, window).segments(5).into(),
        ]
    }

    /// Returns whether the algorithm denies one of the requests.
    fn denies(algorithm: Algorithm, requests: &[(u64, u64)]) -> bool {
        let clock = ManualClock::at(START);
        let limit = Limit::new("limit", algorithm).unwrap();
        let limiter = Limiter::builder().limit(limit).clock(clock.clone()).build().unwrap();
        requests.iter().any(|(at, cost)| {
            clock.set(Timestamp::from_micros(START.as_micros() + at));
            !limiter.check_n("client", *cost).is_allowed()
        })
    }

    const START: Timestamp = Timestamp::from_micros(1_700_000_003_000_000);

    fn need(measure: Measure, requests: &[(u64, u64)]) -> u64 {
        let first = requests.first().map_or(0, |(at, _)| *at);
        let mut meter = measure.meter(Timestamp::from_micros(START.as_micros() + first));
        let each =
            requests.iter().map(|(at, cost)| meter.add(measure, *cost, Timestamp::from_micros(START.as_micros() + at)));
        each.max().unwrap_or(0)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// A limit of the need denies nothing. A smaller one denies a request, where the measure is exact.
        #[test]
        fn need_is_the_smallest_limit_that_denies_nothing(
            gaps in prop::collection::vec((0u64..4_000_000, 1u64..5), 1..60),
        ) {
            let mut at = 0;
            let requests: Vec<(u64, u64)> = gaps.iter().map(|(gap, cost)| { at += gap; (at, *cost) }).collect();
            for (index, algorithm) in algorithms(1).into_iter().enumerate() {
                let measure = Measure::of(&algorithm).unwrap();
                let need = need(measure, &requests);
                prop_assert!(!denies(algorithms(need)[index], &requests), "{measure:?} needs more than {need}");
                if measure.is_exact() && need > 1 {
                    prop_assert!(denies(algorithms(need - 1)[index], &requests), "{measure:?} needs less than {need}");
                }
            }
        }

        /// The bound of the sample holds for any clients, and those kept have seen every request.
        #[test]
        fn sample_is_bounded_and_complete(hashes in prop::collection::vec(any::<u64>(), 1..400), max in 1usize..50) {
            let mut demand = Demand::new([Measure::bucket(Rate::per_day(1))], max);
            for hash in hashes.iter().chain(&hashes) {
                demand.observe(*hash, 1, START);
            }
            prop_assert!(demand.clients() <= max);
            let counted = |client: &u64| 2 * hashes.iter().filter(|hash| *hash == client).count() as u64;
            for (client, metered) in demand.clients.iter() {
                prop_assert_eq!(metered[0].need, counted(client));
            }
        }
    }

    #[test]
    fn one_client_counts_once_whatever_it_sends() {
        let mut demand = Demand::new([Measure::sliding_window(MINUTE)], 10_000);
        for client in 0..2000u64 {
            demand.observe(client.wrapping_mul(0x9e37_79b9_7f4a_7c15), 10, START);
        }
        for _ in 0..100_000 {
            demand.observe(7, 1_000_000, START);
        }
        assert_eq!(demand.needs(0).quantile(Cover::new(0.999).unwrap()), Some(10));
        assert_eq!(demand.needs(0).max(), Some(tollgate::internal::MAX_QUOTA));
    }

    #[test]
    fn rates_to_compare_are_ascending() {
        let rates: Vec<Rate> = candidate_rates().collect();
        let per_day = |rate: &Rate| rate.count() * (tollgate::DAY.as_secs() / rate.period().as_secs());
        assert!(rates.is_sorted_by(|a, b| per_day(a) < per_day(b)));
        assert_eq!((rates[0], rates[rates.len() - 1]), (Rate::per_minute(1), Rate::per_second(10_000)));
    }
}

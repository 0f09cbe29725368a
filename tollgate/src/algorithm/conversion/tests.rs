//! One key under random sequences of configurations, against bounds that are computed from the list of its charges.

use std::time::Duration;

use proptest::prelude::*;

use super::super::test_words::Words;
use super::super::{LimitAlgorithm, Step, with_algorithm};
use super::*;
use crate::decision::{Admission, Verdict};
use crate::{Algorithm, FixedWindow, LeakyBucket, Rate, SlidingWindowCounter, SlidingWindowLog, TokenBucket};

#[derive(Clone, Copy, Debug)]
enum Config {
    Bucket { capacity: u64, count: u64, period: u64, queue: Option<u64> },
    Interval { capacity: u64, count: u64, period: u64 },
    Clock { limit: u64, window: u64 },
    Opened { limit: u64, window: u64 },
    Log { limit: u64, window: u64, all: bool },
    Counter { limit: u64, window: u64, segments: u32 },
}

impl Config {
    fn algorithm(self) -> Algorithm {
        let micros = Duration::from_micros;
        match self {
            Self::Bucket { capacity, count, period, queue: None } => {
                TokenBucket::new(capacity, Rate::new(count, micros(period))).into()
            }
            Self::Bucket { capacity, count, period, queue: Some(wait) } => {
                LeakyBucket::new(capacity, Rate::new(count, micros(period))).queue(micros(wait)).into()
            }
            Self::Interval { capacity, count, period } => {
                TokenBucket::new(capacity, Rate::new(count, micros(period))).interval().into()
            }
            Self::Clock { limit, window } => FixedWindow::new(limit, micros(window)).into(),
            Self::Opened { limit, window } => FixedWindow::new(limit, micros(window)).from_first_request().into(),
            Self::Log { limit, window, all: false } => SlidingWindowLog::new(limit, micros(window)).into(),
            Self::Log { limit, window, all: true } => {
                SlidingWindowLog::new(limit, micros(window)).count_denied().into()
            }
            Self::Counter { limit, window, segments } => {
                SlidingWindowCounter::new(limit, micros(window)).segments(segments).into()
            }
        }
    }

    fn quota(self) -> u64 {
        self.algorithm().quota()
    }

    /// Returns the most units that this configuration gives back in `from..=until`, if at most `most` are charged in it
    /// and the configuration is in force for `held` of it.
    fn gives_back(self, most: u64, from: u64, until: u64, held: u64) -> u64 {
        let lines = |length: u64| until / length - from / length;
        match self {
            _ if from == until => 0,
            Self::Bucket { count, period, .. } => (held * count).div_ceil(period),
            Self::Interval { count, period, .. } => lines(period) * count,
            Self::Clock { window, .. } => lines(window) * most,
            Self::Opened { window, .. } => (1 + (until - from) / window) * most,
            Self::Log { window, .. } => (until - from) / window * most,
            Self::Counter { window, segments, .. } => {
                let segment = |at: u64| at * u64::from(segments) / window;
                (segment(until) - segment(from)) / u64::from(segments) * most
            }
        }
    }
}

fn config() -> impl Strategy<Value = Config> {
    let quota = || prop_oneof![4 => 1_u64..=20, 1 => 1_u64..=3_000];
    let span = || prop_oneof![Just(1_000_u64), Just(7_000), Just(60_000), 1_000..100_000_u64, Just(3_600_000_000)];
    prop_oneof![
        4 => (quota(), 1_u64..=1_500, span(), proptest::option::weighted(0.2, 0..200_000_u64))
            .prop_map(|(capacity, count, period, queue)| Config::Bucket { capacity, count, period, queue }),
        2 => (quota(), 1_u64..=30, span())
            .prop_map(|(capacity, count, period)| Config::Interval { capacity, count, period }),
        2 => (quota(), span()).prop_map(|(limit, window)| Config::Clock { limit, window }),
        2 => (quota(), span()).prop_map(|(limit, window)| Config::Opened { limit, window }),
        3 => (quota(), span(), any::<bool>()).prop_map(|(limit, window, all)| Config::Log { limit, window, all }),
        3 => (quota(), span(), 1_u32..=7)
            .prop_map(|(limit, window, segments)| Config::Counter { limit, window, segments }),
    ]
}

/// One key, as a store keeps it: converted when a configuration changes a state that another one wrote.
struct Key {
    algorithm: Vec<Compiled>,
    holder: usize,
    words: Words,
}

impl Key {
    fn new(configs: &[Config]) -> Self {
        let ceiling = configs.iter().map(|config| config.quota()).max().unwrap_or(0);
        let algorithm: Vec<Compiled> =
            configs.iter().map(|config| config.algorithm().compile().unwrap().with_ceiling(ceiling)).collect();
        Self { holder: 0, words: Words::new(algorithm[0].words()), algorithm }
    }

    fn ask(&mut self, config: usize, now: u64, cost: u64) -> Verdict {
        if config == self.holder {
            return self.change(now, cost);
        }
        let (new, old) = (&self.algorithm[config], &self.algorithm[self.holder]);
        let words = Words::new(new.words());
        let fit = new.convert(&words, old, &self.words, now);
        with_algorithm!(new, algorithm => {
            let Step { verdict, edit } = algorithm.decide(&words, now, cost);
            let Some(edit) = edit else { return verdict };
            if fit == Fit::Cut {
                return if verdict.is_allowed() { self.change(now, cost) } else { verdict };
            }
            algorithm.apply(&words, edit);
            (self.holder, self.words) = (config, words);
            verdict
        })
    }

    fn change(&self, now: u64, cost: u64) -> Verdict {
        with_algorithm!(&self.algorithm[self.holder], algorithm => {
            let Step { verdict, edit } = algorithm.decide(&self.words, now, cost);
            edit.into_iter().for_each(|edit| algorithm.apply(&self.words, edit));
            verdict
        })
    }
}

#[derive(Clone, Copy, Debug)]
struct Charged {
    at: u64,
    units: u64,
    config: usize,
}

/// Checks that no run of charges exceeds the quota of the configuration that admitted the last of them, plus the units
/// that the configurations gave back in the meantime.
fn check(configs: &[Config], charges: &[Charged], holders: &[(u64, usize)]) -> Result<(), TestCaseError> {
    let most = configs.iter().map(|config| config.quota()).max().unwrap_or(0);
    for (begin, first) in charges.iter().enumerate() {
        let mut sum = 0;
        for last in &charges[begin..] {
            sum += last.units;
            let ends = holders[1..].iter().map(|(until, _)| *until).chain([u64::MAX]);
            let mut held = vec![None; configs.len()];
            for ((from, holder), until) in holders.iter().zip(ends) {
                let (from, until) = ((*from).max(first.at), until.min(last.at));
                if from <= until {
                    *held[*holder].get_or_insert(0) += until - from;
                }
            }
            let back: u64 = configs
                .iter()
                .zip(held)
                .filter_map(|(config, held)| Some(config.gives_back(most, first.at, last.at, held?)))
                .fold(0, u64::saturating_add);
            let bound = configs[last.config].quota().saturating_add(back);
            prop_assert!(sum <= bound, "{sum} of {bound} from {first:?} to {last:?}");
        }
    }
    Ok(())
}

const START: u64 = 1_700_000_000_000_000;

proptest! {
    #[test]
    fn changes_admit_no_more_than_the_quota_and_what_came_back(
        configs in proptest::collection::vec(config(), 2..4),
        steps in proptest::collection::vec(
            (0_usize..4, prop_oneof![3 => Just(0_u64), 1 => 1..5_u64, 2 => 1..40_000_u64, 1 => 1..300_000_u64],
             prop_oneof![2 => 1_u64..=3, 2 => 1_u64..=20, 1 => 0_u64..3_000]),
            1..50,
        ),
    ) {
        let mut key = Key::new(&configs);
        let (mut now, mut charges, mut holders) = (START, Vec::new(), vec![(START, 0)]);
        for (config, gap, cost) in steps {
            let config = config % configs.len();
            now += gap;
            let cost = cost.min(configs[config].quota());
            if key.ask(config, now, cost).is_allowed() && cost > 0 {
                charges.push(Charged { at: now, units: cost, config });
            }
            if key.holder != holders[holders.len() - 1].1 {
                holders.push((now, key.holder));
            }
        }
        check(&configs, &charges, &holders)?;
    }

    /// Alternating between configurations must not admit more at one instant than either alone. This experiment once
    /// found 80,112 violations in 200,000 runs.
    #[test]
    fn an_exchange_admits_no_more_at_one_instant_than_the_larger_alone(
        configs in (config(), config()), spends in proptest::collection::vec((0_u64..50_000, 1_u64..3_000), 1..6),
    ) {
        let configs = [configs.0, configs.1];
        let (mut key, mut now, mut instant) = (Key::new(&configs), START, 0);
        for (gap, cost) in spends {
            instant = if gap == 0 { instant } else { 0 };
            now += gap;
            let cost = cost.min(configs[0].quota());
            instant += if key.ask(0, now, cost).is_allowed() { cost } else { 0 };
        }
        for config in [1, 0, 1] {
            let quota = configs[config].quota();
            let left = key.ask(config, now, 0).remaining;
            if left > 0 {
                instant += if key.ask(config, now, left).is_allowed() { left } else { 0 };
                prop_assert!(instant <= quota, "{instant} of {quota} under {:?}", configs[config]);
            }
        }
    }

    #[test]
    fn waits_after_a_change_are_exact(
        configs in (config(), config()), spends in proptest::collection::vec((0_u64..50_000, 1_u64..3_000), 1..6),
        gap in 0_u64..50_000, cost in 1_u64..20,
    ) {
        let configs = [configs.0, configs.1];
        let (mut key, mut now) = (Key::new(&configs), START);
        for (gap, cost) in spends {
            now += gap;
            let _ = key.ask(0, now, cost.min(configs[0].quota()));
        }
        now += gap;
        let cost = cost.min(configs[1].quota());
        let denied = key.ask(1, now, cost);
        // If denials count, another denied request would extend the wait.
        if let (Admission::Denied { retry_after }, false) = (denied.admission, matches!(configs[1], Config::Log { all: true, .. })) {
            // Converts the state here, so that the wait is that of the new configuration alone.
            let (new, words) = (&key.algorithm[1], Words::new(key.algorithm[1].words()));
            let _ = new.convert(&words, &key.algorithm[0], &key.words, now);
            with_algorithm!(new, algorithm => {
                prop_assert!(!algorithm.decide(&words, now + retry_after - 1, cost).verdict.is_allowed());
                prop_assert!(algorithm.decide(&words, now + retry_after, cost).verdict.is_allowed());
            });
        }
    }

    #[test]
    fn a_key_at_rest_stays_at_rest(configs in (config(), config()), spend in 1_u64..3_000) {
        let configs = [configs.0, configs.1];
        let mut key = Key::new(&configs);
        let spent = key.ask(0, START, spend.min(configs[0].quota()));
        let later = START + spent.reset_after + 2 * 3_600_000_000;
        let words = Words::new(key.algorithm[1].words());
        if with_algorithm!(&key.algorithm[0], algorithm => algorithm.is_idle(&key.words, later)) {
            prop_assert_eq!(key.algorithm[1].convert(&words, &key.algorithm[0], &key.words, later), Fit::Whole);
            prop_assert!(with_algorithm!(&key.algorithm[1], algorithm => algorithm.is_idle(&words, later)));
        }
    }
}

#[test]
fn a_tighter_rate_keeps_what_was_spent() {
    let bucket = |count, capacity| Config::Bucket { capacity, count, period: 1_000_000, queue: None };
    let mut key = Key::new(&[bucket(1_000, 1_000), bucket(10, 1_000)]);
    assert!(key.ask(0, START, 1_000).is_allowed());
    assert_eq!(key.ask(1, START + 1_000, 0).remaining, 1);
    assert_eq!(key.ask(1, START + 1_000, 1).admission, Admission::Allowed { delay: 0 });
    assert_eq!(key.ask(0, START + 1_000, 1).admission, Admission::Denied { retry_after: 1_000 });
}

#[test]
fn a_small_bucket_does_not_shorten_the_debt_to_a_large_one() {
    let bucket = |capacity| Config::Bucket { capacity, count: 1, period: 1_000_000, queue: None };
    let slower = Config::Bucket { capacity: 10, count: 1, period: 2_000_000, queue: None };
    for small in [bucket(10), slower] {
        let mut key = Key::new(&[bucket(1_000), small]);
        assert!(key.ask(0, START, 1_000).is_allowed());
        assert!(!key.ask(1, START, 1).is_allowed());
        assert_eq!(key.ask(0, START, 0).remaining, 0);
    }
}

#[test]
fn entries_of_a_log_keep_their_moments() {
    let log = |limit, window| Config::Log { limit, window, all: false };
    let mut key = Key::new(&[log(10, 60_000), log(100, 10_000), log(3, 60_000)]);
    for step in 0..10 {
        assert!(key.ask(0, START + step * 5_000, 1).is_allowed());
    }
    let now = START + 45_000;
    assert_eq!(key.ask(1, now, 0).remaining, 98);
    assert_eq!(key.ask(2, now, 1).admission, Admission::Denied { retry_after: 35_000 + 15_000 });
    assert!(key.ask(1, now, 1).is_allowed());
    assert_eq!(key.ask(2, now, 0).remaining, 0);
}

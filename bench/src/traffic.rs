//! Which keys are checked, in which order, and how they reach the limiter.
//!
//! A limiter in a server is handed a key that was parsed from a request a moment ago, so it lies in the
//! processor's cache. [`Reach::Arriving`] lays the keys of a run out in the order of the checks, and the
//! processor has them ready: what is measured is the limiter. [`Reach::Scattered`] picks them at random out of
//! a list of all strings, which adds two cache misses per decision to every contender alike, the string's
//! header and its bytes; comparisons of limiters are often made that way, so both are shown.

use std::fmt::Write as _;

use clap::ValueEnum;
use rand::{RngExt, SeedableRng, rngs::SmallRng};
use rand_distr::{Distribution, Zipf};

/// Strings of one hot key: enough to be "a new request each time", few enough to stay in the first cache.
const HOT_COPIES: usize = 256;

/// How the key of a decision lies in memory before the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Reach {
    /// In arrival order, as freshly parsed requests: no contender is charged with fetching a cold key
    Arriving,
    /// At random out of a list of all strings: two extra cache misses per decision for every contender
    Scattered,
}

/// Which key is checked next.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Spread {
    Uniform,
    /// The k-th most frequent key occurs 1/k times as often as the first (s = 1).
    Zipf,
}

/// A sequence of keys that repeats.
pub(crate) enum Traffic {
    Arriving(Vec<String>),
    Scattered { names: Vec<String>, picks: Vec<u32> },
}

/// A stretch of traffic without a turn in it.
#[derive(Clone, Copy)]
pub(crate) enum Batch<'a> {
    Arriving(&'a [String]),
    Scattered { names: &'a [String], picks: &'a [u32] },
}

impl Traffic {
    pub(crate) fn hot_key() -> Self {
        Self::Arriving((0..HOT_COPIES).map(|_| name(0)).collect())
    }

    /// `length` requests over `keys` keys. The same every time: the seed is fixed.
    pub(crate) fn new(keys: usize, spread: Spread, reach: Reach, length: usize) -> Self {
        let ids = ids(keys, spread, length);
        match reach {
            Reach::Arriving => Self::Arriving(ids.into_iter().map(name).collect()),
            Reach::Scattered => Self::Scattered {
                names: (0..keys).map(name).collect(),
                picks: ids.into_iter().map(|id| u32::try_from(id).unwrap_or(u32::MAX)).collect(),
            },
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Arriving(names) => names.len(),
            Self::Scattered { picks, .. } => picks.len(),
        }
    }

    /// Returns the key at a position; the sequence repeats.
    pub(crate) fn key(&self, position: usize) -> &String {
        let at = position % self.len();
        match self {
            Self::Arriving(names) => &names[at],
            Self::Scattered { names, picks } => &names[picks[at] as usize],
        }
    }

    /// The `count` requests from position `from` on, turn by turn.
    pub(crate) fn batches(&self, from: usize, count: usize) -> impl Iterator<Item = Batch<'_>> {
        let mut at = from % self.len();
        let mut left = count;
        std::iter::from_fn(move || {
            if left == 0 {
                return None;
            }
            let end = self.len().min(at + left);
            let batch = match self {
                Self::Arriving(names) => Batch::Arriving(&names[at..end]),
                Self::Scattered { names, picks } => Batch::Scattered { names, picks: &picks[at..end] },
            };
            left -= end - at;
            at = 0;
            Some(batch)
        })
    }
}

/// `user:000123`
pub(crate) fn name(id: usize) -> String {
    let mut name = String::new();
    write_name(&mut name, id);
    name
}

/// Overwrites `name`, so that a filling loop allocates nothing of its own.
pub(crate) fn write_name(name: &mut String, id: usize) {
    name.clear();
    // Writing to a string cannot fail.
    let _ = write!(name, "user:{id:06}");
}

fn ids(keys: usize, spread: Spread, length: usize) -> Vec<usize> {
    let mut random = SmallRng::seed_from_u64(1);
    match spread {
        Spread::Uniform => (0..length).map(|_| random.random_range(0..keys)).collect(),
        Spread::Zipf => match Zipf::new(keys as f64, 1.0) {
            Ok(zipf) => (0..length).map(|_| zipf.sample(&mut random) as usize - 1).collect(),
            Err(problem) => unreachable!("{keys} keys make a valid distribution: {problem}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_wrap_around_at_the_end() {
        let traffic = Traffic::Arriving((0..3).map(name).collect());
        let keys: Vec<String> = traffic
            .batches(2, 5)
            .flat_map(|batch| match batch {
                Batch::Arriving(names) => names.to_vec(),
                Batch::Scattered { .. } => Vec::new(),
            })
            .collect();
        assert_eq!(keys, [2, 0, 1, 2, 0].map(name));
    }

    #[test]
    fn zipf_has_the_first_key_twice_as_often_as_the_second() {
        let ids = ids(1000, Spread::Zipf, 100_000);
        let count = |id: usize| ids.iter().filter(|each| **each == id).count() as f64;
        assert!((1.8..2.2).contains(&(count(0) / count(1))));
        assert!(ids.iter().all(|id| *id < 1000));
    }
}

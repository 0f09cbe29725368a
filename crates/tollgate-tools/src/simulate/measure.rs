//! Measures of what a limit admitted: the most within a time, and percentiles of waits.

use std::collections::VecDeque;
use std::time::Duration;

use super::micros;

/// The most units within any time of a given length. Units are added in the order of their times.
#[derive(Clone, Debug)]
pub(super) struct Peak {
    length: u64,
    /// Units by time, within the last `length`.
    recent: VecDeque<(u64, u64)>,
    sum: u64,
    most: u64,
    since: u64,
}

impl Peak {
    /// Measures windows of this length.
    pub(super) fn within(length: Duration) -> Self {
        Self { length: micros(length), recent: VecDeque::new(), sum: 0, most: 0, since: 0 }
    }

    /// Adds units. Units that are as old as the length, or older, are outside.
    pub(super) fn add(&mut self, at: u64, units: u64) {
        while let Some(&(first, outside)) = self.recent.front()
            && at.saturating_sub(first) >= self.length
        {
            self.sum -= outside;
            self.recent.pop_front();
        }
        match self.recent.back_mut() {
            Some((last, same)) if *last == at => *same += units,
            _ => self.recent.push_back((at, units)),
        }
        self.sum += units;
        if self.sum > self.most {
            self.most = self.sum;
            self.since = self.recent.front().map_or(at, |(first, _)| *first);
        }
    }

    /// Returns the most units within the length.
    pub(super) fn most(&self) -> u64 {
        self.most
    }

    /// Returns the time of the first of these units.
    pub(super) fn since(&self) -> u64 {
        self.since
    }
}

/// All waits of a limit. They are kept, so that percentiles are exact.
#[derive(Debug, Default)]
pub(super) struct Waits(Vec<u64>);

impl Waits {
    /// Adds a wait.
    pub(super) fn add(&mut self, wait: u64) {
        self.0.push(wait);
    }

    /// Returns the smallest waits that are at least as long as this percentage of all waits. `None` without waits.
    pub(super) fn percentiles<const N: usize>(mut self, percentages: [usize; N]) -> [Option<Duration>; N] {
        percentages.map(|percentage| {
            let rank = (self.0.len() * percentage).div_ceil(100).checked_sub(1)?;
            let (_, wait, _) = self.0.select_nth_unstable(rank);
            Some(Duration::from_micros(*wait))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_the_most_within_any_time_of_its_length() {
        let mut peak = Peak::within(Duration::from_micros(10));
        for (at, units) in [(0, 1), (5, 2), (5, 1), (10, 1), (14, 5), (40, 1)] {
            peak.add(at, units);
        }
        // From 5 to 14: the units at 0 are outside at 10, when they are as old as the length.
        assert_eq!((peak.most(), peak.since()), (9, 5));
    }

    #[test]
    fn percentiles_are_exact() {
        let waits = |all: &[u64]| {
            let mut waits = Waits::default();
            all.iter().for_each(|wait| waits.add(*wait));
            waits.percentiles([50, 99]).map(|wait| wait.map(|wait| wait.as_micros()))
        };
        assert_eq!(waits(&[]), [None, None]);
        assert_eq!(waits(&[7]), [Some(7), Some(7)]);
        assert_eq!(waits(&(1..=100).rev().collect::<Vec<_>>()), [Some(50), Some(99)]);
        assert_eq!(waits(&[3, 1, 2]), [Some(2), Some(3)]);
    }
}

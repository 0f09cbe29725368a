//! Contenders run in turn on the same traffic. Every round gives each of them one slice of time, in random order, so
//! that noise affects all of them. Ratios are computed within a round, and the median of the rounds is reported: a
//! ratio of two medians would mix quiet and noisy minutes.

use std::convert::Infallible;
use std::fmt::{self, Display, Formatter};
use std::sync::Barrier;
use std::time::Duration;

use rand::{SeedableRng, rngs::SmallRng, seq::SliceRandom};

use crate::clock::Lap;
use crate::contender::{Contender, Path};
use crate::traffic::Traffic;

/// The first tenth of a slice is not measured, because the caches still have the previous contender's data.
const LEAD_IN: usize = 10;

/// How long a race is.
#[derive(Clone, Copy)]
pub(crate) struct Rounds {
    pub(crate) count: usize,
    pub(crate) slice: Duration,
}

/// The workload of a race.
pub(crate) struct Course<'a> {
    pub(crate) traffic: &'a Traffic,
    pub(crate) path: Path,
    pub(crate) threads: usize,
}

/// A contender and the name it runs under.
pub(crate) struct Runner<'a> {
    pub(crate) name: &'static str,
    pub(crate) contender: &'a dyn Contender,
}

/// The time per decision of one contender, by round: nanoseconds, unless stated otherwise.
pub(crate) struct Times {
    pub(crate) name: &'static str,
    rounds: Vec<f64>,
}

impl Times {
    pub(crate) fn new(name: &'static str) -> Self {
        Self { name, rounds: Vec::new() }
    }

    pub(crate) fn push(&mut self, round: f64) {
        self.rounds.push(round);
    }

    /// The figures of all rounds, in order.
    pub(crate) fn rounds(&self) -> &[f64] {
        &self.rounds
    }

    pub(crate) fn median(&self) -> f64 {
        quantile(self.rounds.clone(), 0.5)
    }

    /// The difference to another contender in the same round.
    pub(crate) fn above(&self, base: &Self) -> Self {
        let rounds = self.rounds.iter().zip(&base.rounds).map(|(whole, base)| whole - base).collect();
        Self { name: self.name, rounds }
    }

    pub(crate) fn ratio_to(&self, base: &Self) -> Ratio {
        let ratios: Vec<f64> = self.rounds.iter().zip(&base.rounds).map(|(ours, theirs)| ours / theirs).collect();
        Ratio {
            median: quantile(ratios.clone(), 0.5),
            quartiles: (quantile(ratios.clone(), 0.25), quantile(ratios, 0.75)),
        }
    }
}

/// A ratio over the rounds, with the half of the rounds nearest to it.
pub(crate) struct Ratio {
    pub(crate) median: f64,
    pub(crate) quartiles: (f64, f64),
}

impl Display for Ratio {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        write!(out, "{:.2} ({:.2} to {:.2})", self.median, self.quartiles.0, self.quartiles.1)
    }
}

/// Calls `turn(round, contender)` for each contender in every round, in random order.
pub(crate) fn take_turns<E>(
    rounds: usize,
    contenders: usize,
    mut turn: impl FnMut(usize, usize) -> Result<(), E>,
) -> Result<(), E> {
    let mut order: Vec<usize> = (0..contenders).collect();
    let mut random = SmallRng::seed_from_u64(2);
    for round in 0..rounds {
        order.shuffle(&mut random);
        order.iter().try_for_each(|&contender| turn(round, contender))?;
    }
    Ok(())
}

/// Nanoseconds per decision of each contender: elapsed time over the decisions of all threads.
pub(crate) fn run(runners: &[Runner<'_>], course: &Course<'_>, rounds: Rounds) -> Vec<Times> {
    let decisions: Vec<usize> = runners.iter().map(|runner| pace(runner, course, rounds.slice)).collect();
    // Each round uses other keys, so that a slow contender does not repeat the few it has time for.
    let step = decisions.iter().max().copied().unwrap_or(0);
    let mut times: Vec<Times> = runners.iter().map(|runner| Times::new(runner.name)).collect();
    let Ok(()) = take_turns::<Infallible>(rounds.count, runners.len(), |round, turn| {
        let elapsed = slice(&runners[turn], course, round * step, decisions[turn]);
        times[turn].push(per_decision(elapsed, decisions[turn] * course.threads));
        Ok(())
    });
    times
}

/// How many decisions of each thread fill a slice: doubled until a quarter of it is reached.
fn pace(runner: &Runner<'_>, course: &Course<'_>, target: Duration) -> usize {
    let mut decisions = 1000;
    loop {
        let elapsed = slice(runner, course, 0, decisions);
        if elapsed * 4 >= target {
            let fitting = decisions as f64 * target.as_secs_f64() / elapsed.as_secs_f64();
            return (fitting as usize).max(1000);
        }
        decisions *= 2;
    }
}

/// One contender's turn: `decisions` on each thread, every thread at its own place in the traffic.
fn slice(runner: &Runner<'_>, course: &Course<'_>, from: usize, decisions: usize) -> Duration {
    let start = |thread: usize| from + thread * course.traffic.len() / course.threads;
    let lead_in = decisions / LEAD_IN;
    if course.threads == 1 {
        ask(runner, course, start(0), lead_in);
        return Lap::span(&[Lap::time(|| ask(runner, course, start(0) + lead_in, decisions))]);
    }
    let gate = Barrier::new(course.threads);
    let laps: Vec<Lap> = std::thread::scope(|scope| {
        let work = |thread| {
            let gate = &gate;
            scope.spawn(move || {
                ask(runner, course, start(thread), lead_in);
                gate.wait();
                Lap::time(|| ask(runner, course, start(thread) + lead_in, decisions))
            })
        };
        let threads: Vec<_> = (0..course.threads).map(work).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    assert_eq!(laps.len(), course.threads, "a thread of {} panicked", runner.name);
    Lap::span(&laps)
}

/// Panics if a contender decided wrongly.
fn ask(runner: &Runner<'_>, course: &Course<'_>, from: usize, decisions: usize) {
    let batches = course.traffic.batches(from, decisions);
    let allowed: usize = batches.map(|batch| runner.contender.run(batch)).sum();
    let expected = match course.path {
        Path::Allow => decisions,
        Path::Deny => 0,
    };
    assert_eq!(allowed, expected, "{} allowed {allowed} of {decisions}, not {expected}", runner.name);
}

pub(crate) fn per_decision(elapsed: Duration, decisions: usize) -> f64 {
    elapsed.as_nanos() as f64 / decisions as f64
}

/// The value below which this share of the values lies; the middle two are averaged where it falls between.
pub(crate) fn quantile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let Some(last) = values.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = share * last as f64;
    let (below, above) = (values[place.floor() as usize], values[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_values() {
        assert_eq!(quantile(vec![4.0, 1.0, 3.0, 2.0], 0.5), 2.5);
        assert_eq!(quantile(vec![5.0, 1.0, 3.0], 0.5), 3.0);
        assert_eq!(quantile(vec![1.0, 2.0, 3.0], 0.25), 1.5);
        assert!(quantile(Vec::new(), 0.5).is_nan());
    }

    #[test]
    fn a_ratio_is_taken_within_each_round() {
        let ours = Times { name: "ours", rounds: vec![10.0, 100.0, 10.0] };
        let theirs = Times { name: "theirs", rounds: vec![20.0, 200.0, 40.0] };
        assert_eq!(ours.ratio_to(&theirs).median, 0.5);
    }
}

//! Simulation: several limits on the same traffic, side by side.
//!
//! [`simulate`] runs the algorithms that the server runs, each in its own [`Limiter`] with a clock that the simulation
//! sets. So a report shows what a limit does, not what a model of it would do. The report has all results as numbers and
//! can be serialized.
//!
//! Deliberately not here: the command line, reading files and writing them. `text`, `svg` and `html` only format.

pub mod html;
pub mod limits;
mod measure;
pub mod numbers;
pub mod report;
pub mod scenario;
pub mod svg;
pub mod text;
pub mod timestamps;
pub mod traffic;

use std::cmp::Reverse;
use std::fmt;
use std::time::Duration;

use tollgate::{InvalidLimit, Limiter, ManualClock, Timestamp};

use self::limits::{Overflow, SimulatedLimit};
use self::measure::{Peak, Waits};
use self::report::{COLUMNS, LimitReport, Report, Step};
use self::traffic::{Arrival, Traffic};

/// The most requests of one simulation: a few seconds of work, and 40 MB of waits for each limit.
pub const MAX_REQUESTS: usize = 5_000_000;
/// The most limits of one simulation: as many as a reader can compare.
pub const MAX_LIMITS: usize = 20;
/// The time within which admitted requests count as one burst.
pub const BURST: Duration = Duration::from_millis(100);
/// The most moments that a report lists one by one. Traffic with more moments has a timeline only.
const MAX_STEPS: usize = 24;
/// The most memory for the keys of one limit.
const MAX_MEMORY: usize = 256 << 20;

/// A simulation that cannot run.
#[derive(Debug)]
pub enum SimulationError {
    /// The traffic has no requests.
    NoRequests,
    /// More than this many.
    TooManyRequests(usize),
    /// There are more limits than a report can show.
    TooManyLimits(usize),
    /// A limit is invalid.
    Limit(InvalidLimit),
}

impl SimulationError {
    /// Returns what is wrong, without the fix.
    pub fn problem(&self) -> String {
        match self {
            Self::NoRequests => "the traffic has no requests in its time".to_owned(),
            Self::TooManyRequests(most) => format!("the traffic has more than {most} requests"),
            Self::TooManyLimits(count) => format!("{count} limits are more than {MAX_LIMITS}, too many to compare"),
            Self::Limit(error) => error.to_string(),
        }
    }
}

impl fmt::Display for SimulationError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fix = match self {
            Self::NoRequests => "make it longer or faster",
            Self::TooManyRequests(_) => "make it shorter or slower",
            Self::TooManyLimits(_) => "choose some of them",
            Self::Limit(error) => return error.fmt(out),
        };
        write!(out, "{}: {fix}", self.problem())
    }
}

/// Runs each limit on the traffic. All limits see the same requests, and each decides alone.
pub fn simulate(limits: &[SimulatedLimit], traffic: &Traffic) -> Result<Report, SimulationError> {
    simulate_up_to(MAX_REQUESTS, limits, traffic)
}

/// As [`simulate`], for traffic with at most this many requests.
pub fn simulate_up_to(
    max_requests: usize,
    limits: &[SimulatedLimit],
    traffic: &Traffic,
) -> Result<Report, SimulationError> {
    if limits.len() > MAX_LIMITS {
        return Err(SimulationError::TooManyLimits(limits.len()));
    }
    // Counted first: generating requests takes a small part of the time that deciding them takes.
    match traffic.arrivals().take(max_requests + 1).count() {
        0 => return Err(SimulationError::NoRequests),
        count if count > max_requests => return Err(SimulationError::TooManyRequests(max_requests)),
        _ => {}
    }
    let clock = ManualClock::at(traffic.origin());
    let runs: Result<Vec<Run<'_>>, InvalidLimit> =
        limits.iter().map(|limit| Run::new(limit, traffic, &clock)).collect();
    let mut runs = runs.map_err(SimulationError::Limit)?;
    let mut columns = Columns::of(traffic);
    let (mut offered, mut offered_by_column) = (0_u64, vec![0; COLUMNS]);
    for arrival in traffic.arrivals() {
        offered += 1;
        columns.sample_until(arrival.at, &clock, &mut runs);
        offered_by_column[columns.index(arrival.at)] += 1;
        clock.set(traffic.at(arrival.at));
        runs.iter_mut().for_each(|run| run.take(arrival, &columns));
    }
    columns.sample_until(u64::MAX, &clock, &mut runs);
    let limits = runs.into_iter().map(|run| run.report(traffic)).collect();
    Ok(Report::new(traffic, offered, offered_by_column, limits))
}

/// The columns of the timeline: equal parts of the span.
struct Columns {
    span: u64,
    origin: Timestamp,
    /// The columns whose end has been sampled.
    sampled: usize,
}

impl Columns {
    fn of(traffic: &Traffic) -> Self {
        Self { span: micros(traffic.span()).max(1), origin: traffic.origin(), sampled: 0 }
    }

    fn contains(&self, at: u64) -> bool {
        at < self.span
    }

    /// Returns the column that contains a time.
    fn index(&self, at: u64) -> usize {
        let index = u128::from(at) * COLUMNS as u128 / u128::from(self.span);
        usize::try_from(index).unwrap_or(usize::MAX).min(COLUMNS - 1)
    }

    fn end(&self, column: usize) -> u64 {
        u64::try_from(u128::from(self.span) * (column as u128 + 1) / COLUMNS as u128).unwrap_or(u64::MAX)
    }

    /// Records what is left of each limit at the end of every column that ends before `at`, or at it.
    fn sample_until(&mut self, at: u64, clock: &ManualClock, runs: &mut [Run<'_>]) {
        while self.sampled < COLUMNS && self.end(self.sampled) <= at {
            clock.set(self.origin.saturating_add(Duration::from_micros(self.end(self.sampled))));
            runs.iter_mut().for_each(Run::sample);
            self.sampled += 1;
        }
    }
}

/// One limit during a simulation.
struct Run<'a> {
    limit: &'a SimulatedLimit,
    limiter: Limiter,
    admitted: u64,
    denied: u64,
    never_fits: u64,
    /// The admitted requests that leave the queue after the end.
    queued_at_end: u64,
    waits: Waits,
    /// The most admitted within the window and at once, for each key.
    peaks: Vec<(Peak, Peak)>,
    admitted_by_column: Vec<u64>,
    denied_by_column: Vec<u64>,
    /// What is left at the end of each column. Empty with several keys.
    remaining: Vec<u64>,
    has_one_key: bool,
    /// The results at each moment; `None` once there are too many moments.
    steps: Option<Vec<Step>>,
}

impl<'a> Run<'a> {
    fn new(limit: &'a SimulatedLimit, traffic: &Traffic, clock: &ManualClock) -> Result<Self, InvalidLimit> {
        let builder = Limiter::builder().limit(limit.limit().clone()).clock(clock.clone()).max_memory(MAX_MEMORY);
        let peaks = (Peak::within(limit.window()), Peak::within(BURST));
        Ok(Self {
            limit,
            limiter: builder.build()?,
            admitted: 0,
            denied: 0,
            never_fits: 0,
            queued_at_end: 0,
            waits: Waits::default(),
            peaks: vec![peaks; traffic.keys() as usize],
            admitted_by_column: vec![0; COLUMNS],
            denied_by_column: vec![0; COLUMNS],
            remaining: Vec::new(),
            has_one_key: traffic.keys() == 1,
            steps: Some(Vec::new()),
        })
    }

    /// Decides one request and counts the decision.
    fn take(&mut self, arrival: Arrival, columns: &Columns) {
        let Arrival { at, key, cost } = arrival;
        let cost = cost.saturating_mul(self.limit.cost());
        let decision = self.limiter.check_n(u64::from(key), cost);
        let is_queue = self.limit.overflow() == Overflow::Queue;
        if decision.is_allowed() {
            let delay = micros(decision.delay());
            let leaves = at.saturating_add(delay);
            self.admitted += 1;
            match columns.contains(leaves) {
                true => self.admitted_by_column[columns.index(leaves)] += 1,
                false => self.queued_at_end += 1,
            }
            if let Some((window, burst)) = self.peaks.get_mut(key as usize) {
                window.add(leaves, cost);
                burst.add(leaves, cost);
            }
            if is_queue {
                self.waits.add(delay);
            }
        } else {
            self.denied += 1;
            self.denied_by_column[columns.index(at)] += 1;
            match decision.retry_after() {
                Some(wait) if !is_queue => self.waits.add(micros(wait)),
                Some(_) => {}
                None => self.never_fits += 1,
            }
        }
        self.record_step(at, decision.is_allowed(), decision.remaining());
    }

    fn record_step(&mut self, at: u64, admitted: bool, remaining: u64) {
        let Some(steps) = &mut self.steps else { return };
        let at = Duration::from_micros(at);
        if steps.last().is_none_or(|step| step.at != at) {
            if steps.len() == MAX_STEPS {
                self.steps = None;
                return;
            }
            steps.push(Step { at, offered: 0, admitted: 0, remaining });
        }
        if let Some(step) = steps.last_mut() {
            step.offered += 1;
            step.admitted += u64::from(admitted);
            step.remaining = remaining;
        }
    }

    fn sample(&mut self) {
        if self.has_one_key {
            self.remaining.push(self.limiter.peek(0_u64).remaining());
        }
    }

    fn report(self, traffic: &Traffic) -> LimitReport {
        let most = |peak: fn(&(Peak, Peak)) -> &Peak| {
            let highest = self.peaks.iter().map(peak).max_by_key(|peak| (peak.most(), Reverse(peak.since())));
            highest.map_or((0, 0), |peak| (peak.most(), peak.since()))
        };
        let (worst_window, worst_since) = most(|peaks| &peaks.0);
        let (largest_burst, _) = most(|peaks| &peaks.1);
        let [wait_p50, wait_p99] = self.waits.percentiles([50, 99]);
        LimitReport {
            name: self.limit.name().to_owned(),
            algorithm: self.limit.algorithm(),
            description: self.limit.description().to_owned(),
            quota: self.limit.limit().quota(),
            window: self.limit.window(),
            admitted: self.admitted,
            denied: self.denied,
            never_fits: self.never_fits,
            queued_at_end: self.queued_at_end,
            worst_window,
            worst_window_at: Duration::from_micros(worst_since),
            largest_burst,
            wait_p50,
            wait_p99,
            admitted_by_column: self.admitted_by_column,
            denied_by_column: self.denied_by_column,
            remaining: self.remaining,
            steps: self.steps.unwrap_or_default(),
            window_starts: traffic.window_starts(self.limit.window()),
        }
    }
}

/// Returns the whole microseconds of a duration, saturating.
fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;

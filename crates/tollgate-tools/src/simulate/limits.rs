//! The limits of a simulation: the five algorithms with the same numbers, or the limits of a rule file.

use std::time::Duration;

use tollgate::{
    Algorithm, FixedWindow, InvalidLimit, LeakyBucket, Limit, Rate, SlidingWindowCounter, SlidingWindowLog, TokenBucket,
};
use tollgate_config::internal::{AlgorithmName, CostRule, LimitRule, Overflow as OverflowRule};
use tollgate_telemetry::limit_summary;
use tollgate_telemetry::words::human;

/// The algorithms in the order of their rows.
pub const ALGORITHMS: [AlgorithmName; 5] = [
    AlgorithmName::TokenBucket,
    AlgorithmName::LeakyBucket,
    AlgorithmName::FixedWindow,
    AlgorithmName::SlidingWindowLog,
    AlgorithmName::SlidingWindowCounter,
];

/// A limit, and what a report needs to know about it.
#[derive(Clone, Debug)]
pub struct SimulatedLimit {
    name: String,
    algorithm: &'static str,
    description: String,
    limit: Limit,
    /// The time in which the worst window is measured.
    window: Duration,
    /// Units that a request costs.
    cost: u64,
    overflow: Overflow,
}

/// The treatment of requests that do not fit into a leaky bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// They are denied.
    #[default]
    Reject,
    /// They wait.
    Queue,
}

/// The numbers from which the five algorithms are made, so that they admit the same on average.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    /// The quota of a window.
    pub limit: u64,
    /// The length of a window.
    pub window: Duration,
    /// Of both buckets; `limit` if left out.
    pub capacity: Option<u64>,
    /// Of both buckets; `limit` per `window` if left out.
    pub refill: Option<Rate>,
    /// The segments of a sliding window counter.
    pub segments: u32,
    /// Of the leaky bucket.
    pub overflow: Overflow,
}

impl Quota {
    /// Returns a quota with defaults for the rest.
    pub fn new(limit: u64, window: Duration) -> Self {
        Self { limit, window, capacity: None, refill: None, segments: 1, overflow: Overflow::Queue }
    }

    /// Returns all five algorithms.
    pub fn all(&self) -> Result<Vec<SimulatedLimit>, InvalidLimit> {
        ALGORITHMS.into_iter().map(|algorithm| self.with(algorithm)).collect()
    }

    /// Makes a limit with this algorithm.
    pub fn with(&self, algorithm: AlgorithmName) -> Result<SimulatedLimit, InvalidLimit> {
        let Self { limit, window, segments, .. } = *self;
        let (capacity, rate) = (self.capacity.unwrap_or(limit), self.refill.unwrap_or(Rate::new(limit, window)));
        let per_window = format!("{limit} per {}", human(window));
        let bucket = format!("{capacity}, then {rate}");
        let (description, built): (String, Algorithm) = match algorithm {
            AlgorithmName::LeakyBucket if self.overflow == Overflow::Queue => {
                (format!("{bucket}, queued"), LeakyBucket::new(capacity, rate).queue(drain(capacity, rate)).into())
            }
            AlgorithmName::LeakyBucket => (bucket, LeakyBucket::new(capacity, rate).into()),
            AlgorithmName::FixedWindow => (per_window, FixedWindow::new(limit, window).into()),
            AlgorithmName::SlidingWindowLog => (per_window, SlidingWindowLog::new(limit, window).into()),
            AlgorithmName::SlidingWindowCounter => {
                let text = if segments == 1 { per_window } else { format!("{per_window}, {segments} segments") };
                (text, SlidingWindowCounter::new(limit, window).segments(segments).into())
            }
            _ => (bucket, TokenBucket::new(capacity, rate).into()),
        };
        let simulated = SimulatedLimit::new((algorithm.as_str(), algorithm.as_str()), description, built, window)?;
        let is_queue = algorithm == AlgorithmName::LeakyBucket && self.overflow == Overflow::Queue;
        Ok(if is_queue { simulated.queued() } else { simulated })
    }
}

/// Returns the time in which a full bucket drains, and no less than a second.
fn drain(capacity: u64, rate: Rate) -> Duration {
    let micros = (u128::from(capacity) * rate.period().as_micros()).div_ceil(u128::from(rate.count().max(1)));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX)).clamp(tollgate::SECOND, tollgate::MAX_SPAN)
}

impl SimulatedLimit {
    /// Returns a limit with a name and the name of its algorithm. Its worst window is measured in `window`.
    pub fn new(
        (name, algorithm): (&str, &'static str),
        description: impl Into<String>,
        built: impl Into<Algorithm>,
        window: Duration,
    ) -> Result<Self, InvalidLimit> {
        let limit = Limit::new(name, built)?;
        let (name, description) = (name.to_owned(), description.into());
        Ok(Self { name, algorithm, description, limit, window, cost: 1, overflow: Overflow::Reject })
    }

    /// Returns the limit of a rule file with its own numbers. Its key, its match, its overrides and its ban are not
    /// simulated.
    pub fn of_rule(rule: &LimitRule) -> Result<Self, InvalidLimit> {
        let limit = rule.limit()?;
        let algorithm = rule.algorithm.as_str();
        let description = limit_summary::numbers(rule)?;
        let description = description.strip_suffix(&format!(" ({algorithm})")).unwrap_or(&description).to_owned();
        let cost = match &rule.cost {
            Some(CostRule::Units(units)) => *units,
            _ => 1,
        };
        let is_queue = rule.modes.overflow == Some(OverflowRule::Queue);
        let overflow = if is_queue { Overflow::Queue } else { Overflow::Reject };
        let (name, window) = (rule.name.as_str().to_owned(), limit.window());
        Ok(Self { name, algorithm, description, window, limit, cost, overflow })
    }

    /// Marks a leaky bucket that queues, whose waits are the delays in the queue.
    pub fn queued(self) -> Self {
        Self { overflow: Overflow::Queue, ..self }
    }

    /// Sets the time in which the worst window is measured.
    pub fn measured_in(self, window: Duration) -> Self {
        Self { window, ..self }
    }

    /// Returns the name of the limit.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the name of the algorithm.
    pub fn algorithm(&self) -> &'static str {
        self.algorithm
    }

    /// Returns the numbers in words.
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Returns the limit itself.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// Returns the time in which the worst window is measured.
    pub fn window(&self) -> Duration {
        self.window
    }

    /// Returns the rate that the limit admits for long.
    pub fn sustained(&self) -> Rate {
        Rate::new(self.limit.quota(), self.limit.window())
    }

    /// Returns the units that a request costs.
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Returns the treatment of requests that do not fit.
    pub fn overflow(&self) -> Overflow {
        self.overflow
    }
}

//! The numbers that describe generated traffic, as options of the command and as JSON of the admin API.

use std::fmt;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Deserialize;
use tollgate::Rate;

use super::MAX_REQUESTS;
use super::limits::SimulatedLimit;
use super::traffic::{MAX_SPAN, Pattern, Traffic};

/// Windows that the traffic lasts for, unless its length is given.
const DEFAULT_WINDOWS: u32 = 5;

/// Shapes of traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Requests at equal distances
    Steady,
    /// Many requests at once, again and again
    Burst,
    /// Requests just before and just after a window ends
    Boundary,
    /// A rate that grows from zero
    Ramp,
    /// Steady for a while, then silent
    OnOff,
    /// Independent requests at random times
    #[default]
    Poisson,
    /// Steady, and twenty times as fast in the middle third
    Attack,
}

/// Numbers of generated traffic. Those that are left out follow from the limits, so that each of them denies something.
#[derive(Clone, Copy, Debug, Default)]
pub struct TrafficNumbers {
    /// The shape of the traffic.
    pub kind: Kind,
    /// The rate of requests: 1.5 times the fastest limit if left out.
    pub rate: Option<Rate>,
    /// The length of the traffic: five windows if left out, or five times the time to fill a bucket.
    pub span: Option<Duration>,
    /// The requests of a burst: twice the largest limit if left out, and the limit on each side of a boundary.
    pub burst: Option<u64>,
    /// The time from one burst to the next: the window if left out.
    pub every: Option<Duration>,
    /// The units of a request: 1 if left out.
    pub cost: Option<u32>,
    /// The seed of random traffic.
    pub seed: Option<u64>,
}

/// A number that describes no traffic.
#[derive(Debug, PartialEq, Eq)]
pub struct InvalidNumber {
    /// `rate`, `for` or `every`.
    pub field: &'static str,
    problem: &'static str,
}

impl fmt::Display for InvalidNumber {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.field, self.problem)
    }
}

impl TrafficNumbers {
    /// Returns the traffic for these limits.
    pub fn traffic(&self, limits: &[SimulatedLimit]) -> Result<Traffic, InvalidNumber> {
        let window = limits.first().map_or(tollgate::MINUTE, SimulatedLimit::window);
        let quota = limits.iter().map(|limit| limit.limit().quota()).max().unwrap_or(100);
        let every = self.every.unwrap_or(window);
        let rate = self.rate.unwrap_or_else(|| faster_than(limits));
        let span = self.span.unwrap_or_else(|| default_span(limits, window, rate));
        check("for", span)?;
        check("every", every)?;
        if rate.count() == 0 {
            let problem = "a rate of zero has no requests: use a higher one, such as 10/s";
            return Err(InvalidNumber { field: "rate", problem });
        }
        let seed = self.seed.unwrap_or(1);
        let pattern = match self.kind {
            Kind::Steady => Pattern::Steady { rate },
            Kind::Burst => Pattern::Burst { size: self.burst.unwrap_or(quota.saturating_mul(2)), every },
            Kind::Boundary => Pattern::Boundary { size: self.burst.unwrap_or(quota), window },
            Kind::Ramp => Pattern::Ramp { rate },
            Kind::OnOff => Pattern::OnOff { rate, every },
            Kind::Poisson => Pattern::Poisson { rate, seed },
            Kind::Attack => Pattern::Attack { rate },
        };
        Ok(Traffic::generated(pattern, span, u64::from(self.cost.unwrap_or(1))))
    }
}

/// Returns 1.5 times the rate that the fastest limit admits for long.
fn faster_than(limits: &[SimulatedLimit]) -> Rate {
    let pairs = limits.iter().map(|limit| limit.sustained());
    let speed = |rate: &Rate| rate.count() as f64 / rate.period().as_secs_f64().max(f64::MIN_POSITIVE);
    let fastest = pairs.max_by(|one, other| speed(one).total_cmp(&speed(other)));
    let fastest = fastest.unwrap_or_else(|| Rate::new(100, tollgate::MINUTE));
    match fastest.count().is_multiple_of(2) {
        true => Rate::new((fastest.count() / 2).saturating_mul(3), fastest.period()),
        false => Rate::new(fastest.count().saturating_mul(3), fastest.period().saturating_mul(2)),
    }
}

/// Returns the time in which traffic of a rate that is too fast for every limit has used up what each of them saves for
/// bursts: five times the longest, unless that is more requests than a simulation has.
fn default_span(limits: &[SimulatedLimit], window: Duration, rate: Rate) -> Duration {
    let longest = limits.iter().map(|limit| limit.limit().window()).max().unwrap_or(window).max(window);
    let [short, long] = [window, longest].map(|window| window.saturating_mul(DEFAULT_WINDOWS));
    let requests = rate.count() as f64 / rate.period().as_secs_f64().max(f64::MIN_POSITIVE) * long.as_secs_f64();
    if requests < MAX_REQUESTS as f64 / 2.0 { long.min(MAX_SPAN) } else { short }
}

fn check(field: &'static str, span: Duration) -> Result<(), InvalidNumber> {
    let problem = match span {
        Duration::ZERO => "there is no traffic in no time: use a duration such as 1m",
        _ if span > MAX_SPAN => "it is longer than ten years: use 3650d or less",
        _ => return Ok(()),
    };
    Err(InvalidNumber { field, problem })
}

//! `GET /v1/live`: decisions per second by limit and outcome.
//!
//! A sampler reads the counts once a second while someone polls, and ends a moment after the last poll. All viewers share
//! it. Nothing is counted here: the counters are those of the metrics.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::Uri;
use schemars::JsonSchema;
use serde::Serialize;
use tokio::time::{Instant, sleep};
use tollgate_telemetry::decisions::{DecisionCounts, DecisionLabel, Sums};
use tollgate_telemetry::seconds::unix_seconds;

use super::parameters::Parameters;
use super::{Admin, AdminState};
use crate::service::error_body::ErrorBody;

const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// The sampler ends this long after the last poll.
const IDLE_AFTER: Duration = Duration::from_secs(10);
/// The points of the history, one per second.
const MAX_POINTS: usize = 60;
/// The most limits in a response.
const MAX_LIMITS: usize = 1_000;
const DEFAULT_LIMITS: usize = 100;

/// The sampler of decisions, and its results.
#[derive(Default)]
pub(super) struct Live(Mutex<Samples>);

#[derive(Default)]
struct Samples {
    last_poll: Option<Instant>,
    is_running: bool,
    /// The counts of the last sample, and its time.
    last: Option<(Instant, Sums)>,
    /// The counts of the last interval, and its length in seconds.
    interval: f64,
    rates: HashMap<Box<str>, DecisionCounts>,
    history: VecDeque<Point>,
}

/// The order of limits in a response, the busiest first.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// By denials and other refusals per second, then by decisions.
    Denied,
    /// By decisions per second.
    Decisions,
    Name,
}

impl FromStr for Order {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "denied" => Ok(Self::Denied),
            "decisions" => Ok(Self::Decisions),
            "name" => Ok(Self::Name),
            _ => Err(()),
        }
    }
}

/// Decisions per second.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct LiveResponse {
    /// Seconds since the Unix epoch.
    time: f64,
    /// Seconds that the rates were measured over. 0 at the first poll, before there are any.
    interval: f64,
    /// Decisions per second of all limits, by outcome.
    totals: BTreeMap<&'static str, f64>,
    /// Decisions per second of the last minute, the oldest first.
    history: Vec<Point>,
    /// The number of limits in force.
    limits_total: usize,
    limits: Vec<LimitJson>,
}

/// Decisions per second at a time.
#[derive(Clone, Debug, Serialize, JsonSchema)]
struct Point {
    time: f64,
    allowed: f64,
    /// Denied by a limit or a ban.
    denied: f64,
    shadow_denied: f64,
    /// All other outcomes.
    other: f64,
}

/// The decisions of a limit.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "LiveLimit")]
struct LimitJson {
    limit: String,
    /// Whether it only counts, and denies nothing.
    shadow: bool,
    /// Decisions per second, by outcome. Outcomes without any are left out.
    per_second: BTreeMap<&'static str, f64>,
    /// Decisions since the start of the server, by outcome. Outcomes without any are left out.
    since_start: BTreeMap<&'static str, u64>,
}

pub(super) async fn live(State(state): State<AdminState>, uri: Uri) -> Result<Json<LiveResponse>, ErrorBody> {
    let parameters = Parameters::parse(&uri, &["count", "order"])?;
    let count = parameters.value("count", DEFAULT_LIMITS, "a number from 1 to 1000")?;
    let order = parameters.value("order", Order::Decisions, "denied, decisions or name")?;
    if !(1..=MAX_LIMITS).contains(&count) {
        return Err(ErrorBody::invalid(format!("count is {count}: use 1 to {MAX_LIMITS}")));
    }
    state.live.poll(&state);
    // Reading ten thousand counters takes milliseconds.
    let read = tokio::task::spawn_blocking(move || response(&state, count, order));
    read.await.map(Json).map_err(|_| ErrorBody::failed())
}

impl Live {
    fn samples(&self) -> MutexGuard<'_, Samples> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the sampler, unless it runs.
    fn poll(&self, state: &AdminState) {
        let mut samples = self.samples();
        samples.last_poll = Some(Instant::now());
        if std::mem::replace(&mut samples.is_running, true) {
            return;
        }
        drop(samples);
        tokio::spawn(sample(Arc::clone(state)));
    }
}

/// Reads the counts once a second, until nobody polls.
async fn sample(state: AdminState) {
    loop {
        let admin = Arc::clone(&state);
        let read = tokio::task::spawn_blocking(move || {
            let sums = admin.decisions();
            admin.live.samples().add(Instant::now(), sums);
        });
        let is_read = read.await.is_ok();
        sleep(SAMPLE_INTERVAL).await;
        let mut samples = state.live.samples();
        if !is_read || samples.last_poll.is_none_or(|last| last.elapsed() > IDLE_AFTER) {
            *samples = Samples::default();
            return;
        }
    }
}

impl Samples {
    /// Adds the counts at a time.
    fn add(&mut self, now: Instant, sums: Sums) {
        if let Some((before, last)) = &self.last {
            self.interval = now.saturating_duration_since(*before).as_secs_f64();
            self.rates.clear();
            for (name, counts) in &sums {
                let before = last.get(name).copied().unwrap_or_default();
                let mut change = DecisionCounts::default();
                for (change, (now, before)) in change.iter_mut().zip(counts.iter().zip(before)) {
                    *change = now.saturating_sub(before);
                }
                if change.iter().any(|count| *count > 0) {
                    self.rates.insert(name.clone(), change);
                }
            }
            let totals = self.totals();
            let rate = |label: DecisionLabel| self.per_second(totals[label as usize]);
            let (allowed, denied, shadow_denied) = (
                rate(DecisionLabel::Allowed),
                rate(DecisionLabel::Denied) + rate(DecisionLabel::Banned),
                rate(DecisionLabel::ShadowDenied),
            );
            // Requests that a shadow limit allows are decided by another limit, which counts them.
            let all = self.per_second(totals.iter().sum()) - rate(DecisionLabel::ShadowAllowed);
            let other = (all - allowed - denied - shadow_denied).max(0.0);
            if self.history.len() == MAX_POINTS {
                self.history.pop_front();
            }
            self.history.push_back(Point { time: unix_seconds(), allowed, denied, shadow_denied, other });
        }
        self.last = Some((now, sums));
    }

    /// Returns the decisions of all limits in the last interval.
    fn totals(&self) -> DecisionCounts {
        let mut totals = DecisionCounts::default();
        for counts in self.rates.values() {
            for (total, count) in totals.iter_mut().zip(counts) {
                *total += count;
            }
        }
        totals
    }

    fn per_second(&self, count: u64) -> f64 {
        if self.interval > 0.0 { (count as f64 / self.interval * 100.0).round() / 100.0 } else { 0.0 }
    }
}

fn response(state: &Admin, count: usize, order: Order) -> LiveResponse {
    let sums = state.decisions();
    let samples = state.live.samples();
    let in_force = state.server.reloads.in_force();
    let shadows: HashMap<&str, bool> =
        in_force.file.limits.iter().map(|limit| (limit.name.as_str(), limit.shadow)).collect();
    let rules = state.server.gate.rules();
    let mut names: Vec<&str> = rules.names().collect();
    let limits_total = names.len();
    let rates = |name: &str| samples.rates.get(name).copied().unwrap_or_default();
    let decisions = |name: &str| rates(name).iter().sum::<u64>();
    let denied = |name: &str| {
        let rates = rates(name);
        let allowed = rates[DecisionLabel::Allowed as usize] + rates[DecisionLabel::ShadowAllowed as usize];
        rates.iter().sum::<u64>() - allowed
    };
    match order {
        Order::Denied => {
            names.sort_by_cached_key(|name| (Reverse(denied(name)), Reverse(decisions(name)), *name));
        }
        Order::Decisions => names.sort_by_cached_key(|name| (Reverse(decisions(name)), *name)),
        Order::Name => names.sort_unstable(),
    }
    let limits = names.into_iter().take(count).map(|name| LimitJson {
        limit: name.to_owned(),
        shadow: shadows.get(name).copied().unwrap_or_default(),
        per_second: labelled(rates(name), |count| samples.per_second(count)),
        since_start: labelled(sums.get(name).copied().unwrap_or_default(), |count| count),
    });
    let totals = samples.totals();
    let totals = DecisionLabel::ALL.iter().zip(totals);
    LiveResponse {
        time: unix_seconds(),
        interval: samples.interval,
        totals: totals.map(|(label, count)| (label.as_str(), samples.per_second(count))).collect(),
        history: samples.history.iter().cloned().collect(),
        limits_total,
        limits: limits.collect(),
    }
}

/// Returns the counts that are not zero, by outcome.
fn labelled<T>(counts: DecisionCounts, value: impl Fn(u64) -> T) -> BTreeMap<&'static str, T> {
    let some = DecisionLabel::ALL.iter().zip(counts).filter(|(_, count)| *count > 0);
    some.map(|(label, count)| (label.as_str(), value(count))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn rates_are_the_change_of_counts_over_the_interval() {
        let mut samples = Samples::default();
        let mut counts = DecisionCounts::default();
        let sums = |counts| Sums::from([("a".into(), counts)]);
        let start = Instant::now();
        samples.add(start, sums(counts));
        assert!(samples.history.is_empty());
        counts[DecisionLabel::Allowed as usize] = 30;
        counts[DecisionLabel::Denied as usize] = 6;
        counts[DecisionLabel::Banned as usize] = 4;
        samples.add(start + Duration::from_secs(2), sums(counts));
        let point = samples.history.back().expect("a point");
        assert_eq!((point.allowed, point.denied, point.shadow_denied, point.other), (15.0, 5.0, 0.0, 0.0));
        for second in 3..100 {
            samples.add(start + Duration::from_secs(second), sums(counts));
        }
        assert_eq!((samples.history.len(), samples.rates.len()), (MAX_POINTS, 0));
    }
}

//! The results of a simulation.

#![expect(
    missing_docs,
    reason = "comments become part of the OpenAPI document, where names that explain themselves need none"
)]

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use tollgate_telemetry::seconds::Seconds;

use super::traffic::Traffic;
use super::{BURST, scenario::Scenario};

/// The columns of a timeline. It has many divisors, so that narrower plots have equal columns.
pub const COLUMNS: usize = 240;

/// The results of a simulation. Times are in seconds from the start of the traffic, counts are requests, and the worst
/// window, the largest burst and the remaining quota are units.
#[derive(Debug, JsonSchema, Serialize)]
pub struct Report {
    /// The worked example that this is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scenario: Option<ScenarioReport>,
    /// The traffic in words.
    pub traffic: String,
    #[serde(serialize_with = "seconds")]
    #[schemars(with = "f64")]
    pub span: Duration,
    /// The clients that sent the requests. Each has its own quota.
    pub keys: u32,
    pub offered: u64,
    /// The time within which admitted requests count as one burst.
    #[serde(serialize_with = "seconds")]
    #[schemars(with = "f64")]
    pub burst_within: Duration,
    /// The requests that arrived in each column of the timeline: equal parts of the span.
    pub offered_by_column: Vec<u64>,
    pub limits: Vec<LimitReport>,
}

#[derive(Debug, JsonSchema, Serialize)]
pub struct ScenarioReport {
    pub name: &'static str,
    pub title: &'static str,
    pub explanation: &'static str,
}

/// The results of one limit.
#[derive(Debug, JsonSchema, Serialize)]
pub struct LimitReport {
    pub name: String,
    pub algorithm: &'static str,
    /// The numbers of the limit in words.
    pub description: String,
    pub quota: u64,
    #[serde(serialize_with = "seconds")]
    #[schemars(with = "f64")]
    pub window: Duration,
    pub admitted: u64,
    pub denied: u64,
    /// The denied requests whose cost exceeds the whole quota.
    pub never_fits: u64,
    /// The admitted requests that are still in the queue at the end.
    pub queued_at_end: u64,
    /// The most units that one client got in any time as long as the window.
    pub worst_window: u64,
    #[serde(serialize_with = "seconds")]
    #[schemars(with = "f64")]
    pub worst_window_at: Duration,
    /// The most units that one client got within `burst_within`.
    pub largest_burst: u64,
    #[serde(serialize_with = "optional_seconds")]
    #[schemars(with = "Option<f64>")]
    pub wait_p50: Option<Duration>,
    #[serde(serialize_with = "optional_seconds")]
    #[schemars(with = "Option<f64>")]
    pub wait_p99: Option<Duration>,
    /// The requests that proceeded in each column. Those of a queue proceed after their delay.
    pub admitted_by_column: Vec<u64>,
    pub denied_by_column: Vec<u64>,
    /// The quota that is left at the end of each column, if there is one client.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub remaining: Vec<u64>,
    /// The results at each moment, if requests arrive at a few moments only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<Step>,
    /// Where windows of the clock start, unless there are too many of them to draw.
    #[serde(skip)]
    pub window_starts: Vec<Duration>,
}

/// The requests of one moment.
#[derive(Clone, Debug, PartialEq, Eq, JsonSchema, Serialize)]
pub struct Step {
    #[serde(serialize_with = "seconds")]
    #[schemars(with = "f64")]
    pub at: Duration,
    pub offered: u64,
    pub admitted: u64,
    /// The quota that is left after the last of them.
    pub remaining: u64,
}

impl Report {
    pub fn new(traffic: &Traffic, offered: u64, offered_by_column: Vec<u64>, limits: Vec<LimitReport>) -> Self {
        Self {
            scenario: None,
            traffic: traffic.description().to_owned(),
            span: traffic.span(),
            keys: traffic.keys(),
            offered,
            burst_within: BURST,
            offered_by_column,
            limits,
        }
    }

    pub fn of_scenario(self, scenario: Scenario) -> Self {
        let report =
            ScenarioReport { name: scenario.name(), title: scenario.title(), explanation: scenario.explanation() };
        Self { scenario: Some(report), ..self }
    }

    /// Returns the title of a page about this simulation.
    pub fn title(&self) -> String {
        self.scenario.as_ref().map_or_else(|| sentence(&self.traffic), |scenario| scenario.title.to_owned())
    }

    /// Returns the window of all limits, or `None` if they differ.
    pub fn common_window(&self) -> Option<Duration> {
        let first = self.limits.first()?.window;
        self.limits.iter().all(|limit| limit.window == first).then_some(first)
    }
}

fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

/// Adds up neighbouring columns, so that `count` of them are left. `count` must divide [`COLUMNS`].
pub fn merged(columns: &[u64], count: usize) -> Vec<u64> {
    columns.chunks((columns.len() / count).max(1)).map(|chunk| chunk.iter().sum()).collect()
}

fn seconds<S: Serializer>(span: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    Seconds(*span).serialize(serializer)
}

fn optional_seconds<S: Serializer>(span: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    span.map(Seconds).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_add_up() {
        assert_eq!(merged(&[1, 2, 3, 4, 5, 6], 3), [3, 7, 11]);
        assert_eq!(merged(&[1, 2, 3], 3), [1, 2, 3]);
    }
}

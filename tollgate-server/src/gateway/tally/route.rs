//! The counters of a worker for one route.

use http::StatusCode;

use super::super::failure::Failure;
use crate::counter::Counter;

/// The upper bounds of the duration buckets.
pub(in super::super) const BOUNDS_NANOS: [u64; 16] = [
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// The counters of one route in one worker.
#[derive(Debug)]
#[repr(align(128))]
pub(in super::super) struct RouteTally {
    pub(in super::super) name: Box<str>,
    began: Counter,
    /// Responses by status class; the last counter is for requests without a response.
    ended: [Counter; CLASSES.len()],
    /// Durations by bucket; the last bucket has no upper bound.
    durations: [Counter; BOUNDS_NANOS.len() + 1],
    nanos: Counter,
    /// Failures, in the order of [`FAILURES`].
    failures: [Counter; FAILURES.len()],
    retries: Counter,
}

/// The labels of status classes.
pub(in super::super) const CLASSES: [&str; 6] = ["1xx", "2xx", "3xx", "4xx", "5xx", "aborted"];

/// The failures of upstreams, with their labels in metrics.
pub(in super::super) const FAILURES: [(Failure, &str); 10] = [
    (Failure::CannotConnect, "cannot_connect"),
    (Failure::BadCertificate, "bad_certificate"),
    (Failure::ConnectTimeout, "connect_timeout"),
    (Failure::Disconnected, "disconnected"),
    (Failure::BadAnswer, "bad_answer"),
    (Failure::LongAnswerHead, "long_answer_head"),
    (Failure::RefusedAnswerHead, "refused_answer_head"),
    (Failure::UpstreamTimeout, "timeout"),
    (Failure::Exhausted, "gateway_exhausted"),
    (Failure::UpstreamConnections, "too_many_upstream_connections"),
];

impl RouteTally {
    pub(in super::super) fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            began: Counter::default(),
            ended: Default::default(),
            durations: Default::default(),
            nanos: Counter::default(),
            failures: Default::default(),
            retries: Counter::default(),
        }
    }

    pub(in super::super) fn note_began(&self) {
        self.began.add(1);
    }

    /// Counts the end of a request; without a status if its client left before the response.
    pub(in super::super) fn note_ended(&self, status: Option<StatusCode>, nanos: u64) {
        self.note_status(status);
        let bucket = BOUNDS_NANOS.iter().position(|bound| nanos <= *bound).unwrap_or(BOUNDS_NANOS.len());
        self.durations[bucket].add(1);
        self.nanos.add(nanos);
    }

    /// Counts the end of a request of unknown duration.
    pub(super) fn note_status(&self, status: Option<StatusCode>) {
        let class = status.map_or(CLASSES.len() - 1, |status| usize::from(status.as_u16() / 100).clamp(1, 5) - 1);
        self.ended[class].add(1);
    }

    pub(in super::super) fn note_failure(&self, failure: Failure) {
        if let Some(number) = FAILURES.iter().position(|(one, _)| *one == failure) {
            self.failures[number].add(1);
        }
    }

    pub(in super::super) fn note_retry(&self) {
        self.retries.add(1);
    }
}

/// The totals of a route over all workers.
#[derive(Debug, Default)]
pub(in super::super) struct RouteTotals {
    pub(in super::super) name: String,
    began: u64,
    pub(in super::super) ended: [u64; CLASSES.len()],
    pub(in super::super) durations: [u64; BOUNDS_NANOS.len() + 1],
    pub(in super::super) nanos: u64,
    pub(in super::super) failures: [u64; FAILURES.len()],
    pub(in super::super) retries: u64,
}

impl RouteTotals {
    pub(in super::super) fn of<'a>(tallies: impl IntoIterator<Item = &'a RouteTally>) -> Self {
        let mut totals = Self::default();
        for tally in tallies {
            if totals.name.is_empty() {
                totals.name = tally.name.to_string();
            }
            add(&mut totals.ended, &tally.ended);
            add(&mut totals.durations, &tally.durations);
            add(&mut totals.failures, &tally.failures);
            totals.nanos += tally.nanos.value();
            totals.retries += tally.retries.value();
            totals.began += tally.began.value();
        }
        totals
    }

    pub(in super::super) fn in_flight(&self) -> u64 {
        // The counters are not read atomically.
        self.began.saturating_sub(self.ended.iter().sum())
    }
}

fn add<const N: usize>(sums: &mut [u64; N], counters: &[Counter; N]) {
    for (sum, counter) in sums.iter_mut().zip(counters) {
        *sum += counter.value();
    }
}

//! Ejection: an upstream that fails gets no requests for a while, if another upstream is healthy.
//!
//! Routes may share an upstream. One that cannot be reached is of no use to any route, so failures to connect are
//! counted for all routes together. Every other failure may be due to the requests of one route: a page that times out,
//! or a status that only this route counts. So each route counts these by itself, and neither its failures nor its
//! successes change what another route has counted.
//!
//! Every request reads the state of its upstream, which rarely changes. So a change takes a lock and publishes a
//! summary, and requests read the summary: one relaxed load, and no store unless there is something to change.
//!
//! Deliberately not here: health checks and log lines, which [`health`](super::health) has.

use std::mem;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http::StatusCode;
use tollgate_config::internal::EjectRule;
use tollgate_net::deadline::{Tick, Wait};

use crate::gateway::failure::Fault;

/// The ejection settings of a route.
#[derive(Clone, Copy, Debug)]
pub(in crate::gateway) struct EjectPolicy {
    after: u32,
    lasts: Duration,
    /// The statuses that count as failures: one bit for each from 500 on.
    statuses: u128,
}

impl EjectPolicy {
    pub(in crate::gateway) fn new(rule: &EjectRule) -> Self {
        let bits = rule.statuses.iter().filter_map(|status| status_bit(*status));
        Self { after: rule.after, lasts: rule.lasts.duration(), statuses: bits.fold(0, |all, bit| all | bit) }
    }

    /// Returns whether a response with that status is a failure of the upstream.
    pub(super) fn counts(&self, status: StatusCode) -> bool {
        status_bit(status.as_u16()).is_some_and(|bit| self.statuses & bit != 0)
    }
}

fn status_bit(status: u16) -> Option<u128> {
    1u128.checked_shl(status.checked_sub(500)?.into())
}

/// The consecutive failures of an upstream, and its ejection.
#[derive(Debug, Default)]
pub(in crate::gateway) struct Ejection {
    /// [`NO_FAILURES`], [`SOME_FAILURES`], or [`UNPROVEN`] and the end of the ejection added to it.
    summary: AtomicU64,
    /// The number of ejections so far. A request remembers it, since its success ends only an ejection that began before.
    count: AtomicU32,
    series: Mutex<Series>,
}

/// The summary of a healthy upstream. A success changes nothing.
const NO_FAILURES: u64 = 0;

/// The summary of a healthy upstream that has failed since its last success.
const SOME_FAILURES: u64 = 1;

/// The least summary of an upstream that was ejected and has not answered a request since.
const UNPROVEN: u64 = 2;

/// The failures since the last success.
#[derive(Debug, Default)]
struct Series {
    /// The failures since the last success or ejection.
    failures: u32,
    state: State,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Healthy,
    /// Ejected until that tick. Afterwards it gets requests again, and one of them has to succeed.
    Ejected { until: Tick, report: Report },
    /// The ejection is over and a health check has passed since, but no request has succeeded.
    Rechecked(Report),
    /// A request has succeeded since the ejection, and this was not logged.
    Recovered(Report),
}

/// The log line about the start of an ejection.
#[derive(Debug)]
enum Report {
    Due(Cause),
    Logged,
}

/// A change to be logged.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    Ejected(Cause),
    Recovered,
}

/// The cause of an ejection.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cause {
    /// The number of failures.
    pub(super) failures: u32,
    /// The duration of the ejection.
    pub(super) lasts: Duration,
    /// The description of the last failure.
    pub(super) fault: String,
}

impl Ejection {
    pub(super) fn is_ejected(&self, now: Tick) -> bool {
        self.summary.load(Relaxed) > UNPROVEN.saturating_add(now)
    }

    /// Returns whether a request has succeeded since the last ejection, if there was one.
    pub(super) fn is_proven(&self) -> bool {
        self.summary.load(Relaxed) < UNPROVEN
    }

    /// Returns whether a request has succeeded, or a health check has passed, since the last ejection.
    pub(super) fn is_likely_over(&self) -> bool {
        self.is_proven() || matches!(self.series().state, State::Rechecked(_))
    }

    /// Counts a failure.
    pub(super) fn note_failure(&self, fault: &Fault, policy: &EjectPolicy, now: Tick) {
        self.change(|Series { failures, state }| {
            *failures += 1;
            if *failures < policy.after {
                return;
            }
            let failures = mem::take(failures);
            let report = match mem::take(state) {
                State::Healthy => Report::Due(Cause { failures, lasts: policy.lasts, fault: fault.to_string() }),
                // Consecutive ejections are one for the log: a dead upstream is tried now and then.
                State::Ejected { report, .. } | State::Rechecked(report) | State::Recovered(report) => report,
            };
            *state = State::Ejected { until: Wait::at_least(policy.lasts).from(now), report };
            self.count.fetch_add(1, Relaxed);
        });
    }

    /// Returns the number of ejections so far.
    pub(super) fn count(&self) -> u32 {
        self.count.load(Relaxed)
    }

    /// Records the success of a request that was sent after this number of ejections.
    pub(super) fn note_success(&self, sent_after: u32) {
        if self.summary.load(Relaxed) == NO_FAILURES {
            return;
        }
        self.change(|Series { failures, state }| {
            // A request that was sent before an ejection says nothing about the time since.
            if sent_after != self.count() && matches!(state, State::Ejected { .. } | State::Rechecked(_)) {
                return;
            }
            *failures = 0;
            *state = match mem::take(state) {
                State::Healthy => State::Healthy,
                State::Ejected { report, .. } | State::Rechecked(report) | State::Recovered(report) => {
                    State::Recovered(report)
                }
            };
        });
    }

    /// Records a health check that has passed. One that started during an ejection says nothing about the time after.
    pub(super) fn note_passed_check(&self, started: Tick) {
        if !self.is_proven() {
            self.change(|Series { state, .. }| {
                *state = match mem::take(state) {
                    State::Ejected { until, report } if until <= started => State::Rechecked(report),
                    other => other,
                };
            });
        }
    }

    /// Returns the change that was not logged yet, if there is one.
    pub(super) fn take_change(&self) -> Option<Change> {
        let mut series = self.series();
        let (report, has_recovered) = match &mut series.state {
            State::Healthy => return None,
            State::Ejected { report, .. } | State::Rechecked(report) => (report, false),
            State::Recovered(report) => (report, true),
        };
        match mem::replace(report, Report::Logged) {
            Report::Due(cause) => Some(Change::Ejected(cause)),
            Report::Logged if has_recovered => {
                series.state = State::Healthy;
                Some(Change::Recovered)
            }
            Report::Logged => None,
        }
    }

    fn change(&self, change: impl FnOnce(&mut Series)) {
        let mut series = self.series();
        change(&mut series);
        let summary = match series.state {
            State::Ejected { until, .. } => UNPROVEN.saturating_add(until),
            State::Rechecked(_) => UNPROVEN,
            State::Healthy | State::Recovered(_) if series.failures > 0 => SOME_FAILURES,
            State::Healthy | State::Recovered(_) => NO_FAILURES,
        };
        self.summary.store(summary, Relaxed);
    }

    fn series(&self) -> MutexGuard<'_, Series> {
        self.series.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::failure::Failure;

    /// Ejects for 100 ms after two failures.
    const POLICY: EjectPolicy = EjectPolicy { after: 2, lasts: Duration::from_millis(100), statuses: 0 };

    fn fail(ejection: &Ejection, times: u32, now: Tick) {
        (0..times).for_each(|_| ejection.note_failure(&Failure::Disconnected.into(), &POLICY, now));
    }

    fn ejected() -> Ejection {
        let ejection = Ejection::default();
        fail(&ejection, 2, 10);
        assert!(ejection.is_ejected(10) && !ejection.is_proven());
        ejection
    }

    #[test]
    fn success_between_failures_prevents_an_ejection() {
        let ejection = Ejection::default();
        for now in 0..10 {
            fail(&ejection, 1, now);
            ejection.note_success(ejection.count());
        }
        assert!(ejection.is_proven() && !ejection.is_ejected(0));
    }

    #[test]
    fn request_that_was_sent_before_an_ejection_does_not_end_it() {
        let ejection = ejected();
        ejection.note_success(0);
        assert!(ejection.is_ejected(11));
        assert!(!ejection.is_ejected(12) && !ejection.is_proven(), "its time is over, but no request has succeeded");
        let sent_after = ejection.count();
        fail(&ejection, 2, 20);
        ejection.note_success(sent_after);
        assert!(ejection.is_ejected(20), "it was sent before the second ejection");
        ejection.note_success(ejection.count());
        assert!(ejection.is_proven());
    }

    #[test]
    fn check_that_started_during_an_ejection_says_nothing_about_the_time_after() {
        let ejection = ejected();
        ejection.note_passed_check(11);
        assert!(!ejection.is_likely_over());
        ejection.note_passed_check(12);
        assert!(ejection.is_likely_over() && !ejection.is_proven());
        fail(&ejection, 2, 20);
        assert!(ejection.is_ejected(20) && !ejection.is_likely_over());
    }

    #[test]
    fn ejections_without_a_success_between_them_are_logged_as_one() {
        let ejection = ejected();
        let cause = Cause { failures: 2, lasts: POLICY.lasts, fault: Fault::from(Failure::Disconnected).to_string() };
        assert_eq!(ejection.take_change(), Some(Change::Ejected(cause)));
        fail(&ejection, 2, 20);
        assert_eq!(ejection.take_change(), None);
        ejection.note_success(ejection.count());
        fail(&ejection, 2, 30);
        assert_eq!(ejection.take_change(), None, "it has recovered for less than the interval of the log");
        ejection.note_success(ejection.count());
        assert_eq!(ejection.take_change(), Some(Change::Recovered));
        assert_eq!(ejection.take_change(), None);
    }
}

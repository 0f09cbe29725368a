//! The HTTP answers of a limiter, to the letter: what clients parse is a promise.

mod bodies;
mod families;
mod grpc;
mod injection;
mod upstreams;

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use tollgate::{Algorithm, Decision, FixedWindow, Limit, Limiter, MINUTE, ManualClock, Timestamp};

/// The moment that the documents' example of `X-RateLimit-Reset` names; a full minute later it is reset.
pub(crate) const START_SECS: u64 = 1_639_999_940;

/// A limit of that name, and a limiter of it at [`START_SECS`].
pub(crate) fn limited(name: &str, algorithm: impl Into<Algorithm>) -> (Limit, Limiter) {
    let limit = Limit::new(name, algorithm).expect("the numbers are within the bounds");
    let clock = ManualClock::at(Timestamp::from_secs(START_SECS));
    let limiter = Limiter::builder().limit(limit.clone()).clock(clock).build();
    (limit, limiter.expect("one valid limit makes a limiter"))
}

/// 100 a minute from the first request, of which `spent` are gone before the decision.
pub(crate) fn per_user(spent: u64) -> (Limit, Decision) {
    let (limit, limiter) = limited("per-user", FixedWindow::new(100, MINUTE).from_first_request());
    if spent > 0 {
        assert!(limiter.check_n("ann", spent).is_allowed());
    }
    (limit, limiter.check("ann"))
}

/// A denial that promises that wait.
pub(crate) fn denied_for(wait: Duration) -> (Limit, Decision) {
    let (limit, limiter) = limited("per-user", tollgate::SlidingWindowLog::new(1, wait));
    assert!(limiter.check("ann").is_allowed());
    let decision = limiter.check("ann");
    assert_eq!(decision.retry_after(), Some(wait));
    (limit, decision)
}

/// The headers as lines, sorted.
pub(crate) fn lines(headers: &HeaderMap) -> Vec<String> {
    let line = |value: &HeaderValue| value.to_str().expect("every value here is ASCII").to_owned();
    let mut lines: Vec<_> = headers.iter().map(|(name, value)| format!("{name}: {}", line(value))).collect();
    lines.sort();
    lines
}

//! The HTTP responses of a limiter, byte by byte: clients depend on them.

mod bodies;
mod families;
mod grpc;
mod injection;
mod upstreams;

use std::time::Duration;

use http::{HeaderMap, HeaderValue};
use tollgate::{Algorithm, Decision, FixedWindow, Limit, Limiter, MINUTE, ManualClock, Timestamp};

/// A minute before the value of `X-RateLimit-Reset` in the documentation's example.
pub(crate) const START_SECS: u64 = 1_639_999_940;

/// Returns a limit of that name, and a limiter for it at [`START_SECS`].
pub(crate) fn limited(name: &str, algorithm: impl Into<Algorithm>) -> (Limit, Limiter) {
    let limit = Limit::new(name, algorithm).expect("the numbers are within the bounds");
    let clock = ManualClock::at(Timestamp::from_secs(START_SECS));
    let limiter = Limiter::builder().limit(limit.clone()).clock(clock).build();
    (limit, limiter.expect("one valid limit makes a limiter"))
}

/// Returns a limit of 100 per minute from the first request, and a decision after `spent` units were taken.
pub(crate) fn per_user(spent: u64) -> (Limit, Decision) {
    let (limit, limiter) = limited("per-user", FixedWindow::new(100, MINUTE).from_first_request());
    if spent > 0 {
        assert!(limiter.check_n("ann", spent).is_allowed());
    }
    (limit, limiter.check("ann"))
}

/// Returns a denial with this wait.
pub(crate) fn denied_for(wait: Duration) -> (Limit, Decision) {
    let (limit, limiter) = limited("per-user", tollgate::SlidingWindowLog::new(1, wait));
    assert!(limiter.check("ann").is_allowed());
    let decision = limiter.check("ann");
    assert_eq!(decision.retry_after(), Some(wait));
    (limit, decision)
}

/// Returns the headers as sorted lines.
pub(crate) fn lines(headers: &HeaderMap) -> Vec<String> {
    let line = |value: &HeaderValue| value.to_str().expect("every value here is ASCII").to_owned();
    let mut lines: Vec<_> = headers.iter().map(|(name, value)| format!("{name}: {}", line(value))).collect();
    lines.sort();
    lines
}

//! The counters of a worker, and log lines about the events that they count. Each worker has its own counters, so that
//! processors do not contend for them.
//!
//! Deliberately not here: the totals of all workers, which [`metrics`](super::metrics) computes on request.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};

use http::StatusCode;
use tollgate_http::Refusal;
use tollgate_http1::Ambiguity;
use tollgate_http1::ambiguity::AMBIGUITIES;
use tollgate_net::deadline::Tick;
use tollgate_rules::Outcome;
use tollgate_rules::internal::Unreadable;
use tollgate_telemetry::counter::Counter;
use tollgate_telemetry::decisions::{Decisions, LastLimit};
use tollgate_telemetry::notice;

use super::buffer_budget::BufferBudget;
use super::failure::{CertificateProblem, Failure, HANDSHAKE_FAILURES, HandshakeFailure, MISUSES, Misuse};
use super::head::headers::DroppedHeaders;

/// The counters of one worker.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Tally {
    pub(super) connections: AtomicI64,
    /// Open client connections of all workers.
    pub(super) all_connections: Arc<AtomicI64>,
    /// The buffer budget of all workers.
    pub(super) buffer_budget: Arc<BufferBudget>,
    pub(super) accepted: Counter,
    pub(super) refused_connections: Counter,
    /// Requests whose permit is held after their clients have left.
    pub(super) abandoned: AtomicU32,
    /// Those of them that keep their connection to the upstream.
    pub(super) connected_abandoned: AtomicU32,
    /// Connections closed because of misuse.
    pub(super) closed: ReasonCounters<Misuse, { MISUSES.len() }>,
    /// The rate limiter of the log lines about them, for all workers.
    closings: Arc<Closings>,
    /// Connections refused because their address had too many.
    pub(super) refused_by_address: Counter,
    /// Refused requests.
    pub(super) ambiguous: ReasonCounters<Ambiguity, { AMBIGUITIES.len() }>,
    /// Refused requests, in the order of [`Unreadable::REASONS`].
    unreadable: [Counter; Unreadable::REASONS.len()],
    /// Request headers dropped because of an underscore, a dot or the like in their name.
    pub(super) underscore_headers: Counter,
    /// Forwarding headers dropped because their sender is not a trusted proxy.
    pub(super) forwarding_headers: Counter,
    pub(super) failed_handshakes: ReasonCounters<HandshakeFailure, { HANDSHAKE_FAILURES.len() }>,
    /// Requests without a route.
    unrouted: RouteTally,
    decisions: Decisions,
    clock: quanta::Clock,
}

/// A time stamp of the processor's counter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment(u64);

impl Tally {
    pub(super) fn new(
        all_connections: &Arc<AtomicI64>,
        buffer_budget: &Arc<BufferBudget>,
        closings: &Arc<Closings>,
    ) -> Self {
        Self {
            connections: AtomicI64::new(0),
            all_connections: Arc::clone(all_connections),
            buffer_budget: Arc::clone(buffer_budget),
            accepted: Counter::default(),
            refused_connections: Counter::default(),
            abandoned: AtomicU32::new(0),
            connected_abandoned: AtomicU32::new(0),
            closed: ReasonCounters::new(&MISUSES),
            closings: Arc::clone(closings),
            refused_by_address: Counter::default(),
            ambiguous: ReasonCounters::new(&AMBIGUITIES),
            unreadable: Default::default(),
            underscore_headers: Counter::default(),
            forwarding_headers: Counter::default(),
            failed_handshakes: ReasonCounters::new(&HANDSHAKE_FAILURES),
            unrouted: RouteTally::new(""),
            decisions: Decisions::default(),
            clock: quanta::Clock::new(),
        }
    }

    pub(super) fn now(&self) -> Moment {
        Moment(self.clock.raw())
    }

    pub(super) fn nanos_since(&self, moment: Moment) -> u64 {
        self.clock.delta_as_nanos(moment.0, self.clock.raw())
    }

    /// Counts and logs a connection that is closed because of misuse.
    pub(super) fn note_closed(&self, misuse: Misuse, peer: IpAddr, now: Tick) {
        self.closed.note(misuse);
        self.closings.log(misuse, peer, now);
    }

    /// Counts a request that has more than one interpretation, by index of the reason.
    pub(super) fn note_unreadable(&self, number: usize) {
        if let Some(counter) = self.unreadable.get(number) {
            counter.add(1);
        }
    }

    /// Counts the dropped headers of a request.
    pub(super) fn note_dropped_headers(&self, dropped: DroppedHeaders) {
        if dropped != DroppedHeaders::default() {
            self.underscore_headers.add(dropped.underscore.into());
            self.forwarding_headers.add(dropped.forwarding.into());
        }
    }

    /// Counts a handshake that failed with this error. A client certificate that is missing or not trusted is logged, too.
    pub(super) fn note_handshake_error(&self, error: &io::Error, peer: IpAddr, now: Tick) {
        self.failed_handshakes.note(HandshakeFailure::of(error));
        if let Some(problem) = CertificateProblem::of(error) {
            self.closings.log_certificate(problem, peer, now);
        }
    }

    /// Logs a request that has passed this gateway before.
    pub(super) fn note_loop(&self, peer: IpAddr, host: &[u8], now: Tick) {
        self.closings.log_loop(peer, host, now);
    }

    /// Counts an outcome, faster if the same limit decides repeatedly.
    pub(super) fn note_outcome(&self, last: &mut LastLimit, outcome: &Outcome) {
        self.decisions.record_unlocked(outcome, last);
        if let Some(Refusal::Unreadable(request)) = outcome.refusal()
            && let Some(number) = Unreadable::REASONS.iter().position(|one| *one == request.reason)
        {
            self.note_unreadable(number);
        }
    }

    /// Counts the end of a request without a route.
    pub(super) fn note_unrouted(&self, status: Option<StatusCode>, nanos: u64) {
        self.unrouted.note_began();
        self.unrouted.note_ended(status, nanos);
    }

    /// Counts a request that could not be parsed. Its duration is unknown.
    pub(super) fn note_unparsed(&self, status: StatusCode) {
        self.unrouted.note_began();
        self.unrouted.note_status(Some(status));
    }

    pub(super) fn unrouted(&self) -> &RouteTally {
        &self.unrouted
    }

    pub(super) fn decisions(&self) -> &Decisions {
        &self.decisions
    }

    /// Returns the number of requests with more than one interpretation, by index of the reason.
    pub(super) fn unreadable(&self, number: usize) -> u64 {
        self.unreadable.get(number).map_or(0, Counter::value)
    }
}

/// Counters by reason.
#[derive(Debug)]
pub(super) struct ReasonCounters<Reason: 'static, const N: usize> {
    /// The reasons with their labels in metrics.
    table: &'static [(Reason, &'static str); N],
    counters: [Counter; N],
}

impl<Reason: PartialEq, const N: usize> ReasonCounters<Reason, N> {
    fn new(table: &'static [(Reason, &'static str); N]) -> Self {
        Self { table, counters: std::array::from_fn(|_| Counter::default()) }
    }

    /// Counts an event. A reason that is not in the table is not counted.
    pub(super) fn note(&self, reason: Reason) {
        if let Some(number) = self.table.iter().position(|(one, _)| *one == reason) {
            self.counters[number].add(1);
        }
    }

    /// Returns the labels and counts, always in the same order.
    pub(super) fn values(&self) -> [(&'static str, u64); N] {
        std::array::from_fn(|number| (self.table[number].1, self.counters[number].value()))
    }
}

/// The upper bounds of the duration buckets.
pub(super) const BOUNDS_NANOS: [u64; 16] = [
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
pub(super) struct RouteTally {
    pub(super) name: Box<str>,
    began: Counter,
    /// Responses by status class; the last counter is for requests without a response.
    ended: [Counter; CLASSES.len()],
    /// Durations by bucket; the last bucket has no upper bound.
    durations: [Counter; BOUNDS_NANOS.len() + 1],
    nanos: Counter,
    failures: ReasonCounters<Failure, { FAILURES.len() }>,
    retries: Counter,
}

/// The labels of status classes.
pub(super) const CLASSES: [&str; 6] = ["1xx", "2xx", "3xx", "4xx", "5xx", "aborted"];

/// The failures of upstreams, with their labels in metrics.
const FAILURES: [(Failure, &str); 11] = [
    (Failure::CannotConnect, "cannot_connect"),
    (Failure::BadCertificate, "bad_certificate"),
    (Failure::ConnectTimeout, "connect_timeout"),
    (Failure::Disconnected, "disconnected"),
    (Failure::NotProcessed, "not_processed"),
    (Failure::InvalidResponse, "invalid_response"),
    (Failure::ResponseHeadTooLong, "response_head_too_long"),
    (Failure::ResponseHeadRefused, "response_head_refused"),
    (Failure::UpstreamTimeout, "timeout"),
    (Failure::Exhausted, "gateway_exhausted"),
    (Failure::UpstreamConnections, "too_many_upstream_connections"),
];

impl RouteTally {
    pub(super) fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            began: Counter::default(),
            ended: Default::default(),
            durations: Default::default(),
            nanos: Counter::default(),
            failures: ReasonCounters::new(&FAILURES),
            retries: Counter::default(),
        }
    }

    pub(super) fn note_began(&self) {
        self.began.add(1);
    }

    /// Counts the end of a request; without a status if its client left before the response.
    pub(super) fn note_ended(&self, status: Option<StatusCode>, nanos: u64) {
        self.note_status(status);
        let bucket = BOUNDS_NANOS.iter().position(|bound| nanos <= *bound).unwrap_or(BOUNDS_NANOS.len());
        self.durations[bucket].add(1);
        self.nanos.add(nanos);
    }

    /// Counts the end of a request of unknown duration.
    fn note_status(&self, status: Option<StatusCode>) {
        let class = status.map_or(CLASSES.len() - 1, |status| usize::from(status.as_u16() / 100).clamp(1, 5) - 1);
        self.ended[class].add(1);
    }

    pub(super) fn note_failure(&self, failure: Failure) {
        self.failures.note(failure);
    }

    pub(super) fn note_retry(&self) {
        self.retries.add(1);
    }
}

/// The totals of a route over all workers.
#[derive(Debug, Default)]
pub(super) struct RouteTotals {
    pub(super) name: String,
    began: u64,
    pub(super) ended: [u64; CLASSES.len()],
    pub(super) durations: [u64; BOUNDS_NANOS.len() + 1],
    pub(super) nanos: u64,
    pub(super) failures: [(&'static str, u64); FAILURES.len()],
    pub(super) retries: u64,
}

impl RouteTotals {
    pub(super) fn of<'a>(tallies: impl IntoIterator<Item = &'a RouteTally>) -> Self {
        let mut totals = Self::default();
        for tally in tallies {
            if totals.name.is_empty() {
                totals.name = tally.name.to_string();
            }
            add(&mut totals.ended, &tally.ended);
            add(&mut totals.durations, &tally.durations);
            totals.failures = sum(totals.failures, tally.failures.values());
            totals.nanos += tally.nanos.value();
            totals.retries += tally.retries.value();
            totals.began += tally.began.value();
        }
        totals
    }

    pub(super) fn in_flight(&self) -> u64 {
        // The counters are not read atomically.
        self.began.saturating_sub(self.ended.iter().sum())
    }
}

/// Adds the counts of another worker.
pub(super) fn sum<const N: usize>(
    sums: [(&'static str, u64); N],
    more: [(&'static str, u64); N],
) -> [(&'static str, u64); N] {
    std::array::from_fn(|number| (more[number].0, sums[number].1 + more[number].1))
}

fn add<const N: usize>(sums: &mut [u64; N], counters: &[Counter; N]) {
    for (sum, counter) in sums.iter_mut().zip(counters) {
        *sum += counter.value();
    }
}

/// Ticks between two log lines of one kind: ten seconds.
pub(super) const LOG_EVERY_TICKS: u64 = 100;

/// Log lines about connections that the gateway closes, and about requests in a loop, at most one of each kind in ten
/// seconds.
#[derive(Debug, Default)]
pub(crate) struct Closings {
    misuses: LogThrottle,
    certificates: LogThrottle,
    loops: LogThrottle,
}

/// The most bytes of a host that are logged. A client chooses it.
const MAX_LOGGED_HOST: usize = 100;

/// Events that were not logged yet, and the tick of the last log line.
#[derive(Debug, Default)]
pub(super) struct LogThrottle {
    unlogged: AtomicU64,
    logged_at: AtomicU64,
}

impl LogThrottle {
    /// Counts an event. If a line is due, returns the number of events since the last line.
    pub(super) fn note(&self, now: Tick) -> Option<u64> {
        let unlogged = self.unlogged.fetch_add(1, Relaxed) + 1;
        let logged_at = self.logged_at.load(Relaxed);
        let is_due = logged_at == 0 || now.saturating_sub(logged_at) >= LOG_EVERY_TICKS;
        if !is_due || self.logged_at.compare_exchange(logged_at, now.max(1), Relaxed, Relaxed).is_err() {
            return None;
        }
        self.unlogged.fetch_sub(unlogged, Relaxed);
        Some(unlogged)
    }

    /// Counts an event. If a line is due, returns the note about the others since the last line.
    fn note_with_others(&self, now: Tick, others_are: &str) -> Option<String> {
        Some(match self.note(now)? - 1 {
            0 => String::new(),
            others => format!(" ({others} more {others_are} since the last line)"),
        })
    }
}

impl Closings {
    /// Logs a closed connection, unless another one was logged recently.
    pub(crate) fn log(&self, misuse: Misuse, peer: IpAddr, now: Tick) {
        let Some(others) = self.misuses.note_with_others(now, "connections") else { return };
        let why = match misuse {
            Misuse::ControlFrameFlood => "it sent too many frames without effect",
            Misuse::PrematureResets => "it reset too many requests before they were answered",
        };
        notice::warn(format_args!(
            "HTTP/2 connection of {peer} closed: {why}{others}: block the client if this goes on"
        ));
    }

    /// Logs a client whose certificate is missing or not trusted, unless another one was logged recently.
    pub(super) fn log_certificate(&self, problem: CertificateProblem, peer: IpAddr, now: Tick) {
        let Some(others) = self.certificates.note_with_others(now, "connections") else { return };
        let (problem, fix) = problem.texts();
        notice::warn(format_args!("TLS connection of {peer} refused: {problem}{others}: {fix}"));
    }

    /// Logs a request that has passed this gateway before, unless another one was logged recently.
    pub(super) fn log_loop(&self, peer: IpAddr, host: &[u8], now: Tick) {
        let Some(others) = self.loops.note_with_others(now, "requests") else { return };
        let host = host.get(..MAX_LOGGED_HOST).unwrap_or(host).escape_ascii();
        notice::warn(format_args!(
            "request of {peer} for host {host} refused: it has passed this gateway before{others}: correct the route whose \
             upstream leads back to this gateway, or remove Via on it if requests may pass twice"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_telemetry::notice::captured::lines_of;

    #[test]
    fn refused_clients_are_logged_with_the_fix() {
        let peer = IpAddr::from([192, 0, 2, 7]);
        let (at_once, later) = (1, 1 + LOG_EVERY_TICKS);
        let lines = lines_of(|| {
            for misuse in [Misuse::ControlFrameFlood, Misuse::PrematureResets] {
                let closings = Closings::default();
                for now in [at_once, at_once, later] {
                    closings.log(misuse, peer, now);
                }
            }
            let closings = Closings::default();
            closings.log_certificate(CertificateProblem::Missing, peer, at_once);
            for now in [at_once, at_once, later] {
                closings.log_loop(peer, b"shop.example\n", now);
            }
        });
        insta::assert_snapshot!(lines);
    }
}

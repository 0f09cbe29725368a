//! The counters of a worker. Each worker has its own, so that processors do not contend for a counter.
//!
//! Deliberately not here: the totals of all workers, which [`metrics`](super::metrics) computes on request.

mod route;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32};

use http::StatusCode;
use tollgate::Outcome;
use tollgate::http::Refusal;
use tollgate::internal::Unreadable;

pub(super) use self::route::{BOUNDS_NANOS, CLASSES, FAILURES, RouteTally, RouteTotals};
use super::buffer_budget::BufferBudget;
use super::deadline::Tick;
use super::frames::{Closings, MISUSES, Misuse};
use super::framing::Ambiguity;
use super::header_names::DroppedHeaders;
use super::tls::{HANDSHAKE_FAILURES, HandshakeFailure};
use crate::counter::Counter;
use crate::decisions::{Decisions, LastLimit};

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
    pub(super) turned_away: Counter,
    /// Requests whose permit is held after their clients have left.
    pub(super) abandoned: AtomicU32,
    /// Those of them that keep their connection to the upstream.
    pub(super) connected_abandoned: AtomicU32,
    /// Connections closed because of misuse, in the order of [`MISUSES`].
    closed: [Counter; MISUSES.len()],
    /// The rate limiter of the log lines about them, for all workers.
    closings: Arc<Closings>,
    /// Connections refused because their address had too many.
    pub(super) turned_away_by_address: Counter,
    /// Refused requests, in the order of [`AMBIGUITIES`].
    ambiguous: [Counter; AMBIGUITIES.len()],
    /// Refused requests, in the order of [`Unreadable::REASONS`].
    unreadable: [Counter; Unreadable::REASONS.len()],
    /// Request headers dropped because of an underscore in their name.
    pub(super) underscore_headers: Counter,
    /// Forwarding headers dropped because their sender is not a trusted proxy.
    pub(super) forwarding_headers: Counter,
    /// Failed handshakes, in the order of [`HANDSHAKE_FAILURES`].
    failed_handshakes: [Counter; HANDSHAKE_FAILURES.len()],
    /// Requests without a route.
    unrouted: RouteTally,
    decisions: Decisions,
    clock: quanta::Clock,
}

/// The reasons for refusing ambiguous requests, with their labels in metrics.
pub(super) const AMBIGUITIES: [(Ambiguity, &str); 11] = [
    (Ambiguity::BareLf, "bare_lf"),
    (Ambiguity::Nul, "nul"),
    (Ambiguity::SpaceBeforeColon, "space_before_colon"),
    (Ambiguity::FoldedLine, "folded_line"),
    (Ambiguity::BadLength, "bad_length"),
    (Ambiguity::SeveralLengths, "several_lengths"),
    (Ambiguity::BothLengths, "both_lengths"),
    (Ambiguity::BadTransferCoding, "bad_transfer_coding"),
    (Ambiguity::BadChunk, "bad_chunk"),
    (Ambiguity::HeadTooLong, "head_too_long"),
    (Ambiguity::UnderscoreHeader, "underscore_header"),
];

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
            turned_away: Counter::default(),
            abandoned: AtomicU32::new(0),
            connected_abandoned: AtomicU32::new(0),
            closed: Default::default(),
            closings: Arc::clone(closings),
            turned_away_by_address: Counter::default(),
            ambiguous: Default::default(),
            unreadable: Default::default(),
            underscore_headers: Counter::default(),
            forwarding_headers: Counter::default(),
            failed_handshakes: Default::default(),
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

    pub(super) fn note_ambiguity(&self, ambiguity: Ambiguity) {
        if let Some(number) = AMBIGUITIES.iter().position(|(one, _)| *one == ambiguity) {
            self.ambiguous[number].add(1);
        }
    }

    /// Counts and logs a connection that is closed because of misuse.
    pub(super) fn note_closed(&self, misuse: Misuse, peer: IpAddr, now: Tick) {
        if let Some(number) = MISUSES.iter().position(|(one, _)| *one == misuse) {
            self.closed[number].add(1);
        }
        self.closings.log(misuse, peer, now);
    }

    /// Returns the number of closed connections, by index of the reason.
    pub(super) fn closed(&self, number: usize) -> u64 {
        self.closed.get(number).map_or(0, Counter::value)
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

    pub(super) fn note_failed_handshake(&self, failure: HandshakeFailure) {
        if let Some(number) = HANDSHAKE_FAILURES.iter().position(|(one, _)| *one == failure) {
            self.failed_handshakes[number].add(1);
        }
    }

    pub(super) fn note_outcome(&self, outcome: &Outcome) {
        self.decisions.record([outcome]);
        self.note_if_unreadable(outcome);
    }

    /// Counts an outcome, faster if the same limit decides repeatedly.
    pub(super) fn note_outcome_after(&self, last: &mut LastLimit, outcome: &Outcome) {
        self.decisions.record_unlocked(outcome, last);
        self.note_if_unreadable(outcome);
    }

    fn note_if_unreadable(&self, outcome: &Outcome) {
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

    /// Returns the number of ambiguous requests, by index of the reason.
    pub(super) fn ambiguous(&self, number: usize) -> u64 {
        self.ambiguous.get(number).map_or(0, Counter::value)
    }

    /// Returns the number of requests with more than one interpretation, by index of the reason.
    pub(super) fn unreadable(&self, number: usize) -> u64 {
        self.unreadable.get(number).map_or(0, Counter::value)
    }

    /// Returns the number of failed handshakes, by index of the reason.
    pub(super) fn failed_handshakes(&self, number: usize) -> u64 {
        self.failed_handshakes.get(number).map_or(0, Counter::value)
    }
}

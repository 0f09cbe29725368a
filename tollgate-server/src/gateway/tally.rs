//! What a worker counts. Each has its own, so that no two processors fight for a counter.
//!
//! Deliberately not here: adding the workers together. That is done when somebody asks ([`metrics`](super::metrics)).

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
use super::frames::{Closings, MISUSES, Misuse};
use super::framing::Ambiguity;
use super::header_names::DroppedHeaders;
use super::ticks::Tick;
use super::tls::{HANDSHAKE_FAILURES, HandshakeFailure};
use crate::counter::Counter;
use crate::decisions::{Decisions, LastLimit};

/// The counters of one worker.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Tally {
    pub(super) connections: AtomicI64,
    /// Connections of all workers together.
    pub(super) all_connections: Arc<AtomicI64>,
    /// What is held of bodies, of all workers together.
    pub(super) buffer_budget: Arc<BufferBudget>,
    pub(super) accepted: Counter,
    pub(super) turned_away: Counter,
    /// Requests whose permit is held after their clients have left.
    pub(super) abandoned: AtomicU32,
    /// Those among them that keep their connection to the upstream.
    pub(super) connected_abandoned: AtomicU32,
    /// Connections that were closed, by the reasons in their order.
    closed: [Counter; MISUSES.len()],
    /// Those of all workers.
    closings: Arc<Closings>,
    /// Those of an address that has too many already.
    pub(super) turned_away_by_address: Counter,
    /// By the reasons, in their order.
    ambiguous: [Counter; AMBIGUITIES.len()],
    /// By the reasons, in their order.
    unreadable: [Counter; Unreadable::REASONS.len()],
    /// Headers of requests that were dropped because of an underscore in their name.
    pub(super) underscore_headers: Counter,
    /// Those that describe a client, from others than trusted proxies.
    pub(super) forwarding_headers: Counter,
    /// By the reasons too.
    failed_handshakes: [Counter; HANDSHAKE_FAILURES.len()],
    /// Requests that no route serves.
    unrouted: RouteTally,
    decisions: Decisions,
    clock: quanta::Clock,
}

/// Why requests are refused as ambiguous, and how that is called.
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

/// A moment, as the processor counts.
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

    /// A client's connection is closed for misuse.
    pub(super) fn note_closed(&self, misuse: Misuse, peer: IpAddr, now: Tick) {
        if let Some(number) = MISUSES.iter().position(|(one, _)| *one == misuse) {
            self.closed[number].add(1);
        }
        self.closings.log(misuse, peer, now);
    }

    /// How many connections were closed, by the reason's number.
    pub(super) fn closed(&self, number: usize) -> u64 {
        self.closed.get(number).map_or(0, Counter::value)
    }

    /// A request was refused because something in it has several readings, by the reason's number.
    pub(super) fn note_unreadable(&self, number: usize) {
        if let Some(counter) = self.unreadable.get(number) {
            counter.add(1);
        }
    }

    /// Counts the headers of a request that were dropped.
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

    /// The same, for less where one limit decides over and over.
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

    /// A request that no route serves is over.
    pub(super) fn note_unrouted(&self, status: Option<StatusCode>, nanos: u64) {
        self.unrouted.note_began();
        self.unrouted.note_ended(status, nanos);
    }

    /// A request that nobody could read is over. When it began is not known.
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

    /// How many requests were ambiguous, by the reason's number.
    pub(super) fn ambiguous(&self, number: usize) -> u64 {
        self.ambiguous.get(number).map_or(0, Counter::value)
    }

    /// How many requests had several readings, by the reason's number.
    pub(super) fn unreadable(&self, number: usize) -> u64 {
        self.unreadable.get(number).map_or(0, Counter::value)
    }

    /// How many handshakes failed, by the reason's number.
    pub(super) fn failed_handshakes(&self, number: usize) -> u64 {
        self.failed_handshakes.get(number).map_or(0, Counter::value)
    }
}

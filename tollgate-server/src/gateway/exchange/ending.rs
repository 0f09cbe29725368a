//! What is done when an answer is over, however it ended.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use tollgate::{InFlightPermit, Outcome};

use super::super::abandoned::{self, Abandoned};
use super::super::answer::Failure;
use super::super::body::Came;
use super::super::buffers::HeldBytes;
use super::super::client::Client;
use super::super::connection::SEND_BUFFER_BYTES;
use super::super::fault::Fault;
use super::super::lane::Link;
use super::super::log::{Over, Record};
use super::super::patience::Patience;
use super::super::reuse::ReusePolicy;
use super::super::shared::Seat;
use super::super::site::Route;
use super::super::tally::{Moment, RouteTally};
use super::super::target::{Eject, Target};
use super::super::ticks::{Tick, Wait};
use super::super::wire::Wire;

/// Ends a request when it is dropped.
pub(in super::super) struct Ending {
    client: Arc<Client>,
    upstream: Option<Held>,
    /// Whether the upstream has nothing left to do: its answer is over, or it was given up.
    is_upstream_done: bool,
    /// Whether the answer ends only when its connection is closed.
    is_endless: bool,
    /// Among the requests of its key that are under way.
    place: Option<InFlightPermit>,
    sent_bytes: u64,
    began: Moment,
    route: Option<Arc<RouteTally>>,
    /// `None` until the answer has a head.
    status: Option<StatusCode>,
    /// Whether all of the answer was given to the client.
    is_complete: bool,
    /// Whether the upstream did not finish the answer that it had begun, or the gateway cut it off.
    is_broken: bool,
    /// What the access log is to tell, if there is one.
    record: Option<Box<Record>>,
}

/// The upstream that a request is at.
pub(in super::super) struct Held {
    pub(in super::super) target: Arc<Target>,
    /// The connection, if it is this request's alone.
    pub(in super::super) wire: Option<Wire>,
    /// Its place on the connection, if others share it.
    pub(in super::super) seat: Option<Seat>,
    /// The progress of the client's body, if the request has a permit.
    pub(in super::super) patience: Option<Arc<Patience>>,
    pub(in super::super) timeout: Wait,
    pub(in super::super) eject: Eject,
    reuse: ReusePolicy,
    worker: usize,
}

impl Held {
    pub(in super::super) fn new(target: &Arc<Target>, route: &Route, worker: usize) -> Self {
        let Route { timeout, eject, reuse, .. } = *route;
        Self { target: Arc::clone(target), wire: None, seat: None, patience: None, timeout, eject, reuse, worker }
    }

    /// Whether the client's body broke off, which ends the connection or stream.
    pub(in super::super) fn has_broken_body(&self) -> bool {
        self.body_failure().is_some()
    }

    fn body_failure(&self) -> Option<Failure> {
        let patience = self.patience.as_ref().or(self.wire.as_ref().map(Wire::patience))?;
        patience.clients_fault()
    }

    /// Keeps a connection for the next request.
    pub(in super::super) fn keep(&self, wire: Wire, now: Tick) {
        self.target.keep(self.worker, wire, now, &self.reuse);
    }

    /// Keeps a connection of the lane for the next request.
    pub(in super::super) fn keep_link(&self, link: Box<Link>, now: Tick) {
        self.target.keep_link(self.worker, link, now, &self.reuse);
    }
}

impl Ending {
    pub(in super::super) fn new(client: &Arc<Client>) -> Self {
        let began = client.tally().now();
        Self {
            client: Arc::clone(client),
            upstream: None,
            is_upstream_done: false,
            is_endless: false,
            place: None,
            sent_bytes: 0,
            began,
            route: None,
            status: None,
            is_complete: false,
            is_broken: false,
            record: None,
        }
    }

    /// Gives the place back when the answer is over.
    pub(in super::super) fn keep_permit(&mut self, place: Option<InFlightPermit>) {
        self.place = place;
    }

    /// The request is on a route from here on.
    pub(in super::super) fn enter(&mut self, route: &Arc<RouteTally>) {
        route.note_began();
        self.route = Some(Arc::clone(route));
    }

    /// The request is written down when it is over.
    pub(in super::super) fn keep_record(&mut self, record: Record) {
        self.record = Some(Box::new(record));
    }

    /// What was ruled is counted, and written down when the request is over.
    pub(in super::super) fn note_ruling(&mut self, outcome: &Outcome) {
        self.client.tally().note_ruling(outcome);
        self.record_ruling(outcome);
    }

    pub(in super::super) fn record_ruling(&mut self, outcome: &Outcome) {
        if let Some(record) = &mut self.record {
            record.note_ruling(outcome);
        }
    }

    /// The gateway refuses the request as malformed or ambiguous.
    pub(in super::super) fn note_reason(&mut self, reason: &'static str) {
        if let Some(record) = &mut self.record {
            record.note_reason(reason);
        }
    }

    pub(in super::super) fn note_id(&mut self, id: Option<&HeaderValue>) {
        if let (Some(record), Some(id)) = (&mut self.record, id) {
            record.note_id(id);
        }
    }

    /// The request is tried there.
    pub(in super::super) fn note_upstream(&mut self, upstream: &Arc<Target>) {
        if let Some(record) = &mut self.record {
            record.note_upstream(upstream);
        }
    }

    /// The upstream that the request was tried at last did not answer, or not to the end.
    pub(in super::super) fn note_fault(&mut self, fault: &Fault) {
        let Some(record) = &mut self.record else { return };
        if fault.is_upstreams() || fault.exhausted().is_some() {
            record.note_fault(fault);
        }
        if let Some(reason) = fault.failure().reason() {
            record.note_reason(self.client.ambiguity().unwrap_or(reason));
        }
    }

    pub(in super::super) fn note_status(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    /// Somebody else gives it back.
    pub(in super::super) fn take_permit(&mut self) -> Option<InFlightPermit> {
        self.place.take()
    }

    /// All of the answer was given to the client.
    pub(in super::super) fn note_complete(&mut self) {
        self.is_complete = true;
    }

    /// The gateway cuts off the answer.
    pub(in super::super) fn note_cut(&mut self) {
        self.is_broken = true;
    }

    pub(in super::super) fn is_upstream_done(&self) -> bool {
        self.is_upstream_done
    }

    pub(in super::super) fn has_place(&self) -> bool {
        self.place.is_some()
    }

    /// The answer goes on until its connection is closed, as events do.
    pub(in super::super) fn note_endless(&mut self) {
        self.is_endless = true;
    }

    /// The client has left. Returns the request if its answer has to be read to the end. Otherwise its connection has to
    /// be closed: it has no permit, an answer without an end, a broken body, or too many others are read to their end.
    pub(in super::super) fn abandon(&mut self) -> Option<Abandoned> {
        if self.is_upstream_done || self.is_endless || self.place.is_none() {
            return None;
        }
        let held = self.upstream.take()?;
        let permit = self.place.take()?;
        if held.has_broken_body() {
            abandoned::hold_permit(permit, held.timeout, self.client.shared_tally());
            return None;
        }
        Abandoned::new(held, permit, self.client.shared_tally())
    }

    pub(in super::super) fn hold(&mut self, held: Held) {
        self.upstream = Some(held);
    }

    pub(in super::super) fn note_sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes as u64;
    }

    /// Counts what is held of the answer, from nothing on.
    pub(in super::super) fn held_bytes(&self) -> HeldBytes {
        HeldBytes::none(&self.client)
    }

    /// The most of what was given that may still wait to be written.
    pub(in super::super) fn unwritten_bytes(&self) -> usize {
        usize::try_from(self.sent_bytes).unwrap_or(usize::MAX).min(SEND_BUFFER_BYTES)
    }

    /// The next piece of what is there of the answer.
    pub(in super::super) fn give(&mut self, rest: &mut Bytes) -> Bytes {
        let piece = rest.split_to(rest.len().min(self.client.piece_bytes()));
        self.note_sent(piece.len());
        self.client.given();
        piece
    }

    /// The next part of the answer is the upstream's to send.
    pub(in super::super) fn upstream_awaited(&self) {
        self.client.taken();
        if let Some(Held { wire: Some(wire), timeout, .. }) = &self.upstream {
            wire.expect(*timeout);
        }
    }

    /// How long the upstream may take for the next part, where nothing else looks at that.
    pub(in super::super) fn shared_timeout(&self) -> Option<Duration> {
        self.upstream.as_ref().filter(|held| held.wire.is_none()).map(|held| held.timeout.duration())
    }

    pub(in super::super) fn upstream_came(&mut self, came: Came) {
        let Some(held) = &mut self.upstream else { return };
        self.is_upstream_done |= !matches!(came, Came::Bytes);
        match came {
            Came::Bytes => {
                if let Some(wire) = &held.wire {
                    wire.forgive();
                }
            }
            Came::All => {
                if self.status.is_some_and(|status| !held.eject.counts(status)) {
                    held.target.succeeded();
                }
                if let Some(wire) = held.wire.take() {
                    held.keep(wire, self.client.now());
                }
            }
            Came::TooLate => self.upstream_broke(&Fault::Stalled),
            Came::Error if held.has_broken_body() => {
                // The gateway has closed the connection, so nothing shows when the upstream is done.
                self.is_broken = held.body_failure() == Some(Failure::Overloaded);
                if let Some(permit) = self.place.take() {
                    abandoned::hold_permit(permit, held.timeout, self.client.shared_tally());
                }
            }
            Came::Error => {
                // Whoever drives the connection ends it when the upstream is late.
                let is_late = held.wire.take().is_some_and(|wire| wire.is_late());
                self.upstream_broke(&if is_late { Fault::Stalled } else { Failure::Disconnected.into() });
            }
        }
    }

    /// The upstream did not finish the answer that it had begun.
    pub(in super::super) fn upstream_broke(&mut self, fault: &Fault) {
        self.is_broken = true;
        self.note_fault(fault);
        if let Some(route) = &self.route {
            route.note_failure(fault.failure());
        }
        if let Some(held) = &self.upstream {
            held.target.failed(fault, &held.eject, self.client.now());
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.target.end();
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.client.request_ended();
        let nanos = self.client.tally().nanos_since(self.began);
        // If neither has ended the answer, the client has.
        self.client.note_request_over(!self.is_complete && !self.is_broken, nanos);
        match &self.route {
            Some(route) => route.note_ended(self.status, nanos),
            None => self.client.tally().note_unrouted(self.status, nanos),
        }
        if let Some(record) = &self.record {
            let route = self.route.as_ref().map(|route| &*route.name);
            let Self { status, sent_bytes, is_broken, .. } = *self;
            record.write(&Over { status, sent_bytes, is_broken, nanos, route });
        }
    }
}

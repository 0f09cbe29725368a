//! The guard of a request: records and releases everything when the request ends, however it ends.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use tollgate::internal::Unreadable;
use tollgate::rules::Facts;
use tollgate::rules::file::internal::UpstreamHeader;
use tollgate::{InFlightPermit, Outcome};

use super::access_log::{Completion, Record};
use super::client::{BufferedBytes, Client, SEND_BUFFER_BYTES};
use super::failure::{Ambiguity, Failure, Fault};
use super::head::RequestHead;
use super::site::{Site, UpstreamAttempt};
use super::tally::{Moment, RouteTally};
use super::upstream::Target;
use super::upstream::abandoned::{self, Abandoned};
use super::worker::Worker;
use crate::traces;
use crate::traces::{RequestSpan, SpanEnd};

/// Finishes a request when it is dropped: releases its permit and upstream, counts it, and writes the access log.
pub(super) struct RequestGuard {
    client: Arc<Client>,
    upstream: Option<UpstreamAttempt>,
    /// Whether the upstream has nothing left to do: its response has ended, or it was given up.
    is_upstream_done: bool,
    /// Whether the response ends only when its connection is closed.
    is_endless: bool,
    /// The permit of an `in_flight` limit.
    permit: Option<InFlightPermit>,
    sent_bytes: u64,
    began: Moment,
    route: Option<Arc<RouteTally>>,
    /// `None` until the response has a head.
    status: Option<StatusCode>,
    /// Whether the whole response was passed to the client.
    is_complete: bool,
    /// Whether the upstream or the gateway cut off a response that had started.
    is_broken: bool,
    /// Whether the response is the upstream's.
    is_upstreams: bool,
    /// The ID of the request.
    id: Option<HeaderValue>,
    /// The entry for the access log, if there is one.
    record: Option<Box<Record>>,
    /// The span, if requests are traced.
    span: RequestSpan,
}

/// The progress of an upstream's response body.
pub(super) enum UpstreamProgress {
    Bytes,
    All,
    /// Nothing was received within the timeout.
    TimedOut,
    Error,
}

impl RequestGuard {
    fn new(client: &Arc<Client>) -> Self {
        let began = client.tally().now();
        Self {
            client: Arc::clone(client),
            upstream: None,
            is_upstream_done: false,
            is_endless: false,
            permit: None,
            sent_bytes: 0,
            began,
            route: None,
            status: None,
            is_complete: false,
            is_broken: false,
            is_upstreams: false,
            id: None,
            record: None,
            span: RequestSpan::default(),
        }
    }

    /// Starts the count, the access log entry and the span of a request, and chooses its ID.
    pub(super) fn begin(head: &RequestHead<'_>, client: &Arc<Client>, worker: &Worker, site: &Site) -> Self {
        client.request_began();
        let mut guard = Self::new(client);
        if let Some(log) = &site.log
            && let Some(uri) = head.target.received()
        {
            let line = (head.method.parse().unwrap_or_default(), uri, head.version.into());
            let headers = head.headers.lines.into();
            guard.keep_record(Record::new(line, headers, client, &site.proxies, (log, worker.number)));
        }
        if site.adds_header(UpstreamHeader::RequestId) {
            let given = head.id().and_then(|id| HeaderValue::from_bytes(id).ok());
            guard.id = Some(given.unwrap_or_else(|| worker.ids.next()));
        }
        if traces::is_on() {
            guard.start_span(RequestSpan::start(head.method, head.target.received_str(), head.headers.lines.into()));
        }
        guard
    }

    /// Holds a permit until the request ends.
    pub(super) fn keep_permit(&mut self, permit: Option<InFlightPermit>) {
        self.permit = permit;
    }

    /// Assigns the request to a route.
    pub(super) fn enter(&mut self, route: &Arc<RouteTally>) {
        route.note_began();
        self.route = Some(Arc::clone(route));
    }

    /// Sets the access log entry, which is written when the request ends.
    fn keep_record(&mut self, record: Record) {
        self.record = Some(Box::new(record));
    }

    /// Starts the span of the request.
    fn start_span(&mut self, span: RequestSpan) {
        if let (Some(record), Some(trace_id)) = (&mut self.record, span.trace_id()) {
            record.note_trace(trace_id);
        }
        self.span = span;
    }

    pub(super) fn span(&self) -> &RequestSpan {
        &self.span
    }

    /// Adds the outcome of the check to the span and the access log entry.
    pub(super) fn note_outcome(&mut self, outcome: &Outcome) {
        self.span.note_outcome(outcome);
        if let Some(record) = &mut self.record {
            record.note_outcome(outcome);
        }
    }

    /// Adds the key by which the limit counted the request to the access log entry, if keys are logged.
    pub(super) fn note_key(&mut self, outcome: &Outcome, facts: &Facts<'_>) {
        if let Some(record) = &mut self.record {
            record.note_key(|texts| outcome.limit_key(facts, texts));
        }
    }

    /// Records that the request is refused before limits are checked. If it is malformed, it is a strike against its
    /// client.
    pub(super) fn note_refused(&mut self, failure: Failure, head: &RequestHead<'_>, worker: &Worker) {
        if failure == Failure::UnderscoreHeader {
            worker.tally.ambiguous.note(Ambiguity::UnderscoreHeader);
        }
        if failure == Failure::Loop {
            let host = head.host().unwrap_or_default();
            worker.tally.note_loop(self.client.peer().address, host, worker.ticks.now());
        }
        if let Some(reason) = failure.reason() {
            self.note_reason(reason);
        }
        if failure.is_malformed_request() {
            worker.strike(self.client.peer(), head.headers.lines);
        }
    }

    /// Records that the request is refused because it has more than one interpretation.
    pub(super) fn note_unreadable(&mut self, problem: &Unreadable, head: &RequestHead<'_>, worker: &Worker) {
        self.note_reason(problem.reason());
        worker.tally.note_unreadable(problem.number());
        worker.strike(self.client.peer(), head.headers.lines);
    }

    /// Records why the gateway refuses the request as malformed or ambiguous.
    fn note_reason(&mut self, reason: &'static str) {
        if let Some(record) = &mut self.record {
            record.note_reason(reason);
        }
    }

    /// Returns the ID of the request.
    pub(super) fn id(&self) -> Option<&HeaderValue> {
        self.id.as_ref()
    }

    /// Records that the response is the upstream's.
    pub(super) fn note_upstream_answered(&mut self) {
        self.is_upstreams = true;
    }

    /// Records the upstream of an attempt.
    pub(super) fn note_upstream(&mut self, upstream: &Arc<Target>) {
        if let Some(record) = &mut self.record {
            record.note_upstream(upstream);
        }
    }

    /// Records why the last attempt failed.
    pub(super) fn note_fault(&mut self, fault: &Fault) {
        let Some(record) = &mut self.record else { return };
        if fault.is_upstreams() || fault.exhausted().is_some() {
            record.note_fault(fault);
        }
        if let Some(reason) = fault.failure().reason() {
            record.note_reason(self.client.ambiguity().unwrap_or(reason));
        }
    }

    pub(super) fn note_status(&mut self, status: StatusCode) {
        self.status = Some(status);
    }

    /// Takes the upstream out of the guard.
    pub(super) fn take_upstream(&mut self) -> Option<UpstreamAttempt> {
        self.upstream.take()
    }

    /// Takes the permit out of the guard.
    pub(super) fn take_permit(&mut self) -> Option<InFlightPermit> {
        self.permit.take()
    }

    /// Records that the whole response was passed to the client.
    pub(super) fn note_complete(&mut self) {
        self.is_complete = true;
    }

    /// Records that the gateway cuts off the response.
    pub(super) fn note_cut(&mut self) {
        self.is_broken = true;
    }

    pub(super) fn is_upstream_done(&self) -> bool {
        self.is_upstream_done
    }

    pub(super) fn has_permit(&self) -> bool {
        self.permit.is_some()
    }

    /// Records that the response goes on until its connection is closed, as event streams do.
    pub(super) fn note_endless(&mut self) {
        self.is_endless = true;
    }

    /// Handles a client that has left. Returns the request if its response has to be read to the end. Otherwise its
    /// connection has to be closed: it has no permit, an endless response, a broken body, or too many other responses
    /// are being read to their end.
    pub(super) fn abandon(&mut self) -> Option<Abandoned> {
        if self.is_upstream_done || self.is_endless || self.permit.is_none() {
            return None;
        }
        let attempt = self.upstream.take()?;
        let permit = self.permit.take()?;
        if attempt.has_broken_body() {
            abandoned::hold_permit(permit, attempt.timeout, self.client.shared_tally());
            return None;
        }
        Abandoned::new(attempt, permit, self.client.shared_tally())
    }

    /// Holds the permit for the route's timeout, because the connection to the upstream is closed in the middle of the
    /// client's body: nothing shows when the upstream is done.
    pub(super) fn hold_permit(&mut self) {
        if let (Some(attempt), Some(permit)) = (&self.upstream, self.permit.take()) {
            abandoned::hold_permit(permit, attempt.timeout, self.client.shared_tally());
        }
    }

    pub(super) fn set_upstream(&mut self, attempt: UpstreamAttempt) {
        self.upstream = Some(attempt);
    }

    pub(super) fn note_sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes as u64;
    }

    /// Returns a new count of buffered bytes for this client.
    pub(super) fn buffered_bytes(&self) -> BufferedBytes {
        BufferedBytes::none(&self.client)
    }

    /// Returns the maximum number of bytes that were passed on and may not be written yet.
    pub(super) fn unwritten_bytes(&self) -> usize {
        // The server of HTTP/1 counts what it has not written.
        if !self.client.is_http2 {
            return 0;
        }
        usize::try_from(self.sent_bytes).unwrap_or(usize::MAX).min(SEND_BUFFER_BYTES)
    }

    /// Splits off the next piece of a response and starts the client's read deadline.
    pub(super) fn next_piece(&mut self, rest: &mut Bytes) -> Bytes {
        let piece = rest.split_to(rest.len().min(self.client.piece_bytes()));
        self.note_sent(piece.len());
        self.client.set_read_deadline();
        piece
    }

    /// Ends the client's read deadline, because the upstream has not sent the next part of the response.
    pub(super) fn await_upstream(&self) {
        self.client.clear_read_deadline();
    }

    /// Returns the timeout for the next part of the response.
    pub(super) fn upstream_timeout(&self) -> Option<Duration> {
        self.upstream.as_ref().map(|attempt| attempt.timeout.duration())
    }

    pub(super) fn note_upstream_progress(&mut self, came: UpstreamProgress) {
        let Some(attempt) = &self.upstream else { return };
        self.is_upstream_done |= !matches!(came, UpstreamProgress::Bytes);
        match came {
            UpstreamProgress::Bytes => {}
            UpstreamProgress::All => {
                if let Some(status) = self.status {
                    attempt.upstream.note_end(status, attempt.sent_after);
                }
            }
            UpstreamProgress::TimedOut => self.note_upstream_failed(&Fault::Stalled),
            UpstreamProgress::Error if attempt.has_broken_body() => {
                // The gateway has closed the connection, so nothing shows when the upstream is done.
                self.is_broken = attempt.body_failure() == Some(Failure::Overloaded);
                if let Some(permit) = self.permit.take() {
                    abandoned::hold_permit(permit, attempt.timeout, self.client.shared_tally());
                }
            }
            UpstreamProgress::Error => self.note_upstream_failed(&Failure::Disconnected.into()),
        }
    }

    /// Records that the upstream did not finish a response that it had started.
    pub(super) fn note_upstream_failed(&mut self, fault: &Fault) {
        self.is_broken = true;
        self.note_fault(fault);
        if let Some(route) = &self.route {
            route.note_failure(fault.failure());
        }
        if let Some(attempt) = &self.upstream {
            attempt.upstream.note_failure(fault, self.client.now());
        }
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.client.request_ended();
        let nanos = self.client.tally().nanos_since(self.began);
        // If neither side has ended the response, the client has.
        self.client.note_request_over(!self.is_complete && !self.is_broken, nanos);
        match &self.route {
            Some(route) => route.note_ended(self.status, nanos),
            None => self.client.tally().note_unrouted(self.status, nanos),
        }
        let route = self.route.as_ref().map(|route| &*route.name);
        self.span.end(SpanEnd { status: self.status, route, id: self.id.as_ref() });
        if let Some(record) = &self.record {
            let Self { status, sent_bytes, is_broken, is_upstreams, .. } = *self;
            let id = self.id.as_ref();
            record.write(&Completion { status, sent_bytes, is_broken, is_upstreams, nanos, route, id });
        }
    }
}

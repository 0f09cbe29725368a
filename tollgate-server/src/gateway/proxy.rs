//! The pipeline of every request: route → check → refuse, or forward and settle.
//!
//! The servers of HTTP/1 and HTTP/2 call these steps in this order. The servers differ in how bytes arrive and leave,
//! and in where a request waits. Only the gate decides: a refused request never reaches an upstream, and a request that
//! is retried at another upstream is counted once.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use tollgate_config::internal::UpstreamHeader;
use tollgate_http1::Ambiguity;
use tollgate_rules::internal::{CachedGate, Unreadable};
use tollgate_rules::{Check, InFlightPermit, Outcome};
use tollgate_telemetry::decisions::LastLimit;
use tollgate_telemetry::traces::{self, RequestSpan, SpanEnd};

use super::access_log::{Completion, Record};
use super::client::{Client, Peer, Scheme};
use super::failure::{Failure, Fault};
use super::head::RequestHead;
use super::head::upstream_head::RequestContext;
use super::local_response;
use super::site::{Route, RouteAction, Site, UpstreamAttempt};
use super::tally::{Moment, RouteTally};
use super::upstream::Target;
use super::upstream::abandoned::{self, Abandoned};
use super::upstream::conn::{Delivery, DeliveryBegun};
use super::worker::{Refused, Worker};

/// The reason why a request is refused before limits are checked.
pub(super) enum Rejection {
    Failure(Failure),
    /// It has more than one interpretation.
    Unreadable(Unreadable),
}

/// Finds the route of a request, and checks its limits.
///
/// # Errors
///
/// Fails if the request is malformed or ambiguous.
#[inline(always)]
pub(super) fn check(
    head: &mut RequestHead<'_>,
    site: &Site,
    peer: Peer<'_>,
    gate: &mut CachedGate,
) -> Result<(Option<usize>, Check), Rejection> {
    if let Some(failure) = head.failure(site.max_body) {
        return Err(Rejection::Failure(failure));
    }
    let route = head.find_route(site, peer).map_err(Rejection::Unreadable)?;
    Ok((route, gate.check(&site.with_route(head.facts(peer), route))))
}

/// A request on its way through the gateway. When it is dropped, however it ends, its permit and its upstream are
/// released, it is counted, and its access log entry is written.
pub(super) struct ProxyRequest {
    pub(super) site: Arc<Site>,
    pub(super) route: Option<usize>,
    worker: usize,
    pub(super) client: Arc<Client>,
    pub(super) upstream: Option<UpstreamAttempt>,
    /// The permit of an `in_flight` limit.
    pub(super) permit: Option<InFlightPermit>,
    pub(super) id: Option<HeaderValue>,
    /// The host that the client has requested over TLS, if the request is forwarded.
    pub(super) https_host: Option<Box<[u8]>>,
    began: Moment,
    /// `None` until the response has a head.
    pub(super) status: Option<StatusCode>,
    pub(super) sent_bytes: u64,
    /// Whether an upstream may have a part of the request, so that only an upstream's response gives units back.
    delivery: Delivery,
    /// Whether the upstream has nothing left to do: its response has ended, or it was given up.
    pub(super) is_upstream_done: bool,
    /// Whether the response goes on until its connection is closed, as event streams do.
    pub(super) is_endless: bool,
    /// Whether the whole response was passed to the client.
    pub(super) is_complete: bool,
    /// Whether the upstream or the gateway cut off a response that had started.
    pub(super) is_broken: bool,
    /// Whether the response is the upstream's.
    pub(super) is_upstreams: bool,
    /// The entry for the access log, if there is one.
    record: Option<Box<Record>>,
    /// The span, if requests are traced.
    pub(super) span: RequestSpan,
}

/// The sender of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Responder {
    Upstream,
    /// A failure, or the response of a route without upstreams.
    Gateway,
}

/// The next step of an allowed request.
pub(super) enum Action {
    /// The gateway responds.
    Respond(Response<Bytes>),
    /// The gateway responds with the request, once its body has arrived.
    Echo,
    /// It is sent to the upstreams of this route.
    Forward(usize),
}

/// The progress of an upstream's response body.
pub(super) enum UpstreamProgress {
    Bytes,
    All,
    /// Nothing was received within the timeout.
    TimedOut,
    Error,
}

impl ProxyRequest {
    /// Starts the count, the access log entry and the span of a request, and chooses its ID.
    pub(super) fn begin(
        head: &RequestHead<'_>,
        (client, worker): (&Arc<Client>, &Worker),
        (site, route): (&Arc<Site>, Option<usize>),
    ) -> Self {
        worker.tally.note_dropped_headers(head.dropped);
        client.request_began();
        let mut request = Self {
            site: Arc::clone(site),
            route,
            worker: worker.number,
            client: Arc::clone(client),
            upstream: None,
            permit: None,
            id: None,
            https_host: None,
            began: worker.tally.now(),
            status: None,
            sent_bytes: 0,
            delivery: Delivery::default(),
            is_upstream_done: false,
            is_endless: false,
            is_complete: false,
            is_broken: false,
            is_upstreams: false,
            record: None,
            span: RequestSpan::default(),
        };
        if let Some(log) = &site.log
            && let Some(uri) = head.target.received()
        {
            let line = (head.method.parse().unwrap_or_default(), uri, head.version);
            let headers = head.headers.lines.into();
            let record = Record::new(line, headers, client, &site.proxies, (log, worker.number));
            request.record = Some(Box::new(record));
        }
        if site.adds_header(UpstreamHeader::RequestId) {
            let given = head.id().and_then(|id| HeaderValue::from_bytes(id).ok());
            request.id = Some(given.unwrap_or_else(|| worker.ids.next()));
        }
        if traces::is_on() {
            request.span = RequestSpan::start(head.method, head.target.received_str(), head.headers.lines.into());
            if let (Some(record), Some(trace_id)) = (&mut request.record, request.span.trace_id()) {
                record.note_trace(trace_id);
            }
        }
        if let Some(tally) = request.route_tally() {
            tally.note_began();
        }
        request
    }

    /// Records why the request is rejected, and returns the response.
    pub(super) fn reject(&mut self, rejection: &Rejection, head: &RequestHead<'_>, worker: &Worker) -> Response<Bytes> {
        let reason = match rejection {
            Rejection::Failure(failure) => failure.reason(),
            Rejection::Unreadable(problem) => Some(problem.reason()),
        };
        if let (Some(record), Some(reason)) = (&mut self.record, reason) {
            record.note_reason(reason);
        }
        worker.note_refused(Refused::Rejected(rejection), self.client.peer(), head.headers.lines);
        match rejection {
            Rejection::Failure(failure) => {
                if *failure == Failure::UnderscoreHeader {
                    worker.tally.ambiguous.note(Ambiguity::UnderscoreHeader);
                }
                if *failure == Failure::Loop {
                    let host = head.host().unwrap_or_default();
                    worker.tally.note_loop(self.client.nearest, host, worker.ticks.now());
                }
                local_response::failure(*failure)
            }
            Rejection::Unreadable(problem) => {
                worker.tally.note_unreadable(problem.number());
                local_response::unreadable(problem)
            }
        }
    }

    /// Records the outcome of the check. Returns the next step, or `None` if a limit refuses the request.
    pub(super) fn apply(
        &mut self,
        outcome: &mut Outcome,
        head: &RequestHead<'_>,
        (worker, peer): (&Worker, Peer<'_>),
        last_noted: &mut LastLimit,
    ) -> Option<Action> {
        worker.tally.note_outcome(last_noted, outcome);
        self.span.note_outcome(outcome);
        if let Some(record) = &mut self.record {
            record.note_outcome(outcome);
            let facts = self.site.with_route(head.facts(peer), self.route);
            record.note_key(|texts| outcome.limit_key(&facts, texts));
        }
        self.permit = outcome.take_permit();
        if !outcome.is_allowed() {
            worker.note_refused(Refused::Denied(outcome), peer, head.headers.lines);
            return None;
        }
        outcome.before_service();
        let Some(number) = self.route else {
            return Some(Action::Respond(local_response::failure(Failure::NoRoute)));
        };
        Some(match &self.site.routes[number].action {
            RouteAction::Respond(response) => Action::Respond(response.clone()),
            RouteAction::Echo => Action::Echo,
            RouteAction::Upstreams(_) if head.forwards_left() == Some(0) => {
                Action::Respond(local_response::final_recipient(head))
            }
            RouteAction::Upstreams(_) => {
                let is_https = self.client.scheme == Scheme::Https;
                self.https_host = head.host().filter(|_| is_https).map(Box::from);
                outcome.hold_open(self.site.routes[number].timeout.span());
                Action::Forward(number)
            }
        })
    }

    /// Waits for the delay that a limit imposes. Fails if too many requests wait.
    pub(super) async fn wait_in_queue(&self, outcome: &Outcome, worker: &Worker) -> Result<(), Failure> {
        worker.wait_in_queue(outcome.delay(), self.site.max_queued).await
    }

    /// Settles limits that count responses by the response that the client gets. Its headers are those before the
    /// route changes them, because the route may remove the one with the cost.
    ///
    /// Once an upstream may have a part of the request, only an upstream's response settles. A client causes failures of
    /// the gateway at will, for example by breaking off its body, and the upstream may have done the work by then. If
    /// nothing settles the request, or settling fails, the request keeps what it took.
    pub(super) async fn settle(
        &self,
        outcome: &Outcome,
        responder: Responder,
        (status, headers): (StatusCode, &HeaderMap),
    ) {
        if !outcome.awaits_response() {
            return;
        }
        if self.may_give_back(responder) {
            // An upstream that got nothing has done nothing.
            let is_forwarded = self.route().is_some_and(|route| matches!(route.action, RouteAction::Upstreams(_)));
            if responder == Responder::Gateway && is_forwarded {
                outcome.cancel_deferred();
            }
            _ = Box::pin(outcome.settle_response(status, headers)).await;
        } else {
            _ = Box::pin(outcome.settle_unanswered()).await;
        }
    }

    /// Records that an upstream is about to get the request.
    pub(super) fn begin_delivery(&mut self, outcome: &Outcome) -> DeliveryBegun {
        outcome.service_called();
        self.delivery.begin()
    }

    /// Returns whether a response of that sender may give units back.
    fn may_give_back(&self, responder: Responder) -> bool {
        responder == Responder::Upstream || self.delivery == Delivery::NotBegun
    }

    /// Refunds a request that the gateway has no room for, and returns the response.
    pub(super) async fn refund(&self, outcome: &Outcome, failure: Failure) -> Response<Bytes> {
        if self.may_give_back(Responder::Gateway) {
            _ = outcome.refund().await;
        }
        let mut response = local_response::failure(failure);
        if let Some(route) = self.route() {
            route.response_edits.apply(response.headers_mut());
        }
        response
    }

    pub(super) fn route(&self) -> Option<&Route> {
        self.route.map(|number| &self.site.routes[number])
    }

    /// Returns the counters of the route.
    fn route_tally(&self) -> Option<&RouteTally> {
        self.route().map(|route| &**route.tally(self.worker))
    }

    /// Returns the facts that the head for an upstream needs.
    pub(super) fn context<'a>(&'a self, outcome: &'a Outcome) -> RequestContext<'a> {
        let Self { site, client, id, span, .. } = self;
        RequestContext { site, client, id: id.as_ref(), span, outcome }
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
            abandoned::hold_permit(permit, attempt.timeout, &self.client.tally);
            return None;
        }
        Abandoned::new(attempt, permit, &self.client.tally)
    }

    /// Holds the permit for the route's timeout, because the connection to the upstream is closed in the middle of the
    /// client's body: nothing shows when the upstream is done.
    pub(super) fn hold_permit(&mut self) {
        if let (Some(attempt), Some(permit)) = (&self.upstream, self.permit.take()) {
            abandoned::hold_permit(permit, attempt.timeout, &self.client.tally);
        }
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
                    abandoned::hold_permit(permit, attempt.timeout, &self.client.tally);
                }
            }
            UpstreamProgress::Error => self.note_upstream_failed(&Failure::Disconnected.into()),
        }
    }

    /// Records that the upstream did not finish a response that it had started.
    pub(super) fn note_upstream_failed(&mut self, fault: &Fault) {
        self.is_broken = true;
        self.note_fault(fault);
        if let Some(tally) = self.route_tally() {
            tally.note_failure(fault.failure());
        }
        if let Some(attempt) = &self.upstream {
            attempt.upstream.note_failure(fault, self.client.ticks.now());
        }
    }
}

impl Drop for ProxyRequest {
    fn drop(&mut self) {
        self.client.request_ended();
        let nanos = self.client.tally.nanos_since(self.began);
        // If neither side has ended the response, the client has.
        self.client.note_request_over(!self.is_complete && !self.is_broken, nanos);
        match self.route_tally() {
            Some(tally) => tally.note_ended(self.status, nanos),
            None => self.client.tally.note_unrouted(self.status, nanos),
        }
        let (route, id) = (self.route.map(|number| &*self.site.routes[number].name), self.id.as_ref());
        self.span.end(SpanEnd { status: self.status, route, id });
        if let Some(record) = &self.record {
            let Self { status, sent_bytes, is_broken, is_upstreams, .. } = *self;
            record.write(&Completion { status, sent_bytes, is_broken, is_upstreams, nanos, route, id });
        }
    }
}

/// Applies the changes of the route, and adds the rate limit headers.
pub(super) fn complete<B>(outcome: &Outcome, route: Option<&Route>, response: &mut Response<B>) {
    if let Some(route) = route {
        route.response_edits.apply(response.headers_mut());
    }
    outcome.write_headers(response.headers_mut());
}

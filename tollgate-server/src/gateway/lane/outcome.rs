//! Applies the outcome of a check: refuses a request, responds to it, or forwards it.

use std::io;
use std::sync::Arc;
use std::task::Context;

use bytes::Bytes;
use http::header::CONNECTION;
use http::{HeaderValue, Response, Version};
use tollgate::Outcome;
use tollgate::rules::file::internal::UpstreamHeader;

use super::super::exchange::{RequestGuard, bodiless};
use super::super::failure::{self, Failure};
use super::super::log::Record;
use super::super::site::{RouteAction, Site};
use super::forwarding::Forwarding;
use super::request::PlainRequest;
use super::scratch::WorkerBuffers;
use super::waits::{AllowedRequest, UnsettledResponse};
use super::{Lane, NextStep, text};
use crate::traces::{self, RequestSpan};

impl Lane<'_> {
    /// Applies the outcome of the check: sends a response, or the request to an upstream.
    pub(super) fn apply_outcome(
        &mut self,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        (site, route): (Arc<Site>, Option<usize>),
        mut outcome: Outcome,
        context: &mut Context<'_>,
    ) -> io::Result<NextStep> {
        let mut guard = self.begin_request(plain, &site);
        if let Some(number) = route {
            guard.enter(site.routes[number].tally(self.worker.number));
        }
        self.worker.tally.note_outcome_after(&mut buffers.last_noted, &outcome);
        guard.record_outcome(&outcome);
        if site.log.is_some() {
            guard.note_key(&outcome, &site.with_route(self.facts(plain), route));
        }
        guard.keep_permit(outcome.take_permit());
        if !outcome.is_allowed() {
            self.refuse(plain, &outcome, guard, buffers, context)?;
            return Ok(NextStep::Answered);
        }
        if !outcome.delay().is_zero() {
            self.save(plain);
            return Ok(NextStep::AwaitTurn(Box::new(AllowedRequest { site, route, outcome, guard })));
        }
        self.pass(plain, buffers, (site, route), (outcome, guard), context)
    }

    /// Serves an allowed request.
    pub(super) fn pass(
        &mut self,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        (site, route): (Arc<Site>, Option<usize>),
        (outcome, guard): (Outcome, RequestGuard),
        context: &mut Context<'_>,
    ) -> io::Result<NextStep> {
        let mut response = match route.map(|number| (number, &site.routes[number].action)) {
            Some((number, RouteAction::Respond(written))) => {
                let mut response = written.response();
                site.routes[number].response_edits.apply(response.headers_mut());
                response
            }
            Some((_, RouteAction::Echo)) => {
                self.save(plain);
                return Ok(NextStep::Echo(Box::new(AllowedRequest { site, route, outcome, guard })));
            }
            Some((number, RouteAction::Upstreams(_))) => {
                let forwarding = Box::new(Forwarding::new(plain, (site, number), outcome, guard));
                return Ok(NextStep::Forward(self.start_forward(plain, buffers, forwarding, context)));
            }
            None => failure::response(Failure::NoRoute),
        };
        if outcome.awaits_response() {
            let is_head = plain.is_head();
            let outcome = Some(outcome);
            return Ok(NextStep::Settle(Box::new(UnsettledResponse { response, is_head, outcome, guard })));
        }
        outcome.write_headers(response.headers_mut());
        let response = if plain.is_head() { bodiless(response) } else { response };
        self.respond(&response, guard, buffers, context)?;
        Ok(NextStep::Answered)
    }

    /// Starts the count, the access log entry and the span of a request, and chooses its ID.
    pub(super) fn begin_request(&mut self, plain: &PlainRequest<'_>, site: &Site) -> RequestGuard {
        (self.is_last, self.is_http10) = (plain.is_last, plain.is_http10());
        self.client.request_began();
        self.worker.tally.note_dropped_headers(plain.dropped);
        let mut guard = RequestGuard::new(self.client);
        if let Some(log) = &site.log
            && let Some(uri) = plain.target.received()
        {
            let version = if plain.is_http10() { Version::HTTP_10 } else { Version::HTTP_11 };
            let line = (plain.method.parse().unwrap_or_default(), uri, version);
            let headers = plain.headers.lines.into();
            guard.keep_record(Record::new(line, headers, self.client, site, (log, self.worker.number)));
        }
        if site.adds_header(UpstreamHeader::RequestId) {
            let given = plain.id().and_then(|id| HeaderValue::from_bytes(id).ok());
            guard.set_id(Some(given.unwrap_or_else(|| self.worker.ids.next())));
        }
        if traces::is_on() {
            guard.start_span(RequestSpan::start(plain.method, plain.target.received_str(), plain.headers.lines.into()));
        }
        guard
    }

    /// Sends a response of the gateway.
    pub(super) fn respond(
        &mut self,
        response: &Response<Bytes>,
        mut guard: RequestGuard,
        buffers: &mut WorkerBuffers,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        let has_close = response.headers().contains_key(CONNECTION);
        self.is_last |= has_close || self.worker.is_closing() || self.has_undrainable_body();
        guard.note_status(response.status());
        guard.note_sent(response.body().len());
        buffers.out.clear();
        let lines = (buffers.date.line(self.worker.ticks.now()), self.connection_line());
        text::put_answer(&mut buffers.out, response, lines, guard.id().map(HeaderValue::as_bytes));
        self.put(&buffers.out, &[], context)
    }

    /// Returns the `Connection` header line of a response. It is empty where the default of the version applies.
    pub(super) fn connection_line(&self) -> &'static [u8] {
        match (self.is_last, self.is_http10) {
            (true, _) => text::CLOSE,
            (false, true) => text::KEEP_ALIVE,
            (false, false) => b"",
        }
    }
}

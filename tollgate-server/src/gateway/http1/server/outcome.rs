//! Applies the outcome of a check: refuses a request, responds to it, or forwards it. Some requests wait before they are
//! served or answered: for their turn in the queue of a limit, for the body that is echoed, or for limits that count
//! responses.

use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::CONNECTION;
use http::{HeaderValue, Response};
use tollgate::Outcome;

use super::forward::Forwarding;
use super::{AllowedRequest, Lane, NextStep, UnsettledResponse};
use crate::gateway::echo;
use crate::gateway::failure::{self, Failure};
use crate::gateway::head::HeaderBuffer;
use crate::gateway::head::text;
use crate::gateway::http1::request::{PlainRequest, RequestParse};
use crate::gateway::http1::request_body::ReceivedBody;
use crate::gateway::http1::scratch::{Scratch, WorkerBuffers, scratch};
use crate::gateway::http2::exchange::bodiless;
use crate::gateway::request_guard::RequestGuard;
use crate::gateway::site::{RouteAction, Site};

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
            guard.note_key(&outcome, &site.with_route(plain.head.facts(self.peer), route));
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
            let is_head = plain.head.is_head();
            let outcome = Some(outcome);
            return Ok(NextStep::Settle(Box::new(UnsettledResponse { response, is_head, outcome, guard })));
        }
        outcome.write_headers(response.headers_mut());
        let response = if plain.head.is_head() { bodiless(response) } else { response };
        self.respond(&response, guard, buffers, context)?;
        Ok(NextStep::Answered)
    }

    /// Starts the count, the access log entry and the span of a request.
    pub(super) fn begin_request(&mut self, plain: &PlainRequest<'_>, site: &Site) -> RequestGuard {
        (self.is_last, self.is_http10) = (plain.head.is_last, plain.head.is_http10());
        self.worker.tally.note_dropped_headers(plain.head.dropped);
        RequestGuard::begin(&plain.head, self.client, self.worker, site)
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

impl Lane<'_> {
    /// Waits for the delay that a limit imposes, and serves the request.
    pub(super) async fn after_turn(&mut self, request: Box<AllowedRequest>) -> io::Result<NextStep> {
        let AllowedRequest { site, route, outcome, guard } = *request;
        let worker = self.worker;
        let Some(waited) = self.unless_gone(worker.wait_in_queue(&outcome, &site)).await else {
            return Ok(NextStep::Close);
        };
        if waited.is_err() {
            _ = outcome.refund().await;
        }
        let mut parts = Some((outcome, guard));
        poll_fn(|context| {
            let Some((outcome, guard)) = parts.take() else { return Poll::Ready(Ok(NextStep::Close)) };
            let served = self.with_saved((&site, route), |lane, plain, buffers| match waited {
                Ok(()) => lane.pass(plain, buffers, (Arc::clone(&site), route), (outcome, guard), context),
                Err(failure) => {
                    let response = failure::response(failure);
                    let response = if plain.head.is_head() { bodiless(response) } else { response };
                    lane.respond(&response, guard, buffers, context).map(|()| NextStep::Answered)
                }
            });
            Poll::Ready(served.unwrap_or(Ok(NextStep::Close)))
        })
        .await
    }

    /// Responds with an echo of the request, once its body has arrived.
    pub(super) async fn echo(&mut self, request: Box<AllowedRequest>) -> io::Result<NextStep> {
        let AllowedRequest { site, route, outcome, guard } = *request;
        let mut received = self.with_saved((&site, route), |_, plain, _| plain.received_body()).unwrap_or_default();
        if !poll_fn(|context| self.poll_collect(&mut received, context)).await? {
            received.content.clear();
        }
        let body = String::from_utf8_lossy(&received.content).into_owned();
        let echoed = self.with_saved((&site, route), |lane, plain, _| {
            (echo::response(&plain.head, lane.client, body), plain.head.is_head())
        });
        let Some((mut response, is_head)) = echoed else { return Ok(NextStep::Close) };
        if let Some(number) = route {
            site.routes[number].response_edits.apply(response.headers_mut());
        }
        Ok(NextStep::Settle(Box::new(UnsettledResponse { response, is_head, outcome: Some(outcome), guard })))
    }

    /// Settles limits that count responses, and sends the response.
    pub(super) async fn settle_and_respond(&mut self, unsettled: Box<UnsettledResponse>) -> io::Result<()> {
        let UnsettledResponse { mut response, is_head, outcome, guard } = *unsettled;
        if let Some(outcome) = outcome {
            if outcome.awaits_response() {
                // If settling fails, the estimate stands.
                _ = outcome.settle_response(response.status(), response.headers()).await;
            }
            outcome.write_headers(response.headers_mut());
        }
        let response = if is_head { bodiless(response) } else { response };
        let mut guard = Some(guard);
        let responded = poll_fn(|context| {
            let buffers = &mut scratch().buffers;
            Poll::Ready(guard.take().map_or(Ok(()), |guard| self.respond(&response, guard, buffers, context)))
        });
        responded.await
    }

    /// Parses the saved request again, and calls `serve` with it. Returns `None` only if it cannot be parsed, although
    /// it was parsed before.
    pub(super) fn with_saved<T>(
        &mut self,
        (site, route): (&Site, Option<usize>),
        serve: impl FnOnce(&mut Self, &PlainRequest<'_>, &mut WorkerBuffers) -> T,
    ) -> Option<T> {
        let buffers = &mut scratch().buffers;
        buffers.clear();
        let saved = std::mem::take(&mut self.saved);
        let mut header_buffer = HeaderBuffer::default();
        let filter = site.header_filter(self.peer.address);
        let served = match PlainRequest::read(&saved, &mut header_buffer, self.max_head, &filter) {
            RequestParse::Complete(mut plain) => {
                plain.head.target.normalize_for(site, route);
                Some(serve(self, &plain, buffers))
            }
            RequestParse::Partial | RequestParse::Invalid(_) => None,
        };
        drop(header_buffer);
        if self.saved.is_empty() {
            self.saved = saved;
        }
        served
    }

    /// Reads the rest of the body. Returns ready once it is complete, or with false if it is too long, late or broken.
    fn poll_collect(&mut self, received: &mut ReceivedBody, context: &mut Context<'_>) -> Poll<io::Result<bool>> {
        loop {
            let is_short = received.content.len() <= echo::MAX_BODY_BYTES;
            let Some(body) = &mut self.body else { return Poll::Ready(Ok(is_short)) };
            if body.failure.is_some() || !is_short {
                return Poll::Ready(Ok(false));
            }
            let mut scratch = scratch();
            let Scratch { input, .. } = &mut *scratch;
            let Poll::Ready(read) = self.poll_read_body(input, context)? else {
                drop(scratch);
                self.send_continue(context)?;
                ready!(self.poll_body_late(context));
                if let Some(body) = &mut self.body {
                    body.failure = Some(Failure::BodyLate);
                }
                return Poll::Ready(Ok(false));
            };
            if read == 0 {
                return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
            }
            let Some(body) = &mut self.body else { continue };
            (body.due, body.awaits_continue) = (None, false);
            match body.rest.take_content(&input[..read], received) {
                Ok(taken) if body.rest.is_complete() => {
                    self.body = None;
                    self.ahead.extend_from_slice(&input[taken..read]);
                }
                Ok(_) => {}
                Err(ambiguity) => {
                    body.failure = Some(Failure::BodyBroken);
                    self.client.note_ambiguity(ambiguity);
                }
            }
        }
    }
}

//! Responses of the gateway itself: refusals, failures and echoes. Some requests wait before they are served or
//! answered: for their turn in the queue of a limit, for the body that is echoed, or for limits that count responses.

use std::future::poll_fn;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::CONNECTION;
use http::{HeaderValue, Response, StatusCode};
use tollgate_config::internal::UpstreamHeader;
use tollgate_http::internal::WrittenResponse;
use tollgate_http1::InvalidHead;
use tollgate_net::stream::is_tls_hello;
use tollgate_rules::Outcome;

use super::client_io::BodyError;
use super::{AllowedRequest, Http1Server, NextStep, UnsettledResponse};
use crate::gateway::access_log::{Completion, Record};
use crate::gateway::client::Scheme;
use crate::gateway::failure::{Failure, HandshakeFailure, MALFORMED};
use crate::gateway::head::headers::{self, X_REQUEST_ID};
use crate::gateway::http1::codec::PlainRequest;
use crate::gateway::local_response::{self, MAX_ECHOED_BYTES};
use crate::gateway::proxy::{self, ProxyRequest, Responder};
use crate::gateway::site::Site;
use crate::gateway::worker::{Refused, WorkerBuffers, scratch};

impl Http1Server<'_> {
    /// Sends a response of the gateway.
    pub(super) fn respond(
        &mut self,
        response: &Response<Bytes>,
        mut request: ProxyRequest,
        buffers: &mut WorkerBuffers,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        let has_close = response.headers().contains_key(CONNECTION);
        self.is_last |= has_close || self.is_closing() || self.has_undrainable_body();
        request.status = Some(response.status());
        buffers.out.clear();
        let lines = (buffers.date.line(self.worker.ticks.now()), self.connection_line());
        let id = request.id.as_ref().map(HeaderValue::as_bytes);
        let sent = local_response::put(&mut buffers.out, (response, self.is_head), lines, id);
        request.sent_bytes += sent as u64;
        self.put(&buffers.out, &[], context)
    }

    /// Waits for the delay that a limit imposes, and serves the request.
    pub(super) async fn after_turn(&mut self, allowed: Box<AllowedRequest>) -> io::Result<NextStep> {
        let worker = self.worker;
        let AllowedRequest { request, outcome, .. } = &*allowed;
        let Some(waited) = self.unless_gone(request.wait_in_queue(outcome, worker)).await else {
            return Ok(NextStep::Close);
        };
        if let Err(failure) = waited {
            let response = request.refund(outcome, failure).await;
            return self.respond_now(&response, allowed.request).await.map(|()| NextStep::Answered);
        }
        let (site, route) = (Arc::clone(&request.site), request.route);
        let mut allowed = Some(*allowed);
        poll_fn(|context| {
            let Some(allowed) = allowed.take() else { return Poll::Ready(Ok(NextStep::Close)) };
            let served =
                self.with_saved((&site, route), |server, plain, buffers| server.pass(plain, buffers, allowed, context));
            Poll::Ready(served.unwrap_or(Ok(NextStep::Close)))
        })
        .await
    }

    /// Responds with an echo of the request, once its body has arrived.
    pub(super) async fn echo(&mut self, allowed: Box<AllowedRequest>) -> io::Result<NextStep> {
        let AllowedRequest { mut request, outcome, .. } = *allowed;
        let routed = (&*Arc::clone(&request.site), request.route);
        let mut content = self.with_saved(routed, |_, plain, _| plain.received_body().0).unwrap_or_default();
        let response = match poll_fn(|context| self.poll_collect(&mut content, context)).await? {
            Err(failure) => {
                request.note_fault(&failure.into());
                Some(local_response::failure(failure))
            }
            Ok(()) => {
                let echoed = Some(&*content).filter(|content| content.len() <= MAX_ECHOED_BYTES);
                let body = String::from_utf8_lossy(echoed.unwrap_or_default()).into_owned();
                self.with_saved(routed, |server, plain, _| local_response::echo(&plain.head, server.client, body))
            }
        };
        let Some(response) = response else { return Ok(NextStep::Close) };
        Ok(NextStep::Settle(Box::new(UnsettledResponse { response, request, outcome })))
    }

    /// Settles limits that count responses, and sends the response.
    pub(super) async fn settle_and_respond(&mut self, unsettled: Box<UnsettledResponse>) -> io::Result<()> {
        let UnsettledResponse { mut response, request, outcome } = *unsettled;
        request.settle(&outcome, Responder::Gateway, (response.status(), response.headers())).await;
        proxy::complete(&outcome, request.route(), &mut response);
        self.respond_now(&response, request).await
    }

    /// Sends a response of the gateway with the buffers of the worker.
    pub(super) async fn respond_now(&mut self, response: &Response<Bytes>, request: ProxyRequest) -> io::Result<()> {
        let mut request = Some(request);
        let responded = poll_fn(|context| {
            let buffers = &mut scratch().buffers;
            Poll::Ready(request.take().map_or(Ok(()), |request| self.respond(response, request, buffers, context)))
        });
        responded.await
    }

    /// Reads the rest of the body. Returns ready once it is complete or too long for an echo, or with the reason why it
    /// is refused.
    fn poll_collect(
        &mut self,
        content: &mut Vec<u8>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Result<(), Failure>>> {
        while let Some(body) = &self.body {
            if let Some(failure) = body.failure {
                return Poll::Ready(Ok(Err(failure)));
            }
            if content.len() > MAX_ECHOED_BYTES {
                break;
            }
            let part = self.poll_body_part(context, |body, bytes, _, _| body.take_content(bytes, content));
            match (ready!(part), &mut self.body) {
                (Err(BodyError::Failed(failure)), Some(body)) => body.failure = Some(failure),
                (Err(_), _) => return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into())),
                (Ok(()), _) => {}
            }
        }
        Poll::Ready(Ok(Ok(())))
    }
}

/// The start of the HTTP/2 connection preface, for clients that use HTTP/2 without ALPN. No HTTP/1 request starts like
/// this.
const HTTP2_PREFACE: &[u8] = b"PRI ";

impl Http1Server<'_> {
    /// Sends the refusal to the client.
    pub(super) fn refuse(
        &mut self,
        plain: &PlainRequest<'_>,
        outcome: &Outcome,
        mut request: ProxyRequest,
        buffers: &mut WorkerBuffers,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        if plain.head.is_grpc
            && let Some(response) = outcome.grpc_response()
        {
            return self.respond(&response.map(|()| Bytes::new()), request, buffers, context);
        }
        let id = request.id.as_ref().map(HeaderValue::as_bytes);
        let Some((message, bytes)) = self.refusal(plain, outcome, id, buffers) else { return Ok(()) };
        request.status = Some(message.status);
        request.sent_bytes += message.body_bytes as u64;
        self.put(bytes, &[], context)
    }

    /// Responds to a head that cannot be parsed. Nothing shows where the next request would begin, so the connection is
    /// closed.
    pub(super) fn refuse_head(
        &mut self,
        invalid: InvalidHead,
        bytes: &[u8],
        (site, buffers): (&Site, &mut WorkerBuffers),
        context: &mut Context<'_>,
    ) -> io::Result<NextStep> {
        if !self.has_served && bytes.starts_with(HTTP2_PREFACE) {
            return Ok(NextStep::Http2);
        }
        if !self.has_served && self.client.scheme == Scheme::Http && is_tls_hello(bytes) {
            self.worker.tally.failed_handshakes.note(HandshakeFailure::TlsHello);
            return Ok(NextStep::Close);
        }
        if let InvalidHead::Ambiguous(ambiguity) = invalid {
            self.client.note_ambiguity(ambiguity);
        }
        let status = invalid.status();
        self.worker.tally.note_unparsed(status);
        // The client behind a trusted proxy is named in the head, which could not be parsed.
        if !self.peer.address.is_some_and(|address| site.proxies.trusts(address)) {
            self.worker.note_refused(Refused::Unparsed(invalid), self.peer, &[]);
        }
        if let Some(log) = &site.log {
            let mut record = Record::unparsed(self.client.nearest.to_canonical(), (log, self.worker.number));
            let reason = self.client.ambiguity().or((status == StatusCode::BAD_REQUEST).then_some(MALFORMED));
            if let Some(reason) = reason {
                record.note_reason(reason);
            }
            record.write(&Completion { status: Some(status), ..Completion::default() });
        }
        self.is_last = true;
        // Nothing of it is needed while the connection lingers.
        self.served += bytes.len();
        buffers.out.clear();
        let response = local_response::unparsed(invalid);
        let lines = (buffers.date.line(self.worker.ticks.now()), headers::CLOSE);
        local_response::put(&mut buffers.out, (&response, bytes.starts_with(b"HEAD ")), lines, None);
        self.put(&buffers.out, &[], context)?;
        Ok(NextStep::Answered)
    }

    /// Sends the refusal where there is no access log. A flood then costs only a few counters.
    pub(super) fn refuse_unlogged(
        &mut self,
        plain: &PlainRequest<'_>,
        buffers: &mut WorkerBuffers,
        (site, route): (&Site, Option<usize>),
        outcome: &Outcome,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        let tally = &self.worker.tally;
        let began = tally.now();
        self.worker.note_refused(Refused::Denied(outcome), self.peer, plain.head.headers.lines);
        let new_id;
        let id = match plain.head.id() {
            _ if !site.adds_header(UpstreamHeader::RequestId) => None,
            Some(given) => Some(given),
            None => {
                new_id = self.worker.ids.next_text();
                Some(&new_id[..])
            }
        };
        let Some((message, bytes)) = self.refusal(plain, outcome, id, buffers) else { return Ok(()) };
        let put = self.put(bytes, &[], context);
        tally.note_outcome(&mut buffers.last_noted, outcome);
        tally.note_dropped_headers(plain.head.dropped);
        let (status, nanos) = (Some(message.status), tally.nanos_since(began));
        match route {
            Some(number) => {
                let route = site.routes[number].tally(self.worker.number);
                route.note_began();
                route.note_ended(status, nanos);
            }
            None => tally.note_unrouted(status, nanos),
        }
        put
    }

    /// Returns the response to a refused request, with the request's ID.
    fn refusal<'d>(
        &mut self,
        plain: &PlainRequest<'_>,
        outcome: &Outcome,
        id: Option<&[u8]>,
        buffers: &'d mut WorkerBuffers,
    ) -> Option<(WrittenResponse, &'d [u8])> {
        self.is_last |= self.is_closing() || self.has_undrainable_body();
        let WorkerBuffers { last_refusal, date, out, .. } = buffers;
        let date = date.line(self.worker.ticks.now());
        let headers = plain.head.headers.lines;
        let (mut message, mut bytes) = match self.connection_line() {
            b"" => outcome.write_http1_reusing(last_refusal, headers, date),
            line => outcome.write_http1_reusing(last_refusal, headers, &[date, line].concat()),
        }?;
        if self.is_head {
            bytes = &bytes[..bytes.len() - message.body_bytes];
            message.body_bytes = 0;
        }
        let Some(id) = id else { return Some((message, bytes)) };
        // Each response has another ID, and the rest stays for the next response. Copying it is cheaper than writing it.
        let (head, end) = bytes.split_at(bytes.len() - message.body_bytes - b"\r\n".len());
        out.clear();
        out.extend_from_slice(head);
        headers::put(out, X_REQUEST_ID.as_str(), id);
        out.extend_from_slice(end);
        Some((message, out))
    }
}

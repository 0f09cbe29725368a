//! Responses to refused requests.

use std::io;
use std::task::Context;

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode};
use tollgate::Outcome;
use tollgate::internal::{Unreadable, WrittenResponse};
use tollgate::rules::Facts;
use tollgate::rules::file::internal::UpstreamHeader;

use super::{Lane, NextStep};
use crate::gateway::access_log::{Completion, Record};
use crate::gateway::client::Scheme;
use crate::gateway::failure::{self, Failure, HandshakeFailure};
use crate::gateway::head::headers::X_REQUEST_ID;
use crate::gateway::head::text;
use crate::gateway::http1::framing::Ambiguity;
use crate::gateway::http1::request::{InvalidHead, PlainRequest};
use crate::gateway::http1::scratch::WorkerBuffers;
use crate::gateway::http2::exchange::{bodiless, is_malformed};
use crate::gateway::listener::tls;
use crate::gateway::request_guard::RequestGuard;
use crate::gateway::site::Site;

/// The start of the HTTP/2 connection preface, for clients that use HTTP/2 without ALPN. No HTTP/1 request starts like
/// this.
const HTTP2_PREFACE: &[u8] = b"PRI ";

/// The reason in the access log for a head that is not HTTP.
const MALFORMED: &str = "malformed";

impl Lane<'_> {
    /// Sends the refusal to the client.
    pub(super) fn refuse(
        &mut self,
        plain: &PlainRequest<'_>,
        outcome: &Outcome,
        mut guard: RequestGuard,
        buffers: &mut WorkerBuffers,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        if plain.head.is_grpc
            && let Some(response) = outcome.grpc_response()
        {
            self.strike_if_malformed(plain, outcome);
            return self.respond(&response.map(|()| Bytes::new()), guard, buffers, context);
        }
        let id = guard.id().map(HeaderValue::as_bytes);
        let Some((message, bytes)) = self.refusal(plain, outcome, id, buffers) else { return Ok(()) };
        guard.note_status(message.status);
        guard.note_sent(message.body_bytes);
        self.put(bytes, &[], context)
    }

    /// Refuses a request before limits are checked.
    pub(super) fn refuse_malformed(
        &mut self,
        plain: &PlainRequest<'_>,
        failure: Failure,
        (site, buffers): (&Site, &mut WorkerBuffers),
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        let mut guard = self.begin_request(plain, site);
        if failure == Failure::UnderscoreHeader {
            self.worker.tally.note_ambiguity(Ambiguity::UnderscoreHeader);
        }
        if let Some(reason) = failure.reason() {
            guard.note_reason(reason);
        }
        if failure.is_malformed_request() {
            self.strike(plain);
        }
        self.refuse_with(plain, failure::response(failure), guard, buffers, context)
    }

    /// Refuses a request with more than one interpretation.
    pub(super) fn refuse_unreadable(
        &mut self,
        plain: &PlainRequest<'_>,
        problem: &Unreadable,
        (site, buffers): (&Site, &mut WorkerBuffers),
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        let mut guard = self.begin_request(plain, site);
        guard.note_reason(problem.reason());
        self.worker.tally.note_unreadable(problem.number());
        self.strike(plain);
        self.refuse_with(plain, failure::unreadable_response(problem), guard, buffers, context)
    }

    fn refuse_with(
        &mut self,
        plain: &PlainRequest<'_>,
        response: Response<Bytes>,
        guard: RequestGuard,
        buffers: &mut WorkerBuffers,
        context: &mut Context<'_>,
    ) -> io::Result<()> {
        let response = if plain.head.is_head() { bodiless(response) } else { response };
        self.respond(&response, guard, buffers, context)
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
        if !self.has_served && self.client.scheme == Scheme::Http && tls::is_hello(bytes) {
            self.worker.tally.note_failed_handshake(HandshakeFailure::TlsHello);
            return Ok(NextStep::Close);
        }
        if let InvalidHead::Ambiguous(ambiguity) = invalid {
            self.client.note_ambiguity(ambiguity);
        }
        let status = invalid.status();
        self.worker.tally.note_unparsed(status);
        // The client behind a trusted proxy is named in the head, which could not be parsed.
        if status == StatusCode::BAD_REQUEST && !site.proxies.trusts(self.peer.address) {
            self.worker.strike(&self.peer.add_to(Facts::new("", "/")));
        }
        if let Some(log) = &site.log {
            let mut record = Record::unparsed(self.peer.address.to_canonical(), (log, self.worker.number));
            let reason = self.client.ambiguity().or((status == StatusCode::BAD_REQUEST).then_some(MALFORMED));
            if let Some(reason) = reason {
                record.note_reason(reason);
            }
            record.write(&Completion { status: Some(status), ..Completion::default() });
        }
        self.is_last = true;
        let mut response = Response::new(Bytes::new());
        *response.status_mut() = status;
        buffers.out.clear();
        text::put_answer(&mut buffers.out, &response, (buffers.date.line(self.worker.ticks.now()), text::CLOSE), None);
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
        (self.is_last, self.is_http10) = (plain.head.is_last, plain.head.is_http10());
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
        tally.note_outcome_after(&mut buffers.last_noted, outcome);
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

    fn strike_if_malformed(&self, plain: &PlainRequest<'_>, outcome: &Outcome) {
        if is_malformed(outcome) {
            self.strike(plain);
        }
    }

    /// Counts a malformed request as a strike against the client.
    fn strike(&self, plain: &PlainRequest<'_>) {
        let facts = Facts::new("", "/").headers(plain.head.headers.lines);
        self.worker.strike(&self.peer.add_to(facts));
    }

    /// Returns the response to a refused request, with the request's ID.
    fn refusal<'d>(
        &mut self,
        plain: &PlainRequest<'_>,
        outcome: &Outcome,
        id: Option<&[u8]>,
        buffers: &'d mut WorkerBuffers,
    ) -> Option<(WrittenResponse, &'d [u8])> {
        self.strike_if_malformed(plain, outcome);
        self.is_last |= self.worker.is_closing() || self.has_undrainable_body();
        let WorkerBuffers { last_refusal, date, out, .. } = buffers;
        let date = date.line(self.worker.ticks.now());
        let headers = plain.head.headers.lines;
        let (mut message, mut bytes) = match self.connection_line() {
            b"" => outcome.write_http1_reusing(last_refusal, headers, date),
            line => outcome.write_http1_reusing(last_refusal, headers, &[date, line].concat()),
        }?;
        if plain.head.is_head() {
            bytes = &bytes[..bytes.len() - message.body_bytes];
            message.body_bytes = 0;
        }
        let Some(id) = id else { return Some((message, bytes)) };
        // Each response has another ID, and the rest stays for the next response. Copying it is cheaper than writing it.
        let (head, end) = bytes.split_at(bytes.len() - message.body_bytes - b"\r\n".len());
        out.clear();
        out.extend_from_slice(head);
        text::put(out, X_REQUEST_ID.as_str(), id);
        out.extend_from_slice(end);
        Some((message, out))
    }
}

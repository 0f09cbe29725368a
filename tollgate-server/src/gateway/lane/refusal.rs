//! Responses to refused requests.

use std::io;
use std::task::Context;

use tollgate::Outcome;
use tollgate::internal::WrittenResponse;
use tollgate::rules::Facts;

use super::super::exchange::{RequestGuard, is_malformed};
use super::super::site::Site;
use super::request::PlainRequest;
use super::scratch::WorkerBuffers;
use super::{Lane, text};

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
        let Some((message, bytes)) = self.refusal(plain, outcome, buffers) else { return Ok(()) };
        guard.note_status(message.status);
        guard.note_sent(message.body_bytes);
        self.put(bytes, &[], context)
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
        self.is_last = plain.is_last;
        let Some((message, bytes)) = self.refusal(plain, outcome, buffers) else { return Ok(()) };
        let put = self.put(bytes, &[], context);
        tally.note_outcome_after(&mut buffers.last_noted, outcome);
        tally.note_dropped_headers(plain.dropped);
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

    /// Returns the response to a refused request.
    fn refusal<'d>(
        &mut self,
        plain: &PlainRequest<'_>,
        outcome: &Outcome,
        buffers: &'d mut WorkerBuffers,
    ) -> Option<(WrittenResponse, &'d [u8])> {
        if is_malformed(outcome) {
            let facts = Facts::new("", "/").headers(plain.headers.lines);
            self.worker.strike(&self.client.add_to(facts));
        }
        self.is_last |= self.worker.is_closing();
        let WorkerBuffers { last_refusal, date, .. } = buffers;
        let date = date.line(self.worker.ticks.now());
        let headers = plain.headers.lines;
        let (mut message, mut bytes) = if self.is_last {
            outcome.write_http1_reusing(last_refusal, headers, &[date, text::CLOSE].concat())
        } else {
            outcome.write_http1_reusing(last_refusal, headers, date)
        }?;
        if plain.is_head() {
            bytes = &bytes[..bytes.len() - message.body_bytes];
            message.body_bytes = 0;
        }
        Some((message, bytes))
    }
}

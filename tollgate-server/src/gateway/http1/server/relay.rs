//! Moves the bytes of a request between its client and its upstream, in both directions at once.

use std::io;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::StatusCode;
use tollgate_config::internal::UpstreamHeader;
use tollgate_http1::{BodyDecoder, Framing};

use super::Http1Server;
use super::client_io::BodyError;
use super::forward::{AttemptError, BegunResponse, Forwarding, Settling};
use crate::gateway::failure::{Failure, Fault};
use crate::gateway::head::headers::{self, HeaderKind, HeadersView};
use crate::gateway::http1::codec::{HeadError, HeadUse, ResponseHead, poll_head, trailers_of_response};
use crate::gateway::proxy::ProxyRequest;
use crate::gateway::splice::{self, WorkerPipe};
use crate::gateway::upstream::abandoned::is_event_stream;
use crate::gateway::upstream::conn::Http1Conn;
use crate::gateway::worker::{Scratch, WorkerBuffers, scratch};

/// The maximum number of reads before the response gets its turn.
const READS_PER_TURN: u32 = 16;

/// The maximum length of a body that is copied behind its head: one write of one buffer is cheaper.
const JOINED_BYTES: usize = 4096;

impl Forwarding {
    /// Moves the bytes of both directions. Returns ready once the client was sent the whole response, and the upstream
    /// the whole request, if it reads that.
    pub(super) fn poll_relay(
        &mut self,
        server: &mut Http1Server<'_>,
        conn: &mut Http1Conn,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), AttemptError>> {
        if server.may_read_body(self.begun.is_some()) {
            match &self.begun {
                Some(begun) if begun.rest.is_over() => {
                    // The client may read its response only after it has sent the body.
                    if self.relay_upload(server, conn, context).is_err() {
                        self.give_up_connection();
                    }
                }
                _ => self.relay_upload(server, conn, context)?,
            }
        }
        if self.begun.is_none() {
            ready!(self.poll_answer(server, conn, context))?;
            if let Settling::Head(_) = self.settling {
                return Poll::Ready(Ok(()));
            }
        }
        ready!(self.poll_body(server, conn, context))?;
        if self.switched.is_none() && !ready!(self.poll_request_sent(server, conn, context)) {
            self.give_up_connection();
        }
        Poll::Ready(Ok(()))
    }

    /// Returns ready once the upstream has the whole request, or with false if it does not want the rest. An upstream may
    /// respond before it has read the body, and read it afterwards.
    fn poll_request_sent(
        &self,
        server: &mut Http1Server<'_>,
        conn: &mut Http1Conn,
        context: &mut Context<'_>,
    ) -> Poll<bool> {
        let sent = conn.poll_send(context);
        match (&server.body, &self.begun) {
            (None, _) if sent.is_ready() => return Poll::Ready(matches!(sent, Poll::Ready(Ok(())))),
            // A client that waits for `100 Continue` has its response, and may send no body.
            (Some(body), _) if body.awaits_continue => return Poll::Ready(false),
            (_, Some(begun)) if begun.stays_open && !matches!(sent, Poll::Ready(Err(_))) => {}
            _ => return Poll::Ready(false),
        }
        // The upstream has nothing left to send. It may close the connection.
        if conn.poll_read(&mut scratch().input, context).is_ready() {
            return Poll::Ready(false);
        }
        server.poll_upstream_late(context).map(|()| false)
    }

    /// Closes the connection to the upstream after the response.
    fn give_up_connection(&mut self) {
        if let Some(begun) = &mut self.begun {
            begun.stays_open = false;
        }
    }

    /// Returns ready once the client was sent the head of the response, and the part of the body that arrived with it.
    fn poll_answer(
        &mut self,
        server: &mut Http1Server<'_>,
        conn: &mut Http1Conn,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), AttemptError>> {
        let may_repeat = self.may_repeat && self.route().repeats_lost(conn.usage.is_used());
        let mut scratch = scratch();
        let Scratch { input, buffers, .. } = &mut *scratch;
        let answered = poll_head(conn, (input, server.is_head), context, |head, lines, bytes, context| {
            if head.is_interim() {
                self.pass_interim(server, &head, lines, buffers, context);
                return HeadUse::Skipped;
            }
            // No upgrade was requested, or the request is not complete.
            if head.switches() && (!self.upgrades || server.body.is_some()) {
                return HeadUse::Taken(Err(AttemptError::failed(Failure::InvalidResponse)));
            }
            if let Settling::AwaitsHead = self.settling {
                // As the upstream has sent it: the route may remove the header with the cost.
                let map = head.header_map(bytes, lines);
                self.settling = Settling::Head(Box::new((head.status, map)));
                return HeadUse::Kept(Ok(()));
            }
            HeadUse::Taken(self.begin_answer(server, (head, lines), bytes, buffers, context))
        });
        match answered {
            Poll::Ready(Ok(begun)) => return Poll::Ready(begun),
            Poll::Ready(Err(HeadError { fault, is_silent })) => {
                return Poll::Ready(Err(AttemptError::Failed {
                    fault: Box::new(fault),
                    repeatable: (is_silent && may_repeat).into(),
                }));
            }
            Poll::Pending => {}
        }
        if server.has_gone(input, context) {
            return Poll::Ready(Err(AttemptError::ClientGone));
        }
        drop(scratch);
        // Interim responses may wait for the client, which then has a deadline.
        if ready!(server.poll_sent(context)).is_err() {
            return Poll::Ready(Err(AttemptError::ClientGone));
        }
        ready!(server.poll_upstream_late(context));
        Poll::Ready(Err(AttemptError::failed(Failure::UpstreamTimeout)))
    }

    /// Passes an interim response on. The gateway itself sends `100 Continue`, and a client that does not read can do
    /// without hints. That a client has left is noticed with the next bytes: the response may have begun to arrive.
    fn pass_interim(
        &self,
        server: &mut Http1Server<'_>,
        head: &ResponseHead<'_>,
        lines: HeadersView<'_>,
        buffers: &mut WorkerBuffers,
        context: &mut Context<'_>,
    ) {
        if head.status == StatusCode::CONTINUE || server.is_http10 || !server.unsent.is_empty() {
            return;
        }
        buffers.out.clear();
        head.write_interim(&mut buffers.out, lines, &self.route().response_edits);
        _ = server.put(&buffers.out, &[], context);
    }

    /// Writes the head of a response, and the part of the body that arrived with it.
    fn begin_answer(
        &mut self,
        server: &mut Http1Server<'_>,
        (mut head, header_buffer): (ResponseHead<'_>, HeadersView<'_>),
        bytes: &[u8],
        buffers: &mut WorkerBuffers,
        context: &mut Context<'_>,
    ) -> Result<(), AttemptError> {
        server.restart_deadline(self.timeout());
        let WorkerBuffers { out, date, .. } = buffers;
        server.is_last |= server.is_closing();
        let framing = match &mut head.body {
            BodyDecoder::Length(_) => Framing::Raw,
            // A client of HTTP/1.0 knows no chunks: only the end of the connection can end the body.
            _ if server.is_http10 => {
                server.is_last = true;
                Framing::Raw
            }
            body if self.wants_trailers => {
                body.keep_trailers();
                Framing::Chunked(trailers_of_response(header_buffer, &self.route().response_edits))
            }
            _ => Framing::CHUNKED,
        };
        out.clear();
        let added = (&self.outcome, self.request.id.as_ref(), self.request.site.adds_header(UpstreamHeader::Via));
        let date = date.line(server.worker.ticks.now());
        let location = |value: &[u8]| {
            let upstream = self.attempts.current(self.route())?;
            self.route().location(upstream, self.request.https_host.as_deref(), value)
        };
        head.write(out, header_buffer, &self.route().response_edits, added, (&framing, date), location);
        match header_buffer.values(HeaderKind::Upgrade).next() {
            Some(protocol) if head.switches() => {
                out.extend_from_slice(headers::UPGRADE);
                headers::put(out, "upgrade", protocol);
            }
            _ => out.extend_from_slice(server.connection_line()),
        }
        out.extend_from_slice(b"\r\n");
        let rest = &bytes[head.bytes..];
        // Fails before anything is recorded or sent, so that the gateway can still respond.
        let part = head.body.pass(rest, &framing, out);
        let part = part.map_err(|_ambiguity| AttemptError::failed(Failure::InvalidResponse))?;
        if let Some(upstream) = self.attempts.current(self.route()) {
            upstream.note_head(head.status, server.worker.ticks.now());
        }
        self.request.status = Some(head.status);
        self.request.is_upstreams = true;
        if self.request.permit.is_some() && header_buffer.values(HeaderKind::ContentType).any(is_event_stream) {
            self.request.is_endless = true;
        }
        if head.switches() {
            self.switched = Some(Bytes::copy_from_slice(rest));
        }
        self.request.sent_bytes += part.content as u64;
        let put = if part.bytes.len() > JOINED_BYTES {
            server.put(out, part.bytes, context)
        } else {
            out.extend_from_slice(part.bytes);
            server.put(out, &[], context)
        };
        let stays_open = head.stays_open && part.taken == rest.len();
        self.begun = Some(BegunResponse { rest: head.body, framing, stays_open });
        put.map_err(|error| unsent(&error, &mut self.request))
    }

    /// Returns ready once the client was sent the rest of the response.
    fn poll_body(
        &mut self,
        server: &mut Http1Server<'_>,
        conn: &mut Http1Conn,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), AttemptError>> {
        let Self { request, route, begun, .. } = self;
        let Some(BegunResponse { rest, framing, stays_open }) = begun else {
            return Poll::Ready(Err(AttemptError::Aborted));
        };
        loop {
            if ready!(server.poll_sent(context)).is_err() {
                return Poll::Ready(Err(AttemptError::ClientGone));
            }
            if rest.is_over() {
                return Poll::Ready(Ok(()));
            }
            // Some upstreams respond before they have read the whole request.
            _ = conn.poll_send(context);
            let mut scratch = scratch();
            let Scratch { input, buffers, pipe, .. } = &mut *scratch;
            let left = rest.long_rest(splice::MIN_BYTES).filter(|_| server.stream.plain().is_some());
            let moving = left.and_then(|left| Some((left, conn.plain()?, pipe.open()?)));
            let is_moved = moving.is_some();
            let read = match moving {
                Some((left, upstream, pipe)) => pipe.poll_fill(upstream, left, context),
                None => conn.poll_read(input, context),
            };
            conn.has_long_bodies |= is_moved;
            let read = match read {
                Poll::Ready(Err(error)) if is_moved && splice::is_refused(&error) => {
                    *pipe = WorkerPipe::Refused;
                    continue;
                }
                Poll::Ready(read) => read,
                Poll::Pending => {
                    if server.has_gone(input, context) {
                        return Poll::Ready(Err(AttemptError::ClientGone));
                    }
                    drop(scratch);
                    ready!(server.poll_upstream_late(context));
                    request.note_upstream_failed(&Fault::Stalled);
                    return Poll::Ready(Err(AttemptError::Aborted));
                }
            };
            server.restart_deadline(request.site.routes[*route].timeout);
            buffers.out.clear();
            let part = match read {
                Ok(0) => rest.end(framing, &mut buffers.out).ok(),
                Ok(read) if is_moved => Some(rest.count_moved(read)),
                Ok(read) => rest.pass(&input[..read], framing, &mut buffers.out).ok().inspect(|part| {
                    *stays_open &= part.taken == read;
                }),
                Err(_) => None,
            };
            let Some(part) = part else {
                request.note_upstream_failed(&Failure::Disconnected.into());
                return Poll::Ready(Err(AttemptError::Aborted));
            };
            request.sent_bytes += part.content as u64;
            let put = if is_moved {
                server.put_moved(part.taken, pipe, input, context)
            } else {
                server.put(part.to_send(&buffers.out), &[], context)
            };
            put.map_err(|error| unsent(&error, request))?;
        }
    }

    /// Sends the body to the upstream as far as both sides allow.
    fn relay_upload(
        &mut self,
        server: &mut Http1Server<'_>,
        conn: &mut Http1Conn,
        context: &mut Context<'_>,
    ) -> Result<(), AttemptError> {
        for _ in 0..READS_PER_TURN {
            let Some(body) = &mut server.body else { return Ok(()) };
            if !matches!(conn.poll_send(context), Poll::Ready(Ok(()))) {
                body.due = None;
                return Ok(());
            }
            body.buffered.release();
            let part = server.poll_body_part(context, |body, bytes, out, context| {
                let part = body.rest.pass(bytes, &Framing::CHUNKED, out)?;
                body.count(part.content)?;
                let to_send = part.to_send(out);
                if !to_send.is_empty() {
                    conn.send_part(to_send, context);
                }
                body.buffered.set(conn.unsent_bytes()).map_err(|_overloaded| Failure::Overloaded)?;
                Ok(part.taken)
            });
            match part {
                Poll::Ready(Ok(())) => server.restart_deadline(self.timeout()),
                Poll::Ready(Err(BodyError::Failed(failure))) => return Err(self.fail_body(server, failure)),
                Poll::Ready(Err(_)) => return Err(AttemptError::ClientGone),
                Poll::Pending => return Ok(()),
            }
        }
        // The client may have sent more.
        context.waker().wake_by_ref();
        Ok(())
    }

    /// Gives up a body. The upstream gets no end of it: its connection is closed.
    pub(super) fn fail_body(&mut self, server: &mut Http1Server<'_>, failure: Failure) -> AttemptError {
        self.request.hold_permit();
        if let Some(body) = &mut server.body {
            body.failure = Some(failure);
        }
        match &self.begun {
            None => return AttemptError::failed(failure),
            Some(begun) if failure == Failure::Overloaded && !begun.rest.is_over() => self.request.is_broken = true,
            Some(_) => {}
        }
        AttemptError::Aborted
    }
}

/// Ends a response of which a part was not sent: the client has left, or too much is buffered for it.
fn unsent(error: &io::Error, request: &mut ProxyRequest) -> AttemptError {
    if error.kind() == io::ErrorKind::OutOfMemory {
        request.is_broken = true;
    }
    // The upstream may still work on the request, and its permit is held until then.
    AttemptError::ClientGone
}

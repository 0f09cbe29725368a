//! Moves the bytes of a request between its client and its upstream, in both directions at once. Bytes that cannot be
//! written to the client at once are kept.

use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::StatusCode;
use tokio::io::AsyncWrite;
use tollgate::rules::file::internal::UpstreamHeader;

use super::Http1Server;
use super::forward::{AttemptError, Forwarding, Settling};
use crate::gateway::failure::{Failure, Fault};
use crate::gateway::head::headers::{self, HeaderKind, HeadersView};
use crate::gateway::http1::body::{InvalidBody, ResponseBody};
use crate::gateway::http1::response::{HeadError, HeadRead, HeadUse, ResponseHead, poll_head};
use crate::gateway::upstream::Target;
use crate::gateway::upstream::abandoned::is_event_stream;
use crate::gateway::upstream::conn::Http1Conn;
use crate::gateway::worker::{Scratch, WorkerBuffers, scratch};

/// The maximum length of a body that is copied behind its head: one write of one buffer is cheaper.
const SMALL_BYTES: usize = 4096;

impl Http1Server<'_> {
    /// Moves the bytes of both directions. Returns ready once the client was sent the whole response.
    pub(super) fn poll_relay(
        &mut self,
        target: &Target,
        conn: &mut Http1Conn,
        forwarding: &mut Forwarding,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), AttemptError>> {
        if self.body.is_some() {
            self.relay_upload(conn, forwarding, context)?;
        }
        if forwarding.begun.is_none() {
            ready!(self.poll_answer(target, conn, forwarding, context))?;
            if let Settling::Head(_) = forwarding.settling {
                return Poll::Ready(Ok(()));
            }
        }
        self.poll_body(conn, forwarding, context)
    }

    /// Returns ready once the client was sent the head of the response, and the part of the body that arrived with it.
    fn poll_answer(
        &mut self,
        target: &Target,
        conn: &mut Http1Conn,
        forwarding: &mut Forwarding,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), AttemptError>> {
        // On a new connection to the only upstream there is no retry: the request may be what broke the connection.
        let may_repeat = forwarding.may_repeat && (conn.usage.is_used() || forwarding.route().has_several());
        let mut scratch = scratch();
        let Scratch { input, buffers, .. } = &mut *scratch;
        let has_unparsed = std::mem::take(&mut forwarding.has_unparsed);
        let read = HeadRead { input, is_head: forwarding.is_head, has_unparsed };
        let answered = poll_head(conn, read, context, |head, lines, bytes, context| {
            if head.is_interim() {
                return match self.pass_interim(&head, lines, buffers, forwarding, context) {
                    Ok(()) => HeadUse::Skipped,
                    Err(gone) => HeadUse::Taken(Err(gone)),
                };
            }
            // No upgrade was requested, or the request is not complete.
            if head.switches() && (!forwarding.upgrades || self.body.is_some()) {
                return HeadUse::Taken(Err(AttemptError::failed(Failure::BadAnswer)));
            }
            if let Settling::AwaitsHead = forwarding.settling {
                let mut map = head.header_map(bytes, lines);
                forwarding.route().response_edits.apply(&mut map);
                forwarding.settling = Settling::Head(Box::new((head.status, map)));
                return HeadUse::Kept(Ok(()));
            }
            if forwarding.route().eject.counts(head.status) {
                let fault = Fault::Status(head.status);
                target.failed(&fault, &forwarding.route().eject, self.worker.ticks.now());
            }
            HeadUse::Taken(self.begin_answer((head, lines), bytes, buffers, forwarding, context))
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
        if self.has_gone(input, context) {
            return Poll::Ready(Err(AttemptError::ClientGone));
        }
        drop(scratch);
        ready!(self.poll_upstream_late(context));
        Poll::Ready(Err(AttemptError::failed(Failure::UpstreamTimeout)))
    }

    /// Passes an interim response on. The gateway itself sends `100 Continue`, and a client that does not read can do
    /// without hints.
    fn pass_interim(
        &mut self,
        head: &ResponseHead<'_>,
        lines: HeadersView<'_>,
        buffers: &mut WorkerBuffers,
        forwarding: &Forwarding,
        context: &mut Context<'_>,
    ) -> Result<(), AttemptError> {
        if head.status == StatusCode::CONTINUE || self.is_http10 || !self.unsent.is_empty() {
            return Ok(());
        }
        buffers.out.clear();
        head.write_interim(&mut buffers.out, lines, &forwarding.route().response_edits);
        self.put(&buffers.out, &[], context).map_err(|_gone| AttemptError::ClientGone)
    }

    /// Writes the head of a response, and the part of the body that arrived with it.
    fn begin_answer(
        &mut self,
        (mut head, header_buffer): (ResponseHead<'_>, HeadersView<'_>),
        bytes: &[u8],
        buffers: &mut WorkerBuffers,
        forwarding: &mut Forwarding,
        context: &mut Context<'_>,
    ) -> Result<(), AttemptError> {
        let WorkerBuffers { out, date, .. } = buffers;
        let ends_by_close = self.is_http10 && head.body.send_raw();
        self.is_last |= ends_by_close || self.worker.is_closing();
        if forwarding.wants_trailers {
            head.body.pass_trailers(header_buffer);
        }
        out.clear();
        let added = (&forwarding.outcome, forwarding.guard.id(), forwarding.site.adds_header(UpstreamHeader::Via));
        let date = date.line(self.worker.ticks.now());
        head.write(out, header_buffer, &forwarding.route().response_edits, added, date);
        match header_buffer.values(HeaderKind::Upgrade).next() {
            Some(protocol) if head.switches() => {
                out.extend_from_slice(headers::UPGRADE);
                headers::put(out, "upgrade", protocol);
            }
            _ => out.extend_from_slice(self.connection_line()),
        }
        out.extend_from_slice(b"\r\n");
        forwarding.guard.note_status(head.status);
        forwarding.guard.note_upstream_answered();
        if forwarding.guard.has_permit() && header_buffer.values(HeaderKind::ContentType).any(is_event_stream) {
            forwarding.guard.note_endless();
        }
        let rest = &bytes[head.bytes..];
        if head.switches() {
            forwarding.switched = Some(Bytes::copy_from_slice(rest));
        }
        let (taken, content) = head.body.take(rest, out).map_err(|_bad| AttemptError::failed(Failure::BadAnswer))?;
        forwarding.guard.note_sent(content);
        let put = match &head.body {
            ResponseBody::Length(_) if taken > SMALL_BYTES => self.put(out, &rest[..taken], context),
            ResponseBody::Length(_) => {
                out.extend_from_slice(&rest[..taken]);
                self.put(out, &[], context)
            }
            _ => self.put(out, &[], context),
        };
        forwarding.begun = Some((head.body, head.stays_open && taken == rest.len()));
        put.map_err(|_gone| AttemptError::ClientGone)
    }

    /// Returns ready once the client was sent the rest of the response.
    fn poll_body(
        &mut self,
        conn: &mut Http1Conn,
        forwarding: &mut Forwarding,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), AttemptError>> {
        let Forwarding { site, route, guard, begun, .. } = forwarding;
        let Some((body, stays_open)) = begun else { return Poll::Ready(Err(AttemptError::Aborted)) };
        loop {
            if ready!(self.poll_sent(context)).is_err() {
                return Poll::Ready(Err(AttemptError::ClientGone));
            }
            // Some upstreams respond before they have read the whole request.
            let sent = conn.poll_send(context);
            if body.is_over() {
                *stays_open &= self.body.is_none() && matches!(sent, Poll::Ready(Ok(())));
                return Poll::Ready(Ok(()));
            }
            let mut scratch = scratch();
            let Scratch { input, buffers, .. } = &mut *scratch;
            let read = match conn.poll_read(input, context) {
                Poll::Ready(read) => read,
                Poll::Pending => {
                    if self.has_gone(input, context) {
                        return Poll::Ready(Err(AttemptError::ClientGone));
                    }
                    drop(scratch);
                    ready!(self.poll_upstream_late(context));
                    guard.note_upstream_failed(&Fault::Stalled);
                    return Poll::Ready(Err(AttemptError::Aborted));
                }
            };
            self.restart_deadline(site.routes[*route].timeout);
            buffers.out.clear();
            let took = match read {
                Ok(0) => body.end(&mut buffers.out).map(|()| (0, 0)),
                Ok(read) => {
                    body.take(&input[..read], &mut buffers.out).inspect(|(taken, _)| *stays_open &= *taken == read)
                }
                Err(_) => Err(InvalidBody),
            };
            let Ok((taken, content)) = took else {
                guard.note_upstream_failed(&Failure::Disconnected.into());
                return Poll::Ready(Err(AttemptError::Aborted));
            };
            guard.note_sent(content);
            let put = match body {
                ResponseBody::Length(_) => self.put(&input[..taken], &[], context),
                _ => self.put(&buffers.out, &[], context),
            };
            if put.is_err() {
                return Poll::Ready(Err(AttemptError::ClientGone));
            }
        }
    }

    pub(super) fn poll_read(&mut self, buffer: &mut [u8], context: &mut Context<'_>) -> io::Result<Poll<usize>> {
        match self.stream.poll_receive(&mut self.has_read, buffer, context) {
            Poll::Ready(read) => read.map(Poll::Ready),
            Poll::Pending => Ok(Poll::Pending),
        }
    }

    /// Writes as much of both as possible. [`poll_sent`](Self::poll_sent) writes the rest.
    pub(super) fn put(&mut self, head: &[u8], body: &[u8], context: &mut Context<'_>) -> io::Result<()> {
        let written = if self.unsent.is_empty() {
            self.stream.poll_send(head, body, context)
        } else {
            // Earlier bytes come first.
            Poll::Pending
        };
        let written = match written {
            Poll::Ready(written) => written?,
            Poll::Pending => 0,
        };
        self.unsent.extend_from_slice(&head[written.min(head.len())..]);
        self.unsent.extend_from_slice(&body[written.saturating_sub(head.len())..]);
        self.is_flushed = !self.stream.is_buffered();
        // Usually nothing is left.
        if !self.unsent.is_empty() {
            self.unsent_held.set(self.unsent.len()).map_err(|_overloaded| io::ErrorKind::OutOfMemory)?;
        }
        Ok(())
    }

    /// Returns ready once everything is written. Fails if the client does not read in time.
    pub(super) fn poll_sent(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !(self.unsent.is_empty() && self.is_flushed) {
            let stream = Pin::new(&mut self.stream);
            let written = match &*self.unsent {
                [] => stream.poll_flush(context).map_ok(|()| 0),
                unsent => stream.poll_write(context, unsent),
            };
            let Poll::Ready(written) = written? else {
                if !std::mem::replace(&mut self.is_blocked, true) {
                    self.deadline = self.worker.ticks.after(self.client.timeouts.write);
                }
                ready!(self.poll_late(context));
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            };
            self.is_flushed = self.unsent.is_empty();
            self.unsent.drain(..written);
            if self.unsent.is_empty() {
                self.unsent_held.release();
            }
            if std::mem::take(&mut self.is_blocked) {
                self.deadline = self.worker.ticks.after(self.wait);
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Waits for a future. Returns `None` if the client leaves in the meantime.
    pub(super) async fn unless_gone<T>(&mut self, something: impl Future<Output = T>) -> Option<T> {
        let mut something = pin!(something);
        poll_fn(|context| match something.as_mut().poll(context) {
            Poll::Ready(came) => Poll::Ready(Some(came)),
            Poll::Pending if self.reads_end(&mut scratch().input, context) => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        })
        .await
    }

    /// Returns whether the client has left. While it sends a body, reading that shows it.
    pub(super) fn has_gone(&mut self, input: &mut [u8], context: &mut Context<'_>) -> bool {
        self.body.is_none() && self.reads_end(input, context)
    }

    /// Returns whether the client has closed the connection. Bytes that it sends ahead are kept.
    fn reads_end(&mut self, input: &mut [u8], context: &mut Context<'_>) -> bool {
        if !self.ahead.is_empty() {
            return false;
        }
        match self.poll_read(input, context) {
            Ok(Poll::Ready(0)) | Err(_) => true,
            Ok(Poll::Ready(read)) => {
                self.ahead.extend_from_slice(&input[..read]);
                false
            }
            Ok(Poll::Pending) => false,
        }
    }
}

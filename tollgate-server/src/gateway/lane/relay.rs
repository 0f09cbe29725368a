//! Moves the bytes of a request between its client and its upstream, in both directions at once.

use std::io;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::StatusCode;
use tollgate::rules::file::internal::UpstreamHeader;

use super::super::abandoned::is_event_stream;
use super::super::connect::ConnectError;
use super::super::failure::{Failure, Fault};
use super::super::head::text;
use super::super::head::{HeaderBuffer, HeadersView};
use super::super::header_names::HeaderKind;
use super::super::target::Target;
use super::super::upstream_tls::TlsFault;
use super::Lane;
use super::conn::Http1Conn;
use super::forwarding::{AttemptError, Forwarding, Settling};
use super::response::{InvalidBody, ResponseBody, ResponseHead, ResponseParse};
use super::scratch::{Scratch, WorkerBuffers, scratch};

/// The maximum length of a body that is copied behind its head: one write of one buffer is cheaper.
const SMALL_BYTES: usize = 4096;

impl Lane<'_> {
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
        let broken = |head_bytes: usize, error: Option<&io::Error>| AttemptError::Failed {
            fault: Box::new(match error.and_then(TlsFault::of_alert) {
                Some(fault) => ConnectError::Tls(fault).into(),
                None => Failure::Disconnected.into(),
            }),
            retryable: head_bytes == 0 && may_repeat,
        };
        // An upstream may respond before it has read the whole request.
        let sent = conn.poll_send(context);
        let mut scratch = scratch();
        let Scratch { input, buffers, .. } = &mut *scratch;
        // The bytes that are not parsed yet.
        let (mut begin, mut end) = (0, conn.head_bytes.len());
        input[..end].copy_from_slice(&conn.head_bytes);
        let mut has_unparsed = std::mem::take(&mut forwarding.has_unparsed);
        loop {
            if !std::mem::take(&mut has_unparsed) {
                if end == input.len() {
                    input.copy_within(begin.., 0);
                    (begin, end) = (0, end - begin);
                }
                match conn.poll_read(&mut input[end..], context) {
                    Poll::Ready(Ok(0)) => return Poll::Ready(Err(broken(end - begin, None))),
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(broken(end - begin, Some(&error)))),
                    Poll::Ready(Ok(read)) => end += read,
                    Poll::Pending => break,
                }
            }
            let bytes = &input[begin..end];
            let mut header_buffer = HeaderBuffer::default();
            match ResponseHead::read(bytes, &mut header_buffer, forwarding.is_head) {
                ResponseParse::Interim(_) if !conn.note_interim() => {
                    return Poll::Ready(Err(AttemptError::failed(Failure::BadAnswer)));
                }
                ResponseParse::Interim(head) => {
                    // The gateway itself sends `100 Continue`, and a client that does not read can do without hints.
                    if head.status != StatusCode::CONTINUE && !self.is_http10 && self.unsent.is_empty() {
                        let edits = &forwarding.route().response_edits;
                        buffers.out.clear();
                        head.write_interim(&mut buffers.out, header_buffer.view(), edits);
                        self.put(&buffers.out, &[], context).map_err(|_gone| AttemptError::ClientGone)?;
                    }
                    begin += head.bytes;
                    has_unparsed = begin < end;
                }
                // No upgrade was requested, or the request is not complete.
                ResponseParse::Switch(_) if !forwarding.upgrades || self.body.is_some() => {
                    return Poll::Ready(Err(AttemptError::failed(Failure::BadAnswer)));
                }
                ResponseParse::Complete(head) | ResponseParse::Switch(head)
                    if matches!(forwarding.settling, Settling::AwaitsHead) =>
                {
                    let mut map = head.header_map(header_buffer.view());
                    forwarding.route().response_edits.apply(&mut map);
                    forwarding.settling = Settling::Head(Box::new((head.status, map)));
                    conn.head_bytes = bytes.to_vec();
                    return Poll::Ready(Ok(()));
                }
                ResponseParse::Complete(head) | ResponseParse::Switch(head) => {
                    if forwarding.route().eject.counts(head.status) {
                        let fault = Fault::Status(head.status);
                        target.failed(&fault, &forwarding.route().eject, self.worker.ticks.now());
                    }
                    conn.usage.note_keep_alive(head.keep_alive(header_buffer.view()));
                    let begun = self.begin_answer((head, header_buffer.view()), bytes, buffers, forwarding, context);
                    conn.head_bytes = Vec::new();
                    return Poll::Ready(begun);
                }
                ResponseParse::Partial if bytes.len() < input.len() => {}
                ResponseParse::Partial | ResponseParse::TooManyHeaders => {
                    return Poll::Ready(Err(AttemptError::failed(Failure::LongAnswerHead)));
                }
                ResponseParse::Invalid => return Poll::Ready(Err(AttemptError::failed(Failure::BadAnswer))),
            }
        }
        conn.head_bytes.clear();
        conn.head_bytes.extend_from_slice(&input[begin..end]);
        if let Poll::Ready(Err(error)) = sent {
            return Poll::Ready(Err(broken(conn.head_bytes.len(), Some(&error))));
        }
        if self.has_gone(input, context) {
            return Poll::Ready(Err(AttemptError::ClientGone));
        }
        drop(scratch);
        ready!(self.poll_upstream_late(context));
        Poll::Ready(Err(AttemptError::failed(Failure::UpstreamTimeout)))
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
            Some(protocol) if head.status == StatusCode::SWITCHING_PROTOCOLS => {
                out.extend_from_slice(text::UPGRADE);
                text::put(out, "upgrade", protocol);
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
        if head.status == StatusCode::SWITCHING_PROTOCOLS {
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
}

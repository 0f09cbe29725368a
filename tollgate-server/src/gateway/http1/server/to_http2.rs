//! Requests to upstreams with HTTP/2, which are converted, and their responses, which are converted back.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, DATE, TRAILER, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderValue, Response, response};
use hyper::body::Body as _;
use tollgate_http1::Framing;
use tollgate_net::deadline::Wait;

use super::Http1Server;
use super::client_io::BodyError;
use super::forward::{ForwardResult, Forwarding};
use crate::gateway::client::BufferedBytes;
use crate::gateway::failure::Failure;
use crate::gateway::head::headers::{self, X_REQUEST_ID};
use crate::gateway::http1::codec::PlainRequest;
use crate::gateway::http2::exchange::{Exchange, ReceivedRequest};
use crate::gateway::http2::response_body::ToClient;
use crate::gateway::upload::{BodyWriter, ClientBody, Demand, channel};
use crate::gateway::worker::{WorkerBuffers, scratch};

/// The client has left, or the response cannot be completed.
struct Aborted;

impl Http1Server<'_> {
    /// Converts a request, forwards it to upstreams until one responds, and the response to the client.
    pub(super) async fn forward_to_http2(&mut self, forwarding: Box<Forwarding>) -> ForwardResult {
        let Forwarding { mut request, route, outcome, wants_trailers, mut attempts, .. } = *forwarding;
        // The upstream that was chosen last is the first to get it.
        request.upstream = None;
        attempts.undo_last();
        let site = Arc::clone(&request.site);
        let converted = self.with_saved((&site, Some(route)), |server, plain, _| server.convert(plain));
        let Some((received, writer)) = converted.flatten() else { return ForwardResult::Close };
        self.saved = Vec::new();
        self.set_deadline(site.routes[route].timeout);
        let exchange = Exchange { worker: Arc::clone(self.worker), client: Arc::clone(self.client) };
        let mut answering = Box::pin(exchange.forward(received, (request, route), attempts, &outcome));
        let answered = poll_fn(|context| {
            self.relay_body(&writer, context)?;
            match answering.as_mut().poll(context) {
                Poll::Ready(response) => Poll::Ready(Ok(response)),
                Poll::Pending if self.has_gone(&mut scratch().input, context) => Poll::Ready(Err(Aborted)),
                Poll::Pending => Poll::Pending,
            }
        });
        let Ok(response) = answered.await else { return ForwardResult::Close };
        match self.send_response(response, wants_trailers, (writer, site.routes[route].timeout)).await {
            Ok(()) => ForwardResult::Answered,
            Err(Aborted) => ForwardResult::Close,
        }
    }

    /// Converts a request, and the part of its body that has arrived.
    fn convert(&mut self, plain: &PlainRequest<'_>) -> Option<(ReceivedRequest, BodyWriter)> {
        let (writer, reader) = channel(plain.body_length());
        let (content, mut rest) = plain.received_body();
        writer.send(Bytes::from(content));
        let buffered = match &mut self.body {
            Some(body) => {
                body.rest = rest;
                Some(std::mem::replace(&mut body.buffered, BufferedBytes::none(self.client)))
            }
            None => {
                match rest.take_trailers() {
                    Ok(trailers) => writer.end(trailers),
                    Err(_ambiguity) => writer.fail(Failure::BodyBroken),
                }
                None
            }
        };
        let request = ReceivedRequest { parts: plain.to_parts()?, body: ClientBody::Http1(reader), buffered };
        Some((request, writer))
    }

    /// Passes the request body on as far as both sides allow.
    fn relay_body(&mut self, writer: &BodyWriter, context: &mut Context<'_>) -> Result<(), Aborted> {
        loop {
            let Some(body) = &mut self.body else { return Ok(()) };
            if body.failure.is_some() || writer.poll_demand(context) != Poll::Ready(Demand::Wanted) {
                body.due = None;
                return Ok(());
            }
            let part = self.poll_body_part(context, |body, bytes, _, _| {
                let mut content = Vec::new();
                let taken = body.take_content(bytes, &mut content)?;
                writer.send(Bytes::from(content));
                if body.rest.is_over() {
                    writer.end(body.rest.take_trailers()?);
                }
                Ok(taken)
            });
            match part {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(BodyError::Failed(failure))) => {
                    // The upstream gets no end of the body.
                    if let Some(body) = &mut self.body {
                        body.failure = Some(failure);
                    }
                    writer.fail(failure);
                    return Ok(());
                }
                Poll::Ready(Err(_)) => return Err(Aborted),
                Poll::Pending => return Ok(()),
            }
        }
    }

    /// Sends a response to the client.
    async fn send_response(
        &mut self,
        response: Response<ToClient>,
        wants_trailers: bool,
        (writer, timeout): (BodyWriter, Wait),
    ) -> Result<(), Aborted> {
        let (parts, mut body) = response.into_parts();
        body.answers_with(parts.status);
        let (mut framing, announced) = self.framing(&parts, &mut body, wants_trailers);
        poll_fn(|context| {
            let buffers = &mut scratch().buffers;
            let id = body.request_id().map(HeaderValue::as_bytes);
            Poll::Ready(self.put_head(&parts, (id, announced), &framing, (buffers, context)))
        })
        .await?;
        let mut trailers = HeaderMap::new();
        let sent = poll_fn(|context| {
            if self.may_read_body(true) {
                self.relay_body(&writer, context)?;
            }
            body.poll_blocked(context);
            self.poll_response_body((&mut body, &mut framing), &mut trailers, context)
        });
        if let Err(aborted) = sent.await {
            if let Framing::Raw = framing {
                self.stream.reset_at_close();
            }
            return Err(aborted);
        }
        self.set_deadline(timeout);
        poll_fn(|context| {
            body.poll_blocked(context);
            self.poll_rest_sent(&writer, timeout, context)
        })
        .await;
        Ok(())
    }

    /// Returns ready once the upstream has the whole request, or does not want the rest. An upstream may respond before it
    /// has read the body, and read it afterwards.
    fn poll_rest_sent(&mut self, writer: &BodyWriter, timeout: Wait, context: &mut Context<'_>) -> Poll<()> {
        // A client that waits for `100 Continue` has its response, and may send no body.
        let left = self.body.as_ref().map(|body| body.room);
        if !self.may_read_body(true) || self.relay_body(writer, context).is_err() {
            return Poll::Ready(());
        }
        match &self.body {
            Some(body) if body.failure.is_none() => {}
            _ => return Poll::Ready(()),
        }
        if writer.poll_demand(context) == Poll::Ready(Demand::Unwanted) {
            return Poll::Ready(());
        }
        if left != self.body.as_ref().map(|body| body.room) {
            // The upstream has read some of it.
            self.set_deadline(timeout);
        }
        self.poll_upstream_late(context)
    }

    /// Determines how the client gets a body, and the length that the head lacks.
    fn framing(
        &mut self,
        parts: &response::Parts,
        body: &mut ToClient,
        wants_trailers: bool,
    ) -> (Framing, Option<u64>) {
        self.is_last |= parts.headers.contains_key(CONNECTION)
            || self.is_closing()
            || self.has_undrainable_body() && body.is_local();
        let lacks_body = headers::lacks_body(parts.status);
        let announced = parts.headers.get(CONTENT_LENGTH).and_then(|length| headers::length(length.as_bytes()));
        let actual = body.size_hint().exact();
        let missing = actual.filter(|_| announced.is_none() && !lacks_body && (!self.is_head || body.is_local()));
        if self.is_head {
            _ = body.take_written();
        }
        let framing = match announced.or(actual) {
            _ if self.is_head || lacks_body => Framing::Length(0),
            Some(length) => Framing::Length(length),
            None if self.is_http10 => {
                self.is_last = true;
                Framing::Raw
            }
            None => {
                let announced = parts.headers.get_all(TRAILER).iter().filter(|_| wants_trailers);
                let names = announced.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
                Framing::Chunked(headers::trailer_names(names.map(<[u8]>::trim_ascii)))
            }
        };
        (framing, missing)
    }

    /// Writes the head of a response, with the request's ID and the length of the body if they are not in it.
    fn put_head(
        &mut self,
        parts: &response::Parts,
        (id, length): (Option<&[u8]>, Option<u64>),
        framing: &Framing,
        (buffers, context): (&mut WorkerBuffers, &mut Context<'_>),
    ) -> Result<(), Aborted> {
        let WorkerBuffers { out, date, .. } = buffers;
        out.clear();
        headers::put_status(out, parts.status, parts.status.canonical_reason().unwrap_or_default().as_bytes());
        for (name, value) in &parts.headers {
            let is_ours = *name == CONNECTION || *name == TRANSFER_ENCODING || *name == X_REQUEST_ID && id.is_some();
            if !is_ours {
                headers::put(out, name.as_str(), value.as_bytes());
            }
        }
        if let Some(id) = id {
            headers::put(out, X_REQUEST_ID.as_str(), id);
        }
        if let Some(length) = length {
            headers::put(out, CONTENT_LENGTH.as_str(), itoa::Buffer::new().format(length).as_bytes());
        }
        if let Framing::Chunked(_) = framing {
            out.extend_from_slice(b"transfer-encoding: chunked\r\n");
        }
        if !parts.headers.contains_key(DATE) {
            out.extend_from_slice(date.line(self.worker.ticks.now()));
        }
        out.extend_from_slice(self.connection_line());
        out.extend_from_slice(b"\r\n");
        self.put(out, &[], context).map_err(|_gone| Aborted)
    }

    /// Returns ready once the client was sent the whole body.
    fn poll_response_body(
        &mut self,
        (body, framing): (&mut ToClient, &mut Framing),
        trailers: &mut HeaderMap,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), Aborted>> {
        loop {
            if ready!(self.poll_sent(context)).is_err() {
                return Poll::Ready(Err(Aborted));
            }
            if let Framing::Length(0) = framing {
                // The end of a response may follow its last byte.
                if !body.is_end_stream() {
                    _ = Pin::new(body).poll_frame(context);
                }
                return Poll::Ready(Ok(()));
            }
            let frame = match Pin::new(&mut *body).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Err(Aborted)),
                Poll::Ready(None) => {
                    let buffers = &mut scratch().buffers;
                    buffers.clear();
                    let trailers = trailers.iter().map(|(name, value)| (name.as_str(), value.as_bytes()));
                    framing.end(&mut buffers.out, trailers).map_err(|_ambiguity| Aborted)?;
                    self.put(&buffers.out, &[], context).map_err(|_gone| Aborted)?;
                    *framing = Framing::Length(0);
                    continue;
                }
                Poll::Pending if self.has_gone(&mut scratch().input, context) => return Poll::Ready(Err(Aborted)),
                Poll::Pending => return Poll::Pending,
            };
            match frame.into_data() {
                Ok(data) => self.put_data(&data, framing, context).map_err(|error| {
                    if error.kind() == io::ErrorKind::OutOfMemory {
                        body.note_cut();
                    }
                    Aborted
                })?,
                Err(frame) => *trailers = frame.into_trailers().unwrap_or_default(),
            }
        }
    }

    fn put_data(&mut self, data: &Bytes, framing: &mut Framing, context: &mut Context<'_>) -> io::Result<()> {
        let buffers = &mut scratch().buffers;
        buffers.clear();
        let bytes = framing.frame(data, &mut buffers.out).map_err(|_ambiguity| io::ErrorKind::InvalidData)?;
        self.put(bytes, &[], context)
    }
}

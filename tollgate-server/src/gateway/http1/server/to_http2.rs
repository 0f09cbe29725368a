//! Requests to upstreams with HTTP/2: converted for hyper's client, and their responses converted back.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, DATE, TRAILER, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderValue, Response, StatusCode, response};
use hyper::body::Body as _;

use super::Http1Server;
use super::client_io::BodyError;
use super::forward::{ForwardResult, Forwarding};
use crate::gateway::client::BufferedBytes;
use crate::gateway::deadline::Wait;
use crate::gateway::failure::Failure;
use crate::gateway::head::headers::{self, X_REQUEST_ID};
use crate::gateway::http1::body::{LAST_CHUNK, ReceivedBody, Trailers, put_chunk};
use crate::gateway::http1::request::PlainRequest;
use crate::gateway::http2::body::{BodyWriter, ClientBody, Demand, ToClient, channel};
use crate::gateway::http2::exchange::{Exchange, ReceivedRequest};
use crate::gateway::worker::{WorkerBuffers, scratch};

/// The client has left, or the response cannot be completed.
struct Aborted;

/// A request body on its way to hyper's client.
struct BodyRelay {
    writer: BodyWriter,
    /// The part that was received last, and the trailers.
    received: ReceivedBody,
}

/// How the client gets a response body.
enum Framing {
    /// The number of bytes left.
    Length(u64),
    Chunked(Trailers),
    /// Until the connection is closed, for clients of HTTP/1.0.
    Raw,
}

impl Http1Server<'_> {
    /// Forwards a request to upstreams by hyper's client until one responds, and the response to the client.
    pub(super) async fn forward_by_hyper(&mut self, forwarding: Box<Forwarding>) -> ForwardResult {
        let Forwarding { mut request, route, outcome, wants_trailers, mut attempts, .. } = *forwarding;
        // The upstream that was chosen last is the first to get it.
        request.upstream = None;
        attempts.undo_last();
        let site = Arc::clone(&request.site);
        let converted = self.with_saved((&site, Some(route)), |server, plain, _| server.convert(plain));
        let Some((received, mut relay)) = converted.flatten() else { return ForwardResult::Close };
        self.saved = Vec::new();
        self.set_deadline(site.routes[route].timeout);
        let exchange = Exchange { worker: Arc::clone(self.worker), client: Arc::clone(self.client) };
        let mut answering = Box::pin(exchange.forward(received, (request, route), attempts, &outcome));
        let answered = poll_fn(|context| {
            self.relay_to_hyper(&mut relay, context)?;
            match answering.as_mut().poll(context) {
                Poll::Ready(response) => Poll::Ready(Ok(response)),
                Poll::Pending if self.has_gone(&mut scratch().input, context) => Poll::Ready(Err(Aborted)),
                Poll::Pending => Poll::Pending,
            }
        });
        let Ok(response) = answered.await else { return ForwardResult::Close };
        match self.send_response(response, wants_trailers, (relay, site.routes[route].timeout)).await {
            Ok(()) => ForwardResult::Answered,
            Err(Aborted) => ForwardResult::Close,
        }
    }

    /// Converts a request, and the part of its body that has arrived.
    fn convert(&mut self, plain: &PlainRequest<'_>) -> Option<(ReceivedRequest, BodyRelay)> {
        let (writer, reader) = channel(plain.body_length());
        let mut relay = BodyRelay { writer, received: plain.received_body() };
        let buffered =
            self.body.as_mut().map(|body| std::mem::replace(&mut body.buffered, BufferedBytes::none(self.client)));
        if let Err(failure) = relay.pass_on(self.body.is_none()) {
            relay.writer.fail(failure);
        }
        let request = ReceivedRequest { parts: plain.to_parts()?, body: ClientBody::Http1(reader), buffered };
        Some((request, relay))
    }

    /// Passes the body on to hyper's client as far as both sides allow.
    fn relay_to_hyper(&mut self, relay: &mut BodyRelay, context: &mut Context<'_>) -> Result<(), Aborted> {
        loop {
            let Some(body) = &mut self.body else { return Ok(()) };
            if body.failure.is_some() || relay.writer.poll_demand(context) != Poll::Ready(Demand::Wanted) {
                body.due = None;
                return Ok(());
            }
            let received = &mut relay.received;
            let part = self.poll_body_part(context, |body, bytes, _, _| body.take_content(bytes, received));
            let passed_on = match part {
                Poll::Ready(Ok(())) => relay.pass_on(self.body.is_none()),
                Poll::Ready(Err(BodyError::Failed(failure))) => Err(failure),
                Poll::Ready(Err(_)) => return Err(Aborted),
                Poll::Pending => return Ok(()),
            };
            if let Err(failure) = passed_on {
                self.break_off(failure, relay);
                return Ok(());
            }
        }
    }

    /// Gives up a body. The upstream gets no end of it.
    fn break_off(&mut self, failure: Failure, relay: &BodyRelay) {
        if let Some(body) = &mut self.body {
            body.failure = Some(failure);
        }
        relay.writer.fail(failure);
    }

    /// Sends a response to the client.
    async fn send_response(
        &mut self,
        response: Response<ToClient>,
        wants_trailers: bool,
        (mut relay, timeout): (BodyRelay, Wait),
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
        poll_fn(|context| {
            if self.may_read_body(true) {
                self.relay_to_hyper(&mut relay, context)?;
            }
            self.poll_response_body((&mut body, &mut framing), &mut trailers, context)
        })
        .await?;
        self.set_deadline(timeout);
        poll_fn(|context| self.poll_rest_sent(&mut relay, timeout, context)).await;
        Ok(())
    }

    /// Returns ready once the upstream has the whole request, or does not want the rest. An upstream may respond before it
    /// has read the body, and read it afterwards.
    fn poll_rest_sent(&mut self, relay: &mut BodyRelay, timeout: Wait, context: &mut Context<'_>) -> Poll<()> {
        // A client that waits for `100 Continue` has its response, and may send no body.
        let left = self.body.as_ref().map(|body| body.room);
        if !self.may_read_body(true) || self.relay_to_hyper(relay, context).is_err() {
            return Poll::Ready(());
        }
        match &self.body {
            Some(body) if body.failure.is_none() => {}
            _ => return Poll::Ready(()),
        }
        if relay.writer.poll_demand(context) == Poll::Ready(Demand::Unwanted) {
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
            || self.worker.is_closing()
            || self.has_undrainable_body() && body.is_local();
        let lacks_body = matches!(parts.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
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
                Framing::Chunked(Trailers::new(names.map(<[u8]>::trim_ascii)))
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
                    let end = framing.end(trailers).ok_or(Aborted)?;
                    self.put(&end, &[], context).map_err(|_gone| Aborted)?;
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
        match framing {
            Framing::Length(left) => {
                *left = left.checked_sub(data.len() as u64).ok_or(io::ErrorKind::InvalidData)?;
                self.put(data, &[], context)
            }
            Framing::Raw => self.put(data, &[], context),
            Framing::Chunked(_) => {
                let buffers = &mut scratch().buffers;
                buffers.clear();
                put_chunk(&mut buffers.out, data);
                self.put(&buffers.out, &[], context)
            }
        }
    }
}

impl BodyRelay {
    /// Passes the received part on, and the end of the body.
    fn pass_on(&mut self, is_complete: bool) -> Result<(), Failure> {
        self.writer.send(Bytes::from(std::mem::take(&mut self.received.content)));
        if is_complete {
            self.writer.end(self.received.trailers().ok_or(Failure::BodyBroken)?);
        }
        Ok(())
    }
}

impl Framing {
    /// Returns the bytes that end a body, or `None` if it is incomplete.
    fn end(&self, trailers: &HeaderMap) -> Option<Vec<u8>> {
        match self {
            Self::Length(0) | Self::Raw => Some(Vec::new()),
            Self::Length(_) => None,
            Self::Chunked(_) if trailers.is_empty() => Some(LAST_CHUNK.to_vec()),
            Self::Chunked(announced) => {
                let mut end = Vec::new();
                announced.write_map(&mut end, trailers);
                Some(end)
            }
        }
    }
}

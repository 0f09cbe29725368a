//! Requests to HTTP/1 upstreams that the server of HTTP/1 does not send: those of HTTP/2 clients, health checks, and those
//! for which an upstream with HTTP/2 was tried first. It also receives the rest of responses whose clients have left.
//!
//! A request body is sent by the same task that waits for the response and passes it on. An upstream may respond before
//! it has read the request. Then a separate task sends the rest after the end of the response.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::Response;
use hyper::body::{Body, Frame, SizeHint};
use tollgate_http1::{BodyDecoder, Framing};

use super::codec::{self, HeadError, HeadUse};
use crate::gateway::deadline::UpstreamDeadline;
use crate::gateway::failure::{Failure, Fault};
use crate::gateway::upload::{SendError, ToUpstream};
use crate::gateway::upstream::conn::{DeliveryBegun, Http1Conn, Repeatable};
use crate::gateway::upstream::{ConnPool, abandoned};
use crate::gateway::worker::{Scratch, scratch};

/// The maximum number of parts of a request body that are sent before the response gets its turn.
const PARTS_PER_TURN: u32 = 16;

/// Sends the head of a request.
pub(in crate::gateway) async fn send(
    conn: &mut Http1Conn,
    recorded: DeliveryBegun,
    write: impl FnOnce(&mut Vec<u8>) -> Result<(), Failure>,
) -> Result<(), Fault> {
    let mut once = Some((write, recorded));
    poll_fn(|context| {
        let buffers = &mut scratch().buffers;
        buffers.clear();
        let Some((write, recorded)) = once.take() else { return Poll::Ready(Ok(())) };
        write(&mut buffers.out)?;
        Poll::Ready(conn.send(&buffers.out, recorded, context).map_err(|error| codec::broken(Some(&error))))
    })
    .await
}

/// Sends the body of a request whose head was sent, and receives the head of its response. The caller bounds the wait.
pub(in crate::gateway) async fn receive(
    conn: Box<Http1Conn>,
    upload: Option<Upload>,
    (is_head, repeatable): (bool, Repeatable),
    pool: Option<ConnPool>,
) -> Result<Response<Box<Http1Response>>, SendError> {
    let mut response = Http1Response::new(conn, (BodyDecoder::UntilClose, false), pool);
    response.upload = upload;
    match poll_fn(|context| response.poll_head(is_head, context)).await {
        Ok(head) => {
            response.release_if_over();
            Ok(head.map(|()| Box::new(response)))
        }
        Err(HeadError { fault, is_silent }) => {
            let may_retry = is_silent && repeatable == Repeatable::Yes;
            Err(SendError { fault, retry: may_retry.then_some(ToUpstream::Empty) })
        }
    }
}

/// The rest of a request body.
pub(in crate::gateway) struct Upload {
    /// Empty once the connection has all of it.
    body: ToUpstream,
    framing: Framing,
    /// Bounds what is left of the body after the end of the response.
    deadline: Arc<UpstreamDeadline>,
}

impl Upload {
    /// Returns `None` if there is no body.
    pub(in crate::gateway) fn new(body: ToUpstream, deadline: &Arc<UpstreamDeadline>) -> Option<Self> {
        let framing = body.size_hint().exact().map_or(Framing::CHUNKED, Framing::Length);
        (!body.is_empty()).then(|| Self { body, framing, deadline: Arc::clone(deadline) })
    }

    /// Sends the rest after the response. Then the connection can be used again.
    async fn finish(self, mut conn: Box<Http1Conn>, pool: Option<ConnPool>) {
        let deadline = Arc::clone(&self.deadline);
        let mut upload = Some(self);
        let sent = poll_fn(|context| match poll_upload(&mut upload, &mut conn, context) {
            Ok(()) if upload.is_some() => Poll::Pending,
            sent => Poll::Ready(sent),
        });
        if let Some(Ok(())) = deadline.limit(Box::pin(sent)).await
            && let Some(pool) = pool.filter(|_| conn.is_sent())
        {
            pool.keep(conn);
        }
    }
}

/// Sends the request body as far as both sides allow. Removes it once it is sent, or if the upstream does not want the
/// rest. Trailers are not sent: limits have decided before they arrive, and some servers treat them as headers: uvicorn as
/// those of the same request, aiohttp as those of the next one.
///
/// # Errors
///
/// Fails if the body breaks off. The upstream must get no end of it.
fn poll_upload(upload: &mut Option<Upload>, conn: &mut Http1Conn, context: &mut Context<'_>) -> Result<(), Failure> {
    for _ in 0..PARTS_PER_TURN {
        let Some(Upload { body, framing, .. }) = upload else { return Ok(()) };
        match conn.poll_send(context) {
            Poll::Ready(Ok(())) => {}
            // The response may explain it.
            Poll::Ready(Err(_)) => {
                *upload = None;
                return Ok(());
            }
            Poll::Pending => {
                body.poll_ahead(context);
                return Ok(());
            }
        }
        if body.is_empty() {
            *upload = None;
            return Ok(());
        }
        let frame = match Pin::new(&mut *body).poll_frame(context) {
            Poll::Pending => return Ok(()),
            Poll::Ready(frame) => frame.transpose()?,
        };
        let buffers = &mut scratch().buffers;
        buffers.clear();
        match frame.map(Frame::into_data) {
            Some(Ok(data)) => {
                let part = framing.frame(&data, &mut buffers.out).map_err(|_ambiguity| Failure::BodyBroken)?;
                conn.send_part(part, context);
            }
            Some(Err(_trailers)) => {}
            None => {
                framing.end(&mut buffers.out, []).map_err(|_ambiguity| Failure::BodyBroken)?;
                if !buffers.out.is_empty() {
                    conn.send_part(&buffers.out, context);
                }
                *body = ToUpstream::Empty;
            }
        }
    }
    // The client may have sent more.
    context.waker().wake_by_ref();
    Ok(())
}

/// A response that is being received, and the rest of its request.
pub(in crate::gateway) struct Http1Response {
    /// `None` once the response is over.
    conn: Option<Box<Http1Conn>>,
    upload: Option<Upload>,
    /// The content that has arrived.
    first: Bytes,
    /// The decoder of the part of the body that has not arrived.
    rest: BodyDecoder,
    /// Whether the connection can be used again.
    stays_open: bool,
    pool: Option<ConnPool>,
}

impl Http1Response {
    fn new(conn: Box<Http1Conn>, (rest, stays_open): (BodyDecoder, bool), pool: Option<ConnPool>) -> Self {
        Self { conn: Some(conn), upload: None, first: Bytes::new(), rest, stays_open, pool }
    }

    /// Continues a response of which a part was passed on.
    pub(super) fn resume(conn: Box<Http1Conn>, rest: (BodyDecoder, bool), pool: ConnPool) -> Box<Self> {
        let mut response = Self::new(conn, rest, Some(pool));
        response.release_if_over();
        Box::new(response)
    }

    /// Sends the request body, and reads the head of the response. Interim responses are skipped.
    fn poll_head(&mut self, is_head: bool, context: &mut Context<'_>) -> Poll<Result<Response<()>, HeadError>> {
        let Self { conn: Some(conn), upload, first, rest, stays_open, .. } = self else {
            return Poll::Ready(Err(HeadError::failed(Failure::Disconnected)));
        };
        if poll_upload(upload, conn, context).is_err() {
            return Poll::Ready(Err(HeadError::failed(Failure::BodyBroken)));
        }
        let mut scratch = scratch();
        let Scratch { input, buffers, .. } = &mut *scratch;
        let read = codec::poll_head(conn, (input, is_head), context, |mut head, lines, bytes, _| {
            if head.is_interim() {
                return HeadUse::Skipped;
            }
            let mut response = Response::new(());
            *response.status_mut() = head.status;
            *response.version_mut() = head.version();
            *response.headers_mut() = head.header_map(bytes, lines);
            head.body.keep_trailers();
            let body = &bytes[head.bytes..];
            buffers.clear();
            let part = match head.body.pass(body, &Framing::Raw, &mut buffers.out) {
                // No upgrade was requested.
                Ok(part) if !head.switches() => part,
                _ => return HeadUse::Taken(Err(HeadError::failed(Failure::InvalidResponse))),
            };
            *first = Bytes::copy_from_slice(part.to_send(&buffers.out));
            *stays_open = head.stays_open && part.taken == body.len();
            *rest = head.body;
            HeadUse::Taken(Ok(response))
        });
        read.map(Result::flatten)
    }

    /// Returns whether the request body is still being sent.
    pub(in crate::gateway) fn has_upload(&self) -> bool {
        self.upload.is_some()
    }

    /// Sends more of the request body. If the body breaks off, the connection is closed: the upstream must get no end of
    /// it.
    pub(in crate::gateway) fn poll_upload(&mut self, context: &mut Context<'_>) {
        if let Some(conn) = self.conn.as_mut().filter(|_| self.upload.is_some()) {
            match poll_upload(&mut self.upload, conn, context) {
                Ok(()) => self.release_if_over(),
                Err(_) => (self.conn, self.upload) = (None, None),
            }
        }
    }

    /// Returns the connection to its pool once the response and the request are over. A connection whose request was
    /// not read is closed.
    fn release_if_over(&mut self) {
        if !self.rest.is_over() || self.upload.is_some() {
            return;
        }
        let Some(conn) = self.conn.take() else { return };
        if let Some(pool) = &self.pool
            && self.stays_open
            && conn.is_sent()
        {
            pool.keep(conn);
        }
    }
}

impl Body for Http1Response {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        self.poll_upload(context);
        loop {
            let Self { conn, first, rest, stays_open, .. } = &mut *self;
            if !first.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(std::mem::take(first)))));
            }
            if rest.is_over() {
                return Poll::Ready(match rest.take_trailers() {
                    Ok(trailers) => (!trailers.is_empty()).then(|| Ok(Frame::trailers(trailers))),
                    Err(_ambiguity) => Some(Err(Failure::InvalidResponse)),
                });
            }
            let Some(conn) = conn else { return Poll::Ready(Some(Err(Failure::Disconnected))) };
            // Some upstreams respond before they have read the whole request.
            _ = conn.poll_send(context);
            let mut scratch = scratch();
            let Scratch { input, buffers, .. } = &mut *scratch;
            buffers.clear();
            let (part, read) = match ready!(conn.poll_read(input, context)) {
                Ok(0) => (rest.end(&Framing::Raw, &mut buffers.out), 0),
                Ok(read) => (rest.pass(&input[..read], &Framing::Raw, &mut buffers.out), read),
                Err(_) => return Poll::Ready(Some(Err(Failure::Disconnected))),
            };
            let Ok(part) = part else { return Poll::Ready(Some(Err(Failure::Disconnected))) };
            *stays_open &= part.taken == read;
            *first = Bytes::copy_from_slice(part.to_send(&buffers.out));
            drop(scratch);
            self.release_if_over();
        }
    }

    fn is_end_stream(&self) -> bool {
        // The trailers end in an empty line, even if there are none.
        let has_trailers = self.rest.trailers().len() > b"\r\n".len();
        self.first.is_empty() && self.rest.is_over() && !has_trailers
    }

    fn size_hint(&self) -> SizeHint {
        match &self.rest {
            BodyDecoder::Length(left) => SizeHint::with_exact(left + self.first.len() as u64),
            _ => SizeHint::default(),
        }
    }
}

impl Drop for Http1Response {
    fn drop(&mut self) {
        let pool = self.pool.take().filter(|_| self.stays_open);
        if self.rest.is_over()
            && let Some((conn, upload)) = self.conn.take().zip(self.upload.take())
        {
            let held = upload.body.hold_client();
            abandoned::spawn(async move {
                upload.finish(conn, pool).await;
                drop(held);
            });
        }
    }
}

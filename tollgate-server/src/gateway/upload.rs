//! Request bodies on their way to upstreams, unless both sides speak HTTP/1. At most one piece is held here, so that a
//! client is read only as fast as its upstream reads.
//!
//! The body of an HTTP/1 request passes from its connection to the task that sends it through a channel, piece by piece.
//! The connection adds a piece only once the task waits for one, so at most one read is buffered.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use bytes::Bytes;
use http::HeaderMap;
use hyper::body::{Body, Frame, SizeHint};
use tollgate_config::internal::UnderscoreHeaders;
use tollgate_net::deadline::{EventTimeout, Wait};

use super::buffer_budget::Overloaded;
use super::client::{BufferedBytes, Client};
use super::deadline::UpstreamDeadline;
use super::failure::{Failure, Fault};
use super::head::headers::{Edits, screen_request_trailers};
use super::http2::stream::StreamBody;

/// A request body as the client's connection passes it on.
pub(in crate::gateway) enum ClientBody {
    /// A stream of HTTP/2.
    Http2(StreamBody),
    /// The body of an HTTP/1 request.
    Http1(BodyReader),
}

impl ClientBody {
    /// Takes the data that has arrived, while nothing reads it: otherwise short frames would take much more memory than the
    /// window allows.
    fn poll_ahead(&mut self, context: &mut Context<'_>) {
        if let Self::Http2(body) = self {
            body.poll_ahead(context);
        }
    }

    /// Waits for a future before anything reads the body.
    pub(in crate::gateway) async fn wait_for<T>(&mut self, something: impl Future<Output = T>) -> T {
        let mut something = pin!(something);
        poll_fn(|context| {
            let came = something.as_mut().poll(context);
            if came.is_pending() {
                self.poll_ahead(context);
            }
            came
        })
        .await
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        match &mut *self {
            // A client that resets the stream does not send the rest, whatever the reason.
            Self::Http2(body) => body.poll_frame(context).map_err(|_error| Failure::BodyBroken),
            Self::Http1(body) => body.poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http2(body) => body.is_empty(),
            Self::Http1(body) => body.is_empty(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        let left = match self {
            Self::Http2(body) => body.bytes_left(),
            Self::Http1(body) => body.bytes_left(),
        };
        left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// A request body for an upstream.
pub(in crate::gateway) enum ToUpstream {
    Empty,
    /// Boxed, because most requests have no body.
    Upload(Box<ClientUpload>),
}

/// A body that is received from a client.
pub(in crate::gateway) struct ClientUpload {
    body: ClientBody,
    client: Arc<Client>,
    /// The number of bytes that may still follow.
    room: u64,
    underscores: UnderscoreHeaders,
    /// The changes of the route, if it removes or sets headers: no trailer may pretend to be one of them.
    edits: Option<Arc<Edits>>,
    /// Bytes that are buffered while the upstream does not read.
    buffered: BufferedBytes,
    /// The maximum of `buffered`.
    max_buffered: usize,
    upstream: Option<Reader>,
    /// The timeout of an HTTP/2 client, whose connection several streams share.
    timeout: EventTimeout,
}

/// An upload that goes on after its response, until this is dropped.
pub(in crate::gateway) struct OpenUpload(Arc<Client>);

impl Drop for OpenUpload {
    fn drop(&mut self) {
        self.0.request_ended();
    }
}

/// The upstream that reads a body. Its deadline is suspended while the client does not send.
struct Reader {
    deadline: Arc<UpstreamDeadline>,
    timeout: Wait,
}

/// The reason why a request got no response.
pub(in crate::gateway) struct SendError {
    pub(in crate::gateway) fault: Fault,
    /// The body, if the request may be sent again.
    pub(in crate::gateway) retry: Option<ToUpstream>,
}

impl SendError {
    pub(in crate::gateway) fn failed(failure: Failure) -> Self {
        Self { fault: failure.into(), retry: None }
    }
}

impl ToUpstream {
    /// Takes over the bytes that were counted as buffered before.
    pub(in crate::gateway) fn new(
        body: ClientBody,
        client: &Arc<Client>,
        max_bytes: u64,
        mut buffered: Option<BufferedBytes>,
    ) -> Self {
        if body.is_end_stream() {
            return Self::Empty;
        }
        if let ClientBody::Http1(reader) = &body {
            lock(&reader.shared).charge = buffered.take();
        }
        Self::Upload(Box::new(ClientUpload {
            max_buffered: client.upload_bytes(&body),
            body,
            client: Arc::clone(client),
            room: max_bytes,
            underscores: UnderscoreHeaders::default(),
            edits: None,
            buffered: buffered.unwrap_or_else(|| BufferedBytes::none(client)),
            upstream: None,
            timeout: EventTimeout::default(),
        }))
    }

    /// Sets how trailers with an underscore, a dot or the like in their name are treated, and the changes of the route.
    pub(in crate::gateway) fn screening_trailers(mut self, underscores: UnderscoreHeaders, edits: &Arc<Edits>) -> Self {
        if let Self::Upload(upload) = &mut self {
            upload.underscores = underscores;
            upload.edits = edits.removes_some().then(|| Arc::clone(edits));
        }
        self
    }

    /// Starts the deadline of the upstream that reads this body. Time in which the client does not send does not count.
    pub(in crate::gateway) fn read_by(&mut self, deadline: &Arc<UpstreamDeadline>, timeout: Wait) {
        deadline.set(timeout);
        if let Self::Upload(upload) = self {
            upload.upstream = Some(Reader { deadline: Arc::clone(deadline), timeout });
        }
    }

    pub(in crate::gateway) fn is_empty(&self) -> bool {
        matches!(self, Self::Empty)
    }

    /// Called while the upstream does not read: see [`ClientBody::poll_ahead`].
    pub(in crate::gateway) fn poll_ahead(&mut self, context: &mut Context<'_>) {
        if let Self::Upload(upload) = self {
            upload.body.poll_ahead(context);
        }
    }

    /// Waits for a future before anything reads the body.
    pub(in crate::gateway) async fn wait_for<T>(&mut self, something: impl Future<Output = T>) -> T {
        match self {
            Self::Empty => something.await,
            Self::Upload(upload) => upload.body.wait_for(something).await,
        }
    }

    /// Counts the rest of the body as a request of its client, so that the connection does not count as idle after the
    /// response. A connection of HTTP/1 knows that it has a body.
    pub(in crate::gateway) fn hold_client(&self) -> Option<OpenUpload> {
        match self {
            Self::Upload(upload) if upload.client.is_http2() => {
                upload.client.request_began();
                Some(OpenUpload(Arc::clone(&upload.client)))
            }
            _ => None,
        }
    }
}

impl Body for ToUpstream {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        let Self::Upload(upload) = &mut *self else {
            return Poll::Ready(None);
        };
        match Pin::new(&mut upload.body).poll_frame(context) {
            Poll::Pending => {
                // Everything that was received has been read.
                upload.release();
                if let Some(reader) = &upload.upstream {
                    reader.deadline.clear();
                }
                let Some(wait) = upload.client.body_timeout() else { return Poll::Pending };
                ready!(upload.timeout.poll_late(wait, &upload.client.ticks, context));
                upload.fail(Failure::BodyLate)
            }
            Poll::Ready(frame) => {
                upload.timeout.stop();
                if let Some(reader) = &upload.upstream {
                    reader.deadline.set(reader.timeout);
                }
                let Some(frame) = frame else { return Poll::Ready(None) };
                let frame = match frame {
                    Ok(frame) => frame,
                    Err(error) => return upload.fail(error),
                };
                let length = frame.data_ref().map_or(0, Bytes::len) as u64;
                match upload.room.checked_sub(length) {
                    Some(room) => upload.room = room,
                    None => return upload.fail(Failure::BodyTooLong),
                }
                // While the upstream reads this, more may be received.
                if upload.hold().is_err() {
                    return upload.fail(Failure::Overloaded);
                }
                Poll::Ready(Some(Ok(match frame.into_trailers() {
                    Ok(trailers) => {
                        let mut trailers = screen_request_trailers(trailers, upload.underscores);
                        if let Some(edits) = &upload.edits {
                            edits.screen(&mut trailers);
                        }
                        Frame::trailers(trailers)
                    }
                    Err(data) => data,
                })))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty => true,
            Self::Upload(upload) => upload.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty => SizeHint::with_exact(0),
            Self::Upload(upload) => upload.body.size_hint(),
        }
    }
}

impl ClientUpload {
    /// Counts the bytes that may be buffered. A task that waits for its upstream does not notice that the connection of
    /// an HTTP/1 client has given the body up, so that connection holds the count.
    fn hold(&mut self) -> Result<(), Overloaded> {
        match &self.body {
            ClientBody::Http1(reader) => {
                lock(&reader.shared).charge.as_mut().map_or(Ok(()), |charge| charge.set(self.max_buffered))
            }
            ClientBody::Http2(_) => self.buffered.set(self.max_buffered),
        }
    }

    fn release(&mut self) {
        match &self.body {
            ClientBody::Http1(reader) => {
                if let Some(charge) = &mut lock(&reader.shared).charge {
                    charge.release();
                }
            }
            ClientBody::Http2(_) => self.buffered.release(),
        }
    }

    fn fail(&mut self, failure: Failure) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        if let Some(reader) = &self.upstream {
            reader.deadline.set(reader.timeout);
            reader.deadline.note_body_failure(failure);
        }
        Poll::Ready(Some(Err(failure)))
    }
}

/// Creates a channel for a body. Its length is known if the client announces it.
pub(in crate::gateway) fn channel(length: Option<u64>) -> (BodyWriter, BodyReader) {
    let shared = Arc::new(Mutex::new(Shared::default()));
    (BodyWriter(Arc::clone(&shared)), BodyReader { shared, bytes_left: length })
}

/// The side of the client's connection. Dropping it before the end breaks the body off.
pub(in crate::gateway) struct BodyWriter(Arc<Mutex<Shared>>);

/// The side of the task that sends the body.
pub(in crate::gateway) struct BodyReader {
    shared: Arc<Mutex<Shared>>,
    bytes_left: Option<u64>,
}

#[derive(Default)]
struct Shared {
    pieces: VecDeque<Frame<Bytes>>,
    end: Option<Result<(), Failure>>,
    /// The bytes of a request body that are buffered, until its writer is dropped.
    charge: Option<BufferedBytes>,
    /// Whether the reader waits for a piece.
    is_awaited: bool,
    is_unwanted: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// Whether the body is still wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gateway) enum Demand {
    Wanted,
    Unwanted,
}

impl BodyWriter {
    /// Returns ready once the reader waits for a piece, or does not want any.
    pub(in crate::gateway) fn poll_demand(&self, context: &mut Context<'_>) -> Poll<Demand> {
        let mut shared = lock(&self.0);
        if shared.is_unwanted {
            return Poll::Ready(Demand::Unwanted);
        }
        if shared.is_awaited {
            return Poll::Ready(Demand::Wanted);
        }
        shared.writer = Some(context.waker().clone());
        Poll::Pending
    }

    pub(in crate::gateway) fn send(&self, data: Bytes) {
        if !data.is_empty() {
            lock(&self.0).add(Frame::data(data));
        }
    }

    /// Ends the body.
    pub(in crate::gateway) fn end(&self, trailers: HeaderMap) {
        let mut shared = lock(&self.0);
        if !trailers.is_empty() {
            shared.add(Frame::trailers(trailers));
        }
        shared.finish(Ok(()));
    }

    /// Breaks the body off.
    pub(in crate::gateway) fn fail(&self, failure: Failure) {
        lock(&self.0).finish(Err(failure));
    }
}

impl BodyReader {
    /// Returns whether nothing is left to read.
    pub(in crate::gateway) fn is_empty(&self) -> bool {
        let shared = lock(&self.shared);
        shared.pieces.is_empty() && shared.end == Some(Ok(()))
    }

    /// Returns the number of bytes left, if it is known.
    pub(in crate::gateway) fn bytes_left(&self) -> Option<u64> {
        self.bytes_left
    }

    pub(in crate::gateway) fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        let mut shared = lock(&self.shared);
        if let Some(piece) = shared.pieces.pop_front() {
            drop(shared);
            let bytes = piece.data_ref().map_or(0, Bytes::len) as u64;
            self.bytes_left = self.bytes_left.map(|left| left.saturating_sub(bytes));
            return Poll::Ready(Some(Ok(piece)));
        }
        match shared.end {
            Some(Ok(())) => Poll::Ready(None),
            Some(Err(failure)) => Poll::Ready(Some(Err(failure))),
            None => {
                shared.is_awaited = true;
                shared.reader = Some(context.waker().clone());
                shared.writer.take().into_iter().for_each(Waker::wake);
                Poll::Pending
            }
        }
    }
}

impl Shared {
    fn add(&mut self, piece: Frame<Bytes>) {
        self.pieces.push_back(piece);
        self.wake_reader();
    }

    fn finish(&mut self, end: Result<(), Failure>) {
        self.end.get_or_insert(end);
        self.wake_reader();
    }

    fn wake_reader(&mut self) {
        self.is_awaited = false;
        self.reader.take().into_iter().for_each(Waker::wake);
    }
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for BodyWriter {
    fn drop(&mut self) {
        self.fail(Failure::BodyBroken);
        lock(&self.0).charge = None;
    }
}

impl Drop for BodyReader {
    fn drop(&mut self) {
        let mut shared = lock(&self.shared);
        shared.is_unwanted = true;
        shared.writer.take().into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_arrive_in_order_and_one_at_a_time() {
        let mut context = Context::from_waker(Waker::noop());
        let (writer, mut reader) = channel(Some(6));
        assert!(writer.poll_demand(&mut context).is_pending());
        assert!(reader.poll_frame(&mut context).is_pending());
        assert_eq!(writer.poll_demand(&mut context), Poll::Ready(Demand::Wanted));
        writer.send(Bytes::from_static(b"hello"));
        assert!(writer.poll_demand(&mut context).is_pending());
        let Poll::Ready(Some(Ok(piece))) = reader.poll_frame(&mut context) else { panic!("a piece was sent") };
        assert_eq!(piece.into_data().ok().as_deref(), Some(&b"hello"[..]));
        assert_eq!(reader.bytes_left(), Some(1));
        writer.send(Bytes::from_static(b"!"));
        writer.end(HeaderMap::new());
        assert!(!reader.is_empty());
        assert!(matches!(reader.poll_frame(&mut context), Poll::Ready(Some(Ok(_)))));
        assert!(reader.is_empty() && matches!(reader.poll_frame(&mut context), Poll::Ready(None)));
    }

    #[test]
    fn body_without_an_end_is_broken() {
        let mut context = Context::from_waker(Waker::noop());
        let (writer, mut reader) = channel(None);
        drop(writer);
        let Poll::Ready(Some(Err(failure))) = reader.poll_frame(&mut context) else { panic!("it has no end") };
        assert_eq!(failure, Failure::BodyBroken);
        let (writer, reader) = channel(None);
        drop(reader);
        assert_eq!(writer.poll_demand(&mut context), Poll::Ready(Demand::Unwanted));
    }
}

//! Response bodies. Nothing is buffered here, so that the upstream is read only as fast as the client is written.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use tokio::time::{Sleep, sleep};

use super::set_read_deadline;
use crate::gateway::buffer_budget::{Overloaded, STEP_BYTES};
use crate::gateway::client::{BufferedBytes, SEND_BUFFER_BYTES};
use crate::gateway::deadline::NEVER;
use crate::gateway::failure::Failure;
use crate::gateway::head::headers::Edits;
use crate::gateway::http1::body::screen_response_trailers;
use crate::gateway::http1::sender::Http1Body;
use crate::gateway::proxy::{ProxyRequest, UpstreamProgress};

/// The size of the pieces of an HTTP/2 response. The write timeout applies to each piece, so that a slow client still
/// gets everything: half a kilobyte per second is enough. It is the default frame size.
const PIECE_BYTES: usize = 16 << 10;

/// A response body for a client.
pub(in crate::gateway) struct ToClient {
    source: Source,
    /// Bytes that were received but not yet passed to hyper.
    rest: Bytes,
    /// Bytes that are buffered while the client does not read.
    buffered: Option<BufferedBytes>,
    /// The timeout of the upstream.
    stall: Option<Pin<Box<Sleep>>>,
    /// The changes of the route, if it removes or sets headers: they concern trailers, too.
    edits: Option<Arc<Edits>>,
    /// Ends with the response.
    request: ProxyRequest,
}

enum Source {
    Local,
    Upstream(UpstreamBody),
}

/// The body of an upstream's response.
pub(in crate::gateway) enum UpstreamBody {
    Http1(Http1Body),
    Http2(Incoming),
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        match &mut *self {
            Self::Http1(body) => Pin::new(body).poll_frame(context),
            Self::Http2(body) => {
                let frame = Pin::new(body).poll_frame(context);
                frame.map(|frame| frame.map(|frame| frame.map_err(|_error| Failure::Disconnected)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http1(body) => body.is_end_stream(),
            Self::Http2(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Http1(body) => body.size_hint(),
            Self::Http2(body) => body.size_hint(),
        }
    }
}

impl ToClient {
    pub(in crate::gateway) fn local(text: Bytes, request: ProxyRequest) -> Self {
        Self { source: Source::Local, rest: text, buffered: None, stall: None, edits: None, request }
    }

    /// Returns the body of an upstream's response, without the trailers that the route removes.
    pub(in crate::gateway) fn upstream(body: UpstreamBody, edits: &Arc<Edits>, request: ProxyRequest) -> Self {
        let edits = edits.removes_some().then(|| Arc::clone(edits));
        Self { source: Source::Upstream(body), rest: Bytes::new(), buffered: None, stall: None, edits, request }
    }

    /// Removes a body that the gateway wrote, for a response that must not have one. Returns its length, unless it was
    /// empty.
    pub(in crate::gateway) fn take_written(&mut self) -> Option<usize> {
        let is_written = matches!(self.source, Source::Local) && !self.rest.is_empty();
        is_written.then(|| std::mem::take(&mut self.rest).len())
    }

    /// Returns whether the gateway wrote it.
    pub(in crate::gateway) fn is_local(&self) -> bool {
        matches!(self.source, Source::Local)
    }

    /// Returns the ID of the request.
    pub(in crate::gateway) fn request_id(&self) -> Option<&HeaderValue> {
        self.request.id.as_ref()
    }

    /// Records that the gateway cuts off the response.
    pub(in crate::gateway) fn note_cut(&mut self) {
        self.request.is_broken = true;
    }

    /// Records the status, when the response head is about to be sent.
    pub(in crate::gateway) fn answers_with(&mut self, status: StatusCode) {
        self.request.status = Some(status);
    }
}

impl ToClient {
    /// Splits off the next piece, and starts the client's deadline for reading it.
    fn next_piece(&mut self) -> Result<Frame<Bytes>, Failure> {
        let client = &self.request.client;
        let mut bytes = self.rest.len();
        if client.is_http2() {
            bytes = bytes.min(PIECE_BYTES);
            set_read_deadline(client.ticks.after(client.timeouts.write));
        }
        self.request.sent_bytes += bytes as u64;
        let piece = self.rest.split_to(bytes);
        self.hold().map(|()| Frame::data(piece))
    }

    /// Counts the buffered bytes of the response: those not yet passed on, and those not yet written to the client.
    fn hold(&mut self) -> Result<(), Failure> {
        let unwritten = match usize::try_from(self.request.sent_bytes) {
            // The server of HTTP/1 counts what it has not written.
            _ if !self.request.client.is_http2() => 0,
            Ok(sent) => sent.min(SEND_BUFFER_BYTES),
            Err(_) => SEND_BUFFER_BYTES,
        };
        let bytes = self.rest.len() + unwritten;
        if matches!(self.source, Source::Local) || self.buffered.is_none() && bytes < STEP_BYTES {
            return Ok(());
        }
        let buffered = self.buffered.get_or_insert_with(|| BufferedBytes::none(&self.request.client));
        buffered.set(bytes).map_err(|Overloaded| {
            self.request.is_broken = true;
            Failure::Overloaded
        })
    }
}

impl Body for ToClient {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        let this = &mut *self;
        if !this.rest.is_empty() {
            return Poll::Ready(Some(this.next_piece()));
        }
        match &mut this.source {
            Source::Local => Poll::Ready(None),
            Source::Upstream(body) => match Pin::new(body).poll_frame(context) {
                Poll::Pending => {
                    // The client waits for the upstream.
                    set_read_deadline(NEVER);
                    let Some(attempt) = &this.request.upstream else { return Poll::Pending };
                    let stall = this.stall.get_or_insert_with(|| Box::pin(sleep(attempt.timeout.duration())));
                    ready!(stall.as_mut().poll(context));
                    this.request.note_upstream_progress(UpstreamProgress::TimedOut);
                    Poll::Ready(Some(Err(Failure::UpstreamTimeout)))
                }
                Poll::Ready(frame) => {
                    this.stall = None;
                    this.request.note_upstream_progress(match &frame {
                        None => UpstreamProgress::All,
                        Some(Ok(_)) => UpstreamProgress::Bytes,
                        Some(Err(_)) => UpstreamProgress::Error,
                    });
                    Poll::Ready(frame.map(|frame| match frame?.into_data() {
                        Ok(data) => {
                            this.rest = data;
                            this.next_piece()
                        }
                        Err(frame) => {
                            let mut trailers = frame.into_trailers().unwrap_or_default();
                            screen_response_trailers(&mut trailers);
                            if let Some(edits) = &this.edits {
                                edits.screen(&mut trailers);
                            }
                            Ok(Frame::trailers(trailers))
                        }
                    }))
                }
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
            && match &self.source {
                Source::Local => true,
                Source::Upstream(body) => body.is_end_stream(),
            }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            Source::Local => SizeHint::with_exact(self.rest.len() as u64),
            // hyper asks for this before it reads the body.
            Source::Upstream(body) => body.size_hint(),
        }
    }
}

impl Drop for ToClient {
    fn drop(&mut self) {
        if self.rest.is_empty() && self.request.is_upstream_done {
            self.request.is_complete = true;
        } else if self.is_end_stream() {
            self.request.is_complete = true;
            self.request.note_upstream_progress(UpstreamProgress::All);
        } else if let Source::Upstream(body) = std::mem::replace(&mut self.source, Source::Local)
            && let Some(abandoned) = self.request.abandon()
        {
            abandoned.discard(body);
        }
    }
}

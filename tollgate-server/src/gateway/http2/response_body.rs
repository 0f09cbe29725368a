//! Bodies of responses that are not forwarded from HTTP/1 to HTTP/1. At most one piece is held here, so that an upstream
//! is read only as fast as its client reads.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{HeaderValue, StatusCode};
use hyper::body::{Body, Frame, SizeHint};
use tollgate_net::deadline::EventTimeout;

use super::sender::Http2Response;
use crate::gateway::buffer_budget::{Overloaded, STEP_BYTES};
use crate::gateway::client::{BufferedBytes, SEND_BUFFER_BYTES};
use crate::gateway::failure::Failure;
use crate::gateway::head::headers::{Edits, screen_response_trailers};
use crate::gateway::http1::sender::Http1Response;
use crate::gateway::proxy::{ProxyRequest, UpstreamProgress};

/// The size of the pieces of an HTTP/2 response. The write timeout applies to each piece, so that a slow client still
/// gets everything: half a kilobyte per second is enough. It is the default frame size.
const PIECE_BYTES: usize = 16 << 10;

/// The maximum length of a response of the gateway that is sent whole, without a task: most are shorter.
const MAX_SHORT_BYTES: usize = 2048;

/// A response body for a client.
pub(in crate::gateway) struct ToClient {
    source: Source,
    /// Bytes that were received but not yet passed on.
    rest: Bytes,
    /// Bytes that are buffered while the client does not read. The pieces of an HTTP/2 client share it.
    buffered: Option<Arc<BufferedBytes>>,
    /// The timeout of the upstream.
    timeout: EventTimeout,
    /// The changes of the route, if it removes or sets headers: they concern trailers, too.
    edits: Option<Arc<Edits>>,
    /// Ends with the response.
    request: ProxyRequest,
}

/// A piece that counts as buffered until it is written: h2 may hold it for longer than the response lasts here.
struct CountedPiece {
    piece: Bytes,
    _buffered: Arc<BufferedBytes>,
}

impl AsRef<[u8]> for CountedPiece {
    fn as_ref(&self) -> &[u8] {
        &self.piece
    }
}

enum Source {
    Local,
    Upstream(UpstreamBody),
}

/// The body of an upstream's response, and the rest of the request.
pub(in crate::gateway) enum UpstreamBody {
    Http1(Box<Http1Response>),
    Http2(Box<Http2Response>),
}

impl UpstreamBody {
    fn poll_blocked(&mut self, context: &mut Context<'_>) {
        match self {
            Self::Http1(response) => response.poll_upload(context),
            Self::Http2(response) => response.poll_blocked(context),
        }
    }

    /// Returns whether the request body is still being sent.
    fn has_upload(&self) -> bool {
        match self {
            Self::Http1(response) => response.has_upload(),
            Self::Http2(response) => response.has_upload(),
        }
    }

    /// Returns whether the whole response has arrived. Its stream may end later.
    fn is_complete(&self) -> bool {
        match self {
            Self::Http1(response) => response.is_end_stream(),
            Self::Http2(response) => response.is_complete(),
        }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        match &mut *self {
            Self::Http1(response) => Pin::new(response).poll_frame(context),
            Self::Http2(response) => Pin::new(response).poll_frame(context),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Http1(response) => response.is_end_stream(),
            Self::Http2(response) => response.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Http1(response) => response.size_hint(),
            Self::Http2(response) => response.size_hint(),
        }
    }
}

impl ToClient {
    pub(in crate::gateway) fn local(text: Bytes, request: ProxyRequest) -> Self {
        Self {
            source: Source::Local,
            rest: text,
            buffered: None,
            timeout: EventTimeout::default(),
            edits: None,
            request,
        }
    }

    /// Returns the body of an upstream's response, without the trailers that the route removes.
    pub(in crate::gateway) fn upstream(body: UpstreamBody, edits: &Arc<Edits>, request: ProxyRequest) -> Self {
        let edits = edits.removes_some().then(|| Arc::clone(edits));
        Self {
            source: Source::Upstream(body),
            rest: Bytes::new(),
            buffered: None,
            timeout: EventTimeout::default(),
            edits,
            request,
        }
    }

    /// Removes a body that the gateway wrote, for a response that must not have one. Returns its length, unless it was
    /// empty.
    pub(in crate::gateway) fn take_written(&mut self) -> Option<usize> {
        let is_written = matches!(self.source, Source::Local) && !self.rest.is_empty();
        is_written.then(|| std::mem::take(&mut self.rest).len())
    }

    /// Returns the length of a body that the gateway wrote, if it is short.
    pub(in crate::gateway) fn short_bytes(&self) -> Option<usize> {
        Some(self.rest.len()).filter(|length| self.is_local() && *length <= MAX_SHORT_BYTES)
    }

    /// Takes a whole body that the gateway wrote.
    pub(in crate::gateway) fn take_all(&mut self) -> Bytes {
        self.request.sent_bytes += self.rest.len() as u64;
        std::mem::take(&mut self.rest)
    }

    /// Returns how many bytes of it were passed on.
    pub(in crate::gateway) fn sent_bytes(&self) -> u64 {
        self.request.sent_bytes
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

    /// Called while the client does not read. It may send its body before it reads the response, so the upstream is sent
    /// more of it.
    pub(in crate::gateway) fn poll_blocked(&mut self, context: &mut Context<'_>) {
        if let Source::Upstream(body) = &mut self.source {
            body.poll_blocked(context);
        }
    }

    /// Returns whether the client was passed the whole response.
    fn is_whole(&self) -> bool {
        self.rest.is_empty()
            && match &self.source {
                Source::Local => true,
                Source::Upstream(body) => body.is_complete(),
            }
    }

    /// Splits off the next piece.
    fn next_piece(&mut self) -> Result<Frame<Bytes>, Failure> {
        let client = &self.request.client;
        let mut bytes = self.rest.len();
        if client.is_http2() {
            bytes = bytes.min(PIECE_BYTES);
        }
        self.request.sent_bytes += bytes as u64;
        let piece = self.rest.split_to(bytes);
        self.hold()?;
        Ok(Frame::data(match &self.buffered {
            Some(buffered) if self.request.client.is_http2() => {
                Bytes::from_owner(CountedPiece { piece, _buffered: Arc::clone(buffered) })
            }
            _ => piece,
        }))
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
        let buffered = self.buffered.get_or_insert_with(|| Arc::new(BufferedBytes::none(&self.request.client)));
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
            this.poll_blocked(context);
            return Poll::Ready(Some(this.next_piece()));
        }
        match &mut this.source {
            Source::Local => Poll::Ready(None),
            Source::Upstream(body) => match Pin::new(&mut *body).poll_frame(context) {
                Poll::Pending => {
                    let Some(attempt) = &this.request.upstream else { return Poll::Pending };
                    loop {
                        ready!(this.timeout.poll_late(attempt.timeout, &this.request.client.ticks, context));
                        if !body.has_upload() || attempt.is_late() {
                            break;
                        }
                        // It is busy with the request, or waits for the client.
                        this.timeout.stop();
                    }
                    this.request.note_upstream_progress(UpstreamProgress::TimedOut);
                    Poll::Ready(Some(Err(Failure::UpstreamTimeout)))
                }
                Poll::Ready(frame) => {
                    this.timeout.stop();
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
            Source::Upstream(body) => body.size_hint(),
        }
    }
}

impl Drop for ToClient {
    fn drop(&mut self) {
        if self.rest.is_empty() && self.request.is_upstream_done {
            self.request.is_complete = true;
        } else if self.is_whole() {
            self.request.is_complete = true;
            self.request.note_upstream_progress(UpstreamProgress::All);
        } else if let Source::Upstream(body) = std::mem::replace(&mut self.source, Source::Local)
            && let Some(abandoned) = self.request.abandon()
        {
            abandoned.discard(body);
        }
    }
}

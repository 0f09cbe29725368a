//! Requests to HTTP/2 upstreams, and their responses.
//!
//! A request body is sent by the same task that waits for the response and passes it on. An upstream may respond before
//! it has read the request. Then a separate task sends the rest after the response, until the deadline of the request:
//! the stream is reset, and the others on the connection go on.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use h2::Reason;
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use hyper::body::{Body, Frame, SizeHint};
use tollgate_net::deadline::Wait;

use super::stream::{BodySender, StreamBody};
use crate::gateway::deadline::UpstreamDeadline;
use crate::gateway::failure::{ConnectError, Failure, Fault};
use crate::gateway::head::headers;
use crate::gateway::head::upstream_head::remove_hop_by_hop;
use crate::gateway::site::Route;
use crate::gateway::upload::{OpenUpload, SendError, ToUpstream};
use crate::gateway::upstream::abandoned;
use crate::gateway::upstream::conn::{DeliveryBegun, Repeatable};
use crate::gateway::upstream::http2_pool::{Sender, StreamPermit};
use crate::gateway::upstream::tls::TlsFault;

/// How long an upstream may take to end the stream of a complete response. A reset could stop a handler that still works.
const END_WITHIN: Duration = Duration::from_secs(10);

/// Sends a request, and receives the head of its response. The caller bounds the wait.
pub(super) async fn send(
    (mut sender, stream_permit): (Sender, StreamPermit),
    (head, body, _recorded): (Request<()>, ToUpstream, DeliveryBegun),
    deadline: Arc<UpstreamDeadline>,
    (repeatable, fallback): (Repeatable, Fallback),
) -> Result<Response<Http2Response>, SendError> {
    let (is_over, is_head) = (body.is_end_stream(), head.method() == Method::HEAD);
    let (mut response, stream) = match sender.send_request(head, is_over) {
        Ok(sent) => sent,
        Err(error) => return Err(SendError { fault: hung_up(&error), retry: Some(body) }),
    };
    let mut upload = (!is_over).then(|| Upload { sender: BodySender::new(stream), body });
    // While a full connection queues the request, the body is not read, so that the request can be sent elsewhere.
    let mut is_queued = true;
    let received = poll_fn(|context| {
        loop {
            if let Poll::Ready(received) = Pin::new(&mut response).poll(context) {
                return Poll::Ready(received);
            }
            is_queued = is_queued && sender.poll_ready(context).is_pending();
            let Some(Upload { body, .. }) = &mut upload else { return Poll::Pending };
            if is_queued {
                body.poll_ahead(context);
                return Poll::Pending;
            }
            ready!(poll_upload(&mut upload, context));
        }
    });
    match received.await {
        Ok(response) => {
            stream_permit.note_answered();
            let (mut parts, stream) = response.into_parts();
            remove_hop_by_hop(&mut parts.headers);
            if parts.status == StatusCode::NO_CONTENT {
                // It must have none (RFC 9110, section 8.6).
                parts.headers.remove(CONTENT_LENGTH);
            } else if let Some(length) = several_lengths(&parts.headers) {
                parts.headers.insert(CONTENT_LENGTH, length);
            }
            let body = Http2Response {
                body: Some(StreamBody::new(stream, &parts.headers)),
                has_body: !is_head && !headers::lacks_body(parts.status),
                upload,
                stream_permit: Some(stream_permit),
                deadline,
            };
            Ok(Response::from_parts(parts, body))
        }
        Err(error) if is_queued && error.is_go_away() && error.is_remote() => {
            let body = upload.map_or(ToUpstream::Empty, |upload| upload.body);
            Err(SendError { fault: Failure::NotProcessed.into(), retry: Some(body) })
        }
        Err(error) => Err(failed(&error, (is_over, repeatable), fallback)),
    }
}

/// Returns the length, if there are several `Content-Length` headers. h2 accepts only equal ones.
fn several_lengths(headers: &HeaderMap) -> Option<HeaderValue> {
    headers.get_all(CONTENT_LENGTH).iter().nth(1).cloned()
}

/// The rest of a request body.
struct Upload {
    sender: BodySender,
    body: ToUpstream,
}

/// Sends the request body as far as both sides allow. Removes it and returns ready once nothing is left to send.
fn poll_upload(upload: &mut Option<Upload>, context: &mut Context<'_>) -> Poll<()> {
    if let Some(Upload { sender, body, .. }) = upload {
        let sent = sender.poll_send(body, context);
        if sent.is_pending() && sender.awaits_peer() {
            body.poll_ahead(context);
        }
        // The body records why it broke off, and an upstream that does not want it may explain that in its response.
        _ = ready!(sent);
        *upload = None;
    }
    Poll::Ready(())
}

/// A response that is being received, and the rest of its request.
pub(in crate::gateway) struct Http2Response {
    /// Taken when this is dropped.
    body: Option<StreamBody>,
    /// Whether the response may have a body. h2 takes the length that a `304 Not Modified` announces for the length of
    /// its body.
    has_body: bool,
    upload: Option<Upload>,
    /// Taken if the stream outlives the response.
    stream_permit: Option<StreamPermit>,
    /// Bounds what is left of the stream after the end of the response.
    deadline: Arc<UpstreamDeadline>,
}

impl Http2Response {
    /// Returns whether the whole response has arrived, except for an end without bytes.
    pub(super) fn is_complete(&self) -> bool {
        self.is_end_stream() || self.bytes_left() == Some(0)
    }

    /// Returns whether the request body is still being sent.
    pub(super) fn has_upload(&self) -> bool {
        self.upload.is_some()
    }

    fn bytes_left(&self) -> Option<u64> {
        self.body.as_ref().and_then(StreamBody::bytes_left)
    }

    /// Sends more of the request body, and takes what has arrived of the response, while the client does not read.
    pub(super) fn poll_blocked(&mut self, context: &mut Context<'_>) {
        _ = poll_upload(&mut self.upload, context);
        self.body.iter_mut().for_each(|body| body.poll_ahead(context));
    }
}

/// Sends the rest of a request after its response, and waits for the end of its stream. The stream is reset if the upstream
/// does not read in time, or does not end it.
async fn finish(
    mut upload: Option<Upload>,
    mut body: StreamBody,
    deadline: Arc<UpstreamDeadline>,
    held: (Option<OpenUpload>, Option<StreamPermit>),
) {
    if upload.is_some() {
        let sent = poll_fn(|context| poll_upload(&mut upload, context));
        if deadline.limit(Box::pin(sent)).await.is_none() {
            return;
        }
    }
    deadline.set(Wait::at_least(END_WITHIN));
    let ended = poll_fn(|context| {
        while let Some(Ok(_)) = ready!(body.poll_frame(context)) {}
        Poll::Ready(())
    });
    _ = deadline.limit(Box::pin(ended)).await;
    drop((upload, held));
}

impl Body for Http2Response {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        _ = poll_upload(&mut self.upload, context);
        let has_body = self.has_body;
        let Some(body) = self.body.as_mut().filter(|_| has_body) else { return Poll::Ready(None) };
        let frame = ready!(body.poll_frame(context));
        self.stream_permit.iter().for_each(StreamPermit::note_received);
        Poll::Ready(match frame {
            // What follows a complete response concerns the rest of the request.
            Some(Err(_)) if self.bytes_left() == Some(0) => None,
            // A reset breaks the response off, whatever its reason is.
            Some(Err(_)) => Some(Err(Failure::Disconnected)),
            Some(Ok(frame)) => Some(Ok(frame)),
            None => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        !self.has_body || self.body.as_ref().is_none_or(StreamBody::is_empty)
    }

    fn size_hint(&self) -> SizeHint {
        self.bytes_left().map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

impl Drop for Http2Response {
    fn drop(&mut self) {
        let (is_complete, upload) = (self.is_complete(), self.upload.take());
        // A response that was given up resets its stream.
        if let Some(body) = self.body.take()
            && is_complete
            && (upload.is_some() || !body.is_empty())
        {
            let client = upload.as_ref().and_then(|upload| upload.body.hold_client());
            let held = (client, self.stream_permit.take());
            abandoned::spawn(finish(upload, body, Arc::clone(&self.deadline), held));
        }
    }
}

/// Returns the error of a request that was sent and got no valid response. A request without a body is retried if the
/// upstream has not processed it. A repeatable request is also retried at another upstream, or if a connection that was
/// used before was lost. An invalid response is not requested again.
fn failed(error: &h2::Error, (is_empty, repeatable): (bool, Repeatable), fallback: Fallback) -> SendError {
    let is_retried = match fallback {
        _ if is_unprocessed(error) => is_empty,
        _ if repeatable == Repeatable::No => false,
        Fallback::OtherUpstream => true,
        _ if error.is_reset() || error.is_go_away() && error.is_remote() => false,
        fallback => fallback == Fallback::NewConnection,
    };
    let again = is_retried.then_some(ToUpstream::Empty);
    let (fault, retry) = match RejectedHead::of(error) {
        Some(RejectedHead::OfThisRequest) => (Failure::ResponseHeadRefused.into(), None),
        Some(RejectedHead::OfAnotherRequest) => (Failure::ResponseHeadTooLong.into(), again),
        // Upstreams close connections regularly, with many requests in flight.
        None if error.is_go_away() && is_unprocessed(error) => (Failure::NotProcessed.into(), again),
        None => (hung_up(error), again),
    };
    SendError { fault, retry }
}

/// Returns whether the upstream says that it has not processed a request that ends with this error.
fn is_unprocessed(error: &h2::Error) -> bool {
    match error.reason() {
        _ if !error.is_remote() => false,
        Some(Reason::REFUSED_STREAM) => error.is_reset(),
        Some(Reason::NO_ERROR) => error.is_go_away(),
        _ => false,
    }
}

/// Returns the error of a connection that ended, or of a stream that the upstream reset.
fn hung_up(error: &h2::Error) -> Fault {
    match TlsFault::of_connection(error) {
        Some(fault) => ConnectError::Tls(fault).into(),
        None => Failure::Disconnected.into(),
    }
}

/// The next attempt for a lost request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fallback {
    OtherUpstream,
    /// The only upstream, on a new connection.
    NewConnection,
    /// Nothing: the connection to the only upstream was new, and the request may be what broke it.
    Nothing,
}

impl Fallback {
    pub(super) fn of(route: &Route, is_reused: bool) -> Self {
        match is_reused {
            _ if route.has_several() => Self::OtherUpstream,
            true => Self::NewConnection,
            false => Self::Nothing,
        }
    }
}

/// The response whose head our HTTP/2 implementation rejected.
enum RejectedHead {
    /// The response to this request. An oversized head and an invalid one look the same here.
    OfThisRequest,
    /// A response on the same connection, oversized enough to end the connection. It is unknown which
    /// request it belongs to.
    OfAnotherRequest,
}

impl RejectedHead {
    fn of(error: &h2::Error) -> Option<Self> {
        match error.reason()? {
            _ if !error.is_library() => None,
            Reason::PROTOCOL_ERROR if error.is_reset() => Some(Self::OfThisRequest),
            // There are other causes for this reason, and only the message distinguishes them.
            Reason::ENHANCE_YOUR_CALM if error.is_go_away() => {
                let text = error.to_string();
                TOO_LONG.iter().any(|reason| text.contains(reason)).then_some(Self::OfAnotherRequest)
            }
            _ => None,
        }
    }
}

/// The messages of h2 when it ends a connection because of an oversized head.
const TOO_LONG: [&str; 2] = ["header_list_way_too_large", "too_many_continuations"];

//! The requests of HTTP/2 clients, on their way through the pipeline. Requests of HTTP/1 to upstreams with HTTP/2 are
//! forwarded here, too.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Poll, ready};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::header::{CONNECTION, CONTENT_LENGTH, DATE};
use http::request::Parts;
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use hyper::body::Body;
use tokio::time::timeout;
use tollgate_net::deadline::Alarm;
use tollgate_rules::{Check, Outcome};

use super::response_body::ToClient;
use super::stream::{BodySender, StreamBody};
use crate::gateway::client::{BufferedBytes, Client};
use crate::gateway::failure::Failure;
use crate::gateway::head::headers::{HeaderBuffer, X_REQUEST_ID};
use crate::gateway::head::{BodyLength, RequestHead, join_cookies};
use crate::gateway::local_response::{self, MAX_DRAINED_BYTES, MAX_ECHOED_BYTES};
use crate::gateway::proxy::{self, Action, ProxyRequest, Responder};
use crate::gateway::site::{Attempts, Site};
use crate::gateway::upload::{ClientBody, ToUpstream};
use crate::gateway::worker::{Scratch, Worker, scratch};

/// Serves the requests of one connection.
#[derive(Clone)]
pub(in crate::gateway) struct Exchange {
    pub(in crate::gateway) worker: Arc<Worker>,
    pub(in crate::gateway) client: Arc<Client>,
}

impl Exchange {
    /// Serves a request. A response that is available at once, as refusals are, is sent at once. Otherwise a task serves
    /// the request.
    pub(super) fn serve(&self, request: Request<RecvStream>, respond: SendResponse<Bytes>) {
        let is_head = request.method() == Method::HEAD;
        let (parts, stream) = request.into_parts();
        let body = ClientBody::Http2(StreamBody::new(stream, &parts.headers));
        match self.begin(parts, body) {
            Ok(response) => {
                if let Some(response) = send_head(&self.client, response, is_head, respond) {
                    tokio::spawn(response.send());
                }
            }
            Err((allowed, checked)) => {
                let (this, client) = (self.clone(), Arc::clone(&self.client));
                // Boxed, because it is large, and freed once the response begins.
                let answer = Box::pin(async move {
                    match allowed {
                        Checked::Allowed(outcome, action) => this.pass(outcome, action, checked).await,
                        // Boxed: the future is larger with a remote store, and other requests need no room for it.
                        Checked::Pending(check) => Box::pin(this.after_check(check, checked)).await,
                    }
                });
                tokio::spawn(send_answer(client, answer, is_head, respond));
            }
        }
    }
}

/// Waits for the response and sends it, unless the client resets the stream before.
async fn send_answer(
    client: Arc<Client>,
    mut answer: Pin<Box<impl Future<Output = Response<ToClient>>>>,
    is_head: bool,
    mut respond: SendResponse<Bytes>,
) {
    let response = poll_fn(|context| match respond.poll_reset(context) {
        Poll::Ready(_) => Poll::Ready(None),
        Poll::Pending => answer.as_mut().poll(context).map(Some),
    });
    let Some(response) = response.await else { return };
    drop(answer);
    if let Some(response) = send_head(&client, response, is_head, respond) {
        response.send().await;
    }
}

/// Sends the head of a response, and its body if that is short. Returns the rest.
fn send_head(
    client: &Arc<Client>,
    response: Response<ToClient>,
    is_head: bool,
    mut respond: SendResponse<Bytes>,
) -> Option<ResponseSender> {
    let (mut parts, mut body) = response.into_parts();
    body.answers_with(parts.status);
    if let Some(id) = body.request_id() {
        parts.headers.insert(X_REQUEST_ID, id.clone());
    }
    if is_head && let Some(length) = body.take_written() {
        parts.headers.entry(CONTENT_LENGTH).or_insert_with(|| length.into());
    }
    if body.is_local() {
        // HTTP/2 has no such header.
        parts.headers.remove(CONNECTION);
    }
    parts.headers.entry(DATE).or_insert_with(|| scratch().buffers.date.value(client.ticks.now()));
    let is_over = body.is_end_stream();
    if !is_over && let Some(length) = body.size_hint().exact() {
        parts.headers.entry(CONTENT_LENGTH).or_insert_with(|| length.into());
    }
    let Ok(mut stream) = respond.send_response(Response::from_parts(parts, ()), is_over) else {
        // The client has left, or the head is not valid in HTTP/2.
        respond.send_reset(Reason::INTERNAL_ERROR);
        return None;
    };
    if is_over {
        return None;
    }
    if let Some(length) = body.short_bytes() {
        stream.reserve_capacity(length);
        // Otherwise the client has to read first, with a deadline.
        if stream.capacity() >= length {
            _ = stream.send_data(body.take_all(), true);
            return None;
        }
    }
    Some(ResponseSender { sender: BodySender::new(stream), body, client: Arc::clone(client) })
}

/// A response whose head was sent.
struct ResponseSender {
    sender: BodySender,
    body: ToClient,
    client: Arc<Client>,
}

impl ResponseSender {
    /// Sends the body. The client has a deadline to read each piece.
    ///
    /// A client can stall one response while it reads the others, so the socket does not show it. A stream that is late
    /// is reset, and the others go on.
    async fn send(self) {
        let Self { mut sender, mut body, client } = self;
        let (ticks, mut alarm) = (&client.ticks, Alarm::default());
        let mut read_by = ticks.after(client.timeouts.write);
        poll_fn(|context| {
            let before = body.sent_bytes();
            // If it fails, the client has left, or the stream is reset.
            if sender.poll_send(&mut body, context).is_ready() {
                return Poll::Ready(());
            }
            if body.sent_bytes() != before {
                read_by = ticks.after(client.timeouts.write);
            }
            if !sender.awaits_peer() {
                // The client waits for the upstream.
                return Poll::Pending;
            }
            // The client may send its body before it reads the response.
            body.poll_blocked(context);
            ready!(alarm.poll_passed(read_by, ticks, context));
            sender.reset(Reason::CANCEL);
            Poll::Ready(())
        })
        .await;
    }
}

/// A request as the client has sent it.
pub(in crate::gateway) struct ReceivedRequest {
    pub(in crate::gateway) parts: Parts,
    pub(in crate::gateway) body: ClientBody,
    /// The part of the body that may be buffered until an upstream reads it.
    pub(in crate::gateway) buffered: Option<BufferedBytes>,
}

/// Reads the head of a request, and calls `with` with it.
pub(super) fn with_head<T>(
    (parts, length): (&Parts, BodyLength),
    (site, client): (&Site, &Client),
    with: impl FnOnce(&RequestHead<'_>) -> T,
) -> T {
    let filter = site.header_filter(client.address);
    with(&RequestHead::of_parts(parts, length, &mut HeaderBuffer::default(), &filter))
}

/// A request that is not refused at once.
struct CheckedRequest {
    received: ReceivedRequest,
    request: ProxyRequest,
}

/// The check of a request that is not refused at once.
enum Checked {
    Allowed(Outcome, Action),
    /// A remote store decides.
    Pending(Check),
}

impl Exchange {
    /// Returns the response if it is available at once. Otherwise returns the request with its check.
    #[expect(clippy::result_large_err, reason = "not an error, and boxed at once")]
    fn begin(&self, mut parts: Parts, body: ClientBody) -> Result<Response<ToClient>, (Checked, CheckedRequest)> {
        join_cookies(&mut parts.headers);
        let mut scratch = scratch();
        let Scratch { buffers, current, .. } = &mut *scratch;
        let ((site, cached), peer) = (current.load(&self.worker), self.client.peer());
        let mut lines = HeaderBuffer::default();
        let filter = site.header_filter(peer.address);
        let mut head = RequestHead::of_parts(&parts, BodyLength::of(&body), &mut lines, &filter);
        let checked = proxy::check(&mut head, site, peer, cached);
        let route = checked.as_ref().ok().and_then(|(route, _)| *route);
        let mut request = ProxyRequest::begin(&head, (&self.client, &self.worker), (site, route));
        let allowed = match checked {
            Err(rejection) => {
                let response = request.reject(&rejection, &head, &self.worker);
                return Ok(self.respond(body, response, request));
            }
            Ok((_, Check::Ready(mut outcome))) => {
                match request.apply(&mut outcome, &head, (&self.worker, peer), &mut buffers.last_noted) {
                    Some(action) => Checked::Allowed(outcome, action),
                    None => return Ok(self.respond(body, refusal(&outcome, &head), request)),
                }
            }
            Ok((_, check)) => Checked::Pending(check),
        };
        let normalized = head.target.into_normalized();
        drop(lines);
        if let Some(uri) = normalized {
            parts.uri = uri;
        }
        let received = ReceivedRequest { parts, body, buffered: None };
        Err((allowed, CheckedRequest { received, request }))
    }

    /// Continues after a remote store has decided.
    async fn after_check(&self, check: Check, mut checked: CheckedRequest) -> Response<ToClient> {
        let mut outcome = check.outcome().await;
        let CheckedRequest { received: ReceivedRequest { parts, body, .. }, request } = &mut checked;
        let (site, received) = (Arc::clone(&request.site), (&*parts, BodyLength::of(body)));
        let action = with_head(received, (&site, &self.client), |head| {
            let last_noted = &mut scratch().buffers.last_noted;
            request.apply(&mut outcome, head, (&self.worker, self.client.peer()), last_noted)
        });
        let Some(action) = action else {
            let response = with_head(received, (&site, &self.client), |head| refusal(&outcome, head));
            return self.respond(checked.received.body, response, checked.request);
        };
        self.pass(outcome, action, checked).await
    }

    /// Serves an allowed request. Rare steps are boxed, so that their futures take no room in every request.
    async fn pass(&self, outcome: Outcome, action: Action, checked: CheckedRequest) -> Response<ToClient> {
        let CheckedRequest { mut received, mut request } = checked;
        if !received.body.is_end_stream() {
            // Until an upstream reads it, the client may send this much of the body.
            let buffered = BufferedBytes::none(&self.client);
            if buffered.set(self.client.upload_bytes(&received.body)).is_err() {
                let response = Box::pin(request.refund(&outcome, Failure::Overloaded)).await;
                return self.respond(received.body, response, request);
            }
            received.buffered = Some(buffered);
        }
        if !outcome.delay().is_zero()
            && let Err(failure) = Box::pin(received.body.wait_for(request.wait_in_queue(&outcome, &self.worker))).await
        {
            let response = Box::pin(request.refund(&outcome, failure)).await;
            return self.respond(received.body, response, request);
        }
        let mut response = match action {
            Action::Forward(number) => {
                return self.forward(received, (request, number), Attempts::default(), &outcome).await;
            }
            Action::Echo => Box::pin(self.echo(received, &mut request)).await,
            Action::Respond(response) => {
                self.drain(received.body);
                response
            }
        };
        request.settle(&outcome, Responder::Gateway, (response.status(), response.headers())).await;
        proxy::complete(&outcome, request.route(), &mut response);
        response.map(|text| ToClient::local(text, request))
    }

    /// Returns the echo of a request, once its body has arrived.
    async fn echo(&self, received: ReceivedRequest, request: &mut ProxyRequest) -> Response<Bytes> {
        let ReceivedRequest { parts, body, buffered } = received;
        let (length, site) = (BodyLength::of(&body), &request.site);
        match collect(ToUpstream::new(body, &self.client, site.max_body, buffered)).await {
            Ok(body) => {
                with_head((&parts, length), (site, &self.client), |head| local_response::echo(head, &self.client, body))
            }
            Err(failure) => {
                request.note_fault(&failure.into());
                local_response::failure(failure)
            }
        }
    }

    /// Returns a response of the gateway.
    fn respond(&self, body: ClientBody, response: Response<Bytes>, request: ProxyRequest) -> Response<ToClient> {
        self.drain(body);
        response.map(|text| ToClient::local(text, request))
    }

    /// Reads and discards a body in the background, so that it does not delay the response.
    fn drain(&self, body: ClientBody) {
        // Nothing is left to read, or too much.
        if body.is_end_stream() || body.size_hint().lower() > MAX_DRAINED_BYTES as u64 {
            return;
        }
        let client = Arc::clone(&self.client);
        tokio::spawn(async move {
            let (mut body, mut left) = (ToUpstream::new(body, &client, u64::MAX, None), MAX_DRAINED_BYTES);
            let drained = async {
                while let Some(Ok(frame)) = body.frame().await {
                    match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
                        Some(rest) => left = rest,
                        None => return,
                    }
                }
            };
            // In all: a client that sends a byte now and then would hold the stream for long.
            _ = timeout(client.timeouts.body.duration(), drained).await;
        });
    }
}

/// Returns the response to a request that limits refuse.
fn refusal(outcome: &Outcome, head: &RequestHead<'_>) -> Response<Bytes> {
    let refusal = if head.is_grpc {
        outcome.grpc_response().map(|response| response.map(|()| Bytes::new()))
    } else {
        outcome.response(head.headers.lines)
    };
    refusal.unwrap_or_default()
}

/// Reads the body of a request for its echo. A body that is too long for that is left out.
async fn collect(mut body: ToUpstream) -> Result<String, Failure> {
    let mut content = Vec::new();
    while let Some(frame) = body.frame().await {
        content.extend_from_slice(frame?.data_ref().map_or(&[], |data| data));
        if content.len() > MAX_ECHOED_BYTES {
            return Ok(String::new());
        }
    }
    Ok(String::from_utf8_lossy(&content).into_owned())
}

/// Bounds on the memory of a request while its client uploads slowly. A client decides how many uploads it starts and how
/// long they take, so each must be small.
#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the size of the future that a function returns.
    fn future_bytes<A, F: Future>(_: impl FnOnce(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_request_on_its_way_is_a_small_future() {
        let pass = |(exchange, (outcome, action), checked): (&'static Exchange, (Outcome, Action), CheckedRequest)| {
            exchange.pass(outcome, action, checked)
        };
        let bytes = future_bytes(pass);
        assert!(bytes <= 7 << 10, "{bytes} bytes");
    }
}

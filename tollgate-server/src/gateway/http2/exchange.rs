//! One request of HTTP/2: routed, checked, forwarded and answered. Requests of HTTP/1 to upstreams with HTTP/2 are
//! forwarded here, too.
//!
//! Only the gate decides. A refused request never reaches an upstream, and a request that is retried at another
//! upstream is counted once.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, MAX_FORWARDS};
use http::request::Parts;
use http::{Method, Request, Response};
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::service::Service;
use tollgate::internal::Unreadable;
use tollgate::{Check, Outcome};

use super::request_body::{ClientBody, ToUpstream};
use super::response_body::ToClient;
use crate::gateway::client::{BufferedBytes, Client};
use crate::gateway::failure::{self, Failure};
use crate::gateway::head::headers::{HeaderBuffer, X_REQUEST_ID};
use crate::gateway::head::{BodyLength, RequestHead, join_cookies};
use crate::gateway::local_response::{self, MAX_DRAINED_BYTES, MAX_ECHOED_BYTES, bodiless, is_malformed};
use crate::gateway::request_guard::RequestGuard;
use crate::gateway::site::{Attempts, Route, RouteAction, Site};
use crate::gateway::worker::Worker;

/// Serves the requests of one connection.
#[derive(Clone)]
pub(in crate::gateway) struct Exchange {
    pub(in crate::gateway) worker: Arc<Worker>,
    pub(in crate::gateway) client: Arc<Client>,
}

/// The response to a request, or a future that resolves to it.
#[expect(clippy::large_enum_variant, reason = "boxing would allocate for every refusal")]
pub(in crate::gateway) enum ResponseFuture {
    /// A response that is available at once: refusals must be cheap.
    Ready(Option<Response<ToClient>>),
    /// A response that an upstream or a remote store delays. Boxed, because hyper moves the future.
    Pending(Pin<Box<dyn Future<Output = Response<ToClient>> + Send>>),
}

impl Future for ResponseFuture {
    type Output = Result<Response<ToClient>, Infallible>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::Ready(response) => {
                Poll::Ready(Ok(response.take().expect("the future is not polled after completion")))
            }
            Self::Pending(future) => future.as_mut().poll(context).map(Ok),
        }
    }
}

impl Service<Request<Incoming>> for Exchange {
    type Response = Response<ToClient>;
    type Error = Infallible;
    type Future = ResponseFuture;

    fn call(&self, request: Request<Incoming>) -> ResponseFuture {
        let is_head = request.method() == Method::HEAD;
        match self.begin(request) {
            Ok(response) => ResponseFuture::Ready(Some(finished(response, is_head))),
            Err((check, checked)) => {
                let this = self.clone();
                ResponseFuture::Pending(Box::pin(async move {
                    let response = match check {
                        Check::Ready(outcome) => this.pass(outcome, checked).await,
                        // Boxed: the future is larger with a remote store, and other requests need no room for it.
                        Check::Pending(outcome) => Box::pin(this.after_check(outcome, checked)).await,
                    };
                    finished(response, is_head)
                }))
            }
        }
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
    let filter = site.header_filter(client.info.address.ip());
    with(&RequestHead::of_parts(parts, length, &mut HeaderBuffer::default(), &filter))
}

/// A checked request that is to be forwarded.
struct CheckedRequest {
    request: ReceivedRequest,
    site: Arc<Site>,
    route: Option<usize>,
    guard: RequestGuard,
}

impl Exchange {
    /// Returns the response if it is available at once. Otherwise returns the check and the request.
    #[expect(clippy::result_large_err, reason = "not an error, and boxed at once")]
    fn begin(&self, request: Request<Incoming>) -> Result<Response<ToClient>, (Check, CheckedRequest)> {
        let (mut parts, body) = request.into_parts();
        let body = ClientBody::Http2(body);
        join_cookies(&mut parts.headers);
        let (site, peer) = (self.worker.site.load_full(), self.client.peer());
        let mut lines = HeaderBuffer::default();
        let filter = site.header_filter(peer.address);
        let mut head = RequestHead::of_parts(&parts, BodyLength::of(&body), &mut lines, &filter);
        self.worker.tally.note_dropped_headers(head.dropped);
        let mut guard = RequestGuard::begin(&head, &self.client, &self.worker, &site);
        if let Some(failure) = head.failure(site.max_body) {
            return Ok(self.refuse_malformed((&head, body), failure, guard));
        }
        let route = match head.find_route(&site, peer) {
            Ok(route) => route,
            Err(problem) => return Ok(self.refuse_unreadable((&head, body), &problem, guard)),
        };
        let check = self.worker.gate.check(&site.with_route(head.facts(peer), route));
        if let Some(number) = route {
            guard.enter(site.routes[number].tally(self.worker.number));
        }
        if let Check::Ready(outcome) = &check {
            self.note_outcome(&head, (&site, route), outcome, &mut guard);
            if !outcome.is_allowed() {
                return Ok(self.refuse((&head, body), outcome, guard));
            }
        }
        let normalized = head.target.into_normalized();
        drop(lines);
        if let Some(uri) = normalized {
            parts.uri = uri;
        }
        let request = ReceivedRequest { parts, body, buffered: None };
        Err((check, CheckedRequest { request, site, route, guard }))
    }

    /// Counts the outcome of a check, and adds it to the access log entry.
    fn note_outcome(
        &self,
        head: &RequestHead<'_>,
        (site, route): (&Site, Option<usize>),
        outcome: &Outcome,
        guard: &mut RequestGuard,
    ) {
        guard.note_outcome(outcome);
        if site.log.is_some() {
            guard.note_key(outcome, &site.with_route(head.facts(self.client.peer()), route));
        }
    }

    /// Continues after a remote store has decided.
    async fn after_check(
        &self,
        outcome: impl Future<Output = Outcome>,
        mut checked: CheckedRequest,
    ) -> Response<ToClient> {
        let outcome = outcome.await;
        let CheckedRequest { request: ReceivedRequest { parts, body, .. }, site, route, guard } = &mut checked;
        let request = (&*parts, BodyLength::of(body));
        with_head(request, (site, &self.client), |head| self.note_outcome(head, (site, *route), &outcome, guard));
        if !outcome.is_allowed() {
            let CheckedRequest { request: ReceivedRequest { parts, body, .. }, site, guard, .. } = checked;
            let request = (&parts, BodyLength::of(&body));
            return with_head(request, (&site, &self.client), |head| self.refuse((head, body), &outcome, guard));
        }
        self.pass(outcome, checked).await
    }

    /// Serves an allowed request. Rare steps are boxed, so that their futures take no room in every request.
    async fn pass(&self, mut outcome: Outcome, checked: CheckedRequest) -> Response<ToClient> {
        let CheckedRequest { mut request, site, route, mut guard } = checked;
        guard.keep_permit(outcome.take_permit());
        if !request.body.is_end_stream() {
            // Until an upstream reads it, the client may send this much of the body.
            let mut buffered = BufferedBytes::none(&self.client);
            if buffered.set(self.client.upload_bytes(&request.body)).is_err() {
                _ = Box::pin(outcome.refund()).await;
                return self.fail(request.body, Failure::Overloaded, guard);
            }
            request.buffered = Some(buffered);
        }
        if !outcome.delay().is_zero()
            && let Err(failure) = Box::pin(self.worker.wait_in_queue(&outcome, &site)).await
        {
            _ = Box::pin(outcome.refund()).await;
            return self.fail(request.body, failure, guard);
        }
        let Some(route) = route.map(|number| &site.routes[number]) else {
            let response = self.fail(request.body, Failure::NoRoute, guard);
            return self.settle_and_write_headers(&outcome, response, None).await;
        };
        if let RouteAction::Upstreams(_) = &route.action
            && let Some(response) = self.final_response(&request, &site)
        {
            self.drain(request.body);
            let response = response.map(|text| ToClient::local(text, guard));
            return self.settle_and_write_headers(&outcome, response, Some(route)).await;
        }
        match &route.action {
            RouteAction::Upstreams(_) => {
                self.forward(request, (&site, route), Attempts::default(), &outcome, guard).await
            }
            RouteAction::Respond(fixed) => {
                self.drain(request.body);
                let response = fixed.response().map(|text| ToClient::local(text, guard));
                self.settle_and_write_headers(&outcome, response, Some(route)).await
            }
            RouteAction::Echo => {
                let response = Box::pin(self.echo(request, &site)).await;
                let response = response.map(|text| ToClient::local(text, guard));
                self.settle_and_write_headers(&outcome, response, Some(route)).await
            }
        }
    }

    /// Returns the response of the gateway to a request that may not be forwarded.
    fn final_response(&self, request: &ReceivedRequest, site: &Site) -> Option<Response<Bytes>> {
        let ReceivedRequest { parts, body, .. } = request;
        // Cheaper than reading the head again: browsers send OPTIONS before many requests.
        let may_be_final = matches!(parts.method, Method::TRACE | Method::OPTIONS);
        if !may_be_final || !parts.headers.contains_key(MAX_FORWARDS) {
            return None;
        }
        with_head((parts, BodyLength::of(body)), (site, &self.client), |head| {
            (head.forwards_left() == Some(0)).then(|| local_response::final_recipient(head))
        })
    }

    /// Returns the echo of a request, once its body has arrived.
    async fn echo(&self, request: ReceivedRequest, site: &Site) -> Response<Bytes> {
        let ReceivedRequest { parts, body, .. } = request;
        let length = BodyLength::of(&body);
        let body = collect(body, &self.client).await;
        with_head((&parts, length), (site, &self.client), |head| local_response::echo(head, &self.client, body))
    }

    /// Settles limits that count responses, applies the changes of the route, and adds the rate limit headers.
    pub(super) async fn settle_and_write_headers(
        &self,
        outcome: &Outcome,
        mut response: Response<ToClient>,
        route: Option<&Route>,
    ) -> Response<ToClient> {
        if outcome.awaits_response() {
            // Before the route removes the header with the cost. If settling fails, the estimate stands.
            _ = Box::pin(outcome.settle_response(response.status(), response.headers())).await;
        }
        if let Some(route) = route {
            route.response_edits.apply(response.headers_mut());
        }
        outcome.write_headers(response.headers_mut());
        response
    }

    fn fail(&self, body: ClientBody, failure: Failure, guard: RequestGuard) -> Response<ToClient> {
        self.drain(body);
        failure::response(failure).map(|text| ToClient::local(text, guard))
    }
}

impl Exchange {
    /// Returns the response of a limit that refuses the request.
    fn refuse(
        &self,
        (head, body): (&RequestHead<'_>, ClientBody),
        outcome: &Outcome,
        guard: RequestGuard,
    ) -> Response<ToClient> {
        if is_malformed(outcome) {
            self.worker.strike(self.client.peer(), head.headers.lines);
        }
        let refusal = if head.is_grpc {
            outcome.grpc_response().map(|response| response.map(|()| Bytes::new()))
        } else {
            outcome.response(head.headers.lines)
        };
        let refusal = refusal.unwrap_or_default();
        let refusal = if head.is_head() { bodiless(refusal) } else { refusal };
        self.drain(body);
        refusal.map(|text| ToClient::local(text, guard))
    }

    /// Returns the response to a request with more than one interpretation.
    fn refuse_unreadable(
        &self,
        (head, body): (&RequestHead<'_>, ClientBody),
        problem: &Unreadable,
        mut guard: RequestGuard,
    ) -> Response<ToClient> {
        guard.note_unreadable(problem, head, &self.worker);
        self.drain(body);
        failure::unreadable_response(problem).map(|text| ToClient::local(text, guard))
    }

    /// Refuses a request before any limit is checked.
    fn refuse_malformed(
        &self,
        (head, body): (&RequestHead<'_>, ClientBody),
        failure: Failure,
        mut guard: RequestGuard,
    ) -> Response<ToClient> {
        guard.note_refused(failure, head, &self.worker);
        self.fail(body, failure, guard)
    }

    /// Reads and discards a body in the background, so that it does not delay the response.
    fn drain(&self, body: ClientBody) {
        // Nothing is left to read, or too much.
        if body.is_end_stream() || body.size_hint().lower() > MAX_DRAINED_BYTES as u64 {
            return;
        }
        let client = Arc::clone(&self.client);
        tokio::spawn(async move {
            let (mut body, mut left) = (ToUpstream::new(body, &client, u64::MAX), MAX_DRAINED_BYTES);
            while let Some(Ok(frame)) = body.frame().await {
                match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
                    Some(rest) => left = rest,
                    None => return,
                }
            }
        });
    }
}

/// Reads the body of a request for its echo. A body that is too long or broken is left out.
async fn collect(body: ClientBody, client: &Arc<Client>) -> String {
    let body = ToUpstream::new(body, client, MAX_ECHOED_BYTES as u64);
    match body.collect().await {
        Ok(body) => String::from_utf8_lossy(&body.to_bytes()).into_owned(),
        Err(_) => String::new(),
    }
}

/// Applies the changes that all responses need.
fn finished(mut response: Response<ToClient>, is_head: bool) -> Response<ToClient> {
    let status = response.status();
    response.body_mut().answers_with(status);
    if let Some(id) = response.body().request_id().cloned() {
        response.headers_mut().insert(X_REQUEST_ID, id);
    }
    if is_head && let Some(length) = response.body_mut().take_written() {
        response.headers_mut().entry(CONTENT_LENGTH).or_insert_with(|| length.into());
    }
    response
}

/// Bounds on the memory of a request while its client uploads slowly. A client decides how many uploads it starts and how
/// long they take, so each must be small. hyper adds two buffers of 8 KiB per side.
#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the size of the future that a function returns.
    fn future_bytes<A, F: Future>(_: impl FnOnce(A) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn a_connection_to_an_upstream_allocates_little_room_for_requests() {
        // hyper's channel has 32 slots from the start.
        let bytes = 32 * size_of::<Request<ToUpstream>>();
        assert!(bytes <= 8 << 10, "{bytes} bytes");
    }

    #[test]
    fn a_request_on_its_way_is_a_small_future() {
        let pass = |(exchange, outcome, checked): (&'static Exchange, Outcome, CheckedRequest)| {
            exchange.pass(outcome, checked)
        };
        let bytes = future_bytes(pass);
        assert!(bytes <= 7 << 10, "{bytes} bytes");
    }
}

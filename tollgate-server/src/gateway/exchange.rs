//! One request of HTTP/2: routed, checked, forwarded and answered. Requests of HTTP/1 to upstreams with HTTP/2 are
//! forwarded here, too.
//!
//! Only the gate decides. A refused request never reaches an upstream, and a request that is retried at another
//! upstream is counted once.

mod forward;
mod refuse;

use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use std::task::{Context, Poll};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::request::Parts;
use http::{Method, Request, Response};
use hyper::body::{Body, Incoming};
use hyper::service::Service;
use tollgate::rules::Facts;
use tollgate::{Check, Gate, Outcome};

pub(super) use self::refuse::{MAX_DRAINED_BYTES, is_malformed};
use super::attempts::Attempts;
use super::body::{ClientBody, ToClient};
use super::buffer_budget::BufferedBytes;
use super::client::Client;
use super::connect::ConnectError;
use super::deadline::Ticks;
use super::failure::Failure;
use super::head::upstream::{RequestIds, X_REQUEST_ID};
use super::head::{BodyLength, HeaderBuffer, RequestHead, join_cookies};
use super::header_names::HeaderFilter;
use super::per_address::{self, PerAddress};
use super::request_guard::RequestGuard;
use super::site::{Route, RouteAction, Site};
use super::tally::Tally;
use super::upstream_slots::{Evicted, UpstreamSlot, UpstreamSlots};
use super::{echo, failure};

/// The state that all requests of a worker share.
pub(super) struct Worker {
    pub(super) number: usize,
    pub(super) gate: Gate,
    pub(super) site: Arc<ArcSwap<Site>>,
    pub(super) ticks: Arc<Ticks>,
    pub(super) tally: Arc<Tally>,
    pub(super) ids: RequestIds,
    /// Requests of all workers that wait in the queue of a limit.
    pub(super) queued: Arc<AtomicU32>,
    /// Whether clients are asked to close their connections, because the gateway stops.
    pub(super) closing: Arc<AtomicBool>,
    /// Open connections by client address, of all workers.
    pub(super) per_address: Arc<PerAddress>,
    pub(super) upstream_slots: Arc<UpstreamSlots>,
}

impl Worker {
    /// Takes a slot for a connection to an upstream. Closes idle connections for it, first those of this worker.
    pub(super) async fn take_upstream_slot(&self, client: &Client) -> Result<UpstreamSlot, ConnectError> {
        self.upstream_slots.take(client.requests(), || self.evict_idle()).await
    }

    fn evict_idle(&self) -> Evicted {
        let site = self.site.load();
        let targets = || site.routes.iter().flat_map(Route::targets);
        let workers = targets().next().map_or(0, |target| target.workers());
        let own_first = (0..workers).map(|step| (self.number + step) % workers);
        let evicted = own_first.flat_map(|worker| targets().map(move |target| target.evict_idle(worker)));
        evicted.into_iter().find(|evicted| *evicted != Evicted::Nothing).unwrap_or(Evicted::Nothing)
    }
}

/// Serves the requests of one connection.
#[derive(Clone)]
pub(super) struct Exchange {
    pub(super) worker: Arc<Worker>,
    pub(super) client: Arc<Client>,
}

/// The response to a request, or a future that resolves to it.
#[expect(clippy::large_enum_variant, reason = "boxing would allocate for every refusal")]
pub(super) enum ResponseFuture {
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
            Err((check, forwarding)) => {
                let this = self.clone();
                ResponseFuture::Pending(Box::pin(async move {
                    let response = match check {
                        Check::Ready(outcome) => this.pass(outcome, forwarding).await,
                        // Boxed: the future is larger with a remote store, and other requests need no room for it.
                        Check::Pending(outcome) => Box::pin(this.after_check(outcome, forwarding)).await,
                    };
                    finished(response, is_head)
                }))
            }
        }
    }
}

/// A request as the client has sent it.
pub(super) struct ReceivedRequest {
    pub(super) parts: Parts,
    pub(super) body: ClientBody,
    /// The part of the body that may be buffered until an upstream reads it.
    pub(super) buffered: Option<BufferedBytes>,
}

/// Reads the head of a request, and calls `with` with it.
fn with_head<T>(
    (parts, length): (&Parts, BodyLength),
    (site, client): (&Site, &Client),
    with: impl FnOnce(&RequestHead<'_>) -> T,
) -> T {
    let filter = HeaderFilter::new(site, client.address.ip());
    with(&RequestHead::of_parts(parts, length, &mut HeaderBuffer::default(), &filter))
}

/// A checked request that is to be forwarded.
struct Forwarding {
    request: ReceivedRequest,
    site: Arc<Site>,
    route: Option<usize>,
    guard: RequestGuard,
}

impl Worker {
    /// Counts a malformed request as a strike against the client.
    pub(super) fn strike(&self, facts: &Facts<'_>) {
        if let Check::Pending(strike) = self.gate.strike(facts) {
            // It ends at the store's deadline.
            tokio::spawn(strike);
        }
    }

    /// Counts a connection of an address. Fails if the address has too many. Trusted proxies are not counted, since
    /// they serve many clients.
    pub(super) fn enter(&self, address: IpAddr) -> io::Result<Option<per_address::Counted>> {
        let site = self.site.load();
        if site.proxies.trusts(address) {
            return Ok(None);
        }
        let entered = self.per_address.enter(address, site.max_per_address);
        if entered.is_none() {
            self.tally.turned_away_by_address.add(1);
            self.per_address.warn(address, site.max_per_address, self.ticks.now());
        }
        entered.map(Some).ok_or_else(|| io::ErrorKind::ConnectionRefused.into())
    }

    /// Returns whether clients are asked to close their connections.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Relaxed)
    }

    /// Waits for the delay that a limit imposes.
    pub(super) async fn wait_in_queue(&self, outcome: &Outcome, site: &Site) -> Result<(), Failure> {
        let _permit = QueuePermit::enter(&self.queued, site.max_queued).ok_or(Failure::QueueFull)?;
        tokio::time::sleep(outcome.delay()).await;
        Ok(())
    }
}

impl Exchange {
    /// Returns the response if it is available at once. Otherwise returns the check and the request.
    #[expect(clippy::result_large_err, reason = "not an error, and boxed at once")]
    fn begin(&self, request: Request<Incoming>) -> Result<Response<ToClient>, (Check, Forwarding)> {
        let (mut parts, body) = request.into_parts();
        let body = ClientBody::Http2(body);
        join_cookies(&mut parts.headers);
        let (site, peer) = (self.worker.site.load_full(), self.client.peer());
        let mut lines = HeaderBuffer::default();
        let filter = HeaderFilter::new(&site, peer.address);
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
        Err((check, Forwarding { request, site, route, guard }))
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
        mut forwarding: Forwarding,
    ) -> Response<ToClient> {
        let outcome = outcome.await;
        let Forwarding { request: ReceivedRequest { parts, body, .. }, site, route, guard } = &mut forwarding;
        let request = (&*parts, BodyLength::of(body));
        with_head(request, (site, &self.client), |head| self.note_outcome(head, (site, *route), &outcome, guard));
        if !outcome.is_allowed() {
            let Forwarding { request: ReceivedRequest { parts, body, .. }, site, guard, .. } = forwarding;
            let request = (&parts, BodyLength::of(&body));
            return with_head(request, (&site, &self.client), |head| self.refuse((head, body), &outcome, guard));
        }
        self.pass(outcome, forwarding).await
    }

    /// Serves an allowed request. Rare steps are boxed, so that their futures take no room in every request.
    async fn pass(&self, mut outcome: Outcome, forwarding: Forwarding) -> Response<ToClient> {
        let Forwarding { mut request, site, route, mut guard } = forwarding;
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
            return self.settle_and_write_headers(&outcome, self.fail(request.body, Failure::NoRoute, guard)).await;
        };
        match &route.action {
            RouteAction::Upstreams(_) => {
                self.forward(request, (&site, route), Attempts::default(), &outcome, guard).await
            }
            RouteAction::Respond(fixed) => {
                self.drain(request.body);
                let response = fixed.response().map(|text| ToClient::local(text, guard));
                self.settle_and_write_headers(&outcome, self.apply_response_edits(response, route)).await
            }
            RouteAction::Echo => {
                let response = Box::pin(self.echo(request, &site)).await;
                let response = response.map(|text| ToClient::local(text, guard));
                self.settle_and_write_headers(&outcome, self.apply_response_edits(response, route)).await
            }
        }
    }

    /// Returns the echo of a request, once its body has arrived.
    async fn echo(&self, request: ReceivedRequest, site: &Site) -> Response<Bytes> {
        let ReceivedRequest { parts, body, .. } = request;
        let length = BodyLength::of(&body);
        let body = echo::collect(body, &self.client).await;
        with_head((&parts, length), (site, &self.client), |head| echo::response(head, &self.client, body))
    }

    /// Applies the route's response headers.
    fn apply_response_edits(&self, mut response: Response<ToClient>, route: &Route) -> Response<ToClient> {
        route.response_edits.apply(response.headers_mut());
        response
    }

    /// Settles limits that count responses, and adds the rate limit headers.
    async fn settle_and_write_headers(
        &self,
        outcome: &Outcome,
        mut response: Response<ToClient>,
    ) -> Response<ToClient> {
        if outcome.awaits_response() {
            // If settling fails, the estimate stands.
            _ = Box::pin(outcome.settle_response(response.status(), response.headers())).await;
        }
        outcome.write_headers(response.headers_mut());
        response
    }

    fn fail(&self, body: ClientBody, failure: Failure, guard: RequestGuard) -> Response<ToClient> {
        self.drain(body);
        failure::response(failure).map(|text| ToClient::local(text, guard))
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

/// A slot among the requests that wait in a queue.
struct QueuePermit<'a>(&'a AtomicU32);

impl<'a> QueuePermit<'a> {
    fn enter(count: &'a AtomicU32, max: u32) -> Option<Self> {
        let queued = count.fetch_add(1, Relaxed);
        let permit = Self(count);
        (queued < max).then_some(permit)
    }
}

impl Drop for QueuePermit<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// Removes the body of a response to HEAD and keeps its length.
pub(super) fn bodiless(mut response: Response<Bytes>) -> Response<Bytes> {
    let length = std::mem::take(response.body_mut()).len();
    response.headers_mut().insert(CONTENT_LENGTH, length.into());
    response
}

/// Bounds on the memory of a request while its client uploads slowly. A client decides how many uploads it starts and how
/// long they take, so each must be small. hyper adds two buffers of 8 KiB per side.
#[cfg(test)]
mod tests {
    use super::super::body::ToUpstream;
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
        let pass = |(exchange, outcome, forwarding): (&'static Exchange, Outcome, Forwarding)| {
            exchange.pass(outcome, forwarding)
        };
        let bytes = future_bytes(pass);
        assert!(bytes <= 7 << 10, "{bytes} bytes");
    }
}

//! The service, which checks each request before it calls the inner service.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{Method, Request, Response};
use http_body::Body;
use tower_service::Service;

use super::body::Outgoing;
use super::framework::Tunnel;
use super::future::Stage;
use super::layer::Limits;
use super::{ResponseBody, ResponseFuture};
use crate::gate::{ByAddress, Outcome, ReportedCost};
use crate::http::is_grpc;
use crate::rules::Facts;

/// A service with rate limits; see [`RateLimitLayer`](super::RateLimitLayer).
///
/// It is always ready, unless the inner service has failed. A denied request is answered at once, even if the inner
/// service has no capacity. An allowed request waits for it. If the caller drops the request meanwhile, or the service
/// fails, the units the request took are refunded.
pub struct RateLimit<S> {
    inner: S,
    /// `true` if `inner` has reported that it is ready, and has not been called since.
    inner_ready: bool,
    limits: Arc<Limits>,
}

impl<S: Clone> Clone for RateLimit<S> {
    /// Readiness belongs to one instance: a clone of a ready service may not be ready.
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), inner_ready: false, limits: Arc::clone(&self.limits) }
    }
}

/// The actual cost of a request, for a handler that knows it only afterwards. Inserted into the response's extensions,
/// it settles every limit whose cost was an estimate, or one limit by name.
///
/// ```
/// use tollgate::tower::ActualCost;
///
/// let mut response = http::Response::new("…");
/// response.extensions_mut().insert(ActualCost::new(300));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ActualCost {
    units: u64,
    limit: Option<String>,
}

impl ActualCost {
    /// Creates a cost in units. It applies to every limit whose cost is not the constant 1.
    #[must_use]
    pub fn new(units: u64) -> Self {
        Self { units, limit: None }
    }

    /// Applies the cost to the limit named `name` alone, whatever its estimated cost was.
    #[must_use]
    pub fn of_limit(mut self, name: impl Into<String>) -> Self {
        self.limit = Some(name.into());
        self
    }

    /// Returns the cost in the form that the gate settles.
    pub(super) fn reported(&self) -> ReportedCost<'_> {
        ReportedCost { units: self.units, limit: self.limit.as_deref() }
    }
}

impl Limits {
    /// Returns the facts of a request.
    #[inline]
    fn facts<'a, B>(&'a self, request: &'a Request<B>) -> Facts<'a> {
        let uri = request.uri();
        // `CONNECT` has no path.
        let path = if uri.path().is_empty() { "/" } else { uri.path() };
        let facts = Facts::of_parts(request.method().as_str(), path, uri.query())
            .headers(request.headers())
            .extensions(request.extensions())
            .finders(self.finders());
        match uri.host() {
            Some(host) => facts.host(host),
            None => facts,
        }
    }

    /// Reports the decision, and returns the response if the request is refused.
    #[inline]
    pub(super) fn refusal<Q, R, B: Outgoing<R>>(&self, outcome: &Outcome, request: &Request<Q>) -> Option<Response<B>> {
        if let Some(on_decision) = &self.on_decision {
            on_decision(outcome, &self.facts(request));
        }
        if outcome.is_allowed() { None } else { refusal_to(self, outcome, request) }
    }
}

/// Returns the refusal in the format that the client expects.
#[cold]
#[inline(never)]
fn refusal_to<Q, R, B: Outgoing<R>>(limits: &Limits, outcome: &Outcome, request: &Request<Q>) -> Option<Response<B>> {
    if is_grpc(request.headers()) {
        return outcome.grpc_response().map(|response| response.map(|()| B::refusal(Bytes::new())));
    }
    let mut response = outcome.response(request.headers())?;
    if let Some(refuse_with) = &limits.refuse_with {
        response = refuse_with(outcome, &limits.facts(request), response);
    }
    // Not every server removes the body from a response to HEAD. Its `content-length` stays.
    if request.method() == Method::HEAD {
        let length = std::mem::take(response.body_mut()).len();
        response.headers_mut().insert(CONTENT_LENGTH, length.into());
    }
    Some(response.map(B::refusal))
}

impl<S, Q, R> Service<Request<Q>> for RateLimit<S>
where
    S: Service<Request<Q>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: 'static,
    Q: Send + 'static,
    R: Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, R, S::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.poll_inner(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        ResponseFuture::new(self.enter(request))
    }
}

impl<S> RateLimit<S> {
    pub(super) fn new(inner: S, limits: Arc<Limits>) -> Self {
        Self { inner, inner_ready: false, limits }
    }

    /// Records whether the inner service is ready. It does not wait, because denied requests do not need the service.
    #[inline]
    pub(super) fn poll_inner<Q>(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>>
    where
        S: Service<Request<Q>>,
    {
        if let Poll::Ready(ready) = self.inner.poll_ready(context) {
            ready?;
            self.inner_ready = true;
        }
        Poll::Ready(Ok(()))
    }

    /// Checks a request, and calls the inner service if that is possible at once.
    #[inline]
    pub(super) fn enter<Q, R, B>(&mut self, request: Request<Q>) -> Stage<S::Future, B, S::Error>
    where
        S: Service<Request<Q>, Response = Response<R>> + Clone + Send + 'static,
        S::Future: Send,
        Q: Send + 'static,
        R: Send + 'static,
        B: Outgoing<R> + 'static,
    {
        match self.limits.gate.check_by_address(|| self.limits.peer(request.extensions())) {
            ByAddress::Admitted(admitted) if self.inner_ready && self.limits.needs_no_outcome() => {
                Stage::admitted(self.call_ready(request), admitted)
            }
            checked => self.enter_with_outcome(checked, request),
        }
    }

    /// Checks a request by all of its facts. Separate from the fast path, so that the fast path has a small stack
    /// frame.
    #[inline(never)]
    fn enter_with_outcome<Q, R, B>(
        &mut self,
        checked: ByAddress,
        mut request: Request<Q>,
    ) -> Stage<S::Future, B, S::Error>
    where
        S: Service<Request<Q>, Response = Response<R>> + Clone + Send + 'static,
        S::Future: Send,
        Q: Send + 'static,
        R: Send + 'static,
        B: Outgoing<R> + 'static,
    {
        let outcome = match checked {
            ByAddress::Admitted(admitted) => admitted.into_outcome(),
            ByAddress::Decided(outcome) => outcome,
            ByAddress::Unchecked(unchecked) => {
                let mut outcome = unchecked.outcome();
                if let Some(remote) = outcome.check(&self.limits.facts(&request)) {
                    let (inner, limits) = (self.take_inner(), Arc::clone(&self.limits));
                    return Stage::awaiting_store(outcome.complete(remote), limits, inner, request);
                }
                outcome
            }
        };
        if let Some(refused) = self.limits.refusal::<_, R, _>(&outcome, &request) {
            return Stage::refused(refused);
        }
        let wants_tunnel = outcome.has_permit() && Tunnel::is_requested(request.extensions());
        if !self.inner_ready || !outcome.delay().is_zero() || wants_tunnel {
            let (inner, limits) = (self.take_inner(), Arc::clone(&self.limits));
            return Stage::admitted_later(*outcome, limits, inner, request);
        }
        self.limits.insert_decision(&outcome, &mut request);
        Stage::serving(self.call_ready(request), outcome)
    }

    #[inline]
    fn call_ready<Q>(&mut self, request: Request<Q>) -> S::Future
    where
        S: Service<Request<Q>>,
    {
        self.inner_ready = false;
        self.inner.call(request)
    }
}

impl<S: Clone> RateLimit<S> {
    /// Takes the service that was polled, and leaves a clone that has to be polled itself.
    fn take_inner(&mut self) -> S {
        self.inner_ready = false;
        let clone = self.inner.clone();
        std::mem::replace(&mut self.inner, clone)
    }
}

impl<S: std::fmt::Debug> std::fmt::Debug for RateLimit<S> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("RateLimit").field("inner", &self.inner).finish_non_exhaustive()
    }
}

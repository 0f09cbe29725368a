//! The service: asks first, and lets in what may pass.

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

/// A service with rate limits around it; see [`RateLimitLayer`](super::RateLimitLayer).
///
/// It is always ready, unless the service inside has failed. A request that is denied is answered at once, even while the
/// service inside has no room; a request that is admitted waits for it. If the caller drops the request while it waits,
/// or the service fails instead, the request gets back what it took from its limits.
pub struct RateLimit<S> {
    inner: S,
    /// Whether `inner` has reported that it is ready, and has not been called since.
    inner_ready: bool,
    limits: Arc<Limits>,
}

impl<S: Clone> Clone for RateLimit<S> {
    /// Readiness belongs to one instance: a clone of a service that is ready may not be.
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), inner_ready: false, limits: Arc::clone(&self.limits) }
    }
}

/// What a request really cost, for a handler that knows it only afterwards: left among the extensions of its
/// response, it settles every limit whose `cost` was an estimate, or the one that is named.
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
    /// So many units, of every limit whose cost is not one unit for all.
    #[must_use]
    pub fn new(units: u64) -> Self {
        Self { units, limit: None }
    }

    /// Of the limit of that name alone, whatever its cost was.
    #[must_use]
    pub fn of_limit(mut self, name: impl Into<String>) -> Self {
        self.limit = Some(name.into());
        self
    }

    /// What the rules are reported of it.
    pub(super) fn reported(&self) -> ReportedCost<'_> {
        ReportedCost { units: self.units, limit: self.limit.as_deref() }
    }
}

impl Limits {
    /// What the rules and the closures of the layer may look at.
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

    /// Reports the decision, and returns the response to a request that is refused.
    #[inline]
    pub(super) fn refusal<Q, R, B: Outgoing<R>>(&self, outcome: &Outcome, request: &Request<Q>) -> Option<Response<B>> {
        if let Some(on_decision) = &self.on_decision {
            on_decision(outcome, &self.facts(request));
        }
        if outcome.is_allowed() { None } else { refusal_to(self, outcome, request) }
    }
}

/// The refusal in the form that the client of this request understands.
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
    // Not every server takes the body from an answer to HEAD; its length is reported all the same.
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

    /// Notes whether the service inside is ready. Whoever is denied does not need it, so nobody waits for it here.
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

    /// Decides about a request, and calls the service inside if that may be done at once.
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

    /// Decides about a request by all that is known of it. A function of its own, so that the fast
    /// path has a small stack frame.
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
    /// The service that was polled. A clone, which has to be polled itself, takes its permit.
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

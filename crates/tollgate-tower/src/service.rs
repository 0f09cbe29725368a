//! The service, which checks each request before it calls the inner service.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tollgate_rules::internal::layer::ByAddress;
use tower_service::Service;

use super::future::{Kept, Outgoing, PENDING_FOR, ResponseBody, ResponseFuture, Stage, Tunnel, refusal};
use super::limits::Limits;

/// A service with rate limits; see [`RateLimitLayer`](super::RateLimitLayer).
///
/// It is always ready, unless the inner service has failed. A denied request is answered at once, even if the inner
/// service has no capacity. An allowed request waits for it. If the caller drops the request meanwhile, or the service
/// fails before it is called, the units the request took are refunded. After the call, only the response of the service
/// gives units back ([`Rule::count`](tollgate_rules::Rule::count)): an error in its place, or a dropped future, does not.
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

    /// Checks a request, and calls the inner service if that is possible at once. Not inlined, so that it writes the
    /// stage where its caller wants it, and the large future is copied once less.
    #[inline(never)]
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
                self.inner_ready = false;
                Stage::Serving { future: self.inner.call(request), kept: Some(Kept::Admitted(admitted)) }
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
        let mut outcome = match checked {
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
        if let Some(refused) = refusal::<_, R, _>(&self.limits, &outcome, &request) {
            return Stage::refused(refused);
        }
        let wants_tunnel = outcome.has_permit() && Tunnel::is_requested(request.extensions());
        if !self.inner_ready || !outcome.delay().is_zero() || wants_tunnel {
            let (inner, limits) = (self.take_inner(), Arc::clone(&self.limits));
            return Stage::admitted_later(*outcome, limits, inner, request);
        }
        self.limits.insert_decision(&outcome, &mut request);
        outcome.hold_open(PENDING_FOR);
        self.inner_ready = false;
        Stage::Serving { future: self.inner.call(request), kept: Some(Kept::Outcome(outcome)) }
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

//! The service: asks first, and lets in what may pass.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{Method, Request, Response};
use http_body::Body;
use tower_service::Service;

use super::body::Outgoing;
use super::future::Stage;
use super::layer::Limits;
use super::on::Tunnel;
use super::{ResponseBody, ResponseFuture};
use crate::gate::{ByAddress, Elsewhere, Ruling, Told};
use crate::http::is_grpc;
use crate::rules::Facts;

/// A service with rate limits around it; see [`RateLimitLayer`](super::RateLimitLayer).
#[derive(Clone)]
pub struct RateLimit<S> {
    pub(super) inner: S,
    pub(super) limits: Arc<Limits>,
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

    /// What the rules are told of it.
    pub(super) fn told(&self) -> Told<'_> {
        Told { units: self.units, limit: self.limit.as_deref() }
    }
}

impl<S> RateLimit<S> {
    #[inline]
    fn ask<B>(&self, ruling: &mut Ruling, request: &Request<B>) -> Option<Elsewhere> {
        let uri = request.uri();
        // `CONNECT` has no path.
        let path = if uri.path().is_empty() { "/" } else { uri.path() };
        let mut facts = Facts::of_parts(request.method().as_str(), path, uri.query())
            .headers(request.headers())
            .extensions(request.extensions())
            .finders(self.limits.finders());
        if let Some(host) = uri.host() {
            facts = facts.host(host);
        }
        ruling.ask(&facts)
    }
}

/// The refusal that a ruling is, in the form that the client of this request understands.
#[inline]
pub(super) fn refusal<Q, R, B: Outgoing<R>>(ruling: &Ruling, request: &Request<Q>) -> Option<Response<B>> {
    if ruling.is_allowed() { None } else { refusal_to(ruling, request) }
}

#[cold]
#[inline(never)]
fn refusal_to<Q, R, B: Outgoing<R>>(ruling: &Ruling, request: &Request<Q>) -> Option<Response<B>> {
    if is_grpc(request.headers()) {
        return ruling.grpc_response().map(|response| response.map(|()| B::refusal(Bytes::new())));
    }
    let mut response = ruling.response(request.headers())?;
    // Not every server takes the body from an answer to HEAD; its length is told all the same.
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
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        ResponseFuture::new(self.enter(request))
    }
}

impl<S> RateLimit<S> {
    /// Lets a request in, or not.
    #[inline]
    pub(super) fn enter<Q, R, B>(&mut self, request: Request<Q>) -> Stage<S::Future, B, S::Error>
    where
        S: Service<Request<Q>, Response = Response<R>> + Clone + Send + 'static,
        S::Future: Send,
        Q: Send + 'static,
        R: Send + 'static,
        B: Outgoing<R> + 'static,
    {
        let ruling = match self.limits.gate.ask_by_address(|| self.limits.peer(request.extensions())) {
            ByAddress::Admitted(admitted) => return Stage::admitted(self.inner.call(request), admitted),
            ByAddress::Ruled(ruling) => ruling,
            ByAddress::Unasked(unasked) => {
                let mut ruling = unasked.ruling();
                if let Some(elsewhere) = self.ask(&mut ruling, &request) {
                    return Stage::longer(ruling.elsewhere(elsewhere), self.take_ready(), request);
                }
                ruling
            }
        };
        if let Some(refused) = refusal::<_, R, _>(&ruling, &request) {
            return Stage::refused(refused);
        }
        if !ruling.delay().is_zero() || ruling.has_place() && Tunnel::is_wanted(request.extensions()) {
            return Stage::longer(std::future::ready(*ruling), self.take_ready(), request);
        }
        Stage::inside(self.inner.call(request), ruling)
    }
}

impl<S: Clone> RateLimit<S> {
    /// The service that was ready. A clone of it, which may not be, takes its place.
    fn take_ready(&mut self) -> S {
        let clone = self.inner.clone();
        std::mem::replace(&mut self.inner, clone)
    }
}

impl<S: std::fmt::Debug> std::fmt::Debug for RateLimit<S> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("RateLimit").field("inner", &self.inner).finish_non_exhaustive()
    }
}

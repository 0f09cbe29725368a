//! axum: the layer for its own body type, and [`LimitDecision`] as an extractor.
//!
//! axum boxes every body that is not of its own type, including a [`ResponseBody`]. Its own type can hold anything, so
//! this layer passes the inner service's body through unchanged and builds refusals in that type.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::response::IntoResponse;
use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use pin_project_lite::pin_project;
use tollgate_rules::{Gate, InFlightPermit};
use tower_layer::Layer;
use tower_service::Service;

use super::future::{Outgoing, ResponseBody, Stage};
use super::layer::RateLimitLayer;
use super::limits::LimitDecision;
use super::service::RateLimit;

/// A [`RateLimitLayer`] for axum routers; see [`RateLimitLayer::for_axum`].
#[derive(Clone, Debug)]
#[must_use]
pub struct AxumRateLimitLayer(RateLimitLayer);

impl AxumRateLimitLayer {
    /// Returns the gate, for example to replace its rules.
    #[must_use]
    pub fn gate(&self) -> &Gate {
        self.0.gate()
    }
}

/// An axum service with rate limits; see [`RateLimitLayer::for_axum`].
#[derive(Clone, Debug)]
pub struct AxumRateLimit<S>(RateLimit<S>);

pin_project! {
    /// The future of a response.
    pub struct AxumResponseFuture<F, E> {
        #[pin]
        stage: Stage<F, Body, E>,
    }
}

impl<S> Layer<S> for AxumRateLimitLayer {
    type Service = AxumRateLimit<S>;

    fn layer(&self, inner: S) -> AxumRateLimit<S> {
        AxumRateLimit(self.0.layer(inner))
    }
}

impl<S, Q> Service<Request<Q>> for AxumRateLimit<S>
where
    S: Service<Request<Q>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: 'static,
    Q: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = AxumResponseFuture<S::Future, S::Error>;

    #[inline]
    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_inner(context)
    }

    #[inline]
    fn call(&mut self, request: Request<Q>) -> Self::Future {
        AxumResponseFuture { stage: self.0.enter(request) }
    }
}

impl<F, E> Future for AxumResponseFuture<F, E>
where
    F: Future<Output = Result<Response<Body>, E>>,
    E: 'static,
{
    type Output = Result<Response<Body>, E>;

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.project().stage.poll_response(context)
    }
}

impl Outgoing<Body> for Body {
    #[inline]
    fn inner(body: Body, permit: Option<InFlightPermit>) -> Self {
        match permit {
            None => body,
            // The wrapper observes the end of the body.
            permit => Self::new(ResponseBody::inner(body, permit)),
        }
    }

    /// Without a permit, the response is returned unchanged.
    #[inline]
    fn response(response: Response<Body>, permit: Option<InFlightPermit>) -> Response<Self> {
        match permit {
            None => response,
            permit => response.map(|body| Self::inner(body, permit)),
        }
    }

    fn refusal(text: Bytes) -> Self {
        Self::from(text)
    }
}

impl RateLimitLayer {
    /// Returns the layer for axum routers, where response bodies keep axum's own type. Clients see no difference, but
    /// it saves the box that axum otherwise puts around the body of every response. Call it last, and apply it directly
    /// to a router, a route or another service with axum's body type. Around a layer that changes bodies, such as
    /// compression, use the layer without `for_axum`.
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// use tollgate_tower::RateLimitLayer;
    /// use tollgate::{Limit, Rate, TokenBucket};
    ///
    /// let per_client = Limit::new("per-client", TokenBucket::new(100, Rate::per_second(10)))?;
    /// let limits = RateLimitLayer::per_ip(per_client)?.for_axum();
    /// let app: Router = Router::new().route("/", get(async || "hello")).layer(limits);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn for_axum(self) -> AxumRateLimitLayer {
        AxumRateLimitLayer(self)
    }
}

/// The rejection of a [`LimitDecision`] that the request does not have. It is a programming error, answered with 500.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoLimitDecision;

impl std::fmt::Display for NoLimitDecision {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(
            "no rate limit decision in the request's extensions: call `share_decision` on a `RateLimitLayer` around this \
             handler, or extract `Option<LimitDecision>` if not every request meets a limit",
        )
    }
}

impl std::error::Error for NoLimitDecision {}

impl IntoResponse for NoLimitDecision {
    fn into_response(self) -> axum::response::Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

impl<S: Sync> FromRequestParts<S> for LimitDecision {
    type Rejection = NoLimitDecision;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoLimitDecision> {
        parts.extensions.get::<Self>().cloned().ok_or(NoLimitDecision)
    }
}

impl<S: Sync> OptionalFromRequestParts<S> for LimitDecision {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Option<Self>, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned())
    }
}

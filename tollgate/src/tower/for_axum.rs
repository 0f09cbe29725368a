//! The layer around axum's own bodies, which stay what they are.
//!
//! axum puts every body that is not of its own type into a box, a [`ResponseBody`] too. Its own can be anything already,
//! so the answers of the service pass as they are, and refusals become such bodies.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use bytes::Bytes;
use http::{Request, Response};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::body::Outgoing;
use super::future::Stage;
use super::{RateLimit, RateLimitLayer, ResponseBody};
use crate::gate::{Gate, InFlightPermit};

/// A [`RateLimitLayer`] for axum's routers; see [`RateLimitLayer::for_axum`].
#[derive(Clone, Debug)]
#[must_use]
pub struct AxumRateLimitLayer(pub(super) RateLimitLayer);

impl AxumRateLimitLayer {
    /// The gate, to replace its rules.
    #[must_use]
    pub fn gate(&self) -> &Gate {
        self.0.gate()
    }
}

/// A service of axum's with rate limits around it; see [`RateLimitLayer::for_axum`].
#[derive(Clone, Debug)]
pub struct AxumRateLimit<S>(RateLimit<S>);

pin_project! {
    /// The answer to a request, on its way.
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
            // Somebody has to see when it ends.
            permit => Self::new(ResponseBody::inner(body, permit)),
        }
    }

    /// Nothing is moved where the body stays.
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

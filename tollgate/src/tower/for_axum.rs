//! The layer for axum's own body type.
//!
//! axum boxes every body that is not of its own type, including a [`ResponseBody`]. Its own type can hold anything, so
//! this layer passes the inner service's body through unchanged and builds refusals in that type.

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

/// A [`RateLimitLayer`] for axum routers; see [`RateLimitLayer::for_axum`].
#[derive(Clone, Debug)]
#[must_use]
pub struct AxumRateLimitLayer(pub(super) RateLimitLayer);

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

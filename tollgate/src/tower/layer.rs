//! The layer: puts a gate around a service.

use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Extensions, Response};
use tower_layer::Layer;

use super::{RateLimit, framework};
use crate::error::InvalidLimit;
use crate::gate::{Gate, Outcome};
use crate::limit::Limit;
use crate::rules::{Facts, Finders, KeyPart, Request, Rule, RuleSet};

/// Finds the address of a connection's other end among the extensions of a request.
type FindPeer = Arc<dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync>;

/// Observes the decision about a request.
type OnDecision = Arc<dyn Fn(&Outcome, &Facts<'_>) + Send + Sync>;

/// Makes the response to a refused request out of the usual one.
type RefuseWith = Arc<dyn Fn(&Outcome, &Facts<'_>, Response<Bytes>) -> Response<Bytes> + Send + Sync>;

/// Puts rate limits around a service.
///
/// Around axum's routers, paths are those that the layer sees: inside of `nest`, without the prefix. The name of a route
/// ([`KeyPart::route`]) is axum's matched path, with the feature `axum`.
///
/// The client's address is taken from a [`PeerAddress`](super::PeerAddress) among the request's extensions, with the
/// feature `axum` also from axum's `ConnectInfo` (serve with `into_make_service_with_connect_info::<SocketAddr>()`),
/// or from wherever [`peer_address`](Self::peer_address) says. Requests of unknown address share one key.
#[derive(Clone)]
#[must_use]
pub struct RateLimitLayer(Arc<Limits>);

/// What a layer and all services it made have in common: servers clone a service for every request, so that is one
/// pointer.
#[derive(Clone)]
pub(super) struct Limits {
    pub(super) gate: Gate,
    /// Where to look for the address, if it is not where it usually is.
    find_peer: Option<FindPeer>,
    pub(super) on_decision: Option<OnDecision>,
    pub(super) refuse_with: Option<RefuseWith>,
    /// Whether the decision is put into the extensions of the request.
    pub(super) share_decision: bool,
}

impl Limits {
    /// The address of the connection's other end.
    #[inline]
    pub(super) fn peer(&self, extensions: &Extensions) -> Option<IpAddr> {
        match &self.find_peer {
            None => framework::peer(extensions),
            Some(find) => find(extensions),
        }
    }

    /// What facts find by, where rules ask for it.
    pub(super) fn finders(&self) -> Finders<'_> {
        let usual: &'static (dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync) = &framework::peer;
        Finders { peer: self.find_peer.as_deref().unwrap_or(usual), route: framework::route }
    }
}

impl RateLimitLayer {
    /// The rules of a gate. Keep a clone of the gate to replace its rules while the service runs.
    pub fn new(gate: Gate) -> Self {
        let limits = Limits { gate, find_peer: None, on_decision: None, refuse_with: None, share_decision: false };
        Self(Arc::new(limits))
    }

    /// One limit for each client address; IPv6 by /64.
    ///
    /// # Errors
    ///
    /// When the limiter cannot be built.
    pub fn per_ip(limit: Limit) -> Result<Self, InvalidLimit> {
        Self::of(Rule::new(limit).key(KeyPart::ip()))
    }

    /// One limit for each key that a closure makes of a request. Requests of which it makes none share one key.
    ///
    /// ```
    /// use tollgate::tower::RateLimitLayer;
    /// use tollgate::{Limit, SlidingWindowLog, MINUTE};
    ///
    /// #[derive(Clone)]
    /// struct User(String);
    ///
    /// let limit = Limit::new("per-user", SlidingWindowLog::new(100, MINUTE))?;
    /// let layer = RateLimitLayer::per_key(limit, |request| {
    ///     request.facts().extension::<User>().map(|user| user.0.clone())
    /// })?;
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When the limiter cannot be built.
    pub fn per_key(
        limit: Limit,
        key: impl Fn(&Request<'_>) -> Option<String> + Send + Sync + 'static,
    ) -> Result<Self, InvalidLimit> {
        Self::of(Rule::new(limit).key(KeyPart::custom(key)))
    }

    fn of(rule: Rule) -> Result<Self, InvalidLimit> {
        Ok(Self::new(Gate::in_memory(RuleSet::builder().rule(rule).build()?)?))
    }

    /// Finds the address of the connection's other end among the extensions of a request.
    pub fn peer_address(mut self, find: impl Fn(&Extensions) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.0).find_peer = Some(Arc::new(find));
        self
    }

    /// Puts the decision about each request that a limit applies to into the request's extensions, as a
    /// [`LimitDecision`](super::LimitDecision), before the service is called. Handlers read from it what is left.
    ///
    /// It costs an allocation per request, so it is off by default.
    pub fn share_decision(mut self) -> Self {
        Arc::make_mut(&mut self.0).share_decision = true;
        self
    }

    /// Calls a closure with the decision about every request, allowed or refused, and with what is known of the request:
    /// for metrics and logs. It runs before the service is called, on the thread that serves the request, so it must not
    /// block.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering};
    ///
    /// use tollgate::tower::RateLimitLayer;
    /// use tollgate::{Limit, Rate, TokenBucket};
    ///
    /// let refused = Arc::new(AtomicU64::new(0));
    /// let counter = Arc::clone(&refused);
    /// let per_client = Limit::new("per-client", TokenBucket::new(100, Rate::per_second(10)))?;
    /// let layer = RateLimitLayer::per_ip(per_client)?.on_decision(move |outcome, request| {
    ///     if let Some(reason) = outcome.refusal() {
    ///         counter.fetch_add(1, Ordering::Relaxed);
    ///         eprintln!("{} {} refused: {}", request.method(), request.path(), reason.code());
    ///     }
    /// });
    /// # let _ = layer;
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn on_decision(mut self, observe: impl Fn(&Outcome, &Facts<'_>) + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.0).on_decision = Some(Arc::new(observe));
        self
    }

    /// Makes the response to each refused request. The closure gets the decision, what is known of the request, and the
    /// response that would be sent otherwise, with its status, `Retry-After` and rate limit headers: change it, or return
    /// another.
    ///
    /// gRPC requests are not affected: their refusals are statuses of gRPC.
    ///
    /// ```
    /// use http::header::CONTENT_TYPE;
    /// use http::{HeaderValue, Response};
    /// use tollgate::tower::RateLimitLayer;
    /// use tollgate::{Limit, Rate, TokenBucket};
    ///
    /// let per_client = Limit::new("per-client", TokenBucket::new(100, Rate::per_second(10)))?;
    /// let layer = RateLimitLayer::per_ip(per_client)?.refuse_with(|outcome, _request, usual| {
    ///     let (mut head, _) = usual.into_parts();
    ///     head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/html"));
    ///     let limit = outcome.limit().unwrap_or("this server");
    ///     Response::from_parts(head, format!("<h1>Slow down</h1><p>Limited by {limit}.</p>").into())
    /// });
    /// # let _ = layer;
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn refuse_with(
        mut self,
        respond: impl Fn(&Outcome, &Facts<'_>, Response<Bytes>) -> Response<Bytes> + Send + Sync + 'static,
    ) -> Self {
        Arc::make_mut(&mut self.0).refuse_with = Some(Arc::new(respond));
        self
    }

    /// The same for axum's routers: the bodies of answers stay of axum's own type. It changes nothing that a client could
    /// see, and saves the box that axum puts around the body of every answer otherwise. Call it last. It stands directly
    /// around a router, a route or other services whose bodies are axum's; around what changes bodies, such as a layer that
    /// compresses them, put the layer without it.
    ///
    /// ```
    /// use axum::{Router, routing::get};
    /// use tollgate::tower::RateLimitLayer;
    /// use tollgate::{Limit, Rate, TokenBucket};
    ///
    /// let per_client = Limit::new("per-client", TokenBucket::new(100, Rate::per_second(10)))?;
    /// let limits = RateLimitLayer::per_ip(per_client)?.for_axum();
    /// let app: Router = Router::new().route("/", get(async || "hello")).layer(limits);
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    #[cfg(feature = "axum")]
    pub fn for_axum(self) -> super::AxumRateLimitLayer {
        super::AxumRateLimitLayer(self)
    }

    /// The gate, to replace its rules.
    #[must_use]
    pub fn gate(&self) -> &Gate {
        &self.0.gate
    }
}

impl<S> Layer<S> for RateLimitLayer {
    type Service = RateLimit<S>;

    fn layer(&self, inner: S) -> RateLimit<S> {
        RateLimit::new(inner, Arc::clone(&self.0))
    }
}

impl std::fmt::Debug for RateLimitLayer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("RateLimitLayer").field("gate", &self.0.gate).finish_non_exhaustive()
    }
}

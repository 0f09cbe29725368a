//! The layer, which wraps a service with a gate.

use std::net::IpAddr;
use std::sync::Arc;

use bytes::Bytes;
use http::{Extensions, Response};
use tollgate::{InvalidLimit, Limit};
use tollgate_rules::{Facts, Gate, KeyPart, Outcome, Request, Rule, RuleSet};
use tower_layer::Layer;

use super::limits::{Limits, UnknownAddress};
use super::service::RateLimit;

/// Adds rate limits to a service.
///
/// With the feature `axum`, paths are those that the client sent, also inside `nest`, and the route name
/// ([`KeyPart::route`]) is axum's matched path.
///
/// The client address comes from a [`PeerAddress`](super::PeerAddress) in the request's extensions. With the feature
/// `axum` it can also come from axum's `ConnectInfo` (serve with
/// `into_make_service_with_connect_info::<SocketAddr>()`). Set [`peer_address`](Self::peer_address) to read it from
/// elsewhere. If a rule needs the address and it is unknown, the request is refused with 500, unless
/// [`allow_unknown_address`](Self::allow_unknown_address) is set.
#[derive(Clone)]
#[must_use]
pub struct RateLimitLayer(Arc<Limits>);

impl RateLimitLayer {
    /// Creates a layer with the rules of a gate. Keep a clone of the gate to replace its rules while the service runs.
    pub fn new(gate: Gate) -> Self {
        Self(Arc::new(Limits {
            gate,
            find_peer: None,
            on_decision: None,
            refuse_with: None,
            share_decision: false,
            unknown_address: UnknownAddress::Refuse,
        }))
    }

    /// Creates a layer with one limit per client address. IPv6 addresses are grouped by /64.
    ///
    /// # Errors
    ///
    /// If the limiter cannot be built.
    pub fn per_ip(limit: Limit) -> Result<Self, InvalidLimit> {
        Self::of(Rule::new(limit).key(KeyPart::ip()))
    }

    /// Creates a layer with one limit per key, which a closure derives from the request. Requests for which it returns
    /// `None` share one key.
    ///
    /// ```
    /// use tollgate_tower::RateLimitLayer;
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
    /// If the limiter cannot be built.
    pub fn per_key(
        limit: Limit,
        key: impl Fn(&Request<'_>) -> Option<String> + Send + Sync + 'static,
    ) -> Result<Self, InvalidLimit> {
        Self::of(Rule::new(limit).key(KeyPart::custom(key)))
    }

    fn of(rule: Rule) -> Result<Self, InvalidLimit> {
        Ok(Self::new(Gate::in_memory(RuleSet::builder().rule(rule).build()?)?))
    }

    /// Sets the function that finds the peer address in the extensions of a request.
    pub fn peer_address(mut self, find: impl Fn(&Extensions) -> Option<IpAddr> + Send + Sync + 'static) -> Self {
        Arc::make_mut(&mut self.0).find_peer = Some(Arc::new(find));
        self
    }

    /// Accepts requests whose client address is unknown, such as those over a Unix socket. Rules treat a missing address
    /// as [`Rule::missing`] says: by default, all such requests share one count. No list of networks contains them.
    ///
    /// By default they are refused with 500 if a rule needs the address, and a line on stderr names the fix: a service
    /// that forgets to pass addresses to the layer would let one client use up the quota of all others.
    ///
    /// ```
    /// use tollgate_tower::RateLimitLayer;
    /// use tollgate::{Limit, Rate, TokenBucket};
    ///
    /// let per_client = Limit::new("per-client", TokenBucket::new(100, Rate::per_second(10)))?;
    /// let layer = RateLimitLayer::per_ip(per_client)?.allow_unknown_address();
    /// # Ok::<(), tollgate::InvalidLimit>(())
    /// ```
    pub fn allow_unknown_address(mut self) -> Self {
        Arc::make_mut(&mut self.0).unknown_address = UnknownAddress::Allow;
        self
    }

    /// Inserts the decision about each request that matches a limit into the request's extensions, as a
    /// [`LimitDecision`](super::LimitDecision), before the service is called. Handlers read the remaining quota from
    /// it.
    ///
    /// It costs an allocation per request, so it is off by default.
    pub fn share_decision(mut self) -> Self {
        Arc::make_mut(&mut self.0).share_decision = true;
        self
    }

    /// Calls a closure with the outcome and the facts of every request, allowed or refused, for metrics and logs. It
    /// runs before the service is called, on the thread that serves the request, so it must not block.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicU64, Ordering};
    ///
    /// use tollgate_tower::RateLimitLayer;
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

    /// Sets a closure that builds the response to each refused request. It gets the outcome, the facts of the request,
    /// and the default response with its status, `Retry-After` and rate limit headers. Modify that response, or return
    /// another one.
    ///
    /// gRPC requests are not affected: they are refused with a gRPC status.
    ///
    /// ```
    /// use http::header::CONTENT_TYPE;
    /// use http::{HeaderValue, Response};
    /// use tollgate_tower::RateLimitLayer;
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

    /// Returns the gate, for example to replace its rules.
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

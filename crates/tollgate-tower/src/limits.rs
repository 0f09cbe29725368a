//! The settings of a layer, shared by its services: how facts are found in a request, and who sees the decision.

use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::sync::{Arc, Once};

use bytes::Bytes;
use http::{Extensions, Request, Response, Uri};
use tollgate::Decision;
use tollgate_http::internal::UNKNOWN_ADDRESS;
use tollgate_rules::internal::layer::Finders;
use tollgate_rules::{Facts, Gate, Outcome, RuleSet};

/// Finds the peer address in the extensions of a request.
type FindPeer = Arc<dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync>;

/// Observes the decision about a request.
type OnDecision = Arc<dyn Fn(&Outcome, &Facts<'_>) + Send + Sync>;

/// Builds the response to a refused request from the default one.
type RefuseWith = Arc<dyn Fn(&Outcome, &Facts<'_>, Response<Bytes>) -> Response<Bytes> + Send + Sync>;

/// Shared by a layer and all services it created. Servers clone a service for every request, so the clone copies one
/// pointer.
#[derive(Clone)]
pub(super) struct Limits {
    pub(super) gate: Gate,
    /// Finds the peer address, if it is not in the usual extension.
    pub(super) find_peer: Option<FindPeer>,
    pub(super) on_decision: Option<OnDecision>,
    pub(super) refuse_with: Option<RefuseWith>,
    /// `true` to insert decisions into the extensions of requests.
    pub(super) share_decision: bool,
    pub(super) unknown_address: UnknownAddress,
}

/// What happens to a request if a rule needs the address of its client and it is unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnknownAddress {
    /// It is refused. Otherwise one client could use up the only count, and deny the service to all others.
    Refuse,
    /// The rule treats the address like any other missing part of a key.
    Allow,
}

impl Limits {
    /// Returns the address of the peer.
    #[inline]
    pub(super) fn peer(&self, extensions: &Extensions) -> Option<IpAddr> {
        match &self.find_peer {
            None => peer(extensions),
            Some(find) => find(extensions),
        }
    }

    /// Returns the functions by which facts find the peer address and the route, if rules need them.
    fn finders(&self) -> Finders<'_> {
        let usual: &'static (dyn Fn(&Extensions) -> Option<IpAddr> + Send + Sync) = &peer;
        Finders { peer: self.find_peer.as_deref().unwrap_or(usual), route }
    }

    /// Returns the facts of a request.
    #[inline]
    pub(super) fn facts<'a, B>(&'a self, request: &'a Request<B>) -> Facts<'a> {
        let uri = original_uri(request.extensions()).unwrap_or(request.uri());
        // `CONNECT` has no path.
        let path = if uri.path().is_empty() { "/" } else { uri.path() };
        let facts = Facts::of_parts(request.method().as_str(), path, uri.query())
            .headers(request.headers())
            .extensions(request.extensions())
            .finders(self.finders());
        let facts = match self.unknown_address {
            UnknownAddress::Refuse => facts.requiring_address(),
            UnknownAddress::Allow => facts,
        };
        match uri.authority() {
            Some(authority) => facts.authority(authority.as_str(), uri.scheme_str()),
            None => facts,
        }
    }

    /// Inserts the decision into the extensions of a request, if the layer shares decisions.
    #[inline]
    pub(super) fn insert_decision<B>(&self, outcome: &Outcome, request: &mut Request<B>) {
        if self.share_decision
            && let Some(decision) = LimitDecision::of(outcome)
        {
            request.extensions_mut().insert(decision);
        }
    }

    /// Returns `true` if the layer only enforces decisions, so the fast path can skip the full outcome.
    #[inline]
    pub(super) fn needs_no_outcome(&self) -> bool {
        self.on_decision.is_none() && !self.share_decision
    }
}

/// Returns the peer address: a [`PeerAddress`] or, with the feature `axum`, axum's `ConnectInfo`.
fn peer(extensions: &Extensions) -> Option<IpAddr> {
    let given = extensions.get::<PeerAddress>().map(|peer| peer.0.ip());
    #[cfg(feature = "axum")]
    let given =
        given.or_else(|| extensions.get::<axum::extract::ConnectInfo<SocketAddr>>().map(|connected| connected.0.ip()));
    given
}

/// Logs once per process that limits by address refuse requests, with the fix.
///
/// It is written to stderr, because a service whose log is not set up yet must see it too. It is the only line that the
/// library writes there: a service that makes this mistake answers every request with 500.
#[cold]
pub(super) fn report_unknown_address() {
    static REPORT: Once = Once::new();
    #[expect(clippy::print_stderr, reason = "the mistake must not go unnoticed, whichever log the service has")]
    REPORT.call_once(|| eprintln!("tollgate: requests are refused with 500: {UNKNOWN_ADDRESS}"));
}

/// Returns the target that the client sent. Inside `nest`, axum removes the prefix of the path from the request's own.
#[cfg(feature = "axum")]
fn original_uri(extensions: &Extensions) -> Option<&Uri> {
    extensions.get::<axum::extract::OriginalUri>().map(|original| &original.0)
}

/// Only axum changes the targets of requests, which needs the feature `axum`.
#[cfg(not(feature = "axum"))]
fn original_uri(_: &Extensions) -> Option<&Uri> {
    None
}

/// Returns the path of the matched route, as registered with axum's router: `/users/{id}`.
#[cfg(feature = "axum")]
fn route(extensions: &Extensions) -> Option<&str> {
    extensions.get::<axum::extract::MatchedPath>().map(axum::extract::MatchedPath::as_str)
}

/// Routes are known only with the feature `axum`.
#[cfg(not(feature = "axum"))]
fn route(_: &Extensions) -> Option<&str> {
    None
}

/// The peer address of a connection. Insert it into the extensions of each request if your server has no extension type
/// for it.
///
/// ```
/// use tollgate_tower::PeerAddress;
///
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(PeerAddress("192.0.2.7:50312".parse()?));
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAddress(pub SocketAddr);

/// The decision about a request, in the request's extensions; see
/// [`RateLimitLayer::share_decision`](super::RateLimitLayer::share_decision).
///
/// It dereferences to [`Decision`], so a handler can call [`remaining`](Decision::remaining) or
/// [`reset_after`](Decision::reset_after). With the feature `axum` it is an extractor. Use `Option<LimitDecision>` if
/// some requests match no limit.
///
/// ```
/// # #[cfg(feature = "axum")]
/// # fn example() -> Result<axum::Router, tollgate::InvalidLimit> {
/// use axum::Router;
/// use axum::routing::get;
/// use tollgate_tower::{LimitDecision, RateLimitLayer};
/// use tollgate::{Limit, Rate, TokenBucket};
///
/// async fn left(decision: LimitDecision) -> String {
///     format!("{} of {} left by {}", decision.remaining(), decision.quota(), decision.limit_name())
/// }
///
/// let per_client = Limit::new("per-client", TokenBucket::new(100, Rate::per_second(10)))?;
/// let limits = RateLimitLayer::per_ip(per_client)?.share_decision().for_axum();
/// let app = Router::new().route("/", get(left)).layer(limits);
/// # Ok(app)
/// # }
/// ```
#[derive(Clone)]
pub struct LimitDecision {
    rules: RuleSet,
    decision: Decision,
}

impl LimitDecision {
    fn of(outcome: &Outcome) -> Option<Self> {
        let decision = *outcome.decision()?;
        decision.limit()?;
        Some(Self { rules: outcome.rules().clone(), decision })
    }

    /// Returns the name of the limit that decided. Of several limits, it is the one with the smallest share of its
    /// quota left.
    #[must_use]
    pub fn limit_name(&self) -> &str {
        self.decision.limit().map_or("", |limit| self.rules.name(self.rules.owner(limit)))
    }
}

impl Deref for LimitDecision {
    type Target = Decision;

    fn deref(&self) -> &Decision {
        &self.decision
    }
}

impl std::fmt::Debug for LimitDecision {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("LimitDecision")
            .field("limit_name", &self.limit_name())
            .field("decision", &self.decision)
            .finish_non_exhaustive()
    }
}

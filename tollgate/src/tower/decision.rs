//! The decision about a request, for its handler.

use std::ops::Deref;

use http::Request;

use super::layer::Limits;
use crate::decision::Decision;
use crate::gate::Outcome;
use crate::rules::RuleSet;

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
/// use tollgate::tower::{LimitDecision, RateLimitLayer};
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

impl Limits {
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

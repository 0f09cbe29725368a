//! Rate limits for any [tower](https://docs.rs/tower) service: axum, hyper, tonic.
//!
//! A limit per client takes two lines (`docs/middleware.md` in the repository has complete servers):
//!
//! ```
//! use tollgate::tower::RateLimitLayer;
//! use tollgate::{Limit, Rate, TokenBucket};
//!
//! # fn example() -> Result<(), tollgate::InvalidLimit> {
//! let per_client = Limit::new("per-client", TokenBucket::new(100, Rate::per_second(10)))?;
//! let layer = RateLimitLayer::per_ip(per_client)?;
//! // axum: Router::new().route(…).layer(layer.for_axum())
//! # let _ = layer;
//! # Ok(())
//! # }
//! ```
//!
//! A denied request never reaches the inner service. The response is built by [`crate::http`]. gRPC clients get the
//! status `RESOURCE_EXHAUSTED` with retry information.
//!
//! The layer can do more than deny:
//!
//! - [`share_decision`](RateLimitLayer::share_decision): handlers read the remaining quota from a [`LimitDecision`].
//! - [`on_decision`](RateLimitLayer::on_decision): a closure observes every decision, for metrics and logs.
//! - [`refuse_with`](RateLimitLayer::refuse_with): a closure builds the response to refused requests.
//!
//! A denied request is answered at once, even if the inner service is not ready. An allowed request waits for the
//! service. If it is dropped before the service is called, the units it took are refunded.
//!
//! A limit on requests in flight counts a request until the body of its response ends. With the feature `axum`, a
//! WebSocket, or any other connection that a handler takes over from hyper, counts until the handler drops the
//! connection.

mod cost;
#[cfg(feature = "axum")]
mod for_axum;
mod future;
mod layer;
mod limits;
mod service;
#[cfg(feature = "axum")]
mod tunnel;

pub use self::cost::ActualCost;
#[cfg(feature = "axum")]
pub use self::for_axum::{AxumRateLimit, AxumRateLimitLayer, AxumResponseFuture, NoLimitDecision};
pub use self::future::{ResponseBody, ResponseFuture};
pub use self::layer::RateLimitLayer;
pub use self::limits::{LimitDecision, PeerAddress};
pub use self::service::RateLimit;

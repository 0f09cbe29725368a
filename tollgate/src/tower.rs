//! Rate limits around any [tower](https://docs.rs/tower) service: axum, hyper, tonic.
//!
//! Two lines for the simple case:
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
//! A denied request never reaches the service inside. What the client is reported is in [`crate::http`]; gRPC clients
//! get a status `RESOURCE_EXHAUSTED` with retry information.
//!
//! The layer can do more than deny:
//!
//! - [`share_decision`](RateLimitLayer::share_decision): handlers see what is left, as a [`LimitDecision`].
//! - [`on_decision`](RateLimitLayer::on_decision): a closure sees every decision, for metrics and logs.
//! - [`refuse_with`](RateLimitLayer::refuse_with): a closure makes the response to refused requests.
//!
//! A denied request is answered at once, even while the service inside is not ready. An admitted request waits for the
//! service, and gets back what it took from its limits if it is dropped before the service is called.
//!
//! A request that a limit on requests in flight counts holds its permit until the body of its answer is over. With the
//! feature `axum`, a WebSocket, or another connection that a handler takes over from hyper, holds it until the handler
//! drops the connection.

mod body;
mod decision;
#[cfg(feature = "axum")]
mod extract;
#[cfg(feature = "axum")]
mod for_axum;
#[cfg(not(feature = "axum"))]
#[path = "tower/framework_any.rs"]
mod framework;
#[cfg(feature = "axum")]
#[path = "tower/framework_axum.rs"]
mod framework;
mod future;
mod layer;
mod peer;
mod service;
#[cfg(feature = "axum")]
mod tunnel;

pub use self::body::ResponseBody;
pub use self::decision::LimitDecision;
#[cfg(feature = "axum")]
pub use self::extract::NoLimitDecision;
#[cfg(feature = "axum")]
pub use self::for_axum::{AxumRateLimit, AxumRateLimitLayer, AxumResponseFuture};
pub use self::future::ResponseFuture;
pub use self::layer::RateLimitLayer;
pub use self::peer::PeerAddress;
pub use self::service::{ActualCost, RateLimit};

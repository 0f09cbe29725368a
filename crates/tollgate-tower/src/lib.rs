//! Rate limits for any [tower](https://docs.rs/tower) service: axum, hyper, tonic.
//!
//! A limit per client takes two lines (`docs/middleware.md` in the repository has complete servers):
//!
//! ```
//! use tollgate_tower::RateLimitLayer;
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
//! A denied request never reaches the inner service. The response is built by [`tollgate_http`]. gRPC clients get the
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
//!
//! # Why it is separate
//!
//! The layer is the only part of Tollgate that knows tower. It decides nothing by itself: it collects the facts of a
//! request, asks a [`Gate`](tollgate_rules::Gate), and passes the request on or answers it. There is deliberately no server in
//! it, no store, and neither TLS nor a gRPC library: responses to gRPC clients need only headers.
#![cfg_attr(feature = "axum", doc = "")]
#![cfg_attr(
    feature = "axum",
    doc = "[`recipes`] has examples: your own 429, the remaining quota in a handler, plans, a fake clock, tests."
)]
// Shows on each item the feature that it needs. Only docs.rs sets `docsrs`, with a nightly compiler.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![forbid(unsafe_code)]

mod cost;
#[cfg(feature = "axum")]
mod for_axum;
mod future;
mod layer;
mod limits;
#[cfg(all(feature = "axum", any(doc, doctest)))]
pub mod recipes;
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
pub use tollgate;
pub use tollgate_rules;

#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../README.md")]
struct Readme;

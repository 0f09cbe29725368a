//! HTTP responses: rate limit headers, and the response to a refused request.
//!
//! ```
//! use http::{HeaderMap, Response};
//! use tollgate_http::{Body, Families, Policy, Refusal, RefusalBuilder};
//! use tollgate::{Limit, Limiter, Rate, TokenBucket};
//!
//! let limit = Limit::new("per-user", TokenBucket::new(1, Rate::per_minute(1)))?;
//! let policy = Policy::new(&limit, Families::default());
//! let limiter = Limiter::new(limit);
//!
//! let mut allowed = Response::new("hello");
//! policy.merge(&limiter.check("ann"), allowed.headers_mut());
//! assert_eq!(allowed.headers()["x-ratelimit-remaining"], "0");
//!
//! let decision = limiter.check("ann");
//! let refusal = Refusal::of(&decision).expect("the only token is spent");
//! let request = HeaderMap::new();
//! let refused = RefusalBuilder::new(&refusal).limit(&policy).decision(&decision).response(&Body::Json, &request);
//! assert_eq!(refused.status(), 429);
//! assert_eq!(refused.headers()["retry-after"], "60");
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! The gateway, the decision service and the tower layer all build their responses here, so clients see no difference
//! between them. Parts that are the same for every request are formatted once, in a [`Policy`] and a [`Body`].
//!
//! This is a separate crate because a limiter needs no HTTP, and because all servers should send the same responses.
//! Deliberately not here: a server, a clock, async code, and the decision whether to refuse.

#![forbid(unsafe_code)]

mod body;
mod cors;
mod families;
mod fields;
mod grpc;
mod headers;
#[doc(hidden)]
pub mod internal;
mod policy;
mod refusal;
mod response;

use std::time::Duration;

pub use self::body::{Body, Template};
pub use self::cors::Cors;
pub use self::families::{Families, HeaderFamily, InvalidResponse};
pub use self::grpc::is_grpc;
pub use self::headers::Headers;
pub use self::policy::Policy;
pub use self::refusal::{Refusal, RefusalBuilder, TokenError, UnreadableRequest};
pub use tollgate;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Returns whole seconds, rounded up, so that a client that waits this long has waited long enough.
fn seconds(span: Duration) -> u64 {
    span.as_secs().saturating_add(u64::from(span.subsec_nanos() > 0))
}

/// Returns the value of `Retry-After`, which is at least 1: with `Retry-After: 0`, all clients would retry at once.
fn wait_seconds(wait: Duration) -> u64 {
    seconds(wait).max(1)
}

//! What an HTTP client is told: the headers of an answer, and the answer to a request that is refused.
//!
//! ```
//! use http::{HeaderMap, Response};
//! use tollgate::http::{Answer, Body, Families, Policy, Refusal};
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
//! let asked = HeaderMap::new();
//! let refused = Answer::new(&refusal).limit(&policy).decision(&decision).response(&Body::Json, &asked);
//! assert_eq!(refused.status(), 429);
//! assert_eq!(refused.headers()["retry-after"], "60");
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! Every surface that speaks HTTP answers through this module, so that a client cannot tell them apart. What does
//! not change from request to request is written once, in a [`Policy`] and a [`Body`].
//!
//! Deliberately not here: a server, a clock, anything asynchronous, and any choice about whether to refuse.

mod accept;
pub(crate) mod answer;
mod body;
mod error;
mod families;
pub(crate) mod forwarding;
mod grpc;
pub(crate) mod headers;
mod lines;
mod policy;
mod problem;
mod refusal;
pub(crate) mod reused_response;
mod template;
mod token;
mod upstream;
mod values;

use std::time::Duration;

pub use self::answer::Answer;
pub use self::body::Body;
pub use self::error::InvalidAnswer;
pub use self::families::{Families, HeaderFamily};
pub use self::grpc::is_grpc;
pub use self::headers::Headers;
pub use self::policy::Policy;
pub use self::refusal::{Refusal, UnreadableRequest};
pub use self::template::Template;
#[cfg(feature = "rules")]
pub(crate) use self::token::Challenge;
pub use self::token::TokenError;

/// Whole seconds, rounded up: a client that waits them has waited long enough.
fn seconds(span: Duration) -> u64 {
    span.as_secs().saturating_add(u64::from(span.subsec_nanos() > 0))
}

/// What `Retry-After` says. A wait of less than a second is still a wait: `Retry-After: 0` asks for a storm.
fn wait_seconds(wait: Duration) -> u64 {
    seconds(wait).max(1)
}

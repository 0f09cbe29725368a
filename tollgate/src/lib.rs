//! Exact, fast and bounded rate limiting.
//!
//! ```
//! use tollgate::{Limit, Limiter, Rate, TokenBucket};
//!
//! let limiter = Limiter::new(Limit::new("per-user", TokenBucket::new(10, Rate::per_second(1)))?);
//! let decision = limiter.check("user:42");
//! if !decision.is_allowed() {
//!     println!("try again in {:?}", decision.retry_after());
//! }
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! - A [`Limit`] is a name and one of five algorithms with checked numbers: [`TokenBucket`], [`LeakyBucket`],
//!   [`FixedWindow`], [`SlidingWindowLog`] or [`SlidingWindowCounter`].
//! - A [`Limiter`] holds one or more limits and the state of every key in memory. [`Limiter::check`] checks all of its
//!   limits for one key. [`Limiter::decide_now`] checks any set of [`Hit`]s, all or nothing. Neither needs a runtime.
//! - A [`Decision`] says whether the request is allowed, which limit decided, the remaining quota, and the exact time
//!   to wait.
//! - Other operations are [`peek`](Limiter::peek), [`refund`](Limiter::refund), [`reset`](Limiter::reset) and, for
//!   costs that are known only afterwards, [`reserve`](Limiter::reserve) and [`settle`](Limiter::settle). With the
//!   feature `tokio`, `until_ready` waits for quota.
//! - `RedisLimiter` (feature `redis`) shares limits between processes and has the same operations. Code that is generic
//!   over [`RateLimiter`] works with both.
//!
//! # Guarantees
//!
//! - A limit is never exceeded, whatever the concurrency, the clock or the number of keys.
//! - A denied request takes nothing from any limit.
//! - `retry_after` is exact to the microsecond.
//! - Memory stays within a bound that you set, even under attack: see [`LimiterBuilder::max_memory`].
//! - Rates are exact ratios, so nothing drifts over time.
//!
//! # When to use rules and a `Gate`
//!
//! Use a [`Limiter`] if your code knows the limit and the key of each call: a job queue, a client of someone else's
//! API, a single endpoint. Move to rules and a `Gate` (crate `tollgate-rules`) once the limits depend on the request: several
//! routes with their own limits, keys from headers, tokens or addresses, plans, exemptions, block lists and bans. A
//! `Gate` is a set of rules with a store. It finds the limits of a request, checks them all or nothing, writes the HTTP
//! response, and replaces its rules while it runs without losing counts. The crate `tollgate-tower` puts a gate in front
//! of any `tower::Service`, and `tollgate-config` reads rules from the same YAML file as the gateway.
//!
//! # Where to read on
//!
//! These pages are in the folder `docs` of the source repository, and `make docs` builds them into a site:
//!
//! - `library.md`: how to limit calls inside a Rust program
//! - `middleware.md`: how to limit requests to a tower service
//! - `algorithms.md`: how to choose an algorithm
//! - `redis.md`: how to share limits through Redis
//! - `rules.md`: the reference of the rule file

// Shows on each item the feature that it needs. Only docs.rs sets `docsrs`, with a nightly compiler.
#![cfg_attr(docsrs, feature(doc_cfg))]

mod algorithm;
mod budget;
mod clock;
mod decision;
mod error;
#[doc(hidden)]
pub mod internal;
mod invisible;
mod key;
mod limit;
mod limit_set;
mod limiter;
mod open_charges;
mod rate;
mod rate_limiter;
#[cfg(feature = "redis")]
pub mod redis;
mod store;
mod sync;
mod units;
#[cfg(feature = "tokio")]
mod wait;

pub use algorithm::{Algorithm, Ban, FixedWindow, LeakyBucket, SlidingWindowCounter, SlidingWindowLog, TokenBucket};
pub use clock::{Clock, ManualClock};
pub use decision::{Decision, DenialReason, Denied, InvalidHits, LimitId, Source};
pub use error::InvalidLimit;
pub use key::Key;
pub use limit::{Consistency, Limit, OnStoreFailure};
pub use limit_set::LimitSet;
pub use limiter::reservation::{Reservation, Settlement};
pub use limiter::{Hit, Limiter, LimiterBuilder, RestoreError, Restored};
pub use rate::Rate;
pub use rate_limiter::RateLimiter;
pub use store::memory::{Occupancy, Overflow};
pub use units::{DAY, HOUR, MAX_SPAN, MIN_SPAN, MINUTE, SECOND, Timestamp};
#[cfg(feature = "tokio")]
pub use wait::Wait;
